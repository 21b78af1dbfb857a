"""Writes into the run folder what agents on other machines send of their trainers' files, in a thread of its own.

The run folder then tells the whole story, as where trainers write there themselves. The queue is bounded: what finds no
place is not confirmed, and its agent sends it again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from msgspec import structs

from megascale.core import json_lines
from megascale.core.failure import FailureLog
from megascale.core.json_lines import MAX_LINE_BYTES
from megascale.core.untrusted_files import open_regular
from megascale.observe.hang.scene import evidence_file
from megascale.resilience.protocol.agent_messages import Evidence, FileData

log = logging.getLogger("megascale.driver")
_QUEUE = 1024  # pieces
_TAIL = 1 << 20  # bytes of a file in which lines that come again are looked for
_TAKEN = r"faults/[0-9]{20}-[0-9a-f]{6}\.injected"
_TOKENIZER = r"(?:tokenizer|tokenizer_config|special_tokens_map|generation_config)\.json|chat_template\.jinja"
_BOARD = r"tensorboard/events\.out\.tfevents\.[\w.-]{1,150}"
_SPANS = re.compile(
    r"spans/(host=\d{1,6})/((?:rollups|spans|clocks|counters)-\d{6,9}(?:-\d{6,9})?\.parquet|spool-\d{6,9}\.bin"
    r"|left-[0-9a-f]{16}\.bin|ranks\.jsonl)"
)
_PARQUET = b"PAR1"  # the first and the last bytes
_NAMES = re.compile(
    r"logs/rank-\d{1,9}\.log|metrics\.jsonl|events\.jsonl|samples/ledger\.jsonl|identity|kernels\.json"
    rf"|{_BOARD}|{_TAKEN}|{_TOKENIZER}"
)
_BY_STEP = ("metrics.jsonl", "samples/ledger.jsonl")

Confirm = Callable[[str, int], None]


class ReceivedFiles:
    """Args:
    run: the run folder.
    settings: gives the configuration in force, as TOML, which a run folder keeps.

    Attributes:
        taken: names of the faults in RUN/faults that trainers have taken.
    """

    def __init__(self, run: Path, settings: Callable[[], str]) -> None:
        self._run, self._settings = run, settings
        self._queue: queue.Queue[tuple[FileData, Confirm] | threading.Event | None] = queue.Queue(_QUEUE)
        self._thread: threading.Thread | None = None
        self.taken: set[str] = set()
        self._steps = {name: _StepLines() for name in _BY_STEP}

    def take(self, piece: FileData, confirm: Confirm, node: str = "") -> bool:
        """Have a piece of a file of `node` written; `confirm(name, end)` is called in the thread once it is. False: it
        is not wanted, or there is no place for it now."""
        if spans := _SPANS.fullmatch(piece.name):
            # A host of the job may have been several nodes, each with numbers of its own.
            there = f"spans/{spans[1]}@{re.sub(r'[^A-Za-z0-9_.-]', '_', node)[:80]}/{spans[2]}"
            return self._put((structs.replace(piece, name=there), lambda _, end: confirm(piece.name, end)))
        if not _NAMES.fullmatch(piece.name):
            return False
        if re.fullmatch(_TAKEN, piece.name):
            self.taken.add(Path(piece.name).with_suffix(".json").name)
        return self._put((piece, confirm))

    def keep(self, evidence: Evidence) -> None:
        """Have what an agent knows of a rank that writes elsewhere lie in the run folder (observe/hang/)."""
        if evidence.data:
            self._put(
                (FileData(evidence_file(evidence.rank), 0, evidence.data, replaces_file=True), lambda name, end: None)
            )

    def flush(self, seconds: float) -> bool:
        """Wait until what has come is written; whether it was in time. For other threads than the loop's."""
        done = threading.Event()
        return self._thread is None or (self._put(done) and done.wait(seconds))

    def _put(self, item: tuple[FileData, Confirm] | threading.Event) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="received files", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Write what has come, and end."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(10.0)

    def _work(self) -> None:
        failures = FailureLog(log, "writing a received file")
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            piece, confirm = item
            try:
                self._write(piece)
                confirm(piece.name, piece.start + len(piece.data))
            except OSError as error:
                log.warning("%s of the run folder was not written: %s", piece.name, error)
            except Exception as error:
                failures.note(error, f"{piece.name} is not confirmed, so that its agent sends it again")

    def _write(self, piece: FileData) -> None:
        file = self._run / piece.name
        if re.fullmatch(_TAKEN, piece.name):
            with contextlib.suppress(FileNotFoundError):  # told before
                os.replace(file.with_suffix(".json"), file)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        data = piece.data
        if piece.replaces_file:
            _replace(file, data)
            if piece.name == "identity":  # a start was accepted
                _replace(self._run / "config.toml", self._settings().encode())
            return
        if piece.name.startswith("spans/") and not piece.name.endswith(".jsonl"):
            return _write_spans(file, piece)
        if piece.name in _BY_STEP:
            return self._steps[piece.name].write(file, piece)
        if piece.name.endswith(".jsonl"):
            return _append_lines(file, piece)
        if piece.skipped_bytes:
            data = f"[{piece.skipped_bytes} bytes left out]\n".encode() + data
        # Records of bytes: a piece that comes again must change nothing.
        in_place = re.fullmatch(rf"{_BOARD}|{_TOKENIZER}", piece.name)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | (0 if in_place else os.O_APPEND), 0o644)
        try:
            if in_place:
                os.pwrite(handle, data, piece.start)
                if not piece.has_more and re.fullmatch(_TOKENIZER, piece.name):
                    os.ftruncate(handle, piece.start + len(data))
            else:
                os.write(handle, data)
        finally:
            os.close(handle)


def _append_lines(file: Path, piece: FileData) -> None:
    """Append a piece of whole lines; of the first piece of a session, those that are not there yet."""
    lines = _new_lines(file, piece.data) if piece.first else piece.data
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        json_lines.append_lines(handle, lines)
    finally:
        os.close(handle)


def _write_spans(file: Path, piece: FileData) -> None:
    """A piece of a host's spans, at its place: one that comes again changes nothing. A table is there once it is
    whole."""
    table = file.suffix == ".parquet"
    there = file.with_suffix(".received") if table else file
    if not piece.data:
        there.unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        return
    if table and file.exists():
        return
    handle = os.open(there, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.pwrite(handle, piece.data, piece.start)
        whole = table and not piece.has_more
        if whole and not (piece.data.endswith(_PARQUET) and os.pread(handle, 4, 0) == _PARQUET):
            raise OSError(5, "it is no whole table")
    finally:
        os.close(handle)
    if whole:
        os.replace(there, file)


class _StepLines:
    """A file of lines by step, which trainers that go back write anew, on this machine or another.

    What is there and comes again is left as it is: an agent that dies before it has sent all of it again takes nothing
    away. From the first byte on that is another, the file is what is sent.
    """

    def __init__(self) -> None:
        self._base: int | None = None  # position of the sender's file in this one, once known

    def write(self, file: Path, piece: FileData) -> None:
        """Take a piece in."""
        with open(os.open(file, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as there:
            size = _end_of_lines(there)
            if piece.first and not piece.start and piece.data:
                self._base = _position(there, _step(piece.data.partition(b"\n")[0]), size)
            if self._base is None or self._base + piece.start > size or (piece.first and piece.start):
                # From the midst of a file that a driver before knew.
                there.seek(size)
                there.truncate()
                there.write(_new_lines(file, piece.data))
                self._base = max(0, there.tell() - piece.start - len(piece.data))
                return
            at = self._base + piece.start
            there.seek(at)
            known = there.read(len(piece.data))
            if known == piece.data:
                if not piece.has_more:
                    there.truncate(at + len(known))
            else:
                there.truncate(at)  # first: whoever reads meanwhile sees whole lines
                there.seek(at)
                there.write(piece.data)


def _end_of_lines(there: BinaryIO) -> int:
    """Return where the last whole line ends: what follows was cut by a crash."""
    size = there.seek(0, os.SEEK_END)
    start = size
    while start:
        stop, start = start, max(0, start - _TAIL)
        there.seek(start)
        newline = there.read(stop - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
    return 0


def _position(there: BinaryIO, step: int | None, size: int) -> int:
    """Where the first line of this step or a later one begins; the end of the file if none does."""
    if step is None:
        return size
    at = begin = there.seek(0)
    while line := there.readline(MAX_LINE_BYTES):
        line_step = _step(line) if begin == at else None  # a longer line comes in parts, and is no record
        if line_step is not None and line_step >= step:
            return at
        at += len(line)
        if line.endswith(b"\n"):
            begin = at
    return size


def _replace(file: Path, data: bytes) -> None:
    temporary = file.with_name(file.name + ".received")
    temporary.write_bytes(data)
    os.replace(temporary, file)


def _step(line: bytes) -> int | None:
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return int(json.loads(line)["step"])
    return None


def _new_lines(file: Path, data: bytes) -> bytes:
    """The lines that are not at the end of the file yet: a driver before may have written and not confirmed them."""
    try:
        with open(file, "rb", opener=open_regular) as there:
            there.seek(max(0, there.seek(0, os.SEEK_END) - _TAIL))
            known = set(there.read().splitlines(keepends=True))
    except OSError:
        return data
    return b"".join(line for line in data.splitlines(keepends=True) if line not in known)
