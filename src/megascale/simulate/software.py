"""Software stacks for training: switches for the techniques of MegaScale, and the stacks that users compare.

The simulator estimates a layout under a `Software`. `MEGATRON_2023` is the paper's baseline (commit 285068c8, January
2023: sequence parallelism, distributed optimizer, interleaved 1F1B, FlashAttention-1, no overlap of communication).
`MEGASCALE` has all techniques on. `TECHNIQUES` has them in the order of the paper's ablation (Table 3). "The paper" is
MegaScale (NSDI 2024), and "this engine" is the trainer of this repository.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from megascale.errors import ConfigError
from megascale.simulate.cluster import ATTENTION_KERNELS, ClusterSpec

# Activations that backward recomputes. "core-attention" is Megatron-LM's selective recomputation: scores, softmax and
# their product with the values.
RECOMPUTE = ("none", "norms", "activation", "selective", "full", "mlp", "attention", "core-attention")
# Values that this engine supports (parallel.recompute): all but "core-attention".
ENGINE_RECOMPUTE = RECOMPUTE[:7]
# Share of a layer's element-wise work that is recomputed, and share of its attention, for each value of RECOMPUTE.
RECOMPUTED = (0.0, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5, 0.0)
RECOMPUTED_ATTENTION = (0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0)

# Family of this engine and of the paper's engine.
MEGASCALE_FAMILY = "megascale"


@dataclass(frozen=True)
class Software:
    """A training stack as a set of switches and of times on the host.

    Attributes:
        family: the code base; calibrations and errors are kept per family.
        parallel_block: x + Attn(LN x) + MLP(LN x) instead of the serial block (paper section 3.1).
        window: sliding-window attention of this many tokens, None for full attention.
        tp_overlap: tensor-parallel all-gathers and reduce-scatters overlap with the GEMMs next to them (section 3.2).
        pp_overlap: sends and receives overlap compute; False is one blocking exchange after which the host
            synchronises the device, as Megatron-LM did in January 2023.
        dp_overlap: gradients are scattered and parameters gathered chunk by chunk during compute, and the first gather
            is prefetched.
        fused_operators: one kernel each for bias + GeLU, norm + residual, attention on strided inputs.
        elementwise_passes: memory traffic of eager element-wise kernels, relative to Megatron-LM's.
        async_data: batches are prepared during the previous step by one reader per host, and garbage collection is
            planned.
        attention: kernel, one of ATTENTION_KERNELS.
        sequence_parallel: norm and residual regions sharded over the tensor axis.
        distributed_optimizer: gradients reduce-scattered and parameters gathered; False is an all-reduce.
        recompute: one of RECOMPUTE.
        gradient_bytes: bytes per gradient in the accumulator.
        reduce_bytes: bytes per gradient in the reduction.
        gather_bytes: bytes per gathered parameter of a layer; embeddings are gathered in 2.
        reduces_each_microbatch: gradients are reduced after every micro-batch (ZeRO-2) instead of once per step.
        full_sharding: parameters of a layer are gathered for each forward and each backward, and gradients are reduced
            after every micro-batch (ZeRO-3, FSDP).
        shard_copies: with full sharding, gathered parameters and reduced gradients are copied from and to the layer's
            tensors.
        unit_slots: with full sharding, the units, slots and copies of parallel/parameter_slots.py. A tied embedding is
            reduced once per step, and GEMMs overwrite weight gradients, which are then added to the shard.
        copied_gathers: with unit slots, copy engines gather units within a host (overlap.gathers).
        copied_reductions: least tokens of a micro-batch with which copy engines move gradients of units within a host
            (overlap.reductions); infinity: collectives reduce them.
        mapped_shards: with copied gathers, slots contain own shards, so that these are not copied.
        rounded_gradients: with copied reductions, GEMMs write weight gradients of blocks in the type of the reduction.
        tied_shards: first and last stage sum their shards of a tied embedding's gradient instead of the whole gradient.
        launch_us: time of a DGX host to launch one kernel, with the Python around it. A cluster's host.slowness
            multiplies it.
        region_host_us: time of a DGX host to enter or leave a tensor-parallel region, without its kernels.
        float8_host: factor on `launch_us` and `region_host_us` if linear layers multiply in float8.
        region_gap_us: additional time of a collective of such a region on the device, because ranks arrive late and
            streams wait for each other. HOST_SOURCES has the sources of this value and the three before it.
        float8: linear layers multiply in float8.
        has_float8: the stack supports float8 on GPUs that do.
        float8_agrees: ranks of a tensor-parallel group agree on the scale of each operand before they cast it (current
            scaling); False: the scale comes from earlier steps.
        bf16_weight_gradients: with float8, the GEMM of the weight gradient is in bfloat16.
        fused_loss: the cross-entropy keeps logits in 16 bit, instead of a sequence of kernels in float32.
        fused_accumulation: the GEMM adds to the weight gradient; False: a kernel of autograd adds the result.
        tp_backward_overlap: the collective of an input's gradient overlaps with the GEMM of the weight gradient.
        trains_adapters: only adapters are trained (train.lora), so that matrices have no gradient, reduction or update.
    """

    family: str = "megatron-2023"
    parallel_block: bool = False
    window: int | None = None
    tp_overlap: bool = False
    pp_overlap: bool = False
    dp_overlap: bool = False
    fused_operators: bool = False
    elementwise_passes: float = 1.0
    async_data: bool = False
    attention: str = "flash1"
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    recompute: str = "none"
    gradient_bytes: int = 4
    reduce_bytes: int = 4
    gather_bytes: int = 2
    reduces_each_microbatch: bool = False
    full_sharding: bool = False
    shard_copies: bool = False
    unit_slots: bool = False
    copied_gathers: bool = False
    copied_reductions: float = math.inf
    mapped_shards: bool = False
    rounded_gradients: bool = False
    tied_shards: bool = False
    launch_us: float = 15.0
    region_host_us: float = 60.0
    float8_host: float = 1.0
    region_gap_us: float = 145.0
    float8: bool = False
    has_float8: bool = True
    float8_agrees: bool = False
    bf16_weight_gradients: bool = False
    fused_loss: bool = False
    fused_accumulation: bool = True
    tp_backward_overlap: bool = True
    trains_adapters: bool = False

    @property
    def precision(self) -> str:
        """Precision of linear layers in tables."""
        if not self.float8:
            return "bfloat16"
        if self.bf16_weight_gradients:
            return "float8, weight gradients in bfloat16"
        return "float8"

    @property
    def is_memory_modelled(self) -> bool:
        """Return whether `core/rank_memory.py` models this stack's memory: only for this engine."""
        return self.family == MEGASCALE_FAMILY

    def __post_init__(self) -> None:
        if self.attention not in ATTENTION_KERNELS:
            raise ConfigError(f"attention kernel {self.attention!r} is unknown; one of {', '.join(ATTENTION_KERNELS)}")
        if self.recompute not in RECOMPUTE:
            raise ConfigError(f"recompute={self.recompute!r} is unknown; one of {', '.join(RECOMPUTE)}")


# The paper does not print its window. A window of 768 of 2,048 tokens keeps 0.61 of the causal triangle. The MFU column
# of the paper's Table 2 implies 0.60 (with its vocabulary of 64,000).
PAPER_WINDOW = 768

# Sources of the times on the host and in regions, by stack. None of them was fitted to a published step time.
HOST_SOURCES = {
    "megatron-2022": (
        "assumed: eager PyTorch 1.x launches a kernel in about 15 us and a collective in about 60; gap: an all-gather "
        "of 50 MB over 8 A100 takes 220 us in nccl-tests and 365 us in Calculon (120 GB/s, systems/a100_80g.json), "
        "which was validated on Megatron-LM's steps"
    ),
    "megatron-deepspeed": (
        "host as megatron-2022; gap: all-reduces of 50 MB over 8 A100 take what nccl-tests say in vTrain's own "
        "simulator (its predictor looks them up), and 47 us more in Calculon (180 GB/s): between the two, for each half"
    ),
    "megatron-core": (
        "measured on rented hosts: layers of GPT 13B in TP2 at micro-batch 1 take 6.8 (two H100, 2026-11-26), 7.3 "
        "(H200, 2026-11-20) and 8.9 ms (four H100, 2026-11-26) with TransformerEngine; in float8 11.3 where bfloat16 "
        "takes 8.9. A third for modules (31 kernels) and two thirds for 8 regions is assumed: no layer without tensor "
        "parallelism was bound by its launches. Halved for a DGX host: see host.slowness. Gap: 60 us, between "
        "Megatron-LM's of 2022 and this engine's, by the peers' steps in TP2 against those in DP (development)"
    ),
    "megascale": (
        "measured on a rented H200 host (dev/log.md): gpt2-124m at micro-batch 1 takes 25 ms per micro-batch, 12 "
        "layers of 31 kernels and as much again around them; regions are copies of the same stream of launches. "
        "Halved for a DGX host: see host.slowness"
    ),
    "graphs": "assumed: one launch replays a layer's kernels",
}

MEGATRON_2023 = Software(has_float8=False)
MEGASCALE = Software(
    family=MEGASCALE_FAMILY,
    parallel_block=True,
    window=PAPER_WINDOW,
    tp_overlap=True,
    pp_overlap=True,
    dp_overlap=True,
    fused_operators=True,
    async_data=True,
    attention="flash2",
)
# Megatron-Core of today: overlaps and fused operators on, serial block, full attention. Tensor-parallel transfers are
# exposed, since rented hosts do not support its user buffers.
MEGATRON_CORE = replace(
    MEGASCALE,
    family="megatron-core",
    parallel_block=False,
    window=None,
    tp_overlap=False,
    launch_us=40.0,
    region_host_us=300.0,
    region_gap_us=60.0,
    float8_host=1.27,
)
MEGATRON_CORE_H200 = replace(MEGATRON_CORE, attention="cudnn")
# NeMo and Megatron-Bridge as NVIDIA publishes them: Megatron-Core with tensor-parallel transfers under the GEMMs (user
# buffers) and gradients reduced in bfloat16 (grad_sync_dtype of its recipes).
NEMO = replace(MEGATRON_CORE_H200, family="nemo", tp_overlap=True, reduce_bytes=2)
# This engine on an H200: every overlap, and cuDNN's attention.
MEGASCALE_H200 = replace(
    MEGASCALE,
    attention="cudnn",
    launch_us=20.0,
    region_host_us=40.0,
    region_gap_us=10.0,
    fused_loss=True,
    float8_agrees=True,
)
MEGASCALE_H200_GRAPHS = replace(MEGASCALE_H200, launch_us=0.5, region_host_us=1.0)
# The stack of vTrain's measurements: Megatron-DeepSpeed with full recomputation, all-reduced 16-bit gradients, softmax
# kernels. Its column-parallel linear layer (megatron.mpu.layers) is PyTorch's, with an exposed all-reduce after
# backward. Autograd adds weight gradients with a separate kernel.
MEGATRON_DEEPSPEED = Software(
    family="megatron-deepspeed",
    has_float8=False,
    attention="unfused",
    sequence_parallel=False,
    distributed_optimizer=False,
    recompute="full",
    gradient_bytes=2,
    reduce_bytes=2,
    fused_accumulation=False,
    tp_backward_overlap=False,
    region_gap_us=12.0,
)
# Fully sharded data parallelism: PyTorch's with eager layers, PyTorch's with compiled layers (torchtitan), and
# Megatron-Core's. Eager layers pass over memory about three times as often as Megatron-LM's: a norm in float32 has
# seven kernels, rotary positions and a gated activation have ten. PyTorch reduces the gradients of each micro-batch at
# once, so that none are accumulated, and copies parameters and gradients between shards and layers.
FSDP = replace(
    MEGATRON_CORE,
    family="fsdp",
    fused_operators=False,
    elementwise_passes=3.0,
    attention="flash2",
    full_sharding=True,
    shard_copies=True,
    gradient_bytes=2,
    launch_us=15.0,
    region_host_us=100.0,
)
TORCHTITAN = replace(FSDP, family="torchtitan", fused_operators=True, elementwise_passes=1.0, attention="cudnn")
MEGATRON_FSDP = replace(NEMO, family="megatron-fsdp", full_sharding=True)

STACKS = {
    "megatron-2023": MEGATRON_2023,
    "megatron-core": MEGATRON_CORE,
    "megascale": MEGASCALE,
    "megatron-core-h200": MEGATRON_CORE_H200,
    "nemo": NEMO,
    "fsdp": FSDP,
    "torchtitan": TORCHTITAN,
    "megatron-fsdp": MEGATRON_FSDP,
    "megascale-h200": MEGASCALE_H200,
    "megascale-h200-graphs": MEGASCALE_H200_GRAPHS,
    "megatron-deepspeed": MEGATRON_DEEPSPEED,
}

# Values of the fields that each technique switches on, in the order of the paper's ablation.
TECHNIQUES: dict[str, dict[str, Any]] = {
    "parallel-block": {"parallel_block": True},
    "window": {"window": PAPER_WINDOW},
    "tp-overlap": {"tp_overlap": True},
    "pp-overlap": {"pp_overlap": True},
    "dp-overlap": {"dp_overlap": True},
    "operators": {"fused_operators": True, "attention": "flash2"},
    "data": {"async_data": True},
}


def find_stack(name: str) -> Software:
    """Return a stack by its name in STACKS. Raises ConfigError for an unknown name."""
    if name not in STACKS:
        raise ConfigError(f"software {name!r} is unknown; known: {', '.join(STACKS)}")
    return STACKS[name]


def choose_engine_stack(machine: ClusterSpec) -> str:
    """Return the name of this engine's stack on `machine`, by whether its file has rates of cuDNN's attention."""
    if "cudnn" in machine.kernels.attention:
        return "megascale-h200"
    return "megascale"


def switch_techniques(software: Software, names: list[str], on: bool) -> Software:
    """Return `software` with techniques switched on, or off (to the values of MEGATRON_2023).

    Raises ConfigError for an unknown technique.

    Args:
        names: techniques, keys of TECHNIQUES.
    """
    for name in names:
        if name not in TECHNIQUES:
            raise ConfigError(f"technique {name!r} is unknown; known: {', '.join(TECHNIQUES)}")
        if on:
            fields = TECHNIQUES[name]
        else:
            fields = {key: getattr(MEGATRON_2023, key) for key in TECHNIQUES[name]}
        software = replace(software, **fields)
    return software
