"""Import of tokenizers from Hugging Face folders into run folders, and export.

The package transformers reads tokenizer.json and its companions: settings, special tokens and chat templates in the
same folder.
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
_TEMPLATES_FOLDER = "additional_chat_templates"
_MAX_FILE_BYTES = 1 << 30  # a vocabulary of a quarter of a million tokens takes 40 MB


def find_companions(folder: Path) -> list[Path]:
    """Return the companions of a tokenizer.json, as paths relative to its folder."""
    names = [Path(name) for name in _COMPANIONS if (folder / name).exists()]
    return names + sorted(file.relative_to(folder) for file in folder.glob(f"{_TEMPLATES_FOLDER}/*.jinja"))


def copy_companions(source: Path, out: Path) -> None:
    """Copy the companions of a tokenizer.json from one folder to another, replacing existing files."""
    for name in find_companions(source):
        copy_file(source / name, out / name)


def remove_companions(folder: Path) -> None:
    """Remove the companions of a tokenizer.json."""
    for name in find_companions(folder):
        (folder / name).unlink()


def copy_tokenizer_files(source: Path, out: Path) -> None:
    """Copy a tokenizer.json, if it exists, and its companions from one folder to another."""
    copy_companions(source, out)
    if (source / TOKENIZER).exists():
        copy_file(source / TOKENIZER, out / TOKENIZER)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file atomically. Raises DataError if `source` is not a file or is longer than 1 GiB."""
    try:
        data = read_bounded(source, _MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"{source} cannot be copied: {error}; name a folder with readable files") from None
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = name_temporary(target)
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def import_tokenizer(folder: Path, out: Path, end_ids: Sequence[int]) -> tuple[Tokenizer | None, list[str]]:
    """Copy a Hugging Face folder's tokenizer and its companions into `out`, as tokenizer.json.

    Args:
        folder: folder with a tokenizer.json, with vocab.json and merges.txt (GPT-2's older form), or with neither.
        out: an existing folder.
        end_ids: ids of the tokens that end a text in the model's configuration. The first is used if the tokenizer does
            not name an eos_token.

    Returns:
        The tokenizer or None, and notes for the user: why there is no tokenizer, and which files were left out.
    """
    copy_companions(folder, out)
    if (folder / TOKENIZER).exists():
        copy_file(folder / TOKENIZER, out / TOKENIZER)
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        _load_vocabulary(folder).save(str(out / TOKENIZER))
    else:
        return None, [
            f'{folder} has no {TOKENIZER}; `python -c "from transformers import AutoTokenizer as T; '
            f"T.from_pretrained('{folder}').save_pretrained('{folder}')\"` makes one from older forms, or "
            "set --data.tokenizer"
        ]
    notes = []
    settings = _read_settings(out / CONFIG)
    if settings is None:
        notes.append(f"{folder / CONFIG} is not a JSON object and is left out")
        (out / CONFIG).unlink()
        settings = {}
    if settings.get("eos_token") is None and end_ids:
        token = _find_token(out / TOKENIZER, end_ids[0])
        if token is not None:
            _write_settings(out, settings | {"eos_token": token})
    try:
        return load_tokenizer(out / TOKENIZER), notes
    except DataError as error:
        return None, notes + [str(error)]


def export_tokenizer(tokenizer: Tokenizer, source: Path, out: Path, max_length: int) -> None:
    """Write a run's tokenizer in the form that `transformers.AutoTokenizer` reads.

    Args:
        tokenizer: the tokenizer.
        source: file from which it was read; the companions in the same folder are copied too.
        out: an existing folder.
        max_length: longest text in tokens, for the settings.
    """
    copy_companions(source.parent, out)
    if isinstance(tokenizer, TiktokenTokenizer):
        tokenizer.to_tokenizers().save(str(out / TOKENIZER))
    else:
        copy_file(source, out / TOKENIZER)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _find_token(out / TOKENIZER, tokenizer.end_of_document),
        "model_max_length": max_length,
    }
    copied_settings = _read_settings(out / CONFIG) or {}
    _write_settings(out, settings | copied_settings)


def _load_vocabulary(folder: Path) -> Any:
    """Return the byte-level BPE of vocab.json and merges.txt. Raises DataError if the library refuses them."""
    from tokenizers.implementations import ByteLevelBPETokenizer

    try:
        tokenizer = ByteLevelBPETokenizer.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"{folder}: vocab.json and merges.txt do not make a tokenizer: {error}; copy them again"
        ) from None
    tokenizer.add_special_tokens(
        [token for token in ("<|endoftext|>", "</s>") if tokenizer.token_to_id(token) is not None]
    )
    return tokenizer


def _read_settings(path: Path) -> dict[str, Any] | None:
    """Return the settings of a tokenizer_config.json; {} if the file is missing, None if it is not a JSON object."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(settings, dict):
        return settings
    return None


def _write_settings(folder: Path, settings: dict[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _find_token(path: Path, token_id: int) -> str | None:
    """Return the name of an id in a tokenizer.json, or None if it has none."""
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_str(path.read_text(encoding="utf-8")).id_to_token(token_id)
    except Exception:  # load_tokenizer reports the faults of the file
        return None
