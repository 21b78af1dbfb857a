"""The one typed tree of settings: presets, TOML files and `--section.key=value` pass through one validator.

Every room may import this module; it imports nothing of ours but the errors. A key exists here only if
some code obeys it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from megascale.errors import ConfigError, FitError

# Upper bounds keep a slip (2e9 for 2e3) from starting loops and allocations of that size: far above what anybody
# trains, and what they let through is checked against the machine before anything starts (core/preflight.py).
DEEP = 10_000  # layers and pipeline stages
MOST = 1_000_000_000_000  # counts that cost nothing by themselves


class Section(BaseModel):
    """A section of the tree: unknown keys are refused, values may not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The transformer's shape. Sizes are counts, not bytes."""

    preset: str | None = Field(None, description="start from a shipped shape, such as gpt2-124m; own keys override")
    layers: int = Field(4, ge=1, le=DEEP, description="transformer blocks")
    hidden: int = Field(256, ge=1, le=1_000_000, description="width of the residual stream")
    heads: int = Field(
        4, ge=1, le=1_000_000, description="attention heads; must divide hidden unless head_dim is given"
    )
    kv_heads: int | None = Field(
        None, ge=1, le=1_000_000, description="key/value heads (grouped-query); default: heads"
    )
    head_dim: int | None = Field(None, ge=1, le=1_000_000, description="width of a head; default: hidden / heads")
    ffn_hidden: int | None = Field(None, ge=1, le=100_000_000, description="width inside the MLP; default: 4 x hidden")
    vocab_size: int | None = Field(None, ge=2, le=1_000_000_000, description="default: the tokenizer's")
    sequence_length: int = Field(256, ge=2, le=1_000_000_000, description="tokens in a training sample")
    block: Literal["serial", "parallel"] = Field(
        "serial", description="serial: x + MLP(LN(x + Attn(LN x))); parallel: x + Attn(LN x) + MLP(LN x)"
    )
    parallel_norms: Literal[1, 2] = Field(1, description="parallel block: one shared norm (GPT-J) or two (GPT-NeoX)")
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = Field(1e-5, gt=0)
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    positions: Literal["learned", "rotary", "none"] = "learned"
    rotary_fraction: float = Field(1.0, gt=0, le=1, description="part of each head that rotates")
    rotary_base: float = Field(10000.0, gt=0)
    rotary_interleaved: bool = Field(False, description="rotate neighbouring pairs (GPT-J) instead of halves")
    attention_bias: bool = Field(True, description="biases on query, key and value")
    attention_out_bias: bool | None = Field(None, description="bias on the attention output; default: attention_bias")
    mlp_bias: bool = True
    head_bias: bool = Field(False, description="bias on the logits (GPT-J)")
    tied_embeddings: bool = Field(True, description="logits use the token embedding")
    window: int | None = Field(
        None, ge=1, le=MOST, description="sliding window: a query sees itself and the window-1 tokens before it"
    )
    window_pattern: str = Field(
        "S", pattern="^[SL]+$", max_length=DEEP, description="repeated over layers: S = windowed, L = full attention"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="on embeddings and residual branches, none in attention")
    init_std: float = Field(0.02, gt=0)
    vocab_multiple: int = Field(
        128, ge=1, le=1_000_000, description="the stored vocabulary is padded to a multiple of this"
    )

    @property
    def kv(self) -> int:
        """Number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def ffn(self) -> int:
        """Width inside the MLP."""
        return self.ffn_hidden or 4 * self.hidden

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate (two input projections)."""
        return self.activation == "swiglu"

    @property
    def out_bias(self) -> bool:
        """Whether the attention output projection has a bias."""
        return self.attention_bias if self.attention_out_bias is None else self.attention_out_bias

    @property
    def vocab(self) -> int:
        """Vocabulary size; only valid once the tokenizer (or the user) has set it."""
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size is not set and no data set gives one; set --model.vocab_size=N")
        return self.vocab_size

    @property
    def padded_vocab(self) -> int:
        """Vocabulary rounded up to `vocab_multiple`; rows beyond `vocab` exist in memory only."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of `layer` (0-based) in tokens, or None for full attention.

        One as long as the training sequence stays a window: generation may go further.
        """
        if self.window is None:
            return None
        return self.window if self.window_pattern[layer % len(self.window_pattern)] == "S" else None

    @model_validator(mode="after")
    def _shapes(self) -> ModelConfig:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"model.hidden={self.hidden} is not divisible by model.heads={self.heads}; "
                f"choose heads among the divisors of hidden or set model.head_dim"
            )
        if self.heads % self.kv:
            raise ValueError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv}; "
                "each key/value head must serve the same number of query heads"
            )
        if self.positions == "rotary" and int(self.head_size * self.rotary_fraction) % 2:
            raise ValueError(
                f"model.rotary_fraction={self.rotary_fraction} of a head of {self.head_size} gives an odd width; "
                "rotary positions turn pairs, so choose a fraction that gives an even width"
            )
        return self


class DataConfig(Section):
    """Where tokens come from."""

    train: list[str] = Field(
        default_factory=list,
        description="token files (path without .bin/.idx), or files and folders of jsonl, parquet or text that are "
        "tokenised on the fly; more than one makes a blend",
    )
    weights: list[float] | None = Field(
        None, description="shares of the samples, one a file, in any unit; default: every window once an epoch"
    )
    valid: str | None = Field(None, description="held-out token file (path without .bin/.idx)")
    tokenizer: str | None = Field(None, description="tokenizer.json; default: the one beside the first train file")
    shuffle: bool = Field(True, description="draw samples in a random order that is a pure function of train.seed")
    shuffle_tokens: int = Field(
        1 << 20,
        ge=1,
        le=MOST * 1000,
        description="on the fly: windows are shuffled within runs of so many tokens of shuffled text",
    )
    text_key: str = Field("text", description="on the fly: where jsonl records and parquet rows have their text")
    loader: Literal["auto", "host", "local"] = Field(
        "auto",
        description="host: one process a host reads ahead into shared memory for all its ranks; local: each rank reads "
        "for itself; auto: host on GPUs, and where ranks of a host share samples or text is tokenised on the fly",
    )
    loader_threads: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="on the fly: threads that tokenise; default: half of the cores that may be used",
    )
    ring_steps: int = Field(2, ge=1, le=10_000, description="steps that the host's loader keeps ready in shared memory")

    @model_validator(mode="after")
    def _weights(self) -> DataConfig:
        bad = [w for w in self.weights or () if not 0 < w < float("inf")]
        if bad:
            raise ValueError(
                f"data.weights={self.weights} has the weight {bad[0]}; weights are positive numbers: leave a file out "
                "of data.train to give it none"
            )
        return self


class OptimizerConfig(Section):
    """Update rule. Defaults follow GPT-3 for AdamW and You et al. 2020 for LAMB."""

    name: Literal["adamw", "lamb"] = "adamw"
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
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


# Half of what came out best in docs/performance.md, for 0.05 to 0.16 more loss: those runs were short.
LAMB_PEAK = 5e-3


class LrConfig(Section):
    """Learning rate over steps."""

    peak: float = Field(
        3e-4,
        gt=0,
        description="the highest; default with LAMB: 5e-3. AdamW's is about what an element changes in a step, LAMB's "
        "the share of a weight's norm",
    )
    min: float = Field(0.0, ge=0, description="the rate at the end of the decay")
    warmup_steps: int = Field(0, ge=0, le=MOST, description="linear from 0 to peak")
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    decay_steps: int | None = Field(
        None, ge=1, le=MOST, description="step at which min is reached; default: train.steps"
    )


class ParallelConfig(Section):
    """How the model is laid over processes. Data parallelism is what is left of the world."""

    tensor: int = Field(1, ge=1, le=1_000_000, description="tensor-parallel ranks (with sequence parallelism)")
    pipeline: int = Field(1, ge=1, le=DEEP, description="pipeline stages")
    virtual_stages: int = Field(1, ge=1, le=1000, description="model chunks a stage (interleaved 1F1B when above 1)")
    round_size: int | None = Field(
        None,
        ge=1,
        le=MOST,
        description="micro-batches that each chunk of a stage takes in turn (interleaved 1F1B); default: pipeline. On "
        "slow networks more of them hide gradients and parameters on the wire, for more activations held",
    )
    data: int | None = Field(
        None, ge=1, le=1_000_000, description="data-parallel ranks; default: what is left of the world"
    )
    layer_split: list[int] | None = Field(
        None, description="layers of each model chunk, in model order; default: balanced with the logits"
    )
    zero: Literal[0, 1, 2] = Field(
        1,
        description="0: all replicated; 1: optimizer state sharded over data-parallel ranks, gradients reduced once "
        "a step; 2: fp32 gradients sharded too, reduced after every micro-batch",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="gradients on the wire between data-parallel ranks: float32: as they were accumulated; bfloat16: "
        "rounded, half the bytes, summed in float32 (needs zero of 1 or 2)",
    )
    bucket_elements: int = Field(
        40_000_000,
        ge=1,
        le=MOST * 1000,
        description="parameters in one data-parallel message; smaller hides more, larger moves faster",
    )
    recompute: Literal["none", "norms", "activation", "selective", "full"] = Field(
        "none",
        description="what backward computes again instead of keeping it: norms; the MLP's activation; selective: both; "
        "full: whole layers from their input",
    )
    gpus_per_host: int = Field(8, ge=1, le=1_000_000, description="ranks on one host, for placement and planning")


# Layers as wide and micro-batches as small as this gained 0.4 to 1.4% by independent products on two streams; narrower
# layers and larger micro-batches lost 0.4 to 0.6%, save serial blocks cut by tensor parallelism (docs/performance.md).
WIDE, FEW_TOKENS = 4096, 4096


class OverlapConfig(Section):
    """How communication hides under compute. What is asked for and cannot be had is an error; auto says its choice."""

    tensor: Literal["auto", "fused", "async", "off"] = Field(
        "auto",
        description="fused: products pipelined with their gather or scatter over symmetric memory (GPUs of one host); "
        "async: collectives beside independent products; auto: fused where it works, else async",
    )
    pipeline: bool = Field(
        True, description="send results to the next stage while computing on, instead of waiting until they arrived"
    )
    data: bool = Field(True, description="reduce and gather buckets under compute instead of before and after the step")
    products: Literal["auto", "on", "off"] = Field(
        "auto",
        description="on: products that do not depend on each other run on two streams, so that each fills the "
        "multiprocessors that the other's last wave leaves idle (GPUs); auto: where that was measured to pay, layers "
        f"at least {WIDE} wide and micro-batches of at most {FEW_TOKENS:,} tokens",
    )
    pipeline_channels: int = Field(
        4,
        ge=1,
        le=64,
        description="most NCCL channels of a transfer between stages while compute overlaps it: each is a "
        "multiprocessor that compute does without as long as a transfer runs or waits; 64: as many as NCCL likes",
    )
    data_channels: int = Field(
        12, ge=1, le=64, description="most NCCL channels of gathering parameters and of reducing gradients, likewise"
    )

    @field_validator("products", mode="before")
    @classmethod
    def _products(cls, told: Any) -> Any:
        # It was a switch once: records and configurations of older runs have true or false.
        return {True: "on", False: "off"}[told] if isinstance(told, bool) else told

    def channels(self, axis: str) -> int | None:
        """Most NCCL channels of `axis`, pipeline or data; None, NCCL's own choice, where no compute runs beside it."""
        on, most = {"pipeline": (self.pipeline, self.pipeline_channels), "data": (self.data, self.data_channels)}[axis]
        return most if on else None


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


class TrainConfig(Section):
    """The run itself."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="run folder's name")
    runs: str = Field("runs", description="folder that holds run folders")
    steps: int = Field(1000, ge=0, le=MOST, description="optimizer steps in all")
    micro_batch: int = Field(8, ge=1, le=1_000_000, description="sequences in one forward pass of one rank")
    global_batch: int = Field(8, ge=1, le=100_000_000, description="sequences in one step over all ranks")
    precision: Literal["float32", "bfloat16", "float64"] = Field(
        "float32",
        description="type of weights in use and of activations; master weights are at least float32",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    fit: Literal["check", "force"] = Field(
        "check",
        description="before any process starts memory, disk, processes and open files are compared with an estimate of "
        "what the run needs: check refuses what does not fit, force says so and starts all the same",
    )
    seed: int = Field(1234, ge=0, le=2**62)
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
    eval_samples: int = Field(128, ge=1, le=MOST, description="held-out sequences an evaluation reads during training")
    sample_prompt: str | None = Field(None, description="text to continue at the end of training")
    sample_tokens: int = Field(120, ge=1, le=1_000_000)
    stop_after: int | None = Field(
        None, ge=1, le=MOST, description="stop after this many steps of this start (for tests)"
    )


# What of a run may change under way where a person says so: windows are then trained twice or never, or trained
# otherwise than those before. The model and the tokenizer may not; what is not named here may at any time.
ACCEPTABLE = (
    "run",
    "data.train",
    "data.weights",
    "data.shuffle",
    "data.shuffle_tokens",
    "model.sequence_length",
    "model.dropout",
    "train.seed",
    "train.precision",
    *(f"optimizer.{key}" for key in OptimizerConfig.model_fields),
)


class CheckpointConfig(Section):
    """Saving and resuming."""

    interval: int = Field(200, ge=0, le=MOST, description="steps between checkpoints; 0: only at the end")
    at_end: bool = Field(True, description="save when training stops; false loses what came after the last interval")
    keep: int = Field(2, ge=1, le=MOST, description="committed checkpoints to keep")
    resume: bool = Field(True, description="continue from the newest committed checkpoint of the run folder")
    location: str | None = Field(
        None, description="folder or URL (s3://bucket/run) for checkpoints; default: checkpoints in the run folder"
    )
    background: bool = Field(
        False,
        description="copy the state to host memory under the next step and let a service write it; "
        "needs host memory of slots x the state",
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=4,
        description="copies of the state in host memory when background is on; default: 1, with memory_interval 2, "
        "so that one is whole while the other is filled",
    )
    memory_interval: int = Field(
        0, ge=0, le=MOST, description="steps between copies to host memory that are not written; 0: only those written"
    )
    replicas: bool = Field(False, description="also keep each copy in another host's memory (2 x the state there)")
    replica_address: str = Field(
        "127.0.0.1", description="address on which this host takes other hosts' copies; auto: the host's own address"
    )
    linger: float = Field(60.0, ge=0, description="seconds the service waits for new trainers before it ends")
    accept_changes: list[str] = Field(
        default_factory=list,
        description="keys that may differ from those in the checkpoint that this start goes on from, such as "
        "train.seed,optimizer.name; run: the checkpoint may be another run's. For one start: not kept in config.toml",
    )

    @field_validator("accept_changes")
    @classmethod
    def _acceptable(cls, keys: list[str]) -> list[str]:
        for key in keys:
            if key not in ACCEPTABLE:
                raise ValueError(
                    f"checkpoint.accept_changes has {key!r}; what may be accepted is {', '.join(ACCEPTABLE)}. The "
                    "model and the tokenizer of a run cannot change; all other settings may without being named here"
                )
        return keys

    @model_validator(mode="after")
    def _background(self) -> CheckpointConfig:
        if not self.background and (self.replicas or self.memory_interval):
            key = "replicas=true" if self.replicas else f"memory_interval={self.memory_interval}"
            raise ValueError(f"checkpoint.{key} needs the checkpoint service; set checkpoint.background=true")
        return self


def split_password(url: str) -> tuple[str, str | None]:
    """(the url without its password, the password or None if it has none)."""
    scheme, _, rest = url.partition("://")
    access, _, place = rest.rpartition("@")
    user, colon, secret = access.partition(":")
    if not colon:
        return url, None
    return f"{scheme}://{user}{'@' if user else ''}{place}", unquote(secret)


class RendezvousConfig(Section):
    """How ranks find each other."""

    url: str = Field(
        "env://",
        description="env:// (torch's TCPStore on MASTER_ADDR:MASTER_PORT) or redis://HOST:PORT, rediss:// with TLS",
    )
    password: SecretStr | None = Field(
        None,
        exclude=True,
        repr=False,
        description="taken out of the url; never printed or saved. Better: environment MEGASCALE_REDIS_PASSWORD",
    )
    tls_ca: str | None = Field(
        None, description="rediss://: file of the authority that signed the server's certificate"
    )
    tls_certificate: str | None = Field(None, description="rediss://: this client's certificate, if the server asks")
    tls_key: str | None = Field(None, description="rediss://: key of tls_certificate")
    timeout: float = Field(300.0, gt=0, description="seconds within which every rank must have come")
    group_timeout: float = Field(600.0, gt=0, description="seconds after which a collective that hangs is aborted")
    expiry: float = Field(86400.0, ge=60, description="redis: seconds after which keys of a job that died vanish")

    @model_validator(mode="before")
    @classmethod
    def _hide_password(cls, data: Any) -> Any:
        """Take the password out of the url, so that a saved or printed configuration does not hold it."""
        url = data.get("url") if isinstance(data, dict) else None
        if not isinstance(url, str) or "@" not in url:
            return data
        shown, secret = split_password(url)
        return data if secret is None else {**data, "url": shown, "password": secret}

    @model_validator(mode="after")
    def _known_scheme(self) -> RendezvousConfig:
        if self.url.partition("://")[0] not in ("env", "redis", "rediss"):
            raise ValueError(
                f"rendezvous.url={self.url!r} has an unknown scheme; use env://, redis://HOST:PORT or "
                "rediss://HOST:PORT"
            )
        return self


class ObserveConfig(Section):
    """What a run tells about itself."""

    tensorboard: bool = True
    wandb: str | None = Field(
        None,
        min_length=1,
        description="Weights & Biases project to report to (pip install -e '.[wandb]'); its own environment "
        "variables hold, such as WANDB_MODE=offline",
    )
    progress: bool = Field(True, description="live progress line on a terminal")
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="bf16 dense peak of one device for MFU; default: known cards, else MFU is not printed",
    )


class ResilienceConfig(Section):
    """Training that runs itself (`megascale launch`): nodes, heartbeats, and how far to go before giving up."""

    checksum_interval: int = Field(
        0,
        ge=0,
        le=MOST,
        description="steps between checksums of the weights, compared between data-parallel copies; 0: none",
    )
    faults: bool = Field(False, description="let `megascale faults inject` break this run's trainers from inside")
    nodes: int = Field(
        1, ge=1, le=30_000, description="nodes that hold ranks; on one machine a node is a few processes"
    )
    spares: int = Field(0, ge=0, le=30_000, description="nodes that stand by with everything imported")
    test_spares: bool = Field(True, description="have spares run the self-checks while they wait; one that fails goes")
    interval: float = Field(1.0, gt=0, description="seconds between an agent's heartbeats")
    window: float = Field(5.0, gt=0, description="seconds without a heartbeat after which a node counts as lost")
    first_step: float = Field(600.0, gt=0, description="seconds that start, loading and the first step may take")
    patience: float = Field(60.0, gt=0, description="seconds that trainers get to save when they are asked to stop")
    orphan: float = Field(
        600.0, gt=0, description="seconds an agent lets training go on without a driver before it stops it"
    )
    lease: float = Field(3.0, gt=0, description="seconds after which another host's silent driver may be replaced")
    budget_seconds: float = Field(3600.0, gt=0, description="time over which the budgets below count")
    retries: int = Field(5, ge=0, le=MOST, description="times a node's processes are forked again in place")
    respawns: int = Field(2, ge=0, le=MOST, description="times a node's agent and fork server are started again")
    replacements: int = Field(10, ge=0, le=MOST, description="nodes that may be replaced by spares or new ones")
    replenish_wait: float = Field(
        600.0, ge=0, description="seconds to wait for new nodes when no spare is left; 0: do not ask for any"
    )
    min_data: int = Field(1, ge=1, le=1_000_000, description="data parallelism may shrink to this when nodes stay away")
    starts_without_progress: int = Field(
        5, ge=1, le=MOST, description="starts in a row without one new step after which the job stops for a person"
    )
    listen: str = Field("127.0.0.1", description="address where the driver takes agents and the API")
    port: int = Field(0, ge=0, le=65535, description="port for agents; 0: any, written to RUN/driver/contact.json")
    api_port: int = Field(0, ge=0, le=65535, description="port of the HTTP API; 0: any, as above")
    log_patterns: list[str] = Field(
        default_factory=lambda: [
            r"CUDA error",
            r"NCCL (error|WARN)",
            r"out of memory",
            r"[Ss]egmentation fault",
            r"No space left on device",
            r"Traceback \(most recent call last\)",
        ],
        description="regular expressions; matching lines of trainers' logs go to the driver",
    )

    @model_validator(mode="after")
    def _patterns(self) -> ResilienceConfig:
        for pattern in self.log_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"resilience.log_patterns has {pattern!r}, no regular expression: {error}") from None
        return self


class Config(Section):
    """The whole tree."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr: LrConfig = LrConfig()
    parallel: ParallelConfig = ParallelConfig()
    overlap: OverlapConfig = OverlapConfig()
    kernels: KernelsConfig = KernelsConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rendezvous: RendezvousConfig = RendezvousConfig()
    observe: ObserveConfig = ObserveConfig()
    resilience: ResilienceConfig = ResilienceConfig()

    @property
    def products_beside(self) -> bool:
        """Whether independent products run on two streams: overlap.products with auto resolved."""
        tokens = self.model.sequence_length * self.train.micro_batch
        pays = self.model.hidden >= WIDE and tokens <= FEW_TOKENS
        return self.overlap.products == "on" or (self.overlap.products == "auto" and pays)

    @property
    def run_folder(self) -> Path:
        """`runs/NAME`: all that a run leaves behind."""
        return Path(self.train.runs) / self.train.name

    @model_validator(mode="before")
    @classmethod
    def _rates(cls, tree: Any) -> Any:
        """LAMB's own default of lr.peak: AdamW's would train a fifteenth as fast."""
        if not isinstance(tree, Mapping):
            return tree
        optimizer, lr = tree.get("optimizer", {}), tree.get("lr", {})
        if not (isinstance(optimizer, Mapping) and isinstance(lr, Mapping)):
            return tree
        if optimizer.get("name") == "lamb" and "peak" not in lr:
            return {**tree, "lr": {**lr, "peak": LAMB_PEAK}}
        return tree

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.data.weights is not None and len(self.data.weights) != len(self.data.train):
            raise ValueError(
                f"data.weights has {len(self.data.weights)} entries for {len(self.data.train)} files in data.train; "
                "give one weight a file"
            )
        if self.parallel.reduce_dtype == "bfloat16":
            if self.parallel.zero == 0:
                raise ValueError(
                    "parallel.reduce_dtype=bfloat16 needs parallel.zero=1 or 2: with 0 sums would travel rounded too"
                )
            if self.train.precision == "float64":
                raise ValueError(
                    "parallel.reduce_dtype=bfloat16 would round the gradients of train.precision=float64; set "
                    "--parallel.reduce_dtype=float32 (they then travel in full) or another precision"
                )
        if self.lr.min > self.lr.peak:
            raise ValueError(f"lr.min={self.lr.min} is above lr.peak={self.lr.peak}; lower lr.min")
        return self

    def microbatches(self, data_parallel: int) -> int:
        """Micro-batches a data-parallel rank runs in a step; FitError if sizes do not divide."""
        per_micro = self.train.micro_batch * data_parallel
        if self.train.global_batch % per_micro:
            near = max(1, round(self.train.global_batch / per_micro)) * per_micro
            raise FitError(
                f"train.global_batch={self.train.global_batch} is not a multiple of train.micro_batch x data-parallel "
                f"ranks = {self.train.micro_batch} x {data_parallel}; try --train.global_batch={near}"
            )
        return self.train.global_batch // per_micro

    def to_toml(self) -> str:
        """The resolved tree as TOML, which `load` reads again whatever its strings hold; unset keys are left out."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    def write(self, file: Path) -> None:
        """Write `to_toml` to a file, in the encoding that `load` reads wherever it runs."""
        file.write_text(self.to_toml(), encoding="utf-8")


def presets() -> list[str]:
    """Names of the shipped model shapes."""
    folder = resources.files("megascale.model") / "presets"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def preset(name: str) -> dict[str, Any]:
    """The `model` keys of a shipped shape; ConfigError naming the nearest if there is no such preset."""
    if name not in presets():
        raise ConfigError(f"model.preset={name!r} is not a shipped model; {_nearest(name, presets())}")
    text = (resources.files("megascale.model") / "presets" / f"{name}.toml").read_text()
    return tomllib.loads(text)["model"]


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file, lay `section.key=value` overrides on it, resolve the preset and validate.

    Raises ConfigError (wrong key, type or value) with the key, the value and what would be right.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        try:
            tree = tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            near = sorted(str(p) for p in (*Path().glob("*.toml"), *Path().glob("examples/*.toml")))
            hint = f"; there is {', '.join(near[:4])}" if near else ""
            raise ConfigError(f"configuration file {str(file)!r} does not exist{hint}") from None
        except IsADirectoryError:
            raise ConfigError(f"configuration file {str(file)!r} is a folder; name a .toml file in it") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"configuration file {str(file)!r} is not valid TOML: {error}") from None
    for text in overrides:
        section, key, value = _parse_override(text)
        table = tree.setdefault(section, {})
        if isinstance(table, dict):
            table[key] = value
    return from_tree(tree)


def from_tree(tree: Mapping[str, Any]) -> Config:
    """Validate nested dictionaries (as TOML gives them) into a Config; ConfigError on anything wrong."""
    tree = {name: dict(table) if isinstance(table, Mapping) else table for name, table in tree.items()}
    for name, table in tree.items():
        for key, value in table.items() if isinstance(table, dict) else ():
            _check_text(f"{name}.{key}", value)
    model = tree.get("model")
    if isinstance(model, dict) and isinstance(model.get("preset"), str):
        tree["model"] = {**preset(model["preset"]), **model}
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e, tree) for e in error.errors())) from None


def _check_text(name: str, value: Any) -> None:
    """ConfigError for text that no file can hold: bytes of a command line that are not UTF-8."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{name}={text!r} holds bytes that are not UTF-8; write it in UTF-8")


def _parse_override(text: str) -> tuple[str, str, Any]:
    name, equals, raw = text.removeprefix("--").partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"override {text!r} is not of the form --section.key=value, such as --train.steps=100")
    section, key = section.replace("-", "_"), key.replace("-", "_")
    try:
        parsed = tomllib.loads(f"v = {raw}")
        value = parsed["v"] if len(parsed) == 1 else raw  # text of several lines may look like several keys
    except tomllib.TOMLDecodeError:
        field = Config.model_fields.get(section)
        sub = getattr(field.annotation, "model_fields", {}).get(key) if field else None
        # A list may be written a,b,c: shells make quoting brackets tedious.
        value = raw.split(",") if sub is not None and "list" in str(sub.annotation) else raw
    else:
        field = Config.model_fields.get(section)
        sub = getattr(field.annotation, "model_fields", {}).get(key) if field else None
        if sub is not None and sub.annotation in (str, str | None) and not isinstance(value, str):
            value = raw  # a run may be called 1 or true
    return section, key, value


def _explain(error: Any, tree: Mapping[str, Any]) -> str:
    """One paragraph for one pydantic error."""
    path = [str(p) for p in error["loc"]]
    name = ".".join(path)
    if error["type"] == "extra_forbidden":
        if len(path) == 1:
            return f"there is no section [{name}]; {_nearest(name, list(Config.model_fields))}"
        keys = list(getattr(Config.model_fields[path[0]].annotation, "model_fields", {}))
        everywhere = [
            f"{section}.{key}"
            for section, field in Config.model_fields.items()
            for key in getattr(field.annotation, "model_fields", {})
        ]
        here = difflib.get_close_matches(path[1], keys, n=1)
        other = [k for k in everywhere if k.endswith("." + path[1])] or difflib.get_close_matches(name, everywhere, n=1)
        near = [f"{path[0]}.{here[0]}"] if here else other
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(keys)}"
        return f"there is no key {name} (value {error['input']!r}); {hint}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if len(path) == 1 and path[0] in Config.model_fields:
        return f"[{name}] must be a section with keys, not {error['input']!r}"
    field = getattr(Config.model_fields[path[0]].annotation, "model_fields", {}).get(path[1]) if len(path) > 1 else None
    about = f" ({field.description})" if field is not None and field.description else ""
    return f"{name}={error['input']!r} is wrong: {error['msg'][0].lower()}{error['msg'][1:]}{about}"


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
