"""JSON values of a file one by one: the elements of a list, or consecutive values."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_SPACE = " \t\r\n"
# An error this close to the end of the buffer may only mean that a value goes on; a string may begin long before it.
_NEAR_END = 32  # characters


class JsonValue(NamedTuple):
    """A value, its membership in a list, and the bytes of input read since the value before."""

    value: Any
    is_element: bool
    used: int


class TooLongError(ValueError):
    """A value is longer than the limit."""


def read_values(chunks: Iterable[tuple[bytes, int]], limit: int) -> Iterator[JsonValue]:
    """Yield the values of a file; of each list at the top its elements.

    Memory holds one value at a time. Raises ValueError for contents that are not JSON in UTF-8, TooLongError for a
    value of more than `limit` characters.
    """
    reader = _Reader(chunks, limit)
    while first := reader.peek():
        if first != "[":
            yield JsonValue(reader.take_value(), False, reader.take_used())
            continue
        reader.skip_character()
        if reader.peek() == "]":
            reader.skip_character()
            continue
        while True:
            yield JsonValue(reader.take_value(), True, reader.take_used())
            separator = reader.peek()
            reader.skip_character()
            if separator == "]":
                break
            if separator != ",":
                raise ValueError(f"a list goes on with {separator!r}" if separator else "a list is cut off")


class _Reader:
    """Decoded text with a position, filled from chunks of bytes."""

    def __init__(self, chunks: Iterable[tuple[bytes, int]], limit: int) -> None:
        self._chunks = iter(chunks)
        self._limit = limit
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text = ""
        self._position = 0
        self._used = 0

    def take_used(self) -> int:
        """Return the bytes of input read since the last call."""
        used = self._used
        self._used = 0
        return used

    def peek(self) -> str:
        """Return the next character that is not white space, an empty string at the end."""
        while True:
            while self._position < len(self._text):
                if self._text[self._position] not in _SPACE:
                    return self._text[self._position]
                self._position += 1
            if not self._read_more(1):
                return ""

    def skip_character(self) -> None:
        """Pass over the character that `peek` returned."""
        self._position += 1

    def take_value(self) -> Any:
        """Return the next value and pass over it."""
        self.peek()
        while True:
            try:
                value, stop = self._json.raw_decode(self._text, self._position)
            except RecursionError:
                raise ValueError("it is nested too deeply") from None
            except json.JSONDecodeError as error:
                unread = len(self._text) - self._position
                goes_on = error.msg.startswith("Unterminated string") or len(self._text) - error.pos < _NEAR_END
                if goes_on and unread > self._limit:
                    raise TooLongError from None
                # Reading twice as much each time keeps the work linear in the value's length.
                if not goes_on or not self._read_more(max(1, min(unread, self._limit - unread + 1))):
                    raise ValueError(error.msg) from None  # its position refers to the buffer, not to the file
            else:
                if stop - self._position > self._limit:
                    raise TooLongError
                self._position = stop
                return value

    def _read_more(self, characters: int) -> bool:
        """Read at least `characters` more and drop the passed ones; return False at the end of the file."""
        parts = [self._text[self._position :]]
        self._position = 0
        missing = characters
        at_end = False
        while missing > 0 and not at_end:
            chunk = next(self._chunks, None)
            at_end = chunk is None
            data, used = chunk or (b"", 0)
            parts.append(self._utf8.decode(data, final=at_end))
            missing -= len(parts[-1])
            self._used += used
        self._text = "".join(parts)
        return missing < characters
