"""Tokenizers between Hugging Face folders and run folders: `tokenizer.json` as it is, or made of what there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tiktoken_file import TiktokenTokenizer
from megascale.data.tokenizer.tokenizer import load_tokenizer
from megascale.errors import DataError

NAME, CONFIG = "tokenizer.json", "tokenizer_config.json"


def take(folder: Path, out: Path, end: int | None) -> tuple[Tokenizer | None, str | None]:
    """Bring a Hugging Face folder's tokenizer into `out` as tokenizer.json.

    Args:
        folder: holds tokenizer.json, or vocab.json and merges.txt (GPT-2's older form), or neither.
        out: a folder that is there.
        end: id of the token that ends a text by the model's configuration, used if the tokenizer itself names none.

    Returns the tokenizer, or None and why there is none.
    """
    if (folder / NAME).exists():
        (out / NAME).write_bytes((folder / NAME).read_bytes())
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        _of_vocabulary(folder).save(str(out / NAME))
    else:
        return None, (
            f'{folder} has no {NAME}; `python -c "from transformers import AutoTokenizer as T; '
            f"T.from_pretrained('{folder}').save_pretrained('{folder}')\"` makes one of older forms, or give "
            "--data.tokenizer"
        )
    settings = _settings(folder / CONFIG)
    if settings.get("eos_token") is None and end is not None:
        token = _token(out / NAME, end)
        settings |= {"eos_token": token} if token is not None else {}
    if settings:
        (out / CONFIG).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    try:
        return load_tokenizer(out / NAME), None
    except DataError as error:
        return None, str(error)


def give(tokenizer: Tokenizer, source: Path, out: Path, longest: int) -> None:
    """Write a run's tokenizer, read from `source`, as `transformers.AutoTokenizer` takes it."""
    if isinstance(tokenizer, TiktokenTokenizer):
        tokenizer.to_tokenizers().save(str(out / NAME))
    else:
        (out / NAME).write_bytes(source.read_bytes())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _token(out / NAME, tokenizer.end_of_document),
        "model_max_length": longest,
    } | _settings(source.with_name(CONFIG))
    (out / CONFIG).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _of_vocabulary(folder: Path) -> Any:
    """The byte-level BPE of a vocab.json and a merges.txt."""
    from tokenizers.implementations import ByteLevelBPETokenizer

    try:
        made = ByteLevelBPETokenizer.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{folder}: vocab.json and merges.txt make no tokenizer: {error}") from None
    special = [token for token in ("<|endoftext|>", "</s>") if made.token_to_id(token) is not None]
    made.add_special_tokens(special)
    return made


def _settings(path: Path) -> dict[str, Any]:
    """A tokenizer_config.json, {} without one that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _token(path: Path, number: int) -> str | None:
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_str(path.read_text(encoding="utf-8")).id_to_token(number)
    except Exception:  # whatever is wrong with the file is said by the one who loads it
        return None
