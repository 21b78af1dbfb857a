"""Whether chunks are run as CUDA graphs (parallel/chunk_graphs.py), from the configuration alone; torch-free.

The engine, the plan of memory and the simulator ask here, so that they speak of the same run.
"""

from __future__ import annotations

from megascale.config import Config
from megascale.config.parts import ACTIVATIONS, ATTENTIONS, BLOCKS, LINEAR_PRECISIONS, MLPS, NORMS
from megascale.core.flops import layer_flops
from megascale.core.grid import Grid

# FLOPs of a rank's part of a layer, forward and backward of one micro-batch, above which no host is slower than the
# GPU: 13 ms of an H200, where launching a layer's operators takes a host 1.3 ms (gpt2-124m, docs/log.md) and a slow one
# twice that.
MOST_FLOPS = 6e12


def explain_no_graphs(config: Config, grid: Grid | None = None) -> str:
    """Why chunks cannot be captured, or gain nothing by it under kernels.graphs=auto; "" if they are.

    grid: None where the configuration's own sizes are all that is known; data parallelism is then taken to be there.
    """
    wanted = config.kernels.graphs
    tensor, data = (grid.tensor, grid.data) if grid is not None else (config.parallel.tensor, 2)
    if wanted == "off":
        return "kernels.graphs=off"
    if tensor > 1 and config.overlap.tensor in ("async", "off"):
        return f"of tensor parallelism the fused exchange alone is captured, not overlap.tensor={config.overlap.tensor}"
    if config.parallel.zero == 2 and data > 1:
        return "parallel.zero=2 reduces every micro-batch's gradients while backward goes on"
    if config.model.dropout:
        return "a dropout mask depends on the step and the sample"
    if wanted == "auto" and (part := _part_of_others(config)):
        return f"{part} is a part from outside, which may depend on the step; --kernels.graphs=on if it does not"
    tokens = config.model.sequence_length * config.train.micro_batch
    if wanted == "auto" and layer_flops(config.model, 0).training * tokens / tensor > MOST_FLOPS:
        return "a layer's micro-batch keeps the GPU busy for longer than launching it takes"
    return ""


def _part_of_others(config: Config) -> str:
    """A part of the model that was registered from outside, as setting and value; "" if all are our own.

    A replay would repeat the random numbers and the sample index of the micro-batch that was captured.
    """
    model = config.model
    parts = (
        (ACTIVATIONS, model.activation),
        (NORMS, model.norm),
        (ATTENTIONS, model.attention),
        (MLPS, model.mlp),
        (BLOCKS, model.block),
        (LINEAR_PRECISIONS, config.train.linear_precision),
    )
    return next((f"{one.key}={name}" for one, name in parts if name not in one.own), "")
