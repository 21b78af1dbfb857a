"""Interface of all tokenizers; tokenizer.py opens the kinds."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
# Names of that token in published tokenizers, in order of preference.
ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<|eos|>", "<eos>", "[EOS]", "<eod>", "<|end▁of▁sentence|>")
# Longer documents are encoded in slices cut at line ends: tokenizers need many times a text's size in memory.
_SLICE = 1 << 20  # characters
_BATCH = 1 << 24  # characters
_MAX_LOST_SHARE = 0.5  # of a text's bytes


class Tokenizer(ABC):
    """Text to token ids and back.

    Text never yields a special token: `<|endoftext|>` written in a document is encoded as plain characters.

    Attributes:
        vocab_size: one more than the largest id, so that every id indexes an embedding of that many rows.
        end_of_document: id put after each document.
        begin_of_prompt: ids that the tokenizer's own template puts before a text (Llama: `<s>`).
        loses_text: some text has no tokens of its own, so documents must be counted with `count_lost_bytes`.
    """

    vocab_size: int
    end_of_document: int
    begin_of_prompt: tuple[int, ...] = ()
    loses_text: bool = False

    @property
    def begin_of_document(self) -> tuple[int, ...]:
        """Ids put before each document: those before a prompt, unless the previous document ends with the same id."""
        if self.begin_of_prompt == (self.end_of_document,):
            return ()
        return self.begin_of_prompt

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @property
    def sha256(self) -> str:
        """Hash of the tokenizer.json's contents, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        return [int(i) for ids in self._encode(list(_slices(text))) for i in ids]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text to be continued, with the beginning of the tokenizer's own template."""
        return list(self.begin_of_prompt) + self.encode(text)

    def encode_documents(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the ids of several documents, each with its begin and end, as one array, and the length of each."""
        tokens = array("I")
        lengths = np.zeros(len(texts), dtype=np.int64)
        begin = self.begin_of_document
        current = -1  # the document whose tokens come last in the array
        for numbers, slices in _batches(texts):
            for number, ids in zip(numbers, self._encode(slices), strict=True):
                if number > current:
                    if current >= 0:
                        tokens.append(self.end_of_document)
                    tokens.extend(begin)
                    lengths[number] = len(begin) + 1
                    current = number
                if isinstance(ids, np.ndarray):
                    tokens.frombytes(ids.astype(np.uint32, copy=False).tobytes())
                else:
                    tokens.extend(ids)
                lengths[number] += len(ids)
        if current >= 0:
            tokens.append(self.end_of_document)
        return np.frombuffer(tokens, dtype=np.uint32), lengths

    def count_lost_bytes(self, texts: Sequence[str]) -> int:
        """Return about how many bytes of the texts, white space aside, have no token of their own."""
        if not self.loses_text:
            return 0
        return sum(self._count_lost_bytes(slices) for _, slices in _batches(texts))

    def _count_lost_bytes(self, texts: list[str]) -> int:
        return 0

    def encode_markup(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the ids of texts whose names of special tokens stand for the tokens, such as rendered chat templates.

        Returns:
            For each text the ids, and each token's range [start, stop) of characters.

        Raises DataError if the tokenizer's kind does not support it.
        """
        raise DataError("conversations need a Hugging Face tokenizer.json; this tokenizer is of another kind")

    def list_special_tokens(self) -> list[str]:
        """Return the names of special tokens."""
        return []

    @abstractmethod
    def to_json(self) -> str:
        """Return the contents of a tokenizer.json."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | NDArray) -> str:
        """Return the text of ids with special tokens; bytes that are not UTF-8 become the replacement character."""

    @abstractmethod
    def _encode(self, texts: list[str]) -> list[Any]:
        """Return the ids of each text without special tokens: lists or uint32 arrays."""


def check_representation(tokenizer: Tokenizer, size: int, lost: int, source: str) -> None:
    """Refuse a tokenizer that cannot represent most of a text; DataError naming `source` and the share.

    Args:
        size: bytes of the text.
        lost: number of these bytes that `count_lost_bytes` counts.
    """
    if lost <= _MAX_LOST_SHARE * size:
        return
    raise DataError(
        f"{source}: the tokenizer ({tokenizer.vocab_size:,} entries) cannot represent {lost / size:.0%} of the text, "
        f"which becomes unknown tokens or is dropped, and at most {_MAX_LOST_SHARE:.0%} may be; choose a tokenizer "
        "of the text's language, or leave --tokenizer out to have one trained"
    )


def _batches(texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
    """Yield numbers of texts and their slices, about _BATCH characters at a time: ids take many times the memory."""
    numbers: list[int] = []
    slices: list[str] = []
    size = 0
    for number, text in enumerate(texts):
        for part in _slices(text):
            numbers.append(number)
            slices.append(part)
            size += len(part)
            if size >= _BATCH:
                yield numbers, slices
                numbers, slices = [], []
                size = 0
    if slices:
        yield numbers, slices


def _slices(text: str) -> Iterator[str]:
    """Yield a text in parts of at most _SLICE characters, cut after a line's end if possible; one part if empty."""
    start = 0
    while len(text) - start > _SLICE:
        stop = text.rfind("\n", start, start + _SLICE) + 1 or start + _SLICE
        yield text[start:stop]
        start = stop
    yield text[start:] if start else text
