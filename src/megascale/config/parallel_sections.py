"""The sections [parallel] and [overlap]: how a model is laid over ranks, and what communication hides under."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from megascale.config.base import DEEP, MOST, Section


def _whole(count: float) -> int | float:
    return round(count) if count == round(count) else count


# A number of layers, and halves of one; written as a whole number where it is one.
Layers = Annotated[float, Field(allow_inf_nan=False, le=DEEP), AfterValidator(_whole)]


class ParallelConfig(Section):
    """How the model is laid over processes. Data parallelism is what is left of the world."""

    tensor: int = Field(1, ge=1, le=1_000_000, description="tensor-parallel ranks (with sequence parallelism)")
    pipeline: int = Field(1, ge=1, le=DEEP, description="pipeline stages")
    virtual_stages: int = Field(1, ge=1, le=1000, description="model chunks a stage (interleaved 1F1B when above 1)")
    schedule: str = Field(
        "auto",
        description="order of a step's work on each stage: 1f1b (one chunk), interleaved (any number of chunks; "
        "more micro-batches in flight, whose transfers hide better), auto (1f1b for one chunk, interleaved for more), "
        "or one that a package of your own registers (core/schedule_registry.py)",
    )
    micro_batch_group_size: int | None = Field(
        None,
        ge=1,
        le=MOST,
        description="micro-batches that each chunk of a stage takes in turn (interleaved 1F1B); default: pipeline. On "
        "slow networks more of them hide gradients and parameters in flight, for more activations held",
    )
    data: int | None = Field(
        None, ge=1, le=1_000_000, description="data-parallel ranks; default: what is left of the world"
    )
    layer_split: list[Layers] | None = Field(
        None,
        description="layers of each model chunk, in model order; 2.5 ends between a layer's attention and its MLP "
        "(model.block=serial); default: whole layers, balanced with the logits",
    )
    zero: Literal[0, 1, 2] = Field(
        1,
        description="0: all replicated; 1: optimizer state sharded over data-parallel ranks, gradients reduced once "
        "a step; 2: fp32 gradients sharded too, reduced after every micro-batch",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="communication dtype of gradients between data-parallel ranks: float32: as they were accumulated; "
        "bfloat16: rounded, half the bytes, summed in float32 (needs zero of 1 or 2)",
    )
    gather_precision: Literal["auto", "float8", "default"] = Field(
        "default",  # until its kernels have run on several GPUs
        description="what parameters travel in between data-parallel ranks: default: the type of train.precision; "
        "float8: matrices of linear layers as float8, half of bfloat16's bytes and the same numbers (needs "
        "train.linear_precision=float8 and zero of 1 or 2); auto: float8 where it can be had",
    )
    bucket_elements: int = Field(
        40_000_000,
        ge=1,
        le=MOST * 1000,
        description="parameters in one data-parallel message; smaller hides more, larger moves faster",
    )
    recompute: Literal["none", "norms", "activation", "selective", "full"] = Field(
        "none",
        description="what backward recomputes instead of keeping it: norms: their outputs; activation: the MLP's; "
        "selective: both; full: whole layers from their input",
    )
    gpus_per_host: int = Field(8, ge=1, le=1_000_000, description="ranks on one host, for placement and planning")


# Layers as wide and micro-batches as small as this gained 0.4 to 1.4% by independent GEMMs on a side stream; narrower
# layers and larger micro-batches lost 0.4 to 0.6%, save serial blocks cut by tensor parallelism
# (docs/reports/overlaps.md).
WIDE, FEW_TOKENS = 4096, 4096


class OverlapConfig(Section):
    """How communication hides under compute. What is asked for and cannot be had is an error; auto says its choice."""

    tensor: Literal["auto", "fused", "async", "off"] = Field(
        "auto",
        description="fused: GEMMs pipelined with their gather or scatter over symmetric memory (GPUs of one host); "
        "async: collectives overlapped with independent GEMMs; auto: fused where it works, else async",
    )
    pipeline: bool = Field(
        True, description="send results to the next stage while computing on, instead of waiting until they arrived"
    )
    data: bool = Field(True, description="reduce and gather buckets under compute instead of before and after the step")
    gemms: Literal["auto", "on", "off"] = Field(
        "auto",
        description="on: GEMMs that do not depend on each other run on two streams, so that each fills the "
        "SMs that the other's last wave leaves idle (GPUs); auto: where that was measured to pay, layers "
        f"at least {WIDE} wide and micro-batches of at most {FEW_TOKENS:,} tokens",
    )
    pipeline_channels: int = Field(
        4,
        ge=1,
        le=64,
        description="most NCCL channels of a transfer between stages while compute overlaps it: each is a "
        "SM that compute does without as long as a transfer runs or waits; 64: as many as NCCL likes",
    )
    data_channels: int = Field(
        12, ge=1, le=64, description="most NCCL channels of gathering parameters and of reducing gradients, likewise"
    )

    def max_channels(self, axis: str) -> int | None:
        """Most NCCL channels of `axis`, pipeline or data; None, NCCL's own choice, where no compute runs beside it."""
        on, most = {"pipeline": (self.pipeline, self.pipeline_channels), "data": (self.data, self.data_channels)}[axis]
        return most if on else None
