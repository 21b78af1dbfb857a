"""Tokenizers between Hugging Face folders and run folders: `tokenizer.json` as it is, or made of what there is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tiktoken_file import TiktokenTokenizer
from megascale.data.tokenizer.tokenizer import load_tokenizer
from megascale.data.tokenizer.tokenizer_files import CONFIG, TOKENIZER, copy_companions, copy_file
from megascale.errors import DataError


def import_tokenizer(folder: Path, out: Path, ends: Sequence[int]) -> tuple[Tokenizer | None, list[str]]:
    """Bring a Hugging Face folder's tokenizer, and the files beside it, into `out` as tokenizer.json.

    Args:
        folder: holds tokenizer.json, or vocab.json and merges.txt (GPT-2's older form), or neither.
        out: a folder that is there.
        ends: ids of the tokens that end a text by the model's configuration; the first is used if the tokenizer itself
            names none.

    Returns the tokenizer, or None, and notes for a person: why there is none, and what was left out.
    """
    copy_companions(folder, out)
    if (folder / TOKENIZER).exists():
        copy_file(folder / TOKENIZER, out / TOKENIZER)
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        _of_vocabulary(folder).save(str(out / TOKENIZER))
    else:
        return None, [
            f'{folder} has no {TOKENIZER}; `python -c "from transformers import AutoTokenizer as T; '
            f"T.from_pretrained('{folder}').save_pretrained('{folder}')\"` makes one of older forms, or give "
            "--data.tokenizer"
        ]
    settings, notes = _settings(out / CONFIG), []
    if settings is None:
        notes.append(f"{folder / CONFIG} is not a JSON object; it is left out")
        (out / CONFIG).unlink()
        settings = {}
    if settings.get("eos_token") is None and ends:
        token = _token(out / TOKENIZER, ends[0])
        if token is not None:
            _write_settings(out, settings | {"eos_token": token})
    try:
        return load_tokenizer(out / TOKENIZER), notes
    except DataError as error:
        return None, [*notes, str(error)]


def export_tokenizer(tokenizer: Tokenizer, source: Path, out: Path, longest: int) -> None:
    """Write a run's tokenizer, read from `source`, as `transformers.AutoTokenizer` takes it."""
    copy_companions(source.parent, out)
    if isinstance(tokenizer, TiktokenTokenizer):
        tokenizer.to_tokenizers().save(str(out / TOKENIZER))
    else:
        copy_file(source, out / TOKENIZER)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _token(out / TOKENIZER, tokenizer.end_of_document),
        "model_max_length": longest,
    }
    _write_settings(out, settings | (_settings(out / CONFIG) or {}))


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


def _settings(path: Path) -> dict[str, Any] | None:
    """Return a tokenizer_config.json, {} without one; None if it is not a JSON object."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        return None
    return settings if isinstance(settings, dict) else None


def _write_settings(folder: Path, settings: dict[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _token(path: Path, number: int) -> str | None:
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_str(path.read_text(encoding="utf-8")).id_to_token(number)
    except Exception:  # whatever is wrong with the file is said by the one who loads it
        return None
