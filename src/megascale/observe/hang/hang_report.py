"""A hang's verdict as a report: from a run folder to words, tables and JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megascale import config as configuration
from megascale.core.calls import READER
from megascale.core.layout import Layout, lay_out
from megascale.core.untrusted_files import is_small_file
from megascale.errors import MegascaleError
from megascale.observe.hang.evidence import collect_evidence
from megascale.observe.hang.scene import Scene
from megascale.observe.hang.verdict import KINDS, Hang, describe_position, explain_hang


def examine_run(folder: Path, ask: bool = True, watch_seconds: float = 0.5) -> tuple[Scene, Hang]:
    """Look at a run folder and judge. Raises DataError where nothing of a run lies there."""
    scene = collect_evidence(folder, ask, watch_seconds)
    return scene, explain_hang(scene, layout_of(folder, scene.world))


def layout_of(folder: Path, world: int) -> Layout | None:
    """How the run in `folder` is laid over its ranks; None where its configuration is missing or fits no such world."""
    file = folder / "config.toml"
    if not is_small_file(file):
        return None
    try:
        return lay_out(configuration.load(file, keep_unknown_parts=True), world)
    except (MegascaleError, ValueError, RecursionError):
        return None


def format_headline(hang: Hang) -> str:
    """The verdict in one line."""
    who = f" rank{'s' * (len(hang.ranks) > 1)} {', '.join(map(str, hang.ranks))}" if hang.ranks else ""
    if not hang.group:
        where = ""
    elif hang.group == READER:
        where = " while reading"
    else:
        where = f", {hang.op or 'call'} number {hang.sequence} of {hang.group}"
    what = f"{who}{where}".removeprefix(",")
    return f"{hang.kind}{':' if what else ''}{what} ({KINDS[hang.kind]})"


def as_json(scene: Scene, hang: Hang) -> dict[str, Any]:
    """Verdict and the place of each rank, for machines."""
    ranks = []
    for rank in range(scene.world):
        what = scene.ranks.get(rank)
        if what is None:
            ranks.append({"rank": rank, "process": "unknown", "place": "left no record"})
            continue
        ranks.append(
            {
                "rank": rank,
                "process": what.process,
                "place": describe_position(what),
                "answered": what.answered,
                "stack": list(what.stack),
            }
        )
    return {**dataclasses.asdict(hang), "world": scene.world, "by_rank": ranks}
