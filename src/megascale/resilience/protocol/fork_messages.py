"""Messages between an agent and its fork server, and the report of a child that ends with an exception."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from megascale.core.exit_record import NO_RECORD, ExitRecord
from megascale.core.process_orders import MAX_ORDER_BYTES
from megascale.services.messages import Count, Message, Path, Schema, Text

_MESSAGE_BYTES = 1 << 20  # an order holds an environment and a command line
_Tail = Annotated[str, Meta(max_length=4000)]
_Argument = Annotated[str, Meta(max_length=1 << 17)]  # Linux allows an argument of 128 KiB.
_MAX_ARGUMENTS = 4096  # also of variables of the environment


class Fork(Message, frozen=True):
    """Order to fork the process of a rank.

    Attributes:
        env: variables added to the environment.
        arguments: command line after `megascale`, or a whole command line with `executes`.
        executes: execute `arguments` as a program instead of this package's command line.
        folder: working directory of such a program, "": the server's.
        log: file that receives stdout and stderr.
        is_reused: the process gets a pipe of orders, by which it stays between attempts.
    """

    rank: Count
    attempt: Count
    env: Annotated[dict[_Argument, _Argument], Meta(max_length=_MAX_ARGUMENTS)]
    arguments: Annotated[tuple[_Argument, ...], Meta(max_length=_MAX_ARGUMENTS)]
    log: Path
    executes: bool = False
    folder: Path = ""
    is_reused: bool = False


class Instruct(Message, frozen=True):
    """Order to write a line into the pipe of orders of a rank's process (core/process_orders.py)."""

    pid: Count
    line: Annotated[bytes, Meta(max_length=MAX_ORDER_BYTES)]


class ForkServerReady(Message, frozen=True):
    """The modules that trainers need are imported."""

    pid: Count


class Broken(Message, frozen=True):
    """The modules that trainers need cannot be imported. `tail` is the end of the traceback."""

    error: Text
    record: ExitRecord = NO_RECORD
    tail: _Tail = ""


class Forked(Message, frozen=True):
    """The process of a rank exists."""

    rank: Count
    attempt: Count
    pid: Count


class ForkFailed(Message, frozen=True):
    """The kernel has refused to create the process of a rank, as for lack of memory."""

    rank: Count
    attempt: Count
    record: ExitRecord
    error: Text


class LastWords(Message, frozen=True):
    """The exception that ends a child process, reported by the child."""

    pid: Count
    record: ExitRecord
    error: Text


class Ended(Message, frozen=True):
    """A child has ended with wait status `status`; record and error describe its exception if it reported one."""

    pid: Count
    status: Count
    record: ExitRecord = NO_RECORD
    error: Text = ""


TO_FORK_SERVER = Schema(Fork, Instruct, limit=_MESSAGE_BYTES)
FROM_FORK_SERVER = Schema(ForkServerReady, Broken, Forked, ForkFailed, Ended, limit=_MESSAGE_BYTES)
FROM_CHILD = Schema(LastWords, limit=_MESSAGE_BYTES)
