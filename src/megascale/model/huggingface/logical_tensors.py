"""Logical tensors of a Hugging Face folder, read from its files when they are needed and not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megascale.errors import DataError
from megascale.model.huggingface.family import StoredWeight, split_weight

# Returns rows `start .. stop` of a stored tensor; without them the whole tensor.
ReadRows = Callable[[str, int | None, int | None], Tensor]


class LogicalTensors(Mapping[str, Tensor]):
    """Logical tensors by name. Each access reads the tensor again, so that memory holds only what the caller keeps.

    Args:
        weights: stored weights of the model.
        shapes: shapes of the logical tensors.
        dtypes: dtypes of the stored weights by their names, such as "bfloat16".
        read: reads a stored weight.

    Raises DataError if the stored matrices of one logical tensor differ in their type.
    """

    def __init__(
        self,
        weights: Sequence[StoredWeight],
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
        read: ReadRows,
    ) -> None:
        self._read = read
        self._shapes = shapes
        self._dtypes: dict[str, str] = {}
        # For each tensor the stored weights that hold it: one, or those of the entries of a stack.
        self._weights: dict[str, list[StoredWeight]] = {}
        self._first_rows: dict[str, int] = {}
        # Parts of an interleaved or transposed weight, and rows of a stack, that were read last.
        self._last_split: tuple[str, dict[str, Tensor]] = ("", {})
        self._last_stack: tuple[tuple[str, int, int], Tensor] | None = None
        for weight in weights:
            first_row = 0
            for name in weight.parts:
                dtype = self._dtypes.setdefault(name, dtypes[weight.name])
                if dtype != dtypes[weight.name]:
                    first = self._weights[name][0].name
                    raise DataError(
                        f"{weight.name} is of type {dtypes[weight.name]} and {first} of type {dtype}, but both are "
                        "parts of one tensor; store them in one type"
                    )
                self._weights.setdefault(name, []).append(weight)
                self._first_rows[name] = first_row
                first_row += shapes[name][0]
        for entries in self._weights.values():
            entries.sort(key=lambda weight: weight.index)

    def __getitem__(self, name: str) -> Tensor:
        return self.read_rows(name, 0, self._shapes[name][0])

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype of a tensor without reading it."""
        return self._shapes[name], self._dtypes[name]

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start .. stop` of a tensor.

        Rows of a tensor that lies in one piece are read alone. Otherwise the whole stored weights are read, and kept
        until others are. Raises DataError for a damaged file.
        """
        weight = self._weights[name][0]
        if weight.index:
            return self._read_stack(name, start, stop)
        if weight.transposed or weight.heads:
            return self._read_split(weight)[name][start:stop]
        first_row = self._first_rows[name]
        rows = self._read(weight.name, first_row + start, first_row + stop)
        if weight.order is not None:
            return weight.order.to_logical(rows)
        return rows

    def _read_split(self, weight: StoredWeight) -> dict[str, Tensor]:
        """Return the logical tensors of one stored weight."""
        split = self._last_split  # another thread may replace it
        if split[0] != weight.name:
            self._last_split = ("", {})  # free the previous weight before the next one is read
            split = (weight.name, split_weight(weight, self._read(weight.name, None, None)))
            self._last_split = split
        return split[1]

    def _read_stack(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a stack of matrices, each of which is stored alone."""
        key = (name, start, stop)
        last = self._last_stack  # another thread may replace it
        if last is not None and last[0] == key:
            return last[1]
        self._last_stack = None
        entries = []
        for weight in self._weights[name]:
            if start <= weight.index[0] < stop:
                entries.append(split_weight(weight, self._read(weight.name, None, None))[name])
        stack = torch.stack(entries).view(stop - start, *self._shapes[name][1:])
        self._last_stack = (key, stack)
        return stack
