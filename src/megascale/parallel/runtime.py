"""The objects that one rank runs with: the engine makes them, axes carry them, and no module owns one.

Two engines of one process therefore never share state.
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
        calls: record of the calls that the engine starts and waits for; a trainer sets it.
        recorder: timers of the calls; a trainer sets it.
        stream: runs GEMMs that nothing waits for yet.
        weight_gradients: weight gradients that the schedule computes later.
        attention: chooses the attention kernel of each shape.
        kernels: chooses all other operators and records the choices; current while an engine works (ops/dispatch.py).
        axes: weak references to all axes with a group, for `parallel/rejoin.py`.
        sent_observer: called with the axis, the kind and the data of what an exchange sends; None: not called
            (parallel/compute_trace.py).
        rejoin_obstacle: why what runs here cannot go on with other groups, "" if it can. A part sets it that holds
            groups outside of axes, or that maps the memory of peers.
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
    _side: SideStream | None = None  # kept when turned off, because cuBLAS has a workspace for each stream

    def use_side_stream(self, enabled: bool, device: torch.device) -> str:
        """Run independent GEMMs on a side stream from now on, or in order; returns a description of the choice."""
        self.stream.synchronize()
        if enabled and device.type == "cuda":
            self._side = self._side or SideStream(device)
            self.stream = self._side
            return "on a side stream"
        self.stream = _make_inline_stream()
        if enabled:
            return f"one after another: {device.type} has no streams"
        return "one after another"

    def transfer(self, group: str, axis: int, op: str, nbytes: int, peer: int = -1) -> Transfer:
        """Record the start of a collective or message of `nbytes` on `group`, along `axis` (core/spans.py).

        peer: the other rank of a message, -1 for a collective.
        """
        return Transfer(self, self.calls.begin_call(group, op, nbytes), axis, nbytes, peer)


class Transfer:
    """A collective or message in flight, which reports to the record of calls and the timers."""

    __slots__ = ("_axis", "_bytes", "_call", "_peer", "_runtime", "_start")

    def __init__(self, runtime: Runtime, call: int, axis: int, nbytes: int, peer: int) -> None:
        self._runtime = runtime
        self._call = call
        self._axis = axis
        self._bytes = nbytes
        self._peer = peer
        self._start = runtime.recorder.begin_transfer(axis, nbytes)

    def waiting(self) -> Mark:
        """Record that the stream, or on a CPU the host, now waits for it."""
        self._runtime.calls.begin_wait(self._call)
        return self._runtime.recorder.mark()

    def done(self, waiting: Mark = None) -> None:
        """Record that it has ended. `waiting` is the mark that the method of that name returned."""
        self._runtime.calls.end_call(self._call)
        recorder = self._runtime.recorder
        if waiting is not None:
            recorder.record_wait(waiting, SpanKind.WAIT, self._axis, self._peer)
        recorder.end_transfer(self._start, self._axis, self._bytes, self._peer)
