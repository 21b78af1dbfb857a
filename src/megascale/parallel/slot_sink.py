"""Gradient sinks of parameters whose gradients lie in slots (gradient_slots.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

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


class RowPart(NamedTuple):
    """A part of a divided table.

    Attributes:
        view: gradients of these rows, in a slot.
        open: takes the memory of the part from its previous users. open(is_overwritten) zeroes it unless a GEMM
            overwrites it.
        reduce: starts the reduction of the part.
    """

    rows: slice
    view: torch.Tensor
    open: Callable[[bool], None]
    reduce: Callable[[], None]


def run_at_once(action: Callable[[], None]) -> None:
    """Run communication where it is due, outside of captures."""
    action()


class TableSink(SlotSink):
    """The sink of a table whose gradient exists in parts. Each part is reduced as soon as it is written.

    Attributes:
        parts: the parts, in the order of rows.
        run: runs the communication before and after the write of a part. In a capture it cuts the graph instead.
        observe: called with each part's gradients before their reduction; None: not called.
    """

    __slots__ = ("observe", "parts", "run")

    is_divided = True
    parts: list[RowPart]
    run: Callable[[Callable[[], None]], None]
    observe: Callable[[torch.Tensor], None] | None

    def __init__(self, empty: torch.Tensor) -> None:
        self.parts = []
        self.run = run_at_once
        self.observe = None
        super().__init__(empty)

    @property
    def main_grad(self) -> torch.Tensor:  # type: ignore[override]
        """Raise, because the gradient of all rows does not exist at once."""
        raise AssertionError("the gradient of a divided table is written by `write_rows`")

    @main_grad.setter
    def main_grad(self, view: torch.Tensor) -> None:
        """Ignore the empty gradient that the constructor sets."""

    def write_rows(self, is_overwritten: bool = False) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (rows, their gradients), to which the caller adds before it takes the next item."""
        for part in self.parts:
            self.run(partial(part.open, is_overwritten))
            yield part.rows, part.view
            if self.observe is not None:
                self.observe(part.view)
            self.run(part.reduce)
