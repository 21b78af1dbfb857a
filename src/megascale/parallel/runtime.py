"""What one rank runs with, handed down: the engine makes it, axes carry it, and nothing of it is a module's.

Two engines of one process therefore never meet, and what a part runs with is what it was given.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megascale.core.calls import NoCalls
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
        stream: where GEMMs run that nothing waits for yet.
        attention: which attention kernel each shape runs.
        kernels: how all other operators are chosen, and the record of what all of them run; in force while an engine
            works (ops/dispatch.py).
    """

    calls: NoCalls = field(default_factory=NoCalls)
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
