"""A Kubernetes of one's own: a real control plane and real kubelets with containers, on machines of one kernel.

etcd, kube-apiserver, kube-controller-manager and kube-scheduler run on the machine `head`, and nodes are called k1, k2,
...; pods have their own addresses, Services work by address, and there is no DNS. `scripts/kubernetes-build` builds the
programs once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascale.errors import TrainingError
from tests.chaos.image_layout import read_image_layout
from tests.chaos.kubernetes.node import (
    IMAGE,
    PAUSE,
    SERVICES,
    Image,
    KubernetesNode,
    SiteSettings,
    write_images,
)
from tests.chaos.machines import network as machines
from tests.chaos.machines.network import Machines, Site, wait

PORT = 16443
KUBECTL_SECONDS = 60.0  # limit for a command of kubectl
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
_NEEDS = ("containerd", "ctr", "runc", "openssl", "pkill", "nice")
_CONFIG = """apiVersion: v1
kind: Config
clusters: [{{name: test, cluster: {{server: "https://{address}:{port}", certificate-authority: {authority}}}}}]
users: [{{name: admin, user: {{token: {token}}}}}]
contexts: [{{name: test, context: {{cluster: test, user: admin}}}}]
current-context: test
"""


def programs() -> Path:
    """Return the folder of the programs that `scripts/kubernetes-build` builds."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("MEGASCALE_KUBERNETES") or cache / "megascale" / "kubernetes")


def impossible() -> str:
    """Return why Kubernetes cannot run here, or an empty string."""
    folder = programs()
    missing = [name for name in PROGRAMS + ("pause", "VERSION") if not (folder / name).exists()]
    if missing:
        return f"no {missing[0]} in {folder}: scripts/kubernetes-build"
    missing = [name for name in _NEEDS if shutil.which(name) is None]
    if not Path("/usr/lib/cni/bridge").exists():
        missing.append("containernetworking-plugins")
    if missing:
        return f"{', '.join(missing)} not installed (scripts/system-packages kubernetes)"
    return machines.impossible()


class KubernetesSite(Site):
    """`with KubernetesSite(folder, 3) as site: site.kubectl("get", "nodes")`.

    Args:
        folder: for everything.
        nodes: how many.
        gpus: that each says it has.

    Attributes:
        kubeconfig: of an administrator; the API is reached from the machine `head` and from nodes.
    """

    def __init__(self, folder: Path, nodes: int, gpus: int = 0) -> None:
        self.folder = folder
        self.programs = programs()
        self._gpus = gpus
        self._group = f"ms-{os.urandom(4).hex()}"
        self.names = [f"k{i + 1}" for i in range(nodes)]
        self.machines = Machines(folder / "m", ["head"] + self.names)
        self.kubeconfig = folder / "kubeconfig"
        self.environment = {k: v for k, v in os.environ.items() if "PROXY" not in k.upper()} | {"GOMAXPROCS": "2"}
        self.nodes: dict[str, KubernetesNode] = {}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        """Return the address of the machine with the control plane."""
        return self.machines["head"].address

    def _start(self) -> None:
        images = self._images()
        self._control_plane()
        inputs = SiteSettings(self.programs, self.kubeconfig, images, self.environment, self._group, self._gpus)
        for number, name in enumerate(self.names, 1):
            self.nodes[name] = KubernetesNode(
                self.machines[name], number, inputs, f"topology.megascale/switch=s{number % 2}"
            )
        self._routes()
        for node in self.nodes.values():
            node.boot()
        for node in self.nodes.values():
            node.join()
        _weigh_containers(len(self.names))
        self.until_ready(self.names)

    def _routes(self) -> None:
        """Everybody reaches the pods of each node, and the network of Services, by its address."""
        for local in self.machines:
            for node in self.nodes.values():
                if node.machine is not local:
                    local.ip("route", "add", node.pods, "via", node.machine.address)
            local.ip("route", "add", SERVICES, "dev", "eth0")

    def _images(self) -> Path:
        pause = Image(PAUSE, {"pause": (self.programs / "pause").read_bytes()}, entry=["/pause"])
        layout = read_image_layout()
        local = Image(
            IMAGE,
            layout.files,
            layout.folders,
            layout.links,
            user=str(layout.user),
            work_folder=layout.work_folder,
            environment=layout.environment,
        )
        write_images(self.folder / "images.tar", [pause, local])
        return self.folder / "images.tar"

    # the control plane ------------------------------------------------------------------------------------------------

    def _control_plane(self) -> None:
        certificates = self.folder / "certificates"
        certificates.mkdir()
        subprocess.run(["openssl", "genrsa", "-out", f"{certificates}/sa.key", "2048"], check=True, capture_output=True)
        token = os.urandom(16).hex()
        (self.folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
        authority = certificates / "apiserver.crt"
        text = _CONFIG.format(address=self.address, port=PORT, authority=authority, token=token)
        self.kubeconfig.write_text(text)
        self.kubeconfig.chmod(0o600)
        clients, peers = "http://127.0.0.1:12379", "http://127.0.0.1:12380"
        arguments = [f"--data-dir={self.folder}/etcd", f"--listen-client-urls={clients}", f"--listen-peer-urls={peers}"]
        # Its data is deleted with this folder, so it need not wait for the shared disk.
        self._daemon("etcd", arguments + [f"--advertise-client-urls={clients}", "--unsafe-no-fsync", "--logger=zap"])
        self.start_api()
        key = f"--service-account-private-key-file={certificates}/sa.key"
        arguments = [f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--bind-address=127.0.0.1", "--port=0"]
        local = [key, f"--root-ca-file={authority}", "--use-service-account-credentials=false"]
        local += ["--node-monitor-period=1s", "--node-monitor-grace-period=8s", "--node-eviction-rate=100"]
        local += [
            "--secondary-node-eviction-rate=100",
            "--large-cluster-size-threshold=0",
            "--unhealthy-zone-threshold=1",
        ]
        self._daemon("kube-controller-manager", arguments + local)
        self._daemon("kube-scheduler", arguments)

    def start_api(self) -> None:
        """kube-apiserver, for the first time or again; back when it is ready."""
        certificates = self.folder / "certificates"
        key = f"{certificates}/sa.key"
        arguments = ["--etcd-servers=http://127.0.0.1:12379", f"--secure-port={PORT}", f"--bind-address={self.address}"]
        arguments += [f"--advertise-address={self.address}", f"--cert-dir={certificates}", "--allow-privileged"]
        arguments += [f"--token-auth-file={self.folder}/tokens.csv", "--authorization-mode=RBAC"]
        arguments += [f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"]
        arguments += [
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={SERVICES}",
        ]
        arguments += ["--kubelet-preferred-address-types=InternalIP", "--profiling=false"]
        self._daemon("kube-apiserver", arguments)
        wait(lambda: self._answers("--raw=/readyz") == "ok", "kube-apiserver", 90.0)

    def stop_api(self) -> None:
        """SIGKILL to kube-apiserver."""
        self._kill("kube-apiserver")

    def _kill(self, name: str) -> None:
        head = self.machines["head"]
        subprocess.run(head.inside(["pkill", f"-{signal.SIGKILL}", "-f", f"^{self.programs}/{name} "]), check=True)
        self._daemons.pop(name).wait()

    def _daemon(self, name: str, arguments: Sequence[str]) -> None:
        with open(self.folder / f"{name}.log", "ab") as out:
            command = ["nice", "-n", "5", f"{self.programs}/{name}"] + list(arguments)
            self._daemons[name] = subprocess.Popen(
                list(machines.WITH_US) + self.machines["head"].inside(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.environment,
                start_new_session=True,
            )

    # what is asked of it ----------------------------------------------------------------------------------------------

    def inside(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs `words` on the machine with the control plane, from which the API is reached."""
        return self.machines["head"].inside(arguments)

    def kubectl(self, *arguments: str, output: str | None = None, seconds: float = KUBECTL_SECONDS) -> str:
        """Return kubectl's output, for `output` on stdin. Raise TrainingError with its message if it fails."""
        command = self.inside([f"{self.programs}/kubectl", f"--kubeconfig={self.kubeconfig}"] + list(arguments))
        done = subprocess.run(
            command, input=output, capture_output=True, text=True, env=self.environment, timeout=seconds
        )
        if done.returncode:
            raise TrainingError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def _answers(self, *arguments: str) -> str:
        try:
            return self.kubectl("get", *arguments, seconds=10.0).strip()
        except (TrainingError, subprocess.TimeoutExpired):
            return ""

    def get(self, *arguments: str) -> list[dict[str, Any]]:
        """Objects as JSON; none while the API does not answer."""
        text = self._answers(*arguments, "-o", "json")
        result = json.loads(text) if text else {"items": []}
        return list(result["items"]) if "items" in result else [result]

    def states(self) -> dict[str, str]:
        """Each node's Ready: True, False or Unknown."""
        result = {}
        for node in self.get("nodes"):
            ready = [c["status"] for c in node["status"].get("conditions", ()) if c["type"] == "Ready"]
            result[node["metadata"]["name"]] = ready[0] if ready else "Unknown"
        return result

    def until_ready(self, names: Sequence[str], expected: Sequence[str] = ("True",), seconds: float = 120.0) -> None:
        """Wait until Ready of all these is one of `wanted`."""

        def is_ready() -> bool:
            current = self.states()
            if all(current.get(name) in expected for name in names):
                return True
            time.sleep(0.3)
            return False

        wait(is_ready, f"{', '.join(names)} to be Ready {' or '.join(expected)}", seconds)

    def repair(self) -> None:
        """The API answers, every node has power, network, a kubelet and healthy GPUs, and takes pods."""
        if "kube-apiserver" not in self._daemons:
            self.start_api()
        for node in self.nodes.values():
            if not node.on:
                node.power_on()
            node.machine.heal()
            node.break_gpus([])
            if not node.has_kubelet:
                node.start_kubelet()
        self.until_ready(self.names)
        self.kubectl("uncordon", *self.names)

    def close(self) -> None:
        """End all, and remove the kernel's groups of containers that were made."""
        for node in self.nodes.values():
            node.close()
        self.machines.close()
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
        _remove_groups(self._group)


def _weigh_containers(nodes: int) -> None:
    """Give containers the processor time of one process per node.

    The kernel divides the processors between control groups. The group of all containers would get as much as one
    other process of this machine, and 32 pods that import PyTorch would not be ready in ten minutes.
    """
    for file, weight in (("cpu/k8s.io/cpu.shares", 1024 * nodes), ("k8s.io/cpu.weight", 100 * nodes)):
        path = Path("/sys/fs/cgroup") / file
        root = path.parent.parent
        if (root / "cgroup.procs").exists():  # the root of this kernel's version of control groups
            path.parent.mkdir(exist_ok=True)
            path.write_text(str(weight))


def _remove_groups(name: str) -> None:
    """The kernel's groups of containers that have ended."""
    for top in Path("/sys/fs/cgroup").glob(f"*/{name}"):
        for group in sorted((p for p in top.rglob("*") if p.is_dir()), key=lambda p: -len(p.parts)):
            with contextlib.suppress(OSError):
                group.rmdir()
        with contextlib.suppress(OSError):
            top.rmdir()
