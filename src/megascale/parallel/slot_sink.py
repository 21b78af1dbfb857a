"""The gradient sink of a parameter whose gradient lies in a slot (gradient_slots.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megascale.ops.gradient_sink import GradientSink


def _do_nothing() -> None: ...


class SlotSink(GradientSink):
    """The sink of a parameter whose gradient lies in a slot.

    Attributes:
        view: the parameter's gradient in the slot.
        before_write: called whenever `main_grad` is read, because an operator of a backward reads it to write there.
    """

    __slots__ = ("before_write", "view")

    before_write: Callable[[], None]
    view: torch.Tensor

    def __init__(self, empty: torch.Tensor) -> None:
        self.before_write = _do_nothing
        super().__init__(empty)

    @property
    def main_grad(self) -> torch.Tensor:  # type: ignore[override]
        """The parameter's gradient. Reading this attribute in a backward prepares the slot for a write."""
        self.before_write()
        return self.view

    @main_grad.setter
    def main_grad(self, view: torch.Tensor) -> None:
        self.view = view
