"""New groups for an engine that outlives the groups that it was made with.

Axes and pipeline streams are constants for everything that communicates. Only here do they change: the groups of a
failed attempt are taken from them, and those of the next attempt put in their place, found by their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megascale.parallel.collectives import Axis
from megascale.parallel.pipeline import P2PStreams
from megascale.parallel.runtime import Runtime


def list_axes(runtime: Runtime) -> Iterator[Axis]:
    """Yield the axes of a runtime that have, or had, a group."""
    for reference in runtime.axes:
        axis = reference()
        if axis is not None:
            yield axis


def drop_groups(runtime: Runtime, streams: P2PStreams) -> None:
    """Take the groups from all axes and streams, so that nothing holds them."""
    for axis in list_axes(runtime):
        object.__setattr__(axis, "group", None)
    for stream in streams.values():
        object.__setattr__(stream, "group", None)


def adopt_groups(runtime: Runtime, streams: P2PStreams, groups: Mapping[str, Any]) -> None:
    """Put the groups of the next attempt into all axes and streams. KeyError if a name is missing.

    Args:
        groups: groups by name, that of all ranks as "world".
    """
    for axis in list_axes(runtime):
        object.__setattr__(axis, "group", groups[axis.name])
    for stream in streams.values():
        object.__setattr__(stream, "group", groups[stream.name])
