"""A Slurm of one's own: a real munged, slurmctld and a slurmd a machine, on machines of one kernel (machines.py).

Debian's packages slurm-wlm and munge. Nodes are called n1, n2, ... and have their own addresses and processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.machines import network as machines
from tests.chaos.machines.network import Machines, Site, wait

_NEEDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
_CONF = """ClusterName=test
SlurmctldHost=head({head})
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
ReturnToService=1
SlurmdTimeout=5
SlurmctldTimeout=10
InactiveLimit=0
MinJobAge=3600
KillWait=10
CompleteWait=0
MessageTimeout=5
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def impossible() -> str:
    """Return why Slurm cannot run here, or an empty string."""
    missing = [name for name in _NEEDS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm and munge)"
    return machines.impossible()


class SlurmSite(Site):
    """`with SlurmSite(folder, 3) as site: site.slurm("sbatch", "job.sh")`.

    Args:
        folder: for everything; short, since a socket lies in it.
        nodes: how many.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.names = [f"n{i + 1}" for i in range(nodes)]
        self.machines = Machines(folder / "m", ["head"] + self.names)
        # Nodes keep their things below the home directory and in a /dev/shm that is theirs, as on machines apart.
        local = {"HOME": str(folder / "home"), "TMPDIR": "/dev/shm", "OMP_NUM_THREADS": "1"}
        self.environment = os.environ | local | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def _start(self) -> None:
        for name in ("state", "spool", "home"):
            (self.folder / name).mkdir()
        present = self.machines
        each = (f"NodeName={n} NodeAddr={present[n].address} Port=17001 CPUs=2 State=UNKNOWN" for n in self.names)
        conf = _CONF.format(
            head=present["head"].address, folder=self.folder, nodes="\n".join(each), names=",".join(self.names)
        )
        (self.folder / "slurm.conf").write_text(conf)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.folder.chmod(0o755)  # munged wants everybody to reach its socket
        files = [f"--{name}={self.folder}/munge.{name}" for name in ("pid-file", "log-file", "seed-file")]
        munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.sock"] + files
        self._daemon("munged", munge)
        wait(lambda: (self.folder / "munge.sock").exists(), "munged")
        self.start_controller(clean=True)
        for name in self.names:
            self.start_slurmd(name)
        self.until_state(self.names, "idle")

    def _daemon(self, name: str, arguments: Sequence[str]) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            null = subprocess.DEVNULL
            self._daemons[name] = subprocess.Popen(
                list(machines.WITH_US) + list(arguments),
                stdin=null,
                stdout=out,
                stderr=out,
                env=self.environment,
                start_new_session=True,
            )

    def start_controller(self, clean: bool = False) -> None:
        """slurmctld; clean: without what it remembers."""
        self._daemon("slurmctld", self.machines["head"].inside(["slurmctld", "-D"] + (["-c"] if clean else [])))

    def start_slurmd(self, name: str) -> None:
        """A node's slurmd."""
        self._daemon(name, self.machines[name].inside(["slurmd", "-D", "-N", name]))

    def kill(self, name: str) -> None:
        """SIGKILL to slurmctld, or to the slurmd of a node; what it has started runs on."""
        where = self.machines["head" if name == "slurmctld" else name]
        file = self.folder / ("slurmctld.pid" if name == "slurmctld" else f"slurmd.{name}.pid")
        subprocess.run(where.inside(["kill", f"-{signal.SIGKILL}", file.read_text().strip()]), check=True)
        self._daemons.pop(name).wait()

    def power_off(self, name: str) -> None:
        """A node loses its power."""
        self.machines[name].power_off()
        self._daemons.pop(name).wait()

    def start_all(self) -> None:
        """Start what was killed, and switch on what is off."""
        for name in self.names:
            if not self.machines[name].on:
                self.machines[name].heal()
                self.machines[name].power_on()
        if "slurmctld" not in self._daemons:
            self.start_controller()
        for name in self.names:
            if name not in self._daemons:
                self.start_slurmd(name)

    def repair(self) -> None:
        """Start what was killed, end all jobs, and have every node idle again."""
        self.start_all()
        wait(self.states, "slurmctld")
        self.slurm("scancel", "--user=root")
        for name, state in self.states().items():
            if state.startswith(("down", "drain")):
                with contextlib.suppress(subprocess.CalledProcessError):  # it has come back by itself
                    self.slurm("scontrol", "update", f"nodename={name}", "state=resume")
        self.until_state(self.names, "idle")

    def slurm(self, *arguments: str, inside: str = "head", **more: str) -> str:
        """Return the output of a Slurm command. Raise CalledProcessError if it fails."""
        command = self.machines[inside].inside(arguments)
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment | more, check=True)
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        """Each node's state, as sinfo has it."""
        try:
            rows = self.slurm("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        except subprocess.CalledProcessError:  # the controller is not there yet
            return {}
        return {name: state.strip("*") for name, state in map(str.split, rows)}

    def until_state(self, names: Sequence[str], *expected: str, seconds: float = 60.0) -> None:
        """Wait until all these nodes are in one of the states."""

        def has_state() -> bool:
            current = self.states()
            return all(current.get(name) in expected for name in names)

        wait(has_state, f"{', '.join(names)} to be {' or '.join(expected)}", seconds)

    def close(self) -> None:
        """End all."""
        with contextlib.suppress(subprocess.CalledProcessError, OSError, subprocess.TimeoutExpired):
            command = self.machines["head"].inside(["scancel", "--user=root"])
            subprocess.run(command, capture_output=True, env=self.environment, timeout=5)
        self.machines.close()
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
