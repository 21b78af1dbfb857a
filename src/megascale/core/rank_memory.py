"""Memory of a rank as it will run, CUDA graphs included where they fit; torch-free.

The engine, the plan and the check before a start ask here, so that they speak of the same run: kernels.graphs=auto has
graphs where their buffers fit beside all else.
"""

from __future__ import annotations

from megascale.config import Config
from megascale.core.graph_choice import explain_no_graphs
from megascale.core.grid import Grid
from megascale.core.memory import MemoryEstimate, estimate_stage_memory
from megascale.core.schedule import Schedule

GPU_CONTEXT = 1 << 30  # bytes of a GPU that CUDA and its libraries take


def estimate_rank_memory(
    config: Config, grid: Grid, schedule: Schedule, stage: int, most: float | None = None, gpus: bool = True
) -> tuple[MemoryEstimate, str]:
    """(memory of a rank of pipeline stage `stage` at its peak, why its chunks are no CUDA graphs; "" if they are).

    most: bytes that there are for it; None where nobody knows. gpus: whether it runs on one; graphs need one.
    """
    train, parallel = config.train, config.parallel

    def estimate(graphs: bool) -> MemoryEstimate:
        about = (grid, schedule, stage, train.micro_batch, train.precision, config.gemms_on_side_stream)
        return estimate_stage_memory(
            config.model, parallel, *about, config.optimizer.name, train.linear_precision, graphs
        )

    why = explain_no_graphs(config, grid) if gpus else "graphs are of GPUs"
    if why:
        return estimate(False), why
    memory = estimate(True)
    if most is None or config.kernels.graphs == "on" or memory.total <= most:
        return memory, ""
    gib = memory.graph_buffers / 2**30
    return estimate(False), f"their buffers, {gib:.1f} GiB, do not fit beside the rest; --kernels.graphs=on tries"
