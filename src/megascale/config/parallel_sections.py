"""The sections [parallel] and [overlap]: layout of the model over ranks, and overlap of communication."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from megascale.config.axes import AXES
from megascale.config.base import MAX_COUNT, MAX_LAYERS, Section


def _to_integer(count: float) -> int | float:
    """Return a whole number as an integer, another number unchanged."""
    if count == round(count):
        return round(count)
    return count


# Layers of a model chunk: an integer, or a multiple of 0.5. `ParallelConfig.layer_split` explains the halves.
Layers = Annotated[float, Field(allow_inf_nan=False, le=MAX_LAYERS), AfterValidator(_to_integer)]


class ParallelConfig(Section):
    """Layout of the model over ranks. Data parallelism fills the world by default."""

    tensor: int = Field(1, ge=1, le=1_000_000, description="tensor-parallel ranks (with sequence parallelism)")
    pipeline: int = Field(1, ge=1, le=MAX_LAYERS, description="pipeline stages")
    virtual_stages: int = Field(1, ge=1, le=1000, description="model chunks per stage (interleaved 1F1B if above 1)")
    schedule: str = Field(
        "auto",
        description="pipeline schedule: 1f1b (one chunk per stage), interleaved (any number of chunks; more "
        "micro-batches in flight, which hides transfers better), auto (1f1b for one chunk, interleaved for more), or "
        "a registered schedule (core/schedule_registry.py)",
    )
    micro_batch_group_size: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="consecutive micro-batches of a chunk (interleaved 1F1B); default: parallel.pipeline. On slow "
        "networks a larger group hides more of the gradient and parameter transfers, and holds more activations",
    )
    context: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="ranks that divide the tokens of each sequence, for long ones (docs/long-context.md)",
    )
    data: int | None = Field(
        None, ge=1, le=1_000_000, description="data-parallel ranks; default: all ranks / (tensor x pipeline)"
    )
    experts_over: Literal["tensor", "data", "context"] = Field(
        "tensor",
        description="ranks that divide the experts of a layer (model.mlp=experts); tensor: those of parallel.tensor; "
        "data: also those of parallel.expert, which read different samples; context: also those of parallel.context",
    )
    expert: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="ranks that divide the experts and read different samples, in addition to the data-parallel ranks "
        "(parallel.experts_over=data)",
    )
    axes: list[str] = Field(
        [], description="ranks along axes of plugins, each as NAME=SIZE; the axes are registered in config/axes.py"
    )
    layer_split: list[Layers] | None = Field(
        None,
        description="layers of each model chunk, in model order; 2.5 ends between a layer's attention and its MLP "
        "(model.block=serial); default: whole layers, balanced with the logits",
    )
    zero: Literal[0, 1, 2, 3] = Field(
        1,
        description="ZeRO stage; 0: everything is replicated; 1: optimizer state is sharded over data-parallel ranks, "
        "gradients are reduced once per step; 2: fp32 gradients are sharded too and reduced after every micro-batch; "
        "3: matrices are sharded too and gathered layer by layer for each forward and backward",
    )
    zero3_keep_layers: int = Field(
        0,
        ge=0,
        le=100_000,
        description="layers of each pipeline stage whose matrices stay gathered on every rank from their first forward "
        "of a step to the update (needs zero=3 and at most three virtual_stages); more memory, fewer gathers",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="communication dtype of gradients between data-parallel ranks; float32: as accumulated; bfloat16: "
        "rounded, half the bytes, summed in float32 (needs zero=1 or more). A rank's own gradients are rounded with "
        "overlap.reductions=copies only",
    )
    gather_precision: Literal["auto", "float8", "default"] = Field(
        "default",  # until its kernels have run on several GPUs
        description="communication dtype of parameters between data-parallel ranks; default: train.precision; float8: "
        "matrices of linear layers in float8, half of bfloat16's bytes with identical results (needs "
        "train.linear_precision=float8 and zero=1 or more); auto: float8 if possible",
    )
    bucket_elements: int = Field(
        40_000_000,
        ge=1,
        le=MAX_COUNT * 1000,
        description="parameters per data-parallel message; smaller messages overlap better, larger ones are faster",
    )
    replicate: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="copies of the sharded state (hybrid sharding): parallel.data ranks share a copy and are "
        "neighbours, such as the GPUs of a host; gradients are summed over copies once per step (needs zero=1 or more)",
    )
    recompute: Literal["none", "norms", "activation", "selective", "mlp", "attention", "full"] = Field(
        "none",
        description="activations that backward recomputes instead of saving them; norms: their outputs; activation: "
        "the MLP's; selective: both; mlp or attention: that half of serial blocks from its input (mlp suits long "
        "sequences, where attention is most of the work); full: whole layers from their input",
    )
    offload_activations: bool = Field(
        False,
        description="keep the inputs of layers in host memory until backward recomputes the layers; copies run under "
        "compute (needs recompute=full)",
    )
    gpus_per_host: int = Field(8, ge=1, le=1_000_000, description="ranks on one host, for placement and planning")

    @field_validator("axes")
    @classmethod
    def _check_axes(cls, axes: list[str]) -> list[str]:
        for assignment in axes:
            name, _, size = assignment.partition("=")
            AXES.validate_name(name)
            if AXES[name].key:
                raise ValueError(f"parallel.axes={assignment!r} names a built-in axis; set {AXES[name].key} instead")
            if not size.isdecimal() or int(size) < 1:
                raise ValueError(f"parallel.axes={assignment!r} has no size of 1 or more; write it as {name}=2")
        return axes

    def axis_sizes(self) -> dict[str, int | None]:
        """Return the number of ranks along each axis, fastest axis first; None for an unset axis that fills the world.

        The axis slice takes the place of the axis context if parallel.experts_over is context.
        """
        sizes: dict[str, int | None] = {}
        plugin_sizes = dict(assignment.split("=") for assignment in self.axes)
        for name, facts in AXES.items():
            if name == "slice":
                sizes[name] = 1
            elif facts.key:
                sizes[name] = getattr(self, name)
            else:
                sizes[name] = int(plugin_sizes.get(name, 1))
        if self.experts_over == "context":
            sizes |= {"context": 1, "slice": self.context}
        return sizes

    @property
    def expert_ranks(self) -> int:
        """Ranks that divide the experts in addition to tensor-parallel ones: parallel.expert or parallel.context."""
        return self.context if self.experts_over == "context" else self.expert

    @property
    def model_ranks(self) -> int:
        """Product of the sizes of all axes except the axis that fills the world (data)."""
        return prod(size or 1 for axis, size in self.axis_sizes().items() if axis != AXES.filling)


# Layers at least this wide and micro-batches at most this large gained 0.4 to 1.4% from independent GEMMs on a side
# stream. Narrower layers and larger micro-batches lost 0.4 to 0.6%, except serial blocks under tensor parallelism
# (dev/reports/overlaps.md).
SIDE_STREAM_MIN_HIDDEN = 4096
SIDE_STREAM_MAX_TOKENS = 4096


# A step of one sequence of 32,768 tokens on four context ranks takes 1.1% less time with 24 channels than with 12, and
# 3.4% more with 6 (dev/log.md, 2026-11-27, tenth).
DATA_CHANNELS = 12
CONTEXT_DATA_CHANNELS = 24


class OverlapConfig(Section):
    """Overlap of communication and compute. An unavailable choice is an error; auto prints its choice."""

    tensor: Literal["auto", "fused", "async", "off"] = Field(
        "auto",
        description="fused: GEMMs pipelined with their gather or scatter over symmetric memory (GPUs of one host); "
        "async: collectives overlapped with independent GEMMs; auto: fused where it works, else async",
    )
    context: Literal["collectives", "copies", "auto"] = Field(
        "collectives",  # until long runs have used copies
        description="exchange between context ranks; copies: by the copy engines over symmetric memory (GPUs of one "
        "host), which CUDA graphs capture; auto: copies where they work",
    )
    context_parts: bool = Field(
        False,  # no gain at 32,768 tokens on four H100 (2026-11-27)
        description="exchange a context rank's heads in two parts, so that the exchange of one part overlaps with the "
        "attention of the other (overlap.context=collectives; heads that two does not divide are exchanged at once)",
    )
    expert: Literal["collectives", "copies", "auto"] = Field(
        "collectives",  # until copies have run on several GPUs
        description="exchange of gathered tokens between the ranks of parallel.expert, or of parallel.context with "
        "parallel.experts_over=context; copies: by the copy engines over symmetric memory (GPUs of one host), with "
        "gathers in place of an all-to-all; auto: copies where tokens are gathered and copies work",
    )
    pipeline: bool = Field(
        True, description="overlap sends between stages with compute, instead of waiting for their arrival"
    )
    data: bool = Field(
        True, description="overlap reduction and gather of buckets with compute, instead of before and after the step"
    )
    gathers: Literal["auto", "collectives", "copies"] = Field(
        "auto",
        description="how ZeRO-3 gathers matrices; collectives: NCCL, whose kernels take SMs from GEMMs; copies: copy "
        "engines of one host's GPUs (needs parallel.zero=3, and each data-parallel group on one host); auto: copies "
        "where they work",
    )
    reductions: Literal["auto", "collectives", "copies"] = Field(
        "auto",
        description="how ZeRO-2 and 3 reduce gradients of matrices; collectives: NCCL, whose kernels take SMs from "
        "GEMMs; copies: copy engines of one host's GPUs (needs parallel.zero of 2 or 3, and each "
        "data-parallel group on one host); auto: copies where they work with parallel.zero=3, "
        "parallel.reduce_dtype=float32 and micro-batches of 4,096 tokens or more per rank. Llama 8B with 16 layers and "
        "ZeRO-2 on four H200 has 0.972 of ZeRO-1's speed with copies, 0.960 at best with collectives (2026-11-27)",
    )
    embedding: Literal["auto", "rows", "dense"] = Field(
        "auto",
        description="reduction of the token embedding's gradient, which no backward hides; rows: data-parallel ranks "
        "gather the gradients of the rows that a step uses (needs parallel.zero=1, parallel.tensor=1, embeddings that "
        "are not tied, no CUDA graphs); dense: all rows are reduced; auto: rows if they need at most half of the bytes",
    )
    gemms: Literal["auto", "on", "off"] = Field(
        "auto",
        description="on: independent GEMMs run on two streams, so that each fills the SMs that the other's last "
        f"wave leaves idle (GPUs); auto: on for layers at least {SIDE_STREAM_MIN_HIDDEN} wide with micro-batches of "
        f"at most {SIDE_STREAM_MAX_TOKENS:,} tokens, where measurements showed a gain",
    )
    pipeline_channels: int = Field(
        4,
        ge=1,
        le=64,
        description="maximum NCCL channels of a transfer between stages that compute overlaps; each channel occupies "
        "one SM while the transfer runs or waits; 64: NCCL's own choice",
    )
    data_channels: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = Field(
        "auto",
        description="maximum NCCL channels for gathering parameters and reducing gradients; see pipeline_channels; "
        f"auto: {DATA_CHANNELS}, with parallel.context above 1 {CONTEXT_DATA_CHANNELS}",
    )
