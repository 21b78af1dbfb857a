"""Hugging Face `tokenizer.json` files, and byte-level BPE trained here (saved as such a file)."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megascale.data.tokenizer.base import END_OF_DOCUMENT, ENDS, Tokenizer
from megascale.errors import ConfigError, DataError

CONFIG = "tokenizer_config.json"
# Normalisation steps that drop no characters except white space. Any other step is assumed to drop some.
_KEEPING_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Strip", "ByteLevel", "Precompiled"}


class NotATokenizerError(ValueError):
    """The contents are not a tokenizer.json."""


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
        if record is None:
            record = json.loads(inner.to_str())
        _encode_text_alone(inner)
        vocabulary = inner.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{source} has an empty vocabulary; use another tokenizer.json")
        self.vocab_size = max(vocabulary.values()) + 1
        names = (end_of_document,) if end_of_document else ENDS
        end = next((name for name in names if name in vocabulary), None)
        if end is None:
            raise DataError(
                f"{source} has none of {', '.join(names)} to end a document with; add such a special token to it, or "
                "name its own in eos_token of a tokenizer_config.json in the same folder"
            )
        self.end_of_document = vocabulary[end]
        self._configured = end_of_document
        with self._named_failures():
            self.begin_of_prompt = _begin_of_template(inner)
        special = [number for number, token in inner.get_added_tokens_decoder().items() if token.special]
        self._encoder = _encoder(inner, record, special + [self.end_of_document] + list(self.begin_of_prompt))
        self.loses_text = can_lose_text(record, pre_tokenizers.ByteLevel.alphabet())
        self._unknown = unknown_id(record)
        self._byte_level = is_byte_level(record)

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json, and a tokenizer_config.json if that file named the end of a document."""
        super().save(path)
        if self._configured:
            Path(path).with_name(CONFIG).write_text(json.dumps({"eos_token": self._configured}) + "\n")

    @classmethod
    def from_json(cls, text: str, end_of_document: str | None, source: str) -> HuggingFaceTokenizer:
        """Return the tokenizer of a tokenizer.json's contents; errors name `source`.

        Raises NotATokenizerError for contents of another kind.
        """
        from tokenizers import Tokenizer as Library

        try:
            inner = Library.from_str(text)
        except Exception as error:  # the library raises plain Exception on a file it cannot parse
            raise NotATokenizerError(str(error)) from None
        return cls(inner, end_of_document, source, json.loads(text))

    @classmethod
    def train_bpe(
        cls, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
    ) -> HuggingFaceTokenizer:
        """Train byte-level BPE; see `tokenizer.train_tokenizer`."""
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers, trainers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        special_tokens = [*cls._special, *special_tokens]
        minimum = len(alphabet) + len(special_tokens)
        if vocab_size < minimum:
            raise ConfigError(
                f"vocab_size={vocab_size} is too small for byte-level BPE: 256 bytes and {len(special_tokens)} special "
                f"tokens make {minimum}; use a larger --vocab-size"
            )
        inner = Library(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    def encode_markup(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        with self._named_failures():
            encodings = self._markup_encoder.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    @cached_property
    def _markup_encoder(self) -> Any:
        encoder = type(self._inner).from_str(self._inner.to_str())
        encoder.encode_special_tokens = False
        return encoder

    def list_special_tokens(self) -> list[str]:
        return [token.content for token in self._inner.get_added_tokens_decoder().values() if token.special]

    def to_json(self) -> str:
        return self._inner.to_str(pretty=True)

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)

    def _encode(self, texts: list[str]) -> list[Any]:
        # The fast form computes no offsets, which encoding does not need.
        with self._named_failures():
            return [encoding.ids for encoding in self._encoder.encode_batch_fast(texts, add_special_tokens=False)]

    def _count_lost_bytes(self, texts: list[str]) -> int:
        with self._named_failures():
            encodings = self._encoder.encode_batch(texts, add_special_tokens=False)
        count = self._lost_in_bytes if self._byte_level else self._lost_in_characters
        return sum(count(text, encoding) for text, encoding in zip(texts, encodings, strict=True))

    def _lost_in_bytes(self, text: str, encoding: Any) -> int:
        """Return the number of bytes of a text that a byte-level vocabulary has no tokens for."""
        pairs = zip(encoding.tokens, encoding.ids, strict=True)
        represented = sum(len(token) for token, number in pairs if number != self._unknown)
        return max(0, len(text.encode()) - represented)

    def _lost_in_characters(self, text: str, encoding: Any) -> int:
        """Return the number of bytes of a text outside of all known tokens, white space aside."""
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        unknown = -1 if self._unknown is None else self._unknown
        offsets = offsets[np.array(encoding.ids, dtype=np.int64) != unknown]
        begins = np.bincount(offsets[:, 0], minlength=len(text) + 1)
        ends = np.bincount(offsets[:, 1], minlength=len(text) + 1)
        lost = np.flatnonzero(np.cumsum(begins - ends)[: len(text)] == 0)
        return len("".join(text[i] for i in lost.tolist() if not text[i].isspace()).encode())

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        """Turn the library's plain Exception into a DataError: some models refuse unknown text."""
        try:
            yield
        except Exception as error:
            raise DataError(
                f"tokenizer {self._source} cannot encode this text: {error}; use a tokenizer that has all bytes or "
                "an unknown token"
            ) from None


def _encode_text_alone(inner: Any) -> None:
    """Encode special tokens' names as text, and switch off truncation and padding."""
    inner.encode_special_tokens = True
    inner.no_truncation()
    inner.no_padding()


def _begin_of_template(inner: Any) -> tuple[int, ...]:
    """Return the ids that the tokenizer's template puts before a text, without those after it."""
    encoding = inner.encode("a", add_special_tokens=True)
    mask = encoding.special_tokens_mask
    if 0 not in mask:
        return ()
    return tuple(encoding.ids[: mask.index(0)])


def _encoder(inner: Any, record: dict[str, Any], special: list[int]) -> Any:
    """Return the library's tokenizer, changed so that no text yields an id of `special`."""
    protected = protect_special_tokens(record, special)
    if protected is None:
        return inner
    encoder = type(inner).from_str(json.dumps(protected))
    _encode_text_alone(encoder)
    if set(encoder.get_vocab().values()) != set(inner.get_vocab().values()):
        raise DataError("special tokens of this tokenizer.json cannot be kept out of text: its ids have gaps")
    return encoder


def configured_end(path: Path) -> str | None:
    """Return eos_token of a Hugging Face tokenizer_config.json, or None."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return value.get("content") if isinstance(value, dict) else value


def protect_special_tokens(record: dict[str, Any], ids: Iterable[int]) -> dict[str, Any] | None:
    """Return contents of a tokenizer.json that yield the same ids, except that no text yields one of `ids`.

    A special token's name in a text is not matched as a whole, but a model that has it as a piece, word or merge
    still yields the token. Such names are replaced by names that occur in no text. Returns None if no change is needed.
    """
    model = record["model"]
    vocabulary = _vocabulary(model)
    protected = set(ids)
    names = {name for name, number in vocabulary.items() if number in protected}
    if model.get("type") == "BPE":
        names &= _formed_by_bpe(model, names)
    added = record.get("added_tokens") or []
    plain = [token for token in added if token["id"] in protected and not token.get("special")]
    if not names and not plain:
        return None
    changed = copy.copy(record)
    placeholders = {name: f"\U0010fffe\x00{vocabulary[name]}\x00\U0010fffe" for name in names}
    changed["model"] = _rename_tokens(model, placeholders)
    changed["added_tokens"] = [
        {
            **token,
            "content": placeholders.get(token["content"], token["content"]),
            "special": token.get("special") or token["id"] in protected,
        }
        for token in added
    ]
    return changed


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, list):
        return {name: number for number, (name, _) in enumerate(vocabulary)}
    return vocabulary


def _merge_names(merge: str | list[str], prefix: str) -> list[str]:
    """Return both parts of a merge and their product; older files write the parts as one string.

    `prefix` begins the names of tokens inside a word, so the second part loses it.
    """
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return [first, second, first + second.removeprefix(prefix)]


def _formed_by_bpe(model: dict[str, Any], names: set[str]) -> set[str]:
    """Return the names that characters or merges can form. With `ignore_merges` any word that is a token can."""
    if model.get("ignore_merges"):
        return names
    prefix = model.get("continuing_subword_prefix") or ""
    products = {_merge_names(merge, prefix)[2] for merge in model.get("merges") or []}
    return {name for name in names if len(name) == 1 or name in products}


def _rename_tokens(model: dict[str, Any], placeholders: dict[str, str]) -> dict[str, Any]:
    changed = dict(model)
    if isinstance(model.get("vocab"), list):
        changed["vocab"] = [[placeholders.get(name, name), score] for name, score in model["vocab"]]
    else:
        changed["vocab"] = {placeholders.get(name, name): number for name, number in model["vocab"].items()}
    if model.get("unk_token") in placeholders:
        changed["unk_token"] = placeholders[model["unk_token"]]
    if placeholders and model.get("merges"):
        prefix = model.get("continuing_subword_prefix") or ""
        changed["merges"] = [
            merge for merge in model["merges"] if placeholders.keys().isdisjoint(_merge_names(merge, prefix))
        ]
    return changed


def is_byte_level(record: dict[str, Any]) -> bool:
    """Return whether each token of the model is written with one character per byte of UTF-8."""
    steps = _steps(record.get("pre_tokenizer"), "pretokenizers") + _steps(record.get("normalizer"), "normalizers")
    return record["model"].get("type") == "BPE" and any(step.get("type") == "ByteLevel" for step in steps)


def can_lose_text(record: dict[str, Any], byte_characters: Iterable[str]) -> bool:
    """Return whether some text has no tokens of its own and becomes an unknown token or is dropped.

    `byte_characters` are the characters that encode the 256 bytes in byte-level vocabularies.
    """
    model = record["model"]
    vocabulary = _vocabulary(model)
    if is_byte_level(record):
        complete = all(character in vocabulary for character in byte_characters)
    else:
        complete = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    removing = any(step.get("behavior") == "Removed" for step in _steps(record.get("pre_tokenizer"), "pretokenizers"))
    return not complete or removing or not all(map(_keeps_text, _steps(record.get("normalizer"), "normalizers")))


def _keeps_text(step: dict[str, Any]) -> bool:
    if step.get("type") == "Replace":
        return bool(step.get("content"))
    return step.get("type") in _KEEPING_NORMALIZERS


def _steps(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Return the steps that a normalizer or pre-tokenizer consists of."""
    if not step:
        return []
    if step.get("type") == "Sequence":
        return [part for child in step.get(inner) or [] for part in _steps(child, inner)]
    return [step]


def unknown_id(record: dict[str, Any]) -> int | None:
    """Return the id of the model's unknown token, None if it has none."""
    model = record["model"]
    number = model.get("unk_id")
    if number is not None:
        return number
    return _vocabulary(model).get(model.get("unk_token"))
