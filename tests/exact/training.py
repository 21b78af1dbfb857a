"""What the workers do: train a few steps of a tiny model on made-up tokens and tell all gradients and weights.

Everything is told as boxes of logical tensors, so that the parent can compare layouts without knowing them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from megascale import config as configuration
from megascale.core.batch import NO_FIELDS, Batch, SampleFields
from megascale.core.layout import lay_out
from megascale.data.dataset.sample_fields import restart_positions
from megascale.ops import side_stream
from megascale.optim.learning_rate import compute_learning_rate
from megascale.parallel.buffers import split_extent
from megascale.parallel.launch_times import LaunchClock
from megascale.train.engine import Engine
from tests.exact import kept_groups

STEPS = 3
# The second has what the first leaves: moments, weights that moved, gradients to overwrite, a gather that was begun.
FEW_STEPS = 2


class Boxed(NamedTuple):
    """A part of a logical tensor."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: np.ndarray


@dataclass
class RankReport:
    """Records one rank's training.

    Attributes:
        losses, norms: of each step.
        gradients: this rank's share of each step's gradients, as the optimizer is about to use them.
        state: weights and moments after the last step; names begin with model., optimizer.exp_avg., ...
        active: what each operator ran.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[list[Boxed]] = field(default_factory=list)
    state: list[Boxed] = field(default_factory=list)
    active: dict[str, str] = field(default_factory=dict)


class Late(side_stream.InlineStream):
    """Runs works as late as a side stream may: when gradients are read, or when two others were asked for since."""

    def __init__(self) -> None:
        self.open: deque[Callable[[], Any]] = deque()

    def run(self, work: Callable[[], Any], after: Any = None) -> None:
        self.open.append(work)
        self._close(side_stream.MAX_IN_FLIGHT)

    def synchronize(self) -> None:
        self._close(0)

    def discard(self) -> None:
        self.open.clear()

    @torch.no_grad()
    def _close(self, remaining: int) -> None:
        while len(self.open) > remaining:
            self.open.popleft()()


@contextmanager
def late_gemms() -> Iterator[None]:
    """GEMMs on the side stream run as late as they may."""
    with mock.patch.object(side_stream, "InlineStream", Late):
        yield


def train(
    rank: int,
    world: int,
    tree: dict[str, Any],
    steps: int = STEPS,
    fault: Callable[[], Any] = nullcontext,
    fields: SampleFields = NO_FIELDS,
    loads_kernels: bool = False,
) -> RankReport:
    """Train `steps` steps of the configuration `tree` as `rank` of `world`, under the context manager fault().

    Args:
        loads_kernels: whether a pipeline loads its kernels first, as it does on GPUs; the training must not change.
    """
    with fault():
        engine = make_engine(rank, world, tree, fields)
        if loads_kernels and engine.layout.grid.pipeline > 1:
            engine.load_kernels()
        report = RankReport()
        observe(engine, report)
        for step in range(1, steps + 1):
            run_step(engine, step, report)
        report.state, report.active = state_of(engine), engine.runtime.kernels.list_choices()
    return report


def make_engine(
    rank: int,
    world: int,
    tree: dict[str, Any],
    fields: SampleFields = NO_FIELDS,
    launch_clock: LaunchClock | None = None,
) -> Engine:
    """Return the engine of this rank. The default process group exists."""
    config = configuration.from_tree(tree)
    layout = lay_out(config, world)
    groups = None
    if world > 1:
        groups = kept_groups.get_groups(layout, rank, config.model.tied_embeddings)
    return Engine(layout, groups, torch.device("cpu"), fields=fields, launch_clock=launch_clock)


def observe(engine: Engine, report: RankReport) -> None:
    """Take note of the gradients at the moment the optimizer gets them (LAMB overwrites them)."""
    update = engine.optimizer.step

    def step(*args: Any, **options: Any) -> Any:
        engine.data_parallel.finish_tied()  # as the optimizer does before it reads them
        result = []
        for state in engine.optimizer.states:
            for extent in state.shard.extents:
                for piece, offsets, view in split_extent(extent, state.shard.grads):
                    result.append(Boxed(piece.name, piece.shape, offsets, view.numpy().copy()))
        report.gradients.append(result)
        return update(*args, **options)

    engine.optimizer.step = step  # type: ignore[method-assign]


def run_step(engine: Engine, step: int, report: RankReport) -> None:
    """One optimizer step on tokens that depend on the step and the sample only."""
    config = engine.config
    train, share = config.train, config.train.global_batch // engine.layout.grid.replicas

    def read_batch(i: int) -> Batch[torch.Tensor]:
        first = engine.data_rank * share + i * train.micro_batch
        samples = range(first, first + train.micro_batch)
        columns = torch.from_numpy(np.stack([tokens(config, step, sample) for sample in samples], axis=1))
        batch = Batch(columns[:-1].contiguous(), columns[1:].contiguous())
        if engine.fields.loss_weights:
            weights = np.stack([weights_of(step, sample) for sample in samples], axis=1)
            batch = replace(batch, loss_weights=torch.from_numpy(weights))
        if engine.fields.max_documents:
            count = engine.fields.max_documents
            edges = [boundaries(config, step, sample, count) for sample in samples]
            restarted = [restart_positions(sample_edges) for sample_edges in edges]
            batch = replace(
                batch,
                positions=torch.from_numpy(np.stack(restarted, axis=1)).long(),
                document_boundaries=torch.from_numpy(np.stack(edges, axis=1)),
            )
        elif engine.fields.positions:
            columns = np.stack([positions(config, step, sample) for sample in samples], axis=1)
            batch = replace(batch, positions=torch.from_numpy(columns))
        return batch

    def weights_of(step: int, sample: int) -> np.ndarray:
        weights = loss_weights(config, step, sample)
        if engine.fields.max_documents:
            edges = boundaries(config, step, sample, engine.fields.max_documents)
            weights[np.unique(edges)[1:] - 1] = 0  # the last token of a document predicts nothing
        return weights

    def sum_weights() -> float:
        first = engine.data_rank * share
        return float(sum(weights_of(step, sample).sum() for sample in range(first, first + share)))

    engine.start_gather()
    rate = compute_learning_rate(config.lr, step, STEPS)
    result = engine.step(read_batch, step, rate, has_next_step=step < STEPS, sum_weights=sum_weights)
    data = engine.data_parallel
    # What the next step needs first is on its way by now, and nothing is after the last.
    moves = data.overlap and data.buffers[0].zero > 0 and engine.layout.grid.shards > 1
    if data.buffers[0].zero == 3:
        moves = moves and bool(data.buffers[0].resident_buckets)
    assert data.is_gathering(0) == (step < STEPS and moves)
    report.losses.append(float(result.loss))
    report.norms.append(float(result.grad_norm))


def tokens(config: configuration.Config, step: int, sample: int) -> np.ndarray:
    """One sample, int64 [sequence + 1]."""
    draw = np.random.default_rng((step, sample))
    return draw.integers(0, config.model.vocab, config.model.sequence_length + 1)


def loss_weights(config: configuration.Config, step: int, sample: int) -> np.ndarray:
    """One sample's loss weights, float32 [sequence]: unequal, some 0, and all 0 in every third sample."""
    draw = np.random.default_rng((step, sample, 1))
    weights = draw.integers(0, 4, config.model.sequence_length) / 4
    return (weights * (sample % 3 > 0)).astype(np.float32)


def boundaries(config: configuration.Config, step: int, sample: int, max_documents: int) -> np.ndarray:
    """One sample's document boundaries, int32 [max_documents + 1]: of one to all documents."""
    draw = np.random.default_rng((step, sample, 3))
    length = config.model.sequence_length
    inner = np.sort(draw.choice(np.arange(1, length), size=draw.integers(0, max_documents), replace=False))
    return np.concatenate([[0], inner, np.full(max_documents - len(inner), length)]).astype(np.int32)


def positions(config: configuration.Config, step: int, sample: int) -> np.ndarray:
    """One sample's positions, int64 [sequence], which begin anew at its second document."""
    length = config.model.sequence_length
    border = int(np.random.default_rng((step, sample, 2)).integers(1, length))
    return np.concatenate([np.arange(border), np.arange(length - border)])


def state_of(engine: Engine) -> list[Boxed]:
    """This rank's share of weights and moments."""
    return [Boxed(name, shape, at, view.numpy().copy()) for name, shape, at, view in engine.logical_tensors()]


def boxes_of(report: list[RankReport]) -> Iterator[tuple[str, list[Boxed]]]:
    """Everything that all ranks told, by kind: `step 1 gradient`, ..., `state`."""
    for step in range(len(report[0].gradients)):
        yield f"step {step + 1} gradient", [box for item in report for box in item.gradients[step]]
    yield "state", [box for outcome in report for box in outcome.state]
