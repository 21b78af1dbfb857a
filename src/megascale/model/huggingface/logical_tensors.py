"""Logical tensors of a Hugging Face folder, read from its files when they are needed and not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

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
    """

    def __init__(
        self,
        weights: Sequence[StoredWeight],
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
        read: ReadRows,
    ) -> None:
        self._read = read
        self._weights: dict[str, StoredWeight] = {}
        self._first_rows: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._last_split: tuple[str, dict[str, Tensor]] = ("", {})
        for weight in weights:
            first_row = 0
            for name in weight.parts:
                self._weights[name] = weight
                self._first_rows[name] = first_row
                self._shapes[name] = shapes[name]
                self._dtypes[name] = dtypes[weight.name]
                first_row += shapes[name][0]

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
        """Return rows `start .. stop` of a tensor as memory of its own.

        Rows of a tensor that lies in one piece are read alone. Otherwise the whole stored weight is read, and kept
        until another one is. Raises DataError for a damaged file.
        """
        weight = self._weights[name]
        if not weight.transposed and not weight.heads:
            first_row = self._first_rows[name]
            return self._read(weight.name, first_row + start, first_row + stop)
        split = self._last_split  # another thread may replace it
        if split[0] != weight.name:
            self._last_split = ("", {})  # free the previous weight before the next one is read
            split = (weight.name, split_weight(weight, self._read(weight.name, None, None)))
            self._last_split = split
        return split[1][name][start:stop]
