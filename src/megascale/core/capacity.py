"""Free resources of this machine: memory of host and GPUs, processes, open files. No torch, no CUDA context."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megascale.core.gpus import visible_gpu_names

_UNLIMITED = 1 << 60  # a larger limit is none: control groups of version 1 write 2^63 less a page for "no limit"
_Limit = tuple[int | None, str]  # (free amount under a limit, None if unlimited or unknown; name of the limit)


@dataclass(frozen=True)
class Capacity:
    """Free resources of a machine; None where a resource is unlimited or unknown.

    Attributes:
        memory: bytes of host memory that processes may still allocate.
        memory_from: name of the limit that gives `memory`.
        cores: CPU cores that this process may use.
        open_files: number of files that one process may open.
        processes: number of processes that may still be started; each thread counts as one, as in the kernel.
        processes_from: name of the limit that gives `processes`.
        gpu_memory: bytes of the smallest visible GPU.
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
        """Measure this machine now.

        Args:
            proc, cgroups: folders of the kernel's files.
            gpus: whether to query GPU memory too.
        """
        memory_limits = [(_available_memory(proc), "MemAvailable"), *_cgroup_memory(proc, cgroups)]
        memory, memory_from = _find_tightest(memory_limits)
        process_limits = [*_cgroup_processes(proc, cgroups), _user_process_limit(proc), _system_process_limit(proc)]
        processes, processes_from = _find_tightest(process_limits)
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return cls(
            memory=memory,
            memory_from=memory_from,
            cores=usable_cores(),
            open_files=None if open_files == resource.RLIM_INFINITY else open_files,
            processes=processes,
            processes_from=processes_from,
            gpu_memory=_smallest_gpu_memory() if gpus else None,
        )


def measure_memory_limit(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, str]:
    """Return the bytes of host memory that processes may use together, used or free, and the name of the limit.

    Args:
        proc, cgroups: folders of the kernel's files.
    """
    kib = _read_field(proc / "meminfo", "MemTotal")
    limits: list[_Limit] = [(None if kib is None else kib * 1024, "MemTotal")]
    for folder, is_v2 in _cgroup_folders(proc, cgroups, "memory"):
        name = "memory.max" if is_v2 else "memory.limit_in_bytes"
        limit = _read_number(folder / name)
        if limit is not None and limit < _UNLIMITED:
            limits.append((limit, f"the control group's {name}"))
    return _find_tightest(limits)


def usable_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_disk(folder: Path) -> int:
    """Return the bytes that this user may still write to the disk of `folder`, which need not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _find_tightest(limits: Iterable[_Limit]) -> _Limit:
    """Return the limit with the lowest value, or (None, "") if all are unlimited or unknown."""
    known_limits = [(value, name) for value, name in limits if value is not None]
    return min(known_limits, default=(None, ""))


def _read_number(file: Path) -> int | None:
    """Return the number in a kernel file, None for `max` or a missing file."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _read_field(file: Path, name: str) -> int | None:
    """Return the number in the line of `file` that begins with `name`, None without such a line."""
    with suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            fields = line.replace(":", " ").split()
            if fields[:1] == [name]:
                return int(fields[1])
    return None


def _available_memory(proc: Path) -> int | None:
    """Return the bytes that the kernel estimates as available, None if that is unknown."""
    kib = _read_field(proc / "meminfo", "MemAvailable")
    return None if kib is None else kib * 1024


def _cgroup_folders(proc: Path, cgroups: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control group and its parents that limit `controller`.

    The boolean tells whether the folder belongs to version 2.
    """
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            # A line is ID:CONTROLLERS:PATH, without controllers in version 2.
            _, controllers, path = line.split(":", 2)
            is_v2 = controllers == ""
            if not is_v2 and controller not in controllers.split(","):
                continue
            root = cgroups if is_v2 else cgroups / controller
            relative = Path(path.lstrip("/"))
            for group in (relative, *relative.parents):
                # In a container the path may be that of the host, while the container's own group is mounted as root.
                # Then only the root exists.
                folder = root / group
                if folder.is_dir():
                    yield folder, is_v2


def _cgroup_memory(proc: Path, cgroups: Path) -> Iterator[_Limit]:
    """Yield the free memory of each control group with a limit. Cached files count as free."""
    for folder, is_v2 in _cgroup_folders(proc, cgroups, "memory"):
        if is_v2:
            limit_name = "memory.max"
            usage_name = "memory.current"
            cache_fields = ("active_file", "inactive_file")
        else:
            limit_name = "memory.limit_in_bytes"
            usage_name = "memory.usage_in_bytes"
            cache_fields = ("total_active_file", "total_inactive_file")
        limit = _read_number(folder / limit_name)
        used = _read_number(folder / usage_name)
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        cached = 0
        for name in cache_fields:
            cached += _read_field(folder / "memory.stat", name) or 0
        yield max(0, limit - max(0, used - cached)), f"the control group's {limit_name}"


def _cgroup_processes(proc: Path, cgroups: Path) -> Iterator[_Limit]:
    """Yield the number of processes that each control group with a limit may still start."""
    for folder, _ in _cgroup_folders(proc, cgroups, "pids"):
        limit = _read_number(folder / "pids.max")
        used = _read_number(folder / "pids.current")
        if limit is not None and used is not None:
            yield max(0, limit - used), "the control group's pids.max"


def _user_process_limit(proc: Path) -> _Limit:
    """Return the number of processes that this user may still start. Each thread counts."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit == resource.RLIM_INFINITY or os.geteuid() == 0:  # the kernel does not enforce the limit for root
        return None, ""
    used = 0
    for entry in proc.glob("[0-9]*"):
        with suppress(OSError):
            if entry.stat().st_uid == os.geteuid():
                used += _read_field(entry / "status", "Threads") or 1
    return max(0, limit - used), "ulimit -u"


def _system_process_limit(proc: Path) -> _Limit:
    """Return the number of processes that the machine may still start. Each thread counts."""
    kernel = proc / "sys" / "kernel"
    numbers = (_read_number(kernel / "pid_max"), _read_number(kernel / "threads-max"))
    limits = [number for number in numbers if number is not None]
    if not limits:
        return None, ""
    used = 0
    with suppress(OSError, ValueError, IndexError):
        # The fourth field of loadavg is RUNNING/EXISTING threads.
        used = int((proc / "loadavg").read_text().split()[3].partition("/")[2])
    return max(0, min(limits) - used), "kernel.pid_max and threads-max"


def _smallest_gpu_memory() -> int | None:
    """Return the bytes of the smallest visible GPU as the driver reports it, None if that is unknown.

    torch would create a CUDA context in this process, which then stays on the first GPU.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    bytes_by_name: dict[str, int] = {}  # each GPU has two names: its index and its UUID
    for line in text.splitlines():
        with suppress(ValueError):
            index, uuid, mib = (part.strip() for part in line.split(","))
            bytes_by_name[index] = int(mib) << 20
            bytes_by_name[uuid] = int(mib) << 20
    names = visible_gpu_names(len(bytes_by_name) // 2)
    if not all(name in bytes_by_name for name in names):
        return None  # slices of GPUs (MIG) are not in the list
    return min((bytes_by_name[name] for name in names), default=None)
