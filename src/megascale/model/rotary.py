"""Tables of rotary positions for the layers of a chunk, which may differ in base and width or have none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megascale.core.layer_spec import RopeSpec
from megascale.model.context import Rotary
from megascale.ops.rope import rotary_tables


class RotaryTables:
    """Cosines and sines for each layer; layers of equal positions share a table.

    Args:
        ropes: positions of each layer; None: a layer without rotary positions.
        length: positions that a table has from the start; it grows if more are needed.
        dtype: type of activations.
    """

    def __init__(self, ropes: Sequence[RopeSpec | None], length: int, dtype: torch.dtype) -> None:
        self._ropes = ropes
        self._length = length
        self._dtype = torch.promote_types(dtype, torch.float32)
        self._tables: dict[tuple[RopeSpec, bool, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def select(
        self, start: int, stop: int, device: torch.device, positions: torch.Tensor | None = None
    ) -> list[Rotary]:
        """Return the rows of positions `start:stop` for each layer.

        Args:
            positions: positions [s, b] of samples that have their own, counted from `start`; rows are then [s, b, ...].
        """
        rows: dict[RopeSpec | None, Rotary] = {}
        for rope in dict.fromkeys(self._ropes):
            rows[rope] = self._select_rows(rope, start, stop, device, positions)
        return [rows[rope] for rope in self._ropes]

    def differs_between(self, length: int, other_length: int) -> bool:
        """Return whether inputs of two lengths have different tables."""
        for rope in dict.fromkeys(self._ropes):
            if needs_extended_table(rope, length) != needs_extended_table(rope, other_length):
                return True
        return False

    def _select_rows(
        self, rope: RopeSpec | None, start: int, stop: int, device: torch.device, positions: torch.Tensor | None
    ) -> Rotary:
        if rope is None:
            return None
        is_extended = needs_extended_table(rope, stop)
        key = (rope, is_extended, device)
        if key not in self._tables or self._tables[key][0].shape[0] < stop:
            length = max(self._length, stop)
            self._tables[key] = rotary_tables(
                length, rope.width, rope.base, device, self._dtype, rope.scaling, is_extended
            )
        cos, sin = self._tables[key]
        cos, sin = cos[start:stop], sin[start:stop]
        if positions is None:
            return cos, sin
        return cos[positions], sin[positions]


def needs_extended_table(rope: RopeSpec | None, length: int) -> bool:
    """Return whether an input of `length` tokens has the frequencies of longrope for long inputs."""
    if rope is None or rope.scaling is None or rope.scaling.method != "longrope":
        return False
    assert rope.scaling.original_length is not None
    return length > rope.scaling.original_length
