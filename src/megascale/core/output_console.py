"""Console of the commands, which prints tables without cutting words."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_PROSE_WIDTH = 72  # widest column of prose, in characters, where the output has no width of its own
_UNLIMITED_WIDTH = 1_000_000


class OutputConsole(Console):
    """Console that prints each word of a table in one piece.

    A narrow terminal receives one block of lines per row. A pipe or a file receives wider lines, since programs search
    them for names. `COLUMNS` sets a width for both.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects as rich's console does, except for a table alone."""
        if len(objects) == 1 and isinstance(objects[0], Table):
            self._print_table(objects[0], options)
        else:
            super().print(*objects, **options)

    def _print_table(self, table: Table, options: dict[str, Any]) -> None:
        ranges = self._measure_columns(table)
        # rich's minimum of a column without line breaks is its longest word.
        margins = self._measure_table(table).maximum - sum(width.maximum for width in ranges)
        available = self.width
        if not self.is_terminal and "COLUMNS" not in os.environ:
            prose = [max(width.minimum, min(width.maximum, _PROSE_WIDTH)) for width in ranges]
            available = max(available, sum(prose) + margins)
        if sum(width.minimum for width in ranges) + margins > available:
            self._print_blocks(table)
            return
        own_widths = [column.width for column in table.columns]
        if sum(width.maximum for width in ranges) + margins > available:
            widths = _share_width(ranges, available - margins)
            for column, width in zip(table.columns, widths, strict=True):
                column.width = width
        previous_width = self._width
        self._width = available
        try:
            super().print(table, **options)
        finally:
            self._width = previous_width
            for column, own_width in zip(table.columns, own_widths, strict=True):
                column.width = own_width

    def _measure_table(self, table: Table) -> Measurement:
        return Measurement.get(self, self.options.update(width=_UNLIMITED_WIDTH), table)

    def _measure_columns(self, table: Table) -> list[Measurement]:
        """Return the width of each column's longest word and longest line."""
        ranges = []
        for column in table.columns:
            texts = [*column.cells]
            if table.show_header:
                texts.append(column.header)
            minimum = maximum = 0
            for text in texts:
                measurement = Measurement.get(self, self.options.update(width=_UNLIMITED_WIDTH), text)
                minimum = max(minimum, measurement.maximum if column.no_wrap else measurement.minimum)
                maximum = max(maximum, measurement.maximum)
            ranges.append(Measurement(minimum, maximum))
        return ranges

    def _print_blocks(self, table: Table) -> None:
        """Print each row as lines of heading and cell."""
        if table.title:
            super().print(table.title, soft_wrap=True)
        headings = [self._join_lines(column.header if table.show_header else "") for column in table.columns]
        indent = max(len(heading) for heading in headings) + 2
        for cells in zip(*(column.cells for column in table.columns), strict=True):
            for heading, cell in zip(headings, cells, strict=True):
                text = self._join_lines(cell)
                if not text:
                    continue
                if heading:
                    text = Text(heading.plain.ljust(indent)) + text
                super().print(text, soft_wrap=True)
            super().print()

    def _join_lines(self, cell: Any) -> Text:
        """Return a cell's text on one line."""
        text = cell if isinstance(cell, Text) else self.render_str(str(cell))
        return Text(" ").join(text.split("\n"))


def _share_width(ranges: list[Measurement], available: int) -> list[int]:
    """Return the width of each column, so that their sum is at most `available`.

    Each column receives the width of its longest word. What remains is shared equally among columns that need more.
    """
    widths = [width.minimum for width in ranges]
    remaining = available - sum(widths)
    by_need = sorted(range(len(ranges)), key=lambda index: ranges[index].span)
    for position, index in enumerate(by_need):
        share = remaining // (len(by_need) - position)
        extra = min(share, ranges[index].span)
        widths[index] += extra
        remaining -= extra
    return widths
