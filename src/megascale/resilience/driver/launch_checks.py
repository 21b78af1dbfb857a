"""Checks before a launch: the order of all time-outs, the size of the job, and the files with which it is started.

The files determine the nodes of the ranks (resilience.placement) and the environment of the trainers
(resilience.environment). They are read and checked before any process starts. Then they are copied to RUN/driver, since
a user may change the originals before another driver takes over.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path

from megascale.config import Config
from megascale.core.grid import Grid
from megascale.core.launch_files import read_environment, read_placement
from megascale.errors import ConfigError, DataError, FitError
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.protocol.contact import driver_folder
from megascale.resilience.rules.silence import HANG_FLOOR

# Names of the copies in RUN/driver, by key of [resilience].
_COPY_NAMES = {"placement": "placement.json", "environment": "environment.env"}
# Names of nodes that the message about unknown nodes lists, and the characters of each unknown name that it shows.
_MAX_UNKNOWN_NODES = 5
_MAX_AVAILABLE_NODES = 8
_NAME_CHARACTERS = 80


def check_timeouts(config: Config) -> None:
    """Check the order of all time-outs that take part in recovery.

    A heartbeat interval fits twice into the window. A lost node or a hang is noticed before ranks abort a collective.
    Agents outlast a driver's restart, and copies of the state in memory outlast a recovery.

    Raises:
        ConfigError: two time-outs are in the wrong order.
    """
    limits = config.resilience
    seconds_by_key = {
        "resilience.interval": limits.interval,
        "resilience.window": limits.window,
        "resilience.orphan": limits.orphan,
        "resilience.first_step": limits.first_step,
        "resilience.lease": limits.lease,
        "resilience.window and resilience.agent_lease": limits.window + (limits.agent_lease or 0.0),
        "rendezvous.timeout": config.rendezvous.timeout,
        "rendezvous.group_timeout": config.rendezvous.group_timeout,
        "checkpoint.linger": config.checkpoint.linger,
        "the least time to wait on a hang": HANG_FLOOR,
    }
    # (key, factor, longer key, reason): `factor` times the first must not exceed the second, so that REASON.
    orders = [
        ("resilience.interval", 2.0, "resilience.window", "one late heartbeat does not make a node lost"),
        ("resilience.window", 1.0, "rendezvous.timeout", "a node that is lost during the start is noticed"),
        (
            "resilience.window",
            1.0,
            "rendezvous.group_timeout",
            "the driver finds the lost node before its peers abort and look guilty",
        ),
        ("resilience.window", 2.0, "resilience.orphan", "agents outlast a driver's restart"),
        ("resilience.window", 1.0, "resilience.first_step", "a lost node is not mistaken for a slow start"),
        (
            "the least time to wait on a hang",
            1.0,
            "rendezvous.group_timeout",
            "the driver names the hanging rank before ranks abort the collective",
        ),
        ("resilience.lease", 1.0, "resilience.orphan", "agents outlast a change of drivers"),
    ]
    if config.checkpoint.background:
        reason = "copies of the state in memory still exist when ranks start again"
        orders.append(("resilience.window", 1.0, "checkpoint.linger", reason))
    if config.checkpoint.background and limits.agent_lease is not None:
        reason = "copies of the state in memory outlast the wait for ranks of an unreachable node"
        orders.append(("resilience.window and resilience.agent_lease", 1.0, "checkpoint.linger", reason))
    for short_key, factor, longer_key, reason in orders:
        short = seconds_by_key[short_key]
        longer = seconds_by_key[longer_key]
        if short * factor > longer:
            multiple = f"{factor:g} x " if factor != 1 else ""
            raise ConfigError(
                f"{short_key}={short:g} s is too long for {longer_key}={longer:g} s: "
                f"{multiple}{short_key} must not be above {longer_key}, so that {reason}; lower {short_key} or raise "
                f"{longer_key}"
            )


@dataclass(frozen=True)
class JobSize:
    """The size of a job.

    Attributes:
        world: number of ranks.
        ranks_per_node: number of ranks on each node.
        devices: for each node on this machine the indices of its GPUs, among the GPUs that this process sees.
    """

    world: int
    ranks_per_node: int
    data: int
    devices: list[list[int]]


def compute_size(config: Config, gpus: int, *, shared: bool = True) -> JobSize:
    """Compute the number of ranks of a job.

    Args:
        gpus: number of GPUs of this machine if `shared`, else of each node.
        shared: all nodes are on this machine; otherwise each node is a machine.

    Raises:
        FitError: layout, nodes and GPUs do not fit together.
    """
    parallel = config.parallel
    nodes = config.resilience.nodes
    model_ranks = parallel.model_ranks
    node_count = nodes + config.resilience.spares
    uses_gpus = gpus > 0 and config.train.device != "cpu"
    gpus_per_node = 0
    if uses_gpus:
        gpus_per_node = gpus // node_count if shared else gpus
        if not gpus_per_node:
            raise FitError(
                f"{node_count} nodes and spares share {gpus} GPUs: lower --nodes or --spares to {gpus} in all"
            )
    if parallel.data is not None:
        world = model_ranks * parallel.data
    else:
        # The world must be a multiple of the ranks of a replica and of the nodes. With GPUs the largest multiple that
        # fits is used.
        smallest_world = lcm(model_ranks, nodes)
        world = smallest_world
        if uses_gpus:
            world = nodes * gpus_per_node // smallest_world * smallest_world
    if not world or world % nodes:
        raise FitError(
            f"{world or model_ranks} ranks (parallel.tensor x pipeline x data) do not divide evenly over "
            f"resilience.nodes={nodes}; change --nodes or parallel.data"
        )
    ranks_per_node = world // nodes
    if uses_gpus and ranks_per_node > gpus_per_node:
        raise FitError(
            f"{ranks_per_node} ranks per node but {gpus_per_node} GPUs for each of {node_count} nodes and spares"
        )
    devices: list[list[int]] = []
    if uses_gpus and shared:
        for node in range(node_count):
            first_gpu = node * gpus_per_node
            devices.append(list(range(first_gpu, first_gpu + gpus_per_node)))
    return JobSize(world, ranks_per_node, world // model_ranks, devices)


@dataclass(frozen=True)
class JobFiles:
    """The contents of the files with which a job is started.

    Attributes:
        nodes: names of the nodes in rank order by resilience.placement; empty: in the order of their names.
        environment: variables of every trainer's environment.
    """

    nodes: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def read_job_files(config: Config, copies_in: Path | None = None) -> JobFiles:
    """Read the files that the settings name, for a configuration with its sizes (start_driver.prepare).

    Args:
        copies_in: a run folder whose copies are read in place of the originals.

    Raises:
        ConfigError: a file is missing, or a placement has no names.
        DataError: a file is damaged or for another job.
    """
    parallel = config.parallel
    limits = config.resilience
    nodes: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    if limits.placement is not None:
        grid = Grid.from_config(parallel, parallel.model_ranks * (parallel.data or 1))
        file = _locate(limits.placement, "placement", copies_in)
        placement = read_placement(file, grid, "resilience.placement")
        if placement.nodes is None:
            raise ConfigError(
                f"resilience.placement={limits.placement} numbers machines of a simulated fabric and does not name "
                "them; write it with megascale network placement --names FILE --out, one name per line in the fabric's "
                "order, as `megascale nodes` shows them"
            )
        nodes = placement.nodes
    if limits.environment is not None:
        file = _locate(limits.environment, "environment", copies_in)
        environment = read_environment(file, "resilience.environment")
    return JobFiles(nodes, environment)


def copy_job_files(config: Config, run: Path) -> None:
    """Copy the files to RUN/driver, readable by the run's user only, since an environment may hold secrets."""
    limits = config.resilience
    for key, source in (("placement", limits.placement), ("environment", limits.environment)):
        copy = driver_folder(run) / _COPY_NAMES[key]
        copy.unlink(missing_ok=True)
        if source is not None:
            with open(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(Path(source).read_bytes())


def check_nodes(config: Config, files: JobFiles, cluster: Cluster) -> None:
    """Pass the configured nodes to the cluster, which provides them first, and check that it has them.

    Raise DataError for a configured node that is missing in a cluster's list of nodes. Some clusters have no such list.
    """
    if not files.nodes:
        return
    cluster.prefer(files.nodes)
    limits = config.resilience
    available = cluster.list_possible_nodes(limits.nodes + limits.spares)
    unknown = [name for name in files.nodes if name not in available]
    if available and unknown:
        raise DataError(describe_unknown_nodes(str(limits.placement), unknown, available))


def describe_unknown_nodes(file: str, unknown: list[str], available: list[str]) -> str:
    """Return the message about configured nodes that the cluster lacks."""
    missing = ", ".join(name[:_NAME_CHARACTERS] for name in unknown[:_MAX_UNKNOWN_NODES])
    if len(unknown) > _MAX_UNKNOWN_NODES:
        missing += f" and {len(unknown) - _MAX_UNKNOWN_NODES:,} more"
    existing = ", ".join(available[:_MAX_AVAILABLE_NODES]) or "none"
    if len(available) > _MAX_AVAILABLE_NODES:
        existing += f" and {len(available) - _MAX_AVAILABLE_NODES:,} more"
    return (
        f"resilience.placement={file} puts ranks on {missing}, which the cluster does not have; it has {existing}. "
        "Write the file with these names, or leave the setting out"
    )


def _locate(source: str | Path, key: str, copies_in: Path | None) -> Path:
    """Return the file that the setting resilience.KEY names, or its copy in a run folder."""
    if copies_in is None:
        return Path(source)
    copy = driver_folder(copies_in) / _COPY_NAMES[key]
    if not copy.exists():
        raise DataError(
            f"{copy} is missing, the copy of resilience.{key}={source} with which this job was started; stop its "
            "agents and launch it again"
        )
    return copy
