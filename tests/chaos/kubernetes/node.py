"""A node of a Kubernetes of one's own: a real kubelet, containerd and kube-proxy on a machine of one kernel.

The folders that these programs have by constants lie in the machine's own: what a container of one node does is seen on
no other. Images come from archives that are made here, since there is no registry.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.machines import network as machines
from tests.chaos.machines.network import Machine, wait

PODS = "10.244"  # the network of pods: node I has PODS.I.0/24
SERVICES = "10.96.0.0/16"
PAUSE, IMAGE = "local/pause:1", "docker.io/local/megascale:1"
# Of programs that know no other place for them; what each node has there lies in its own folder.
_OWN_ARGUMENTS: tuple[str, ...] = (
    "/var/lib/kubelet",
    "/var/lib/containerd",
    "/var/lib/cni",
    "/var/log/pods",
    "/var/log/containers",
)
_OWN_ARGUMENTS += ("/etc/cni/net.d",)
_RUN = "/run/containerd"
SOCKET = f"{_RUN}/containerd.sock"
_CONTAINERD = f"""version = 2
root = "/var/lib/containerd"
state = "{_RUN}"
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
"""
_KUBELET = """apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {address}
port: 10250
readOnlyPort: 0
healthzPort: 10248
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
authentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}
authorization: {{mode: AlwaysAllow}}
nodeStatusUpdateFrequency: 1s
nodeLeaseDurationSeconds: 4
syncFrequency: 5s
imageGCHighThresholdPercent: 100
evictionHard: {{memory.available: "100Mi", nodefs.available: "1%", nodefs.inodesFree: "1%", imagefs.available: "1%"}}
clusterDNS: []
resolvConf: /dev/null
volumePluginDir: {folder}/plugins
cgroupRoot: /{group}
"""
_PROXY = """apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
bindAddress: {address}
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
hostnameOverride: {name}
clientConnection: {{kubeconfig: {kubeconfig}}}
conntrack: {{maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}
"""


@dataclass(frozen=True)
class SiteSettings:
    """Settings that all nodes of a site share.

    Attributes:
        programs: folder of kubelet and kube-proxy.
        kubeconfig: of the API, with an administrator's rights.
        images: archive that each node loads.
        environment: of the programs.
        group: control group of its containers.
        gpus: that each node says it has.
    """

    programs: Path
    kubeconfig: Path
    images: Path
    environment: dict[str, str]
    group: str
    gpus: int = 0


class KubernetesNode:
    """Args:
    machine: that it is, switched on.
    number: of its pods' network.
    given: what it shares with the others.
    labels: of the node, besides its own.
    """

    def __init__(self, machine: Machine, number: int, inputs: SiteSettings, labels: str = "") -> None:
        self.machine = machine
        self.name = machine.name
        self._given = inputs
        self.number, self._labels = number, labels
        self.folder = machine.folder / "node"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def pods(self) -> str:
        """The network of its pods."""
        return f"{PODS}.{self.number}.0/24"

    def start(self) -> None:
        """Start all that a node runs; the machine is on."""
        self.boot()
        self.join()

    def boot(self) -> None:
        """Start containerd, and do not wait for it."""
        self._prepare()
        self._daemon("containerd", ["containerd", "-c", f"{self.folder}/containerd.toml"])

    def join(self) -> None:
        """Load the images, and start kubelet and kube-proxy."""
        ctr = ["ctr", "-a", SOCKET]
        present = self.machine.inside(ctr + ["version"])
        wait(lambda: subprocess.run(present, capture_output=True).returncode == 0, f"containerd of {self.name}", 60.0)
        self.run(*ctr, "-n", "k8s.io", "images", "import", str(self._given.images))
        self.start_kubelet()
        proxy = self._given.programs / "kube-proxy"
        self._daemon("kube-proxy", [str(proxy), f"--config={self.folder}/proxy.yaml", "--v=0"])
        if self._given.gpus:
            arguments = ["-m", "tests.chaos.kubernetes.gpus", str(self._bad), str(self._given.gpus)]
            self._daemon("gpus", [sys.executable] + arguments)

    @property
    def _bad(self) -> Path:
        return self.folder / "bad-gpus"

    def break_gpus(self, numbers: Sequence[int]) -> None:
        """Exactly these are unhealthy from now on."""
        temporary = self._bad.with_suffix(".tmp")
        temporary.write_text(" ".join(map(str, numbers)))
        os.replace(temporary, self._bad)

    def _prepare(self) -> None:
        """Files, folders of its own in the machine's view of the file system, and rules of its network."""
        address, folder = self.machine.address, self.folder
        for location in _OWN_ARGUMENTS:
            (folder / location.replace("/", "_")).mkdir(parents=True, exist_ok=True)
            Path(location).mkdir(parents=True, exist_ok=True)
        Path(_RUN).mkdir(parents=True, exist_ok=True)
        (folder / "containerd.toml").write_text(_CONTAINERD)
        (folder / "kubelet.yaml").write_text(_KUBELET.format(address=address, folder=folder, group=self._given.group))
        proxy = _PROXY.format(address=address, name=self.name, kubeconfig=self._given.kubeconfig)
        (folder / "proxy.yaml").write_text(proxy)
        (folder / "_etc_cni_net.d" / "10-pods.conflist").write_text(json.dumps(_network(self.pods)))
        lines = ["set -e", "mount --make-rprivate /"]
        lines += [f"mount --bind {folder / position.replace('/', '_')} {position}" for position in _OWN_ARGUMENTS]
        # Names of pods' networks would stay in the host's folder.
        lines += [
            f"mount -t tmpfs tmpfs {_RUN}",
            "mount -t tmpfs tmpfs /run/netns",
            "mount --make-rshared /",
            "echo 1 > /proc/sys/net/ipv4/ip_forward",
        ]
        self.run("bash", "-c", "\n".join(lines))

    def start_kubelet(self) -> None:
        """kubelet; what it finds running it takes over."""
        arguments = [str(self._given.programs / "kubelet"), f"--kubeconfig={self._given.kubeconfig}"]
        arguments += [f"--config={self.folder}/kubelet.yaml", f"--hostname-override={self.name}", "--v=1"]
        arguments += [
            f"--node-ip={self.machine.address}",
            "--root-dir=/var/lib/kubelet",
            f"--cert-dir={self.folder}/pki",
        ]
        arguments += ["--container-runtime=remote", f"--container-runtime-endpoint=unix://{SOCKET}"]
        arguments += [f"--image-service-endpoint=unix://{SOCKET}"]
        arguments += [f"--node-labels={self._labels}"] if self._labels else []
        self._daemon("kubelet", arguments)

    def _daemon(self, name: str, arguments: Sequence[str]) -> None:
        with open(self.folder / f"{name}.log", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                list(machines.WITH_US) + self.machine.inside(["nice", "-n", "5"] + list(arguments)),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self._given.environment,
                start_new_session=True,
            )

    def run(self, *arguments: str) -> str:
        """Return a command's output on the node. Raise TrainingError if it fails."""
        from megascale.errors import TrainingError

        done = subprocess.run(self.machine.inside(arguments), capture_output=True, text=True)
        if done.returncode:
            raise TrainingError(f"{self.name}: {' '.join(arguments)}: {done.stderr.strip()[-1000:]}")
        return done.stdout

    def processes(self, *parts: str) -> list[str]:
        """Command lines, in containers too, that have one of these parts in them."""
        lines = self.run("ps", "-eo", "args").splitlines()
        return [line for line in lines if any(part in line for part in parts)]

    # what happens to it -----------------------------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Return whether the machine has power."""
        return self.machine.init > 0 and Path(f"/proc/{self.machine.init}").exists()

    @property
    def has_kubelet(self) -> bool:
        """Return whether a kubelet was started and not killed."""
        return "kubelet" in self._daemons

    def power_off(self) -> None:
        """Pull the plug."""
        self.machine.power_off()
        self._reap()

    def power_on(self) -> None:
        """Boot: containers are gone, and what their node had on disk is there."""
        self.machine.heal()
        self.machine.power_on()
        self.start()

    def kill_kubelet(self) -> None:
        """SIGKILL to the kubelet; containers run on."""
        daemon = self._daemons.pop("kubelet")
        self.run("pkill", f"-{signal.SIGKILL}", "-f", f"hostname-override={self.name}")
        daemon.wait()

    def close(self) -> None:
        """End what runs on it."""
        with contextlib.suppress(Exception):
            self.machine.power_off()
        self._reap()

    def _reap(self) -> None:
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        self._daemons.clear()


def _network(pods: str) -> dict[str, object]:
    subnet = {"type": "host-local", "ranges": [[{"subnet": pods}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "ipam": subnet}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, {"type": "loopback"}]}


@dataclass(frozen=True)
class Image:
    """An image of one layer.

    Attributes:
        name: with its tag.
        files: contents by path, executable; folders: paths, those that begin with tmp for everybody; links: targets by
            path.
        entry: what its containers run unless told otherwise.
        user: user id of its processes, "" for root.
        work_folder: folder in which its processes start.
        environment: variables of its processes.
    """

    name: str
    files: dict[str, bytes]
    folders: Sequence[str] = ()
    links: dict[str, str] = field(default_factory=dict)
    entry: Sequence[str] = ()
    user: str = ""
    work_folder: str = "/"
    environment: dict[str, str] = field(default_factory=dict)


def write_images(file: Path, images: Sequence[Image]) -> None:
    """An archive as `docker save` writes it."""
    manifest: list[dict[str, object]] = []
    with tarfile.open(file, "w") as tar:
        for image in images:
            layer = _layer(image)
            digest = hashlib.sha256(layer).hexdigest()
            environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/sbin"} | image.environment
            settings: dict[str, object] = {
                "Entrypoint": list(image.entry) or None,
                "Env": [f"{name}={value}" for name, value in environment.items()],
                "User": image.user,
                "WorkingDir": image.work_folder,
            }
            details = {"architecture": "amd64", "os": "linux", "config": settings, "history": [{"created_by": "bench"}]}
            details["rootfs"] = {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
            config = json.dumps(details).encode()
            name = f"{hashlib.sha256(config).hexdigest()}.json"
            _add(tar, name, config)
            _add(tar, f"{digest}/layer.tar", layer)
            manifest.append({"Config": name, "RepoTags": [image.name], "Layers": [f"{digest}/layer.tar"]})
        _add(tar, "manifest.json", json.dumps(manifest).encode())


def _layer(image: Image) -> bytes:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path in image.folders:
            _add(tar, path, b"", tarfile.DIRTYPE, 0o1777 if path.startswith("tmp") else 0o755)
        for path, target in image.links.items():
            _add(tar, path, b"", tarfile.SYMTYPE, 0o777, target)
        for path, data in image.files.items():
            _add(tar, path, data)
    return layer.getvalue()


def _add(
    tar: tarfile.TarFile, path: str, data: bytes, kind: bytes = tarfile.REGTYPE, mode: int = 0o755, to: str = ""
) -> None:
    member = tarfile.TarInfo(path)
    member.size = len(data)
    member.type = kind
    member.mode = mode
    member.linkname = to
    tar.addfile(member, io.BytesIO(data))
