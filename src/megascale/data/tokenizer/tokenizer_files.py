"""The files that transformers reads as a tokenizer: tokenizer.json, and those beside it."""

from __future__ import annotations

import os
from pathlib import Path

from megascale.core.untrusted_files import read_bounded
from megascale.errors import DataError

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
_COMPANIONS = (CONFIG, "special_tokens_map.json", "chat_template.jinja")
_TEMPLATES = "additional_chat_templates"
_BYTES = 1 << 30  # of one file; vocabularies of a quarter of a million tokens take 40 MB


def find_companions(folder: Path) -> list[Path]:
    """Return the files beside a tokenizer.json, as paths relative to its folder."""
    names = [Path(name) for name in _COMPANIONS if (folder / name).exists()]
    return names + sorted(file.relative_to(folder) for file in folder.glob(f"{_TEMPLATES}/*.jinja"))


def copy_companions(source: Path, out: Path) -> None:
    """Copy the files beside a tokenizer.json from one folder to another; what is there is replaced."""
    for name in find_companions(source):
        copy_file(source / name, out / name)


def remove_companions(folder: Path) -> None:
    """Remove the files beside a tokenizer.json."""
    for name in find_companions(folder):
        (folder / name).unlink()


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, whole or not at all. Raises DataError if `source` is no file or longer than 1 GiB."""
    try:
        data = read_bounded(source, _BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"{source} cannot be copied: {error}") from None
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(target)
