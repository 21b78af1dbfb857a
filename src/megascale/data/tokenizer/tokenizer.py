"""Load the tokenizer of a run or from a file.

Three kinds have one interface (base.py): Hugging Face `tokenizer.json` files and byte-level BPE trained here
(huggingface_file.py), and tiktoken's rank files (tiktoken_file.py).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megascale.config import DataConfig
from megascale.data.tokenizer import tiktoken_file
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.huggingface_file import (
    CONFIG,
    HuggingFaceTokenizer,
    NotATokenizerError,
    configured_end,
)
from megascale.errors import ConfigError, DataError

TOKENIZER = "tokenizer.json"
# Other tokenizer files that a model folder may contain instead of tokenizer.json.
_OTHER_FORMS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json (ours, Hugging Face's, or one holding tiktoken ranks) or a .tiktoken rank file.

    For a Hugging Face file, a tokenizer_config.json in the same folder may name the end-of-document token.
    Raises DataError if the file does not exist or is of another kind.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        remedy = "set data.tokenizer to a tokenizer.json or build a data set"
        if has_other_form(path.parent):
            remedy = _conversion_advice(path.parent)
        raise DataError(f"tokenizer {path} does not exist; {remedy}") from None
    except IsADirectoryError:
        if not (path / TOKENIZER).exists() and has_other_form(path):
            raise DataError(f"tokenizer {path} is a folder without a {TOKENIZER}. {_conversion_advice(path)}") from None
        raise DataError(f"tokenizer {path} is a folder; pass the path of the {TOKENIZER} inside") from None
    except OSError as error:
        raise DataError(f"tokenizer {path} cannot be read: {error}; check its permissions") from None
    has_tiktoken_suffix = path.suffix.lower() == ".tiktoken"
    if _looks_like_rank_file(data) and not has_tiktoken_suffix:
        raise DataError(f"tokenizer {path} is not a {TOKENIZER}: {_explain(path, data)}")
    try:
        text = data.decode()
        if tiktoken_file.is_tiktoken_json(text):
            return tiktoken_file.from_json(text, str(path))
        if has_tiktoken_suffix:
            return tiktoken_file.from_ranks(path, text)
        return HuggingFaceTokenizer.from_json(text, configured_end(path.with_name(CONFIG)), str(path))
    except (UnicodeDecodeError, NotATokenizerError) as error:
        raise DataError(
            f"tokenizer {path} is not a {TOKENIZER} that can be read ({error}): {_explain(path, data)}"
        ) from None


def train_tokenizer(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Train byte-level BPE (like GPT-2) on `texts`; id 0 ends a document. Any text can be encoded.

    Args:
        special_tokens: names of further special tokens, which get the ids after 0.
    """
    return HuggingFaceTokenizer.train_bpe(texts, vocab_size, special_tokens)


def tokenizer_path(data: DataConfig) -> Path:
    """Return `data.tokenizer`, or the tokenizer.json next to the first training file.

    Raises ConfigError if neither is set.
    """
    if data.tokenizer:
        return Path(data.tokenizer)
    if not data.train:
        raise ConfigError("neither data.tokenizer nor data.train is set, so there is no tokenizer; set one of them")
    return Path(data.train[0]).parent / TOKENIZER


def load_run_tokenizer(data: DataConfig) -> Tokenizer:
    """Load the run's tokenizer (see tokenizer_path). Raises DataError if it cannot be read."""
    return load_tokenizer(tokenizer_path(data))


def _explain(path: Path, data: bytes) -> str:
    """Return why a file is not a tokenizer.json, as far as its contents show, and the remedy."""
    kind = _find_kind(path, data)
    if kind == "a tiktoken rank file":
        return (
            f"it is {kind} (like Llama 3's tokenizer.model). Use the tokenizer.json of the same model, or rename the "
            'file to NAME.tiktoken and put NAME.json next to it with {"pattern": "...", "special_tokens": '
            '{"<|endoftext|>": ID}}'
        )
    return f"it is {kind}. {_conversion_advice(path.parent)}"


def _conversion_advice(folder: Path) -> str:
    """Return advice on how to get a tokenizer.json for a model's folder."""
    return (
        "Use the tokenizer.json of the same model; where it has none, "
        f"`python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}')"
        f".save_pretrained('{folder}')\"` makes one (it may need the sentencepiece and protobuf packages)"
    )


def has_other_form(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer in another form than a tokenizer.json."""
    return any((folder / name).exists() for name in _OTHER_FORMS)


def _find_kind(path: Path, data: bytes) -> str:
    if _looks_like_rank_file(data):
        return "a tiktoken rank file"
    if data[:1] == b"\n" and (path.suffix.lower() in (".model", ".spm") or b"<unk>" in data[:4096]):
        return "a sentencepiece model"
    if data.startswith(b"#version"):
        return "a list of merges (merges.txt)"
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return "not JSON" if data else "empty"
    return _find_record_kind(record)


def _find_record_kind(record: Any) -> str:
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
    if record and all(isinstance(number, int) for number in record.values()):
        return "a vocabulary without its rules (vocab.json)"
    return "JSON of another kind, or of a newer version of the tokenizers package"


def _looks_like_rank_file(data: bytes) -> bool:
    """Return whether the first line is a token in base64 and its rank."""
    parts = data[:4096].split(b"\n", 1)[0].split()
    try:
        return len(parts) == 2 and parts[1].isdigit() and bool(base64.b64decode(parts[0], validate=True))
    except binascii.Error:
        return False
