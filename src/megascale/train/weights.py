"""Checksums of the weights: a bit that flips is noticed before a wrong model is trained on or saved.

Two comparisons. At rest: nothing but the optimizer writes master weights, so their sum after one update equals the sum
before the next; checked on the device every step, read with the loss. Between copies: every `interval` steps the sum of
the weights in use goes into the status file, and the driver compares data-parallel copies (resilience/rules).

The sum is of the bits taken as whole numbers, so any single flipped bit changes it; it costs one pass over the memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megascale.core.exit_record import ExitKind, attach_record
from megascale.errors import TrainingError
from megascale.train.engine import Engine

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15


def bit_sums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One int64 sum a tensor over its bits, on the device; wraps around."""
    return torch.stack([t.view(_BITS[t.element_size()]).sum(dtype=torch.int64) for t in tensors])


def digest(sums: torch.Tensor) -> str:
    """Sums as 16 hexadecimal digits, sensitive to their order."""
    value = 0
    for number, part in enumerate(sums.tolist()):
        value = (value + part * (_ODD + 2 * number)) % (1 << 64)
    return f"{value:016x}"


class WeightWatch:
    """Watches the weights of `engine`; attach it once.

    Attributes:
        rank: this process.
        interval: steps between sums of the weights in use.
    """

    def __init__(self, engine: Engine, rank: int, interval: int) -> None:
        self.engine, self.rank, self.interval = engine, rank, interval
        self._after: torch.Tensor | None = None
        self._changed: torch.Tensor | None = None
        self._whole: tuple[int, torch.Tensor] | None = None
        engine.before_update.append(self._before_update)
        engine.after_update.append(self._after_update)

    def _masters(self) -> Iterable[torch.Tensor]:
        return (state.master for state in self.engine.optimizer.states)

    def _before_update(self, step: int) -> None:
        if self._after is not None:
            self._changed = (bit_sums(self._masters()) != self._after).any()
        if (step - 1) % self.interval == 0:
            self._whole = (step - 1, bit_sums(self.engine.data_parallel.weights_in_use()))

    def _after_update(self, step: int) -> None:
        self._after = bit_sums(self._masters())

    def forget(self) -> None:
        """The weights are written by somebody else now (a checkpoint is loaded)."""
        self._after = None

    def read(self) -> str | None:
        """ "STEP:HEX" of the weights in use if a sum was taken since the last call.

        Waits for the device. Raises TrainingError if weights changed at rest.
        """
        changed, self._changed = self._changed, None
        if changed is not None and bool(changed):
            changed_weights = TrainingError(
                f"the weights of rank {self.rank} changed between two updates, when nothing writes them (a flipped "
                "bit?); nothing since the last checkpoint was saved. Test this host's memory and device: "
                "megascale diagnose"
            )
            raise attach_record(changed_weights, ExitKind.WEIGHTS_CHANGED, subject="weights")
        whole, self._whole = self._whole, None
        return None if whole is None else f"{whole[0]}:{digest(whole[1])}"
