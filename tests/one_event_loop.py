"""gloo groups of one process over one event loop, for tests whose ranks have many groups.

torch makes a device for each group, whose thread looks for events a hundred times a second: with ten groups in each of
eight ranks that is a tenth of what a tiny training takes.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed import distributed_c10d


def share_event_loop() -> None:
    """From now on this process, which has no group yet, makes gloo groups on one device."""
    distributed_c10d.ProcessGroupGloo = _SharedLoop  # type: ignore[misc]


@functools.cache
def _device() -> Any:
    return distributed_c10d.ProcessGroupGloo.create_default_device()


class _SharedLoop(distributed_c10d.ProcessGroupGloo):
    """As torch calls it for a group. A class, since torch asks whether a group is one of it."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        options = self._Options()  # type: ignore[attr-defined]
        options._devices, options._threads, options._timeout = [_device()], 2, timeout
        super().__init__(store, rank, size, options)
