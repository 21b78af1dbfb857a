"""What this machine can still give: memory of host and GPUs, processes, files. No torch, no CUDA context."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megascale.core.gpu_names import visible_gpu_names

_UNLIMITED = 1 << 60  # cgroups of version 1 write 2^63 less a page for "no limit"


@dataclass(frozen=True)
class Capacity:
    """None: not known here, or no limit.

    Attributes:
        memory: bytes of host memory that processes may still take.
        memory_from: who says so, in words.
        cores: that this process may use.
        open_files: of one process.
        processes: that may still be started, threads counted as the kernel does.
        processes_from: who says so.
        gpu_memory: bytes of the smallest GPU that is visible.
    """

    memory: int | None = None
    memory_from: str = ""
    cores: int = 1
    open_files: int | None = None
    processes: int | None = None
    processes_from: str = ""
    gpu_memory: int | None = None

    @classmethod
    def measure(
        cls, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"), gpus: bool = False
    ) -> Capacity:
        """This machine now; `proc` and `cgroups` are where the kernel tells of it. `gpus`: ask for GPU memory too."""
        found: list[tuple[int | None, str]] = [(_available(proc), "MemAvailable")]
        found += [(left, f"the control group's {name}") for left, name in _memory_left(proc, cgroups)]
        memory, memory_from = min(((n, who) for n, who in found if n is not None), default=(None, ""))
        room: list[tuple[int | None, str]] = [
            (left, f"the control group's {name}") for left, name in _pids_left(proc, cgroups)
        ]
        room += [_user_limit(proc), _system_limit(proc)]
        processes, processes_from = min(((n, who) for n, who in room if n is not None), default=(None, ""))
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return cls(
            memory=memory,
            memory_from=memory_from,
            cores=usable_cores(),
            open_files=None if files == resource.RLIM_INFINITY else files,
            processes=processes,
            processes_from=processes_from,
            gpu_memory=_smallest_gpu() if gpus else None,
        )


def usable_cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_disk(folder: Path) -> int:
    """Bytes that this user may still write where `folder` is or will be made."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _number(file: Path) -> int | None:
    """The number in a file of the kernel's; None for `max` or where there is none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _field(file: Path, name: str) -> int | None:
    """A number that a line of `file` gives under `name`."""
    with suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.replace(":", " ").split()[:1] == [name]:
                return int(line.replace(":", " ").split()[1])
    return None


def _available(proc: Path) -> int | None:
    kib = _field(proc / "meminfo", "MemAvailable")
    return None if kib is None else kib * 1024


def _groups(proc: Path, cgroups: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of this process's control group and all above it that limit `controller`; whether of version 2."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if names == "" or controller in names.split(","):
                # In a container the path may be the host's while the mount shows the container's own group as root.
                root = cgroups if names == "" else cgroups / controller
                parts = Path(path.lstrip("/")).parts
                for depth in range(len(parts), -1, -1):
                    folder = root.joinpath(*parts[:depth])
                    if folder.is_dir():
                        yield folder, names == ""


def _memory_left(proc: Path, cgroups: Path) -> Iterator[tuple[int, str]]:
    """(bytes left, file that limits) of each control group with a limit. Cached files count as left."""
    for folder, second in _groups(proc, cgroups, "memory"):
        name, usage = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = _number(folder / name), _number(folder / usage)
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        prefix = "" if second else "total_"
        cache = sum(_field(folder / "memory.stat", prefix + kind) or 0 for kind in ("active_file", "inactive_file"))
        yield max(0, limit - max(0, used - cache)), name


def _pids_left(proc: Path, cgroups: Path) -> Iterator[tuple[int, str]]:
    for folder, _ in _groups(proc, cgroups, "pids"):
        limit, used = _number(folder / "pids.max"), _number(folder / "pids.current")
        if limit is not None and used is not None:
            yield max(0, limit - used), "pids.max"


def _user_limit(proc: Path) -> tuple[int | None, str]:
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit == resource.RLIM_INFINITY or os.geteuid() == 0:  # the kernel does not hold root to it
        return None, ""
    used = 0
    for entry in proc.glob("[0-9]*"):
        with suppress(OSError):
            if entry.stat().st_uid == os.geteuid():
                used += _field(entry / "status", "Threads") or 1
    return max(0, limit - used), "ulimit -u"


def _system_limit(proc: Path) -> tuple[int | None, str]:
    kernel = proc / "sys" / "kernel"
    limits = [n for n in (_number(kernel / "pid_max"), _number(kernel / "threads-max")) if n is not None]
    if not limits:
        return None, ""
    used = 0
    with suppress(OSError, ValueError, IndexError):
        used = int((proc / "loadavg").read_text().split()[3].partition("/")[2])
    return max(0, min(limits) - used), "kernel.pid_max and threads-max"


def _smallest_gpu() -> int | None:
    """Memory of the smallest GPU that may be used, as the driver tells it; None where nobody can be asked.

    torch would make a CUDA context in this process, which then stays on the first GPU.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        with suppress(ValueError):
            index, uuid, mib = (part.strip() for part in line.split(","))
            sizes[index] = sizes[uuid] = int(mib) << 20
    chosen = visible_gpu_names(len(sizes) // 2)
    if not all(name in sizes for name in chosen):
        return None  # parts of GPUs (MIG), whose sizes are others
    return min((sizes[name] for name in chosen), default=None)
