"""Bytes that a training step sends between hosts, by axis, from the counts of core/."""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config import Config
from megascale.core.adapters import AdapterSpec
from megascale.core.grid import Grid
from megascale.core.layout import lay_out
from megascale.core.tensors import DTYPE_BYTES
from megascale.core.traffic import check_priced_axes, estimate_stage_traffic
from megascale.errors import FitError


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that a step sends, for a rank of the fullest stage.

    Attributes:
        grid: the job's grid.
        reduce: bytes of gradients that enter reduce-scatters in a step. From ZeRO-2 on, each micro-batch reduces its
            gradients; an all-reduce (ZeRO-0) counts twice.
        gather: bytes of parameters that all-gathers return in a step. ZeRO-3 gathers them for each pass.
        activation: bytes of one transfer between stages.
        transfers: number of transfers per step, rank and direction.
        wrap_share: transfers between the last and the first stage, relative to those between other stages. Only
            schedules with several chunks per stage have them.
    """

    grid: Grid
    reduce: float
    gather: float
    activation: float
    transfers: int
    wrap_share: float

    @property
    def pipeline(self) -> float:
        """Bytes that a rank sends to a neighbouring stage in a step, in each direction."""
        return self.activation * self.transfers


def estimate_step_traffic(config: Config, gpus: int) -> StepTraffic:
    """Return the traffic of the first stage, which is the fullest. Raises FitError if sizes do not divide."""
    model = config.model
    parallel = config.parallel.model_copy(update={"data": None})
    train = config.train
    grid = Grid.from_config(parallel, gpus)
    check_priced_axes(grid)
    itemsize = DTYPE_BYTES[train.precision]
    if train.global_batch % (grid.replicas * train.micro_batch):
        raise FitError(
            f"train.global_batch={train.global_batch} does not divide over {grid.replicas} replicas of "
            f"train.micro_batch={train.micro_batch}; use a multiple of {grid.replicas * train.micro_batch}"
        )
    micro_batches = train.global_batch // (grid.replicas * train.micro_batch)
    layout = lay_out(config.model_copy(update={"parallel": parallel}), gpus)
    sent = estimate_stage_traffic(
        model,
        parallel,
        grid=grid,
        schedule=layout.unchecked_schedule(),
        stage=0,
        micro_batch=train.micro_batch,
        precision=train.precision,
        linear_precision=train.linear_precision,
        adapters=AdapterSpec.from_config(train),
    )
    # In a ring of n ranks, a rank sends (n-1)/n of the bytes.
    reduce = 0.0
    gather = 0.0
    if grid.shards > 1:
        reduce = sent.data_reduce * grid.shards / (grid.shards - 1)
        gather = sent.data_gather * grid.shards / (grid.shards - 1)
    chunks = parallel.virtual_stages
    return StepTraffic(
        grid=grid,
        reduce=reduce,
        gather=gather,
        activation=model.sequence_length * train.micro_batch * model.hidden * itemsize / (grid.tensor * grid.context),
        transfers=micro_batches * chunks if grid.pipeline > 1 else 0,
        wrap_share=(chunks - 1) / chunks,
    )
