"""Shapes of `python -m benchmarks shapes`, and how peers train them: a TOML file.

[defaults]                        # of every shape; settings come before a shape's own
steps = 8
settings = ["--train.global_batch=32"]

[[shape]]
name = "qwen even"
arguments = ["qwen3-30b-a3b", "--model.layers=12", "--parallel.tensor=4", "--train.micro_batch=4"]
even_experts = true

[[shape.peer]]                    # a run of a peer; without any, each peer runs once with its defaults
trainer = "megatron-core"
micro_batch = 2
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megascale.config import Config
from megascale.errors import ConfigError, MegascaleError

ATTENTION_KINDS = ("auto", "flash", "fused")  # values of Megatron-Core's attention_backend
GRAPH_KINDS = ("none", "local", "full_iteration")  # values of Megatron-Core's cuda_graph_impl that take effect here


class PeerRun(BaseModel):
    """Settings of a peer for a shape. Model, layout and batch are those of the shape."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trainer: Literal["megatron-core"] = "megatron-core"
    label: str = Field("", max_length=20, description="distinguishes several runs of a peer")
    micro_batch: int | None = Field(None, ge=1, description="of the peer, if another one suits it better")
    virtual_stages: int | None = Field(None, ge=1, description="model chunks per pipeline stage of the peer")
    recompute: Literal["none", "selective", "full"] = "none"
    float8: Literal["auto", "none", "delayed", "tensorwise"] = "auto"
    context_exchange: Literal["a2a", "p2p", "all_gather"] = "a2a"
    seconds: float | None = Field(None, gt=0, description="time limit; default: that of the shape")
    settings: dict[str, bool | int | float | str] = Field({}, description="of Megatron-Core's TransformerConfig")
    data_settings: dict[str, bool | int | float | str] = Field(
        {}, description="of Megatron-Core's DistributedDataParallelConfig"
    )

    @field_validator("settings")
    @classmethod
    def _check_kinds(cls, settings: dict[str, Any]) -> dict[str, Any]:
        kind = settings.get("cuda_graph_impl", "none")
        if kind not in GRAPH_KINDS:
            raise ValueError(
                f"cuda_graph_impl={kind!r} is captured by Megatron-LM's training script, which does not run here; "
                f"use one of {', '.join(GRAPH_KINDS)}"
            )
        backend = settings.get("attention_backend", "auto")
        if backend not in ATTENTION_KINDS:
            raise ValueError(f"attention_backend={backend!r} is unknown; use one of {', '.join(ATTENTION_KINDS)}")
        return settings


class Shape(BaseModel):
    """One shape."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ,._+/-]*$", max_length=40)
    arguments: list[str] = Field(min_length=1, description="a shipped model shape, then --section.key=value")
    steps: int = Field(10, ge=1, description="timed steps")
    warmup: int = Field(5, ge=1, description="untimed steps before the timed steps")
    even_experts: bool = False
    mean_document: int = Field(512, ge=1)
    seconds: float = Field(150, gt=0, description="time limit, start of the model included")
    peer: list[PeerRun] | None = Field(None, description="runs of peers; [] for none; default: one with the defaults")
    compare_with: str | None = Field(None, description="another shape, with whose peers this one is compared")

    @property
    def file_name(self) -> str:
        """Return the shape's name as the stem of a file that a shell takes as it is: letters, digits and dashes."""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-")

    def load_config(self, device: str | None = None) -> Config:
        """Return the configuration. Raises ConfigError that names the shape.

        Args:
            device: overrides train.device, if it is not None.
        """
        from megascale.bench.measured_steps import check_even_experts
        from megascale.bench.train import load_shape_config

        preset, *settings = self.arguments
        defaults = [f"--model.preset={preset}", "--train.precision=bfloat16", "--train.global_batch=64"]
        overrides = defaults + ["--train.name=bench-shapes"] + settings
        if device is not None:
            overrides.append(f"--train.device={device}")
        try:
            config = load_shape_config(overrides)
            check_even_experts(config, self.even_experts)
        except MegascaleError as error:
            raise type(error)(f"shape {self.name}: {error}") from None
        return config

    def list_peer_runs(self, trainer: str) -> list[PeerRun]:
        """Return the runs of a peer."""
        if self.compare_with is not None:
            return []
        if self.peer is None:
            return [PeerRun(trainer=trainer)]  # type: ignore[arg-type]
        return [run for run in self.peer if run.trainer == trainer]


class _Defaults(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int | None = None
    warmup: int | None = None
    seconds: float | None = None
    settings: list[str] = []


def load_shapes(file: Path) -> list[Shape]:
    """Return the shapes of a TOML file. Raises ConfigError that names shape, key and value if it is wrong."""
    try:
        tree = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; name a TOML file of shapes") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None
    unknown = set(tree) - {"defaults", "shape"}
    if unknown:
        raise ConfigError(f"{file}: {sorted(unknown)[0]} is unknown; write [defaults] and [[shape]]")
    if not isinstance(tree.get("shape"), list) or not tree["shape"]:
        raise ConfigError(f"{file}: it has no shape; add one with [[shape]]")
    try:
        defaults = _Defaults.model_validate(tree.get("defaults", {}))
        shapes = [_make_shape(entry, defaults) for entry in tree["shape"]]
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{file}: {error.title} {key}={first['input']!r}: {first['msg']}") from None
    names = [shape.name for shape in shapes]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ConfigError(f"{file}: the name {repeated[0]!r} is used twice; give each shape its own name")
    shapes_by_file: dict[str, str] = {}
    for shape in shapes:
        other = shapes_by_file.setdefault(shape.file_name, shape.name)
        if other != shape.name:
            raise ConfigError(
                f"{file}: the names {other!r} and {shape.name!r} give the same file of a profile, {shape.file_name}; "
                "let them differ in letters or digits"
            )
    for shape in shapes:
        if shape.compare_with is not None and shape.compare_with not in names:
            raise ConfigError(
                f"shape {shape.name}: compare_with={shape.compare_with!r} is unknown; {file} has the shapes "
                f"{', '.join(names)}"
            )
        if shape.arguments[0].startswith("-"):
            raise ConfigError(
                f"shape {shape.name}: arguments begin with {shape.arguments[0]!r}; name a shipped model shape first, "
                "such as gpt-13b"
            )
    return shapes


def _make_shape(entry: dict[str, Any], defaults: _Defaults) -> Shape:
    values = defaults.model_dump(exclude_none=True, exclude={"settings"}) | entry
    arguments = entry.get("arguments")
    if isinstance(arguments, list) and arguments:
        values["arguments"] = arguments[:1] + defaults.settings + arguments[1:]
    return Shape.model_validate(values)
