"""Files that a job is started with: where its ranks go (resilience.placement), what their environment has
(resilience.environment). Read and checked before anything starts, then kept in RUN/driver, since what a driver's
successor finds under the user's names may be something else."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from megascale.config import Config
from megascale.core.environment_file import read_environment
from megascale.core.grid import Grid
from megascale.core.placement_file import read_placement
from megascale.errors import ConfigError, DataError
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.protocol.contact import folder

_KEPT = {"placement": "placement.json", "environment": "environment.env"}


@dataclass(frozen=True)
class JobFiles:
    """Attributes:

    nodes: names of the nodes in rank order, as resilience.placement says; empty: in the order of their names.
    environment: for every trainer.
    """

    nodes: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def read_job_files(config: Config, kept_in: Path | None = None) -> JobFiles:
    """What the settings name, for a configuration with its sizes (start_driver.prepare).

    Args:
        kept_in: a run folder whose copies are read instead.

    Raises:
        ConfigError: a file that is not there, or a placement without names.
        DataError: one that is damaged or for another job.
    """
    parallel, limits = config.parallel, config.resilience
    nodes: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    if limits.placement is not None:
        grid = Grid(parallel.tensor, parallel.data or 1, parallel.pipeline, parallel.gpus_per_host)
        file = _file(limits.placement, "placement", kept_in)
        found = read_placement(file, grid, "resilience.placement")
        if found.nodes is None:
            raise ConfigError(
                f"resilience.placement={limits.placement} numbers machines of a simulated fabric and does not name "
                "them; write it with megascale network placement --names FILE --out, a name a line in the fabric's "
                "order, as `megascale nodes` shows them"
            )
        nodes = found.nodes
    if limits.environment is not None:
        environment = read_environment(_file(limits.environment, "environment", kept_in), "resilience.environment")
    return JobFiles(nodes, environment)


def keep_job_files(config: Config, run: Path) -> None:
    """Copy the files into RUN/driver, readable by the run's user only: an environment may hold what others must not
    see."""
    for name, value in (("placement", config.resilience.placement), ("environment", config.resilience.environment)):
        kept = folder(run) / _KEPT[name]
        kept.unlink(missing_ok=True)
        if value is not None:
            with open(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(Path(value).read_bytes())


def check_nodes(config: Config, files: JobFiles, cluster: Cluster) -> None:
    """DataError for a node that the cluster will not have, where the cluster knows its nodes beforehand; it is told
    which to give first."""
    limits = config.resilience
    cluster.prefer(files.nodes)
    there = cluster.foreseen(limits.nodes + limits.spares)
    unknown = [name for name in files.nodes if name not in there]
    if there and unknown:
        raise DataError(unknown_nodes(str(limits.placement), unknown, there))


def unknown_nodes(file: str, unknown: list[str], there: list[str]) -> str:
    """What is said of nodes that nobody knows."""
    more = f" and {len(unknown) - 5:,} more" if len(unknown) > 5 else ""
    have = ", ".join(there[:8]) + (f" and {len(there) - 8:,} more" if len(there) > 8 else "")
    return (
        f"resilience.placement={file} puts ranks on {', '.join(n[:80] for n in unknown[:5])}{more}, which the cluster "
        f"does not have; it has {have or 'none'}. Write the file with these names, or leave the setting out"
    )


def _file(named: str, kind: str, kept_in: Path | None) -> Path:
    if kept_in is None:
        return Path(named)
    kept = folder(kept_in) / _KEPT[kind]
    if not kept.exists():
        raise DataError(
            f"{kept} is gone, the copy of resilience.{kind}={named} that this job was started with; stop its agents "
            "and launch it anew"
        )
    return kept
