"""Progress of another trainer's rank under `megascale launch`: one line in its loop, without effect elsewhere.

import megascale.watch
megascale.watch.step(step, loss=loss.item())
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from megascale.core.status import StatusFile

_status: StatusFile | None = None
_previous = 0.0


def step(number: int, loss: float | None = None, tokens: int | None = None) -> None:
    """Report that step `number` of this rank is complete.

    Args:
        number: number of the step, increasing.
        loss: loss of the step. Rank 0 prints it, and the agent stores it in the run's metrics.
        tokens: tokens of the step over all ranks.
    """
    global _status, _previous
    folder = os.environ.get("MEGASCALE_STATUS")
    rank = os.environ.get("RANK", "")
    if folder is None or not rank.isdigit():
        return
    if _status is None:
        _status = StatusFile(Path(folder), int(rank))
    current_time = time.monotonic()
    seconds = current_time - _previous if _previous else 0.0
    _previous = current_time
    _status.update("train", number)
    if rank != "0" or loss is None:
        return
    line = f"megascale step: {number} loss: {loss!r}"
    if tokens is not None and seconds:
        line += f" tokens_per_second: {tokens / seconds:.1f}"
    print(line, flush=True)
