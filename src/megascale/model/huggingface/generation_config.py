"""generation_config.json: how a model is sampled, and the tokens that end its texts. A run folder keeps the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megascale.core.untrusted_files import read_bounded
from megascale.errors import DataError

FILE_NAME = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_BYTES = 1 << 20
_SHOWN = 8  # ids in a note


def import_generation_config(folder: Path, settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the generation settings of a Hugging Face folder, and notes for a person.

    Args:
        settings: its config.json. Token ids that only this names are added, as transformers does without the file.
            All ids of eos_token_id are kept, whichever file names them.
    """
    values, notes = {}, []
    if (folder / FILE_NAME).exists():
        try:
            values = _read(folder / FILE_NAME)
        except DataError as error:
            notes.append(f"{error}; it is left out")
    ends = list(dict.fromkeys([*end_ids(values), *end_ids(settings)]))
    for key in TOKEN_IDS:
        if values.get(key) is None and settings.get(key) is not None:
            values[key] = settings[key]
    if set(end_ids(values)) != set(ends):
        shown = ", ".join(map(str, ends[:_SHOWN])) + (" ..." if len(ends) > _SHOWN else "")
        notes.append(f"{FILE_NAME} and config.json name different ends of a text (eos_token_id); all are kept: {shown}")
    if ends:
        values["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return values, notes


def load_generation_config(run: Path) -> dict[str, Any]:
    """Return the generation settings that a run folder keeps, {} without any. Raises DataError if they are damaged."""
    return _read(run / FILE_NAME) if (run / FILE_NAME).exists() else {}


def write_generation_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Write generation settings into a folder."""
    (folder / FILE_NAME).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def end_ids(values: Mapping[str, Any]) -> list[int]:
    """Return the token ids of eos_token_id, which may be one id, several or none; leave out what is not an id."""
    named = values.get("eos_token_id")
    tokens: list[Any] = named if isinstance(named, list) else [named]
    return [token for token in tokens if _is_id(token)]


def token_ids(values: Mapping[str, Any], end_of_document: int | None, vocab: int) -> dict[str, Any]:
    """Return the token ids that an exported config.json names.

    Args:
        values: generation settings.
        end_of_document: the tokenizer's, which is added to the ends.
        vocab: ids from here on are left out, since transformers would index the embedding with them.
    """
    ends = [token for token in end_ids(values) if token < vocab]
    if end_of_document is not None and end_of_document not in ends:
        ends.append(end_of_document)
    named: dict[str, Any] = {key: values.get(key) for key in TOKEN_IDS}
    named = {key: token for key, token in named.items() if _is_id(token) and token < vocab}
    if ends:
        named["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return named


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_bounded(file, _BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is not a JSON file that can be read: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{file} is not a JSON object")
    return values
