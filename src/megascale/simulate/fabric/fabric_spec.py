"""The description of a network fabric, read from a TOML file and validated before the network is built.

The file's table [sources] states where each value comes from, such as a section of a paper.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megascale.config.text_files import read_toml
from megascale.errors import ConfigError, FitError


class FabricSpec(BaseModel):
    """A Clos network of equal switches.

    Hosts are divided into sets. With `rails` a set has one leaf switch per NIC index, without it one leaf switch.
    The leaf switches of one NIC index, over all sets, are a rail.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    hosts: int = Field(ge=1, le=200_000)
    nics: int = Field(ge=1, le=64, description="NICs per host, one per GPU")
    nic_gbps: float = Field(gt=0, description="Gb/s of a NIC")
    rails: bool = Field(
        description="true: NIC i of a host goes to leaf switch i of its set of hosts; false: all go to one"
    )
    hosts_per_set: int = Field(ge=1, description="hosts of one set, which share leaf switches")
    switch_ports: int = Field(ge=2, description="ports per switch, in every tier")
    port_gbps: float = Field(gt=0, description="Gb/s of a switch port")
    leaf_split: int = Field(ge=1, le=8, description="NICs that share one port of a leaf switch by a split cable")
    planes: int = Field(
        1,
        ge=1,
        le=8,
        description="separate networks of switches: a NIC has a port of nic_gbps / planes in each and spreads its "
        "bytes evenly",
    )
    leaf_oversubscription: float = Field(
        gt=0, le=64, description="downlink bandwidth / uplink bandwidth of a leaf switch; below 1: more up than down"
    )
    spine_oversubscription: float = Field(gt=0, le=64, description="the same ratio of an aggregation (spine) switch")
    tiers: Literal[2, 3] = Field(description="2: leaf and aggregation switches; 3: also core switches")
    pod: Literal["sets", "rail"] = Field(
        description="leaf switches that share aggregation switches, as many as these have ports down; sets: those of "
        "complete sets; rail: those of one NIC index"
    )
    cable_ns: float = Field(ge=0, description="delay of a hop: a cable and the switch that it leads to")
    buffer_mb: float = Field(gt=0, description="packet memory of a switch, 10^6 bytes")
    failed: tuple[str, ...] = Field(
        (),
        description="links and switches that are down; leaf3-agg5: all links between the two; leaf3-agg5.0: one of "
        "them; core7: a switch",
    )
    sources: dict[str, str] = Field(default_factory=dict, description="key -> where its value comes from")

    @property
    def gpus(self) -> int:
        """Number of GPUs, one per NIC."""
        return self.hosts * self.nics

    @property
    def plane_gbps(self) -> float:
        """Gb/s of a NIC's port in one plane."""
        return self.nic_gbps / self.planes


# Keys that need no source. `planes` needs one only if it is not 1 (see `validate_fabric`).
_KEYS_WITHOUT_SOURCE = {"name", "failed", "sources", "planes"}


def list_shipped_fabrics() -> list[str]:
    """Return the names of the fabrics that come with the package."""
    folder = resources.files("megascale.simulate.fabric") / "fabrics"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def load_fabric(name: str, changes: Mapping[str, Any] | None = None) -> FabricSpec:
    """Load a shipped fabric by name, or a TOML file by path, and apply `changes` to its keys.

    Raises:
        ConfigError: unknown name or key, a value of a wrong type or out of range, a key without a source.
        FitError: two keys do not fit each other (see `check_fit`).
    """
    path = Path(name)
    if name in list_shipped_fabrics():
        tree = tomllib.loads((resources.files("megascale.simulate.fabric") / "fabrics" / f"{name}.toml").read_text())
    elif path.suffix == ".toml" and path.is_file():
        tree = read_toml(path, "fabric file")
    else:
        raise ConfigError(
            f"--fabric={name!r} is neither a shipped fabric ({', '.join(list_shipped_fabrics())}) nor a TOML file; "
            "copy a shipped file from megascale/simulate/fabric/fabrics and edit it"
        )
    return validate_fabric(tree, changes)


def validate_fabric(tree: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> FabricSpec:
    """Validate a file's keys with `changes` applied.

    The file must give a source for each key outside `_KEYS_WITHOUT_SOURCE`, also if the key is changed. The result
    names the command line as the source of a changed key.

    Raises:
        ConfigError: a key without a source, an unknown key, a value of a wrong type or out of range.
        FitError: two keys do not fit each other (see `check_fit`).
    """
    if missing := sorted(set(FabricSpec.model_fields) - _KEYS_WITHOUT_SOURCE - set(tree.get("sources", {}))):
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
        key = ".".join(str(part) for part in first["loc"]) or "?"
        raise ConfigError(
            f"fabric key {key}={first['input']!r} is wrong: {first['msg']}; {_describe_key(key)}"
        ) from None
    changed = dict.fromkeys(changes or {}, "given on the command line")
    return check_fit(spec.model_copy(update={"sources": {**spec.sources, **changed}}))


def _describe_key(key: str) -> str:
    """Return the description of a key, or the list of keys if it is unknown."""
    field = FabricSpec.model_fields.get(key.split(".")[0])
    if field:
        return f"it is {field.description or key}"
    return f"keys are {', '.join(FabricSpec.model_fields)}"


class LeafPorts(NamedTuple):
    """Numbers of ports that a leaf switch needs: `down` to NICs, and `up` to aggregation switches."""

    down: int
    up: int


def count_leaf_ports(spec: FabricSpec) -> LeafPorts:
    """Return the ports that a leaf switch needs, which may be more than it has."""
    nics_per_leaf = spec.hosts_per_set * (1 if spec.rails else spec.nics)
    down = -(-nics_per_leaf // spec.leaf_split)
    # `check_fit` refuses NICs faster than their port. The limit removes the rounding error that it tolerates.
    used_gbps = min(spec.leaf_split * spec.plane_gbps, spec.port_gbps)
    up = down * used_gbps / spec.port_gbps / spec.leaf_oversubscription
    return LeafPorts(down, max(1, round(up)))


def check_fit(spec: FabricSpec) -> FabricSpec:
    """Return `spec` if its keys fit each other.

    Raises:
        FitError: several planes with failures, NICs faster than their port, or too few ports per leaf switch.
    """
    if spec.planes > 1 and spec.failed:
        raise FitError(
            f"failed={spec.failed[0]!r} does not fit planes={spec.planes}: one plane is simulated for all planes, and "
            "a failure in one of them cannot be simulated; remove failed, or use planes=1"
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
    down, up = count_leaf_ports(spec)
    if down + up > spec.switch_ports:
        maximum = _find_max_hosts_per_set(spec)
        if maximum:
            remedy = f"use hosts_per_set={maximum}, or a larger leaf_oversubscription"
        else:
            remedy = "use a larger switch_ports, since not even one host fits"
        raise FitError(
            f"hosts_per_set={spec.hosts_per_set} needs {down} ports down and {up} up on a leaf switch, which has "
            f"switch_ports={spec.switch_ports}; {remedy}"
        )
    return spec


def _find_max_hosts_per_set(spec: FabricSpec) -> int:
    """Return the largest hosts_per_set for which a leaf switch has enough ports, 0 if one host needs too many."""

    def count_ports(hosts: int) -> int:
        return sum(count_leaf_ports(spec.model_copy(update={"hosts_per_set": hosts})))

    # The number of ports grows with that of hosts, and each host has at least one NIC.
    candidates = range(1, spec.switch_ports * spec.leaf_split + 1)
    return bisect_right(candidates, spec.switch_ports, key=count_ports)


def parse_changes(settings: list[str]) -> dict[str, Any]:
    """Parse settings KEY=VALUE, whose values are TOML or else plain text.

    Raises:
        ConfigError: a setting without "=".
    """
    changes: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r} must be KEY=VALUE, such as hosts=128")
        try:
            changes[key.strip()] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            changes[key.strip()] = value
    return changes
