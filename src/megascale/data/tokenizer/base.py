"""Interface of all tokenizers. tokenizer.py reads them from files."""

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
# Names of the end-of-document token in published tokenizers, in order of preference.
END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<|eos|>", "<eos>", "[EOS]", "<eod>", "<|end▁of▁sentence|>")
# Longer documents are encoded in slices that end at line ends, since tokenizers need many times a text's size in
# memory.
_SLICE_CHARACTERS = 1 << 20
_BATCH_CHARACTERS = 1 << 24  # encoded at a time
_MAX_LOST_SHARE = 0.5  # largest part of a text's bytes that a tokenizer may be unable to represent


class Tokenizer(ABC):
    """Encoder of text to token ids, and decoder.

    Text does not yield special tokens: `<|endoftext|>` in a document is encoded as plain characters.

    Attributes:
        vocab_size: one more than the largest id, so that an embedding of this many rows has a row for every id.
        end_of_document: id after each document.
        begin_of_prompt: ids that the tokenizer's own template puts before a text (Llama: `<s>`).
        loses_text: whether there is text that becomes unknown tokens or is dropped (`count_lost_bytes`).
    """

    vocab_size: int
    end_of_document: int
    begin_of_prompt: tuple[int, ...] = ()
    loses_text: bool = False

    @property
    def begin_of_document(self) -> tuple[int, ...]:
        """Ids before each document: `begin_of_prompt`, unless they equal the end of the previous document."""
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
        token_ids: list[int] = []
        for slice_ids in self._encode(list(split_slices(text))):
            token_ids += map(int, slice_ids)
        return token_ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text that generation continues, after `begin_of_prompt`."""
        return list(self.begin_of_prompt) + self.encode(text)

    def encode_continuation(self, text: str) -> list[int]:
        """Return the ids of a text that follows other text, without what the tokenizer adds to the start of a text."""
        return self.encode(text)

    def encode_documents(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the ids of documents with their begin and end, uint32 [tokens], and each document's length, int64."""
        tokens = array("I")
        lengths = np.zeros(len(texts), dtype=np.int64)
        begin = self.begin_of_document
        open_document = -1  # index of the document that still lacks its end token
        for documents, slices in _batch_slices(texts):
            for document, ids in zip(documents, self._encode(slices), strict=True):
                if document > open_document:
                    if open_document >= 0:
                        tokens.append(self.end_of_document)
                    tokens.extend(begin)
                    lengths[document] = len(begin) + 1
                    open_document = document
                if isinstance(ids, np.ndarray):
                    tokens.frombytes(ids.astype(np.uint32, copy=False).tobytes())
                else:
                    tokens.extend(ids)
                lengths[document] += len(ids)
        if open_document >= 0:
            tokens.append(self.end_of_document)
        return np.frombuffer(tokens, dtype=np.uint32), lengths

    def count_lost_bytes(self, texts: Sequence[str]) -> int:
        """Return about how many bytes of the texts became unknown tokens or were dropped, without white space."""
        if not self.loses_text:
            return 0
        return sum(self._count_lost_bytes(slices) for _, slices in _batch_slices(texts))

    def _count_lost_bytes(self, texts: list[str]) -> int:
        return 0

    def encode_markup(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the ids of texts in which the name of a special token stands for the token, as in rendered chats.

        Returns:
            For each text, its ids and the range [start, stop) of characters of each id.

        Raises DataError if the tokenizer is not a Hugging Face tokenizer.json.
        """
        raise DataError(
            "conversations need a Hugging Face tokenizer.json, and this tokenizer is of another kind; name one with "
            "--tokenizer"
        )

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
    """Raise DataError for a tokenizer that loses more than half of a text.

    Args:
        size: bytes of the text.
        lost: result of `count_lost_bytes` for the text.
        source: name of the text, for the message.
    """
    if lost <= _MAX_LOST_SHARE * size:
        return
    raise DataError(
        f"{source}: the tokenizer ({tokenizer.vocab_size:,} entries) cannot represent {lost / size:.0%} of the text, "
        f"which becomes unknown tokens or is dropped, and at most {_MAX_LOST_SHARE:.0%} may be; choose a tokenizer "
        "of the text's language, or leave --tokenizer out to have one trained"
    )


def _batch_slices(texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
    """Yield batches of slices of texts, each with the index of its text, of about _BATCH_CHARACTERS characters.

    Batches bound the memory, since ids take many times the memory of their text.
    """
    text_indices: list[int] = []
    slices: list[str] = []
    size = 0
    for text_index, text in enumerate(texts):
        for text_slice in split_slices(text):
            text_indices.append(text_index)
            slices.append(text_slice)
            size += len(text_slice)
            if size >= _BATCH_CHARACTERS:
                yield text_indices, slices
                text_indices, slices = [], []
                size = 0
    if slices:
        yield text_indices, slices


def split_slices(text: str) -> Iterator[str]:
    """Yield slices of a text of at most _SLICE_CHARACTERS characters, which end at line ends if possible.

    Empty text is one slice.
    """
    start = 0
    while len(text) - start > _SLICE_CHARACTERS:
        stop = text.rfind("\n", start, start + _SLICE_CHARACTERS) + 1
        if not stop:  # there is no line end
            stop = start + _SLICE_CHARACTERS
        yield text[start:stop]
        start = stop
    yield text[start:]
