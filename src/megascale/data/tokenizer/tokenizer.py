"""Text to token ids and back. Three kinds behind one face: Hugging Face `tokenizer.json` files, byte-level BPE
trained here (saved as such a file), and tiktoken's rank files (see tiktoken_file.py).
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megascale.config import DataConfig
from megascale.errors import ConfigError, DataError

END_OF_DOCUMENT = "<|endoftext|>"
# What published tokenizers call it, in order of preference.
_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<|eos|>", "<eos>", "[EOS]", "<eod>", "<|end▁of▁sentence|>")
# Longer documents are encoded in slices cut at line ends: tokenizers need many times a text's size in memory.
_SLICE = 1 << 20
_CONFIG = "tokenizer_config.json"


class Tokenizer(ABC):
    """Attributes:

        vocab_size: one more than the largest id, so that every id indexes an embedding of that many rows.
        end_of_document: id put after each document.

    Text never yields a special token: `<|endoftext|>` written in a document is encoded as plain characters.
    """

    vocab_size: int
    end_of_document: int

    @staticmethod
    def load(path: str | Path) -> Tokenizer:
        """Read a tokenizer.json (ours, Hugging Face's, or one holding tiktoken ranks) or a .tiktoken rank file.

        For a Hugging Face file the end-of-document token may be named by a tokenizer_config.json beside it.
        Raises DataError if there is no such file or it is of another kind.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise DataError(
                f"tokenizer {path} does not exist; set data.tokenizer to a tokenizer.json or build a data set"
            ) from None
        except IsADirectoryError:
            raise DataError(f"tokenizer {path} is a folder; name the tokenizer.json in it") from None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"tokenizer {path} is not a tokenizer.json that can be read: {error}") from None
        from megascale.data.tokenizer import tiktoken_file

        if tiktoken_file.is_ours(text):
            return tiktoken_file.from_json(text, str(path))
        if path.suffix == ".tiktoken":
            return tiktoken_file.from_ranks(path, text)
        return HuggingFaceTokenizer.from_json(text, _configured_end(path.with_name(_CONFIG)), str(path))

    @staticmethod
    def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Byte-level BPE (as GPT-2) trained on `texts`; id 0 ends a document. Any text can be encoded."""
        return HuggingFaceTokenizer.train_bpe(texts, vocab_size)

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
        names = (end_of_document,) if end_of_document else _ENDS
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
            Path(path).with_name(_CONFIG).write_text(json.dumps({"eos_token": self._configured}) + "\n")

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
        """See Tokenizer.train."""
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


def _slices(text: str) -> Iterator[str]:
    """A text in parts of at most _SLICE characters, cut after a line's end where there is one; one part if empty."""
    start = 0
    while len(text) - start > _SLICE:
        stop = text.rfind("\n", start, start + _SLICE) + 1 or start + _SLICE
        yield text[start:stop]
        start = stop
    yield text[start:] if start else text


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
