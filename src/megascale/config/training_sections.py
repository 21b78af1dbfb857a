"""The sections [data], [optimizer], [lr], [kernels] and [train]: the data and the steps of a training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from megascale.config.base import MAX_COUNT, MAX_GLOBAL_BATCH, Section, expand_home
from megascale.config.lora_section import LoraConfig
from megascale.config.parts import CALLBACKS, LINEAR_PRECISIONS, LOSSES, LR_SCHEDULES, OPTIMIZERS

# Short names, as users of Megatron-LM and torchtitan write them.
SHORT_PRECISIONS = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


class DataConfig(Section):
    """Training and validation data."""

    train: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="token files (path without .bin/.idx), or files and folders of jsonl, parquet or text that are "
        "tokenised on the fly; several are blended",
    )
    weights: list[float] | None = Field(
        None, description="sampling weights, one per file, in any unit; default: every sample once per epoch"
    )
    valid: str | None = Field(None, min_length=1, description="validation token file (path without .bin/.idx)")
    tokenizer: str | None = Field(
        None, min_length=1, description="tokenizer.json; default: the one next to the first train file"
    )
    shuffle: bool = Field(True, description="draw samples in random order, a pure function of train.seed")
    shuffle_tokens: int = Field(
        1 << 20,
        ge=1,
        le=MAX_COUNT * 1000,
        description="on the fly: number of tokens of shuffled text within which windows are shuffled",
    )
    text_key: str = Field("text", description="on the fly: key of the text in jsonl records and parquet rows")
    loader: Literal["auto", "host", "local"] = Field(
        "auto",
        description="host: one process per host reads ahead into shared memory for all its ranks; local: each rank "
        "reads its own samples; auto: host on GPUs, if ranks of a host share samples, or if text is tokenised on the "
        "fly",
    )
    loader_threads: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="on the fly: tokenizer threads; default: half of the usable cores",
    )
    ring_steps: int = Field(2, ge=1, le=10_000, description="steps that the host's loader buffers in shared memory")
    document_mask: bool = Field(
        False,
        description="keep attention within documents, restart positions at each, and predict no document's first "
        "token; false: all tokens of a sample see all tokens before them",
    )
    packing: Literal["concatenate", "best_fit"] = Field(
        "concatenate",
        description="concatenate: cut the joined documents every model.sequence_length tokens; best_fit: put whole "
        "documents into samples with little padding and cut longer ones only (needs data.document_mask)",
    )
    max_documents: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="largest number of documents in a sample under data.document_mask; a sample that would have more "
        "ends early. Default: one per 64 tokens of model.sequence_length, at least 16",
    )

    _expand_paths = field_validator("train", "valid", "tokenizer")(expand_home)

    @model_validator(mode="after")
    def _check_documents(self) -> DataConfig:
        """Refuse settings that have no effect without document_mask."""
        if self.document_mask:
            return self
        if self.packing != "concatenate":
            raise ValueError(
                f"data.packing={self.packing} needs attention within documents; set --data.document_mask=true, or "
                "--data.packing=concatenate"
            )
        if self.max_documents is not None:
            raise ValueError(
                f"data.max_documents={self.max_documents} has no effect without documents; set "
                "--data.document_mask=true, or leave it out"
            )
        return self

    def count_max_documents(self, sequence_length: int) -> int:
        """Return the largest number of documents in a sample; 0 without data.document_mask."""
        if not self.document_mask:
            return 0
        if self.max_documents is not None:
            return min(self.max_documents, sequence_length)
        # The smallest documents may have one token, so a sample has at most `sequence_length` of them.
        return min(max(16, sequence_length // 64), sequence_length)

    @model_validator(mode="after")
    def _check_weights(self) -> DataConfig:
        """Refuse weights that are not positive and finite."""
        invalid = [weight for weight in self.weights or () if not 0 < weight < float("inf")]
        if invalid:
            raise ValueError(
                f"data.weights={self.weights} contains {invalid[0]}, but weights must be positive; remove a file from "
                "data.train to exclude it"
            )
        return self


class OptimizerConfig(Section):
    """Optimizer. Defaults follow GPT-3 for AdamW, You et al. 2020 for LAMB, Liu et al. 2025 for Muon."""

    name: Annotated[str, AfterValidator(OPTIMIZERS.validate_name)] = Field(
        "adamw",
        description="adamw, lamb, muon (orthogonalised updates of the layers' matrices, AdamW for other tensors, both "
        "at the same learning rate), or a registered optimizer (optim/rules.py)",
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="decay rate of the gradient's moving average")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay rate of the squared gradient's moving average")
    eps: float = Field(1e-8, gt=0, description="added to the root of the squared gradient's moving average")
    weight_decay: float = Field(
        0.1, ge=0, description="weight decay; not applied to biases, norms and other 1-D tensors"
    )
    clip: float = Field(1.0, ge=0, description="maximum gradient norm; 0: no clipping")
    offload: bool = Field(
        False,
        description="AdamW: keep master weights and optimizer state in page-locked host memory and move them through "
        "the GPU in each update; saves 12 bytes per parameter of a rank's shard, and each step copies them both ways",
    )
    trust_min: float = Field(0.0, ge=0, description="LAMB: lower bound of the weight norm in the trust ratio")
    trust_max: float | None = Field(
        None,
        gt=0,
        description="LAMB: upper bound of the weight norm in the trust ratio; default: none. A bound slows down large "
        "matrices, whose norm grows with the model: 100 for an embedding of 32k x 768",
    )
    lamb_bias_correction: bool = Field(True, description="LAMB: Adam's bias correction")
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="Muon: momentum of matrices")
    muon_nesterov: bool = Field(True, description="Muon: Nesterov momentum")
    muon_steps: int = Field(5, ge=1, le=100, description="Muon: Newton-Schulz steps")
    muon_rms: float = Field(
        0.2,
        gt=0,
        description="Muon: RMS of an update at learning rate 1; the default is about AdamW's, so that both share a "
        "learning rate",
    )


class LrConfig(Section):
    """Learning rate as a function of the step."""

    peak: float = Field(
        3e-4,
        gt=0,
        description="maximum learning rate; default with LAMB: 5e-3. With AdamW it is about the change of an element "
        "per step, with LAMB the change relative to the weight's norm",
    )
    min: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    warmup_steps: int = Field(0, ge=0, le=MAX_COUNT, description="steps of linear warm-up from 0 to peak")
    schedule: Annotated[str, AfterValidator(LR_SCHEDULES.validate_name)] = Field(
        "cosine",
        description="shape after the warm-up: cosine or linear from peak to min; wsd (peak, then a decay to min in the "
        "last steps); constant; inverse_sqrt (peak * sqrt(warmup_steps / step), at least min)",
    )
    decay_steps: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="step at which min is reached with cosine, linear and wsd; default: train.steps",
    )
    decay_fraction: float = Field(
        0.2, gt=0, le=1, description="wsd: part of the steps up to lr.decay_steps in which the rate falls"
    )
    decay_shape: Literal["linear", "cosine", "sqrt", "exponential"] = Field(
        "linear", description="wsd: shape of the decay; sqrt is 1 - sqrt(progress), exponential 2 * 0.5^progress - 1"
    )

    @model_validator(mode="after")
    def _check_schedule_settings(self) -> LrConfig:
        """Refuse a setting that only another schedule reads."""
        for other_schedule, facts in LR_SCHEDULES.items():
            if other_schedule == self.schedule:
                continue
            for key in facts.own_settings:
                value = getattr(self, key)
                if value != type(self).model_fields[key].default:
                    raise ValueError(
                        f"lr.{key}={value} has no effect with lr.schedule={self.schedule}; set "
                        f"--lr.schedule={other_schedule} or leave lr.{key} out"
                    )
        return self


class KernelsConfig(Section):
    """Implementations of the operators."""

    mode: Literal["auto", "fused", "reference"] = Field(
        "auto",
        description="fused: Triton kernels, or an error if they cannot run; reference: plain PyTorch; auto: fused, or "
        "reference with a printed line if they cannot run",
    )
    attention: Literal[
        "auto",
        "cudnn",
        "flash",
        "flash_window",
        "flash_varlen",
        "flex",
        "cudnn_frontend",
        "flash4",
        "sdpa",
        "eager",
    ] = Field(
        "auto",
        description="attention kernel; auto: the fastest kernel for the layer's mask, measured at start-up. "
        "flash_varlen, flash4, cudnn_frontend, flex and sdpa can keep attention within documents",
    )
    graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="CUDA graphs of a chunk's forward and backward, so that small micro-batches do not wait for the "
        "host; auto: if possible, and if eager micro-batches of the second step take the host of any rank more than "
        "0.7 of the GPU's time; on: an error if not possible (on a CPU, tests replay the same work without graphs)",
    )
    expert_rows: float = Field(
        1.25,
        ge=1,
        description="with CUDA graphs and model.mlp=experts on several tensor-parallel ranks, the tokens that a rank's "
        "experts have room for, relative to an even load; a step that needs more is redone without graphs",
    )
    expert_rows_gemm: Literal["auto", "pointers"] = Field(
        "auto",
        description="how the GEMMs of experts' rows read their factors, forward and for the gradient of rows; auto: "
        "whole blocks by the TMA of Hopper GPUs, where sizes permit, else by pointers; a printed line says which",
    )
    deterministic: Literal["auto"] | bool = Field(
        "auto",
        description="bitwise identical results when a step is repeated, on GPUs and CPUs: attention kernels whose "
        "backward sums in a fixed order (not cudnn), and an error for operations without a deterministic "
        "implementation in torch; auto: true on GPUs where such a kernel is within 1% of the fastest one, and for "
        "replays at a given resilience.replay_interval",
    )

    @model_validator(mode="after")
    def _check_determinism(self) -> KernelsConfig:
        if self.deterministic is True and self.attention == "cudnn":
            raise ValueError(
                "kernels.attention='cudnn' sums its gradients in a varying order, which kernels.deterministic=true "
                "excludes; set kernels.attention=auto, or cudnn_frontend"
            )
        return self


def _expand_precision(name: Any) -> Any:
    if isinstance(name, str):
        return SHORT_PRECISIONS.get(name, name)
    return name


class TrainConfig(Section):
    """The training run."""

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=255,  # bytes that file systems have for a name
        description="name of the run folder",
    )
    runs: str = Field("runs", min_length=1, description="folder of the run folders")
    steps: int = Field(1000, ge=0, le=MAX_COUNT, description="total number of optimizer steps")
    max_skipped_steps: int = Field(
        10,
        ge=0,
        le=MAX_COUNT,
        description="consecutive steps with a non-finite gradient or without loss weights, each skipped, after which "
        "training ends with an error; 0: never",
    )
    micro_batch: int = Field(8, ge=1, le=1_000_000, description="sequences per forward pass of a rank")
    global_batch: int = Field(8, ge=1, le=MAX_GLOBAL_BATCH, description="sequences per step over all ranks")
    precision: Annotated[Literal["float32", "bfloat16", "float64"], BeforeValidator(_expand_precision)] = Field(
        "float32",
        description="type of weights and activations; default: bfloat16 on GPUs that support it, else float32. Master "
        "weights are at least float32. bf16, fp32 and fp64 are accepted as short names",
    )
    linear_precision: Annotated[str, AfterValidator(LINEAR_PRECISIONS.validate_name)] = Field(
        "default",
        description="precision of the GEMMs in linear layers; default: train.precision; float8: float8 with one scale "
        "per matrix; float8_rowwise: float8 with one scale per row, weight gradients in train.precision; "
        "float8_rowwise_wgrad: the same with weight gradients in float8 with one scale per matrix",
    )
    loss: Annotated[str, AfterValidator(LOSSES.validate_name)] = Field(
        "cross_entropy",
        description="training loss; evaluation always reports cross-entropy (ops/token_loss.py)",
    )
    lora: LoraConfig | None = Field(
        None,
        description="train low-rank adapters of the layers' matrices and leave the model as it is: [train.lora] with "
        "rank, alpha (16; an adapter's output is multiplied by alpha / rank) and targets (matrices by their names "
        "within a layer, such as attention.query,mlp.out; default: all)",
    )
    callbacks: list[Annotated[str, AfterValidator(CALLBACKS.validate_name)]] = Field(
        default_factory=list,
        description="callbacks that run on every rank between steps, by registered name (train/callbacks.py)",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPU if available, else CPU")
    fit: Literal["check", "force"] = Field(
        "check",
        description="before any process starts, memory, disk, processes and open files are compared with the "
        "estimated needs of the run; check: refuse a run that does not fit; force: print a line and start "
        "nevertheless",
    )
    seed: int = Field(1234, ge=0, le=2**62, description="seed of initial weights, sample order and dropout")
    threads: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="CPU threads per rank; default: cores / ranks on the host, at most OMP_NUM_THREADS",
    )
    log_interval: int = Field(10, ge=1, le=MAX_COUNT, description="steps between printed lines")
    gc_interval: int = Field(
        50,
        ge=0,
        le=MAX_COUNT,
        description="steps between garbage collections of Python, on all ranks at once; 0: Python's automatic "
        "collection",
    )
    eval_interval: int = Field(0, ge=0, le=MAX_COUNT, description="steps between evaluations; 0: only at the end")
    eval_samples: int = Field(
        128,
        ge=1,
        le=MAX_COUNT,
        description="validation sequences per evaluation; the last evaluation also reads the whole file",
    )
    sample_prompt: str | None = Field(
        None, min_length=1, description="prompt from which text is generated at the end of training"
    )
    sample_tokens: int = Field(120, ge=1, le=1_000_000, description="tokens to generate from sample_prompt")
    stop_after: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="stop this process after this many steps (for tests)"
    )

    _expand_paths = field_validator("runs")(expand_home)
