"""Messages with a schema: records in MessagePack whose fields are checked for type, range and length when decoded.

A message is a subclass of `Message` whose fields have the types below, or are `Record`s with such fields.
A `Schema` lists the messages of one direction; it refuses unknown fields, non-finite numbers and values longer than
their type allows. A protocol between two processes is thus a module of `Message` classes and one `Schema` per
direction:

    class Attach(Message, frozen=True):
        rank: Count

    TO_SERVICE = Schema(Attach, limit=1 << 14)
    FROM_SERVICE = Schema(Done, ErrorReply, limit=1 << 14)

A `Conversation` sends and receives them; on a plain pipe `Schema.encode_frame` and `FrameReader` do.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from megascale.services.framing import HEAD, ProtocolError, make_head, read_head

_INT64_LIMIT = 1 << 63
_MAX_FLOAT = sys.float_info.max

Integer = Annotated[int, Meta(ge=-_INT64_LIMIT, le=_INT64_LIMIT - 1)]
Count = Annotated[int, Meta(ge=0, le=_INT64_LIMIT - 1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Finite = Annotated[float, Meta(ge=-_MAX_FLOAT, le=_MAX_FLOAT)]  # the comparisons also refuse NaN
Name = Annotated[str, Meta(max_length=200)]  # interned when decoded (see `Schema`)
NonEmptyName = Annotated[str, Meta(min_length=1, max_length=200)]
Text = Annotated[str, Meta(max_length=2000)]
Path = Annotated[str, Meta(max_length=4096)]
Labels = Annotated[dict[Name, Name], Meta(max_length=256)]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A record within a message."""


class Message(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="do", tag=str.lower
):
    """A message between two processes; `do` holds its tag: the class name in lower case."""

    @property
    def do(self) -> str:
        """Return the message's tag on the wire."""
        return str(self.__struct_config__.tag)


class Schema:
    """The message types that may be sent in one direction.

    Names (fields of the types `Name` and `NonEmptyName`) are interned when decoded: a driver that keeps the last
    minute of 1,536 nodes would otherwise hold "train" and "mlx5_0" a million times.

    Args:
        message_types: subclasses of `Message`.
        limit: bytes of the longest message that is encoded or decoded.
    """

    def __init__(self, *message_types: type[Message], limit: int) -> None:
        self.limit = limit
        self.types = {str(message_type.__struct_config__.tag): message_type for message_type in message_types}
        self._decoder = msgspec.msgpack.Decoder(functools.reduce(operator.or_, message_types))
        self._encoder = msgspec.msgpack.Encoder()
        self._name_fields = {message_type: _find_name_fields(message_type) for message_type in message_types}

    def build(self, do: str, fields: dict[str, Any]) -> Message:
        """Return the message with the tag `do`. Raises ValueError for an unknown tag or unsuitable fields."""
        if do not in self.types:
            raise ValueError(f"unknown message {do!r}; expected one of {', '.join(sorted(self.types))}")
        try:
            return self.types[do](**fields)
        except TypeError as error:
            raise ValueError(f"{do}: {error}") from None

    def encode(self, message: Message) -> bytes:
        """Return the message as bytes. Raises ValueError if the other end would refuse it."""
        data = self._encoder.encode(message)
        try:
            self._decode(data)
        except ProtocolError as error:
            raise ValueError(f"{message.do}: {error}") from None
        return data

    def encode_frame(self, message: Message) -> bytes:
        """Return the message with its header, for a stream without file descriptors. Raises ValueError as `encode`."""
        data = self.encode(message)
        return make_head(len(data)) + data

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        """Return the message. Raises ProtocolError if `data` is not a valid message of this schema."""
        message = self._decode(data)
        _intern_names(message, self._name_fields[type(message)])
        return message

    def _decode(self, data: bytes | bytearray | memoryview) -> Any:
        if len(data) > self.limit:
            raise ProtocolError(f"a message has {len(data)} bytes; at most {self.limit} are allowed")
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as error:
            raise ProtocolError(f"a message is malformed: {error}") from None


class FrameReader:
    """Decodes the messages of a byte stream as they arrive; the counterpart of `Schema.encode_frame`."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that `data` completes. Raises ProtocolError if one is not valid in this schema."""
        self._buffer += data
        while len(self._buffer) >= HEAD.size:
            size, _, descriptors = read_head(self._buffer[: HEAD.size], self._schema.limit)
            if descriptors:
                raise ProtocolError("a stream cannot carry file descriptors")
            stop = HEAD.size + size
            if len(self._buffer) < stop:
                return
            message = self._schema.decode(bytes(self._buffer[HEAD.size : stop]))
            del self._buffer[:stop]
            yield message


# (fields that hold a name, ((field that holds a tuple of records, the records' name fields), ...))
_NameFields = tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]


def _find_name_fields(record_type: type[msgspec.Struct]) -> _NameFields:
    """Return the fields of a record, and of the records in it, that hold names."""
    fields = msgspec.structs.fields(record_type)
    names = tuple(field.name for field in fields if field.type in (Name, NonEmptyName))
    members = [(field.name, _find_record_type(field.type)) for field in fields]
    return names, tuple((name, _find_name_fields(member)) for name, member in members if member is not None)


def _find_record_type(field_type: Any) -> type[Record] | None:
    """Return the record class of a field that holds a tuple of records."""
    if get_origin(field_type) is Annotated:
        field_type = get_args(field_type)[0]
    if get_origin(field_type) is tuple:
        element = get_args(field_type)[0]
    else:
        element = None
    if isinstance(element, type) and issubclass(element, Record):
        return element
    return None


def _intern_names(record: Any, name_fields: _NameFields) -> None:
    names, parts = name_fields
    for name in names:
        value = getattr(record, name)
        if value:
            force_setattr(record, name, sys.intern(value))
    for field, part_fields in parts:
        for item in getattr(record, field):
            _intern_names(item, part_fields)
