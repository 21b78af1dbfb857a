"""Sessions on several machines as docs/machines.md shows them: torchrun on two, and a list of hosts that loses one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.launched import WAIT, make
from tests.chaos.machines.network import Machine, Machines, wait

_SETTINGS = (("hidden = 32", "hidden = 64"), ("interval = 50", "interval = 100"), ("linger = 20", "linger = 60"))
# torchrun's job has no services that outlive it; the run folder is what both machines see.
_PLAIN = (("background = true", "background = false"), ("memory_interval = 1\n", ""), ("replicas = true\n", ""))
_TRAIN = (
    "torchrun --nnodes 2 --nproc-per-node 1 --node-rank {rank} --master-addr {first} --master-port 29500 "
    "-m megascale train job.toml --train.name=two --train.steps=300"
)
_LAUNCH = (
    "megascale launch job.toml --cluster ssh --hosts hosts --nodes 2 --spares 1 --train.name=demo --train.steps=400 "
    "--checkpoint.location=shared --resilience.ssh='ssh -F cluster.config'"
)


class _Terminals:
    """Types commands on machines, in one folder that all see, and says them with what they print."""

    def __init__(self, folder: Path, log: Callable[[str], None]) -> None:
        self.folder, self._log = folder, log
        local = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TMPDIR": "/dev/shm"}
        self._environment = os.environ | local | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}

    def start(self, on: Machine, line: str, out: str) -> subprocess.Popen[bytes]:
        """A command in the background, its output in a file."""
        self._log(f"{on.name}$ {line} > {out} &")
        with open(self.folder / out, "ab") as output:
            arguments = on.inside(["bash", "-c", f"cd {self.folder} && exec {line}"])
            return subprocess.Popen(
                arguments, stdout=output, stderr=output, env=self._environment, start_new_session=True
            )

    def typed(self, on: Machine, line: str) -> str:
        """A command, and what it printed."""
        arguments = on.inside(["bash", "-c", f"cd {self.folder} && {line}"])
        done = subprocess.run(arguments, capture_output=True, text=True, env=self._environment)
        self._log(f"{on.name}$ {line}")
        output = (done.stdout + done.stderr).replace(f"{self.folder}/", "")
        for each in output.splitlines():
            self._log(each.rstrip())
        return output

    def wait_for_event(self, run: str, subject: str, times: int = 1) -> None:
        """Wait for an event."""
        file = self.folder / "runs" / run / "events.jsonl"
        wait(lambda: file.exists() and file.read_text().count(f'"event": "{subject}"') >= times, subject, 3 * WAIT)

    def until_text(self, file: str, text: str) -> None:
        """Wait for something in a file."""
        wait(lambda: text in (self.folder / file).read_text(errors="replace"), text, 3 * WAIT)


def torchrun_session(folder: Path, log: Callable[[str], None]) -> bool:
    """Two machines with torchrun: a rank is killed, both end, the same commands go on. Whether it came to its end.

    Args:
        folder: to work in; new.
    """
    terminals = _prepare(folder, log, _SETTINGS + _PLAIN)
    with Machines(folder / "machines", ["n0", "n1"]) as machines:
        n0, n1 = machines["n0"], machines["n1"]

        def start_pair() -> list[subprocess.Popen[bytes]]:
            lines = [_TRAIN.format(rank=rank, first=n0.address) for rank in range(2)]
            return [terminals.start(m, line, f"{m.name}.out") for m, line in zip((n0, n1), lines, strict=True)]

        started = start_pair()
        terminals.until_text("n0.out", "step 150/")
        terminals.typed(n1, "pkill -KILL -f -- '-u -m megascale train'")
        for process in started:
            process.wait(WAIT)
        terminals.typed(n0, "grep -o 'error: rank 0 lost contact with another rank in step [0-9]*' n0.out")
        ends = " and ".join(str(process.returncode) for process in started)
        log(f"(both commands have ended, with exit codes {ends})")
        started = start_pair()
        codes = [process.wait(WAIT) for process in started]
        terminals.until_text("n0.out", "step 300/")
        output = terminals.typed(n0, "grep '^resuming' n0.out; tail -n 2 n0.out | cut -c 1-80")
    return codes == [0, 0] and "after step 100" in output


def hosts_session(folder: Path, log: Callable[[str], None]) -> bool:
    """A list of hosts, one of which loses its power. Whether the run came to its end.

    Args:
        folder: to work in; new.
    """
    terminals = _prepare(folder, log, _SETTINGS)
    nodes = ("n0", "n1", "n2")
    with Machines(folder / "machines", ["head"] + list(nodes)) as machines:
        head = machines["head"]
        (folder / "hosts").write_text("".join(f"{n} folder={machines[n].folder}\n" for n in nodes))
        keys = f"IdentityFile {machines.folder}/user_key\nUserKnownHostsFile {machines.folder}/known_hosts\n"
        (folder / "cluster.config").write_text(
            "".join(f"Host {n}\nHostName {machines[n].address}\n" for n in nodes) + f"Host *\n{keys}"
        )
        terminals.typed(head, "cat hosts")
        driver = terminals.start(head, _LAUNCH, "demo.out")
        try:
            terminals.wait_for_event("demo", "first_step")
            terminals.wait_for_event("demo", "node_joined", 3)
            terminals.typed(head, "megascale nodes runs/demo")
            log("(the plug of n1 is pulled)")
            machines["n1"].power_off()
            terminals.wait_for_event("demo", "first_step", 2)
            output = terminals.typed(head, "megascale events runs/demo | tail -n 11")
            code = driver.wait(3 * WAIT)
            terminals.typed(head, "tail -n 2 demo.out")
        finally:
            driver.kill()
            driver.wait()
    return code == 0 and "-> spare" in output


def _prepare(folder: Path, log: Callable[[str], None], changes: tuple[tuple[str, str], ...]) -> _Terminals:
    folder.mkdir()
    file = make(folder)
    text = file.read_text()
    for old, new in changes:
        text = text.replace(old, new)
    file.write_text(text)
    return _Terminals(folder, log)
