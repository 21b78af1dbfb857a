"""Tables of rotary positions for the layers of a chunk. Layers may differ in base and width, or have no positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megascale.core.layer_spec import RopeSpec
from megascale.model.context import Rotary
from megascale.ops.rope import make_rotary_tables


class RotaryTables:
    """Cosines and sines for each layer. Layers with equal rotary positions share a table.

    Args:
        ropes: rotary positions of each layer; None: a layer without rotary positions.
        length: minimum number of positions in a table. A longer input gets a longer table.
        dtype: type of activations. Tables are float32, or float64 for float64 activations.
    """

    def __init__(self, ropes: Sequence[RopeSpec | None], length: int, dtype: torch.dtype) -> None:
        self._distinct_ropes = list(dict.fromkeys(ropes))
        # Index in `_distinct_ropes` for each layer.
        self._rope_indices = [self._distinct_ropes.index(rope) for rope in ropes]
        # Inputs longer than the limit have other frequencies (longrope).
        self._length_limits = [_get_length_limit(rope) for rope in self._distinct_ropes]
        self._min_length = length
        self._dtype = torch.promote_types(dtype, torch.float32)
        # The key is (index in `_distinct_ropes`, whether the input is longer than the limit, device).
        self._tables: dict[tuple[int, bool, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def select(
        self,
        start: int,
        stop: int,
        device: torch.device,
        positions: torch.Tensor | None = None,
        length: int | None = None,
    ) -> list[Rotary]:
        """Return cosines and sines of positions `start:stop` for each layer.

        Args:
            positions: position of each token [s, b], relative to `start`, if positions differ between samples. The
                result is then [s, b, ...].
            length: number of tokens of the whole input, on which longrope's frequencies depend; None: `stop`.
        """
        if length is None:
            length = stop
        selected: list[Rotary] = []
        for index, rope in enumerate(self._distinct_ropes):
            if rope is None:
                selected.append(None)
                continue
            cos, sin = self._get_tables(index, rope, length, device)
            cos = cos[start:stop]
            sin = sin[start:stop]
            if positions is not None:
                cos = cos[positions]
                sin = sin[positions]
            selected.append((cos, sin))
        return [selected[index] for index in self._rope_indices]

    def has_different_tables(self, length: int, other_length: int) -> bool:
        """Return whether inputs of two lengths have different tables."""
        limits = [limit for limit in self._length_limits if limit is not None]
        return any((length > limit) != (other_length > limit) for limit in limits)

    def _get_tables(
        self, index: int, rope: RopeSpec, length: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of at least `length` positions, for an input of `length` tokens."""
        limit = self._length_limits[index]
        is_extended = limit is not None and length > limit
        key = (index, is_extended, device)
        if key not in self._tables or self._tables[key][0].shape[0] < length:
            self._tables[key] = make_rotary_tables(
                max(self._min_length, length), rope.width, rope.base, device, self._dtype, rope.scaling, is_extended
            )
        return self._tables[key]


def _get_length_limit(rope: RopeSpec | None) -> int | None:
    """Return the original context length of longrope; None if the frequencies do not depend on the input's length."""
    if rope is None or rope.scaling is None or rope.scaling.method != "longrope":
        return None
    return rope.scaling.original_length
