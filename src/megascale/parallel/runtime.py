"""What one rank runs with, handed down: the engine makes it, axes carry it, and nothing of it is a module's.

Two engines of one process therefore never meet, and what a part runs with is what it was given.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megascale.core.calls import NoCalls
from megascale.core.spans import Mark, NoRecorder, Recorder, SpanKind
from megascale.ops import side_stream
from megascale.ops.attention import AttentionChooser
from megascale.ops.dispatch import Kernels
from megascale.ops.side_stream import InOrder, SideStream


def _in_order() -> InOrder:
    return side_stream.InOrder()


@dataclass(eq=False)
class Runtime:
    """One rank's.

    Attributes:
        calls: where the engine writes what it starts and waits for; a trainer puts its record there.
        recorder: what times it; a trainer puts its timers there.
        stream: where GEMMs run that nothing waits for yet.
        attention: which attention kernel each shape runs.
        kernels: how all other operators are chosen, and the record of what all of them run; in force while an engine
            works (ops/dispatch.py).
    """

    calls: NoCalls = field(default_factory=NoCalls)
    recorder: Recorder = field(default_factory=NoRecorder)
    stream: InOrder = field(default_factory=_in_order)
    attention: AttentionChooser = field(default_factory=AttentionChooser)
    kernels: Kernels = field(default_factory=Kernels)
    _side: SideStream | None = None  # one, however often it is turned on: cuBLAS has a workspace for each stream

    def use_side_stream(self, wanted: bool, device: torch.device) -> str:
        """From now on run independent GEMMs on a side stream, or one after another; what is done, in words."""
        self.stream.synchronize()
        if wanted and device.type == "cuda":
            self._side = self._side or SideStream(device)
            self.stream = self._side
            return "on a side stream"
        self.stream = _in_order()
        return "one after another" + (f": {device.type} has no streams" if wanted else "")

    def transfer(self, group: str, axis: int, op: str, nbytes: int, waited_on: int = -1) -> Transfer:
        """A collective or message of `nbytes` on `group`, along `axis` (core/spans.py), starts now.

        waited_on: the rank that has to act too, -1 for several.
        """
        return Transfer(self, self.calls.begin(group, op, nbytes), axis, nbytes, waited_on)


class Transfer:
    """A collective or message under way, for those who record it."""

    __slots__ = ("_axis", "_bytes", "_call", "_runtime", "_since", "_waited_on")

    def __init__(self, runtime: Runtime, call: int, axis: int, nbytes: int, waited_on: int) -> None:
        self._runtime, self._call, self._axis, self._bytes, self._waited_on = runtime, call, axis, nbytes, waited_on
        self._since = runtime.recorder.begin_transfer(axis, nbytes)

    def waiting(self) -> Mark:
        """The stream, or on a CPU the host, now waits for it."""
        self._runtime.calls.wait(self._call)
        return self._runtime.recorder.mark()

    def done(self, waiting: Mark = None) -> None:
        """It has ended; waiting: what `waiting` gave."""
        self._runtime.calls.done(self._call)
        recorder = self._runtime.recorder
        if waiting is not None:
            recorder.record_wait(waiting, SpanKind.WAIT, self._axis, self._waited_on)
        recorder.landed(self._since, self._axis, self._bytes, self._waited_on)
