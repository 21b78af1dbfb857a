"""Bytes that a training step sends between hosts per axis, by the model's own counts."""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config import Config
from megascale.core.grid import Grid
from megascale.core.memory import DTYPE_BYTES, count_stage_parameters
from megascale.core.traffic import check_priced_axes, gathered_bytes
from megascale.errors import FitError
from megascale.simulate.fabric.placement import Placement, step_flows
from megascale.simulate.fabric.topology import Ints


@dataclass(frozen=True)
class StepTraffic:
    """Attributes:

    grid: the job's.
    reduce: bytes of a rank's gradients, reduce-scattered over its data-parallel group once a step.
    gather: bytes of its parameters, all-gathered.
    activation: bytes of one transfer between stages. transfers: of them a step, each way and rank.
    """

    grid: Grid
    reduce: float
    gather: float
    activation: float
    transfers: int

    @property
    def pipeline(self) -> float:
        """Bytes a rank sends to its neighbour stage in a step, each way."""
        return self.activation * self.transfers


def step_traffic(config: Config, gpus: int) -> StepTraffic:
    """Return the traffic of the fullest stage, the first. Raises FitError for sizes that do not divide."""
    model = config.model
    parallel = config.parallel
    train = config.train
    grid = Grid.from_config(parallel.model_copy(update={"data": None}), gpus)
    check_priced_axes(grid)
    count = count_stage_parameters(model, parallel, 0)
    width = DTYPE_BYTES[train.precision]
    if train.global_batch % (grid.replicas * train.micro_batch):
        raise FitError(
            f"train.global_batch={train.global_batch} does not divide over {grid.replicas} replicas of "
            f"train.micro_batch={train.micro_batch}; use a multiple of {grid.replicas * train.micro_batch}"
        )
    micro_batches = train.global_batch // (grid.replicas * train.micro_batch)
    if parallel.reduce_dtype == "bfloat16":
        reduce_width = width
    else:
        reduce_width = max(4, width)
    reduce = 0.0
    gather = 0.0
    if grid.shards > 1:
        reduce = float(count * reduce_width)
        gather = float(gathered_bytes(model, parallel, 0, train.precision, train.linear_precision, grid.shards))
    return StepTraffic(
        grid=grid,
        reduce=reduce,
        gather=gather,
        activation=model.sequence_length * train.micro_batch * model.hidden * width / (grid.tensor * grid.context),
        transfers=micro_batches * parallel.virtual_stages if grid.pipeline > 1 else 0,
    )


def nic_neighbours(placement: Placement) -> Ints:
    """[n, 2] NICs of data-parallel ring neighbours on different hosts: the heaviest traffic of the step."""
    import numpy as np

    flows = step_flows(placement, "data", 1.0)
    return np.stack([flows.source, flows.target], axis=1)
