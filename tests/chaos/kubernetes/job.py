"""A tiny job on a Kubernetes of one's own: its driver on the machine of the control plane, its agents in real pods."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.launched import WAIT, Launched
from megascale.errors import TrainingError
from tests.chaos.image_layout import find_mounts, find_source, read_image_layout
from tests.chaos.kubernetes.node import IMAGE
from tests.chaos.kubernetes.site import KUBECTL_SECONDS, KubernetesSite
from tests.chaos.kubernetes.witness import Witness
from tests.chaos.machines.network import wait

LABEL = "megascale.dev/job"
SLOT = "megascale.dev/slot"
ROLE = "megascale.dev/role"  # of a job's pods


class KubernetesJob(Launched):
    """`megascale launch --cluster kubernetes` of two ranks with a spare, in a namespace of its own.

    Args:
        site: where.
        file: settings (launched.py::make).
        name: of the run, and of the namespace.
        words: more settings.
        pace: least seconds of a step.

    Attributes:
        witness: sees each trainer until `close`.
        step_before: the last step before the fault.
        outside: whether the driver runs outside a pod.
    """

    outside = True

    def __init__(self, site: KubernetesSite, file: Path, name: str, arguments: Sequence[str], pace: float) -> None:
        self.site = site
        self.name = name
        self.folder = file.parent
        self.shared = file.parent / "shared" / name
        self.witness, self.step_before = Witness(name), 0
        self.shared.mkdir(parents=True)
        give_to_pods(self.shared)
        site.kubectl("create", "namespace", name)
        local = ["--resilience.cluster=kubernetes", f"--kubernetes.namespace={name}"]
        local += [f"--kubernetes.kubeconfig={site.kubeconfig}"] if self.outside else []
        local += [
            f"--kubernetes.{key}={v if isinstance(v, str) else json.dumps(v)}"
            for key, v in local_settings(file.parent).items()
        ]
        local += [f"--checkpoint.location={self.shared}", "--checkpoint.linger=60"]
        local += [f"--resilience.listen={site.address}"] if self.outside else []
        local.append("--resilience.test_spares=false")
        super().__init__(file, name, local + list(arguments), pace)
        self.witness.__enter__()

    def start(self) -> Any:
        """The driver, on the machine with the control plane."""
        self.command = self.site.inside(self.command[self.command.index(sys.executable) :])
        return super().start()

    def second(self) -> subprocess.Popen[bytes]:
        """Another driver of the same job, whose run folder is one of its own."""
        runs = self.folder / "others"
        arguments = [word for word in self.command if not word.startswith("--train.runs=")]
        with open(self.output.with_suffix(".second"), "ab") as out:
            return subprocess.Popen(
                arguments + [f"--train.runs={runs}"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def close(self) -> None:
        """End the driver if it is there, and all that the namespace holds."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.witness.__exit__()
        removed = ["--wait=false", "--ignore-not-found"]
        self.site.kubectl("delete", "pods", "--all", "-n", self.name, "--force", "--grace-period=0", *removed)
        self.site.kubectl("delete", "namespace", self.name, *removed)

    def kubectl(self, *arguments: str, seconds: float = KUBECTL_SECONDS) -> str:
        """Return kubectl's output in the job's namespace."""
        return self.site.kubectl("--namespace", self.name, *arguments, seconds=seconds)

    # what the cluster knows -------------------------------------------------------------------------------------------

    def pods(self) -> list[dict[str, Any]]:
        """Return the pods of the job's nodes, as the API has them."""
        return self.site.get("pods", "-n", self.name, "-l", f"{LABEL}={self.name},{ROLE}=agent")

    def holder(self, rank: int) -> str:
        """The name, in the job, of the node that holds a rank now."""
        node: str = next(e for e in reversed(self.events()) if e.kind == "attempt_started").nodes[rank]
        return node

    def pod(self, node: str) -> str:
        """The name of a node's pod. A node has the name of its machine, and behind it what tells pods there apart."""
        machine, _, slot = node.partition(".")
        for pod in self.pods():
            details, present = pod["metadata"], pod["spec"].get("nodeName")
            if (present, details["labels"].get(SLOT, "")) == (machine, slot) and "deletionTimestamp" not in details:
                return str(details["name"])
        raise TrainingError(f"no pod of node {node} is there")

    # what it does -----------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """The last step that rank 0 has told of."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0)

    def until_step(self, step: int, seconds: float = WAIT) -> None:
        """Wait for a step; TrainingError if it does not come."""
        wait(lambda: self.step() >= step, f"step {step} of {self.name}", seconds)

    def until_joined(self, count: int) -> None:
        """Wait until so many agents have come, spares too."""
        wait(lambda: len(self.joined()) >= count, f"{count} nodes of {self.name}", WAIT)

    def joined(self, start: float = 0.0) -> list[str]:
        """Nodes whose agents have come since then, seconds since 1970."""
        return sorted({n for e in self.events() if e.kind == "node_joined" and e.time > start for n in e.nodes})

    def driver_output(self) -> str:
        """Return the output of the driver."""
        return self.output.read_text(errors="replace")

    def attempts(self) -> int:
        """Return the number of starts of the trainers."""
        return sum(e.kind == "attempt_started" for e in self.events())


class DriverPodJob(KubernetesJob):
    """The same with the driver in a pod too: as `launch --dry-run --form driver` prints it, for `kubectl apply`."""

    outside = False

    _requested_at = 0.0  # when the server was asked last, monotonic

    def start(self) -> Any:
        """Print the manifests and have the cluster make them; nothing of the job is a child of this process."""
        arguments = self.command[self.command.index(sys.executable) :]
        done = subprocess.run(arguments + ["--dry-run", "--form", "driver"], capture_output=True, text=True, check=True)
        self.output.with_suffix(".yaml").write_text(done.stdout)
        self.run.parent.chmod(0o777)  # The driver's pod makes journals and locks next to the run folders.
        give_to_pods(self.run)
        self.site.kubectl("apply", "--namespace", self.name, "-f", "-", output=done.stdout)
        self.process = subprocess.Popen(["sleep", "0"])  # there is none here
        return self.process

    def over(self) -> bool:
        """Return whether the driver's Job has ended, as Launched.over. The server is asked now and then."""
        if time.monotonic() - self._requested_at <= 2.0:
            return False
        self._requested_at = time.monotonic()
        return self.state() != ""

    def state(self) -> str:
        """Complete or Failed once the driver's Job is that, else ""."""
        jobs = self.site.get("jobs", "-n", self.name)
        states = [c["type"] for job in jobs for c in job["status"].get("conditions", ()) if c["status"] == "True"]
        return states[0] if states else ""

    def end(self, grace_period: float = WAIT) -> int:
        """0 if the driver's Job is complete, 1 if it has failed, -1 if neither."""
        deadline = time.monotonic() + grace_period
        while not (state := self.state()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return {"Complete": 0, "Failed": 1}.get(state, -1)

    def driver_output(self) -> str:
        """Return the output of the newest driver."""
        try:
            return self.kubectl("logs", self.driver()["metadata"]["name"])
        except TrainingError as error:
            return str(error)

    def driver(self) -> dict[str, Any]:
        """The newest pod of the driver."""
        result = self.site.get("pods", "-n", self.name, "-l", f"{ROLE}=driver")
        if not result:
            raise TrainingError("no pod of the driver is there")
        return max(result, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


def local_settings(folder: Path) -> dict[str, str | list[str]]:
    """Settings of [kubernetes] by which pods of the image's layout run what is installed here.

    Args:
        folder: the job's, which pods see as if on shared storage.
    """
    mounted = [f"host:{each}:{each}:ro" for each in find_mounts()] + [f"host:{folder}:{folder}"]
    environment = [f"PYTHONPATH={find_source()}", "OMP_NUM_THREADS=1"]
    return {"image": IMAGE, "mounts": mounted, "environment": environment}


def give_to_pods(folder: Path) -> None:
    """Make the image's user the owner of a folder with all that it has, as fsGroup does with a volume."""
    user = read_image_layout().user
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, user, user, follow_symlinks=False)
