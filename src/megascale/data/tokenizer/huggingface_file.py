"""Hugging Face `tokenizer.json` files, and byte-level BPE trained here (saved as such a file)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from megascale.data.tokenizer.base import END_OF_DOCUMENT, ENDS, Tokenizer
from megascale.errors import ConfigError, DataError

CONFIG = "tokenizer_config.json"


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` library."""

    _special: ClassVar[list[str]] = [END_OF_DOCUMENT]

    def __init__(self, inner, end_of_document: str | None = None, source: str = "tokenizer") -> None:
        self._inner = inner
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
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

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json, and a tokenizer_config.json beside it where that named the end of a document."""
        super().save(path)
        if self._configured:
            Path(path).with_name(CONFIG).write_text(json.dumps({"eos_token": self._configured}) + "\n")

    @classmethod
    def from_json(cls, text: str, end_of_document: str | None, source: str) -> HuggingFaceTokenizer:
        """Of a tokenizer.json's contents; `source` names it in errors."""
        from tokenizers import Tokenizer as Library

        try:
            inner = Library.from_str(text)
        except Exception as error:  # the library raises plain Exception on a file it cannot parse
            raise DataError(f"tokenizer {source} is not a tokenizer.json that can be read: {error}") from None
        return cls(inner, end_of_document, source)

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

    def encode_prompt(self, text: str) -> list[int]:
        ids = self.encode(text)
        # The template may also end a text, which would be wrong here: only what stands before the text is taken.
        whole = self._inner.encode("a", add_special_tokens=True)
        begins = whole.special_tokens_mask.index(0) if 0 in whole.special_tokens_mask else 0
        return whole.ids[:begins] + ids

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)

    def _encode(self, texts: list[str]) -> list[Any]:
        # The fast form leaves out offsets, which nobody reads here.
        return [encoding.ids for encoding in self._inner.encode_batch_fast(texts, add_special_tokens=False)]


def configured_end(path: Path) -> str | None:
    """eos_token of a Hugging Face tokenizer_config.json, or None."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return value.get("content") if isinstance(value, dict) else value
