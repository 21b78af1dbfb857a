"""`megascale checkpoint`: look at saved checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from megascale.checkpoint.folder import Summary

commands = typer.Typer(no_args_is_help=True, help="Look at saved checkpoints.")


def register(app: typer.Typer) -> None:
    """Add `megascale checkpoint`."""
    app.add_typer(commands, name="checkpoint")


@commands.callback()
def _commands() -> None:
    """Keeps `checkpoint` a group of commands."""


@commands.command()
def inspect(
    path: str = typer.Argument(..., help="a run folder, its checkpoints folder, or one step-N folder (path or URL)"),
    all_tensors: bool = typer.Option(False, "--all", help="list every tensor; default: the first 40"),
    as_json: bool = typer.Option(False, "--json", help="print JSON instead of tables"),
) -> None:
    """Show what a checkpoint holds: tensors, shapes, types, bytes, step, samples, configuration, whether it is whole.

    Reads the index only, so it is quick for any size.

    Example: megascale checkpoint inspect runs/first
    """
    import json
    from dataclasses import asdict

    from rich.console import Console

    from megascale.checkpoint.folder import find_steps, summarise

    storage, there = find_steps(path)
    found = sorted((summarise(storage, step) for step in there), key=lambda s: (s.committed, s.sequence, s.step))
    newest = found[-1]
    if as_json:
        record = asdict(newest) | {"differences": _differences(path, newest)}
        record["checkpoints"] = [
            {"step": s.step, "committed": s.committed, "problem": s.problem, "bytes": s.bytes} for s in found
        ]
        typer.echo(json.dumps(record))
        return
    console = Console()
    console.print(_checkpoints_table(found))
    if not newest.committed:
        return
    console.print(_tensor_table(newest, None if all_tensors else 40))
    for key, value in newest.state.items():
        if isinstance(value, str | int | float | bool):
            console.print(f"{key}: {value}", highlight=False)
    differences = _differences(path, newest)
    for key, (there, here) in differences.items():
        console.print(f"[yellow]{key}[/]: {there} in the checkpoint, {here} in config.toml", highlight=False)
    if not differences and newest.state.get("config"):
        console.print("configuration: as in config.toml" if _config_file(path) else "configuration: saved, none beside")


def _checkpoints_table(found: list[Summary]) -> Table:
    from rich.table import Table

    table = Table("step", "state", "bytes", "tensors", "folder", title="checkpoints")
    for s in sorted(found, key=lambda s: s.step):
        state = "[green]committed[/]" if s.committed else f"[red]not usable[/]: {s.problem}"
        table.add_row(str(s.step), state, f"{s.bytes:,}", str(len(s.tensors)), s.path)
    return table


def _tensor_table(summary: Summary, limit: int | None) -> Table:
    from rich.table import Table

    table = Table("tensor", "shape", "dtype", "bytes", "chunks", title=f"step {summary.step}")
    for t in summary.tensors[:limit]:
        table.add_row(t.name, " x ".join(map(str, t.shape)) or "scalar", t.dtype, f"{t.bytes:,}", str(t.chunks))
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
    import tomllib

    file = _config_file(path)
    saved = summary.state.get("config")
    if file is None or not isinstance(saved, dict):
        return {}
    now = tomllib.loads(file.read_text())
    result = {}
    for section in sorted({*saved, *now}):
        there, here = saved.get(section) or {}, now.get(section) or {}
        for key in sorted({*there, *here}):
            if there.get(key) != here.get(key):
                result[f"{section}.{key}"] = (there.get(key), here.get(key))
    return result
