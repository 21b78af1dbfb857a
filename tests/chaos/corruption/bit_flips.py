"""Wrong bits for tests: one rank computes as if its device erred, below everything that could notice it.

A flip of a GEMM is made by a dispatch mode around the whole training, so that the operator itself seems to return the
wrong bit. Flips at a border change the result of a chunk before it is sent. A flip after the reduction changes the
gradient that the optimizer is about to use, and a flip of the optimizer's state one moment at rest. A flip of the
update changes what an optimizer's kernel has written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megascale.ops.segments import Segments
from megascale.optim import sharded_adamw, sharded_lamb, sharded_muon
from megascale.parallel.pipeline import EagerRunner
from megascale.train.engine import Engine

_GEMMS = frozenset({torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten._scaled_mm})
# Kernels of updates, with the position of the argument that is written wrongly, or None for the result.
_UPDATES = (
    (sharded_adamw, "adamw_apply", 0),
    (sharded_lamb, "lamb_direction", 4),
    (sharded_lamb, "lamb_apply", 0),
    (sharded_muon, "newton_schulz", None),
)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNIFICANDS = {torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}  # bits
COMPUTE_KINDS = ("gemm", "activation", "activation gradient", "weight gradient")
STATE_KINDS = ("reduced gradient", "optimizer state")
UPDATE_KINDS = ("update",)
EVERY_RANK = -1  # as the faulty rank: a collective gives all ranks the same wrong result
KINDS = COMPUTE_KINDS + STATE_KINDS + UPDATE_KINDS


@dataclass(frozen=True)
class BitFlip:
    """A fault of one rank.

    Attributes:
        kind: one of KINDS.
        rank: the faulty rank, or EVERY_RANK.
        step: the step of a passing fault, the first step of a persistent one.
        is_persistent: whether every micro-batch and replay from that step on is wrong, or the trained one alone.
        position: chooses the operator and the element.
        bit: the bit, counted from the lowest.
        in_replay: whether a passing fault is in the replay instead of the training.
    """

    kind: str
    rank: int
    step: int
    is_persistent: bool
    position: int
    bit: int
    in_replay: bool = False


def settle(engine: Engine, flip: BitFlip | None) -> None:
    """Let the optimizer's state come to rest before a flip of it. All ranks call this function before a step.

    The gathers of the last update may still write the weights back. A rank's gather ends only after its peers' have
    begun, so one rank cannot wait alone.
    """
    if flip is not None and flip.kind == "optimizer state":
        engine.synchronize()


class Corruption:
    """Injects a fault into an engine.

    Attributes:
        count: flips made.
    """

    def __init__(self, engine: Engine, flip: BitFlip) -> None:
        self._engine = engine
        self._flip = flip
        self._step = 0
        self._is_training = False  # and not replaying
        self._updates: int | None = None  # remaining before the wrong one; None: outside of an affected update
        self._is_forward = False
        self._gemms: int | None = None  # left before the wrong one; None: outside of an affected pass
        self.count = 0

    @contextmanager
    def inject(self) -> Iterator[None]:
        """Let the rank err in what runs within."""
        with (
            mock.patch.object(EagerRunner, "forward", self._wrap(EagerRunner.forward, is_forward=True)),
            mock.patch.object(EagerRunner, "backward", self._wrap(EagerRunner.backward, is_forward=False)),
            mock.patch.object(self._engine.pipeline, "run", self._mark_training(self._engine.pipeline.run)),
            mock.patch.object(self._engine.data_parallel, "finish_reductions", self._flip_after_reductions()),
            mock.patch.object(self._engine.optimizer.rule, "update", self._mark_update(self._engine.optimizer.rule)),
            ExitStack() as kernels,
            _GemmFlips(self),
        ):
            for module, name, argument in _UPDATES:
                wrong_kernel = self._wrap_update(getattr(module, name), argument)
                kernels.enter_context(mock.patch.object(module, name, wrong_kernel))
            yield

    def begin_step(self, step: int) -> None:
        """Take note of the step, and flip a bit of the optimizer's state if that is due.

        Call `settle` on all ranks before.
        """
        self._step = step
        if self._flip.kind == "optimizer state" and self._is_due(always=True):
            states = self._engine.optimizer.states
            state = states[self._flip.position % len(states)]
            tensors = [state.master, *state.state_tensors()]
            self.flip_bit(tensors[self._flip.position % len(tensors)])

    def _mark_update(self, rule: Any) -> Any:
        """Return the update with a passing fault in one call of its kernels."""
        update = rule.update

        def update_wrongly(*args: Any) -> None:
            is_due = self._flip.kind == "update" and not self._flip.is_persistent and self._is_due(always=True)
            if is_due:
                parts = [part for state in rule.shards.states for part in state.parts if part.segments.ranges]
                self._updates = self._flip.position % len(parts)
            update(*args)
            self._updates = None

        return update_wrongly

    def _wrap_update(self, kernel: Any, argument: int | None) -> Any:
        """Return a kernel of the update that flips a bit of an argument, or of its result, if that is due."""

        def run(*args: Any, **kwargs: Any) -> Any:
            result = kernel(*args, **kwargs)
            segments = kwargs.get("segments")
            if segments is not None and not segments.ranges:
                return result
            is_wrong = self._flip.kind == "update" and self._flip.is_persistent and self._is_due(always=True)
            if self._updates is not None:
                self._updates -= 1
                is_wrong |= self._updates < 0
            if is_wrong:
                self._updates = None
                self._flip_low_bit(result if argument is None else args[argument], segments)
            return result

        return run

    def _flip_low_bit(self, tensor: Tensor, segments: Segments | None) -> None:
        """Flip a bit of the significand, so that the training stays finite: in each segment if the fault persists.

        A copy of an element in a recomputation has the same fault.
        """
        elements = tensor.detach().reshape(-1)
        ranges = [elements]
        if segments is not None:
            ranges = [elements[row.start : row.stop] for row in segments.ranges]
        if not self._flip.is_persistent:
            ranges = ranges[:1]
        bit = self._flip.bit % _SIGNIFICANDS[tensor.dtype]
        for part in ranges:
            start = self._flip.position % len(part)
            part[start : start + 1].view(_INTEGERS[tensor.element_size()]).bitwise_xor_(1 << bit)
        self.count += 1

    def _flip_after_reductions(self) -> Any:
        finish = self._engine.data_parallel.finish_reductions

        def finish_wrongly() -> None:
            finish()
            if self._flip.kind == "reduced gradient" and self._is_due(always=True):
                grads = []
                for flat in self._engine.buffers:
                    for bucket, shard in enumerate(flat.shards):
                        # The sum of a tied embedding goes on to another stage, and is not checked.
                        if bucket != flat.layout.tied_bucket and shard.grads.any():
                            grads.append(shard.grads)
                chosen = grads[self._flip.position % len(grads)]
                self._flip_high_bit(chosen)

        return finish_wrongly

    def flip_bit(self, tensor: Tensor) -> None:
        """Flip the fault's bit of one element."""
        flat = tensor.detach().reshape(-1)
        if flat.data_ptr() != tensor.data_ptr():
            raise ValueError("the tensor is not contiguous")
        start = self._flip.position % len(flat)
        bits = 8 * flat.element_size() - 1
        flat[start : start + 1].view(_INTEGERS[flat.element_size()]).bitwise_xor_(1 << (self._flip.bit % bits))
        self.count += 1

    def _flip_high_bit(self, tensor: Tensor) -> None:
        """Flip a bit of the largest element that changes it by more than a sum's rounding: of the 12 below the sign."""
        bits = 8 * tensor.element_size() - 1
        start = int(tensor.abs().argmax())
        bit = bits - 1 - self._flip.bit % 12
        tensor[start : start + 1].view(_INTEGERS[tensor.element_size()]).bitwise_xor_(1 << bit)
        self.count += 1

    def _is_due(self, always: bool = False) -> bool:
        if self._flip.is_persistent:
            return self._step >= self._flip.step
        return self._step == self._flip.step and (self._is_training != self._flip.in_replay or always)

    def _mark_training(self, run: Any) -> Any:
        def run_marked(*args: Any) -> Any:
            self._is_training = True
            try:
                return run(*args)
            finally:
                self._is_training = False

        return run_marked

    def _wrap(self, method: Any, is_forward: bool) -> Any:
        """Return the pass of a micro-batch with the fault in it; a passing fault is in the first micro-batch."""
        corruption, flip = self, self._flip

        def run(runner: EagerRunner, chunk: int, i: int, x: Tensor | None) -> Any:
            is_affected = corruption._is_due() and (flip.is_persistent or i == 0)
            kind = flip.kind
            in_pass = kind == "gemm" and is_forward == (flip.position % 2 == 0)
            in_pass |= kind == "weight gradient" and not is_forward
            if is_affected and in_pass and chunk == flip.position % len(corruption._engine.chunks):
                corruption._gemms = flip.position // 2 % 3
            try:
                result = method(runner, chunk, i, x)
            finally:
                corruption._gemms = None
            at_border = kind == ("activation" if is_forward else "activation gradient")
            if is_affected and at_border and result is not None:
                corruption.flip_bit(result)
            return result

        return run

    def is_wrong_gemm(self, out: Tensor) -> bool:
        """Return whether this GEMM of the present pass returns a wrong bit."""
        if self._gemms is None or not out.numel() or not out.is_contiguous():
            return False
        self._gemms -= 1
        if self._gemms >= 0:
            return False
        self._gemms = None
        return True


class _GemmFlips(TorchDispatchMode):
    def __init__(self, corruption: Corruption) -> None:
        super().__init__()
        self._corruption = corruption

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _GEMMS and self._corruption.is_wrong_gemm(result):
            self._corruption.flip_bit(result)
        return result
