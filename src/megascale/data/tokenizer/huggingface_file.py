"""Hugging Face `tokenizer.json` files, and byte-level BPE trained here (saved as such a file)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megascale.data.tokenizer.base import END_OF_DOCUMENT, ENDS, Tokenizer
from megascale.data.tokenizer.huggingface_record import (
    can_lose_text,
    is_byte_level,
    protect_special_tokens,
    unknown_id,
)
from megascale.errors import ConfigError, DataError

CONFIG = "tokenizer_config.json"


class NotATokenizerError(ValueError):
    """Contents that are not those of a tokenizer.json."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` library."""

    _special: ClassVar[list[str]] = [END_OF_DOCUMENT]

    def __init__(
        self,
        inner,
        end_of_document: str | None = None,
        source: str = "tokenizer",
        record: dict[str, Any] | None = None,
    ) -> None:
        from tokenizers import pre_tokenizers

        self._inner = inner
        self._source = source
        record = json.loads(inner.to_str()) if record is None else record
        _encode_text_alone(inner)
        vocabulary = inner.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{source} has an empty vocabulary; use another tokenizer.json")
        self.vocab_size = max(vocabulary.values()) + 1
        names = (end_of_document,) if end_of_document else ENDS
        found = next((name for name in names if name in vocabulary), None)
        if found is None:
            raise DataError(
                f"{source} has none of {', '.join(names)} to end a document with; add such a special token to it, or "
                "name its own in eos_token of a tokenizer_config.json beside it"
            )
        self.end_of_document = vocabulary[found]
        self._configured = end_of_document
        with self._named_failures():
            self.begin_of_prompt = _begin_of_template(inner)
        special = [number for number, token in inner.get_added_tokens_decoder().items() if token.special]
        self._encoder = _encoder(inner, record, [*special, self.end_of_document, *self.begin_of_prompt])
        self.loses_text = can_lose_text(record, pre_tokenizers.ByteLevel.alphabet())
        self._unknown = unknown_id(record)
        self._byte_level = is_byte_level(record)

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json, and a tokenizer_config.json beside it where that named the end of a document."""
        super().save(path)
        if self._configured:
            Path(path).with_name(CONFIG).write_text(json.dumps({"eos_token": self._configured}) + "\n")

    @classmethod
    def from_json(cls, text: str, end_of_document: str | None, source: str) -> HuggingFaceTokenizer:
        """Return the tokenizer of a tokenizer.json's contents; `source` names it in errors.

        Raises NotATokenizerError for contents of another kind.
        """
        from tokenizers import Tokenizer as Library

        try:
            inner = Library.from_str(text)
        except Exception as error:  # the library raises plain Exception on a file it cannot parse
            raise NotATokenizerError(str(error)) from None
        return cls(inner, end_of_document, source, json.loads(text))

    @classmethod
    def train_bpe(cls, texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
        """See tokenizer.train_tokenizer."""
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers, trainers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        least = len(alphabet) + len(cls._special)
        if vocab_size < least:
            raise ConfigError(
                f"vocab_size={vocab_size} is too small for byte-level BPE: 256 bytes and an end make {least}"
            )
        inner = Library(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=cls._special, initial_alphabet=alphabet, show_progress=False
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    def to_json(self) -> str:
        return self._inner.to_str(pretty=True)

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)

    def _encode(self, texts: list[str]) -> list[Any]:
        # The fast form leaves out offsets, which encoding does not need.
        with self._named_failures():
            return [encoding.ids for encoding in self._encoder.encode_batch_fast(texts, add_special_tokens=False)]

    def _count_lost_bytes(self, texts: list[str]) -> int:
        with self._named_failures():
            encodings = self._encoder.encode_batch(texts, add_special_tokens=False)
        count = self._lost_in_bytes if self._byte_level else self._lost_in_characters
        return sum(count(text, encoding) for text, encoding in zip(texts, encodings, strict=True))

    def _lost_in_bytes(self, text: str, encoding: Any) -> int:
        """Return how many bytes of a text a byte-level vocabulary has no tokens for."""
        known = (token for token, number in zip(encoding.tokens, encoding.ids, strict=True) if number != self._unknown)
        return max(0, len(text.encode()) - sum(map(len, known)))

    def _lost_in_characters(self, text: str, encoding: Any) -> int:
        """Return how many bytes of a text lie outside of all known tokens, white space aside."""
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        offsets = offsets[np.array(encoding.ids, dtype=np.int64) != (-1 if self._unknown is None else self._unknown)]
        steps = np.bincount(offsets[:, 0], minlength=len(text) + 1) - np.bincount(
            offsets[:, 1], minlength=len(text) + 1
        )
        lost = np.flatnonzero(np.cumsum(steps)[: len(text)] == 0)
        return len("".join(text[place] for place in lost.tolist() if not text[place].isspace()).encode())

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        """Turn the library's plain Exception into a DataError: some models refuse text that they do not know."""
        try:
            yield
        except Exception as error:
            raise DataError(
                f"tokenizer {self._source} cannot encode this text: {error}; use a tokenizer that knows all bytes, or "
                "has an unknown token"
            ) from None


def _encode_text_alone(inner: Any) -> None:
    """Have special tokens' names encoded as text, and texts neither cut off nor filled up."""
    inner.encode_special_tokens = True
    inner.no_truncation()
    inner.no_padding()


def _begin_of_template(inner: Any) -> tuple[int, ...]:
    """Return the ids that the tokenizer's template puts before a text; what it puts after one is not taken."""
    whole = inner.encode("a", add_special_tokens=True)
    begins = whole.special_tokens_mask.index(0) if 0 in whole.special_tokens_mask else 0
    return tuple(whole.ids[:begins])


def _encoder(inner: Any, record: dict[str, Any], special: list[int]) -> Any:
    """Return the library's tokenizer that gives none of the ids `special` for any text."""
    protected = protect_special_tokens(record, special)
    if protected is None:
        return inner
    encoder = type(inner).from_str(json.dumps(protected))
    _encode_text_alone(encoder)
    if set(encoder.get_vocab().values()) != set(inner.get_vocab().values()):
        raise DataError("special tokens of this tokenizer.json cannot be kept out of text: its ids have gaps")
    return encoder


def configured_end(path: Path) -> str | None:
    """eos_token of a Hugging Face tokenizer_config.json, or None."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return value.get("content") if isinstance(value, dict) else value
