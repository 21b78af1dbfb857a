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
        self._distinct = list(dict.fromkeys(ropes))
        self._index_of_layer = [self._distinct.index(rope) for rope in ropes]
        # Inputs longer than this have other frequencies.
        self._limits = [_find_limit(rope) for rope in self._distinct]
        self._length = length
        self._dtype = torch.promote_types(dtype, torch.float32)
        self._tables: dict[tuple[int, bool, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def select(
        self,
        start: int,
        stop: int,
        device: torch.device,
        positions: torch.Tensor | None = None,
        length: int | None = None,
    ) -> list[Rotary]:
        """Return the rows of positions `start:stop` for each layer.

        Args:
            positions: positions [s, b] of samples that have their own, counted from `start`; rows are then [s, b, ...].
            length: tokens of the whole input, if it goes on after `stop`; longrope's frequencies depend on it.
        """
        rows: list[Rotary] = []
        for index, rope in enumerate(self._distinct):
            if rope is None:
                rows.append(None)
            else:
                cos, sin = self._find_tables(index, rope, stop if length is None else length, device)
                cos, sin = cos[start:stop], sin[start:stop]
                if positions is not None:
                    cos, sin = cos[positions], sin[positions]
                rows.append((cos, sin))
        return [rows[index] for index in self._index_of_layer]

    def differs_between(self, length: int, other_length: int) -> bool:
        """Return whether inputs of two lengths have different tables."""
        limits = [limit for limit in self._limits if limit is not None]
        return any((length > limit) != (other_length > limit) for limit in limits)

    def _find_tables(
        self, index: int, rope: RopeSpec, length: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables of an input of `length` tokens, or longer ones."""
        limit = self._limits[index]
        is_extended = limit is not None and length > limit
        key = (index, is_extended, device)
        if key not in self._tables or self._tables[key][0].shape[0] < length:
            self._tables[key] = rotary_tables(
                max(self._length, length), rope.width, rope.base, device, self._dtype, rope.scaling, is_extended
            )
        return self._tables[key]


def _find_limit(rope: RopeSpec | None) -> int | None:
    """Return the original context length of longrope; None: the frequencies do not depend on the length."""
    if rope is None or rope.scaling is None or rope.scaling.method != "longrope":
        return None
    return rope.scaling.original_length
