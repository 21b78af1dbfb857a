"""A step on a network: slow-downs of its transfers at the flow level, and the resulting time of the step.

The step model (step.py) is calibrated on the cluster of the MegaScale paper, so the calibration contains the slow-downs
of that network. It is the *reference*, assumed with placement "data" (ranks of a data-parallel group close together)
and four queue pairs. On another network, transfers take longer by the ratio of its slow-down to that of the reference,
times the ratio of the NICs' bandwidths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megascale.config import Config
from megascale.errors import ConfigError
from megascale.simulate.calibration import load_calibration
from megascale.simulate.cluster import load_cluster
from megascale.simulate.fabric.fabric_spec import FabricSpec, load_fabric
from megascale.simulate.fabric.placement import make_placement
from megascale.simulate.fabric.step_traffic import StepTraffic, estimate_step_traffic
from megascale.simulate.fabric.topology import GIGABIT, Floats, build_topology
from megascale.simulate.fabric.transfer_times import FabricTimes, Outage
from megascale.simulate.network import Network, RingNetwork, SharedFabricNetwork
from megascale.simulate.scenario import Scenario, make_engine_software
from megascale.simulate.software import find_stack
from megascale.simulate.step import Level, StepEstimate, estimate_step


@dataclass(frozen=True)
class Variant:
    """A network for a study: a fabric, the placement of ranks, and the connections.

    Attributes:
        fabric: name or file of the fabric.
        changes: values of the fabric's keys that replace those of the file.
        placement: strategy or file of the placement.
        queue_pairs: number of connections over which a pair of ranks spreads its bytes.
        algorithm: algorithm of data-parallel collectives.
        polarised: whether all switches have the same hash seed.
        draws: number of draws of the hash seeds, which differ between starts of a job.
        seed: seed of a random placement.
        outages: failed parts with their times.
        offset: time in seconds; the outages at this time count.
        alone: whether only the groups of rank 0 communicate.
    """

    fabric: str = "megascale"
    changes: dict[str, Any] = field(default_factory=dict)
    placement: str = "data"
    queue_pairs: int = 4
    algorithm: str = "ring"
    polarised: bool = False
    draws: int = 1
    seed: int = 0
    outages: tuple[Outage, ...] = ()
    offset: float = 0.0
    alone: bool = False

    @property
    def key(self) -> str:
        """Text that is equal for variants with equal networks. Changes that repeat a file's value do not count."""
        values = load_fabric(self.fabric).model_dump()
        changes = {key: value for key, value in sorted(self.changes.items()) if values.get(key) != value}
        return repr(replace(self, changes=changes))

    def with_key(self, key: str, text: str) -> Variant:
        """Return a copy with one key changed: placement, queue_pairs, algorithm, or a key of the fabric.

        Raises ConfigError for an unknown key or a wrong number of queue pairs.
        """
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
            valid_keys = ", ".join(k for k in FabricSpec.model_fields if k not in ("sources", "name"))
            raise ConfigError(
                f"--vary={key!r} is unknown; placement, queue_pairs, algorithm, or of the fabric: {valid_keys}"
            )
        return replace(self, changes={**self.changes, key: value})


@dataclass(frozen=True, eq=False)
class AxisTimes:
    """Slow-downs of a step's transfers on a network: their times divided by those at the NICs' full rate.

    Attributes:
        data: [draws, stages] slowest data-parallel group of each stage; all groups at once, without other traffic.
        data_beside_pipeline: the same together with the step's pipeline traffic.
        pipeline: [draws, replicas] slowest transfer between stages of each replica, all at once.
        nic: bytes/s of a NIC.
        traffic: bytes that a step sends.
        wall: wall-clock seconds of the measurement.
    """

    data: Floats
    data_beside_pipeline: Floats
    pipeline: Floats
    nic: float
    traffic: StepTraffic
    wall: float

    @staticmethod
    def worst(values: Floats) -> Floats:
        """Return the slowest of each draw: [draws]."""
        maxima: Floats = values.max(axis=1)
        return maxima


def measure_slowdowns(
    config: Config, gpus: int, variant: Variant, report: Callable[[str], None] | None = None
) -> AxisTimes:
    """Return the slow-downs of a step's transfers for each draw of the hash seeds.

    Args:
        report: called with the progress as text.
    """
    start = time.perf_counter()
    traffic = estimate_step_traffic(config, gpus)
    grid = traffic.grid
    topology = build_topology(load_fabric(variant.fabric, variant.changes))
    placement = make_placement(grid, topology, variant.placement, variant.seed)
    times = FabricTimes(
        topology, placement, variant.queue_pairs, variant.draws, variant.polarised, variant.algorithm,
        outages=variant.outages, wrap_share=traffic.wrap_share,
    )  # fmt: skip

    def announce(kind: str) -> None:
        """Let progress be reported as that of `kind` of traffic."""
        if report is not None:
            times.report = lambda share: report(f"{kind}, {share:.0%} of the flows have finished")

    ranks = (0,) if variant.alone else None  # None: all ranks

    def measure_stages(concurrent: Sequence[tuple[str, float]] = ()) -> Floats:
        """Return the slow-down of each stage's slowest data-parallel group: [draws, stages].

        Args:
            concurrent: axes whose groups send at the same time, with their bytes relative to the data axis.
        """
        slowdowns = times.slowdown("data", ranks, concurrent, variant.offset).for_groups(grid.pipeline * grid.tensor)
        slowest: Floats = slowdowns.reshape(-1, grid.pipeline, grid.tensor).max(axis=2)
        return slowest

    announce("collectives")
    data = measure_stages()
    data_beside_pipeline = data
    pipeline = np.ones((variant.draws, grid.shards))
    if traffic.pipeline:
        relative_bytes = traffic.pipeline / max(traffic.reduce + traffic.gather, 1.0)
        announce("collectives during pipeline traffic")
        data_beside_pipeline = measure_stages((("pipeline", relative_bytes),))
        announce("transfers between stages")
        slowdowns = times.slowdown("pipeline", ranks, offset=variant.offset).for_groups(grid.shards * grid.tensor)
        pipeline = slowdowns.reshape(-1, grid.shards, grid.tensor).max(axis=2)
    return AxisTimes(
        data=data,
        data_beside_pipeline=data_beside_pipeline,
        pipeline=pipeline,
        nic=topology.spec.nic_gbps * GIGABIT,
        traffic=traffic,
        wall=time.perf_counter() - start,
    )


def make_reference_network(gpus: int, gpus_per_host: int, variant: Variant) -> Variant:
    """Return the reference: the network of the calibration, with the draws and the seed of `variant`."""
    return Variant(changes={"hosts": -(-gpus // gpus_per_host)}, draws=variant.draws, seed=variant.seed)


def make_networks(
    scenario: Scenario, base: Network, times: AxisTimes, reference: AxisTimes
) -> list[SharedFabricNetwork]:
    """Return the step model's network for each draw.

    If the software overlaps data-parallel collectives with compute, pipeline traffic runs at the same time. The step
    model already has the slow-down by this traffic on the reference network, so that it is subtracted here.
    """
    nic_ratio = reference.nic / times.nic
    reference_data = float(AxisTimes.worst(reference.data).mean())
    reference_busy = float(AxisTimes.worst(reference.data_beside_pipeline).mean())
    reference_pipeline = float(AxisTimes.worst(reference.pipeline).mean())
    data_slowdowns = times.data
    if scenario.software.dp_overlap:
        data_slowdowns = np.maximum(times.data, times.data_beside_pipeline - (reference_busy - reference_data))
    return [
        SharedFabricNetwork(
            base, nic_ratio * data_slowdown / reference_data, nic_ratio * pipeline_slowdown / reference_pipeline
        )
        for data_slowdown, pipeline_slowdown in zip(data_slowdowns, times.pipeline, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class StepOnNetwork:
    """A step on a network, for several draws of the hash seeds, which differ between starts of a job.

    Attributes:
        estimates: the step for each draw.
        slowdowns: slow-downs of this network.
        reference: slow-downs of the reference network.
    """

    reference_step: StepEstimate
    estimates: list[StepEstimate]
    slowdowns: AxisTimes
    reference: AxisTimes

    @property
    def seconds(self) -> Floats:
        """Seconds of the step: [draws]."""
        return np.array([estimate.seconds for estimate in self.estimates])

    @property
    def median(self) -> StepEstimate:
        """The median estimate over draws."""
        return sorted(self.estimates, key=lambda estimate: estimate.seconds)[len(self.estimates) // 2]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of --json."""
        rows = {}
        for name, attribute in (("data", "data"), ("busy", "data_beside_pipeline"), ("pipeline", "pipeline")):
            slowdowns = getattr(self.slowdowns, attribute)
            slowest = AxisTimes.worst(slowdowns)
            rows[name] = {
                "slowest_mean": float(slowest.mean()),
                "slowest_p90": float(np.quantile(slowest, 0.9)),
                "groups_mean": float(slowdowns.mean()),
                "calibrated": float(AxisTimes.worst(getattr(self.reference, attribute)).mean()),
            }
        return {"slowdowns": rows, "seconds": self.seconds.tolist(), "seconds_calibrated": self.reference_step.seconds}


def estimate_steps_on_network(
    scenarios: Sequence[Scenario], variant: Variant, level: Level = "closed", **options: Any
) -> list[StepOnNetwork]:
    """Return each scenario's step on a network. All scenarios must have the same layout.

    Args:
        options: options of `step.estimate_step`.

    Raises:
        ConfigError: a scenario has context parallelism or experts, whose traffic this study does not model.
        FitError: the layout needs more hosts than the fabric has.
    """
    first = scenarios[0]
    limitation = "--fabric knows data- and pipeline-parallel traffic only"
    if any(s.uses_closed_form_only_features for s in scenarios):
        raise ConfigError(f"{limitation}; leave out --experts, --top-k and --expert-parallel")
    if first.config.parallel.context > 1:
        raise ConfigError(f"{limitation}; leave out --fabric, or set --parallel.context=1")
    slowdowns = measure_slowdowns(first.config, first.gpus, variant)
    reference_network = make_reference_network(first.gpus, first.config.parallel.gpus_per_host, variant)
    if reference_network.key == variant.key:
        reference = slowdowns
    else:
        reference = measure_slowdowns(first.config, first.gpus, reference_network)
    results = []
    for scenario in scenarios:
        base = RingNetwork(scenario.cluster, scenario.calibration.constants.dp_efficiency)
        networks = make_networks(scenario, base, slowdowns, reference)
        results.append(
            StepOnNetwork(
                reference_step=estimate_step(scenario, level, **options),
                estimates=[estimate_step(scenario, level, network=network, **options) for network in networks],
                slowdowns=slowdowns,
                reference=reference,
            )
        )
    return results


def _prefix_report(report: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    """Return a function that reports a text after `prefix`."""
    return lambda text: report(f"{prefix}: {text}")


def vary_network(
    config: Config, gpus: int, variants: dict[str, Variant], report: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """Return one row per variant with the step's mean seconds, on cluster a100-roce with its shipped calibration.

    Args:
        report: called with the progress as text.
    """
    first = next(iter(variants.values()))
    cluster = load_cluster("a100-roce")
    calibration = load_calibration(None, cluster.name)
    scenario = Scenario(
        config, gpus, cluster, calibration, make_engine_software(config, find_stack("megascale")), "megascale"
    )
    reference_network = make_reference_network(gpus, config.parallel.gpus_per_host, first)
    times_by_key = {
        reference_network.key: measure_slowdowns(
            config, gpus, reference_network, report=_prefix_report(report, "network of the calibration")
        )
    }
    ring = RingNetwork(cluster, calibration.constants.dp_efficiency)
    rows = []
    for number, (name, variant) in enumerate(variants.items(), start=1):
        prefix = f"network {number} of {len(variants)} ({name})"
        times = times_by_key.get(variant.key)
        if times is None:
            times = measure_slowdowns(config, gpus, variant, report=_prefix_report(report, prefix))
        times_by_key[variant.key] = times
        steps = [
            estimate_step(scenario, "closed", network=network, check_memory=False).seconds
            for network in make_networks(scenario, ring, times, times_by_key[reference_network.key])
        ]
        data = float(AxisTimes.worst(times.data).mean())
        traffic = times.traffic
        ring_share = (traffic.grid.shards - 1) / traffic.grid.shards  # share of the bytes that a rank of a ring sends
        rows.append(
            {
                "name": name,
                "data": data,
                "data_busy": float(AxisTimes.worst(times.data_beside_pipeline).mean()),
                "pipeline": float(AxisTimes.worst(times.pipeline).mean()),
                "reduce_s": data * traffic.reduce * ring_share / times.nic,
                "gather_s": data * traffic.gather * ring_share / times.nic,
                "wall_s": times.wall,
                "step_s": float(np.mean(steps)),
            }
        )
    return rows
