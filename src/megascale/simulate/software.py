"""Training stacks: a switch per technique of MegaScale, and the stacks that users compare.

The simulator prices a layout under a `Software`. `MEGATRON_2023` is the paper's baseline (commit 285068c8, January
2023: sequence parallelism, distributed optimizer, interleaved 1F1B, FlashAttention-1, no overlap of communication);
`MEGASCALE` switches everything on. `TECHNIQUES` is the order in which the paper's ablation (its Table 3) does it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megascale.errors import ConfigError
from megascale.simulate.cluster import ClusterSpec

# Kernels for attention that a cluster file must give rates for.
ATTENTION_KERNELS = ("unfused", "flash1", "flash2", "cudnn")
# Activations done again in backward: norms and the activation alone, or whole layers.
# ("core-attention" is what Megatron-LM calls selective: scores, softmax and their product with the values).
RECOMPUTE = ("none", "norms", "activation", "selective", "full", "mlp", "attention", "core-attention")
# Those of them that the engine has (parallel.recompute).
ENGINE_RECOMPUTE = RECOMPUTE[:7]
# Part of a layer's elementwise work, and of its attention, that is done again.
RECOMPUTED = (0.0, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5, 0.0)
RECOMPUTED_ATTENTION = (0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0)

# Family of this project's engine, and of the paper's, which it follows.
MEGASCALE_FAMILY = "megascale"


@dataclass(frozen=True)
class Software:
    """A training stack as a set of switches and host times.

    Attributes:
        family: the code base, by which constants and errors of one stack are kept apart from another's.
        parallel_block: x + Attn(LN x) + MLP(LN x) instead of the serial block (paper section 3.1).
        window: sliding-window attention of this many tokens, None for full attention.
        tp_overlap: tensor-parallel all-gather and reduce-scatter run under the GEMMs they feed (section 3.2).
        pp_overlap: sends and receives overlap compute; False is one blocking exchange after which the host
            synchronises the device, as Megatron-LM did in January 2023.
        dp_overlap: gradients scattered and parameters gathered chunk by chunk under compute, first gather prefetched.
        fused_operators: one kernel each for bias + GeLU, norm + residual, attention on strided inputs.
        passes: how many times the eager element-wise kernels of Megatron-LM pass over memory, per pass of those.
        async_data: batches prepared under the previous step, one reader a host, no stray garbage collection.
        attention: kernel, one of ATTENTION_KERNELS.
        sequence_parallel: norm and residual regions sharded over the tensor axis.
        distributed_optimizer: gradients reduce-scattered and parameters gathered; False is an all-reduce.
        recompute: one of RECOMPUTE.
        gradient_bytes: bytes of a gradient in the accumulator; reduce_bytes: as communicated.
        gather_bytes: bytes of a parameter of a layer as gathered; embeddings are gathered in 2.
        reduce_each: gradients reduced after every micro-batch (ZeRO-2) instead of once a step.
        full_sharding: parameters of a layer are gathered for each forward and each backward, and gradients reduced
            after every micro-batch (ZeRO-3, FSDP).
        shard_copies: what is gathered and reduced for full sharding is copied to and from the layer's own tensors.
        tied_shards: first and last stage sum their shards of a tied embedding's gradient, not all of it.
        launch_us: time of a DGX host to launch one kernel, with the Python around it. A cluster's host.slowness
            multiplies it.
        region_host_us: time of a DGX host to enter or leave a tensor-parallel region, besides its kernels.
        float8_host: how many times as long the host takes where linear layers multiply in float8.
        region_gap_us: what a collective of such a region takes on the device beyond what it takes alone: ranks that
            come late to it, waits between streams. HOST_SOURCES says where these four come from for each stack.
        float8: linear layers multiply in float8.
        has_float8: the stack can multiply in float8 where the GPU can.
        float8_agrees: ranks of a tensor-parallel group agree on each operand's scale before they cast it (current
            scaling); False where the scale comes from earlier steps.
        bf16_weight_gradients: of their three GEMMs that of the weight's gradient does not.
        fused_loss: cross-entropy by kernels that keep 16-bit logits, instead of one a step in float32.
        fused_accumulation: weight gradients are added to by their GEMM; False is a kernel of its own (autograd's).
        tp_backward_under: the collective of an input's gradient runs under the GEMM of the weight's; False waits.
    """

    family: str = "megatron-2023"
    parallel_block: bool = False
    window: int | None = None
    tp_overlap: bool = False
    pp_overlap: bool = False
    dp_overlap: bool = False
    fused_operators: bool = False
    passes: float = 1.0
    async_data: bool = False
    attention: str = "flash1"
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    recompute: str = "none"
    gradient_bytes: int = 4
    reduce_bytes: int = 4
    gather_bytes: int = 2
    reduce_each: bool = False
    full_sharding: bool = False
    shard_copies: bool = False
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
    tp_backward_under: bool = True

    @property
    def precision(self) -> str:
        """Return the precision of linear layers as a user reads it."""
        if not self.float8:
            return "bfloat16"
        if self.bf16_weight_gradients:
            return "float8, weight gradients in bfloat16"
        return "float8"

    @property
    def is_memory_modelled(self) -> bool:
        """Return whether `core/rank_memory.py` models this stack's memory, which is true of this engine only."""
        return self.family == MEGASCALE_FAMILY

    def __post_init__(self) -> None:
        if self.attention not in ATTENTION_KERNELS:
            raise ConfigError(f"attention kernel {self.attention!r} is unknown; one of {', '.join(ATTENTION_KERNELS)}")
        if self.recompute not in RECOMPUTE:
            raise ConfigError(f"recompute={self.recompute!r} is unknown; one of {', '.join(RECOMPUTE)}")


# The paper does not print its window. 768 of 2,048 tokens keep 0.61 of the causal triangle, which is what the MFU
# column of the paper's Table 2 credits (0.60 with its vocabulary of 64,000).
PAPER_WINDOW = 768

# Where the host's and regions' times come from, by stack; nothing of them was fitted to a published step.
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
# Megatron-Core of today: overlaps and fused operators on, serial block, full attention; tensor-parallel transfers are
# exposed, since its user buffers need what rented hosts do not have.
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
# This project's engine: every overlap, cuDNN attention where the GPU has it.
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
# vTrain's measurements: Megatron-DeepSpeed with full recomputation, all-reduced 16-bit gradients, softmax kernels. Its
# column-parallel linear (megatron.mpu.layers) is PyTorch's own with an all-reduce after backward: nothing hides
# that, and autograd adds weight gradients with a kernel of its own.
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
    tp_backward_under=False,
    region_gap_us=12.0,
)
# Fully sharded data parallelism. PyTorch's own with eager layers (a norm in float32 is seven kernels, rotary positions
# and a gated activation are ten: about three times the passes over memory of Megatron-LM's); with compiled ones, as
# torchtitan runs it; and Megatron-Core's. PyTorch's gradients of a micro-batch leave at once, so that none are
# accumulated, and parameters and gradients are copied between shards and layers.
FSDP = replace(
    MEGATRON_CORE,
    family="fsdp",
    fused_operators=False,
    passes=3.0,
    attention="flash2",
    full_sharding=True,
    shard_copies=True,
    gradient_bytes=2,
    launch_us=15.0,
    region_host_us=100.0,
)
TORCHTITAN = replace(FSDP, family="torchtitan", fused_operators=True, passes=1.0, attention="cudnn")
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

# Technique -> the fields it switches on, in the order of the paper's ablation.
TECHNIQUES: dict[str, dict[str, Any]] = {
    "parallel-block": {"parallel_block": True},
    "window": {"window": PAPER_WINDOW},
    "tp-overlap": {"tp_overlap": True},
    "pp-overlap": {"pp_overlap": True},
    "dp-overlap": {"dp_overlap": True},
    "operators": {"fused_operators": True, "attention": "flash2"},
    "data": {"async_data": True},
}


def stack(name: str) -> Software:
    """A named stack; ConfigError naming the known ones."""
    if name not in STACKS:
        raise ConfigError(f"software {name!r} is unknown; known: {', '.join(STACKS)}")
    return STACKS[name]


def own_stack(machine: ClusterSpec) -> str:
    """Return the name of this package's stack on `machine`: cuDNN's attention needs another set of constants."""
    if "cudnn" in machine.kernels.attention:
        return "megascale-h200"
    return "megascale"


def switch(software: Software, names: list[str], on: bool) -> Software:
    """`software` with techniques of LADDER switched on, or off (back to the 2023 baseline's way)."""
    for name in names:
        if name not in TECHNIQUES:
            raise ConfigError(f"technique {name!r} is unknown; known: {', '.join(TECHNIQUES)}")
        if on:
            fields = TECHNIQUES[name]
        else:
            fields = {key: getattr(MEGATRON_2023, key) for key in TECHNIQUES[name]}
        software = replace(software, **fields)
    return software
