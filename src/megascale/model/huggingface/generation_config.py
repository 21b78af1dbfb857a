"""Reading and writing of generation_config.json: sampling settings and the ids of begin and end tokens.

A run folder of an imported model holds a copy of the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megascale.core.untrusted_files import read_bounded
from megascale.errors import DataError

FILE_NAME = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MAX_BYTES = 1 << 20
_MAX_SHOWN_IDS = 8  # in a note


def import_generation_config(folder: Path, settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the generation settings of a Hugging Face folder, and notes for the user.

    Token ids that only config.json has are added, as in transformers. eos_token_id has the ids of both files.

    Args:
        settings: content of config.json.
    """
    values: dict[str, Any] = {}
    notes: list[str] = []
    if (folder / FILE_NAME).exists():
        try:
            values = _read(folder / FILE_NAME)
        except DataError as error:
            notes.append(f"{error}; the file is ignored")
    end_ids = list(dict.fromkeys(list_end_ids(values) + list_end_ids(settings)))
    for key in TOKEN_IDS:
        if values.get(key) is None and settings.get(key) is not None:
            values[key] = settings[key]
    if set(list_end_ids(values)) != set(end_ids):
        shown = ", ".join(map(str, end_ids[:_MAX_SHOWN_IDS]))
        if len(end_ids) > _MAX_SHOWN_IDS:
            shown += " ..."
        notes.append(f"{FILE_NAME} and config.json have different eos_token_id; all are used: {shown}")
    if end_ids:
        values["eos_token_id"] = end_ids[0] if len(end_ids) == 1 else end_ids
    return values, notes


def load_generation_config(run: Path) -> dict[str, Any]:
    """Return the generation settings in a run folder, {} if the file is missing. Raises DataError if it is damaged."""
    if (run / FILE_NAME).exists():
        return _read(run / FILE_NAME)
    return {}


def write_generation_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Write generation settings into a folder."""
    (folder / FILE_NAME).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def list_end_ids(values: Mapping[str, Any]) -> list[int]:
    """Return the ids of eos_token_id, which may be one id, a list or missing. Invalid ids are left out."""
    value = values.get("eos_token_id")
    tokens: list[Any] = value if isinstance(value, list) else [value]
    return [token for token in tokens if _is_id(token)]


def export_token_ids(values: Mapping[str, Any], end_of_document: int | None, vocab: int) -> dict[str, Any]:
    """Return the token ids for an exported config.json.

    Args:
        values: generation settings.
        end_of_document: the tokenizer's token, which is added to the end tokens.
        vocab: vocabulary size; larger ids are left out, because transformers would index the embedding with them.
    """
    exported: dict[str, Any] = {}
    for key in TOKEN_IDS:
        token = values.get(key)
        if token is not None and _is_id(token) and token < vocab:
            exported[key] = token
    end_ids = [token for token in list_end_ids(values) if token < vocab]
    if end_of_document is not None and end_of_document not in end_ids:
        end_ids.append(end_of_document)
    if end_ids:
        exported["eos_token_id"] = end_ids[0] if len(end_ids) == 1 else end_ids
    return exported


def _is_id(value: Any) -> bool:
    # `type`, because True is an instance of int.
    return type(value) is int and value >= 0


def _read(file: Path) -> dict[str, Any]:
    """Return the file's JSON object. Raises DataError if the file is damaged."""
    try:
        values = json.loads(read_bounded(file, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is not a readable JSON file: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{file} is not a JSON object")
    return values
