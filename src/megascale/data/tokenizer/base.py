"""What every tokenizer can do; the kinds are made by tokenizer.py."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

END_OF_DOCUMENT = "<|endoftext|>"
# What published tokenizers call it, in order of preference.
ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<|eos|>", "<eos>", "[EOS]", "<eod>", "<|end▁of▁sentence|>")
# Longer documents are encoded in slices cut at line ends: tokenizers need many times a text's size in memory.
_SLICE = 1 << 20


class Tokenizer(ABC):
    """Attributes:

        vocab_size: one more than the largest id, so that every id indexes an embedding of that many rows.
        end_of_document: id put after each document.

    Text never yields a special token: `<|endoftext|>` written in a document is encoded as plain characters.
    """

    vocab_size: int
    end_of_document: int

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @property
    def sha256(self) -> str:
        """Hash of the tokenizer.json's contents, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added."""
        return [int(i) for ids in self._encode(list(_slices(text))) for i in ids]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text to be continued: begun as the tokenizer's own template begins one (Llama: `<s>`)."""
        return self.encode(text)

    def encode_documents(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Ids of several documents, each with its end, as one array, and the length of each (end included)."""
        tokens = array("I")
        lengths = np.zeros(len(texts), dtype=np.int64)
        slices = [(d, part) for d, text in enumerate(texts) for part in _slices(text)]
        ids = self._encode([part for _, part in slices])
        last = len(slices) - 1
        for at, (d, _) in enumerate(slices):
            piece = ids[at]
            if isinstance(piece, np.ndarray):
                tokens.frombytes(piece.astype(np.uint32, copy=False).tobytes())
            else:
                tokens.extend(piece)
            lengths[d] += len(piece)
            if at == last or slices[at + 1][0] != d:
                tokens.append(self.end_of_document)
                lengths[d] += 1
        return np.frombuffer(tokens, dtype=np.uint32), lengths

    @abstractmethod
    def to_json(self) -> str:
        """The tokenizer.json's contents."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | NDArray) -> str:
        """The text of ids, special tokens shown; bytes that are no UTF-8 become the replacement character."""

    @abstractmethod
    def _encode(self, texts: list[str]) -> list[Any]:
        """Ids of each text, nothing added: lists or uint32 arrays."""


def _slices(text: str) -> Iterator[str]:
    """A text in parts of at most _SLICE characters, cut after a line's end where there is one; one part if empty."""
    start = 0
    while len(text) - start > _SLICE:
        stop = text.rfind("\n", start, start + _SLICE) + 1 or start + _SLICE
        yield text[start:stop]
        start = stop
    yield text[start:] if start else text
