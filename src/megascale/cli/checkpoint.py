"""`megascale checkpoint`: inspect, verify, prune and convert saved checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import JSON, make_console, print_json
from megascale.core import run_lock
from megascale.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from megascale.checkpoint.format.verify import Summary

_MAX_TEXT_CHARACTERS = 2000  # a longer text of a checkpoint is cut when it is printed
_MAX_LISTED_TENSORS = 40
_MAX_LISTED_DAMAGED_TENSORS = 6

SOURCE = typer.Argument(
    ..., help="A run folder, its checkpoints folder, or one step-N folder (path or URL).", show_default=False
)
TARGET = typer.Argument(..., help="Checkpoints folder to write step-N into (path or URL).", show_default=False)
STEP = typer.Option(None, help="Step to read; default: the newest.")

commands = typer.Typer(no_args_is_help=True, help="Inspect, verify, prune and convert saved checkpoints.")


def register(app: typer.Typer) -> None:
    """Add `megascale checkpoint`."""
    app.add_typer(commands, name="checkpoint")


@commands.command()
def inspect(
    path: str = SOURCE,
    all_tensors: bool = typer.Option(
        False, "--all", help=f"List every tensor; default: the first {_MAX_LISTED_TENSORS}."
    ),
    as_json: bool = JSON,
) -> None:
    """Show the contents of a checkpoint: tensors, shapes, types, bytes, step, samples, configuration, completeness.

    Reads the index only, so it is quick for any size.

    Example: megascale checkpoint inspect runs/first
    """

    from megascale.checkpoint.format.step_folders import find_steps, step_name
    from megascale.checkpoint.format.verify import summarise_step

    storage, steps = find_steps(path)
    summaries = [summarise_step(storage, step) for step in steps]
    # A training that runs at the same time may remove a checkpoint during the inspection, which then looks damaged.
    present_summaries = [summary for summary in summaries if summary.committed or storage.list(step_name(summary.step))]
    summaries = present_summaries or summaries
    # Sort by the order of the saves. It differs from that of the steps once training has resumed at an older step.
    summaries.sort(key=lambda summary: (summary.committed, summary.sequence, summary.step))
    newest = summaries[-1]
    differences = _find_differences(path, newest)
    if as_json:
        record = asdict(newest) | {"differences": differences}
        record["checkpoints"] = [
            {
                "step": summary.step,
                "committed": summary.committed,
                "problem": summary.problem,
                "bytes": summary.bytes,
            }
            for summary in summaries
        ]
        print_json(record)
        return
    console = make_console()
    console.print(_make_checkpoints_table(summaries))
    if newest.committed:
        limit = len(newest.tensors) if all_tensors else _MAX_LISTED_TENSORS
        console.print(_make_tensor_table(newest, limit))
        _print_state(newest, differences, console, has_config_file=_find_config_file(path) is not None)


def _print_state(
    summary: Summary, differences: dict[str, tuple[Any, Any]], console: Console, *, has_config_file: bool
) -> None:
    """Print the values of a checkpoint's state, and how its configuration differs from config.toml."""
    for key, value in summary.state.items():
        if isinstance(value, str | int | float | bool):
            console.print(_escape(f"{key}: {value}"), highlight=False)
    for key, (saved, present) in differences.items():
        values = _escape(f"{saved} in the checkpoint, {present} in config.toml")
        console.print(f"[yellow]{_escape(key)}[/]: {values}", highlight=False)
    if not differences and summary.state.get("config"):
        if has_config_file:
            console.print("configuration: as in config.toml")
        else:
            console.print("configuration: saved, without config.toml")


def _escape(text: str) -> str:
    """Return a text of an untrusted checkpoint for printing, without rich's markup and control characters."""
    from rich.markup import escape

    plain = ""
    for character in text[:_MAX_TEXT_CHARACTERS]:
        if character.isprintable():
            plain += character
        else:
            plain += repr(character)[1:-1]  # such as \x1b, without the quotation marks
    if len(text) > _MAX_TEXT_CHARACTERS:
        plain += " ..."
    if plain.endswith("\\"):
        return escape(plain) + " "  # a backslash would escape the markup that follows the text
    return escape(plain)


def _make_checkpoints_table(summaries: list[Summary]) -> Table:
    from rich.table import Table

    table = Table("step", "state", "bytes", "tensors", "folder", title="checkpoints")
    for summary in sorted(summaries, key=lambda summary: summary.step):
        state = "[green]committed[/]"
        if not summary.committed:
            state = f"[red]not usable[/]: {_escape(summary.problem or '')}"
        table.add_row(str(summary.step), state, f"{summary.bytes:,}", str(len(summary.tensors)), _escape(summary.path))
    return table


def _make_tensor_table(summary: Summary, limit: int) -> Table:
    from rich.table import Table

    tensors = summary.tensors
    table = Table("tensor", "shape", "dtype", "bytes", "chunks", title=f"step {summary.step}")
    table.columns[1].no_wrap = True  # the sizes of a tensor are one word
    for tensor in tensors[:limit]:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        table.add_row(_escape(tensor.name), shape, tensor.dtype, f"{tensor.bytes:,}", str(tensor.chunks))
    hidden = tensors[limit:]
    if hidden:
        hidden_bytes = sum(tensor.bytes for tensor in hidden)
        table.add_row(f"... {len(hidden)} more (--all)", "", "", f"{hidden_bytes:,}", "")
    table.add_section()
    total_bytes = sum(tensor.bytes for tensor in tensors)
    total_chunks = sum(tensor.chunks for tensor in tensors)
    table.add_row(f"{len(tensors)} tensors", "", "", f"{total_bytes:,}", str(total_chunks))
    return table


def _find_config_file(path: str) -> Path | None:
    """Return the run's config.toml for a path to the run folder or to a folder in it."""
    for folder in (Path(path), *Path(path).resolve().parents[:2]):
        if (folder / "config.toml").is_file():
            return folder / "config.toml"
    return None


def _find_differences(path: str, summary: Summary) -> dict[str, tuple[Any, Any]]:
    """Return (value in the checkpoint, value in config.toml) of each setting that differs, by section.key."""
    from megascale.config.text_files import read_toml

    file = _find_config_file(path)
    saved = summary.state.get("config")
    if file is None or not isinstance(saved, dict):
        return {}
    try:
        present = read_toml(file, "the configuration of the run")
    except ConfigError as error:
        typer.echo(f"note: settings are not compared: {error}", err=True)
        return {}
    differences = {}
    for section in sorted(saved.keys() | present.keys()):
        saved_section = _as_dict(saved.get(section))
        present_section = _as_dict(present.get(section))
        for key in sorted(saved_section.keys() | present_section.keys()):
            saved_value = saved_section.get(key)
            present_value = present_section.get(key)
            if saved_value != present_value and not (saved_value == {} and present_value is None):
                differences[f"{section}.{key}"] = (saved_value, present_value)
    return differences


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@commands.command()
def verify(path: str = SOURCE, as_json: bool = JSON) -> None:
    """Read every byte of the checkpoints and compare it with the checksums. Exit code 4 if any is damaged.

    Example: megascale checkpoint verify runs/first
    """
    from rich.table import Table

    from megascale.checkpoint.format.step_folders import find_steps
    from megascale.checkpoint.format.verify import verify as verify_step

    storage, steps = find_steps(path)
    verdicts = []
    for step in steps:
        with _progress(f"step {step}") as update:
            verdict = verify_step(storage, step, lambda done, total: update(completed=done, total=total))
        if not verdict.removed:  # A running training may have removed the checkpoint meanwhile.
            verdicts.append(verdict)
    if as_json:
        print_json([vars(verdict) | {"tensors": sorted(verdict.tensors)} for verdict in verdicts])
    else:
        table = Table("step", "verdict", "bytes read", "affected tensors")
        for verdict in verdicts:
            if verdict.problems:
                result = f"[red]{_escape('; '.join(verdict.problems))}"
            else:
                result = "[green]as written"
            tensors = _escape(", ".join(sorted(verdict.tensors)[:_MAX_LISTED_DAMAGED_TENSORS]))
            table.add_row(str(verdict.step), result, f"{verdict.bytes:,}", tensors)
        make_console().print(table)
    damaged = [str(verdict.step) for verdict in verdicts if verdict.problems]
    if damaged:
        raise DataError(
            f"{len(damaged)} of {len(verdicts)} checkpoints in {path!r} are not complete: step {', '.join(damaged)}; "
            "training resumes from the newest complete one"
        )


@commands.command()
def prune(
    path: str = typer.Argument(..., help="A run folder or its checkpoints folder (path or URL).", show_default=False),
    keep: int = typer.Option(1, min=1, help="Number of committed checkpoints to keep, newest first."),
) -> None:
    """Remove old checkpoints and the files of failed saves. Refused (exit code 2) while the run is training.

    The checkpoints to keep are read completely first: a damaged one does not count, and an older one is kept instead.
    If a step-N folder is a link, the link is removed and its target stays unchanged.

    Example: megascale checkpoint prune runs/first --keep 1
    """
    from megascale.checkpoint.format.step_folders import find_steps, list_linked_steps, list_steps, steps
    from megascale.checkpoint.format.step_folders import prune as prune_steps
    from megascale.checkpoint.format.verify import verify as verify_step

    storage, existing = find_steps(path)
    with _lock_runs("megascale checkpoint prune", path, storage.url):
        links = list_linked_steps(storage)
        is_sound = lambda commit: not verify_step(storage, commit.step).problems
        removed = prune_steps(storage, keep, is_sound=is_sound, remove_links=True)
        committed = steps(storage)
        remaining = list_steps(storage)  # step folders with or without a commit
    if not committed:
        raise DataError(
            f"no checkpoint in {path!r} is complete, so nothing was removed; see megascale checkpoint inspect"
        )
    deleted = [step for step in removed if step not in links]
    unlinked = [step for step in removed if step in links]
    half_written = sorted(set(existing) - set(remaining) - set(removed))
    message = f"removed steps {deleted or 'none'}"
    if half_written:
        message += f"; removed half-written steps {half_written}"
    if unlinked:
        message += f"; removed the links of steps {unlinked}, whose target folders stay"
    typer.echo(f"{message}; kept {committed}")


@commands.command(name="export")
def export_(
    path: str = SOURCE,
    target: Path = typer.Argument(
        ..., help="Folder for .safetensors files, or a file ending in .pt.", show_default=False
    ),
    step: int | None = STEP,
    only: str = typer.Option("model.", help="Export tensors whose names have this prefix, which is removed."),
    shard_gb: float = typer.Option(5.0, min=0.001, help="Largest .safetensors file, in 10^9 bytes."),
) -> None:
    """Write the weights as safetensors (or one torch file): complete tensors, independent of the layout.

    Example: megascale checkpoint export runs/first exported
    """
    from megascale.checkpoint.complete_checkpoint import open_checkpoint
    from megascale.checkpoint.conversion import export_safetensors, export_torch

    if target.suffix in (".safetensors", ".pth", ".bin", ".ckpt") and not target.is_dir():
        raise ConfigError(
            f"{str(target)!r} is the name of a file, and the export makes a folder of .safetensors files; use "
            f"{str(target.with_suffix(''))!r}, or {str(target.with_suffix('.pt'))!r} for a torch file"
        )
    source = open_checkpoint(path, step)
    names = {name: name.removeprefix(only) for name in source.tensors if name.startswith(only)}
    if not names:
        prefixes = sorted({name.split(".")[0] + "." for name in source.tensors})
        raise ConfigError(f"no tensor of the checkpoint begins with --only={only!r}; use one of {', '.join(prefixes)}")
    if target.suffix == ".pt":
        files = [export_torch(source, target, names)]
    else:
        with _progress("export") as update:
            describe = lambda text: update(description=text)
            files = export_safetensors(source, target, names, int(shard_gb * 1e9), describe)
    typer.echo(f"step {source.commit.step}: {len(names)} tensors to {', '.join(map(str, files))}")


@commands.command(name="import")
def import_(
    source: Path = typer.Argument(
        ...,
        help=".safetensors file or folder of them, torch file, or torch distributed checkpoint.",
        show_default=False,
    ),
    target: str = TARGET,
    step: int = typer.Option(0, min=0, help="Step number of the new checkpoint."),
    prefix: str = typer.Option("model.", help="Prefix to add to each tensor's name."),
) -> None:
    """Make a checkpoint of tensors in another format. Only tensors are unpickled.

    Example: megascale checkpoint import weights.safetensors runs/new/checkpoints
    """
    from megascale.checkpoint.conversion import read_foreign_tensors, write_checkpoint
    from megascale.checkpoint.storage.opening import open_storage

    foreign = read_foreign_tensors(source, prefix)
    tensors, _ = foreign
    state = {"step": step, "imported_from": str(source)}
    with _progress("import") as update, _lock_runs("megascale checkpoint import", target):
        describe = lambda text: update(description=text)
        size = write_checkpoint(open_storage(target), step, foreign, state, files=1, on_file=describe)
    typer.echo(f"{len(tensors)} tensors, {size:,} bytes, committed as {target}/step-{step}")


@commands.command()
def reshard(
    path: str = SOURCE,
    target: str = TARGET,
    files: int = typer.Option(1, min=1, help="Number of data files of the new checkpoint."),
    step: int | None = STEP,
) -> None:
    """Copy a checkpoint into another number of files, or to other storage, and verify it on the way.

    Loading needs no resharding: any layout loads any checkpoint. Use it for many small files, or for copies.

    Example: megascale checkpoint reshard runs/first s3://bucket/first --files 8
    """
    from megascale.checkpoint.complete_checkpoint import open_checkpoint
    from megascale.checkpoint.conversion import as_source, write_checkpoint
    from megascale.checkpoint.storage.opening import open_storage

    source = open_checkpoint(path, step)
    new_step = source.commit.step
    with _progress("reshard") as update, _lock_runs("megascale checkpoint reshard", target):
        describe = lambda text: update(description=text)
        size = write_checkpoint(open_storage(target), new_step, as_source(source), source.state, files, describe)
    typer.echo(f"step {new_step}: {len(source.tensors)} tensors, {size:,} bytes in {files} files at {target}")


def _lock_runs(command: str, *paths: str) -> contextlib.ExitStack:
    """Return a context in which no trainer can start in the runs that the paths belong to.

    Raises ConfigError if a trainer is running in one of them.

    Args:
        command: command that takes the locks, for the messages of other processes.
        paths: folders or URLs of runs, of their checkpoints, or of single checkpoints.
    """
    from megascale.checkpoint.storage.opening import local_folder

    folders: set[Path] = set()
    for path in paths:
        folder = local_folder(path)
        if folder is None:
            continue
        resolved = folder.resolve()
        # The path may be a run folder, its checkpoints folder, or a step-N folder in it.
        folders |= {parent for parent in (resolved, *resolved.parents[:2]) if (parent / "config.toml").is_file()}
        if (resolved / run_lock.TRAINER_LOCK).is_file():
            folders.add(resolved)
    with contextlib.ExitStack() as stack:
        for folder in sorted(folders):  # in one order in all commands, so that two commands cannot block each other
            stack.enter_context(run_lock.acquire_trainer_lock(folder, command, 0.0))
        return stack.pop_all()  # The caller's context releases the locks; an exception above releases them here.


@contextlib.contextmanager
def _progress(description: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar on standard error. The context's value is a function that updates the bar."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=None)
        yield lambda **fields: progress.update(task, **fields)
