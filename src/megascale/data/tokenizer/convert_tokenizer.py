"""Tokenizers between Hugging Face folders and run folders: a copy of `tokenizer.json`, or one made from other forms.

The files that transformers reads as a tokenizer are tokenizer.json and its companions in the same folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascale.core.atomic_files import name_temporary
from megascale.core.untrusted_files import read_bounded
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.huggingface_file import CONFIG
from megascale.data.tokenizer.tiktoken_file import TiktokenTokenizer
from megascale.data.tokenizer.tokenizer import TOKENIZER, load_tokenizer
from megascale.errors import DataError

_COMPANIONS = (CONFIG, "special_tokens_map.json", "chat_template.jinja")
_TEMPLATES = "additional_chat_templates"
_MAX_BYTES = 1 << 30  # per file; vocabularies of a quarter of a million tokens take 40 MB


def find_companions(folder: Path) -> list[Path]:
    """Return the companions of a tokenizer.json, as paths relative to its folder."""
    names = [Path(name) for name in _COMPANIONS if (folder / name).exists()]
    return names + sorted(file.relative_to(folder) for file in folder.glob(f"{_TEMPLATES}/*.jinja"))


def copy_companions(source: Path, out: Path) -> None:
    """Copy the companions of a tokenizer.json from one folder to another, replacing existing files."""
    for name in find_companions(source):
        copy_file(source / name, out / name)


def remove_companions(folder: Path) -> None:
    """Remove the companions of a tokenizer.json."""
    for name in find_companions(folder):
        (folder / name).unlink()


def copy_tokenizer_files(source: Path, out: Path) -> None:
    """Copy a tokenizer.json, if there is one, and its companions from one folder to another."""
    copy_companions(source, out)
    if (source / TOKENIZER).exists():
        copy_file(source / TOKENIZER, out / TOKENIZER)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file atomically. Raises DataError if `source` is not a file or is longer than 1 GiB."""
    try:
        data = read_bounded(source, _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"{source} cannot be copied: {error}") from None
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = name_temporary(target)
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def import_tokenizer(folder: Path, out: Path, ends: Sequence[int]) -> tuple[Tokenizer | None, list[str]]:
    """Copy a Hugging Face folder's tokenizer and its companions into `out`, as tokenizer.json.

    Args:
        folder: holds tokenizer.json, or vocab.json and merges.txt (GPT-2's older form), or neither.
        out: an existing folder.
        ends: ids of the tokens that end a text by the model's configuration; the first is used if the tokenizer itself
            names none.

    Returns:
        The tokenizer or None, and notes for the user: why there is no tokenizer, and which files were left out.
    """
    copy_companions(folder, out)
    if (folder / TOKENIZER).exists():
        copy_file(folder / TOKENIZER, out / TOKENIZER)
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        _from_vocabulary(folder).save(str(out / TOKENIZER))
    else:
        return None, [
            f'{folder} has no {TOKENIZER}; `python -c "from transformers import AutoTokenizer as T; '
            f"T.from_pretrained('{folder}').save_pretrained('{folder}')\"` makes one from older forms, or give "
            "--data.tokenizer"
        ]
    notes = []
    settings = _read_settings(out / CONFIG)
    if settings is None:
        notes.append(f"{folder / CONFIG} is not a JSON object; it is left out")
        (out / CONFIG).unlink()
        settings = {}
    if settings.get("eos_token") is None and ends:
        token = _find_token(out / TOKENIZER, ends[0])
        if token is not None:
            _write_settings(out, settings | {"eos_token": token})
    try:
        return load_tokenizer(out / TOKENIZER), notes
    except DataError as error:
        return None, notes + [str(error)]


def export_tokenizer(tokenizer: Tokenizer, source: Path, out: Path, longest: int) -> None:
    """Write a run's tokenizer, read from `source`, in the form that `transformers.AutoTokenizer` reads."""
    copy_companions(source.parent, out)
    if isinstance(tokenizer, TiktokenTokenizer):
        tokenizer.to_tokenizers().save(str(out / TOKENIZER))
    else:
        copy_file(source, out / TOKENIZER)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _find_token(out / TOKENIZER, tokenizer.end_of_document),
        "model_max_length": longest,
    }
    _write_settings(out, settings | (_read_settings(out / CONFIG) or {}))


def _from_vocabulary(folder: Path) -> Any:
    """Return the byte-level BPE of a vocab.json and a merges.txt."""
    from tokenizers.implementations import ByteLevelBPETokenizer

    try:
        tokenizer = ByteLevelBPETokenizer.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{folder}: vocab.json and merges.txt make no tokenizer: {error}") from None
    tokenizer.add_special_tokens(
        [token for token in ("<|endoftext|>", "</s>") if tokenizer.token_to_id(token) is not None]
    )
    return tokenizer


def _read_settings(path: Path) -> dict[str, Any] | None:
    """Return a tokenizer_config.json, {} if the file is missing, None if it is not a JSON object."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(settings, dict):
        return settings
    return None


def _write_settings(folder: Path, settings: dict[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _find_token(path: Path, number: int) -> str | None:
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_str(path.read_text(encoding="utf-8")).id_to_token(number)
    except Exception:  # load_tokenizer reports any fault of the file
        return None
