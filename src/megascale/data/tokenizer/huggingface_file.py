"""Tokenizers in Hugging Face's `tokenizer.json` format, and training of byte-level BPE, which is saved in this format.

The package `tokenizers` ("the library") does the encoding. A *record* is a tokenizer.json as dictionaries and lists.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megascale.data.tokenizer.base import END_NAMES, END_OF_DOCUMENT, Tokenizer, split_slices
from megascale.errors import ConfigError, DataError

CONFIG = "tokenizer_config.json"
# Normalisation steps that drop only white space. Any other step is assumed to drop other characters too.
_LOSSLESS_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Strip", "ByteLevel", "Precompiled"}
_PREVIOUS_TEXT = "\n"  # text after which a continuation is encoded
_JOIN_SECONDS = 0.2  # longest time until a thread's caller handles a signal
_MAX_TRAINED_ENTRIES = 1 << 24  # the library allocates memory for all entries at once, and aborts if it has none


class NotATokenizerError(ValueError):
    """The contents of a file are not a tokenizer.json."""


class _TrainingStoppedError(Exception):
    """The training of a tokenizer is interrupted."""


def _train_interruptibly(library_tokenizer: Any, texts: Iterable[str], trainer: Any) -> None:
    """Train a tokenizer in a thread, since the library handles no signal until it returns.

    The library receives slices of long texts, because it needs about 90 times the size of a text in memory. After
    KeyboardInterrupt the thread receives no more text. It may compute until the process ends.
    """
    is_stopped = threading.Event()
    errors: list[BaseException] = []

    def read_texts() -> Iterator[str]:
        for text in texts:
            for text_slice in split_slices(text):
                if is_stopped.is_set():
                    raise _TrainingStoppedError
                yield text_slice

    def train() -> None:
        try:
            library_tokenizer.train_from_iterator(read_texts(), trainer)
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=train, name="tokenizer training", daemon=True)
    try:
        thread.start()
        while thread.is_alive():
            thread.join(_JOIN_SECONDS)
    finally:
        is_stopped.set()  # also if a signal comes while the thread starts
        if thread.ident is not None:
            thread.join(_JOIN_SECONDS)
    if errors:
        raise errors[0]


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, encoded by the package `tokenizers`.

    Args:
        library_tokenizer: the library's tokenizer.
        end_of_document: name of the end-of-document token; None: the first of END_NAMES in the vocabulary.
        source: name of the tokenizer, for messages.
        record: contents of the tokenizer.json; None: those of `library_tokenizer`.

    Raises DataError for an empty vocabulary, and for one without an end-of-document token.
    """

    _SPECIAL_TOKENS: ClassVar[list[str]] = [END_OF_DOCUMENT]

    def __init__(
        self,
        library_tokenizer: Any,
        end_of_document: str | None = None,
        source: str = "tokenizer",
        record: dict[str, Any] | None = None,
    ) -> None:
        from tokenizers import pre_tokenizers

        self._library_tokenizer = library_tokenizer
        self._source = source
        if record is None:
            record = json.loads(library_tokenizer.to_str())
        _set_plain_encoding(library_tokenizer)
        vocabulary = library_tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{source} has an empty vocabulary; use another tokenizer.json")
        _check_ids(record, vocabulary, source)
        self.vocab_size = max(vocabulary.values()) + 1
        end_names = (end_of_document,) if end_of_document else END_NAMES
        known_ends = [name for name in end_names if name in vocabulary]
        if not known_ends:
            raise DataError(
                f"{source} has none of {', '.join(end_names)} to end a document with; add such a special token, or "
                "name the token that ends a document in eos_token of a tokenizer_config.json in the same folder"
            )
        self.end_of_document = vocabulary[known_ends[0]]
        self._configured_end = end_of_document
        with self._raise_data_errors():
            self.begin_of_prompt = _find_template_begin(library_tokenizer)
        added_tokens = library_tokenizer.get_added_tokens_decoder()
        special_ids = [token_id for token_id, token in added_tokens.items() if token.special]
        special_ids += [self.end_of_document, *self.begin_of_prompt]
        self._encoder = _make_encoder(library_tokenizer, record, special_ids)
        self.loses_text = can_lose_text(record, pre_tokenizers.ByteLevel.alphabet())
        self._unknown_id = find_unknown_id(record)
        self._is_byte_level = is_byte_level(record)

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json, and a tokenizer_config.json if the constructor got an `end_of_document`."""
        super().save(path)
        if self._configured_end:
            Path(path).with_name(CONFIG).write_text(json.dumps({"eos_token": self._configured_end}) + "\n")

    @classmethod
    def from_json(
        cls, text: str, end_of_document: str | None, source: str, *, settings_path: Path | None = None
    ) -> HuggingFaceTokenizer:
        """Return the tokenizer of a tokenizer.json's contents.

        Args:
            text: the contents.
            end_of_document, source: as in the constructor.
            settings_path: the tokenizer_config.json next to the file, which must not contradict it; None: no check.

        Raises NotATokenizerError for contents of another kind, and DataError for a contradiction.
        """
        from tokenizers import Tokenizer as Library

        try:
            library_tokenizer = Library.from_str(text)
        except Exception as error:  # the library raises plain Exception on a file it cannot parse
            raise NotATokenizerError(str(error)) from None
        record = json.loads(text)
        dropout = record["model"].get("dropout")
        if dropout:
            raise DataError(
                f"{source} has model.dropout={dropout}, which gives equal texts different tokens at random; set it to "
                "null"
            )
        tokenizer = cls(library_tokenizer, end_of_document, source=source, record=record)
        if settings_path is not None:
            _check_configured_prefix(settings_path, record)
        return tokenizer

    @classmethod
    def train_bpe(
        cls, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
    ) -> HuggingFaceTokenizer:
        """Train byte-level BPE, as `tokenizer.train_tokenizer` describes."""
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers, trainers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        special_tokens = [*cls._SPECIAL_TOKENS, *special_tokens]
        minimum = len(alphabet) + len(special_tokens)
        if vocab_size < minimum:
            raise ConfigError(
                f"vocab_size={vocab_size} is too small for byte-level BPE: 256 bytes and {len(special_tokens)} special "
                f"tokens make {minimum}; use a larger --vocab-size"
            )
        if vocab_size > _MAX_TRAINED_ENTRIES:
            raise ConfigError(
                f"vocab_size={vocab_size} is too large: at most {_MAX_TRAINED_ENTRIES} entries can be trained; use a "
                "smaller --vocab-size"
            )
        library_tokenizer = Library(models.BPE())
        library_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library_tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
        )
        _train_interruptibly(library_tokenizer, texts, trainer)
        return cls(library_tokenizer)

    def encode_continuation(self, text: str) -> list[int]:
        ids = self.encode(text)
        if not self._adds_prefix:
            return ids
        # The prefix, such as a blank, belongs to the start of a text. The ids after a line break have none.
        previous_ids = self.encode(_PREVIOUS_TEXT)
        joined_ids = self.encode(_PREVIOUS_TEXT + text)
        # A merge across the border would change the ids of the line break.
        if previous_ids and joined_ids[: len(previous_ids)] == previous_ids:
            return joined_ids[len(previous_ids) :]
        return ids

    @cached_property
    def _adds_prefix(self) -> bool:
        """True if the tokenizer adds a prefix, such as a blank, to the start of a text."""
        ids = self.encode("a")
        return self.decode(ids + ids) != "aa"

    def encode_markup(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        with self._raise_data_errors():
            encodings = self._markup_encoder.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    @cached_property
    def _markup_encoder(self) -> Any:
        """The library's tokenizer, set to encode names of special tokens as the tokens."""
        encoder = type(self._library_tokenizer).from_str(self._library_tokenizer.to_str())
        encoder.encode_special_tokens = False
        return encoder

    def list_special_tokens(self) -> list[str]:
        return [token.content for token in self._library_tokenizer.get_added_tokens_decoder().values() if token.special]

    def to_json(self) -> str:
        return self._library_tokenizer.to_str(pretty=True)

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        return self._library_tokenizer.decode([int(token_id) for token_id in ids], skip_special_tokens=False)

    def _encode(self, texts: list[str]) -> list[Any]:
        # encode_batch_fast leaves out the offsets of tokens.
        with self._raise_data_errors():
            return [encoding.ids for encoding in self._encoder.encode_batch_fast(texts, add_special_tokens=False)]

    def _count_lost_bytes(self, texts: list[str]) -> int:
        with self._raise_data_errors():
            encodings = self._encoder.encode_batch(texts, add_special_tokens=False)
        if self._is_byte_level:
            count_lost = self._count_lost_by_length
        else:
            count_lost = self._count_lost_by_offsets
        return sum(count_lost(text, encoding) for text, encoding in zip(texts, encodings, strict=True))

    def _count_lost_by_length(self, text: str, encoding: Any) -> int:
        """Return the number of lost bytes of a text, for a vocabulary whose tokens have a character per byte."""
        pairs = zip(encoding.tokens, encoding.ids, strict=True)
        represented = sum(len(token) for token, token_id in pairs if token_id != self._unknown_id)
        return max(0, len(text.encode()) - represented)

    def _count_lost_by_offsets(self, text: str, encoding: Any) -> int:
        """Return the number of lost bytes of a text: bytes outside all known tokens, without white space."""
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        unknown = -1 if self._unknown_id is None else self._unknown_id
        offsets = offsets[np.array(encoding.ids, dtype=np.int64) != unknown]
        starts = np.bincount(offsets[:, 0], minlength=len(text) + 1)
        stops = np.bincount(offsets[:, 1], minlength=len(text) + 1)
        tokens_at_character = np.cumsum(starts - stops)[: len(text)]
        uncovered = [text[i] for i in np.flatnonzero(tokens_at_character == 0).tolist()]
        lost_text = "".join(character for character in uncovered if not character.isspace())
        return len(lost_text.encode())

    @contextmanager
    def _raise_data_errors(self) -> Iterator[None]:
        """Turn the library's plain Exception, which some models raise for unknown text, into a DataError."""
        try:
            yield
        except Exception as error:
            raise DataError(
                f"tokenizer {self._source} cannot encode this text: {error}; use a tokenizer that has tokens for "
                "all bytes, or an unknown token"
            ) from None


def _set_plain_encoding(library_tokenizer: Any) -> None:
    """Set a tokenizer to encode names of special tokens as text, without truncation and padding."""
    library_tokenizer.encode_special_tokens = True  # "encode" means: as text
    library_tokenizer.no_truncation()
    library_tokenizer.no_padding()


def _check_ids(record: dict[str, Any], vocabulary: dict[str, int], source: str) -> None:
    """Raise DataError if two tokens have one id, or if the library gives an added token another id than the file.

    The library gives added tokens the next ids after the vocabulary, without an error if the file has other ids.

    Args:
        record: contents of the tokenizer.json.
        vocabulary: the library's ids by name, with added tokens.
        source: name of the tokenizer, for messages.
    """
    for token in record.get("added_tokens") or []:
        library_id = vocabulary.get(token["content"])
        if library_id is not None and library_id != token["id"]:
            raise DataError(
                f"{source} has the added token {token['content']!r} with id {token['id']}, and the library gives it "
                f"{library_id}, since other ids lead to gaps or are used; add tokens for the ids in between, or "
                "correct the id"
            )
    if len(set(vocabulary.values())) == len(vocabulary):
        return
    name_by_id: dict[int, str] = {}
    for name, token_id in vocabulary.items():
        other_name = name_by_id.setdefault(token_id, name)
        if other_name != name:
            raise DataError(
                f"{source} has the id {token_id} for {other_name!r} and for {name!r}; copy the file again, or give one "
                "of them an unused id"
            )


def _find_template_begin(library_tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that the tokenizer's template puts before a text."""
    encoding = library_tokenizer.encode("a", add_special_tokens=True)
    mask = encoding.special_tokens_mask
    if 0 not in mask:
        return ()
    return tuple(encoding.ids[: mask.index(0)])


def _make_encoder(library_tokenizer: Any, record: dict[str, Any], special_ids: list[int]) -> Any:
    """Return the library's tokenizer, or a changed copy, such that text does not yield special ids.

    Raises DataError if this is impossible.
    """
    protected_record = protect_special_tokens(record, special_ids)
    if protected_record is None:
        return library_tokenizer
    encoder = type(library_tokenizer).from_str(json.dumps(protected_record))
    _set_plain_encoding(encoder)
    if set(encoder.get_vocab().values()) != set(library_tokenizer.get_vocab().values()):
        raise DataError(
            "special tokens of this tokenizer.json cannot be kept out of text, because its ids have gaps; use another "
            "tokenizer"
        )
    return encoder


def read_configured_end(path: Path) -> str | None:
    """Return the name of eos_token in a Hugging Face tokenizer_config.json, or None without one.

    Raises DataError for a file that is not a JSON object, and for an eos_token that is not a name. Another token would
    silently end the documents.
    """
    value = _read_settings(path).get("eos_token")
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise DataError(f"{path} has eos_token={value!r}; write the name of one token, such as {END_OF_DOCUMENT!r}")
    return value


def _check_configured_prefix(path: Path, record: dict[str, Any]) -> None:
    """Raise DataError if a tokenizer_config.json contradicts the tokenizer.json on the blank before a text.

    In transformers 4, `add_prefix_space` of the settings wins. In transformers 5 it depends on `tokenizer_class`. So
    neither file alone says how the model was trained.

    Args:
        path: the tokenizer_config.json, which may be missing.
        record: contents of the tokenizer.json.
    """
    value = _read_settings(path).get("add_prefix_space")
    steps = _list_steps(record.get("pre_tokenizer"), "pretokenizers")
    steps += _list_steps(record.get("normalizer"), "normalizers")
    decisions = [decision for decision in map(_find_prefix_decision, steps) if decision is not None]
    if not isinstance(value, bool) or not decisions or value == any(decisions):
        return
    action = "adds a blank" if any(decisions) else "adds no blank"
    raise DataError(
        f"{path} has add_prefix_space={json.dumps(value)}, and the tokenizer.json next to it {action} before a text; "
        "transformers follows either file, depending on its release and on tokenizer_class. Find out which is right, "
        "and set or remove add_prefix_space accordingly, or correct the tokenizer.json"
    )


def _find_prefix_decision(step: dict[str, Any]) -> bool | None:
    """Return whether a step of a tokenizer.json adds a blank before a text; None for a step that never does."""
    kind = step.get("type")
    if kind == "ByteLevel":
        return step.get("add_prefix_space")  # missing in a ByteLevel normalizer
    if kind == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True))
    if kind == "Prepend":
        return True
    return None


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the contents of a tokenizer_config.json, {} without the file. Raises DataError if it is damaged."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}; copy it again, or remove it") from None
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); copy it again, or remove it") from None
    if not isinstance(settings, dict):
        raise DataError(f"{path} is not a JSON object; copy it again, or remove it")
    return settings


def protect_special_tokens(record: dict[str, Any], ids: Iterable[int]) -> dict[str, Any] | None:
    """Return a changed copy of a record, with which text does not yield any of `ids`, and the same ids otherwise.

    `_set_plain_encoding` keeps the library from matching names of special tokens in a text. But a model that has such a
    name among its own words or merges still forms the token. This function replaces these names by placeholders that
    no text contains. Returns None if no change is needed.
    """
    model = record["model"]
    vocabulary = _read_vocabulary(model)
    protected_ids = set(ids)
    names = {name for name, token_id in vocabulary.items() if token_id in protected_ids}  # names to replace
    if model.get("type") == "BPE":
        names &= _find_names_formed_by_bpe(model, names)
    added_tokens = record.get("added_tokens") or []
    # The library keeps tokens out of text only if they are marked as special.
    is_marked = all(token.get("special") for token in added_tokens if token["id"] in protected_ids)
    if not names and is_marked:
        return None
    changed_record = copy.copy(record)
    # U+10FFFE is not a character, so text does not contain it.
    placeholders = {name: f"\U0010fffe\x00{vocabulary[name]}\x00\U0010fffe" for name in names}
    changed_record["model"] = _rename_tokens(model, placeholders)
    changed_record["added_tokens"] = [
        {
            **token,
            "content": placeholders.get(token["content"], token["content"]),
            "special": token.get("special") or token["id"] in protected_ids,
        }
        for token in added_tokens
    ]
    return changed_record


def _read_vocabulary(model: dict[str, Any]) -> dict[str, int]:
    """Return the ids of a model's tokens by name. Unigram models have a list of (name, score) instead."""
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, list):
        return {name: token_id for token_id, (name, _) in enumerate(vocabulary)}
    return vocabulary


def _merge_names(merge: str | list[str], prefix: str) -> list[str]:
    """Return the names of both parts of a merge and of the merged token. Older files write the parts as one string.

    Args:
        prefix: prefix of the names of tokens inside a word. The merged token's name has it at most once.
    """
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return [first, second, first + second.removeprefix(prefix)]


def _find_names_formed_by_bpe(model: dict[str, Any], names: set[str]) -> set[str]:
    """Return those of the names that BPE can form from text: single characters and results of merges."""
    if model.get("ignore_merges"):
        return names  # any word that is a token becomes this token
    prefix = model.get("continuing_subword_prefix") or ""
    merged_names = {_merge_names(merge, prefix)[2] for merge in model.get("merges") or []}
    return {name for name in names if len(name) == 1 or name in merged_names}


def _rename_tokens(model: dict[str, Any], placeholders: dict[str, str]) -> dict[str, Any]:
    """Return a copy of a record's model with tokens renamed, without the merges that use the old names."""
    changed_model = dict(model)
    if isinstance(model.get("vocab"), list):
        changed_model["vocab"] = [[placeholders.get(name, name), score] for name, score in model["vocab"]]
    else:
        changed_model["vocab"] = {placeholders.get(name, name): token_id for name, token_id in model["vocab"].items()}
    if model.get("unk_token") in placeholders:
        changed_model["unk_token"] = placeholders[model["unk_token"]]
    if placeholders and model.get("merges"):
        prefix = model.get("continuing_subword_prefix") or ""
        changed_model["merges"] = [
            merge for merge in model["merges"] if placeholders.keys().isdisjoint(_merge_names(merge, prefix))
        ]
    return changed_model


def is_byte_level(record: dict[str, Any]) -> bool:
    """Return whether the names of the model's tokens have one character per byte of UTF-8."""
    steps = _list_steps(record.get("pre_tokenizer"), "pretokenizers")
    steps += _list_steps(record.get("normalizer"), "normalizers")
    return record["model"].get("type") == "BPE" and any(step.get("type") == "ByteLevel" for step in steps)


def can_lose_text(record: dict[str, Any], byte_characters: Iterable[str]) -> bool:
    """Return whether some text becomes an unknown token or is dropped.

    Args:
        record: contents of the tokenizer.json.
        byte_characters: characters that stand for the 256 bytes in byte-level vocabularies.
    """
    model = record["model"]
    vocabulary = _read_vocabulary(model)
    if is_byte_level(record):
        has_all_bytes = all(character in vocabulary for character in byte_characters)
    else:
        has_all_bytes = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    pre_tokenizer_steps = _list_steps(record.get("pre_tokenizer"), "pretokenizers")
    normalizer_steps = _list_steps(record.get("normalizer"), "normalizers")
    removes_text = any(step.get("behavior") == "Removed" for step in pre_tokenizer_steps)
    is_normalizer_lossless = all(_is_lossless_step(step) for step in normalizer_steps)
    return not has_all_bytes or removes_text or not is_normalizer_lossless


def _is_lossless_step(step: dict[str, Any]) -> bool:
    if step.get("type") == "Replace":
        return bool(step.get("content"))
    return step.get("type") in _LOSSLESS_NORMALIZERS


def _list_steps(step: dict[str, Any] | None, child_key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, with nested sequences resolved.

    Args:
        child_key: key of a sequence's steps, "normalizers" or "pretokenizers".
    """
    if not step:
        return []
    if step.get("type") != "Sequence":
        return [step]
    steps: list[dict[str, Any]] = []
    for child in step.get(child_key) or []:
        steps += _list_steps(child, child_key)
    return steps


def find_unknown_id(record: dict[str, Any]) -> int | None:
    """Return the id of the model's unknown token, or None without one."""
    model = record["model"]
    token_id = model.get("unk_id")
    if token_id is not None:
        return token_id
    return _read_vocabulary(model).get(model.get("unk_token"))
