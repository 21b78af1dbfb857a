"""Bytes that a training step sends between hosts, by axis, from the counts of core/."""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config import Config
from megascale.core.grid import Grid
from megascale.core.parameter_counts import count_stage_parameters
from megascale.core.tensors import DTYPE_BYTES
from megascale.core.traffic import check_priced_axes, gathered_bytes
from megascale.errors import FitError


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that a step sends, for a rank of the fullest stage.

    Attributes:
        grid: the job's grid.
        reduce: bytes of the rank's gradients, which are reduce-scattered once per step.
        gather: bytes of the rank's parameters, which are all-gathered once per step.
        activation: bytes of one transfer between stages.
        transfers: number of transfers per step, rank and direction.
    """

    grid: Grid
    reduce: float
    gather: float
    activation: float
    transfers: int

    @property
    def pipeline(self) -> float:
        """Bytes that a rank sends to a neighbouring stage in a step, in each direction."""
        return self.activation * self.transfers


def estimate_step_traffic(config: Config, gpus: int) -> StepTraffic:
    """Return the traffic of the first stage, which is the fullest. Raises FitError if sizes do not divide."""
    model = config.model
    parallel = config.parallel
    train = config.train
    grid = Grid.from_config(parallel.model_copy(update={"data": None}), gpus)
    check_priced_axes(grid)
    parameters = count_stage_parameters(model, parallel, 0)
    itemsize = DTYPE_BYTES[train.precision]
    if train.global_batch % (grid.replicas * train.micro_batch):
        raise FitError(
            f"train.global_batch={train.global_batch} does not divide over {grid.replicas} replicas of "
            f"train.micro_batch={train.micro_batch}; use a multiple of {grid.replicas * train.micro_batch}"
        )
    micro_batches = train.global_batch // (grid.replicas * train.micro_batch)
    reduce_itemsize = itemsize if parallel.reduce_dtype == "bfloat16" else max(4, itemsize)
    reduce = 0.0
    gather = 0.0
    if grid.shards > 1:
        reduce = float(parameters * reduce_itemsize)
        gather = float(gathered_bytes(model, parallel, 0, train.precision, train.linear_precision, grid.shards))
    return StepTraffic(
        grid=grid,
        reduce=reduce,
        gather=gather,
        activation=model.sequence_length * train.micro_batch * model.hidden * itemsize / (grid.tensor * grid.context),
        transfers=micro_batches * parallel.virtual_stages if grid.pipeline > 1 else 0,
    )
