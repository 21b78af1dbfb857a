"""What trainers write on this machine, sent to the driver as it grows: logs, metrics, events, samples, TensorBoard's,
spans, and the run's tokenizer.

Positions are counted by the driver's word (`Kept`): what it has not confirmed is sent again to its successor, and no
more than a window is on its way, so that a slow driver is never flooded and a fast trainer never waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megascale.core.untrusted_files import open_regular
from megascale.resilience.protocol.agent_messages import PIECE, FileData

WINDOW = 1 << 20  # bytes of one file that the driver has not confirmed
AGAIN = 30.0  # seconds after which what was not confirmed is sent again
BEHIND = 4 << 20  # bytes of a log beyond which its middle is left out
# Of rank 0: files of one record a line, and those that are replaced as a whole.
GROWING = ("metrics.jsonl", "events.jsonl", "samples/ledger.jsonl")
REPLACED = ("identity", "kernels.json")
# The run's tokenizer and the files beside it, as large as they are: in pieces, each at its place.
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
BOARD = "tensorboard/events.out.tfevents.*"  # one file a start
# Of a host whose ranks run here: a segment as it grows, then its tables; what is removed here is removed there.
SPANS = ("ranks.jsonl", "*.parquet", "spool-*.bin", "left-*.bin")
SPANS_EVERY = 5.0  # seconds between looks for what spans have grown by: the driver looks for slow machines every 20
TAKEN = "faults/*.injected"  # of any rank: faults that a trainer has taken (resilience/faults/)


_HERE = ""  # among files of spans: ranks have run here


@dataclass
class _Followed:
    """A growing file: what was sent, what of it was confirmed; first: the next piece begins a session or a file."""

    sent: int = 0
    kept: int = 0
    waits: float = 0.0  # since when, on the monotonic clock, the driver has confirmed nothing of what was sent
    inode: int = 0
    first: bool = True


class SentFiles:
    """Args:
    run: the folder that the trainers write to.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._growing: dict[str, _Followed] = {}
        self._replaced: dict[str, tuple[int, int]] = {}  # inode and time of what was sent
        self._board = False  # whether rank 0 has run here
        self._spans: dict[str, bool] = {}  # files of spans, and whether there was more when a piece was taken
        self._spans_next = 0.0

    def follow(self, ranks: Iterable[int]) -> None:
        """These ranks run here now. What others wrote before is sent to its end."""
        for rank in ranks:
            names = [f"logs/rank-{rank}.log", *((*GROWING, *TOKENIZER) if rank == 0 else ())]
            for name in names:
                self._growing.setdefault(name, _Followed())
            self._spans.setdefault(_HERE, False)
            if rank == 0:
                self._replaced = dict.fromkeys(REPLACED, (0, 0)) | self._replaced
                self._board = True

    def begin_session(self) -> None:
        """Another driver listens: what none has confirmed goes to this one."""
        for name, followed in self._growing.items():
            if self._spans.get(name):
                followed.kept = 0  # what has half of a table may be another machine
            followed.sent, followed.first = followed.kept, True
        self._replaced = dict.fromkeys(self._replaced, (0, 0))

    def kept(self, name: str, end: int) -> None:
        """The driver has written a file to this position."""
        followed = self._growing.get(name)
        if followed is not None:
            followed.kept = min(max(followed.kept, end), followed.sent)
            followed.waits = time.monotonic()

    def confirmed(self) -> bool:
        """Whether the driver has written all that was sent."""
        return all(followed.sent == followed.kept for followed in self._growing.values())

    def take(self, all_spans: bool = False) -> list[FileData]:
        """What is to be sent now: of each file at most one piece. Spans come every SPANS_EVERY seconds, or now."""
        for file in self._run.glob(BOARD) if self._board else ():
            self._growing.setdefault(f"{file.parent.name}/{file.name}", _Followed())
        for file in self._run.glob(TAKEN):
            self._replaced.setdefault(f"{file.parent.name}/{file.name}", (0, 0))
        spans = self._take_spans(all_spans)
        growing = [self._next(name, followed) for name, followed in self._growing.items() if name not in self._spans]
        replaced = [self._whole(name) for name in self._replaced]
        return [piece for piece in (*growing, *replaced, *spans) if piece is not None]

    def _take_spans(self, now: bool) -> list[FileData]:
        """Pieces of the hosts' files of spans, and words of those that are gone, once all others are sent."""
        if not self._spans:
            return []
        due = now or time.monotonic() >= self._spans_next
        if due:
            self._spans_next = time.monotonic() + SPANS_EVERY
            for host in sorted(self._run.glob("spans/host=*")):
                for file in (file for kind in SPANS for file in sorted(host.glob(kind))):
                    self._spans.setdefault(f"spans/{host.name}/{file.name}", True)
        found = []
        for name, more in self._spans.items():
            if name != _HERE and (due or more):
                piece = self._next(name, self._growing.setdefault(name, _Followed()))
                self._spans[name] = piece is not None and piece.has_more
                found += [piece] if piece is not None else []
        if due and not found:
            for name in [name for name in self._spans if name != _HERE and not (self._run / name).exists()]:
                del self._spans[name], self._growing[name]
                found.append(FileData(name, 0, b"", first=True))
        return found

    def _next(self, name: str, followed: _Followed) -> FileData | None:
        lines = name.endswith(".jsonl")
        try:
            with open(self._run / name, "rb", opener=open_regular) as file:
                about = os.fstat(file.fileno())
                if about.st_ino != followed.inode or about.st_size < followed.sent:  # a resumed run writes it anew
                    emptied = followed.sent > 0 and not about.st_size
                    followed.sent = followed.kept = 0
                    followed.inode, followed.first = about.st_ino, True
                    if emptied:
                        return FileData(name, 0, b"", first=True)
                if followed.sent == followed.kept:
                    followed.waits = time.monotonic()
                elif time.monotonic() - followed.waits > AGAIN:  # it was lost, or found no place
                    followed.sent, followed.first, followed.waits = followed.kept, True, time.monotonic()
                room = min(PIECE, WINDOW - (followed.sent - followed.kept))
                if about.st_size <= followed.sent or room <= 0:
                    return None
                left_out = 0
                if name.startswith("logs/") and about.st_size - followed.sent > BEHIND:
                    left_out = about.st_size - followed.sent - BEHIND // 2
                    followed.sent = followed.kept = followed.sent + left_out
                file.seek(followed.sent)
                data = file.read(room)
        except OSError:
            return None
        if lines and (b"\n" in data or len(data) < PIECE):  # a longer line than a piece is no record: it goes in parts
            data = data[: data.rfind(b"\n") + 1]  # a last line without its end is still being written
        if not data:
            return None
        more = about.st_size > followed.sent + len(data)
        piece = FileData(name, followed.sent, data, first=followed.first, left_out=left_out, has_more=more)
        followed.sent += len(data)
        followed.first = False
        return piece

    def _whole(self, name: str) -> FileData | None:
        try:
            with open(self._run / name, "rb", opener=open_regular) as file:
                about = os.fstat(file.fileno())
                seen = (about.st_ino, about.st_mtime_ns)
                if seen == self._replaced[name] or about.st_size > PIECE:
                    return None
                self._replaced[name] = seen
                return FileData(name, 0, file.read(PIECE), replaces_file=True)
        except OSError:
            return None
