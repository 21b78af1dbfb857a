"""Loading of tokenizers, from a file or for a run, and training of a tokenizer.

Hugging Face `tokenizer.json` files (huggingface_file.py), which trained tokenizers also have, and tiktoken's rank files
(tiktoken_file.py) have one interface (base.py).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megascale.config import DataConfig
from megascale.core.untrusted_files import LFS_POINTER
from megascale.data.text_encoding import describe_invalid_utf8
from megascale.data.tokenizer import tiktoken_file
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.huggingface_file import (
    CONFIG,
    HuggingFaceTokenizer,
    NotATokenizerError,
    read_configured_end,
)
from megascale.errors import ConfigError, DataError

TOKENIZER = "tokenizer.json"
# Files with which a model's folder may define its tokenizer instead of a tokenizer.json.
_OTHER_FORMS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json (Hugging Face's, or one with tiktoken ranks) or a .tiktoken rank file.

    For a Hugging Face file, a tokenizer_config.json in the same folder may name the end-of-document token.
    Raises DataError if the file does not exist or is of another kind.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        remedy = "set data.tokenizer to a tokenizer.json or build a data set"
        if has_other_form(path.parent):
            remedy = _format_conversion_advice(path.parent)
        raise DataError(f"tokenizer {path} does not exist; {remedy}") from None
    except IsADirectoryError:
        if not (path / TOKENIZER).exists() and has_other_form(path):
            raise DataError(
                f"tokenizer {path} is a folder without a {TOKENIZER}. {_format_conversion_advice(path)}"
            ) from None
        raise DataError(f"tokenizer {path} is a folder; pass the path of the {TOKENIZER} inside") from None
    except OSError as error:
        raise DataError(f"tokenizer {path} cannot be read: {error}; check its permissions") from None
    has_tiktoken_suffix = path.suffix.lower() == ".tiktoken"
    if _looks_like_rank_file(data) and not has_tiktoken_suffix:
        raise DataError(f"tokenizer {path} is not a {TOKENIZER}: {_explain_kind(path, data)}")
    try:
        text = data.decode()
        if tiktoken_file.is_tiktoken_json(text):
            return tiktoken_file.load_json(text, str(path))
        if has_tiktoken_suffix:
            return tiktoken_file.load_ranks(path, text)
        settings_path = path.with_name(CONFIG)
        return HuggingFaceTokenizer.from_json(
            text, read_configured_end(settings_path), str(path), settings_path=settings_path
        )
    except (UnicodeDecodeError, NotATokenizerError) as error:
        raise DataError(
            f"tokenizer {path} is not a {TOKENIZER} that can be read ({error}): {_explain_kind(path, data)}"
        ) from None


def train_tokenizer(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Return byte-level BPE (as in GPT-2) trained on `texts`, which can encode any text. Id 0 ends a document.

    Args:
        texts: training text.
        vocab_size: number of tokens, special tokens included.
        special_tokens: names of further special tokens, which get the ids from 1 on.
    """
    return HuggingFaceTokenizer.train_bpe(texts, vocab_size, special_tokens)


def find_tokenizer_path(data: DataConfig) -> Path:
    """Return the path data.tokenizer, or else of the tokenizer.json in the folder of the first file in data.train.

    Raises ConfigError if neither data.tokenizer nor data.train is set.
    """
    if data.tokenizer:
        return Path(data.tokenizer)
    if not data.train:
        raise ConfigError("neither data.tokenizer nor data.train is set, so there is no tokenizer; set one of them")
    return Path(data.train[0]).parent / TOKENIZER


def load_run_tokenizer(data: DataConfig) -> Tokenizer:
    """Return the run's tokenizer, from the file of `find_tokenizer_path`. Raises DataError if it cannot be read."""
    return load_tokenizer(find_tokenizer_path(data))


def _explain_kind(path: Path, data: bytes) -> str:
    """Return a sentence on the kind of a file that is not a tokenizer.json, and the remedy."""
    if data.startswith(LFS_POINTER):
        return "it is a pointer of Git LFS, not the file itself. Get the file with `git lfs pull`"
    kind = _describe_kind(path, data)
    if kind == "a tiktoken rank file":
        return (
            f"it is {kind} (like Llama 3's tokenizer.model). Use the tokenizer.json of the same model, or rename the "
            'file to NAME.tiktoken and put NAME.json next to it with {"pattern": "...", "special_tokens": '
            '{"<|endoftext|>": ID}}'
        )
    return f"it is {kind}. {_format_conversion_advice(path.parent)}"


def _format_conversion_advice(folder: Path) -> str:
    """Return advice on how to get a tokenizer.json for a model's folder."""
    return (
        "Use the tokenizer.json of the same model; if the model has none, "
        f"`python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}')"
        f".save_pretrained('{folder}')\"` makes one (it may need the sentencepiece and protobuf packages)"
    )


def has_other_form(folder: Path) -> bool:
    """Return whether a folder has a tokenizer in another form than a tokenizer.json."""
    return any((folder / name).exists() for name in _OTHER_FORMS)


def _describe_kind(path: Path, data: bytes) -> str:
    """Return a phrase for the kind of a file, as its contents show it."""
    if _looks_like_rank_file(data):
        return "a tiktoken rank file"
    if data[:1] == b"\n" and (path.suffix.lower() in (".model", ".spm") or b"<unk>" in data[:4096]):
        return "a sentencepiece model"
    if data.startswith(b"#version"):
        return "a list of merges (merges.txt)"
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        if not data:
            return "empty"
        if describe_invalid_utf8(data):
            return "not text in UTF-8"
        return "not JSON"
    return _describe_json_kind(record)


def _describe_json_kind(record: Any) -> str:
    """Return a phrase for the kind of a JSON file."""
    if not isinstance(record, dict):
        return "JSON of another kind"
    vocabulary = record.get("vocab")
    if isinstance(vocabulary, list) and vocabulary:
        first_entry = vocabulary[0]
    else:
        first_entry = None
    if isinstance(first_entry, dict) and "token_bytes" in first_entry:
        return "a Tekken vocabulary (Mistral's tekken.json)"
    if "model" not in record and ("tokenizer_class" in record or "eos_token" in record):
        return "the settings of a tokenizer (tokenizer_config.json)"
    if record and all(isinstance(token_id, int) for token_id in record.values()):
        return "a vocabulary without its rules (vocab.json)"
    return "JSON of another kind, or of a newer version of the tokenizers package"


def _looks_like_rank_file(data: bytes) -> bool:
    """Return whether the first line is a token in base64 and its rank."""
    first_line, _, _ = data[:4096].partition(b"\n")
    words = first_line.split()
    if len(words) != 2:
        return False
    token, rank = words
    try:
        return rank.isdigit() and bool(base64.b64decode(token, validate=True))
    except binascii.Error:
        return False
