"""What an agent and its fork server say to each other, and what a child says before it ends badly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from msgspec import Meta

from megascale.core.exit_record import NO_RECORD, ExitRecord
from megascale.services.framing import HEAD, ProtocolError, make_head, read_head
from megascale.services.messages import Count, Message, Path, Schema, Text

_LIMIT = 1 << 20  # bytes of an order: an environment and a command line
_Tail = Annotated[str, Meta(max_length=4000)]
_Words = Annotated[str, Meta(max_length=1 << 17)]


class Fork(Message, frozen=True):
    """Fork the process of a rank, with its environment, its command line behind `megascale` and its log."""

    rank: Count
    attempt: Count
    env: Annotated[dict[_Words, _Words], Meta(max_length=4096)]
    words: Annotated[tuple[_Words, ...], Meta(max_length=4096)]
    log: Path


class ForkServerReady(Message, frozen=True):
    """What trainers need is imported."""

    pid: Count


class Broken(Message, frozen=True):
    """What trainers need cannot be imported."""

    error: Text
    record: ExitRecord = NO_RECORD
    tail: _Tail = ""


class Forked(Message, frozen=True):
    """A rank's process."""

    rank: Count
    attempt: Count
    pid: Count


class LastWords(Message, frozen=True):
    """Which exception ends a child."""

    pid: Count
    record: ExitRecord
    error: Text


class Ended(Message, frozen=True):
    """A child has ended; status: its wait status; record, error: its exception, if it reported one."""

    pid: Count
    status: Count
    record: ExitRecord = NO_RECORD
    error: Text = ""


TO_FORK_SERVER = Schema(Fork, limit=_LIMIT)
FROM_FORK_SERVER = Schema(ForkServerReady, Broken, Forked, Ended, limit=_LIMIT)
FROM_CHILD = Schema(LastWords, limit=_LIMIT)


def framed(schema: Schema, message: Message) -> bytes:
    """A message with its head, to be written as it is."""
    data = schema.encode(message)
    return make_head(len(data)) + data


class Frames:
    """Messages out of a stream of bytes, as they come."""

    def __init__(self, schema: Schema) -> None:
        self._schema, self._buffer = schema, bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with `data`; ProtocolError if something else comes."""
        self._buffer += data
        while len(self._buffer) >= HEAD.size:
            size, _, files = read_head(self._buffer[: HEAD.size], self._schema.limit)
            if files:
                raise ProtocolError("open files do not travel here")
            stop = HEAD.size + size
            if len(self._buffer) < stop:
                return
            message = self._schema.decode(bytes(self._buffer[HEAD.size : stop]))
            del self._buffer[:stop]
            yield message
