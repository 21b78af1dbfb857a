"""The sections [checkpoint], [rendezvous] and [observe]."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import unquote

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from megascale.config.base import MAX_COUNT, Section, expand_home
from megascale.config.parts import SINKS, SPAN_SINKS
from megascale.config.plugin_settings import PLUGIN_SETTINGS
from megascale.config.training_sections import OptimizerConfig

# Keys whose values may differ between a start and its checkpoint only if checkpoint.accept_changes names them: a change
# makes the run skip or repeat samples, or train them differently. The model and the tokenizer may not change at all.
# Other keys may always change.
CHANGEABLE_KEYS = (
    "run",  # not a setting: the identity of the run
    "data.train",
    "data.weights",
    "data.shuffle",
    "data.shuffle_tokens",
    "data.document_mask",
    "data.packing",
    "data.max_documents",
    "model.sequence_length",
    "model.dropout",
    "train.seed",
    "train.precision",
    "train.loss",
    *(f"optimizer.{key}" for key in OptimizerConfig.model_fields),
)


class CheckpointConfig(Section):
    """Saving and resuming."""

    interval: int = Field(200, ge=0, le=MAX_COUNT, description="steps between checkpoints; 0: only at the end")
    at_end: bool = Field(True, description="save when training stops; false: steps after the last interval are lost")
    keep: int = Field(2, ge=1, le=MAX_COUNT, description="number of committed checkpoints that are kept")
    resume: bool = Field(True, description="resume from the newest committed checkpoint of the run folder")
    location: str | None = Field(
        None,
        min_length=1,
        description="folder or URL (s3://bucket/run) for checkpoints; default: checkpoints in the run folder",
    )
    imported: str | None = Field(
        None,
        min_length=1,
        description="checkpoints of an imported model, or the Hugging Face folder of one. A start without own "
        "checkpoints loads the weights (of step 0) from there, or fails. `convert import` sets it. "
        "`--model.from=FOLDER` sets it to a Hugging Face folder; that model gives the default of each key of [model]",
    )
    start_from: str | None = Field(
        None,
        min_length=1,
        description="run folder (or folder or URL of checkpoints) whose model a start without own checkpoints begins "
        "with; that run gives the default of each key of [model]. Needs checkpoint.start_state",
    )
    start_step: int | None = Field(
        None, ge=0, le=MAX_COUNT, description="step of the checkpoint in checkpoint.start_from; default: the newest"
    )
    start_state: Literal["fresh", "continued"] | None = Field(
        None,
        description="what a start takes from checkpoint.start_from; fresh: the weights, while optimizer state, step "
        "count and learning-rate schedule begin anew; continued: also the optimizer state and the step count, so that "
        "the schedule goes on at that step",
    )
    background: bool = Field(
        False,
        description="copy the state to host memory during the next step and let a service write it; needs slots x the "
        "size of the state in host memory",
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=4,
        description="copies of the state in host memory if background=true; default: 1, or 2 with memory_interval, so "
        "that one copy is complete while the other is filled",
    )
    memory_interval: int = Field(
        0,
        ge=0,
        le=MAX_COUNT,
        description="steps between copies to host memory that are not written to storage; 0: no such copies",
    )
    memory_wait: bool = Field(
        False,
        description="let a step that is to be copied to host memory wait until memory is free, so that a lost process "
        "costs at most memory_interval steps; false: skip the copy",
    )
    replicas: bool = Field(
        False, description="also store each copy in another host's memory, which needs 2 x the size of the state there"
    )
    replica_address: str = Field(
        "127.0.0.1", description="address on which this host receives other hosts' copies; auto: the host's own address"
    )
    linger: float = Field(60.0, ge=0, description="seconds that the service waits for new trainers before it ends")
    accept_changes: list[str] = Field(
        default_factory=list,
        description="keys that may differ from the checkpoint from which this start resumes, such as "
        "train.seed,optimizer.name; run: the checkpoint may belong to another run. It applies to one start and is not "
        "saved in config.toml",
    )

    _expand_paths = field_validator("location", "imported", "start_from")(expand_home)

    @field_validator("accept_changes")
    @classmethod
    def _check_acceptable(cls, keys: list[str]) -> list[str]:
        """Refuse keys that may not change, and keys that may always change."""
        for key in keys:
            if key not in CHANGEABLE_KEYS and key not in PLUGIN_SETTINGS:
                raise ValueError(
                    f"checkpoint.accept_changes has {key!r}; choose among {', '.join(CHANGEABLE_KEYS)}. The model "
                    "and the tokenizer of a run cannot change; all other settings may change without being listed here"
                )
        return keys

    @model_validator(mode="after")
    def _check_start(self) -> CheckpointConfig:
        """Refuse start_from without start_state, and settings of a start without start_from."""
        if self.start_from is not None and self.start_state is None:
            raise ValueError(
                f"checkpoint.start_from={self.start_from} needs checkpoint.start_state; set it to fresh (weights only: "
                "optimizer state, step count and learning-rate schedule begin anew) or continued (they go on)"
            )
        for key in ("start_state", "start_step"):
            value = getattr(self, key)
            if value is not None and self.start_from is None:
                raise ValueError(
                    f"checkpoint.{key}={value} has no effect without checkpoint.start_from; set "
                    f"--checkpoint.start_from=RUN, or leave checkpoint.{key} out"
                )
        return self

    @model_validator(mode="after")
    def _check_background(self) -> CheckpointConfig:
        """Refuse settings that need the checkpoint service, or copies to host memory, without these."""
        if not self.background and (self.replicas or self.memory_interval):
            if self.replicas:
                setting = "replicas=true"
            else:
                setting = f"memory_interval={self.memory_interval}"
            raise ValueError(f"checkpoint.{setting} needs the checkpoint service; set checkpoint.background=true")
        if self.memory_wait and not self.memory_interval:
            raise ValueError(
                "checkpoint.memory_wait=true has no effect without copies to host memory; set "
                "checkpoint.memory_interval, such as 1"
            )
        return self


def split_password(url: str) -> tuple[str, str | None]:
    """Return the URL SCHEME://[USER[:PASSWORD]@]ADDRESS without its password, and the password or None."""
    scheme, _, authority = url.partition("://")
    credentials, _, address = authority.rpartition("@")
    user, colon, password = credentials.partition(":")
    if not colon:
        return url, None
    if user:
        user += "@"
    return f"{scheme}://{user}{address}", unquote(password)


class RendezvousConfig(Section):
    """Rendezvous of the ranks."""

    url: str = Field(
        "env://",
        description="env:// (torch's TCPStore on MASTER_ADDR:MASTER_PORT) or redis://HOST:PORT, rediss:// with TLS",
    )
    password: SecretStr | None = Field(
        None,
        exclude=True,
        repr=False,
        description="password from the url; never printed or saved. Prefer the environment variable "
        "MEGASCALE_REDIS_PASSWORD",
    )
    tls_ca: str | None = Field(
        None,
        min_length=1,
        description="rediss://: file of the certificate authority that signed the server's certificate",
    )
    tls_certificate: str | None = Field(
        None, min_length=1, description="rediss://: client certificate, if the server requires one"
    )
    tls_key: str | None = Field(None, min_length=1, description="rediss://: key of tls_certificate")
    timeout: float = Field(300.0, gt=0, description="seconds within which all ranks must arrive")
    group_timeout: float = Field(600.0, gt=0, description="seconds after which a hanging collective is aborted")
    expiry: float = Field(86400.0, ge=60, description="redis: seconds after which keys of a dead job expire")
    concurrent_connections: bool = Field(
        False,
        description="make a rank's NCCL communicators at the same time, not one after the other; up to 16 ranks of "
        "a later attempt also connect meanwhile for the exchange of their state",
    )
    prepared_groups: bool = Field(
        False,
        description="make the groups with which missing replicas join while the others still train, and abort the old "
        "ones after the second step; needs resilience.continue_replicas, and memory of each GPU for a second set of "
        "communicators",
    )

    _expand_paths = field_validator("tls_ca", "tls_certificate", "tls_key")(expand_home)

    @model_validator(mode="before")
    @classmethod
    def _hide_password(cls, data: Any) -> Any:
        """Move the password from the url to `password`, so that saved and printed configurations do not contain it.

        Args:
            data: the unvalidated section, a dictionary if it is correct.
        """
        url = data.get("url") if isinstance(data, dict) else None
        if not isinstance(url, str) or "@" not in url:
            return data
        public_url, password = split_password(url)
        if password is None:
            return data
        return {**data, "url": public_url, "password": password}

    @model_validator(mode="after")
    def _check_scheme(self) -> RendezvousConfig:
        """Refuse a url with an unknown scheme."""
        if self.url.partition("://")[0] not in ("env", "redis", "rediss"):
            raise ValueError(
                f"rendezvous.url={self.url!r} has an unknown scheme; use env://, redis://HOST:PORT or "
                "rediss://HOST:PORT"
            )
        return self


class ObserveConfig(Section):
    """Metrics, spans and other output of a run."""

    tensorboard: bool = Field(
        True, description="write scalars for TensorBoard to RUN/tensorboard, if the package is installed"
    )
    wandb: str | None = Field(
        None,
        min_length=1,
        description="Weights & Biases project (pip install -e '.[wandb]'); its environment variables apply, such as "
        "WANDB_MODE=offline",
    )
    sinks: list[Annotated[str, AfterValidator(SINKS.validate_name)]] = Field(
        default_factory=list,
        description="additional metric sinks, by registered name (observe/metrics.py)",
    )
    float8_interval: int = Field(
        100,
        ge=0,
        le=MAX_COUNT,
        description="steps between counts of values that casts to float8 clip or round to zero; 0: off",
    )
    progress: bool = Field(True, description="live progress line on a terminal")
    timers: bool = Field(
        True, description="time all actions of a step on every rank, without synchronising the device (docs/observe.md)"
    )
    spans: int = Field(
        100,
        ge=0,
        le=MAX_COUNT,
        description="steps between steps whose spans are all recorded; 0: only on request",
    )
    spans_mib: int = Field(
        512,
        ge=16,
        le=1_000_000,
        description="maximum MiB of a host's spans and roll-ups; the oldest spans are deleted first",
    )
    span_sinks: list[Annotated[str, AfterValidator(SPAN_SINKS.validate_setting)]] = Field(
        default_factory=lambda: ["parquet"],
        min_length=1,
        description="sinks of each host's spans, NAME or NAME=ADDRESS: parquet (which commands read), clickhouse, "
        "kafka, or a registered sink (observe/store/span_sinks.py)",
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="dense bf16 peak of one device in TFLOP/s, for MFU; default: known for common GPUs, else MFU is "
        "not printed",
    )
