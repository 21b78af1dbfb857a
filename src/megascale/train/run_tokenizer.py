"""The tokenizer that a run keeps in its folder, so that text can be made and exported without its data set."""

from __future__ import annotations

import filecmp
from pathlib import Path

from megascale.config import Config
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tokenizer import load_tokenizer, tokenizer_path
from megascale.data.tokenizer.tokenizer_files import TOKENIZER, copy_companions, copy_file, remove_companions
from megascale.errors import ConfigError, DataError
from megascale.model.huggingface import generation_config


def keep_tokenizer(run: Path, config: Config, sha256: str | None) -> None:
    """Copy a run's tokenizer, and the files beside it, into the run folder, unless it is there.

    Args:
        sha256: the tokenizer's; None for a run that has none, whose folder keeps none.
    """
    own = run / TOKENIZER
    if sha256 is None or (own.exists() and _is_same(own, tokenizer_path(config.data), sha256)):
        return
    source = tokenizer_path(config.data)
    own.unlink(missing_ok=True)
    if source.suffix == ".tiktoken":
        load_tokenizer(source).save(own)
        return
    if source.parent.resolve() != run.resolve():
        _replace_companions(source.parent, run)
    copy_file(source, own)  # last: a folder that has it has all


def _replace_companions(source: Path, run: Path) -> None:
    """Put the files beside a tokenizer.json in the place of those that a run keeps of another."""
    remove_companions(run)
    copy_companions(source, run)
    (run / generation_config.FILE_NAME).unlink(missing_ok=True)
    if (source / generation_config.FILE_NAME).exists():
        copy_file(source / generation_config.FILE_NAME, run / generation_config.FILE_NAME)


def find_tokenizer(run: Path, config: Config, sha256: str | None) -> tuple[Path, Tokenizer]:
    """Return a run's tokenizer and its file: the copy in the run folder, else the one that `config` names.

    Args:
        sha256: of the tokenizer that the run was trained with, if known: no other is returned.

    Raises DataError, or ConfigError if `config` names none, if there is none that can be read, or it is another.
    """
    problem: ConfigError | DataError | None = None
    for kept in (True, False):
        try:
            path = run / TOKENIZER if kept else tokenizer_path(config.data)
            if kept and not path.exists():
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


def _is_same(own: Path, source: Path, sha256: str) -> bool:
    """Return whether a run's copy is the tokenizer of `sha256`, which `source` holds."""
    try:
        return filecmp.cmp(own, source, shallow=False) or load_tokenizer(own).sha256 == sha256
    except (OSError, DataError):
        return False
