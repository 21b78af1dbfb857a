"""Settings of sampling and the end tokens of texts: generation_config.json, of which a run folder has a copy."""

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

    Args:
        settings: its config.json. Token ids that only this file has are added, as transformers does. All ids of
            eos_token_id in either file are kept.
    """
    values: dict[str, Any] = {}
    notes: list[str] = []
    if (folder / FILE_NAME).exists():
        try:
            values = _read(folder / FILE_NAME)
        except DataError as error:
            notes.append(f"{error}; the file is ignored")
    ends = list(dict.fromkeys(list_end_ids(values) + list_end_ids(settings)))
    for key in TOKEN_IDS:
        if values.get(key) is None and settings.get(key) is not None:
            values[key] = settings[key]
    if set(list_end_ids(values)) != set(ends):
        shown = ", ".join(map(str, ends[:_MAX_SHOWN_IDS])) + (" ..." if len(ends) > _MAX_SHOWN_IDS else "")
        notes.append(f"{FILE_NAME} and config.json have different eos_token_id; all are used: {shown}")
    if ends:
        values["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return values, notes


def load_generation_config(run: Path) -> dict[str, Any]:
    """Return the generation settings in a run folder, {} if there are none. Raises DataError for a damaged file."""
    if (run / FILE_NAME).exists():
        return _read(run / FILE_NAME)
    return {}


def write_generation_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Write generation settings into a folder."""
    (folder / FILE_NAME).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def list_end_ids(values: Mapping[str, Any]) -> list[int]:
    """Return the token ids of eos_token_id, which may be one id, a list or missing; invalid ids are ignored."""
    named = values.get("eos_token_id")
    tokens: list[Any] = named if isinstance(named, list) else [named]
    return [token for token in tokens if _is_id(token)]


def export_token_ids(values: Mapping[str, Any], end_of_document: int | None, vocab: int) -> dict[str, Any]:
    """Return the token ids for an exported config.json.

    Args:
        values: generation settings.
        end_of_document: the tokenizer's token, which is added to the end tokens.
        vocab: vocabulary size; larger ids are left out, because transformers would index the embedding with them.
    """
    ends = [token for token in list_end_ids(values) if token < vocab]
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
        values = json.loads(read_bounded(file, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is not a readable JSON file: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{file} is not a JSON object")
    return values
