"""Whether a run's data and tokenizer are there and long enough: looked at before any process starts. No torch."""

from __future__ import annotations

from pathlib import Path

from megascale.config import Config
from megascale.data.dataset import manifest
from megascale.data.dataset.formats import is_text, open_tokens, token_files
from megascale.data.tokenizer.tokenizer import load_run_tokenizer
from megascale.errors import DataError


def check_entry(entry: str) -> None:
    """Refuse an entry of data.train that names nothing, or a data set's folder; DataError with what to name instead."""
    if (Path(entry) / manifest.NAME).exists():
        raise DataError(f"data.train={entry} is the folder of a built data set; name its token file, {entry}/train")
    if is_text(entry) or any(file.exists() for file in token_files(entry)):
        return
    names = " nor ".join(str(file) for file in token_files(entry))
    raise DataError(
        f"data.train={entry} does not exist: there is neither a file or folder of that name nor {names} (in "
        f"{Path.cwd()}); check the path, or make a data set with `megascale data build`"
    )


def check_data(config: Config) -> None:
    """Raises DataError for a data set or tokenizer of `config` (resolved) that is missing, damaged or too short.

    Text that is tokenised on the fly is not read here; without data.train there is nothing to look at.
    """
    data, needed = config.data, config.model.sequence_length + 1
    for key, entries in (("data.train", data.train), ("data.valid", [data.valid] if data.valid else [])):
        for entry in entries:
            if key == "data.train" and is_text(entry):
                load_run_tokenizer(data)
                continue
            tokens = open_tokens(entry).tokens
            if key == "data.train" and tokens < needed:
                raise DataError(
                    f"data.train: {entry} has {tokens} tokens and one sample needs model.sequence_length + 1 = "
                    f"{needed}; use a shorter sequence or more text"
                )
    if data.train and config.train.sample_prompt is not None:
        load_run_tokenizer(data)  # the sample at the end of training needs it
