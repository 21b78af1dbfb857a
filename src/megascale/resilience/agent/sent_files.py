"""Files of trainers on a machine without the shared run folder, which the agent sends to the driver as they grow.

These are logs, metrics, events, samples, TensorBoard's files, spans, and the run's tokenizer. The driver confirms the
data that it has stored (`FileStored`). Unconfirmed data is sent again to a new driver. Of each file at most
WINDOW_BYTES are unconfirmed, so that a slow driver is not flooded. Trainers never wait for the driver.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megascale.core.untrusted_files import open_regular
from megascale.resilience.protocol.agent_messages import PIECE_BYTES, FileData

WINDOW_BYTES = 1 << 20  # largest number of unconfirmed bytes per file
RESEND_SECONDS = 30.0  # data without a confirmation for this long is sent again
LOG_BACKLOG_BYTES = 4 << 20  # If a log has more unsent bytes, only the last half of this number is sent.
# Files of rank 0 with one record per line.
GROWING_FILES = ("metrics.jsonl", "events.jsonl", "samples/ledger.jsonl")
# Files of rank 0 that are sent as a whole.
REPLACED_FILES = ("identity", "kernels.json")
# The run's tokenizer and the files next to it. They may be large, so they are sent like growing files.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
TENSORBOARD_PATTERN = "tensorboard/events.out.tfevents.*"  # one file per start
# Spans of a host. A segment (spool) grows and is then converted to tables (Parquet). If a file is removed here, the
# driver removes it in the run folder.
SPAN_PATTERNS = ("ranks.jsonl", "*.parquet", "spool-*.bin", "left-*.bin")
SPANS_INTERVAL = 5.0  # seconds between reads of spans; the driver searches them for slow machines every 20 s
FAULT_PATTERN = "faults/*.injected"  # faults that a trainer has executed (resilience/faults/)


@dataclass
class _GrowingFile:
    """State of a growing file.

    Attributes:
        sent, confirmed: number of bytes that were sent, and that the driver has stored.
        confirmed_at: time.monotonic() at the last confirmation, or at the last check while all data was confirmed.
        inode: inode of the file that is being sent.
        starts_anew: whether the next message is the first of a session or of a truncated file.
    """

    sent: int = 0
    confirmed: int = 0
    confirmed_at: float = 0.0
    inode: int = 0
    starts_anew: bool = True

    def restart(self, inode: int) -> None:
        """Send the file from its start."""
        self.sent = 0
        self.confirmed = 0
        self.inode = inode
        self.starts_anew = True

    def resend_if_lost(self) -> None:
        """Send unconfirmed data again after RESEND_SECONDS, because it was lost or the driver's disk was full."""
        current_time = time.monotonic()
        if self.sent == self.confirmed:
            self.confirmed_at = current_time
        elif current_time - self.confirmed_at > RESEND_SECONDS:
            self.sent = self.confirmed
            self.starts_anew = True
            self.confirmed_at = current_time


class SentFiles:
    """Files to send from the folder to which trainers write."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._growing: dict[str, _GrowingFile] = {}
        self._replaced: dict[str, tuple[int, int]] = {}  # inode and modification time of the sent version, by name
        self._has_ranks = False  # whether a rank has run here, so that there may be spans
        self._has_rank_0 = False  # whether rank 0 has run here, which writes the files of the whole run
        self._has_more_spans: dict[str, bool] = {}  # by name of a span file: whether more of its data is to be sent
        self._next_spans_time = 0.0  # when spans are read next, on the monotonic clock

    def follow(self, ranks: Iterable[int]) -> None:
        """Send the files of these ranks too, besides the remaining data of earlier ranks."""
        for rank in ranks:
            self._has_ranks = True
            self._growing.setdefault(f"logs/rank-{rank}.log", _GrowingFile())
            if rank == 0:
                self._has_rank_0 = True
                for name in GROWING_FILES + TOKENIZER_FILES:
                    self._growing.setdefault(name, _GrowingFile())
                for name in REPLACED_FILES:
                    self._replaced.setdefault(name, (0, 0))

    def begin_session(self) -> None:
        """Send all unconfirmed data again, to another driver."""
        for name, file in self._growing.items():
            if self._has_more_spans.get(name):
                file.confirmed = 0  # the new driver may be on another machine and lack the start of the file
            file.sent = file.confirmed
            file.starts_anew = True
        self._replaced = dict.fromkeys(self._replaced, (0, 0))

    def confirm(self, name: str, end: int) -> None:
        """Record that the driver has stored a file up to an offset."""
        file = self._growing.get(name)
        if file is not None:
            file.confirmed = min(max(file.confirmed, end), file.sent)
            file.confirmed_at = time.monotonic()

    def is_confirmed(self) -> bool:
        """Return whether the driver has stored all data that was sent."""
        return all(file.sent == file.confirmed for file in self._growing.values())

    def take(self, all_spans: bool = False) -> list[FileData]:
        """Return messages with the next data of each file.

        Args:
            all_spans: whether to read spans even before SPANS_INTERVAL seconds have passed.
        """
        if self._has_rank_0:
            for path in self._run.glob(TENSORBOARD_PATTERN):
                self._growing.setdefault(f"{path.parent.name}/{path.name}", _GrowingFile())
        for path in self._run.glob(FAULT_PATTERN):
            self._replaced.setdefault(f"{path.parent.name}/{path.name}", (0, 0))
        span_messages = self._take_spans(all_spans)
        messages = []
        for name, file in self._growing.items():
            if name not in self._has_more_spans:
                messages.append(self._read_new_data(name, file))
        messages += [self._read_small_file(name) for name in self._replaced]
        return [message for message in messages if message is not None] + span_messages

    def _take_spans(self, all_spans: bool) -> list[FileData]:
        """Return messages with data of span files. Once all data is sent, return messages that remove deleted files."""
        if not self._has_ranks:
            return []
        is_due = all_spans or time.monotonic() >= self._next_spans_time
        if is_due:
            self._next_spans_time = time.monotonic() + SPANS_INTERVAL
            for host in sorted(self._run.glob("spans/host=*")):
                for pattern in SPAN_PATTERNS:
                    for path in sorted(host.glob(pattern)):
                        self._has_more_spans.setdefault(f"spans/{host.name}/{path.name}", True)
        messages = []
        for name, has_more in self._has_more_spans.items():
            if is_due or has_more:
                message = self._read_new_data(name, self._growing.setdefault(name, _GrowingFile()))
                self._has_more_spans[name] = message is not None and message.has_more
                if message is not None:
                    messages.append(message)
        if is_due and not messages:
            removed_names = [name for name in self._has_more_spans if not (self._run / name).exists()]
            for name in removed_names:
                del self._has_more_spans[name]
                del self._growing[name]
                messages.append(FileData(name, 0, b"", first=True))  # the driver removes its empty copy of spans
        return messages

    def _read_new_data(self, name: str, state: _GrowingFile) -> FileData | None:
        """Return a message with new data of a growing file, or None if there is none or the window is full."""
        try:
            with open(self._run / name, "rb", opener=open_regular) as file:
                return self._read_from(file, name, state)
        except OSError:
            return None

    def _read_from(self, file: BinaryIO, name: str, state: _GrowingFile) -> FileData | None:
        """Return a message with the next piece of an open file (see `_read_new_data`)."""
        stat = os.fstat(file.fileno())
        if stat.st_ino != state.inode or stat.st_size < state.sent:  # a resumed run has rewritten the file
            was_truncated = state.sent > 0 and not stat.st_size
            state.restart(stat.st_ino)
            if was_truncated:
                return FileData(name, 0, b"", first=True)  # the driver truncates its copy too
        state.resend_if_lost()
        max_bytes = min(PIECE_BYTES, WINDOW_BYTES - (state.sent - state.confirmed))
        if stat.st_size <= state.sent or max_bytes <= 0:
            return None
        skipped_bytes = 0
        if name.startswith("logs/") and stat.st_size - state.sent > LOG_BACKLOG_BYTES:
            skipped_bytes = stat.st_size - state.sent - LOG_BACKLOG_BYTES // 2
            state.sent += skipped_bytes
            state.confirmed = state.sent
        file.seek(state.sent)
        data = file.read(max_bytes)
        # Send only complete records: a last line without an end is still being written. A line that is longer than
        # PIECE_BYTES is not a record and is sent in several messages.
        if name.endswith(".jsonl") and (b"\n" in data or len(data) < PIECE_BYTES):
            data = data[: data.rfind(b"\n") + 1]
        if not data:
            return None
        message = FileData(
            name,
            state.sent,
            data,
            first=state.starts_anew,
            skipped_bytes=skipped_bytes,
            has_more=stat.st_size > state.sent + len(data),
        )
        state.sent += len(data)
        state.starts_anew = False
        return message

    def _read_small_file(self, name: str) -> FileData | None:
        """Return a message with a whole file if it has changed since it was sent, or None."""
        try:
            with open(self._run / name, "rb", opener=open_regular) as file:
                stat = os.fstat(file.fileno())
                version = (stat.st_ino, stat.st_mtime_ns)
                if version == self._replaced[name] or stat.st_size > PIECE_BYTES:
                    return None
                self._replaced[name] = version
                return FileData(name, 0, file.read(PIECE_BYTES), replaces_file=True)
        except OSError:
            return None
