"""The tokenizer that a run stores in its folder, so that text can be made and exported without its data set."""

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
    """Copy a run's tokenizer and its companion files into the run folder, unless they are there.

    Args:
        sha256: hash of the tokenizer; None for a run without one, whose folder gets none.
    """
    copy = run / TOKENIZER
    if sha256 is None or (copy.exists() and _is_copy(copy, find_tokenizer_path(config.data), sha256)):
        return
    source = find_tokenizer_path(config.data)
    copy.unlink(missing_ok=True)
    if source.suffix == ".tiktoken":
        load_tokenizer(source).save(copy)
        return
    if source.parent.resolve() != run.resolve():
        _replace_companions(source.parent, run)
    copy_file(source, copy)  # last: a folder with the tokenizer has its companions


def _replace_companions(source: Path, run: Path) -> None:
    """Replace the companion files of another tokenizer in the run folder by those in `source`."""
    remove_companions(run)
    copy_companions(source, run)
    (run / generation_config.FILE_NAME).unlink(missing_ok=True)
    if (source / generation_config.FILE_NAME).exists():
        copy_file(source / generation_config.FILE_NAME, run / generation_config.FILE_NAME)


def find_tokenizer(run: Path, config: Config, sha256: str | None) -> tuple[Path, Tokenizer]:
    """Return a run's tokenizer and its file: the copy in the run folder, or else the one that `config` names.

    Args:
        sha256: hash of the tokenizer that the run was trained with, if known; a tokenizer with another hash is not
            returned.

    Raises DataError if there is no readable tokenizer or it has another hash, ConfigError if `config` names none.
    """
    problem: ConfigError | DataError | None = None
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
            problem = problem or error
            continue
        if sha256 is None or tokenizer.sha256 == sha256:
            return path, tokenizer
        problem = problem or DataError(
            f"{path} is not the tokenizer that {run} was trained with (SHA-256 {tokenizer.sha256[:12]}, {sha256[:12]} "
            f"then): equal ids would mean different text. Put that one back as {run / TOKENIZER}"
        )
    assert problem is not None
    raise problem


def _is_copy(copy: Path, source: Path, sha256: str) -> bool:
    """Return whether a run's copy is the tokenizer of `sha256`, which `source` holds."""
    try:
        return filecmp.cmp(copy, source, shallow=False) or load_tokenizer(copy).sha256 == sha256
    except (OSError, DataError):
        return False
