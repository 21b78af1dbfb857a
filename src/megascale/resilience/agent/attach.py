"""The far end of a cluster on other machines: started there by ssh or srun, it starts, finds or ends a node's agent.

One request comes as a line of JSON on stdin (the job's secret with it, so it stands in no list of processes and no
environment), answers go as lines of JSON to stdout: {"running": PID} once an agent is there, {"over": WHY} when it has
ended, {"refused": WHY}, {"ended": true}. The agent is no child of the connection: it lives on where that breaks, while
this process ends with it.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megascale.core.interfaces import address_of, address_towards
from megascale.core.python_command import module_command
from megascale.errors import MegascaleError
from megascale.resilience.agent.node_folder import default_folder, end_agent, find_agent, prepare, remember
from megascale.resilience.protocol.given import from_record

LIMIT = 1 << 20  # bytes of a request
_LOOK = 0.2  # seconds between looks at a process whose end the kernel cannot tell


def main() -> None:
    """Read one request and serve it."""
    # Slurm tells all processes of a job to end, and kills the others of a task once its first one has ended: this one
    # stays until the agent has let its trainers save. (No child inherits a handler.)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    line = sys.stdin.buffer.readline(LIMIT)
    try:
        request = json.loads(line)
        answer(request)
    except MegascaleError as error:
        say(refused=str(error))
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        say(refused=f"{type(error).__name__}: {error}")


def say(**words: Any) -> None:
    """One line to whoever asked; a connection that is gone matters to nobody."""
    try:
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()
    except OSError:
        os._exit(0)


def answer(request: dict[str, Any]) -> None:
    """Do what a request asks: "start" an agent anew, "adopt" one that lives or start it, "watch" one that lives,
    or "end" it.

    Keys: do, node, folder ("": the default one), job (given.py) and, but for the last two, token, marker, address
    (what the others reach this node at; "": by the interface, else the address that leads to the driver), interface,
    pod, environment.
    """
    job = from_record(request["job"])
    node = str(request["node"])
    folder = Path(request["folder"]).expanduser() / node if request["folder"] else default_folder(job.name, node)
    if request["do"] == "end":
        say(ended=end_agent(folder))
        return
    if request["do"] == "watch":
        if alive := find_agent(folder):
            say(running=alive)
        say(over=_wait(alive, None, folder) if alive else "its end was not seen")
        return
    given = prepare(folder, job, str(request["token"]).encode(), str(request["marker"]))
    child = None
    with open(folder / "attach.lock", "w") as alone:  # a request whose connection broke may still be at work
        fcntl.flock(alone, fcntl.LOCK_EX)
        alive = find_agent(folder)
        if not (alive and request["do"] == "adopt"):
            if not end_agent(folder):
                say(refused=f"the agent of {node} (process {alive}) does not end by SIGKILL: a device or disk holds it")
                return
            address = request["address"] or _address(str(request["interface"]), given.driver[0])
            child = _start(folder, node, address, request)
            alive = child.pid
            remember(folder, alive)
    say(running=alive)
    say(over=_wait(alive, child, folder))


def _address(interface: str, driver: str) -> str:
    return address_of(interface) if interface else address_towards(driver)


def _start(folder: Path, node: str, address: str, request: dict[str, Any]) -> subprocess.Popen[bytes]:
    command = module_command("megascale.resilience.agent.agent", "--node", node, "--folder", str(folder))
    command += ["--address", address, "--pod", str(request.get("pod", ""))]
    environment = os.environ | {str(k): str(v) for k, v in request.get("environment", {}).items()}
    with open(folder / "agent.log", "ab") as out:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def _wait(pid: int, child: subprocess.Popen[bytes] | None, folder: Path) -> str:
    """How the agent ended, once it has."""
    if child is not None:
        code = child.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    try:
        handle = os.pidfd_open(pid)  # not a child: it was started by another connection
        select.select([handle], [], [])
        os.close(handle)
    except (OSError, AttributeError):
        while find_agent(folder) == pid:
            time.sleep(_LOOK)
    return "its end was not seen"


if __name__ == "__main__":
    main()
