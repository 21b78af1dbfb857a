"""The sections [checkpoint], [rendezvous] and [observe]: what surrounds the steps of a run."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import unquote

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from megascale.config.base import MOST, Section, expand_home
from megascale.config.parts import SINKS, SPAN_SINKS
from megascale.config.training_sections import OptimizerConfig

# What of a run may change under way where a person says so: windows are then trained twice or never, or trained
# otherwise than those before. The model and the tokenizer may not; what is not named here may at any time.
CHANGEABLE_KEYS = (
    "run",
    "data.train",
    "data.weights",
    "data.shuffle",
    "data.shuffle_tokens",
    "model.sequence_length",
    "model.dropout",
    "train.seed",
    "train.precision",
    "train.loss",
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
    imported: str | None = Field(
        None,
        description="checkpoints of an imported model: a start without a state of its own begins with the weights of "
        "step 0 there, or is refused; convert import sets it",
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
        "so that one is complete while the other is filled",
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

    _paths = field_validator("location")(expand_home)

    @field_validator("accept_changes")
    @classmethod
    def _acceptable(cls, keys: list[str]) -> list[str]:
        for key in keys:
            if key not in CHANGEABLE_KEYS:
                raise ValueError(
                    f"checkpoint.accept_changes has {key!r}; what may be accepted is {', '.join(CHANGEABLE_KEYS)}. The "
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

    _paths = field_validator("tls_ca", "tls_certificate", "tls_key")(expand_home)

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

    tensorboard: bool = Field(
        True, description="write scalars for TensorBoard to RUN/tensorboard, where the package is there"
    )
    wandb: str | None = Field(
        None,
        min_length=1,
        description="Weights & Biases project to report to (pip install -e '.[wandb]'); its own environment "
        "variables hold, such as WANDB_MODE=offline",
    )
    sinks: list[Annotated[str, AfterValidator(SINKS.validate_name)]] = Field(
        default_factory=list,
        description="further places for metrics, by name: what installed packages register (observe/metrics.py)",
    )
    float8_interval: int = Field(
        100,
        ge=0,
        le=MOST,
        description="steps between those whose casts to float8 count what they clip and what becomes zero; 0: none",
    )
    progress: bool = Field(True, description="live progress line on a terminal")
    timers: bool = Field(
        True, description="time every action of a step on every rank, without waiting for the device (docs/observe.md)"
    )
    spans: int = Field(
        100, ge=0, le=MOST, description="steps from one whose spans are all kept to the next; 0: only when asked for"
    )
    spans_mib: int = Field(
        512, ge=16, le=1_000_000, description="MiB that a host's spans and roll-ups may take; the oldest spans go first"
    )
    span_sinks: list[Annotated[str, AfterValidator(SPAN_SINKS.check_given)]] = Field(
        default_factory=lambda: ["parquet"],
        min_length=1,
        description="where each host's spans go, NAME or NAME=ADDRESS: parquet, which commands read, clickhouse, "
        "kafka, and what packages register (observe/store/span_sinks.py)",
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="bf16 dense peak of one device for MFU; default: known GPUs, else MFU is not printed",
    )
