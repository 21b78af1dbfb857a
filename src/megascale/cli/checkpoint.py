"""`megascale checkpoint`: look at saved checkpoints, check, move and convert them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.core import run_lock, strict_json
from megascale.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from megascale.checkpoint.format.step_folders import Summary

_LONGEST = 2000  # characters of a line about a checkpoint

commands = typer.Typer(no_args_is_help=True, help="Look at saved checkpoints, check, move and convert them.")


def register(app: typer.Typer) -> None:
    """Add `megascale checkpoint`."""
    app.add_typer(commands, name="checkpoint")


@commands.command()
def inspect(
    path: str = typer.Argument(..., help="a run folder, its checkpoints folder, or one step-N folder (path or URL)"),
    all_tensors: bool = typer.Option(False, "--all", help="list every tensor; default: the first 40"),
    as_json: bool = typer.Option(False, "--json", help="print JSON instead of tables"),
) -> None:
    """Show what a checkpoint holds: tensors, shapes, types, bytes, step, samples, configuration; is it complete?

    Reads the index only, so it is quick for any size.

    Example: megascale checkpoint inspect runs/first
    """
    from dataclasses import asdict

    from rich.console import Console

    from megascale.checkpoint.format.step_folders import find_steps, step_name, summarise

    storage, there = find_steps(path)
    summaries = [summarise(storage, step) for step in there]
    # Training may remove a checkpoint while it is looked at.
    kept = [s for s in summaries if s.committed or storage.list(step_name(s.step))] or summaries
    found = sorted(kept, key=lambda s: (s.committed, s.sequence, s.step))
    newest = found[-1]
    if as_json:
        record = asdict(newest) | {"differences": _differences(path, newest)}
        record["checkpoints"] = [
            {"step": s.step, "committed": s.committed, "problem": s.problem, "bytes": s.bytes} for s in found
        ]
        typer.echo(strict_json.dumps(record))
        return
    console = Console()
    console.print(_checkpoints_table(found))
    if not newest.committed:
        return
    console.print(_tensor_table(newest, None if all_tensors else 40))
    for key, value in newest.state.items():
        if isinstance(value, str | int | float | bool):
            console.print(_shown(f"{key}: {value}"), highlight=False)
    differences = _differences(path, newest)
    for key, (there, here) in differences.items():
        said = f"{there} in the checkpoint, {here} in config.toml"
        console.print(f"[yellow]{_shown(key)}[/]: {_shown(said)}", highlight=False)
    if not differences and newest.state.get("config"):
        console.print("configuration: as in config.toml" if _config_file(path) else "configuration: saved, none beside")


def _shown(text: str) -> str:
    """What a checkpoint says, which may be anybody's, as it is: no markup, and nothing that drives a terminal."""
    from rich.markup import escape

    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:_LONGEST])
    # Of a backslash at the end the markup that follows would be taken for text.
    return escape(plain + (" ..." if len(text) > _LONGEST else "")) + ("" if not plain.endswith("\\") else " ")


def _checkpoints_table(found: list[Summary]) -> Table:
    from rich.table import Table

    table = Table("step", "state", "bytes", "tensors", "folder", title="checkpoints")
    for s in sorted(found, key=lambda s: s.step):
        state = "[green]committed[/]" if s.committed else f"[red]not usable[/]: {_shown(s.problem or '')}"
        table.add_row(str(s.step), state, f"{s.bytes:,}", str(len(s.tensors)), s.path)
    return table


def _tensor_table(summary: Summary, limit: int | None) -> Table:
    from rich.table import Table

    table = Table("tensor", "shape", "dtype", "bytes", "chunks", title=f"step {summary.step}")
    for t in summary.tensors[:limit]:
        table.add_row(_shown(t.name), " x ".join(map(str, t.shape)) or "scalar", t.dtype, f"{t.bytes:,}", str(t.chunks))
    left = summary.tensors[limit:] if limit is not None else []
    if left:
        table.add_row(f"... {len(left)} more (--all)", "", "", f"{sum(t.bytes for t in left):,}", "")
    table.add_section()
    total = sum(t.bytes for t in summary.tensors)
    table.add_row(f"{len(summary.tensors)} tensors", "", "", f"{total:,}", str(sum(t.chunks for t in summary.tensors)))
    return table


def _config_file(path: str) -> Path | None:
    """The run's config.toml, for whichever folder of the run was named."""
    for folder in (Path(path), *Path(path).resolve().parents[:2]):
        if (folder / "config.toml").is_file():
            return folder / "config.toml"
    return None


def _differences(path: str, summary: Summary) -> dict[str, tuple[Any, Any]]:
    """Settings that differ between the checkpoint and the run's config.toml, as section.key: (there, here)."""
    from megascale.config.text_files import read_toml

    file = _config_file(path)
    saved = summary.state.get("config")
    if file is None or not isinstance(saved, dict):
        return {}
    now = read_toml(file, "the configuration of the run")
    result = {}
    for section in sorted({*saved, *now}):
        there, here = (each if isinstance(each, dict) else {} for each in (saved.get(section), now.get(section)))
        for key in sorted({*there, *here}):
            if there.get(key) != here.get(key):
                result[f"{section}.{key}"] = (there.get(key), here.get(key))
    return result


@commands.command()
def verify(
    path: str = typer.Argument(..., help="a run folder, its checkpoints folder, or one step-N folder (path or URL)"),
    as_json: bool = typer.Option(False, "--json", help="print JSON instead of a table"),
) -> None:
    """Read every byte of the checkpoints there and compare it with what was written. Exit code 4 if any is damaged.

    Example: megascale checkpoint verify runs/first
    """

    from rich.console import Console
    from rich.table import Table

    from megascale.checkpoint.format.step_folders import find_steps
    from megascale.checkpoint.format.verify import verify as check

    storage, there = find_steps(path)
    verdicts = []
    with _progress() as progress:
        for step in there:
            task = progress.add_task(f"step {step}", total=None)
            told = lambda done, total, task=task: progress.update(task, completed=done, total=total)
            verdict = check(storage, step, told)
            if not verdict.removed:
                verdicts.append(verdict)
    bad = [v for v in verdicts if v.problems]
    if as_json:
        typer.echo(strict_json.dumps([v.__dict__ | {"tensors": sorted(v.tensors)} for v in verdicts]))
    else:
        table = Table("step", "verdict", "bytes read", "tensors touched")
        for v in verdicts:
            words = f"[red]{_shown('; '.join(v.problems))}" if v.problems else "[green]as written"
            table.add_row(str(v.step), words, f"{v.bytes:,}", _shown(", ".join(sorted(v.tensors)[:6])))
        Console().print(table)
    if bad:
        raise DataError(
            f"{len(bad)} of {len(verdicts)} checkpoints in {path!r} are not complete: step "
            f"{', '.join(str(v.step) for v in bad)}; training resumes from the newest that is"
        )


@commands.command()
def prune(
    path: str = typer.Argument(..., help="a run folder or its checkpoints folder (path or URL)"),
    keep: int = typer.Option(1, min=1, help="committed checkpoints to keep, newest first"),
) -> None:
    """Remove old checkpoints and what saves that died have left. Refused (exit code 2) while the run is training.

    Those kept are read whole first: one that is damaged does not count, and an older one is kept in its place. Of a
    step-N that is a link the link is removed, and the folder that it leads to stays as it is.

    Example: megascale checkpoint prune runs/first --keep 1
    """
    from megascale.checkpoint.format.step_folders import find_steps, linked_steps, step_folders, steps
    from megascale.checkpoint.format.step_folders import prune as remove
    from megascale.checkpoint.format.verify import verify as check

    storage, there = find_steps(path)
    with _alone("megascale checkpoint prune", path, storage.url):
        linked = linked_steps(storage)
        is_sound = lambda commit: not check(storage, commit.step).problems
        removed = remove(storage, keep, is_sound=is_sound, remove_links=True)
        left = steps(storage)
        remaining = step_folders(storage)
    if not left:
        raise DataError(
            f"no checkpoint in {path!r} is complete, so nothing was removed; see megascale checkpoint inspect"
        )
    unlinked = [step for step in removed if step in linked]
    deleted = [step for step in removed if step not in linked]
    swept = sorted(set(there) - set(remaining) - set(removed))
    also = f"; swept half-written steps {swept}" if swept else ""
    if unlinked:
        also += f"; removed the links of steps {unlinked}, whose folders elsewhere stay"
    typer.echo(f"removed steps {deleted or 'none'}{also}; kept {left}")


@commands.command(name="export")
def export_(
    path: str = typer.Argument(..., help="a run folder, its checkpoints folder, or one step-N folder (path or URL)"),
    target: Path = typer.Argument(..., help="folder for .safetensors files, or a file ending in .pt"),
    step: int | None = typer.Option(None, help="which step; default: the newest"),
    only: str = typer.Option("model.", help="export tensors whose names begin so; the beginning is left off"),
    shard_gb: float = typer.Option(5.0, min=0.001, help="largest .safetensors file, in 10^9 bytes"),
) -> None:
    """Write the weights as safetensors (or one torch file), whole tensors whatever the layout was.

    Example: megascale checkpoint export runs/first exported
    """
    from megascale.checkpoint.complete_checkpoint import open_whole
    from megascale.checkpoint.conversion import export_safetensors, export_torch

    whole = open_whole(path, step)
    names = {name: name.removeprefix(only) for name in whole.tensors if name.startswith(only)}
    if not names:
        begins = sorted({name.split(".")[0] + "." for name in whole.tensors})
        raise ConfigError(
            f"no tensor of the checkpoint begins with --only={only!r}; they begin with {', '.join(begins)}"
        )
    with _progress() as progress:
        task = progress.add_task("export", total=None)
        told = lambda what: progress.update(task, description=what)
        if target.suffix == ".pt":
            written = [export_torch(whole, target, names)]
        else:
            written = export_safetensors(whole, target, names, int(shard_gb * 1e9), told)
    typer.echo(f"step {whole.commit.step}: {len(names)} tensors to {', '.join(map(str, written))}")


@commands.command(name="import")
def import_(
    source: Path = typer.Argument(
        ..., help=".safetensors file or folder of them, torch file, or torch distributed checkpoint"
    ),
    target: str = typer.Argument(..., help="checkpoints folder to write step-N into (path or URL)"),
    step: int = typer.Option(0, min=0, help="step number to give it"),
    prefix: str = typer.Option("model.", help="put before each tensor's name"),
) -> None:
    """Make a checkpoint of tensors from elsewhere. Nothing but tensors is unpickled.

    Example: megascale checkpoint import weights.safetensors runs/new/checkpoints
    """
    from megascale.checkpoint.conversion import read_foreign, write_checkpoint
    from megascale.checkpoint.storage.opening import open_storage

    foreign = read_foreign(source, prefix)
    state = {"step": step, "imported_from": str(source)}
    with _progress() as progress:
        task = progress.add_task("import", total=None)
        told = lambda what: progress.update(task, description=what)
        with _alone("megascale checkpoint import", target):
            size = write_checkpoint(open_storage(target), step, foreign, state, files=1, on_file=told)
    typer.echo(f"{len(foreign[0])} tensors, {size:,} bytes, committed as {target}/step-{step}")


@commands.command()
def reshard(
    path: str = typer.Argument(..., help="a run folder, its checkpoints folder, or one step-N folder (path or URL)"),
    target: str = typer.Argument(..., help="checkpoints folder to write step-N into (path or URL)"),
    files: int = typer.Option(1, min=1, help="data files of the new checkpoint"),
    step: int | None = typer.Option(None, help="which step; default: the newest"),
) -> None:
    """Write a checkpoint anew in another number of files, or on other storage, checking it on the way.

    Loading needs no resharding: any layout loads any checkpoint. This is for many small files, or for copying.

    Example: megascale checkpoint reshard runs/first s3://bucket/first --files 8
    """
    from megascale.checkpoint.complete_checkpoint import open_whole
    from megascale.checkpoint.conversion import source_of, write_checkpoint
    from megascale.checkpoint.storage.opening import open_storage

    whole = open_whole(path, step)
    with _progress() as progress:
        task = progress.add_task("reshard", total=None)
        told = lambda what: progress.update(task, description=what)
        with _alone("megascale checkpoint reshard", target):
            size = write_checkpoint(open_storage(target), whole.commit.step, source_of(whole), whole.state, files, told)
    typer.echo(f"step {whole.commit.step}: {len(whole.tensors)} tensors, {size:,} bytes in {files} files at {target}")


def _alone(what: str, *places: str) -> contextlib.ExitStack:
    """Keep trainings out of the runs whose checkpoints change, or ConfigError if one is there."""
    from megascale.checkpoint.storage.opening import local_folder

    folders: set[Path] = set()
    for place in places:
        folder = local_folder(place)
        if folder is None:
            continue
        path = folder.resolve()
        folders |= {folder for folder in (path, *path.parents[:2]) if (folder / "config.toml").is_file()}
        folders |= {path} if (path / run_lock.TRAINERS).is_file() else set()
    with contextlib.ExitStack() as undo:
        for folder in sorted(folders):
            undo.enter_context(run_lock.acquire_trainer_lock(folder, what, 0.0))
        return undo.pop_all()


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), transient=True)
