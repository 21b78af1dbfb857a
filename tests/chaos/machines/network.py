"""Machines of one kernel: network namespaces with processes, memory file system, name, address and sshd of their own.

A switch in a namespace of its own joins them, so that nothing is added to the host's network and several such
networks do not meet. The disks of all machines are a shared folder. Needs root.

Killing a machine's first process is a power cut: the kernel ends all others, and what lay in memory is gone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

from megascale.errors import TrainingError

SSHD = "/usr/sbin/sshd"
_NET = "10.77.0"
_NEEDS = ("ip", "nsenter", "unshare", "setpriv", "iptables", "tc", "ssh", "ssh-keygen")
WITH_US = ("setpriv", "--pdeathsig", "KILL")  # A machine ends with the process that simulates it.
T = TypeVar("T")


def impossible() -> str:
    """Why this machine cannot play several, "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in _NEEDS if shutil.which(name) is None]
    missing += [SSHD] if not Path(SSHD).exists() else []
    if missing:
        return f"{', '.join(missing)} not installed (scripts/system-packages)"
    name = f"ms-probe-{secrets.token_hex(3)}"
    built = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"no network namespaces here: {built.stderr.strip()}" if built.returncode else ""


class Machine:
    """One of them; `Machines` makes it.

    Attributes:
        name: its host name; address: on the network; folder: its disk.
        init: process id of its first process, as the host counts.
    """

    def __init__(self, name: str, number: int, network: str, folder: Path) -> None:
        self.name = name
        self.address = f"{_NET}.{number}"
        self.folder = folder
        self._namespace = f"{network}-{name}"
        self._switch, self._port = f"{network}-sw", f"p{number}"
        self._shell: subprocess.Popen[bytes] | None = None
        self.init = 0
        folder.mkdir()

    def plug_in(self) -> None:
        """Its network card, and the cable to the switch."""
        card = ["type", "veth", "peer", "name", "eth0", "netns", self._namespace]
        _run("ip", "netns", "add", self._namespace)
        _run("ip", "-n", self._switch, "link", "add", self._port, *card)
        _run("ip", "-n", self._switch, "link", "set", self._port, "master", "br0", "up")
        _run("ip", "-n", self._namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _run("ip", "-n", self._namespace, "link", "set", link, "up")

    def power_on(self) -> None:
        """Start its first process, and sshd."""
        config, keys = self.folder / "sshd_config", self.folder.parent
        config.write_text(
            f"ListenAddress {self.address}\nHostKey {keys}/host_key\nPidFile none\nUsePAM no\nStrictModes no\n"
            f"AuthorizedKeysFile {keys}/user_key.pub\nPermitRootLogin yes\n"
            "SetEnv TMPDIR=/dev/shm OMP_NUM_THREADS=1\n"
        )
        up = self.folder / "up"
        script = f"hostname {self.name}; mount -t tmpfs tmpfs /dev/shm; {SSHD} -D -e -f {config} & echo up > {up}; "
        script += "while :; do wait; sleep 1; done"
        up.unlink(missing_ok=True)
        local = ["--mount", "--uts", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        with open(self.folder / "console", "ab") as out:
            self._shell = subprocess.Popen(
                list(WITH_US)
                + ["nsenter", f"--net=/run/netns/{self._namespace}", "unshare"]
                + local
                + ["bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.init = wait(lambda: self._first_process() if up.exists() else 0, f"{self.name} to start")

    def _first_process(self) -> int:
        assert self._shell is not None
        try:
            return int(Path(f"/proc/{self._shell.pid}/task/{self._shell.pid}/children").read_text().split()[0])
        except (OSError, IndexError):
            return 0

    def power_off(self) -> None:
        """Cut the power at once, as when a plug is pulled. No process can say good-bye."""
        if self._shell is None:
            return
        # First the network: the kernel closes a killed process's connections, which a machine without power does not.
        self.cut()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init or self._shell.pid, signal.SIGKILL)
        self._shell.wait()
        self._shell, self.init = None, 0

    @property
    def on(self) -> bool:
        """Return whether the machine has power."""
        return self._shell is not None

    def inside(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs `words` on it."""
        return ["nsenter", f"--target={self.init}", "--mount", "--uts", "--net", "--pid", "--ipc", "--"] + list(
            arguments
        )

    # its network ------------------------------------------------------------------------------------------------------

    def cut(self, incoming: bool = True, outgoing: bool = True) -> None:
        """Lose every packet of one direction or both, those that it would pass on to containers too."""
        for chain, device, expected in (("INPUT", "-i", incoming), ("OUTPUT", "-o", outgoing)):
            for each in (chain, "FORWARD") if expected else ():
                self._iptables("-I", each, device, "eth0", "-j", "DROP")

    def heal(self) -> None:
        """No loss, no limit; other rules stay."""
        for chain, device in (("INPUT", "-i"), ("FORWARD", "-i"), ("OUTPUT", "-o"), ("FORWARD", "-o")):
            drop = ["-D", chain, device, "eth0", "-j", "DROP"]
            while subprocess.run(self._enter() + ["iptables", "-w"] + drop, capture_output=True).returncode == 0:
                pass
        for space, device in ((self._namespace, "eth0"), (self._switch, self._port)):
            subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", device, "root"], capture_output=True)

    def limit(self, megabits: float) -> None:
        """Bound what goes each way, in Mbit/s."""
        bucket = ["rate", f"{megabits}mbit", "burst", "16kb", "latency", "200ms"]
        for space, device in ((self._namespace, "eth0"), (self._switch, self._port)):
            _run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)

    def _iptables(self, *arguments: str) -> None:
        _run(*self._enter(), "iptables", "-w", *arguments)

    def _enter(self) -> list[str]:
        """A command in its network, also when it is off."""
        return ["nsenter", f"--net=/run/netns/{self._namespace}"]

    def ip(self, *arguments: str) -> None:
        """`ip` on it; TrainingError if that fails."""
        _run(*self._enter(), "ip", *arguments)


class Machines:
    """A network of machines: `with Machines(folder, ["head", "n0", "n1"]) as machines: machines["n0"].power_off()`.

    Args:
        folder: for their disks and keys; made.
        names: of the machines.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self._network = f"ms{secrets.token_hex(3)}"
        folder.mkdir(parents=True, exist_ok=True)
        self._machines = {n: Machine(n, i + 1, self._network, folder / n) for i, n in enumerate(names)}

    def __enter__(self) -> Self:
        switch = f"{self._network}-sw"
        try:
            Path("/run/sshd").mkdir(exist_ok=True)  # where sshd shuts itself in
            for key in ("host_key", "user_key"):
                _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
            public = (self.folder / "host_key.pub").read_text()
            (self.folder / "known_hosts").write_text("".join(f"{m.address} {public}" for m in self))
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "br0", "up")
            for machine in self:
                machine.plug_in()
                machine.power_on()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Switch all off and remove the network."""
        for machine in self:
            with contextlib.suppress(TrainingError):
                machine.power_off()
        for name in tuple(f"{self._network}-{m.name}" for m in self) + (f"{self._network}-sw",):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines.values())

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]

    @property
    def ssh(self) -> str:
        """The ssh command that gets into each."""
        keys = f"-i {self.folder}/user_key -o UserKnownHostsFile={self.folder}/known_hosts"
        return f"ssh -F none {keys} -o IdentitiesOnly=yes"

    def hosts_file(self, names: Sequence[str]) -> Path:
        """A list of them for `--hosts`."""
        file = self.folder / "hosts"
        lines = (f"{self[n].address} name={n} folder={self[n].folder} python={sys.executable}\n" for n in names)
        file.write_text("".join(lines))
        return file


def wait(find: Callable[[], T], subject: str, seconds: float = 20.0) -> T:
    """Return the first result of `find`. Raise TrainingError if there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        result = find()
        if result:
            return result
        time.sleep(0.02)
    raise TrainingError(f"waited {seconds:g} s for {subject}")


def _run(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        raise TrainingError(f"{' '.join(arguments)}: {done.stderr.strip() or done.returncode}")


class Site:
    """A cluster manager on machines: a context in which it runs. Subclasses have `_start` and `close`."""

    machines: Machines

    def __enter__(self) -> Self:
        self.machines.__enter__()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End all of it, the machines too."""
        raise NotImplementedError
