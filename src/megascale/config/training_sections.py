"""The sections [optimizer], [lr], [kernels] and [train]: what one step does, and for how long."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from megascale.config.base import MOST, Section, expand_home
from megascale.config.optimizers import OPTIMIZERS
from megascale.config.parts import CALLBACKS, LINEAR_PRECISIONS, LOSSES

# As Megatron-LM's and torchtitan's users write them.
SHORT_PRECISIONS = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


class OptimizerConfig(Section):
    """Update rule. Defaults follow GPT-3 for AdamW, You et al. 2020 for LAMB, Liu et al. 2025 for Muon."""

    name: Annotated[str, AfterValidator(OPTIMIZERS.validate_name)] = Field(
        "adamw",
        description="adamw, lamb, muon (layers' matrices orthogonalised, AdamW for all else, at its learning rate), "
        "or one that a package of your own registers (optim/rules.py)",
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the average of gradients")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the average of squared gradients")
    eps: float = Field(1e-8, gt=0, description="added to the root of the squared gradients' average")
    weight_decay: float = Field(0.1, ge=0, description="not applied to biases, norms and other 1-D tensors")
    clip: float = Field(1.0, ge=0, description="largest gradient norm; 0 turns clipping off")
    trust_min: float = Field(0.0, ge=0, description="LAMB: lower bound of the weight norm in the trust ratio")
    trust_max: float | None = Field(
        None,
        gt=0,
        description="LAMB: upper bound of the weight norm in the trust ratio; default: none. A bound slows the large "
        "matrices: their norm grows with the model, 100 for an embedding of 32k x 768",
    )
    lamb_bias_correction: bool = Field(True, description="LAMB: Adam's bias correction")
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="Muon: momentum of matrices")
    muon_nesterov: bool = Field(True, description="Muon: Nesterov's form of it")
    muon_steps: int = Field(5, ge=1, le=100, description="Muon: Newton-Schulz steps")
    muon_rms: float = Field(
        0.2, gt=0, description="Muon: RMS of an update at learning rate 1; about AdamW's, so that they share one"
    )


class LrConfig(Section):
    """Learning rate over steps."""

    peak: float = Field(
        3e-4,
        gt=0,
        description="the highest; default with LAMB: 5e-3. AdamW's is about what an element changes in a step, LAMB's "
        "the share of a weight's norm",
    )
    min: float = Field(0.0, ge=0, description="the rate at the end of the decay")
    warmup_steps: int = Field(0, ge=0, le=MOST, description="steps in which the rate rises linearly from 0 to peak")
    decay: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="shape from peak to min after the warm-up"
    )
    decay_steps: int | None = Field(
        None, ge=1, le=MOST, description="step at which min is reached; default: train.steps"
    )


class KernelsConfig(Section):
    """Which implementation the operators run."""

    mode: Literal["auto", "fused", "reference"] = Field(
        "auto",
        description="fused: Triton kernels, an error where they cannot run; reference: plain PyTorch; "
        "auto: fused where they can run, and a printed line where not",
    )
    attention: Literal["auto", "cudnn", "flash", "flash_window", "flex", "cudnn_frontend", "flash4", "sdpa"] = Field(
        "auto",
        description="attention kernel; auto measures at start-up those that implement the layer's mask",
    )
    graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="CUDA graphs of a chunk's forward and backward, so that small micro-batches do not wait for the "
        "host; auto: where they can be had; on: an error where not (on a CPU, the same work is done again: for tests)",
    )
    deterministic: bool = Field(
        False,
        description="the same results bit for bit whenever a step is run again, on GPUs as on CPUs: attention kernels "
        "whose backward sums in a fixed order (not cudnn), and an error for an operation of which torch has no "
        "deterministic form",
    )

    @model_validator(mode="after")
    def _ordered(self) -> KernelsConfig:
        if self.deterministic and self.attention == "cudnn":
            raise ValueError(
                "kernels.attention='cudnn' sums its gradients in no fixed order, which kernels.deterministic=true asks "
                "for; set kernels.attention=auto, or cudnn_frontend"
            )
        return self


def _full_name(told: Any) -> Any:
    return SHORT_PRECISIONS.get(told, told) if isinstance(told, str) else told


class TrainConfig(Section):
    """The run itself."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="run folder's name")
    runs: str = Field("runs", description="folder that holds run folders")
    steps: int = Field(1000, ge=0, le=MOST, description="optimizer steps in all")
    max_skipped_steps: int = Field(
        10,
        ge=0,
        le=MOST,
        description="a step whose gradient is not finite changes nothing; after this many in a row training ends with "
        "an error; 0: it never does",
    )
    micro_batch: int = Field(8, ge=1, le=1_000_000, description="sequences in one forward pass of one rank")
    global_batch: int = Field(8, ge=1, le=100_000_000, description="sequences in one step over all ranks")
    precision: Annotated[Literal["float32", "bfloat16", "float64"], BeforeValidator(_full_name)] = Field(
        "float32",
        description="type of weights in use and of activations; default: bfloat16 on GPUs that have it, else float32; "
        "master weights are at least float32; bf16, fp32 and fp64 are understood",
    )
    linear_precision: Annotated[str, AfterValidator(LINEAR_PRECISIONS.validate_name)] = Field(
        "default",
        description="how the GEMMs of linear layers are done; default: in the type of train.precision; float8: in "
        "float8 with one scale a matrix; float8_rowwise: with a scale a row, weight gradients in train.precision",
    )
    loss: Annotated[str, AfterValidator(LOSSES.validate_name)] = Field(
        "cross_entropy",
        description="what training lowers; evaluation is cross-entropy whatever it is (ops/token_loss.py)",
    )
    callbacks: list[Annotated[str, AfterValidator(CALLBACKS.validate_name)]] = Field(
        default_factory=list,
        description="what is called on every rank between steps, by name: what installed packages register "
        "(train/callbacks.py)",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU if there is one, else the CPU")
    fit: Literal["check", "force"] = Field(
        "check",
        description="before any process starts memory, disk, processes and open files are compared with an estimate of "
        "what the run needs: check refuses what does not fit, force says so and starts all the same",
    )
    seed: int = Field(1234, ge=0, le=2**62, description="of initial weights, the order of samples and dropout")
    threads: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="CPU threads of a rank; default: cores / ranks on the host, OMP_NUM_THREADS at most",
    )
    log_interval: int = Field(10, ge=1, le=MOST, description="steps between printed lines")
    gc_interval: int = Field(
        50,
        ge=0,
        le=MOST,
        description="steps between collections of Python's garbage, on all ranks at once; 0: as Python likes",
    )
    eval_interval: int = Field(0, ge=0, le=MOST, description="steps between evaluations; 0: only at the end")
    eval_samples: int = Field(
        128,
        ge=1,
        le=MOST,
        description="held-out sequences that each evaluation reads; the last one reads the whole file too",
    )
    sample_prompt: str | None = Field(None, description="text to continue at the end of training")
    sample_tokens: int = Field(120, ge=1, le=1_000_000, description="tokens to continue sample_prompt by")
    stop_after: int | None = Field(
        None, ge=1, le=MOST, description="stop after this many steps of this start (for tests)"
    )

    _paths = field_validator("runs")(expand_home)
