"""Memory of a rank, and the decision whether its chunks run as CUDA graphs, from the configuration. No torch.

With kernels.graphs=auto, chunks are graphs only if the graphs' buffers fit, so memory and decision depend on each
other. The engine, the planner, the simulator and the preflight check all use this module, so that they describe the
same run. Only the engine can measure launches; all others estimate them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megascale.config import Config
from megascale.config.parts import ACTIVATIONS, ATTENTIONS, BLOCKS, LINEAR_PRECISIONS, MLPS, NORMS
from megascale.config.registry import Registry
from megascale.core.adapters import AdapterSpec
from megascale.core.communicator_memory import estimate_prepared_groups
from megascale.core.copy_choice import explain_collective_reductions, explain_copied_shards
from megascale.core.flops import layer_flops
from megascale.core.grid import Grid
from megascale.core.inventory import count_distinct_layers, has_experts
from megascale.core.layer_spec import ExpertsSpec
from megascale.core.memory import MemoryEstimate, estimate_stage_memory, gathers_float8
from megascale.core.replay_interval import may_replay_with_graphs
from megascale.core.schedule import Schedule

GPU_CONTEXT = 1 << 30  # bytes of a GPU that CUDA and its libraries take
# FLOPs of a layer's forward and backward on one rank, above which graphs gain nothing: an H200 takes about 13 ms for
# them. A host launches a layer's operators in 1.3 ms (gpt2-124m, dev/log.md), and a slow host in twice that time.
MAX_GRAPH_FLOPS = 6e12
EXPERT_LAUNCHES = 2  # a layer of experts has this many times the kernel launches of a dense layer


def estimate_rank_memory(
    config: Config,
    grid: Grid,
    schedule: Schedule,
    stage: int,
    available_bytes: float | None = None,
    has_gpu: bool = True,
    measures_launches: bool = False,
) -> tuple[MemoryEstimate, str]:
    """Estimate the peak memory of a rank of pipeline stage `stage`.

    Args:
        available_bytes: free memory of the rank's device; None if unknown.
        has_gpu: whether the rank runs on a GPU, which CUDA graphs need.
        measures_launches: as for `explain_no_graphs`.

    Returns:
        (the estimate, why the chunks are not CUDA graphs or "" if they are).
    """
    if not has_gpu:
        reason = "CUDA graphs need a GPU"
    elif schedule.splits_backward:
        reason = f"parallel.schedule={config.parallel.schedule} computes weight gradients in actions of their own"
    else:
        reason = explain_no_graphs(config, grid, measures_launches)
    if reason:
        return _estimate(config, grid, schedule, stage, graphs=False, has_gpu=has_gpu), reason
    memory = _estimate(config, grid, schedule, stage, graphs=True, has_gpu=True)
    if available_bytes is None or config.kernels.graphs == "on" or memory.total <= available_bytes:
        return memory, ""
    gib = memory.graph_buffers / 2**30
    reason = f"graph buffers of {gib:.1f} GiB do not fit in the remaining memory; --kernels.graphs=on tries anyway"
    return _estimate(config, grid, schedule, stage, graphs=False, has_gpu=has_gpu), reason


def _estimate(
    config: Config, grid: Grid, schedule: Schedule, stage: int, *, graphs: bool, has_gpu: bool
) -> MemoryEstimate:
    has_copies = has_gpu and not explain_collective_reductions(config, grid)
    gathers_in_float8 = gathers_float8(config.model, config.parallel, config.train.linear_precision, grid.shards)
    copied_shards = explain_copied_shards(config, grid, gathers_in_float8)
    memory = estimate_stage_memory(
        config.model,
        config.parallel,
        grid=grid,
        schedule=schedule,
        stage=stage,
        micro_batch=config.train.micro_batch,
        precision=config.train.precision,
        side_stream=config.gemms_on_side_stream,
        optimizer=config.optimizer.name,
        linear_precision=config.train.linear_precision,
        graphs=graphs,
        offload=config.optimizer.offload,
        adapters=AdapterSpec.from_config(config.train),
        expert_rows=config.kernels.expert_rows,
        reduces_by_copies=has_copies,
        rounds_blocks=has_copies and rounds_block_gradients(config, grid),
        runs_eager_steps=may_replay_with_graphs(config, grid),
        maps_shards=has_gpu and not copied_shards,
    )
    if not has_gpu:
        return memory
    return replace(memory, prepared_groups=estimate_prepared_groups(config, grid))


def rounds_block_gradients(config: Config, grid: Grid) -> bool:
    """Return whether GEMMs round all gradients of blocks to the type in which copies reduce them.

    Blocks then need no gradient slots in float32 (parallel/gradient_slots.py). GEMMs in float8 and those of experts
    cannot round their results, and a registered layer may compute a gradient without a GEMM. Several ranks of the
    tensor axis may compute a gradient by several GEMMs.
    """
    if config.parallel.reduce_dtype != "bfloat16" or explain_collective_reductions(config, grid):
        return False
    if config.train.linear_precision != "default" or config.train.lora is not None:
        return False
    if grid.tensor > 1 or has_experts(config.model):
        return False
    return not find_plugin_setting(config)


def explain_no_graphs(config: Config, grid: Grid | None = None, measures_launches: bool = False) -> str:
    """Return why chunks are not captured as CUDA graphs (parallel/chunk_graphs.py), or "" if they are.

    With kernels.graphs=auto the reason may be that graphs are expected to gain nothing.

    Args:
        grid: None if the number of ranks is unknown; more than one data-parallel rank is then assumed.
        measures_launches: whether the caller measures launches (parallel/launch_times.py), so that their estimate does
            not count.
    """
    mode = config.kernels.graphs
    if grid is None:
        tensor = config.parallel.tensor
        shards = 2
    else:
        tensor = grid.tensor
        shards = grid.shards
    if config.train.lora is not None:
        return "train.lora is not captured"
    if mode == "off":
        return "kernels.graphs=off"
    if tensor > 1 and config.overlap.tensor in ("async", "off"):
        return f"only overlap.tensor=fused can be captured, not overlap.tensor={config.overlap.tensor}"
    if config.parallel.offload_activations:
        return "copies to host memory are not captured (parallel.offload_activations)"
    if config.parallel.context > 1 and config.overlap.context == "collectives":
        return "only overlap.context=copies can be captured, not overlap.context=collectives"
    if config.parallel.zero >= 2 and shards > 1:
        reason = _explain_no_sharded_graphs(config, tensor, shards)
        if reason:
            return reason
    if config.model.dropout:
        return "a dropout mask depends on the step and the sample"
    settings = config.model.experts
    if settings is not None and (config.parallel.expert_ranks > 1 or (settings.biases and tensor > 1)):
        return "the number of a rank's tokens is read on the host (model.experts.biases, parallel.experts_over)"
    microbatches = config.train.global_batch // config.train.micro_batch
    if settings is not None and grid is not None and microbatches % grid.replicas:
        return "experts count no tokens of blank micro-batches, which some replicas run in this layout"
    if mode == "on":
        return ""
    setting = find_plugin_setting(config)
    if setting:
        return (
            f"{setting} is registered by a package and may depend on the step; set --kernels.graphs=on if it does not"
        )
    if not measures_launches and not _are_launches_slow(config, tensor):
        return "a layer's micro-batch keeps the GPU busy for longer than its launches take"
    return ""


def _explain_no_sharded_graphs(config: Config, tensor: int, shards: int) -> str:
    """Return why chunks whose gradients or parameters are sharded (ZeRO-2 and 3) are not captured, or "" if they are.

    Args:
        tensor: number of tensor-parallel ranks.
        shards: number of ranks that shard the state.
    """
    for axis, size in (("tensor", tensor), ("context", config.parallel.context)):
        if size > 1:
            return (
                f"parallel.zero={config.parallel.zero} cuts graphs between blocks, and the exchange of "
                f"parallel.{axis}={size} reaches across"
            )
    linear_precision = config.train.linear_precision
    has_copies = LINEAR_PRECISIONS[linear_precision].weight_copy_bytes > 0
    has_float8_gathers = gathers_float8(config.model, config.parallel, linear_precision, shards)
    if config.parallel.zero == 3 and has_copies and not has_float8_gathers:
        copies = (
            f"parallel.zero=3 gathers matrices in turn, and train.linear_precision={linear_precision} makes copies of "
            "all of them"
        )
        if has_experts(config.model):
            return f"{copies}; set --train.linear_precision=default or a smaller --parallel.zero"
        return f"{copies}; train.linear_precision=float8 with parallel.gather_precision=float8 makes none"
    return ""


def _are_launches_slow(config: Config, tensor: int) -> bool:
    """Return whether a host may launch a layer's kernels more slowly than the device runs them, so that graphs gain.

    The layer with the fewest FLOPs decides.

    Args:
        tensor: number of tensor-parallel ranks.
    """
    sequence = config.model.sequence_length
    layers = [layer for layer, _ in count_distinct_layers(config.model)]
    flops_per_token = min(layer_flops(layer, sequence).training for layer in layers)
    tokens = sequence // config.parallel.context * config.train.micro_batch
    max_flops = MAX_GRAPH_FLOPS
    if any(isinstance(layer.feed_forward, ExpertsSpec) for layer in layers):
        max_flops *= EXPERT_LAUNCHES
    return flops_per_token * tokens / tensor <= max_flops


def find_plugin_setting(config: Config) -> str:
    """Return a model's setting, as key=value, whose value a plugin has registered, or "" if all values are built in.

    A plugin's layer may use random numbers or the sample index, which a graph would repeat in each replay.
    """
    model = config.model
    settings: list[tuple[Registry[Any], str]] = [
        (ACTIVATIONS, model.activation),
        (NORMS, model.norm),
        (BLOCKS, model.block),
        (LINEAR_PRECISIONS, config.train.linear_precision),
    ]
    for layer, _ in count_distinct_layers(model):
        settings += [(ATTENTIONS, layer.mixer.name), (MLPS, layer.feed_forward.name)]
    for registry, name in settings:
        if name not in registry.builtin_names:
            return f"{registry.key}={name}"
    return ""
