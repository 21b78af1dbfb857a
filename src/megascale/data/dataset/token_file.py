"""Interface of all formats of token files, which hold the tokens of all documents one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megascale.core.batch import NO_FIELDS, SampleFields
from megascale.errors import DataError


class TokenFile(ABC):
    """A read-only token file. Opening one must be cheap and read no tokens, since every rank opens it.

    Args:
        entry: entry of data.train that names the file.

    Attributes:
        prefix: path of the file, for messages.
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

    def read_range(self, start: int, count: int) -> NDArray:
        """Return `count` tokens from token `start` on. Raises DataError if the stream ends before them."""
        try:
            view = self.stream[start : start + count]
        except (StopIteration, LookupError, ValueError, EOFError) as error:
            raise DataError(
                f"{self.prefix}: reading tokens {start:,} to {start + count - 1:,} raised {type(error).__name__}: "
                f"{error}; `stream` must hold the {self.tokens:,} tokens of `tokens`"
            ) from error
        if len(view) != count:
            raise DataError(
                f"{self.prefix}: the stream ends after token {start + len(view) - 1:,}, and `tokens` is "
                f"{self.tokens:,}; the file was truncated while it was read, or its format counts wrongly"
            )
        return view

    @classmethod
    @abstractmethod
    def files(cls, entry: str | Path) -> list[Path]:
        """Return the paths of an entry's files. A run does not resume if the contents of a file have changed."""

    # optional fields of its samples -----------------------------------------------------------------------------

    @classmethod
    def fields(cls, entry: str | Path) -> SampleFields:
        """Return the optional fields that samples of an entry carry, without opening it. By default there are none."""
        return NO_FIELDS

    @property
    def loss_weights(self) -> NDArray | None:
        """Loss weight of each token as a target, finite and at least 0, [tokens]; None: all weights are 1."""
        return None

    @property
    def positions(self) -> NDArray | None:
        """Position of each token in its document, [tokens]; None: positions are counted from the sample's start."""
        return None

    @property
    def document_starts(self) -> NDArray | None:
        """Ascending positions in `stream` at which documents begin; None: each sample is one document."""
        return None

    def read_document_starts(self) -> NDArray | None:
        """Return the starts of documents for data.document_mask; None if the format has no documents.

        A format that keeps documents apart only with data.document_mask returns them here, and None as
        `document_starts`.
        """
        return self.document_starts


def too_short_error(name: str, tokens: int, sequence_length: int) -> DataError:
    """Return the error for training data of fewer tokens than one sample needs."""
    return DataError(
        f"data.train: {name} has {tokens} tokens and one sample needs model.sequence_length + 1 = "
        f"{sequence_length + 1}; use a shorter sequence or more text"
    )


def check_token_ids(setting: str, file: str, tokens: NDArray, first: int, vocab_size: int | None) -> None:
    """Raise DataError naming the first token id outside the vocabulary, and its position.

    Args:
        setting: the key or option that named the file.
        file: name of the file.
        tokens: part of the file's tokens, integers [tokens].
        first: position of `tokens[0]` in the file.
        vocab_size: ids must be below this; None accepts all ids.
    """
    if vocab_size is None or not len(tokens) or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return
    position = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    raise DataError(
        f"{setting}: {file} holds token id {tokens[position]} and model.vocab_size={vocab_size} (token "
        f"{first + position:,} of the file; ids are 0 to {vocab_size - 1}); the file was made with another tokenizer, "
        "or is damaged: set model.vocab_size to the size of that tokenizer's vocabulary, or build the data again"
    )
