"""Program that ssh or srun runs on a node: it starts, finds or ends the node's agent.

The program reads one request as a line of JSON from stdin, so that the job's secret is in no list of processes and no
environment. It answers with lines of JSON on stdout: {"running": PID} once an agent runs, {"over": DESCRIPTION} after
its end, {"refused": REASON}, and {"ended": true} or false. The agent has its own session. If the connection breaks,
the agent continues, and this process ends after it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megascale.core.addresses import find_local_address, get_interface_address
from megascale.core.failure import describe_exit
from megascale.core.python_process import module_command
from megascale.errors import MegascaleError, TrainingError
from megascale.resilience.agent.node_folder import (
    end_agent,
    find_agent,
    get_default_folder,
    prepare_node_folder,
    read_agent_process,
    record_agent_process,
)
from megascale.resilience.protocol.job_description import from_record

REQUEST_BYTES = 1 << 20  # longest request
_POLL_INTERVAL = 0.2  # seconds between checks of a process that the kernel cannot watch
_LOCK_FILE = "attach.lock"
_LOCK_SECONDS = 8.0  # to wait for an earlier request, which waits at most 5 s for the end of an agent
_LOCK_POLL_SECONDS = 0.02  # between two attempts to get the lock


def main() -> None:
    """Read one request and serve it."""
    # Slurm sends SIGTERM to all processes of a job, and kills all processes of a task once its first one has ended.
    # This process therefore ignores SIGTERM, by a handler that children do not inherit, until the agent has ended.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    line = sys.stdin.buffer.readline(REQUEST_BYTES)
    try:
        serve_request(json.loads(line))
    except MegascaleError as error:
        write_answer(refused=str(error))
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        write_answer(refused=f"{type(error).__name__}: {error}")


def write_answer(**fields: Any) -> None:
    """Write one answer. If the connection is closed, end the process."""
    try:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()
    except OSError:
        os._exit(0)


def serve_request(request: dict[str, Any]) -> None:
    """Start, adopt, watch or end an agent.

    Args:
        request: has the key `do`, whose value is "start" (end a running agent and start another), "adopt" (start an
            agent unless one runs), "watch" (wait for the end of a running agent) or "end". Further keys are `node`,
            `folder` (may be empty: default folder) and `job` (to_record). "start" and "adopt" also have `token`,
            `marker`, `address`, `interface`, `pod` and `environment`. If `address` is empty, the address of the
            interface is used, or else the address of connections to the driver.
    """
    job = from_record(request["job"])
    node = str(request["node"])
    if request["folder"]:
        folder = Path(request["folder"]).expanduser() / node
    else:
        folder = get_default_folder(job.name, node)
    if request["do"] == "end":
        write_answer(ended=_end_agent(folder))
        return
    if request["do"] == "watch":
        pid = read_agent_process(folder)
        if pid:
            write_answer(running=pid)
        write_answer(over=_wait_for_end(pid, None, folder) if pid else "its end was not observed")
        return
    job = prepare_node_folder(folder, job, str(request["token"]).encode(), str(request["marker"]))
    child = None
    with _lock_node(folder):
        pid = find_agent(folder)
        if not (pid and request["do"] == "adopt"):
            if not end_agent(folder):
                write_answer(
                    refused=f"the agent of {node} (process {pid}) does not end by SIGKILL: a device or disk blocks it"
                )
                return
            address = request["address"] or _find_address(str(request["interface"]), job.driver[0])
            child = _start_agent(folder, node, address, request, preload=job.limits.preload)
            pid = child.pid
            try:
                record_agent_process(folder, pid)
            except BaseException:
                child.kill()  # without the record, nothing could find or end the agent
                raise
    write_answer(running=pid)
    write_answer(over=_wait_for_end(pid, child, folder))


def _end_agent(folder: Path) -> bool:
    """End the agent of a node, also the one that an earlier request is starting. Return whether it has ended."""
    if not folder.is_dir():
        return True  # no request has started an agent
    with _lock_node(folder):
        return end_agent(folder)


@contextlib.contextmanager
def _lock_node(folder: Path) -> Iterator[None]:
    """Let requests about the node wait for each other.

    Raises:
        TrainingError: an earlier request has not ended within _LOCK_SECONDS.
        ConnectionError: the connection has broken meanwhile, so that a later request may have been carried out.
    """
    lock = _open_lock_file(folder / _LOCK_FILE)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(lock):
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"another request about this node has {folder / _LOCK_FILE} locked for over {_LOCK_SECONDS:g} s; "
                    "`fuser` of that file names its process, which a disk may block"
                )
            time.sleep(_LOCK_POLL_SECONDS)
        if not _is_connected():
            raise ConnectionError("the connection of this request has broken")
        yield
    finally:
        os.close(lock)


def _open_lock_file(path: Path) -> int:
    """Return a descriptor of the lock file, which is created if necessary. An agent must end on a read-only disk too.

    Raises OSError if the file cannot be opened.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # NFS locks only files that are open for writing
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY)


def _try_lock(lock: int) -> bool:
    """Lock an open file, and return whether no other process has it locked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_connected() -> bool:
    """Return whether answers still have a reader, as far as the kernel knows."""
    poller = select.poll()
    poller.register(sys.stdout, 0)  # the kernel reports errors and closed connections in any case
    return not poller.poll(0)


def _find_address(interface: str, driver: str) -> str:
    """Return the address of an interface, or without one the address of connections to the driver's host."""
    if interface:
        return get_interface_address(interface)
    return find_local_address(driver)


def _start_agent(
    folder: Path, node: str, address: str, request: dict[str, Any], *, preload: bool
) -> subprocess.Popen[bytes]:
    """Start the agent in a session of its own, which outlives this connection."""
    command = module_command("megascale.resilience.agent.main", "--node", node, "--folder", str(folder))
    command += ["--address", address, "--pod", str(request.get("pod", ""))]
    if preload:
        command.append("--preload")
    environment = os.environ | {str(name): str(value) for name, value in request.get("environment", {}).items()}
    with open(folder / "agent.log", "ab") as out:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def _wait_for_end(pid: int, child: subprocess.Popen[bytes] | None, folder: Path) -> str:
    """Wait for the end of the agent, and return a description of the end.

    Args:
        child: process of the agent, or None if an earlier connection started it.
    """
    if child is not None:
        return describe_exit(child.wait())
    try:
        descriptor = os.pidfd_open(pid)
        try:
            if find_agent(folder) == pid:  # else another process has the id by now
                select.select([descriptor], [], [])  # The descriptor is readable once the process has ended.
        finally:
            os.close(descriptor)
    except (OSError, AttributeError):  # The kernel lacks the call, or the process has ended already.
        while find_agent(folder) == pid:
            time.sleep(_POLL_INTERVAL)
    return "its end was not observed"


if __name__ == "__main__":
    main()
