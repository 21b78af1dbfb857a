"""Messages with a schema: plain records in MessagePack, every field's type, range and length checked when it is read.

A message is a subclass of `Message` whose fields are of the types below (or records of them): nothing else is read, no
unknown field, no number that is none, nothing longer than its type says. A `Schema` is what one end accepts.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from megascale.services.framing import ProtocolError

_BIG = 1 << 63
_FLOAT = sys.float_info.max

Whole = Annotated[int, Meta(ge=-_BIG, le=_BIG - 1)]
Count = Annotated[int, Meta(ge=0, le=_BIG - 1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Finite = Annotated[float, Meta(ge=-_FLOAT, le=_FLOAT)]  # no comparison holds for NaN
Name = Annotated[str, Meta(max_length=200)]  # said again and again by thousands: kept once (see `Schema`)
Given = Annotated[str, Meta(min_length=1, max_length=200)]  # a name that there must be
Text = Annotated[str, Meta(max_length=2000)]
Path = Annotated[str, Meta(max_length=4096)]
Facts = Annotated[dict[Name, Name], Meta(max_length=256)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A part of a message."""


class Message(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="do", tag=str.lower
):
    """Something that one process says to another; `do` names its kind."""

    @property
    def do(self) -> str:
        """The kind of message, as it is written."""
        return str(self.__struct_config__.tag)


class Schema:
    """The kinds of message that go one way.

    Names (fields of the types `Name` and `Given`) are kept once, however often they are read: a driver that keeps the
    last minute of 1,536 nodes would hold "train" and "mlx5_0" a million times.

    Args:
        kinds: subclasses of `Message`.
        limit: bytes of the longest that is written or read.
    """

    def __init__(self, *kinds: type[Message], limit: int) -> None:
        self.limit = limit
        self._kinds = {str(kind.__struct_config__.tag): kind for kind in kinds}
        self._decoder = msgspec.msgpack.Decoder(_union(kinds))
        self._encoder = msgspec.msgpack.Encoder()
        self._names = {kind: _names(kind) for kind in kinds}

    def build(self, do: str, fields: dict[str, Any]) -> Message:
        """The message of a kind; ValueError if there is none such or its fields do not fit it."""
        if do not in self._kinds:
            raise ValueError(f"there is no message {do!r}; there are {', '.join(sorted(self._kinds))}")
        try:
            return self._kinds[do](**fields)
        except TypeError as error:
            raise ValueError(f"{do}: {error}") from None

    def encode(self, message: Message) -> bytes:
        """As bytes; ValueError if the other side would refuse it."""
        data = self._encoder.encode(message)
        try:
            self._read(data)
        except ProtocolError as error:
            raise ValueError(f"{message.do}: {error}") from None
        return data

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        """The message; ProtocolError with the reason for anything else."""
        message = self._read(data)
        _intern(message, self._names[type(message)])
        return message

    def _read(self, data: bytes | bytearray | memoryview) -> Any:
        if len(data) > self.limit:
            raise ProtocolError(f"a message of {len(data)} bytes is over the {self.limit} allowed")
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as error:
            raise ProtocolError(f"a message that is not as it should be: {error}") from None


def _union(kinds: tuple[type[Message], ...]) -> Any:
    union: Any = kinds[0]
    for kind in kinds[1:]:
        union = union | kind
    return union


# (fields that hold a name, (field that holds records, its plan) ...)
_Plan = tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]


def _names(kind: type[msgspec.Struct]) -> _Plan:
    """Where a kind of record has names."""
    fields = msgspec.structs.fields(kind)
    parts = tuple((f.name, _names(part)) for f in fields if (part := _part(f.type)) is not None)
    return tuple(f.name for f in fields if f.type in (Name, Given)), parts


def _part(kind: Any) -> type[Part] | None:
    """The class of which a field holds a tuple."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    part = get_args(kind)[0] if get_origin(kind) is tuple else None
    return part if isinstance(part, type) and issubclass(part, Part) else None


def _intern(record: Any, plan: _Plan) -> None:
    names, parts = plan
    for name in names:
        if value := getattr(record, name):
            force_setattr(record, name, sys.intern(value))
    for field, of_part in parts:
        for item in getattr(record, field):
            _intern(item, of_part)
