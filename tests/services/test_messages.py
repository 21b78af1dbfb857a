"""Frames and messages under random and mutated bytes: read as what they are, or refused in one way, within bounds."""

from __future__ import annotations

import math
import tracemalloc
from typing import Annotated

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

from megascale.services.framing import (
    HEAD,
    PROTOCOL_VERSION,
    ProtocolError,
    Seal,
    make_greeting,
    make_head,
    read_greeting,
    read_head,
)
from megascale.services.messages import Count, Finite, Integer, Labels, Message, Name, Record, Schema, Text
from megascale.services.shared_token import NONCE_BYTES

LIMIT = 4096


class Leaf(Record, frozen=True):
    name: Name
    value: Finite = 0.0


class Tree(Message, frozen=True):
    number: Count
    count: Integer = 0
    text: Text = ""
    facts: Labels = msgspec.field(default_factory=dict)
    leaves: Annotated[tuple[Leaf, ...], Meta(max_length=8)] = ()
    data: Annotated[bytes, Meta(max_length=64)] = b""
    maybe: Leaf | None = None


class Flagged(Message, frozen=True):
    flag: bool


SCHEMA = Schema(Tree, Flagged, limit=LIMIT)
leaves = st.builds(Leaf, st.text(max_size=20), st.floats(allow_nan=False, allow_infinity=False))
trees = st.builds(
    Tree,
    st.integers(0, 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.text(max_size=30),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    st.lists(leaves, max_size=3).map(tuple),
    st.binary(max_size=64),
    st.none() | leaves,
)
messages = trees | st.builds(Flagged, st.booleans())


def read(data: bytes) -> Message | None:
    """Return the read message, or None if ProtocolError refuses it. The memory is bounded by its size."""
    tracemalloc.start()
    try:
        return SCHEMA.decode(data)
    except ProtocolError as error:
        assert str(error)
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * (len(data) + 1024), f"{peak} bytes for {len(data)}"


@given(messages)
@settings(deadline=None)
def test_what_is_written_is_read_back(message):
    assert SCHEMA.decode(SCHEMA.encode(message)) == message


# Beginnings that claim to be long: arrays, maps, texts, bytes, extensions.
claims = st.builds(
    lambda kind, size: kind + size,
    st.sampled_from([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]),
    st.binary(min_size=4, max_size=4),
)


@given(st.lists(st.binary(max_size=40) | claims, max_size=12).map(b"".join))
@settings(max_examples=120, deadline=None)
def test_random_bytes_are_refused(data):
    message = read(data)
    if message is not None:
        assert SCHEMA.decode(SCHEMA.encode(message)) == message


@given(messages, st.data())
@settings(max_examples=120, deadline=None)
def test_mutated_messages_are_refused_or_fit_the_schema(message, data):
    body = bytearray(SCHEMA.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        stop = data.draw(st.integers(at, min(len(body), at + 4)))
        body[at:stop] = data.draw(st.binary(max_size=5) | claims)
    result = read(bytes(body))
    if result is not None:
        assert SCHEMA.decode(SCHEMA.encode(result)) == result


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\xdd\x00\x0f\xff\xff", b"\xdf\x00\x0f\xff\xff\xa1a"])
def test_depth_and_claims_of_length_are_refused(opening):
    assert read(opening * (LIMIT // len(opening))) is None
    for where in ("leaves", "facts", "maybe", "data", "text"):
        body = msgspec.msgpack.encode({"do": "tree", "number": 1})
        body = bytes([body[0] + 1]) + body[1:] + msgspec.msgpack.encode(where)
        assert read(body + opening * 700) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"number": True}, "number"),
        ({"number": 1.0}, "number"),
        ({"number": "1"}, "number"),
        ({"count": 2**63}, "count"),
        ({"text": "x" * 2001}, "length <= 2000"),
        ({"text": b"x"}, "text"),
        ({"data": bytes(65)}, "length <= 64"),
        ({"leaves": [{"name": "a"}] * 9}, "length <= 8"),
        ({"leaves": [{"name": "a", "value": math.nan}]}, r"leaves\[0\].value"),
        ({"maybe": {"name": "a", "value": math.inf}}, "maybe.value"),
        ({"maybe": {"name": "a", "more": 1}}, "unknown field `more`"),
        ({"facts": {"a": 1}}, "facts"),
        ({"facts": {1: "a"}}, "facts"),
        ({"extra": 0}, "unknown field `extra`"),
        ({"do": "leaf"}, "leaf"),
        ({"do": None}, "do"),
    ],
)
def test_a_refusal_says_what_is_wrong(change, reason):
    with pytest.raises(ProtocolError, match=reason):
        SCHEMA.decode(msgspec.msgpack.encode({"do": "tree", "number": 1} | change))


def test_what_would_be_refused_is_not_written():
    for wrong in (Tree(-1), Tree(1, text="x" * 2001), Tree(1, leaves=(Leaf("a", math.nan),)), Tree(1, text="\udcff")):
        with pytest.raises(ValueError, match=r"tree|surrogates"):
            SCHEMA.encode(wrong)
    with pytest.raises(ValueError, match="nothing"):
        SCHEMA.build("nothing", {})
    with pytest.raises(ValueError, match="unwanted"):
        SCHEMA.build("flagged", {"flag": True, "unwanted": 1})


@given(
    st.binary(min_size=HEAD.size, max_size=HEAD.size)
    | st.binary(max_size=HEAD.size - 3).map(lambda b: (b"MS" + bytes([PROTOCOL_VERSION]) + b).ljust(HEAD.size, b"\0"))
)
@settings(max_examples=100, deadline=None)
def test_a_head_is_within_the_limits_or_refused(data):
    try:
        size, attached, _ = read_head(data, 1000, 50)
    except ProtocolError as error:
        assert str(error)
    else:
        assert 1 <= size <= 1000
        assert attached <= 50


def test_a_greeting_is_read_back_and_nothing_else_is_one():
    nonce = bytes(range(NONCE_BYTES))
    assert read_greeting(make_greeting(nonce)) == nonce
    with pytest.raises(
        ProtocolError, match=f"version {PROTOCOL_VERSION - 1} of the protocol, this one version {PROTOCOL_VERSION}"
    ):
        read_greeting(HEAD.pack(b"MS", PROTOCOL_VERSION - 1, 0, NONCE_BYTES, 0) + nonce)
    with pytest.raises(ProtocolError, match="no greeting"):
        read_greeting(make_head(NONCE_BYTES - 1) + nonce)


@given(st.lists(st.binary(max_size=20), min_size=2, max_size=5, unique=True), st.data())
@settings(deadline=None)
def test_seals_hold_in_order_on_their_connection_and_way_only(bodies, data):
    key = bytes(32)
    server, client = Seal(key, is_server=True), Seal(key, is_server=False)
    seals = [server.make(body) for body in bodies]
    wrong = data.draw(st.integers(0, len(bodies) - 1))
    for body, seal in list(zip(bodies, seals, strict=True))[:wrong]:
        client.check(seal, body)
    swapped = data.draw(st.sampled_from([i for i in range(len(bodies)) if i != wrong]))
    with pytest.raises(ProtocolError):
        client.check(seals[swapped], bodies[swapped])
    with pytest.raises(ProtocolError):
        Seal(key, is_server=True).check(seals[0], bodies[0])  # its own, come back
    with pytest.raises(ProtocolError):
        Seal(bytes(31) + b"x", is_server=False).check(seals[0], bodies[0])
