"""`--cluster manual`: a person, systemd or a container starts the nodes (`megascale agent`), and they join the job."""

from __future__ import annotations

import os

from megascale.config import Config
from megascale.core.addresses import is_loopback
from megascale.resilience.cluster.base import Cluster, ClusterRequest, NodeInfo, count_configured_gpus, format_address
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.cluster.remote import make_marker
from megascale.resilience.protocol.contact import driver_folder
from megascale.resilience.protocol.job_description import JobDescription


class ManualCluster(Cluster):
    """A cluster whose nodes the driver neither starts nor ends, and learns of when they join."""

    has_unlisted_agents = True

    def __init__(self, request: ClusterRequest) -> None:
        super().__init__(request)
        self._advertised = request.config.resilience.advertise
        if request.config.checkpoint.location is None:
            make_marker(request.run / "checkpoints")

    @classmethod
    def describe_remote_machines(cls, config: Config) -> tuple[int, str]:
        """Return the configured GPUs per machine and no address, since the user sets the address to listen at."""
        return count_configured_gpus(config), ""

    def announce(self, job: JobDescription, token: bytes) -> None:
        listen, port = job.driver
        listens_everywhere = listen in ("0.0.0.0", "::")
        host = os.uname().nodename if listens_everywhere else listen
        address = format_address(self._advertised or host, port)
        note = ""
        if is_loopback(listen):
            note = " (reachable from this machine only; --resilience.listen=ADDRESS opens it)"
        secret = driver_folder(self.run) / "token"
        self._report("driver", f"agents join at {address}{note}; run on each machine with the secret of {secret}:")
        self._report("driver", f"  megascale agent {address} --job {job.name} --secret-file SECRET")

    def nodes(self) -> list[NodeInfo]:
        return []

    async def start_agent(self, name: str) -> bool:
        return False

    async def fence(self, name: str) -> bool:
        return False

    async def request(self) -> str | None:
        return None


CLUSTERS.register("manual", ManualCluster)
