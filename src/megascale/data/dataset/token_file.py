"""What every format of token files has: the tokens of all documents, one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from numpy.typing import NDArray


class TokenFile(ABC):
    """A read-only token file; opening it reads no tokens, since each rank does so. Made from an entry of data.train.

    Attributes:
        prefix: its path, as messages name it.
        tokens: number of tokens in all.

    Making one raises DataError if a file is missing, damaged or of another kind.
    """

    prefix: str
    tokens: int

    @abstractmethod
    def __init__(self, entry: str | Path) -> None: ...

    @property
    @abstractmethod
    def stream(self) -> NDArray:
        """All tokens, integers [tokens], of which slices cost what they hold: a memory-mapped view."""

    @classmethod
    @abstractmethod
    def files(cls, entry: str | Path) -> list[Path]:
        """The files that it consists of: a run that goes on is refused if their contents have changed."""

    def read(self, start: int, count: int) -> NDArray:
        """Tokens `start : start + count`, a view; IndexError outside."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start}..{start + count} are outside 0..{self.tokens}")
        return self.stream[start : start + count]
