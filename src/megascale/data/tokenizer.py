"""Text to token ids and back: Hugging Face `tokenizer.json` files, and byte-level BPE trained here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as _Tokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from megascale.config import DataConfig
from megascale.errors import ConfigError, DataError

END_OF_DOCUMENT = "<|endoftext|>"
# What published tokenizers call it, in order of preference.
_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<|eos|>", "<eos>", "[EOS]", "<eod>", "<|end▁of▁sentence|>")


class Tokenizer:
    """A tokenizer.json.

    Attributes:
        vocab_size: one more than the largest id, so that every id indexes an embedding of that many rows.
        end_of_document: id put after each document.
        sha256: of the file's contents.

    Text never yields a special token: `<|endoftext|>` written in a document is encoded as plain characters.
    """

    def __init__(self, inner: _Tokenizer, end_of_document: str | None = None, source: str = "tokenizer") -> None:
        self._inner = inner
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        vocabulary = inner.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{source} has an empty vocabulary; use another tokenizer.json")
        self.vocab_size = max(vocabulary.values()) + 1
        names = (end_of_document,) if end_of_document else _ENDS
        found = next((name for name in names if name in vocabulary), None)
        if found is None:
            raise DataError(
                f"{source} has none of {', '.join(names)} to end a document with; add such a special token to it, or "
                "name its own in eos_token of a tokenizer_config.json beside it"
            )
        self.end_of_document = vocabulary[found]

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json; the end-of-document token may be named by a tokenizer_config.json beside it."""
        path = Path(path)
        try:
            inner = _Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(
                f"tokenizer {path} does not exist; set data.tokenizer to a tokenizer.json or build a data set"
            ) from None
        except IsADirectoryError:
            raise DataError(f"tokenizer {path} is a folder; name the tokenizer.json in it") from None
        except Exception as error:  # the library raises plain Exception on a file it cannot parse
            raise DataError(f"tokenizer {path} is not a tokenizer.json that can be read: {error}") from None
        return cls(inner, _configured_end(path.with_name("tokenizer_config.json")), str(path))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, show_progress: bool = False) -> Tokenizer:
        """Byte-level BPE (as GPT-2) trained on `texts`; id 0 ends a document. Any text can be encoded."""
        if vocab_size < 257:
            raise ConfigError(f"vocab_size={vocab_size} is too small for byte-level BPE: 256 bytes and an end make 257")
        inner = _Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=show_progress,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """The tokenizer.json's contents."""
        return self._inner.to_str(pretty=True)

    @property
    def sha256(self) -> str:
        """Hash of the tokenizer.json's contents, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids of several documents, each with its end, as one array, and the length of each (end included)."""
        encoded = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        lengths = np.fromiter((len(e) + 1 for e in encoded), dtype=np.int64, count=len(encoded))
        tokens = np.empty(int(lengths.sum()), dtype=np.int64)
        at = 0
        for e, length in zip(encoded, lengths, strict=True):
            tokens[at : at + length - 1] = e.ids
            at += length
        tokens[np.cumsum(lengths) - 1] = self.end_of_document
        return tokens, lengths

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        """The text of ids, special tokens shown; bytes that are no UTF-8 become the replacement character."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)


def _configured_end(path: Path) -> str | None:
    """eos_token of a Hugging Face tokenizer_config.json, or None."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return value.get("content") if isinstance(value, dict) else value


def tokenizer_path(data: DataConfig) -> Path:
    """`data.tokenizer`, or the tokenizer.json beside the first training file; ConfigError without either."""
    if data.tokenizer:
        return Path(data.tokenizer)
    if not data.train:
        raise ConfigError("neither data.tokenizer nor data.train is set, so there is no tokenizer; set one of them")
    return Path(data.train[0]).parent / "tokenizer.json"


def tokenizer_for(data: DataConfig) -> Tokenizer:
    """The run's tokenizer (see tokenizer_path); DataError if it cannot be read."""
    return Tokenizer.load(tokenizer_path(data))
