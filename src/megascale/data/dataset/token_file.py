"""Interface of all formats of token files: the tokens of all documents, one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from numpy.typing import NDArray

from megascale.core.batch import NO_FIELDS, SampleFields
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

    # optional fields of its samples -----------------------------------------------------------------------------

    @classmethod
    def fields(cls, entry: str | Path) -> SampleFields:
        """Return the optional fields that samples of an entry carry, without opening it: none by default."""
        return NO_FIELDS

    @property
    def loss_weights(self) -> NDArray | None:
        """Weight of each token's loss as a target, finite and at least 0 [tokens]; None: all are 1."""
        return None

    @property
    def positions(self) -> NDArray | None:
        """Position of each token in its document [tokens]; None: samples count from 0."""
        return None

    @property
    def document_starts(self) -> NDArray | None:
        """Ascending offsets of documents in `stream`; None: each sample is one document."""
        return None

    def read_document_starts(self) -> NDArray | None:
        """Return the ascending offsets of documents in `stream` for data.document_mask; None: the format has none."""
        return self.document_starts


def too_short_error(name: str, tokens: int, sequence_length: int) -> DataError:
    """Return the error for training data of fewer tokens than one sample needs."""
    return DataError(
        f"data.train: {name} has {tokens} tokens and one sample needs model.sequence_length + 1 = "
        f"{sequence_length + 1}; use a shorter sequence or more text"
    )
