"""Files of trainers that do not see the run folder: agents send pieces of files, and receive faults to inject.

A thread writes the received pieces into the run folder, as if the trainers wrote there. The queue of the thread is
bounded. A piece that finds no room is not confirmed, and its agent sends the piece again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import structs

from megascale.core import json_lines
from megascale.core.failure import FailureLog
from megascale.core.json_lines import MAX_LINE_BYTES
from megascale.core.untrusted_files import open_regular, read_bounded
from megascale.observe.hang.scene import get_evidence_file
from megascale.resilience.driver.nodes import Node, Nodes
from megascale.resilience.driver.state.job import Job
from megascale.resilience.protocol.agent_messages import FAULT_CHARACTERS, FAULT_FILE, Evidence, FileData

log = logging.getLogger("megascale.driver")
_QUEUE_LIMIT = 1024  # largest number of pieces that wait to be written
_JOIN_SECONDS = 10.0  # for the writing thread to end
_MAX_NODE_CHARACTERS = 80  # of a node's name in the name of a folder
_TAIL_BYTES = 1 << 20  # last bytes of a file, which are searched for lines that an earlier driver has written
# Names of files in the run folder. A request for a fault gets the suffix .injected once a trainer has taken it.
_TAKEN_FAULT_FILE = r"faults/[0-9]{20}-[0-9a-f]{6}\.injected"
_TOKENIZER_FILE = r"(?:tokenizer|tokenizer_config|special_tokens_map|generation_config)\.json|chat_template\.jinja"
_TENSORBOARD_FILE = r"tensorboard/events\.out\.tfevents\.[\w.-]{1,150}"
# Files of a host's span service (observe/store/). The groups are the folder of the host and the name of the file.
_SPANS_FILE = re.compile(
    r"spans/(host=\d{1,6})/((?:rollups|spans|clocks|counters)-\d{6,9}(?:-\d{6,9})?\.parquet|spool-\d{6,9}\.bin"
    r"|left-[0-9a-f]{16}\.bin|ranks\.jsonl)"
)
_PARQUET_MAGIC = b"PAR1"  # the first and the last bytes of a Parquet table
# Names of the other files that agents may write into the run folder.
_ACCEPTED_FILE = re.compile(
    r"logs/rank-\d{1,9}\.log|metrics\.jsonl|events\.jsonl|samples/ledger\.jsonl|identity|kernels\.json"
    rf"|{_TENSORBOARD_FILE}|{_TAKEN_FAULT_FILE}|{_TOKENIZER_FILE}"
)
# Files of lines in the order of steps, which trainers that resume from an earlier step rewrite.
_FILES_BY_STEP = ("metrics.jsonl", "samples/ledger.jsonl")

Confirm = Callable[[str, int], None]  # called with (name of the file, end of the written piece in bytes)


class ReceivedFiles:
    """Writes received pieces of files into the run folder.

    Args:
        read_settings: returns the configuration in force as TOML, which the run folder stores.

    Attributes:
        taken_faults: names of the files in RUN/faults whose fault a trainer has taken.
    """

    def __init__(self, run: Path, read_settings: Callable[[], str]) -> None:
        self._run = run
        self._read_settings = read_settings
        # A piece to write, an event to set once all pieces before it are written, or None to end the thread.
        self._queue: queue.Queue[tuple[FileData, Confirm] | threading.Event | None] = queue.Queue(_QUEUE_LIMIT)
        self._thread: threading.Thread | None = None
        self.taken_faults: set[str] = set()
        self._step_files = {name: _StepFile() for name in _FILES_BY_STEP}

    def receive(self, piece: FileData, confirm: Confirm, node: str = "") -> bool:
        """Queue a piece of a file; return False if the file is not accepted or the queue is full.

        Args:
            piece: the bytes, and their offset in the file.
            confirm: called in the writing thread once the piece is written.
            node: name of the sending node.
        """
        spans_match = _SPANS_FILE.fullmatch(piece.name)
        if spans_match is not None:
            # After a recovery another node may run the same host of the job, and each node numbers its files from 0. So
            # each node has a folder of its own.
            host_folder, file_name = spans_match.groups()
            node_text = re.sub(r"[^A-Za-z0-9_.-]", "_", node)[:_MAX_NODE_CHARACTERS]
            renamed = structs.replace(piece, name=f"spans/{host_folder}@{node_text}/{file_name}")
            # The agent knows the file by its original name.
            return self._enqueue((renamed, lambda _, end: confirm(piece.name, end)))
        if not _ACCEPTED_FILE.fullmatch(piece.name):
            return False
        if re.fullmatch(_TAKEN_FAULT_FILE, piece.name):
            self.taken_faults.add(Path(piece.name).with_suffix(".json").name)
        return self._enqueue((piece, confirm))

    def store_evidence(self, evidence: Evidence) -> None:
        """Queue the evidence about a rank that does not see the run folder, for observe/hang/."""
        if not evidence.data:
            return
        name = get_evidence_file(evidence.rank)  # relative to the run folder
        piece = FileData(name, start=0, data=evidence.data, replaces_file=True)
        # The agent does not wait for a confirmation of evidence.
        self._enqueue((piece, lambda name, end: None))

    def flush(self, seconds: float) -> bool:
        """Wait until all received pieces are written; return False after `seconds` or if the queue is full.

        The event loop must not call this, since it blocks.
        """
        if self._thread is None:
            return True
        is_written = threading.Event()
        return self._enqueue(is_written) and is_written.wait(seconds)

    def close(self) -> None:
        """Write the received pieces, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_JOIN_SECONDS)

    def _enqueue(self, work: tuple[FileData, Confirm] | threading.Event) -> bool:
        """Queue work for the thread, which the first call starts. Return False if the queue is full."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_queued, name="received files", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            return False
        return True

    def _write_queued(self) -> None:
        """Write the queued pieces until `close`. Runs in the thread."""
        failures = FailureLog(log, "writing a received file")
        while (work := self._queue.get()) is not None:
            if isinstance(work, threading.Event):
                work.set()
                continue
            piece, confirm = work
            try:
                self._write(piece)
                confirm(piece.name, piece.start + len(piece.data))
            except OSError as error:  # such as a full disk; without a confirmation the agent sends the piece again
                log.warning("%s of the run folder was not written: %s", piece.name, error)
            except Exception as error:
                failures.note(error, f"{piece.name} is not confirmed, so that its agent sends it again")

    def _write(self, piece: FileData) -> None:
        """Write a piece into the run folder, in the way that its kind of file needs."""
        name = piece.name
        file = self._run / name
        if re.fullmatch(_TAKEN_FAULT_FILE, name):
            with contextlib.suppress(FileNotFoundError):  # The agent may report a taken fault twice.
                os.replace(file.with_suffix(".json"), file)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        if piece.replaces_file:
            _replace_file(file, piece.data)
            # A run gets its identity once a start was accepted, and its settings are then those of the run.
            if name == "identity":
                _replace_file(self._run / "config.toml", self._read_settings().encode())
        elif name.startswith("spans/") and not name.endswith(".jsonl"):
            _write_spans(file, piece)
        elif name in self._step_files:
            self._step_files[name].write(file, piece)
        elif name.endswith(".jsonl"):
            _append_lines(file, piece)
        elif re.fullmatch(rf"{_TENSORBOARD_FILE}|{_TOKENIZER_FILE}", name):
            _write_in_place(file, piece)
        else:
            _append_text(file, piece)


def _mark_gap(piece: FileData) -> bytes:
    """Return the bytes of a piece, with a line about skipped bytes before them."""
    if not piece.skipped_bytes:
        return piece.data
    return f"[{piece.skipped_bytes} bytes left out]\n".encode() + piece.data


def _append_text(file: Path, piece: FileData) -> None:
    """Append a piece of a log. A repeated piece appears twice."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, _mark_gap(piece))
    finally:
        os.close(handle)


def _write_in_place(file: Path, piece: FileData) -> None:
    """Write a piece at its offset, so that a repeated piece changes nothing."""
    data = _mark_gap(piece)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(handle, data, piece.start)
        if not piece.has_more and re.fullmatch(_TOKENIZER_FILE, piece.name):  # It may replace a longer file.
            os.ftruncate(handle, piece.start + len(data))
    finally:
        os.close(handle)


def _append_lines(file: Path, piece: FileData) -> None:
    """Append a piece of whole lines. The first piece that an agent sends may repeat lines, so append only new ones."""
    lines = _select_new_lines(file, piece.data) if piece.first else piece.data
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        json_lines.append_lines(handle, lines)
    finally:
        os.close(handle)


def _write_spans(file: Path, piece: FileData) -> None:
    """Write a piece of a host's spans at its offset. A table gets its name once it is complete.

    A piece without data means that the node has removed the file.
    """
    is_table = file.suffix == ".parquet"
    target = file.with_suffix(".received") if is_table else file
    if not piece.data:
        target.unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        return
    if is_table and file.exists():
        return
    handle = os.open(target, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.pwrite(handle, piece.data, piece.start)
        is_complete = is_table and not piece.has_more
        if is_complete and not (piece.data.endswith(_PARQUET_MAGIC) and os.pread(handle, 4, 0) == _PARQUET_MAGIC):
            raise OSError(errno.EIO, "the table is incomplete")
    finally:
        os.close(handle)
    if is_complete:
        os.replace(target, file)


class _StepFile:
    """A file of lines in the order of steps. Trainers that resume from an earlier step rewrite the end of the file.

    A piece that the file has already changes nothing. So an agent that sends a file again and dies meanwhile removes
    nothing. The first differing piece cuts the file at its offset.
    """

    def __init__(self) -> None:
        # Position in this file at which the sender's file begins, None if unknown. A trainer that resumes on a node
        # without the run folder begins a file of its own there.
        self._offset: int | None = None

    def write(self, path: Path, piece: FileData) -> None:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
            size = _find_end_of_lines(file)
            if piece.first and not piece.start and piece.data:
                self._offset = _find_step(file, _parse_step(piece.data.partition(b"\n")[0]), size)
            is_resumed = piece.first and piece.start > 0  # The sender was started again within the file.
            if self._offset is None or self._offset + piece.start > size or is_resumed:
                # An earlier driver received the bytes before the piece, so where the piece belongs is unknown.
                file.seek(size)
                file.truncate()
                file.write(_select_new_lines(path, piece.data))
                self._offset = max(0, file.tell() - piece.start - len(piece.data))
                return
            position = self._offset + piece.start
            file.seek(position)
            existing = file.read(len(piece.data))
            if existing != piece.data:
                file.truncate(position)  # before writing, so that concurrent readers see whole lines
                file.seek(position)
                file.write(piece.data)
            elif not piece.has_more:
                file.truncate(position + len(existing))


def _find_end_of_lines(file: BinaryIO) -> int:
    """Return the end of the last whole line. A crash may have cut the line that follows."""
    size = file.seek(0, os.SEEK_END)
    start = size
    while start:
        stop = start
        start = max(0, start - _TAIL_BYTES)
        file.seek(start)
        newline = file.read(stop - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
    return 0


def _find_step(file: BinaryIO, step: int | None, size: int) -> int:
    """Return the position of the first line of `step` or of a later step, `size` if there is none."""
    if step is None:
        return size
    position = file.seek(0)
    line_start = position
    while line := file.readline(MAX_LINE_BYTES):
        # A line above the limit is read in several parts, and none of them has a record. Only a part at the begin of a
        # line is parsed.
        if line_start == position:
            line_step = _parse_step(line)
            if line_step is not None and line_step >= step:
                return position
        position += len(line)
        if line.endswith(b"\n"):
            line_start = position
    return size


def _parse_step(line: bytes) -> int | None:
    """Return the step of a JSON line, None if the line has none."""
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return int(json.loads(line)["step"])
    return None


def _replace_file(file: Path, data: bytes) -> None:
    """Replace a file's contents atomically."""
    temporary = file.with_name(file.name + ".received")
    temporary.write_bytes(data)
    os.replace(temporary, file)


def _select_new_lines(file: Path, data: bytes) -> bytes:
    """Return the lines of `data` that the end of the file lacks: an earlier driver may have written the others."""
    try:
        with open(file, "rb", opener=open_regular) as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - _TAIL_BYTES))
            existing = set(opened.read().splitlines(keepends=True))
    except OSError:
        return data
    return b"".join(line for line in data.splitlines(keepends=True) if line not in existing)


@dataclass(kw_only=True, eq=False)
class FaultForwarding:
    """Forwards the faults of `megascale faults inject` to agents whose trainers do not see the run folder.

    A fault stays in RUN/faults until its rank has taken it. The rank's agent reports this as a file with the suffix
    .injected. A fault is sent once per attempt, to the node that has the rank then, because an agent forgets the faults
    of an attempt at the next start.

    Attributes:
        taken_faults: names of the files whose fault a trainer has taken, including files that no longer exist.
    """

    run: Path
    job: Job
    nodes: Nodes
    taken_faults: Container[str]
    _sent: set[tuple[str, int]] = field(default_factory=set, init=False)  # (name of the file, attempt)

    def send_new_faults(self) -> None:
        """Send the faults that were requested since the last call."""
        attempt = self.job.state.attempt
        for file in sorted((self.run / "faults").glob("*.json")):
            if file.name in self.taken_faults or (file.name, attempt) in self._sent:
                continue
            if not re.fullmatch(FAULT_FILE, file.name):
                continue
            fault = _read_fault(file)
            if fault is None:
                continue
            node = self._find_node(fault)
            if node is not None and node.channel is not None:
                self._sent.add((file.name, attempt))
                self.nodes.order(node, do="inject", name=file.name, fault=json.dumps(fault))

    def _find_node(self, fault: dict[str, Any]) -> Node | None:
        """Return the node with the trainers that a fault is for, None if no node has them now."""
        state = self.job.state
        name = fault.get("node")
        if not name:
            holders = [holder for holder in state.placement if fault.get("rank") in state.ranks(holder)]
            name = holders[0] if holders else None
        return self.nodes[name] if name in state.placement else None


def _read_fault(file: Path) -> dict[str, Any] | None:
    """Return a requested fault, None if the file is unreadable."""
    try:
        fault = json.loads(read_bounded(file, FAULT_CHARACTERS))
    except (OSError, ValueError, RecursionError):
        return None
    return fault if isinstance(fault, dict) else None
