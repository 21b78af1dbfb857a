"""A step under variants of its network: slow-downs at the flow level, and what they make of the step model's time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from megascale.config import Config
from megascale.errors import ConfigError
from megascale.simulate.calibration import load_calibration
from megascale.simulate.cluster import load_cluster
from megascale.simulate.fabric.fabric_spec import FabricSpec, load_fabric
from megascale.simulate.fabric.placement import place
from megascale.simulate.fabric.step_traffic import step_traffic
from megascale.simulate.fabric.topology import GIGABIT, build
from megascale.simulate.fabric.transfer_times import FabricTimes
from megascale.simulate.fabric_network import SharedFabricNetwork
from megascale.simulate.network import RingNetwork
from megascale.simulate.software import stack
from megascale.simulate.step import Scenario, own_software, run


@dataclass(frozen=True)
class Variant:
    """A network to try."""

    fabric: str = "megascale"
    changes: dict[str, Any] = field(default_factory=dict)
    placement: str = "data"
    queue_pairs: int = 4
    algorithm: str = "ring"
    polarised: bool = False
    draws: int = 1
    seed: int = 0

    @property
    def key(self) -> str:
        """Equal for variants whose network is: a change to what the shipped fabric has is none."""
        plain = load_fabric(self.fabric).model_dump()
        changes = {k: v for k, v in sorted(self.changes.items()) if plain.get(k) != v}
        return repr(replace(self, changes=changes))

    def with_key(self, key: str, text: str) -> Variant:
        """One key changed: placement, queue_pairs or algorithm, else one of the fabric's."""
        import tomllib

        if key == "placement":
            return replace(self, placement=text)
        if key == "algorithm":
            return replace(self, algorithm=text)
        try:
            value = tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            value = text
        if key == "queue_pairs":
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"--vary queue_pairs={text}: a whole number of at least 1")
            return replace(self, queue_pairs=value)
        if key not in FabricSpec.model_fields:
            known = ", ".join(k for k in FabricSpec.model_fields if k not in ("sources", "name"))
            raise ConfigError(
                f"--vary={key!r} is unknown; placement, queue_pairs, algorithm, or of the fabric: {known}"
            )
        return replace(self, changes={**self.changes, key: value})


def measure(config: Config, gpus: int, variant: Variant) -> dict[str, float]:
    """Slow-downs of a step's transfers over full NIC rate, all groups at once; the slowest group, mean of draws."""
    start = time.perf_counter()
    sent = step_traffic(config, gpus)
    topology = build(load_fabric(variant.fabric, variant.changes))
    laid = place(sent.grid, topology, variant.placement, variant.seed)
    times = FabricTimes(topology, laid, variant.queue_pairs, variant.draws, variant.polarised, variant.algorithm)
    data = times.slowdown("data").worst
    share = sent.pipeline / max(sent.reduce + sent.gather, 1.0)
    busy = times.slowdown("data", concurrent=(("pipeline", share),)).worst if sent.pipeline else data
    stages = times.slowdown("pipeline").worst if sent.pipeline else 1.0
    nic = topology.spec.nic_gbps * GIGABIT
    members = (sent.grid.data - 1) / sent.grid.data
    return {
        "data": data,
        "data_busy": busy,
        "pipeline": stages,
        "reduce_s": data * sent.reduce * members / nic,
        "gather_s": data * sent.gather * members / nic,
        "wall_s": time.perf_counter() - start,
    }


def vary_network(config: Config, gpus: int, variants: dict[str, Variant]) -> list[dict[str, Any]]:
    """A row a variant, with the step's seconds.

    The step model (cluster a100-roce, its shipped calibration) holds for the paper's network. What lengthens its
    transfers is a variant's slow-down over that network's own, at data-near placement and four queue pairs (assumed).
    """
    first = next(iter(variants.values()))
    cluster = load_cluster("a100-roce")
    calibration = load_calibration(None, cluster.name)
    scenario = Scenario(config, gpus, cluster, calibration, own_software(config, stack("megascale")), "megascale")
    hosts = -(-gpus // config.parallel.gpus_per_host)
    own = Variant(changes={"hosts": hosts}, draws=first.draws, seed=first.seed)
    measured = {own.key: measure(config, gpus, own)}
    reference = measured[own.key]
    ring = RingNetwork(cluster, calibration.constants.dp_efficiency)
    rows = []
    for name, variant in variants.items():
        found = measured.get(variant.key) or measure(config, gpus, variant)
        measured[variant.key] = found
        network = SharedFabricNetwork(
            ring, found["data"] / reference["data"], found["pipeline"] / reference["pipeline"]
        )
        rows.append({"name": name, **found, "step_s": float(run(scenario, "closed", network=network).seconds)})
    return rows
