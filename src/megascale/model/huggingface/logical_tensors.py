"""Logical tensors of a Hugging Face folder, which are read from the files at each access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megascale.errors import DataError
from megascale.model.huggingface.family import StoredWeight, split_weight

# (name, start, stop) -> rows `start:stop` of a stored tensor; (name, None, None) -> the whole tensor.
ReadRows = Callable[[str, int | None, int | None], Tensor]


class LogicalTensors(Mapping[str, Tensor]):
    """Logical tensors by name. Each access reads the tensor again, so the mapping itself needs little memory.

    Args:
        weights: stored weights of the model.
        shapes: shapes of the logical tensors by name.
        dtypes: dtypes of the stored weights by name, such as "bfloat16".
        read: reads rows of a stored weight.

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
        # For each logical tensor the stored weight that holds it, or the stored entries of a stack in order.
        self._weights: dict[str, list[StoredWeight]] = {}
        # First row of each logical tensor within its stored weight.
        self._first_rows: dict[str, int] = {}
        # Name and logical tensors of the interleaved or transposed weight that was read last.
        self._last_split: tuple[str, dict[str, Tensor]] = ("", {})
        # Arguments and result of the last call of `_read_stack`.
        self._last_stack: tuple[tuple[str, int, int], Tensor] | None = None
        for weight in weights:
            first_row = 0
            for name in weight.logical_names:
                dtype = self._dtypes.setdefault(name, dtypes[weight.name])
                if dtype != dtypes[weight.name]:
                    first = self._weights[name][0].name
                    raise DataError(
                        f"{weight.name} is of type {dtypes[weight.name]} and {first} of type {dtype}, but both are "
                        "parts of one tensor; store both in one type"
                    )
                self._weights.setdefault(name, []).append(weight)
                self._first_rows[name] = first_row
                first_row += shapes[name][0]
        for entries in self._weights.values():
            entries.sort(key=lambda weight: weight.stack_index)

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
        """Return rows `start:stop` of a logical tensor. Raises DataError for a damaged file.

        Usually only these rows are read. A stored weight that is transposed or interleaved, or an entry of a stack, is
        read whole. The result is kept until the next such read, for callers that read rows in turn.
        """
        weight = self._weights[name][0]
        if weight.stack_index:
            return self._read_stack(name, start, stop)
        if weight.is_transposed or weight.interleaved_heads:
            return self._read_split(weight)[name][start:stop]
        first_row = self._first_rows[name]
        rows = self._read(weight.name, first_row + start, first_row + stop)
        if weight.stack_order is not None:
            return weight.stack_order.to_logical(rows)
        return rows

    def _read_split(self, weight: StoredWeight) -> dict[str, Tensor]:
        """Return the logical tensors of a transposed or interleaved weight by name."""
        # Read the attribute once, because another thread may replace it.
        name, tensors = self._last_split
        if name != weight.name:
            # Free the previous weight before the next weight is read.
            del tensors
            self._last_split = ("", {})
            tensors = split_weight(weight, self._read(weight.name, None, None))
            self._last_split = (weight.name, tensors)
        return tensors

    def _read_stack(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a stack whose entries are stored one by one."""
        arguments = (name, start, stop)
        # Read the attribute once, because another thread may replace it.
        last_stack = self._last_stack
        if last_stack is not None and last_stack[0] == arguments:
            return last_stack[1]
        # Free the previous stack before the next stack is read.
        del last_stack
        self._last_stack = None
        entries = []
        for weight in self._weights[name]:
            if start <= weight.stack_index[0] < stop:
                entries.append(split_weight(weight, self._read(weight.name, None, None))[name])
        stack = torch.stack(entries).view(stop - start, *self._shapes[name][1:])
        self._last_stack = (arguments, stack)
        return stack
