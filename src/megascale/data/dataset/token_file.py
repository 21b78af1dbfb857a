"""Interface of all formats of token files: the tokens of all documents, one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from numpy.typing import NDArray

from megascale.errors import DataError


class TokenFile(ABC):
    """A read-only token file, made from an entry of data.train. Opening it reads no tokens, since every rank does so.

    Attributes:
        prefix: its path, as messages name it.
        tokens: number of tokens.

    The constructor raises DataError if a file is missing, damaged or of another kind.
    """

    prefix: str
    tokens: int

    @abstractmethod
    def __init__(self, entry: str | Path) -> None: ...

    @property
    @abstractmethod
    def stream(self) -> NDArray:
        """All tokens, integers [tokens]: a memory-mapped view whose slices cost only their own size."""

    @classmethod
    @abstractmethod
    def files(cls, entry: str | Path) -> list[Path]:
        """Return the files of an entry: a run that resumes is refused if their contents have changed."""

    def read(self, start: int, count: int) -> NDArray:
        """Return tokens `start : start + count`, a view; IndexError outside."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start}..{start + count} are outside 0..{self.tokens}")
        return self.stream[start : start + count]


def too_short_error(name: str, tokens: int, sequence_length: int) -> DataError:
    """Return the error for training data of fewer tokens than one sample needs."""
    return DataError(
        f"data.train: {name} has {tokens} tokens and one sample needs model.sequence_length + 1 = "
        f"{sequence_length + 1}; use a shorter sequence or more text"
    )
