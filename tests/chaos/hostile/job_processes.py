"""The processes of a launched job as the kernel tells of them: who they are, where they listen, what memory they take.

The ranks are forks of the fork server and look like it; those that listen are told apart by that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

RANK = "rank (torch)"
_LISTENS = "0A"


@dataclass(frozen=True)
class Port:
    """Address at which a process listens. role: the role of the process; see `role`."""

    pid: int
    role: str
    address: tuple[str, int]


def children(root: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = Path(f"/proc/{entry}/stat").read_text()
                parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    result, todo = [], [root]
    while todo:
        pid = todo.pop()
        result.append(pid)
        todo += parents.get(pid, [])
    return result


def role(pid: int, root: int) -> str:
    """What a process of the job that `root` drives is: driver, or the module that it runs, as in `ps`; of those that
    have the fork server's words only ranks listen, for torch."""
    if pid == root:
        return "driver"
    with contextlib.suppress(OSError, ValueError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        name = arguments[arguments.index("-m") + 1].rpartition(".")[2]
        return RANK if name == "fork_server" else name
    return "?"


def ports(root: int) -> list[Port]:
    """Return the TCP addresses at which the job's processes listen."""
    owners: dict[str, int] = {}
    for pid in children(root):
        with contextlib.suppress(OSError):
            for handle in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{handle}")
                    if target.startswith("socket:["):
                        owners.setdefault(target[8:-1], pid)
    result = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and fields[9] in owners:
                    pid = owners[fields[9]]
                    result.append(Port(pid, role(pid, root), _address(fields[1])))
    return result


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    arguments = [struct.pack("=I", int(host[i : i + 8], 16)) for i in range(0, len(host), 8)]
    family = socket.AF_INET if len(arguments) == 1 else socket.AF_INET6
    name = socket.inet_ntop(family, b"".join(arguments))
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, name), int(port, 16)


def memory(pid: int) -> tuple[int, int]:
    """(resident bytes now, most since `forget_most`); zeros for a process that is gone."""
    result = {"VmRSS": 0, "VmHWM": 0}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in result:
                result[name] = int(value.split()[0]) << 10
    return result["VmRSS"], result["VmHWM"]


def forget_most(pid: int) -> None:
    """Begin the most anew."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
