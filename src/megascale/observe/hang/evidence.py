"""What is known of each rank of a run that stands still: its last words, its process, its stack, its flight recorder.

Reading never depends on the ranks' help: the files are memory-mapped and stay when a process hangs or dies. Ranks on
this host are also asked for their stacks; one that does not answer is told apart from one that was not asked.
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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megascale.core.calls import MOST_RANKS, READER, read_calls
from megascale.core.status import read_status
from megascale.core.untrusted_files import open_regular
from megascale.errors import DataError
from megascale.observe.hang.flight import read_flight
from megascale.observe.hang.scene import ProcessState, RankEvidence, Scene
from megascale.observe.hang.sent_evidence import read_sent

log = logging.getLogger(__name__)

_ANSWER = 3.0  # seconds that the ranks of this host have to answer: inside a driver's call a signal may have to wait
_FRAMES = 8
_STACK_BYTES = 1 << 20  # of a rank's stack that are read
_MOST_RANK = MOST_RANKS - 1


def collect_evidence(
    folder: Path, ask: bool = True, watch_seconds: float = 0.5, ranks: frozenset[int] | None = None
) -> Scene:
    """Read a run folder (or a folder of `rank-N.calls` files).

    Args:
        ask: signal the ranks that live on this host for their stacks and flight records.
        watch_seconds: how long to look for movement, unless all ranks move or one is gone or stopped; 0 does not look.
        only: ranks to look at, None: all that left something.

    Raises:
        DataError: nothing of the kind lies there.
    """
    status_folder = folder / "status" if (folder / "status").is_dir() else folder
    flight_folder = folder / "flight" if (folder / "flight").is_dir() else folder
    ranks = [r for r in _ranks(status_folder, flight_folder) if ranks is None or r in ranks]
    if not ranks:
        raise DataError(
            f"{folder} holds no rank-N.status or rank-N.calls files and no flight-recorder dumps; name a run folder, "
            "such as runs/stdlib, or a folder with copies of its status files"
        )
    if sent := _sent(status_folder, flight_folder, ranks):
        return sent
    before, until = {rank: _events(status_folder, rank) for rank in ranks}, time.monotonic() + watch_seconds
    found = {rank: _read(status_folder, rank) for rank in ranks}
    if ask:
        found = _ask(status_folder, flight_folder, found)
    if any(what.process in ("gone", "stopped") for what in found.values()):
        until = 0.0  # that says more than whether others still move
    moving = frozenset(_watch(status_folder, before, until)) if watch_seconds else frozenset()
    for rank, what in found.items():
        file = next((f for f in _flight_files(flight_folder, rank) if f.exists()), None)
        if file is not None and what.answered is not False:
            try:
                found[rank] = replace(what, flight=read_flight(file))
            except DataError as error:
                if what.record is None:
                    raise
                log.warning("%s; the rank's own record of its calls is used", error)
    found = {rank: replace(what, moving=rank in moving) for rank, what in found.items()}
    return Scene(found, _world(found), moving, time.time_ns())


def _sent(status: Path, flight: Path, ranks: list[int]) -> Scene | None:
    """What agents sent, where no rank writes here."""
    files = [status / f"rank-{rank}.{kind}" for rank in ranks for kind in ("status", "calls")]
    files += [file for rank in ranks for file in _flight_files(flight, rank)]
    if any(file.exists() for file in files):
        return None
    found, when = read_sent(status, ranks)
    moving = frozenset(rank for rank, what in found.items() if what.moving)
    return Scene(found, _world(found), moving, when, sent=True) if found else None


def process_state(pid: int, mark: str = "") -> ProcessState:
    """State of a process here; "gone" too if it does not have the file `mark` mapped (its number was reused)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        letter = text.rpartition(")")[2].split()[0]
        if letter in "ZX" or (mark and mark not in Path(f"/proc/{pid}/maps").read_text()):
            return "gone"
        return "stopped" if letter in "Tt" else "running"
    except PermissionError:
        return "unknown"
    except (OSError, IndexError):
        return "gone"


def _ranks(status: Path, flight: Path) -> list[int]:
    names = [p.name for folder in (status, flight) if folder.is_dir() for p in folder.iterdir()]
    pattern = re.compile(r"rank-(\d+)\.(?:status|calls|json|evidence)|nccl_trace_rank_(\d+)|rank-(\d+)")
    matches = (pattern.fullmatch(name) for name in names)
    ranks = {int(next(g for g in m.groups() if g)) for m in matches if m}
    return sorted(rank for rank in ranks if rank <= _MOST_RANK)


def _flight_files(folder: Path, rank: int) -> tuple[Path, ...]:
    return folder / f"rank-{rank}.json", folder / f"nccl_trace_rank_{rank}", folder / f"rank-{rank}"


def _events(folder: Path, rank: int) -> object:
    record = read_calls(folder / f"rank-{rank}.calls", history=False)
    status = read_status(folder / f"rank-{rank}.status")
    return (record and record.events, record and record.waiting, status and (status.phase, status.step))


def _watch(folder: Path, before: dict[int, object], until: float) -> set[int]:
    """The ranks that come further until then, on the monotonic clock, or as soon as all have."""
    moving: set[int] = set()
    while True:
        moving |= {rank for rank, events in before.items() if rank not in moving and _events(folder, rank) != events}
        if len(moving) == len(before) or time.monotonic() >= until:
            return moving
        time.sleep(0.02)


def _read(folder: Path, rank: int) -> RankEvidence:
    file = folder / f"rank-{rank}.calls"
    record, status = read_calls(file), read_status(folder / f"rank-{rank}.status")
    here = record is not None and record.host == socket.gethostname()[:40]
    process = process_state(record.pid, str(file.resolve())) if here and record else "unknown"
    what = RankEvidence(rank, process, status, record)
    if record and record.waiting and record.waiting.group == READER and record.waiting.pid:
        what = replace(what, reader=process_state(record.waiting.pid) if what.process != "unknown" else "unknown")
    return what


def _world(found: dict[int, RankEvidence]) -> int:
    said = [e.record.world for e in found.values() if e.record and e.record.world <= MOST_RANKS]
    return max([*said, max(found) + 1])


def _ask(status: Path, flight: Path, found: dict[int, RankEvidence]) -> dict[int, RankEvidence]:
    """Ask every rank that runs here for its stack and its flight records; wait a moment for the answers."""
    asked = [r for r, e in found.items() if e.process == "running" and e.record and hasattr(signal, "SIGUSR2")]
    dumping: set[int] = set()
    for rank in asked:
        stack, dump = status / f"rank-{rank}.stack", flight / f"rank-{rank}.json"
        dump.unlink(missing_ok=True)
        with suppress(OSError):
            os.truncate(stack, 0)
            record = found[rank].record
            assert record is not None
            _signal_main_thread(record.pid)
        with suppress(OSError):  # no reader at the other end: the rank has ended or keeps no recorder
            os.close(os.open(status / f"rank-{rank}.ask", os.O_WRONLY | os.O_NONBLOCK))
            dumping.add(rank)
    deadline = time.monotonic() + _ANSWER
    waiting, said = set(asked), dict.fromkeys(asked, "")
    while (waiting or dumping) and time.monotonic() < deadline:
        time.sleep(0.02)
        before = said
        said = {r: _text(status / f"rank-{r}.stack") for r in waiting}
        waiting -= {r for r in waiting if said[r] and said[r] == before[r]}  # nothing follows any more
        dumping -= {r for r in dumping if (flight / f"rank-{r}.json").exists()}
    for rank, what in found.items():
        if rank in asked:
            answered = rank not in waiting
            frames = _frames_of(_text(status / f"rank-{rank}.stack")) if answered else _py_spy(what) or _kernel(what)
            found[rank] = replace(what, answered=answered, stack=frames)
        elif what.process == "stopped":
            found[rank] = replace(what, answered=False, stack=_py_spy(what))
    return found


def _text(stack: Path) -> str:
    try:
        with open(stack, "rb", opener=open_regular) as file:
            return file.read(_STACK_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _signal_main_thread(pid: int) -> None:
    """Ask it for its stack. OSError if the process is gone.

    A signal to the process would go to any thread that may take it while the main one is inside the kernel, and that
    may be a library's, which has no stack of Python's to show.
    """
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)  # Linux, since glibc 2.30
    if tgkill is None:
        os.kill(pid, signal.SIGUSR2)
    elif tgkill(pid, pid, int(signal.SIGUSR2)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _frames_of(text: str) -> tuple[str, ...]:
    """The frames of a stack as the interpreter writes it, innermost first, as `function (file:line)`."""
    frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', text)
    return tuple(f"{function} ({_short(file)}:{line})" for file, line, function in frames[:_FRAMES])


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])


def _py_spy(what: RankEvidence) -> tuple[str, ...]:
    """The stack of a process that cannot answer, where py-spy is installed and may look; else nothing."""
    program = shutil.which("py-spy")
    if program is None or what.record is None:
        return ()
    command = [program, "dump", "--nonblocking", "--pid", str(what.record.pid)]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    threads = [part for part in text.split("\nThread ") if "MainThread" in part]
    return tuple(line.strip() for line in _frames(threads))[:_FRAMES]


def _kernel(what: RankEvidence) -> tuple[str, ...]:
    """What the kernel says of the main thread of a process that does not answer: its state, and where it waits."""
    process = Path("/proc") / str(what.record.pid if what.record else 0)
    try:
        letter = (process / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ()
    with suppress(OSError):
        if (where := (process / "wchan").read_text().strip()) not in ("", "0"):
            return (f"state {letter}, in the kernel's {where}",)
    return (f"state {letter}",)


def _frames(threads: Iterable[str]) -> list[str]:
    return [line for part in threads for line in part.splitlines()[1:] if line.strip()]
