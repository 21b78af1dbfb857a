"""Collection of the evidence on a run that stands still: each rank's files, process, stack and flight record.

Ranks write their files through memory maps, so the files are current even if a process hangs or dies. Ranks on this
host are also asked for their stacks and flight records, with a signal and a pipe. A rank that does not answer is
distinguished from a rank that was not asked. A *flight record* is the output of torch's flight recorder. A *foreign*
rank runs another trainer under this package's launcher.
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
from megascale.observe.hang.scene import ProcessState, RankEvidence, Scene, read_sent_evidence

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 3.0  # time for an answer; a signal waits while the rank is inside a call of the GPU driver
_POLL_SECONDS = 0.02
# Offset from SIGRTMIN of the signal on which the ranks of other trainers write their stack.
FOREIGN_STACK_SIGNAL = 13
_MAX_FRAMES = 8
_MAX_STACK_BYTES = 1 << 20
_RANK_FILE = re.compile(r"rank-(\d+)\.(?:status|calls|json|evidence|process)|nccl_trace_rank_(\d+)|rank-(\d+)")


def collect_evidence(
    folder: Path, ask: bool = True, watch_seconds: float = 0.5, ranks: frozenset[int] | None = None
) -> Scene:
    """Read a run folder, or a folder of `rank-N.calls` files. Raises DataError if the folder has no such files.

    Args:
        ask: signal the ranks on this host for their stacks and flight records.
        watch_seconds: time to watch for progress. Watching ends early if all ranks make progress, or if one is gone or
            stopped; 0 does not watch.
        ranks: ranks to read; None reads all.
    """
    if (folder / "status").is_dir():
        status_folder = folder / "status"
    else:
        status_folder = folder
    if (folder / "flight").is_dir():
        flight_folder = folder / "flight"
    else:
        flight_folder = folder
    ranks_with_files = [rank for rank in _list_ranks(status_folder, flight_folder) if ranks is None or rank in ranks]
    if not ranks_with_files:
        raise DataError(
            f"{folder} holds no rank-N.status or rank-N.calls files and no flight-recorder dumps; name a run folder, "
            "such as runs/stdlib, or a folder with copies of its status files"
        )
    sent_scene = _collect_sent_evidence(status_folder, flight_folder, ranks_with_files)
    if sent_scene is not None:
        return sent_scene
    progress_before = {rank: _read_progress(status_folder, rank) for rank in ranks_with_files}
    watch_deadline = time.monotonic() + watch_seconds
    evidence = {rank: _read_rank(status_folder, rank) for rank in ranks_with_files}
    if ask:
        evidence = _ask_for_stacks(status_folder, flight_folder, evidence)
    if any(item.process in ("gone", "stopped") for item in evidence.values()):
        watch_deadline = 0.0  # a dead or stopped process explains the hang better than progress
    for rank, item in evidence.items():
        evidence[rank] = replace(item, flight=_read_flight_record(flight_folder, item))
    if watch_seconds:
        foreign = [item for item in evidence.values() if item.is_foreign and item.process == "running"]
        usage_before = {item.rank: measure_usage(item.own_pid) for item in foreign}
        moving = _watch_progress(status_folder, progress_before, watch_deadline)
        moving |= _watch_foreign_ranks(status_folder, flight_folder, foreign, usage_before, watch_seconds)
    else:
        moving = frozenset()
    for rank, item in evidence.items():
        evidence[rank] = replace(item, moving=rank in moving)
    return Scene(evidence, _find_world(evidence), moving, time.time_ns())


def _collect_sent_evidence(status: Path, flight: Path, ranks: list[int]) -> Scene | None:
    """Return the evidence that agents sent; None if ranks write into these folders, or if agents sent nothing."""
    files = [status / f"rank-{rank}.{kind}" for rank in ranks for kind in ("status", "calls")]
    files += [file for rank in ranks for file in _list_flight_files(flight, rank)]
    if any(file.exists() for file in files):
        return None
    evidence, time_ns = read_sent_evidence(status, ranks)
    if not evidence:
        return None
    moving = frozenset(rank for rank, item in evidence.items() if item.moving)
    return Scene(evidence, _find_world(evidence), moving, time_ns, from_agents=True)


def read_process_state(pid: int, mapped_file: str = "") -> ProcessState:
    """Return the state of a process on this host.

    Args:
        mapped_file: a file that the process has mapped. Without this map the process is "gone", because its number
            belongs to a new process.
    """
    try:
        state = _read_stat(Path(f"/proc/{pid}"))[0]
        is_ended = state in "ZX"
        if is_ended or (mapped_file and mapped_file not in Path(f"/proc/{pid}/maps").read_text()):
            return "gone"
        is_stopped = state in "Tt"  # by a signal, or by a debugger
        return "stopped" if is_stopped else "running"
    except PermissionError:
        return "unknown"
    except (OSError, IndexError):
        return "gone"


def _read_stat(process: Path) -> list[str]:
    """Return the fields of /proc/PID/stat after the command's name, which may contain spaces and parentheses.

    The first field is the letter of the state, the twentieth the start time.
    """
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _list_ranks(status: Path, flight: Path) -> list[int]:
    """Return the ranks with a file in one of the folders."""
    names = [path.name for folder in (status, flight) if folder.is_dir() for path in folder.iterdir()]
    matches = [match for match in map(_RANK_FILE.fullmatch, names) if match]
    # Exactly one group of each match holds the rank.
    ranks = {int(next(group for group in match.groups() if group)) for match in matches}
    return sorted(rank for rank in ranks if rank < MAX_RANKS)


def _list_flight_files(folder: Path, rank: int) -> tuple[Path, ...]:
    """Return the files that may hold a rank's flight record: as the rank writes it, or as torch names it."""
    return folder / f"rank-{rank}.json", folder / f"nccl_trace_rank_{rank}", folder / f"rank-{rank}"


def _read_progress(folder: Path, rank: int) -> object:
    """Return values that change when a rank makes progress; compare them with `==`."""
    record = read_calls(folder / f"rank-{rank}.calls", history=False)
    status = read_status(folder / f"rank-{rank}.status")
    calls = None if record is None else (record.events, record.waiting)
    position = None if status is None else (status.phase, status.step)
    return calls, position


def _watch_progress(folder: Path, before: dict[int, object], deadline: float) -> frozenset[int]:
    """Return the ranks that make progress until `deadline` (time.monotonic); return early if all ranks do."""
    moving: set[int] = set()
    while True:
        moving |= {
            rank for rank, progress in before.items() if rank not in moving and _read_progress(folder, rank) != progress
        }
        if len(moving) == len(before) or time.monotonic() >= deadline:
            return frozenset(moving)
        time.sleep(_POLL_SECONDS)


def _watch_foreign_ranks(
    status: Path, flight: Path, ranks: list[RankEvidence], usage_before: dict[int, dict[int, Usage]], seconds: float
) -> frozenset[int]:
    """Return the ranks of another trainer that save, load or make calls within `seconds`.

    These ranks write no status and may take minutes per step. Their calls are therefore compared in two flight records,
    of which `ranks` contain the first.
    """
    if not ranks:
        return frozenset()
    time.sleep(seconds)
    moving = {item.rank for item in ranks if is_active(usage_before[item.rank], measure_usage(item.own_pid), seconds)}
    # On devices the host launches calls that hang, so new calls prove no progress.
    candidates = [item for item in ranks if item.flight is not None and not item.flight.device and item.answered]
    for item in candidates:
        (flight / f"rank-{item.rank}.json").unlink(missing_ok=True)
    requested = {item.rank for item in candidates if ask_for_flight(status, item.rank)}
    _wait_for_answers(status, flight, signalled=set(), asked_for_flight=set(requested))
    for item in candidates:
        later = _read_flight_record(flight, item)
        if item.rank in requested and later is not None and _count_calls(later) != _count_calls(item.flight):
            moving.add(item.rank)
    return frozenset(moving)


def _count_calls(flight: FlightDump | None) -> dict[str, int]:
    """Return the number of started calls by group."""
    if flight is None:
        return {}
    return {group: counts.started for group, counts in flight.record.groups.items()}


def _read_flight_record(folder: Path, evidence: RankEvidence) -> FlightDump | None:
    """Return the rank's flight record, None if it has none or did not answer."""
    files = [file for file in _list_flight_files(folder, evidence.rank) if file.exists()]
    if not files or evidence.answered is False:
        return None
    try:
        return read_flight(files[0])
    except DataError as error:
        if evidence.record is None:
            raise  # without a record of its own, nothing is known about the rank's calls
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
    """Return the process id of a rank of another trainer; negative if the process has ended.

    Return 0 if the rank wrote no file or runs on another host. At its start the rank writes a file with process id,
    start time of the process and host (resilience/agent/site/sitecustomize.py).
    """
    fields = _read_text(folder / f"rank-{rank}.process").split()
    if len(fields) != 3 or not fields[0].isdigit() or fields[2] != socket.gethostname():
        return 0
    pid = int(fields[0])
    try:
        start_time = _read_stat(Path(f"/proc/{pid}"))[19]
    except (OSError, IndexError):
        return -pid
    if start_time != fields[1]:
        return -pid  # a new process has the number
    return pid


def _find_world(evidence: dict[int, RankEvidence]) -> int:
    """Return the number of ranks: as the ranks recorded it, or at least the highest rank plus one."""
    worlds = [item.record.world for item in evidence.values() if item.record and item.record.world <= MAX_RANKS]
    return max(worlds + [max(evidence) + 1])


def _ask_for_stacks(status: Path, flight: Path, evidence: dict[int, RankEvidence]) -> dict[int, RankEvidence]:
    """Ask every rank on this host for its stack and flight record, and wait for the answers."""
    signalled: set[int] = set()
    asked_for_flight: set[int] = set()
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
            signal_main_thread(item.pid, number)
        if ask_for_flight(status, rank):
            asked_for_flight.add(rank)
        if item.record is None:
            _ask_nccl_watchdog(status / f"nccl-{rank}.pipe")
    unanswered = _wait_for_answers(status, flight, signalled, asked_for_flight)
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
    """Ask a rank for its flight record. Return False if the rank has ended or has no flight recorder.

    Opening the pipe for writing is the request; it fails without a process that reads the pipe.
    """
    try:
        os.close(os.open(status / f"rank-{rank}.ask", os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _wait_for_answers(status: Path, flight: Path, signalled: set[int], asked_for_flight: set[int]) -> set[int]:
    """Wait for stacks and flight records, at most _ANSWER_SECONDS; return the ranks without a stack.

    Args:
        signalled: ranks that were asked for a stack.
        asked_for_flight: ranks that were asked for a flight record.
    """
    deadline = time.monotonic() + _ANSWER_SECONDS
    unanswered = set(signalled)
    missing_flights = set(asked_for_flight)
    stacks = dict.fromkeys(signalled, "")
    while (unanswered or missing_flights) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        before = stacks
        stacks = {rank: _read_text(status / f"rank-{rank}.stack") for rank in unanswered}
        # A stack that did not change since the last reading is complete.
        unanswered -= {rank for rank in unanswered if stacks[rank] and stacks[rank] == before[rank]}
        missing_flights -= {rank for rank in missing_flights if (flight / f"rank-{rank}.json").exists()}
    return unanswered


def _read_text(path: Path) -> str:
    """Return the text of a file of at most _MAX_STACK_BYTES, empty if it cannot be read."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read(_MAX_STACK_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _find_stack_signal(pid: int) -> int:
    """Return the signal on which a rank of another trainer writes its stack; 0 if the rank does not handle the signal.

    A signal without a handler would end the process.
    """
    number = int(signal.SIGRTMIN) + FOREIGN_STACK_SIGNAL
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask_lines = [line for line in lines if line.startswith("SigCgt:")]  # mask of the signals with a handler
        handled_signals = int(mask_lines[0].split()[1], 16)
    except (OSError, ValueError, IndexError):
        return 0
    has_handler = bool(handled_signals >> (number - 1) & 1)
    return number if has_handler else 0


def _ask_nccl_watchdog(pipe: Path) -> None:
    """Ask torch's NCCL watchdog for its flight record, which it writes even if the interpreter hangs."""
    with suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"1\n")
        finally:
            os.close(descriptor)


def signal_main_thread(pid: int, number: int) -> None:
    """Send signal `number` to the main thread of a process. Raises OSError if the process is gone.

    The kernel may deliver a signal for the whole process to another thread while the main thread is inside the kernel,
    for example to a library's thread without a Python stack.
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
    frames = []
    for thread_text in text.split("\nThread "):
        if "MainThread" in thread_text:
            frames += [line.strip() for line in thread_text.splitlines()[1:] if line.strip()]
    return tuple(frames[:_MAX_FRAMES])


def _read_kernel_state(evidence: RankEvidence) -> tuple[str, ...]:
    """Return the state of a main thread that does not answer, and the kernel function in which it waits."""
    process = Path("/proc") / str(evidence.pid)
    try:
        state = _read_stat(process)[0]
    except (OSError, IndexError):
        return ()
    with suppress(OSError):
        function = (process / "wchan").read_text().strip()
        if function not in ("", "0"):  # without a function, or without the right to read it
            return (f"state {state}, in the kernel's {function}",)
    return (f"state {state}",)
