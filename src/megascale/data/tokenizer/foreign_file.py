"""Tokenizer files of other kinds: which kind a file is, and how to make a tokenizer.json of it."""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

# Files that are left of a tokenizer where its tokenizer.json is missing.
_SIBLINGS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json")


def explain(path: Path, data: bytes) -> str:
    """Return why a file is not a tokenizer.json, as far as its contents tell, and what to do."""
    kind = _kind_of(path, data)
    if kind == "a tiktoken rank file":
        return (
            f"it is {kind} (as Llama 3's tokenizer.model). Use the tokenizer.json of the same model, or name the file "
            'NAME.tiktoken and put NAME.json beside it with {"pattern": "...", "special_tokens": {"<|endoftext|>": ID}}'
        )
    return f"it is {kind}. {conversion(path.parent)}"


def conversion(folder: Path) -> str:
    """Return how to make a tokenizer.json of a model's folder."""
    return (
        "Use the tokenizer.json of the same model; where it has none, "
        f"`python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}')"
        f".save_pretrained('{folder}')\"` makes one (it may need the packages sentencepiece and protobuf)"
    )


def has_other_form(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer in another form than a tokenizer.json."""
    return any((folder / name).exists() for name in _SIBLINGS)


def _kind_of(path: Path, data: bytes) -> str:
    if is_rank_file(data):
        return "a tiktoken rank file"
    if data[:1] == b"\n" and (path.suffix.lower() in (".model", ".spm") or b"<unk>" in data[:4096]):
        return "a sentencepiece model"
    if data.startswith(b"#version"):
        return "a list of merges (merges.txt)"
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return "not JSON" if data else "empty"
    return _kind_of_record(record)


def _kind_of_record(record: Any) -> str:
    if not isinstance(record, dict):
        return "JSON of another kind"
    vocabulary = record.get("vocab")
    if (
        isinstance(vocabulary, list)
        and vocabulary
        and isinstance(vocabulary[0], dict)
        and "token_bytes" in vocabulary[0]
    ):
        return "a Tekken vocabulary (Mistral's tekken.json)"
    if "model" not in record and ("tokenizer_class" in record or "eos_token" in record):
        return "the settings of a tokenizer (tokenizer_config.json)"
    if record and all(isinstance(number, int) for number in record.values()):
        return "a vocabulary without its rules (vocab.json)"
    return "JSON of another kind, or of a newer version of the package tokenizers"


def is_rank_file(data: bytes) -> bool:
    """Return whether the first line is a token in base64 and its rank."""
    parts = data[:4096].split(b"\n", 1)[0].split()
    try:
        return len(parts) == 2 and parts[1].isdigit() and bool(base64.b64decode(parts[0], validate=True))
    except binascii.Error:
        return False
