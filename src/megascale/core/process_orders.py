"""Orders to a rank's process that stays between attempts or starts early, as lines of JSON.

Its fork server writes them into a pipe.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

# Descriptor of the pipe's reading end, set for ranks whose agent keeps processes.
ORDERS_VARIABLE = "MEGASCALE_ORDERS"
# Set for a process that waits for its first attempt, in which it joins ranks that train already.
PREPARED_VARIABLE = "MEGASCALE_PREPARED"
# Share of the replicas that are missing in an attempt.
MISSING_VARIABLE = "MEGASCALE_MISSING_SHARE"
# Set for a rank's process that is started before the attempt that it will take part in is ordered.
EARLY_VARIABLE = "MEGASCALE_EARLY"
MAX_ORDER_BYTES = 4096  # a line of this length is written to a pipe at once


class Park(msgspec.Struct, frozen=True, tag_field="do", tag="park"):
    """Order to leave an attempt and to wait for the next one. Ignored in other attempts.

    Attributes:
        after_step: complete the step first, and copy its state to memory.
    """

    attempt: int
    after_step: bool = False


class Resume(msgspec.Struct, frozen=True, tag_field="do", tag="resume"):
    """Order to begin the next attempt with these variables added to the environment.

    Attributes:
        data: data-parallel size of the attempt, 0 for that of the configuration.
    """

    environment: dict[str, Annotated[str, Meta(max_length=1000)]]
    data: int = 0


_DECODER = msgspec.json.Decoder(Park | Resume)


def encode_order(order: Park | Resume) -> bytes:
    """Return an order as a line. ValueError if it is too long."""
    line = msgspec.json.encode(order) + b"\n"
    if len(line) > MAX_ORDER_BYTES:
        raise ValueError(f"an order has {len(line)} bytes; at most {MAX_ORDER_BYTES} are written at once")
    return line


def read_orders(descriptor: int) -> Iterator[Park | Resume]:
    """Yield the orders of a pipe as they come, until its writer closes it. Damaged lines are skipped."""
    buffer = b""
    while data := os.read(descriptor, 65536):
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            try:
                yield _DECODER.decode(line)
            except msgspec.MsgspecError:
                continue
