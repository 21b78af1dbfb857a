"""Muon on shards: orthogonalised momentum for matrices between activations, AdamW for all else.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/): W <- W - lr NewtonSchulz(Nesterov momentum), for the
matrices of the layers; embeddings, output, norms and biases take AdamW. Liu et al. 2025 ("Muon is scalable for LLM
training", arXiv 2502.16982, section 2.2): decoupled weight decay, and updates times 0.2 sqrt(max(rows, columns)), the
RMS of AdamW's, so that both share learning rate and decay.

A shard holds parts of matrices and orthogonalising takes whole logical ones (of a fused projection each its own;
across tensor-parallel cuts too, so that no layout changes the result). Each matrix has one owner among the ranks whose
shards make up the stage (ZeRO-0: among its tensor-parallel ranks), the same on all of them, so that work is even. One
all-to-all brings the momentum's parts to their owners and one takes the updates back; AdamW's elements are updated
meanwhile. A rank sends and receives about its shard of the matrices twice, in the type of the GEMMs: little beside
the gradients and parameters of all ranks that data parallelism moves.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.config import OptimizerConfig
from megascale.core.tensors import Box, flat_boxes
from megascale.ops.newton_schulz import newton_schulz
from megascale.optim.base import Shards, ShardState, StatePart, Step, UpdateRule
from megascale.optim.sharded_adamw import adamw_part
from megascale.parallel.buffers import FlatShard
from megascale.parallel.collectives import Axis, exchange_parts

Shape = tuple[int, ...]
# Elements of matrices orthogonalised at once: few launches for small ones, bounded memory for large ones.
BATCH = 2**26


@dataclass(frozen=True)
class MatrixRun:
    """A run of a rank's shard within one logical matrix: elements first .. first + length of `box`, row-major."""

    name: str
    shape: Shape
    box: Box
    first: int
    length: int


class ShardedMuon(UpdateRule):
    """State: momentum of each hidden matrix, AdamW's moments of all else. Making it is collective over the stage."""

    def __init__(self, config: OptimizerConfig, shards: Shards) -> None:
        super().__init__(config, shards)
        runs, places = [], []
        for s in shards.states:
            for part in s.parts:
                for e in part.extents if "momentum" in part.state else ():
                    runs.append(MatrixRun(e.piece.name, e.piece.shape, e.piece.box, e.piece_start, e.stop - e.start))
                    places.append((part, e.start - part.start, e.stop - part.start))
        everyone = _told(runs, shards.stage)
        shapes = {run.name: run.shape for one in everyone for run in one}
        owner = owners(shapes, shards.stage.size)
        self._sent = sum(run.length for one in everyone for run in one)  # by all ranks together
        # What goes to each owner, in its order; `_out` are this rank's runs in the order in which they are sent.
        self._out = [places[i] for i in sorted(range(len(runs)), key=lambda i: (owner[runs[i].name], i))]
        self._to = [0] * shards.stage.size
        for run in runs:
            self._to[owner[run.name]] += run.length
        self._in = [run for one in everyone for run in one if owner[run.name] == shards.stage.rank]
        self._from = [sum(run.length for run in one if owner[run.name] == shards.stage.rank) for one in everyone]
        self._batches = batches({n: shape for n, shape in sorted(shapes.items()) if owner[n] == shards.stage.rank})
        self._parts = [(s, part) for s in shards.states for part in s.parts if "momentum" in part.state]

    def update(self, step: Step, updated: Callable[[FlatShard], None]) -> None:
        """Momentum to the owners, AdamW under it, updates back, then the matrices."""
        stage = self.shards.stage
        directions = {id(part): self._direction(s, part, step) for s, part in self._parts}
        sent = _cat([directions[id(part)][a:b] for part, a, b in self._out], self.shards.states[0])
        arriving = exchange_parts(sent, self._to, self._from, stage, self._sent)
        for s in self.shards.update_order:
            for part in s.parts:
                if "momentum" not in part.state:
                    adamw_part(self.config, s, part, step)
        back = self._orthogonalised(arriving.wait())
        returned = exchange_parts(back, self._from, self._to, stage, self._sent).wait()
        runs = returned.split([b - a for _, a, b in self._out]) if self._out else []
        if runs:
            torch_private.foreach_copy_([directions[id(part)][a:b] for part, a, b in self._out], list(runs))
        for s in self.shards.update_order:
            for part in s.parts:
                if (direction := directions.get(id(part))) is not None:
                    self._apply(s, part, direction, step)
            updated(s.shard)

    def _direction(self, s: ShardState, part: StatePart, step: Step) -> torch.Tensor:
        """Update the part's momentum; what is to be orthogonalised, in the type of the GEMMs."""
        held, beta = part.state["momentum"], self.config.muon_momentum
        grad = part.view(s.shard.grads).to(held.dtype)
        if step.scale is not None:
            grad = grad * step.scale.to(held.dtype)
        new = torch.add(grad, held, alpha=beta)
        direction = torch.add(grad, new, alpha=beta) if self.config.muon_nesterov else new
        held.copy_(torch.where(step.skip, held, new))
        return direction.to(_gemm_dtype(s), copy=True)

    def _orthogonalised(self, arrived: torch.Tensor) -> torch.Tensor:
        """The runs of own matrices as they arrived -> the same runs of their updates."""
        whole: dict[str, torch.Tensor] = {}
        stacks = []
        for shape, names in self._batches:
            stack = arrived.new_empty((len(names), *shape))
            whole |= {name: stack[i] for i, name in enumerate(names)}
            stacks.append(stack)
        views, runs, at = [], [], 0
        for run in self._in:
            for box, a, b in flat_boxes(run.box, run.first, run.first + run.length):
                where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                views.append(whole[run.name][where])
                runs.append(arrived[at + a - run.first : at + b - run.first].view(box.sizes))
            at += run.length
        if not views:
            return arrived
        torch_private.foreach_copy_(views, runs)
        for stack in stacks:
            tall = stack.shape[1] > stack.shape[2]
            found = newton_schulz(stack.mT if tall else stack, self.config.muon_steps)
            stack.copy_((found.mT if tall else found) * (self.config.muon_rms * max(stack.shape[1:]) ** 0.5))
        torch_private.foreach_copy_(runs, views)
        return arrived

    def _apply(self, s: ShardState, part: StatePart, direction: torch.Tensor, step: Step) -> None:
        master = part.view(s.master)
        new = master * (1 - step.learning_rate * self.config.weight_decay)
        new.sub_(direction.to(master.dtype), alpha=step.learning_rate)
        master.copy_(torch.where(step.skip, master, new))
        if s.param_out is not None:
            part.view(s.param_out).copy_(master)


def owners(shapes: Mapping[str, Shape], ranks: int) -> dict[str, int]:
    """The rank that orthogonalises each matrix, evenly by work (rows x columns x the smaller of both); the same on all
    ranks, whatever the order of `shapes`."""
    work = sorted(((-a * b * min(a, b), name) for name, (a, b) in shapes.items()))
    loads = [(0, rank) for rank in range(ranks)]
    found = {}
    for cost, name in work:
        load, rank = heapq.heappop(loads)
        found[name] = rank
        heapq.heappush(loads, (load - cost, rank))
    return found


def batches(shapes: Mapping[str, Shape]) -> list[tuple[Shape, list[str]]]:
    """Matrices of one shape, as many at once as BATCH elements hold: (shape, names)."""
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in shapes.items():
        by_shape.setdefault(shape, []).append(name)
    found = []
    for shape, names in by_shape.items():
        most = max(1, BATCH // (shape[0] * shape[1]))
        found += [(shape, names[i : i + most]) for i in range(0, len(names), most)]
    return found


def _gemm_dtype(s: ShardState) -> torch.dtype:
    """bfloat16 where the weights in use are (as published), else the master weights' type."""
    return s.shard.params.dtype


def _cat(runs: Sequence[torch.Tensor], like: ShardState) -> torch.Tensor:
    if runs:
        return torch.cat(list(runs))
    return torch.empty(0, dtype=_gemm_dtype(like), device=like.master.device)


def _told(runs: list[MatrixRun], axis: Axis) -> list[list[MatrixRun]]:
    """Every rank's runs, by rank."""
    if axis.size == 1:
        return [runs]
    found: list[list[MatrixRun]] = [[] for _ in range(axis.size)]
    dist.all_gather_object(found, runs, group=axis.group)
    return found
