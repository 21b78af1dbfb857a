"""Incremental reader of the JSON values in a file: elements of a list, or consecutive values."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from megascale.data.text_encoding import NotUtf8Error, describe_invalid_utf8

_SPACE = " \t\r\n"
# A syntax error this close to the end of the buffer may only mean that the value continues in the next chunk.
_NEAR_END = 32  # characters
_DECODER = json.JSONDecoder(parse_int=float)  # json.loads with an option makes a decoder per call


def parse_record(text: str | bytes) -> Any:
    """Parse the JSON of a record of text. Integers become floats, since Python refuses integers above 4,300 digits."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")  # as json.loads
    if text.startswith("\ufeff"):
        raise json.JSONDecodeError("unexpected byte order mark", text, 0)
    return _DECODER.decode(text)


class JsonValue(NamedTuple):
    """A JSON value.

    Attributes:
        value: the value.
        is_element: whether it is an element of a list.
        input_bytes: bytes of input read since the previous value.
    """

    value: Any
    is_element: bool
    input_bytes: int


class TooLongError(ValueError):
    """A value is longer than the limit."""


class RepeatedKeyError(ValueError):
    """An object has the key of the text twice, so that a reader would silently take the last text."""


def quote_key(key: str) -> set[str]:
    """Return the key as JSON writes it: with characters beyond ASCII as they are, and as escapes."""
    return {json.dumps(key, ensure_ascii=is_ascii) for is_ascii in (False, True)}


def has_repeated_key(text: str | bytes, key: str) -> bool:
    """Return whether the JSON object `text` has the key twice. Objects within it do not count."""

    def count_key(pairs: list[tuple[str, Any]]) -> int:
        return sum(1 for name, _ in pairs if name == key)

    # The hook is also called for objects within the record, whose results are values of the pairs.
    key_count = json.loads(text, object_pairs_hook=count_key, parse_int=float)
    return isinstance(key_count, int) and key_count > 1


def read_values(chunks: Iterable[tuple[bytes, int]], limit: int, key: str | None = None) -> Iterator[JsonValue]:
    """Yield the values of a file; in place of a list at the top level, its elements.

    Memory holds one value at a time.

    Args:
        chunks: (chunk of the file, bytes of input that it took).
        limit: largest number of characters of a value.
        key: key that may occur once per object; None for no check.

    Raises NotUtf8Error for a byte that is not UTF-8, ValueError for contents that are not JSON, TooLongError for a
    value beyond the limit, and RepeatedKeyError for an object that has `key` twice.
    """
    reader = _Reader(chunks, limit, key)
    while first := reader.peek():
        if first != "[":
            yield JsonValue(reader.take_value(), is_element=False, input_bytes=reader.take_input_bytes())
            continue
        reader.skip_character()
        if reader.peek() == "]":
            reader.skip_character()
            continue
        while True:
            yield JsonValue(reader.take_value(), is_element=True, input_bytes=reader.take_input_bytes())
            separator = reader.peek()
            reader.skip_character()
            if separator == "]":
                break
            if not separator:
                raise ValueError("a list is cut off")
            if separator != ",":
                raise ValueError(f"a list continues with {separator!r} instead of a comma")


class _Reader:
    """Buffer of decoded text with a position, filled from chunks of bytes as needed."""

    def __init__(self, chunks: Iterable[tuple[bytes, int]], limit: int, key: str | None) -> None:
        self._chunks = iter(chunks)
        self._limit = limit
        self._key = key
        self._quoted_forms: set[str] = set()
        if key is not None:
            self._quoted_forms = quote_key(key)
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder(parse_int=float)
        self._text = ""
        self._position = 0
        self._input_bytes = 0
        self._file_bytes = 0  # bytes of the file that have been passed to the decoder

    def take_input_bytes(self) -> int:
        """Return the bytes of input read since the last call."""
        input_bytes = self._input_bytes
        self._input_bytes = 0
        return input_bytes

    def peek(self) -> str:
        """Move to the next character that is not white space, and return it; "" at the end of the file."""
        while True:
            while self._position < len(self._text):
                if self._text[self._position] not in _SPACE:
                    return self._text[self._position]
                self._position += 1
            if not self._read_more(1):
                return ""

    def skip_character(self) -> None:
        """Move behind the character that `peek` returned."""
        self._position += 1

    def take_value(self) -> Any:
        """Return the next value and move behind it. Raises the errors of `read_values`."""
        self.peek()
        while True:
            try:
                value, stop = self._json.raw_decode(self._text, self._position)
            except RecursionError:
                raise ValueError("it is nested too deeply") from None
            except json.JSONDecodeError as error:
                unread = len(self._text) - self._position
                # The error of an unterminated string is where the string begins, long before the end of the buffer.
                is_near_end = len(self._text) - error.pos < _NEAR_END
                may_continue = is_near_end or error.msg.startswith("Unterminated string")
                if may_continue and unread > self._limit:
                    raise TooLongError from None
                # Doubling the buffer each time keeps the work linear in the value's length. One character beyond the
                # limit shows that the value is too long.
                missing = max(1, min(unread, self._limit - unread + 1))
                if not may_continue or not self._read_more(missing):
                    raise ValueError(error.msg) from None  # its position refers to the buffer, not to the file
            else:
                if stop - self._position > self._limit:
                    raise TooLongError
                self._check_key(self._position, stop)
                self._position = stop
                return value

    def _check_key(self, start: int, stop: int) -> None:
        """Raise RepeatedKeyError if the value in this range of the buffer is an object with the key twice."""
        occurrences = sum(self._text.count(quoted, start, stop) for quoted in self._quoted_forms)
        if self._key is not None and occurrences > 1 and has_repeated_key(self._text[start:stop], self._key):
            raise RepeatedKeyError

    def _read_more(self, characters: int) -> bool:
        """Read at least `characters` more characters, and drop those before the position; return False at the end."""
        texts = [self._text[self._position :]]
        self._position = 0
        missing = characters
        is_at_end = False
        while missing > 0 and not is_at_end:
            chunk = next(self._chunks, None)
            is_at_end = chunk is None
            data, input_bytes = chunk or (b"", 0)
            self._file_bytes += len(data)
            try:
                texts.append(self._utf8.decode(data, final=is_at_end))
            except UnicodeDecodeError as error:
                # The decoder's bytes end where the chunk ends.
                undecoded = error.object[error.start :]
                raise NotUtf8Error(describe_invalid_utf8(undecoded, self._file_bytes - len(undecoded))) from None
            missing -= len(texts[-1])
            self._input_bytes += input_bytes
        self._text = "".join(texts)
        return missing < characters
