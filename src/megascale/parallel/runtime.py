"""The state of one rank that operators and collectives use: recorders, streams and the choice of kernels.

The engine makes the runtime, and axes carry it to the modules. No state is global, so that two engines in one process
share none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megascale.core.calls import NullCallLog
from megascale.core.spans import Mark, Recorder, SpanKind
from megascale.ops import side_stream
from megascale.ops.attention import AttentionChooser
from megascale.ops.dispatch import Kernels
from megascale.ops.side_stream import InlineStream, SideStream
from megascale.parallel.weight_gradients import WeightGradientQueue


def _make_inline_stream() -> InlineStream:
    return side_stream.InlineStream()


@dataclass(eq=False)
class Runtime:
    """The runtime of one rank.

    Attributes:
        calls: record of collectives and messages, which a trainer sets.
        recorder: timers of actions and transfers, which a trainer sets.
        stream: runs independent GEMMs, such as weight gradients.
        weight_gradients: queue of weight gradients that the schedule computes later.
        attention: chooses the attention kernel of each shape.
        kernels: chooses all other operators and records the choices; current while an engine works (ops/dispatch.py).
        axes: weak references to all axes with a group, for `parallel/rejoin.py`.
        sent_observer: called with axis, kind and data whenever an exchange sends data (parallel/compute_trace.py);
            None without an observer.
        rejoin_obstacle: why this rank cannot continue with new groups, "" if it can. Set by objects that hold groups
            outside of axes, or that map the memory of peers.
        check_orders: called before each action of a step. It raises an error if this rank must leave its attempt.
        state_obstacle: why no other engine can take over this rank's weights and optimizer state, "" if it can.
    """

    calls: NullCallLog = field(default_factory=NullCallLog)
    recorder: Recorder = field(default_factory=Recorder)
    stream: InlineStream = field(default_factory=_make_inline_stream)
    weight_gradients: WeightGradientQueue = field(default_factory=WeightGradientQueue)
    attention: AttentionChooser = field(default_factory=AttentionChooser)
    kernels: Kernels = field(default_factory=Kernels)
    axes: list[weakref.ref[Any]] = field(default_factory=list)
    sent_observer: Callable[[Any, str, torch.Tensor], None] | None = None
    rejoin_obstacle: str = ""
    state_obstacle: str = ""
    check_orders: Callable[[], None] = lambda: None
    _side: SideStream | None = None  # never dropped, because cuBLAS keeps a workspace for each stream

    def use_side_stream(self, enabled: bool, device: torch.device) -> str:
        """Run independent GEMMs on a side stream if `enabled`, else in order. Return a description of the choice."""
        self.stream.synchronize()
        if enabled and device.type == "cuda":
            self._side = self._side or SideStream(device)
            self.stream = self._side
            return "on a side stream"
        self.stream = _make_inline_stream()
        if enabled:
            return f"one after another: {device.type} has no streams"
        return "one after another"


class Transfer:
    """Record of a collective or message, which starts with the record and ends with `done`.

    Args:
        group: name of the group in the record of calls.
        op: name of the operation in the record of calls.
        axis: axis of the grid, a `SpanAxis`.
        peer: the other rank of a message, -1 for a collective.
    """

    __slots__ = ("_axis", "_bytes", "_call", "_peer", "_runtime", "_start")

    def __init__(self, runtime: Runtime, group: str, op: str, axis: int, nbytes: int, peer: int = -1) -> None:
        self._runtime = runtime
        self._call = runtime.calls.begin_call(group, op, nbytes)
        self._axis = axis
        self._bytes = nbytes
        self._peer = peer
        self._start = runtime.recorder.begin_transfer(axis, nbytes)

    def begin_wait(self) -> Mark:
        """Record that the stream, or on a CPU the host, begins to wait, and return a mark of that time."""
        self._runtime.calls.begin_wait(self._call)
        return self._runtime.recorder.mark()

    def done(self, wait_start: Mark = None) -> None:
        """Record the end of the transfer.

        Args:
            wait_start: mark that `begin_wait` returned; None if nothing waited.
        """
        self._runtime.calls.end_call(self._call)
        recorder = self._runtime.recorder
        if wait_start is not None:
            recorder.record_wait(wait_start, SpanKind.WAIT, self._axis, self._peer)
        recorder.end_transfer(self._start, self._axis, self._bytes, self._peer)
