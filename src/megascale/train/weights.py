"""Checksums of the weights: a flipped bit is noticed before a wrong model is trained on or saved.

Two comparisons are made. At rest: only the optimizer writes master weights, so their sum after one update equals the
sum before the next; the device checks it every step, and the result is read with the loss. Between copies: every
`interval` steps the sum of the weights in use goes into the status file, and the driver compares data-parallel copies
(resilience/rules).

The sum is over the bits as integers, so any single flipped bit changes it. It costs one pass over the memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megascale.core.exit_record import ExitKind, attach_record
from megascale.errors import TrainingError
from megascale.parallel.compute_trace import INTEGERS
from megascale.train.engine import Engine

_MULTIPLIER = 0x9E3779B97F4A7C15


def sum_bits(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return an int64 sum of the bits of each tensor, on the device; it wraps around."""
    return torch.stack([t.view(INTEGERS[t.element_size()]).sum(dtype=torch.int64) for t in tensors])


def sum_bits_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of each row of a matrix, int64 [rows]; it wraps around."""
    return x.view(INTEGERS[x.element_size()]).sum(dim=-1, dtype=torch.int64)


def digest(sums: torch.Tensor) -> str:
    """Return the sums as 16 hexadecimal digits, which depend on their order."""
    value = 0
    for index, number in enumerate(sums.tolist()):
        value = (value + number * (_MULTIPLIER + 2 * index)) % (1 << 64)
    return f"{value:016x}"


class WeightWatch:
    """Watches the weights of `engine`; make one per engine.

    Attributes:
        rank: rank of this process.
        interval: steps between sums of the weights in use.
    """

    def __init__(self, engine: Engine, rank: int, interval: int) -> None:
        self.engine = engine
        self.rank = rank
        self.interval = interval
        # Sums of master weights in host memory would take the host seconds per step.
        self._watches_masters = not engine.config.optimizer.offload
        self._master_sums: torch.Tensor | None = None  # after the last update
        self._has_changed: torch.Tensor | None = None
        self._sums_in_use: tuple[int, torch.Tensor] | None = None  # with their step
        engine.before_update_hooks.append(self._before_update)
        engine.after_update_hooks.append(self._after_update)

    def _list_masters(self) -> Iterable[torch.Tensor]:
        return (state.master for state in self.engine.optimizer.states)

    def _before_update(self, step: int) -> None:
        if self._master_sums is not None:
            self._has_changed = (sum_bits(self._list_masters()) != self._master_sums).any()
        if (step - 1) % self.interval == 0:
            self._sums_in_use = (step - 1, sum_bits(self.engine.data_parallel.compute_weights()))

    def _after_update(self, step: int) -> None:
        if self._watches_masters:
            self._master_sums = sum_bits(self._list_masters())

    def forget(self) -> None:
        """Forget the last sums, because other code writes the weights now (a checkpoint is loaded)."""
        self._master_sums = None

    def read_checksum(self) -> str | None:
        """Return "STEP:HEX" of the weights in use if a sum was taken since the last call.

        Waits for the device. Raises TrainingError if weights changed at rest.
        """
        has_changed, sums_in_use = self._has_changed, self._sums_in_use
        self._has_changed = None
        self._sums_in_use = None
        if has_changed is not None and bool(has_changed):
            changed = TrainingError(
                f"the weights of rank {self.rank} changed between two updates, when no code writes them (a flipped "
                "bit?); nothing since the last checkpoint was saved. Test this host's memory and device: "
                "megascale diagnose"
            )
            raise attach_record(changed, ExitKind.WEIGHTS_CHANGED, subject="weights")
        if sums_in_use is None:
            return None
        step, sums = sums_in_use
        return f"{step}:{digest(sums)}"
