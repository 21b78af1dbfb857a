"""Evidence of each rank of a run that stands still: its files, its process, its stack and its flight recorder.

Reading does not need the ranks' help: the files are memory-mapped and remain when a process hangs or dies. Ranks on
this host are also asked for their stacks. A rank that does not answer is distinguished from a rank that was not asked.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megascale.core.calls import MAX_RANKS, READER, read_calls
from megascale.core.status import read_status
from megascale.core.untrusted_files import open_regular
from megascale.errors import DataError
from megascale.observe.hang.activity import Usage, is_active, measure_usage
from megascale.observe.hang.flight import FlightDump, read_flight
from megascale.observe.hang.scene import ProcessState, RankEvidence, Scene, read_sent

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 3.0  # a signal may have to wait while the rank is inside a driver's call
_POLL_SECONDS = 0.02
# Offset from SIGRTMIN of the signal that another trainer's ranks answer with their stack.
FOREIGN_STACK_SIGNAL = 13
_MAX_FRAMES = 8
_MAX_STACK_BYTES = 1 << 20
_RANK_FILE = re.compile(r"rank-(\d+)\.(?:status|calls|json|evidence|process)|nccl_trace_rank_(\d+)|rank-(\d+)")


def collect_evidence(
    folder: Path, ask: bool = True, watch_seconds: float = 0.5, ranks: frozenset[int] | None = None
) -> Scene:
    """Read a run folder, or a folder of `rank-N.calls` files.

    Args:
        ask: signal the ranks on this host for their stacks and flight records.
        watch_seconds: time to watch for progress. It ends early if all ranks make progress, or if one is gone or
            stopped; 0 does not watch.
        ranks: ranks to read; None reads all.

    Raises:
        DataError: the folder has no such files.
    """
    if (folder / "status").is_dir():
        status_folder = folder / "status"
    else:
        status_folder = folder
    if (folder / "flight").is_dir():
        flight_folder = folder / "flight"
    else:
        flight_folder = folder
    present = [rank for rank in _list_ranks(status_folder, flight_folder) if ranks is None or rank in ranks]
    if not present:
        raise DataError(
            f"{folder} holds no rank-N.status or rank-N.calls files and no flight-recorder dumps; name a run folder, "
            "such as runs/stdlib, or a folder with copies of its status files"
        )
    sent = _collect_sent(status_folder, flight_folder, present)
    if sent is not None:
        return sent
    progress_before = {rank: _read_progress(status_folder, rank) for rank in present}
    deadline = time.monotonic() + watch_seconds
    evidence = {rank: _read_rank(status_folder, rank) for rank in present}
    if ask:
        evidence = _ask_for_stacks(status_folder, flight_folder, evidence)
    if any(item.process in ("gone", "stopped") for item in evidence.values()):
        deadline = 0.0  # a dead or stopped process explains the hang better than progress
    for rank, item in evidence.items():
        evidence[rank] = replace(item, flight=_read_flight_of(flight_folder, item))
    if watch_seconds:
        foreign = [item for item in evidence.values() if item.is_foreign and item.process == "running"]
        usage_before = {item.rank: measure_usage(item.own_pid) for item in foreign}
        moving = _watch(status_folder, progress_before, deadline)
        moving |= _watch_foreign(status_folder, flight_folder, foreign, usage_before, watch_seconds)
    else:
        moving = frozenset()
    for rank, item in evidence.items():
        evidence[rank] = replace(item, moving=rank in moving)
    return Scene(evidence, _find_world(evidence), moving, time.time_ns())


def _collect_sent(status: Path, flight: Path, ranks: list[int]) -> Scene | None:
    """Return the evidence that agents sent if no rank writes into this folder."""
    files = [status / f"rank-{rank}.{kind}" for rank in ranks for kind in ("status", "calls")]
    files += [file for rank in ranks for file in _flight_files(flight, rank)]
    if any(file.exists() for file in files):
        return None
    evidence, time_ns = read_sent(status, ranks)
    if not evidence:
        return None
    moving = frozenset(rank for rank, item in evidence.items() if item.moving)
    return Scene(evidence, _find_world(evidence), moving, time_ns, from_agents=True)


def read_process_state(pid: int, mapped_file: str = "") -> ProcessState:
    """Return the state of a process on this host.

    It is also "gone" if the process does not have `mapped_file` mapped, because its number was reused.
    """
    try:
        letter = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        if letter in "ZX" or (mapped_file and mapped_file not in Path(f"/proc/{pid}/maps").read_text()):
            return "gone"
        return "stopped" if letter in "Tt" else "running"
    except PermissionError:
        return "unknown"
    except (OSError, IndexError):
        return "gone"


def _list_ranks(status: Path, flight: Path) -> list[int]:
    names = [path.name for folder in (status, flight) if folder.is_dir() for path in folder.iterdir()]
    matches = [match for match in map(_RANK_FILE.fullmatch, names) if match]
    ranks = {int(next(group for group in match.groups() if group)) for match in matches}
    return sorted(rank for rank in ranks if rank < MAX_RANKS)


def _flight_files(folder: Path, rank: int) -> tuple[Path, ...]:
    return folder / f"rank-{rank}.json", folder / f"nccl_trace_rank_{rank}", folder / f"rank-{rank}"


def _read_progress(folder: Path, rank: int) -> object:
    """Return values that change when a rank makes progress."""
    record = read_calls(folder / f"rank-{rank}.calls", history=False)
    status = read_status(folder / f"rank-{rank}.status")
    return record and record.events, record and record.waiting, status and (status.phase, status.step)


def _watch(folder: Path, before: dict[int, object], deadline: float) -> frozenset[int]:
    """Return the ranks that make progress until a monotonic time; return early if all do."""
    moving: set[int] = set()
    while True:
        moving |= {
            rank for rank, progress in before.items() if rank not in moving and _read_progress(folder, rank) != progress
        }
        if len(moving) == len(before) or time.monotonic() >= deadline:
            return frozenset(moving)
        time.sleep(_POLL_SECONDS)


def _watch_foreign(
    status: Path, flight: Path, ranks: list[RankEvidence], usage_before: dict[int, dict[int, Usage]], seconds: float
) -> frozenset[int]:
    """Return the ranks of another trainer that save, load or make calls. Their steps may be minutes apart."""
    if not ranks:
        return frozenset()
    time.sleep(seconds)
    moving = {item.rank for item in ranks if is_active(usage_before[item.rank], measure_usage(item.own_pid), seconds)}
    candidates = [item for item in ranks if item.flight is not None and not item.flight.device and item.answered]
    for item in candidates:
        (flight / f"rank-{item.rank}.json").unlink(missing_ok=True)
    requested = {item.rank for item in candidates if ask_for_flight(status, item.rank)}
    _wait_for_answers(status, flight, set(), set(requested))
    for item in candidates:
        later = _read_flight_of(flight, item)
        if item.rank in requested and later is not None and _count_calls(later) != _count_calls(item.flight):
            moving.add(item.rank)
    return frozenset(moving)


def _count_calls(flight: FlightDump | None) -> dict[str, int]:
    return {group: counts.started for group, counts in flight.record.groups.items()} if flight is not None else {}


def _read_flight_of(folder: Path, evidence: RankEvidence) -> FlightDump | None:
    """Return the rank's flight record, None if it has none or did not answer."""
    file = next((file for file in _flight_files(folder, evidence.rank) if file.exists()), None)
    if file is None or evidence.answered is False:
        return None
    try:
        return read_flight(file)
    except DataError as error:
        if evidence.record is None:
            raise
        log.warning("%s; the rank's own record of its calls is used", error)
        return None


def _read_rank(folder: Path, rank: int) -> RankEvidence:
    file = folder / f"rank-{rank}.calls"
    record = read_calls(file)
    evidence = RankEvidence(rank, status=read_status(folder / f"rank-{rank}.status"), record=record)
    if record is None:
        pid = _read_foreign_process(folder, rank)
        if not pid:
            return evidence
        return replace(evidence, own_pid=abs(pid), process=read_process_state(pid) if pid > 0 else "gone")
    if record.host != socket.gethostname()[:40]:
        return evidence
    evidence = replace(evidence, process=read_process_state(record.pid, str(file.resolve())))
    waiting = record.waiting
    if waiting and waiting.group == READER and waiting.pid and evidence.process != "unknown":
        evidence = replace(evidence, reader=read_process_state(waiting.pid))
    return evidence


def _read_foreign_process(folder: Path, rank: int) -> int:
    """Return the process id of a rank of another trainer on this host, negative if it has ended; 0 if there is none.

    The rank writes the file at its start (resilience/agent/site/sitecustomize.py): process id, birth and host.
    """
    fields = _read_text(folder / f"rank-{rank}.process").split()
    if len(fields) != 3 or not fields[0].isdigit() or fields[2] != socket.gethostname():
        return 0
    pid = int(fields[0])
    try:
        birth = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return -pid
    return pid if birth == fields[1] else -pid


def _find_world(evidence: dict[int, RankEvidence]) -> int:
    worlds = [item.record.world for item in evidence.values() if item.record and item.record.world <= MAX_RANKS]
    return max(worlds + [max(evidence) + 1])


def _ask_for_stacks(status: Path, flight: Path, evidence: dict[int, RankEvidence]) -> dict[int, RankEvidence]:
    """Ask every rank on this host for its stack and flight record, and wait for the answers."""
    signalled: set[int] = set()
    dumping: set[int] = set()
    for rank, item in evidence.items():
        if item.process != "running" or not item.pid or not hasattr(signal, "SIGUSR2"):
            continue
        number = int(signal.SIGUSR2) if item.record is not None else _find_stack_signal(item.pid)
        if not number:
            continue
        signalled.add(rank)
        (flight / f"rank-{rank}.json").unlink(missing_ok=True)
        with suppress(OSError):
            os.truncate(status / f"rank-{rank}.stack", 0)
            _signal_main_thread(item.pid, number)
        if ask_for_flight(status, rank):
            dumping.add(rank)
        if item.record is None:
            _ask_nccl_watchdog(status / f"nccl-{rank}.pipe")
    unanswered = _wait_for_answers(status, flight, signalled, dumping)
    for rank, item in evidence.items():
        if rank in unanswered:
            evidence[rank] = replace(item, answered=False, stack=_dump_with_py_spy(item) or _read_kernel_state(item))
        elif rank in signalled:
            stack = _parse_stack(_read_text(status / f"rank-{rank}.stack"))
            evidence[rank] = replace(item, answered=True, stack=stack)
        elif item.process == "stopped":
            evidence[rank] = replace(item, answered=False, stack=_dump_with_py_spy(item))
    return evidence


def ask_for_flight(status: Path, rank: int) -> bool:
    """Ask a rank for its flight record; False without a reader of the pipe: it has ended or has no recorder."""
    try:
        os.close(os.open(status / f"rank-{rank}.ask", os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _wait_for_answers(status: Path, flight: Path, signalled: set[int], dumping: set[int]) -> set[int]:
    """Wait until all ranks have written their stacks and dumps; return the ranks without a stack."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    unanswered = set(signalled)
    stacks = dict.fromkeys(signalled, "")
    while (unanswered or dumping) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        before = stacks
        stacks = {rank: _read_text(status / f"rank-{rank}.stack") for rank in unanswered}
        # A stack that did not change since the last reading is complete.
        unanswered -= {rank for rank in unanswered if stacks[rank] and stacks[rank] == before[rank]}
        dumping -= {rank for rank in dumping if (flight / f"rank-{rank}.json").exists()}
    return unanswered


def _read_text(stack: Path) -> str:
    try:
        with open(stack, "rb", opener=open_regular) as file:
            return file.read(_MAX_STACK_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _find_stack_signal(pid: int) -> int:
    """Return the signal by which a rank of another trainer gives its stack, 0 if it does not handle it.

    A signal without a handler would end the process.
    """
    number = int(signal.SIGRTMIN) + FOREIGN_STACK_SIGNAL
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16)
    except (OSError, StopIteration, ValueError, IndexError):
        return 0
    return number if caught >> (number - 1) & 1 else 0


def _ask_nccl_watchdog(pipe: Path) -> None:
    """Ask torch's watchdog for its flight record, which it writes without the interpreter."""
    with suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"1\n")
        finally:
            os.close(descriptor)


def _signal_main_thread(pid: int, number: int) -> None:
    """Ask a process for its stack by signal `number`. OSError if the process is gone.

    While the main thread is inside the kernel, the kernel would deliver a signal to any other thread, for example a
    thread of a library without a Python stack.
    """
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)  # Linux with glibc 2.30 or newer
    if tgkill is None:
        os.kill(pid, number)
    elif tgkill(pid, pid, number):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _parse_stack(text: str) -> tuple[str, ...]:
    """Return the frames of an interpreter's stack, innermost first, as `function (file:line)`."""
    frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', text)[:_MAX_FRAMES]
    return tuple(f"{function} ({'/'.join(Path(file).parts[-2:])}:{line})" for file, line, function in frames)


def _dump_with_py_spy(evidence: RankEvidence) -> tuple[str, ...]:
    """Return the stack of a process that cannot answer, if py-spy is installed and permitted."""
    program = shutil.which("py-spy")
    if program is None or not evidence.pid:
        return ()
    command = [program, "dump", "--nonblocking", "--pid", str(evidence.pid)]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    threads = [part for part in text.split("\nThread ") if "MainThread" in part]
    frames = [line.strip() for part in threads for line in part.splitlines()[1:] if line.strip()]
    return tuple(frames[:_MAX_FRAMES])


def _read_kernel_state(evidence: RankEvidence) -> tuple[str, ...]:
    """Return the state of a main thread that does not answer, and the kernel function in which it waits."""
    process = Path("/proc") / str(evidence.pid)
    try:
        letter = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ()
    with suppress(OSError):
        function = (process / "wchan").read_text().strip()
        if function not in ("", "0"):
            return (f"state {letter}, in the kernel's {function}",)
    return (f"state {letter}",)
