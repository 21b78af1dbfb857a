"""Messages between processes, encoded in MessagePack and checked against a schema when they are decoded.

A message is a subclass of `Message`. Its fields have the types below, or are `Record`s with such fields. A `Schema`
lists the messages that may be sent in one direction. Decoding refuses unknown fields, numbers outside the range of
their type and values that are longer than their type allows. A protocol between two processes is a module of `Message`
classes with one `Schema` per direction:

    class Attach(Message, frozen=True):
        rank: Count

    TO_SERVICE = Schema(Attach, limit=1 << 14)
    FROM_SERVICE = Schema(Done, ErrorReply, limit=1 << 14)

A `Conversation` sends and receives messages over a socket. On a pipe, `Schema.encode_frame` and `FrameReader` are used.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from megascale.services.framing import HEAD, ProtocolError, make_head, read_head

_INT64_LIMIT = 1 << 63  # integers of MessagePack and SQLite are below it
_MAX_FLOAT = sys.float_info.max  # greatest number that is not infinite

Integer = Annotated[int, Meta(ge=-_INT64_LIMIT, le=_INT64_LIMIT - 1)]
Count = Annotated[int, Meta(ge=0, le=_INT64_LIMIT - 1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Finite = Annotated[float, Meta(ge=-_MAX_FLOAT, le=_MAX_FLOAT)]  # NaN fails both comparisons, so it is refused too
Name = Annotated[str, Meta(max_length=200)]  # interned when decoded (see `Schema`)
NonEmptyName = Annotated[str, Meta(min_length=1, max_length=200)]
Text = Annotated[str, Meta(max_length=2000)]
Path = Annotated[str, Meta(max_length=4096)]
Labels = Annotated[dict[Name, Name], Meta(max_length=256)]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """Record within a message. Python's garbage collector ignores records, which form no cycles."""


class Message(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="do", tag=str.lower
):
    """Message between two processes. On the wire its key `do` holds a tag, the class name in lower case."""

    @property
    def do(self) -> str:
        """Return the message's tag on the wire."""
        return str(self.__struct_config__.tag)


class Schema:
    """Message types that may be sent in one direction.

    Decoding interns names, which are the fields of the types `Name` and `NonEmptyName`. A driver that keeps the last
    minute of 1,536 nodes would otherwise store "train" and "mlx5_0" a million times.

    Args:
        message_types: subclasses of `Message`.
        limit: size in bytes of the largest message that may be sent or received.
    """

    def __init__(self, *message_types: type[Message], limit: int) -> None:
        self.limit = limit
        self.types = {str(message_type.__struct_config__.tag): message_type for message_type in message_types}
        self._decoder = msgspec.msgpack.Decoder(functools.reduce(operator.or_, message_types))
        self._encoder = msgspec.msgpack.Encoder()
        self._name_fields = {message_type: _find_name_fields(message_type) for message_type in message_types}

    def build(self, do: str, fields: dict[str, Any]) -> Message:
        """Return a message with the tag `do`. Raises ValueError for an unknown tag, or unknown or missing fields."""
        if do not in self.types:
            raise ValueError(f"unknown message {do!r}; expected one of {', '.join(sorted(self.types))}")
        try:
            return self.types[do](**fields)
        except TypeError as error:
            raise ValueError(f"{do}: {error}") from None

    def encode(self, message: Message) -> bytes:
        """Return the message as bytes. Raises ValueError if it does not fit the schema."""
        data = self._encoder.encode(message)
        try:
            self._decode(data)  # msgspec checks ranges and lengths only when it decodes
        except ProtocolError as error:
            raise ValueError(f"{message.do}: {error}") from None
        return data

    def encode_frame(self, message: Message) -> bytes:
        """Return the frame of a message without a body and files. Raises ValueError as `encode`."""
        data = self.encode(message)
        return make_head(len(data)) + data

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        """Return the message in `data`. Raises ProtocolError if `data` is not a valid message of this schema."""
        message = self._decode(data)
        _intern_names(message, self._name_fields[type(message)])
        return message

    def _decode(self, data: bytes | bytearray | memoryview) -> Any:
        """Return the message in `data` without interning its names. Raises ProtocolError."""
        if len(data) > self.limit:
            raise ProtocolError(f"a message has {len(data)} bytes; at most {self.limit} are allowed")
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as error:
            raise ProtocolError(f"a message is malformed: {error}") from None


class FrameReader:
    """Decoder of a stream of frames from `Schema.encode_frame`."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that `data` completes. Raises ProtocolError if one is not valid in this schema."""
        self._buffer += data
        while len(self._buffer) >= HEAD.size:
            head = read_head(self._buffer[: HEAD.size], self._schema.limit)
            if head.file_count:
                raise ProtocolError("a stream cannot carry file descriptors")
            frame_end = HEAD.size + head.message_bytes
            if len(self._buffer) < frame_end:
                return
            message = self._schema.decode(bytes(self._buffer[HEAD.size : frame_end]))
            del self._buffer[:frame_end]
            yield message


class _NameFields(NamedTuple):
    """Fields of a record type that hold names.

    Attributes:
        names: fields of the types `Name` and `NonEmptyName`.
        nested: fields that hold a tuple of records, each with the name fields of these records.
    """

    names: tuple[str, ...]
    nested: tuple[tuple[str, _NameFields], ...]


def _find_name_fields(record_type: type[msgspec.Struct]) -> _NameFields:
    """Return the fields of a record type, and of the records in it, that hold names."""
    fields = msgspec.structs.fields(record_type)
    names = tuple(field.name for field in fields if field.type in (Name, NonEmptyName))
    nested = []
    for field in fields:
        nested_type = _find_record_type(field.type)
        if nested_type is not None:
            nested.append((field.name, _find_name_fields(nested_type)))
    return _NameFields(names, tuple(nested))


def _find_record_type(field_type: Any) -> type[Record] | None:
    """Return the class of the records in a field that holds a tuple of records, or None for another field."""
    if get_origin(field_type) is Annotated:
        field_type = get_args(field_type)[0]
    if get_origin(field_type) is not tuple:
        return None
    element_type = get_args(field_type)[0]
    if isinstance(element_type, type) and issubclass(element_type, Record):
        return element_type
    return None


def _intern_names(record: Any, name_fields: _NameFields) -> None:
    """Replace the names in a record, and in the records in it, by their interned copies."""
    for name_field in name_fields.names:
        value = getattr(record, name_field)
        if value:
            force_setattr(record, name_field, sys.intern(value))
    for field, nested_fields in name_fields.nested:
        for nested_record in getattr(record, field):
            _intern_names(nested_record, nested_fields)
