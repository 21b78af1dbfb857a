"""Orders to the process of a rank that is reused for the next attempt or that starts before its attempt.

The process's fork server writes orders into a pipe, as lines of JSON.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

# Environment variables of a rank's process.
ORDERS_VARIABLE = "MEGASCALE_ORDERS"  # descriptor of the pipe's read end; set if the agent keeps processes
PREPARED_VARIABLE = "MEGASCALE_PREPARED"  # set if the process waits to join ranks that already train
MISSING_VARIABLE = "MEGASCALE_MISSING_SHARE"  # fraction of the replicas that are missing in the attempt
# Ids of killed processes of the node, whose memory the kernel still frees; separated by commas
DYING_VARIABLE = "MEGASCALE_DYING"
EARLY_VARIABLE = "MEGASCALE_EARLY"  # set if the process starts before the order for its attempt
MAX_ORDER_BYTES = 4096  # a write of this size to a pipe is atomic


class Park(msgspec.Struct, frozen=True, tag_field="do", tag="park"):
    """Order to leave an attempt and to wait for the next one.

    Attributes:
        attempt: index of the attempt; a process in another attempt ignores the order.
        after_step: whether to complete the step first, and to copy its state to memory.
        joins_at_once: with `after_step`, whether the next attempt begins at once, so that no rank copies its state.
    """

    attempt: int
    after_step: bool = False
    joins_at_once: bool = False


class Resume(msgspec.Struct, frozen=True, tag_field="do", tag="resume"):
    """Order to begin the next attempt.

    Attributes:
        environment: variables that are added to the process's environment.
        data: data-parallel size of the attempt; 0: that of the configuration.
    """

    environment: dict[str, Annotated[str, Meta(max_length=1000)]]
    data: int = 0


class PrepareGroups(msgspec.Struct, frozen=True, tag_field="do", tag="prepare_groups"):
    """Order to make the groups of the next attempt while the present one trains, or to drop them if `world` is 0.

    Attributes:
        attempt: index of the present attempt; a process in another attempt ignores the order.
        number: number of the preparation.
        rank: rank of this process in the next attempt.
        world: number of ranks of the next attempt.
        data: data-parallel size of the next attempt.
        master: host and port of the present attempt's store.
    """

    attempt: int
    number: int
    rank: int = 0
    world: int = 0
    data: int = 0
    master: tuple[Annotated[str, Meta(max_length=1000)], int] = ("", 0)


ProcessOrder = Park | Resume | PrepareGroups
_DECODER = msgspec.json.Decoder(ProcessOrder)


def encode_order(order: ProcessOrder) -> bytes:
    """Return an order as a line of JSON. Raises ValueError if the line is too long."""
    line = msgspec.json.encode(order) + b"\n"
    if len(line) > MAX_ORDER_BYTES:
        raise ValueError(f"an order has {len(line)} bytes; at most {MAX_ORDER_BYTES} are written at once")
    return line


def read_orders(descriptor: int) -> Iterator[ProcessOrder]:
    """Yield the orders from a pipe as they arrive, until the writer closes it. Damaged lines are skipped."""
    buffer = b""
    while data := os.read(descriptor, 65536):
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            try:
                yield _DECODER.decode(line)
            except msgspec.MsgspecError:
                continue
