"""Process groups of a worker that later jobs with the same grid use again: their connections cost a tenth of a job."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megascale.core.group_names import make_attempt_suffix
from megascale.core.layout import Layout
from megascale.rendezvous.groups import Groups, make_groups

LIMIT = 8  # sets of groups; each has connections and two threads per group
TIMEOUT = timedelta(seconds=100)

_world: Any = None  # default group that the sets belong to
_sets: dict[tuple[Any, ...], Groups] = {}
_uses: Counter[tuple[Any, ...]] = Counter()


def begin_job() -> None:
    """Let all sets be used again."""
    _uses.clear()


def has_room() -> bool:
    """Return whether the default group may serve another job."""
    return len(_sets) < LIMIT


def get_groups(layout: Layout, rank: int, tied: bool) -> Groups:
    """Return groups of this rank that no other engine of the job has. Collective.

    A set is made for a grid when it is first needed, and again whenever the default group is another one.
    """
    global _world
    if _world is not dist.group.WORLD:
        _world = dist.group.WORLD
        _sets.clear()
        _uses.clear()
    layout_key = (layout.grid, layout.chunk_map, tied)
    key = (*layout_key, _uses[layout_key])
    _uses[layout_key] += 1
    if key not in _sets:
        # A name may be used once in a default group. Those of the first set are as in a training.
        suffix = make_attempt_suffix(len(_sets)) if _sets else ""
        _sets[key] = make_groups(
            layout.grid,
            rank,
            chunk_map=layout.chunk_map,
            tied=tied,
            timeout=TIMEOUT,
            name_suffix=suffix,
        )
    return _sets[key]
