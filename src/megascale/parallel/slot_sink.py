"""The gradient sink of a parameter whose gradient lies in a slot (gradient_slots.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megascale.ops.gradient_sink import GradientSink


def _ignore() -> None: ...


class SlotSink(GradientSink):
    """The sink of a parameter whose gradient lies in a slot.

    Attributes:
        view: the parameter's part of the slot.
        before_write: called before the address of the gradient is read, which announces a write in a backward.
    """

    __slots__ = ("before_write", "view")

    before_write: Callable[[], None]
    view: torch.Tensor

    def __init__(self, empty: torch.Tensor) -> None:
        self.before_write = _ignore
        super().__init__(empty)

    @property
    def main_grad(self) -> torch.Tensor:  # type: ignore[override]
        """The parameter's gradient. Reading it in a backward makes its slot ready for a write."""
        self.before_write()
        return self.view

    @main_grad.setter
    def main_grad(self, view: torch.Tensor) -> None:
        self.view = view
