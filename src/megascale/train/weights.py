"""Checksums of the weights, which show a flipped bit before a wrong model is trained on or saved.

Master weights are compared over time. Only the optimizer writes them, so their checksum after one update equals their
checksum before the next. The device compares both in every step, and the result is read with the loss.

Weights in use are compared between data-parallel ranks. Every `interval` steps their checksum is written to the status
file, and the driver compares the ranks (resilience/rules).

A checksum is the sum of the bits as integers, so that any single flipped bit changes it. It costs one pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megascale.core.exit_record import ExitKind, attach_record
from megascale.errors import TrainingError
from megascale.parallel.compute_trace import INTEGER_TYPES
from megascale.train.engine import Engine

_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 / golden ratio; odd, so that products modulo 2^64 are invertible
SUMMED_ELEMENTS = 2**24  # per sum: 128 MiB as int64


def sum_bits(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the bits of each tensor modulo 2^64, int64 [tensors] on the device.

    torch copies narrower integers to int64 before it adds them. So tensors are summed in pieces of SUMMED_ELEMENTS.
    """
    return torch.stack([_sum_bits_of_tensor(tensor) for tensor in tensors])


def _sum_bits_of_tensor(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.view(INTEGER_TYPES[tensor.element_size()])
    if bits.numel() <= SUMMED_ELEMENTS:
        return bits.sum(dtype=torch.int64)
    return torch.stack([piece.sum(dtype=torch.int64) for piece in bits.flatten().split(SUMMED_ELEMENTS)]).sum()


def sum_bits_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of each row of a matrix modulo 2^64, int64 [rows]."""
    return x.view(INTEGER_TYPES[x.element_size()]).sum(dim=-1, dtype=torch.int64)


def digest(sums: torch.Tensor) -> str:
    """Return a digest of the sums and their order as 16 hexadecimal digits."""
    value = 0
    for index, tensor_sum in enumerate(sums.tolist()):
        value = (value + tensor_sum * (_MULTIPLIER + 2 * index)) % (1 << 64)
    return f"{value:016x}"


class WeightWatch:
    """Takes and compares checksums of an engine's weights. Construct one object per engine.

    Attributes:
        interval: steps between checksums of the weights in use.
    """

    def __init__(self, engine: Engine, rank: int, interval: int) -> None:
        self.engine = engine
        self.rank = rank
        self.interval = interval
        # With optimizer.offload, sums of master weights in host memory would take seconds per step.
        self._compares_masters = not engine.config.optimizer.offload
        self._master_sums: torch.Tensor | None = None  # after the last update
        self._has_changed: torch.Tensor | None = None  # whether master weights have changed at rest, bool []
        self._sums_in_use: tuple[int, torch.Tensor] | None = None  # step, and checksums of the weights in use after it
        engine.before_update_hooks.append(self._before_update)
        engine.after_update_hooks.append(self._after_update)

    def _list_masters(self) -> Iterable[torch.Tensor]:
        return (state.master for state in self.engine.optimizer.states)

    def _before_update(self, step: int) -> None:
        if self._master_sums is not None:
            self._has_changed = (sum_bits(self._list_masters()) != self._master_sums).any()
        if (step - 1) % self.interval == 0:
            self._sums_in_use = (step - 1, sum_bits(self.engine.data_parallel.list_weights_in_use()))

    def _after_update(self, step: int) -> None:
        if self._compares_masters:
            self._master_sums = sum_bits(self._list_masters())

    def forget(self) -> None:
        """Forget the checksums of master weights. Call it before other code writes them, such as a checkpoint load."""
        self._master_sums = None

    def read_checksum(self) -> str | None:
        """Return "STEP:HEX" of the weights in use if a checksum was taken since the last call, else None.

        Waits for the device. Raises TrainingError if master weights have changed at rest.
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
