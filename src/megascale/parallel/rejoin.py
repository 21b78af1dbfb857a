"""Replacement of the groups of an engine that goes on in the next attempt.

Axes and pipeline streams are immutable for all other code. Only this module changes them: it removes the groups of a
failed attempt, and later sets the groups of the next attempt that have the same names.
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
    """Remove the groups from all axes and streams, so that nothing refers to the groups any more."""
    for axis in list_axes(runtime):
        object.__setattr__(axis, "group", None)
    for stream in streams.values():
        object.__setattr__(stream, "group", None)


def adopt_groups(runtime: Runtime, streams: P2PStreams, groups: Mapping[str, Any]) -> None:
    """Set the groups of the next attempt in all axes and streams. Raises KeyError if a name is missing.

    Args:
        groups: groups by name; the group of all ranks has the name "world".
    """
    for axis in list_axes(runtime):
        object.__setattr__(axis, "group", groups[axis.name])
    for stream in streams.values():
        object.__setattr__(stream, "group", groups[stream.name])
