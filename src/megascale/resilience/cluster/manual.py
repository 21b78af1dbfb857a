"""`--cluster manual`: `megascale agent` of a person, systemd or a container; nodes come by themselves."""

from __future__ import annotations

import os

from megascale.config import Config
from megascale.core.ports import is_loopback
from megascale.resilience.cluster.base import Cluster, ClusterRequest, NodeInfo
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.cluster.remote import make_marker
from megascale.resilience.protocol.contact import driver_folder
from megascale.resilience.protocol.given import JobDescription


class ManualCluster(Cluster):
    """Nodes that the driver neither starts nor ends: it knows those that have come.

    Attributes:
        unseen: agents may run of which `nodes` knows nothing.
    """

    unseen = True

    def __init__(self, request: ClusterRequest) -> None:
        super().__init__(request)
        self._request = request
        if request.config.checkpoint.location is None:
            make_marker(request.run / "checkpoints")

    @classmethod
    def on_other_machines(cls, config: Config) -> tuple[int, str]:
        """A machine has `parallel.gpus_per_host` GPUs; the user sets the address to listen at."""
        gpus = 0 if config.train.device == "cpu" else config.parallel.gpus_per_host
        return gpus, ""

    def announce(self, job: JobDescription, token: bytes) -> None:
        host, port = job.driver
        everywhere = os.uname().nodename if host in ("0.0.0.0", "::") else host
        shown = self._request.config.resilience.advertise or everywhere
        only = " (only this machine reaches it; --resilience.listen=ADDRESS opens it)" if is_loopback(host) else ""
        secret = driver_folder(self._request.run) / "token"
        where = f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
        self._request.say("driver", f"agents join at {where}{only}; on each machine, with the secret from {secret}:")
        self._request.say("driver", f"  megascale agent {where} --job {job.name} --secret-file SECRET")

    def nodes(self) -> list[NodeInfo]:
        return []

    async def start_agent(self, name: str) -> bool:
        return False

    async def fence(self, name: str) -> bool:
        return False

    async def request(self) -> str | None:
        return None


CLUSTERS.register("manual", ManualCluster)
