"""A fabric as a TOML file with a source per figure, validated before anything is built."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megascale.config.text_files import read_toml
from megascale.errors import ConfigError, FitError


class FabricSpec(BaseModel):
    """A CLOS of equal switches over hosts whose NICs go to one leaf switch each (or one leaf switch for all)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    hosts: int = Field(ge=1, le=200_000)
    nics: int = Field(ge=1, le=64, description="NICs a host, one a GPU")
    nic_gbps: float = Field(gt=0, description="Gb/s of a NIC")
    rails: bool = Field(description="NIC i of every host goes to leaf switch i of the host's set")
    hosts_per_set: int = Field(ge=1, description="hosts on one set of leaf switches")
    switch_ports: int = Field(ge=2, description="ports of a switch, all tiers")
    port_gbps: float = Field(gt=0, description="Gb/s of a switch port")
    leaf_split: int = Field(ge=1, le=8, description="NICs that share one port of a leaf switch by a split cable")
    planes: int = Field(
        1,
        ge=1,
        le=8,
        description="planes of switches that never meet: a NIC has a port of nic_gbps / planes in each and spreads its "
        "bytes evenly",
    )
    leaf_oversubscription: float = Field(
        gt=0, le=64, description="bandwidth down over bandwidth up of a leaf switch; below 1: more up than down"
    )
    spine_oversubscription: float = Field(gt=0, le=64, description="the same of an aggregation switch")
    tiers: Literal[2, 3] = Field(description="2: leaf and aggregation; 3: and core")
    pod: Literal["sets", "rail"] = Field(description="which leaf switches share aggregation: whole sets, or one rail")
    cable_ns: float = Field(ge=0, description="delay of a link with the switch behind it")
    buffer_mb: float = Field(gt=0, description="packet memory of a switch, 10^6 bytes")
    failed: tuple[str, ...] = Field(
        (), description="links (leaf3-agg5, leaf3-agg5.0) and switches (core7) that are down"
    )
    sources: dict[str, str] = Field(default_factory=dict, description="key -> where its value comes from")

    @property
    def gpus(self) -> int:
        """Every NIC has its GPU."""
        return self.hosts * self.nics

    @property
    def plane_gbps(self) -> float:
        """Gb/s of a NIC's port in one plane."""
        return self.nic_gbps / self.planes


# Keys that need no source: names, and planes where there is one.
_WITHOUT_SOURCE = {"name", "failed", "sources", "planes"}


def shipped() -> list[str]:
    """Names of the fabrics that come with the package."""
    folder = resources.files("megascale.simulate.fabric") / "fabrics"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load_fabric(name: str, changes: Mapping[str, Any] | None = None) -> FabricSpec:
    """A shipped fabric by name, or a TOML file by path, with `changes` to its keys.

    Raises:
        ConfigError: unknown name or key, a value of a wrong type or sign, a figure without a source.
        FitError: sizes that no such switches can connect.
    """
    path = Path(name)
    if name in shipped():
        tree = tomllib.loads((resources.files("megascale.simulate.fabric") / "fabrics" / f"{name}.toml").read_text())
    elif path.suffix == ".toml" and path.is_file():
        tree = read_toml(path, "fabric file")
    else:
        raise ConfigError(
            f"--fabric={name!r} is neither a shipped fabric ({', '.join(shipped())}) nor a TOML file; copy a shipped "
            "file from megascale/simulate/fabric/fabrics and edit it"
        )
    return fabric_of(tree, changes)


def fabric_of(tree: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> FabricSpec:
    """Validate a file's keys, then lay `changes` over them (their source is the caller)."""
    if missing := sorted(set(FabricSpec.model_fields) - _WITHOUT_SOURCE - set(tree.get("sources", {}))):
        raise ConfigError(
            f"fabric {tree.get('name')!r} gives no source for {', '.join(missing[:4])}; add each under [sources], "
            '"assumed: ..." where it is a guess'
        )
    if tree.get("planes", 1) != 1 and "planes" not in tree.get("sources", {}):
        raise ConfigError(f"fabric {tree.get('name')!r} gives no source for planes; add it under [sources]")
    try:
        spec = FabricSpec.model_validate({**tree, **(changes or {})})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(p) for p in first["loc"]) or "?"
        raise ConfigError(f"fabric key {key}={first['input']!r} is wrong: {first['msg']}; {_described(key)}") from None
    changed = dict.fromkeys(changes or {}, "given on the command line")
    return check_sizes(spec.model_copy(update={"sources": {**spec.sources, **changed}}))


def _described(key: str) -> str:
    field = FabricSpec.model_fields.get(key.split(".")[0])
    if field:
        return f"it is {field.description or key}"
    return f"keys are {', '.join(FabricSpec.model_fields)}"


def leaf_ports(spec: FabricSpec) -> tuple[int, int]:
    """(ports down, ports up) of a leaf switch; FitError if it has not as many."""
    nics = spec.hosts_per_set * (1 if spec.rails else spec.nics)
    down = -(-nics // spec.leaf_split)
    up = down * min(spec.leaf_split * spec.plane_gbps, spec.port_gbps) / spec.port_gbps / spec.leaf_oversubscription
    return down, max(1, round(up))


def check_sizes(spec: FabricSpec) -> FabricSpec:
    """FitError naming the key that cannot be, and what would."""
    if spec.planes > 1 and spec.failed:
        raise FitError(
            f"failed={spec.failed[0]!r}: one of planes={spec.planes} is simulated for all, so that a part of one "
            "cannot fail alone; leave failed out, or use planes=1"
        )
    if spec.leaf_split * spec.plane_gbps > spec.port_gbps * (1 + 1e-9):
        if spec.planes == 1:
            nic_key = "nic_gbps"
        else:
            nic_key = f"nic_gbps / planes={spec.planes}"
        raise FitError(
            f"leaf_split={spec.leaf_split} x {nic_key}={spec.plane_gbps:g} is more than port_gbps={spec.port_gbps:g}; "
            f"use leaf_split={max(1, int(spec.port_gbps // spec.plane_gbps))}"
        )
    down, up = leaf_ports(spec)
    if down + up > spec.switch_ports:
        maximum = spec.hosts_per_set * spec.switch_ports // (down + up)
        raise FitError(
            f"hosts_per_set={spec.hosts_per_set} needs {down} ports down and {up} up on a leaf switch, which has "
            f"switch_ports={spec.switch_ports}; use hosts_per_set={maximum}, or a larger leaf_oversubscription"
        )
    return spec


def parse_changes(settings: list[str]) -> dict[str, Any]:
    """KEY=VALUE words as TOML values; ConfigError for one without =."""
    changes: dict[str, Any] = {}
    for word in settings:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set {word!r} must be KEY=VALUE, such as hosts=128")
        try:
            changes[key.strip()] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            changes[key.strip()] = value
    return changes
