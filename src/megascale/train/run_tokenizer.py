"""The copy of the tokenizer in a run folder, with which the run can generate text and be exported without its data."""

from __future__ import annotations

import filecmp
from pathlib import Path

from megascale.config import Config
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.convert_tokenizer import copy_companions, copy_file, remove_companions
from megascale.data.tokenizer.tokenizer import TOKENIZER, find_tokenizer_path, load_tokenizer
from megascale.errors import ConfigError, DataError
from megascale.model.huggingface import generation_config


def copy_tokenizer(run: Path, config: Config, sha256: str | None) -> None:
    """Copy the tokenizer that `config` names, with its companion files, into the run folder unless it is there.

    Args:
        sha256: hash of the tokenizer; None if the run has no tokenizer, then nothing is copied.
    """
    copy = run / TOKENIZER
    if sha256 is None or (copy.exists() and _is_same_tokenizer(copy, find_tokenizer_path(config.data), sha256)):
        return
    source = find_tokenizer_path(config.data)
    copy.unlink(missing_ok=True)
    if source.suffix == ".tiktoken":
        load_tokenizer(source).save(copy)
        return
    if source.parent.resolve() != run.resolve():
        _replace_companions(source.parent, run)
    copy_file(source, copy)  # last, so that a folder with a tokenizer has its companion files


def _replace_companions(source: Path, run: Path) -> None:
    """Replace companion files of an earlier tokenizer in the run folder by those in the folder `source`."""
    remove_companions(run)
    copy_companions(source, run)
    (run / generation_config.FILE_NAME).unlink(missing_ok=True)
    if (source / generation_config.FILE_NAME).exists():
        copy_file(source / generation_config.FILE_NAME, run / generation_config.FILE_NAME)


def find_tokenizer(run: Path, config: Config, sha256: str | None) -> tuple[Path, Tokenizer]:
    """Return a run's tokenizer and its file: the copy in the run folder, else the tokenizer that `config` names.

    Args:
        sha256: hash of the tokenizer that the run was trained with, if known; a tokenizer with another hash is not
            returned.

    Raises DataError if there is no readable tokenizer or it has another hash, ConfigError if `config` names none. If
    neither tokenizer can be returned, the error is about the first one.
    """
    first_problem: ConfigError | DataError | None = None
    for in_run_folder in (True, False):
        try:
            if in_run_folder:
                path = run / TOKENIZER
            else:
                path = find_tokenizer_path(config.data)
            if in_run_folder and not path.exists():
                continue
            tokenizer = load_tokenizer(path)
        except (ConfigError, DataError) as error:
            first_problem = first_problem or error
            continue
        if sha256 is None or tokenizer.sha256 == sha256:
            return path, tokenizer
        first_problem = first_problem or DataError(
            f"{path} is not the tokenizer that {run} was trained with (SHA-256 {tokenizer.sha256[:12]}, {sha256[:12]} "
            f"then): equal ids would mean different text. Put that one back as {run / TOKENIZER}"
        )
    assert first_problem is not None
    raise first_problem


def _is_same_tokenizer(copy: Path, source: Path, sha256: str) -> bool:
    """Return whether the file `copy` is the tokenizer with hash `sha256`, which the file `source` contains."""
    try:
        return filecmp.cmp(copy, source, shallow=False) or load_tokenizer(copy).sha256 == sha256
    except (OSError, DataError):
        return False
