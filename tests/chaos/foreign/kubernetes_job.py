"""Another trainer's job in a real Kubernetes: the driver on the machine of the control plane, the agents in pods."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chaos.foreign.job import FOLDER, ForeignJob
from tests.chaos.kubernetes.job import give_to_pods, local_settings
from tests.chaos.kubernetes.site import KubernetesSite


class KubernetesForeignJob(ForeignJob):
    """A job of one rank per pod with a spare, in a namespace of its own.

    Args:
        site: a running Kubernetes.
        folder, trainer, fault, rank, steps: as for ForeignJob. Pods see the folder at the same path, as on shared
            storage.
    """

    def __init__(self, site: KubernetesSite, folder: Path, trainer: str, fault: str, rank: int, steps: int) -> None:
        self._site = site
        settings = local_settings(folder)
        settings["mounts"] = [*settings["mounts"], f"host:{FOLDER}:{FOLDER}:ro"]
        options = ["--train.device=cpu", "--per-node=1", "--spares=1", "--cluster=kubernetes"]
        options += [f"--kubernetes.kubeconfig={site.kubeconfig}", f"--resilience.listen={site.address}"]
        options += [f"--kubernetes.{key}={json.dumps(value)}" for key, value in settings.items()]
        options += [f"--train.runs={folder / 'runs'}", f"--foreign.folder={folder}"]
        super().__init__(folder, trainer, fault, rank, steps, options=options)

    def start(self) -> None:
        """Make the namespace and start the driver."""
        give_to_pods(self.folder)
        self._site.kubectl("create", "namespace", self.name)
        position = self.command.index("--")
        self.command.insert(position, f"--kubernetes.namespace={self.name}")
        self.command = self._site.inside(self.command)
        super().start()

    def lose_node(self, rank: int) -> str:
        """Switch off the machine of a rank and return its name."""
        node = str(self.events("attempt_started")[-1].nodes[rank])
        self._site.nodes[node].power_off()
        return node

    def close(self) -> None:
        """End what still runs, remove the namespace, and switch machines on again."""
        super().close()
        options = ["--wait=false", "--ignore-not-found"]
        self._site.kubectl("delete", "pods", "--all", "-n", self.name, "--force", "--grace-period=0", *options)
        self._site.kubectl("delete", "namespace", self.name, *options)
        self._site.repair()
