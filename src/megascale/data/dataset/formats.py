"""Formats of token files, by the suffix of an entry of data.train. No torch.

An entry without a known suffix is the prefix of a `.bin/.idx` pair (indexed.py), or text that is tokenised on the fly
(sources.py). A plugin adds a format with `FORMATS.register("suffix", TokenFileClass)`. Files of the format are then
read, blended, evaluated, resumed and checked for changes as `.bin/.idx` pairs are.
"""

from __future__ import annotations

from pathlib import Path

from megascale.config.registry import Registry
from megascale.core.batch import SampleFields
from megascale.data.dataset.format_checks import check_token_file
from megascale.data.dataset.indexed import IndexedDataset, pair_paths
from megascale.data.dataset.token_file import TokenFile

# Classes by suffix, in lower case and without the dot.
FORMATS: Registry[type[TokenFile]] = Registry(
    "data.train", {"bin": IndexedDataset, "idx": IndexedDataset}, home="megascale.data.dataset"
)


def _find_format(entry: str | Path) -> type[TokenFile]:
    suffix = Path(entry).suffix[1:].lower()
    if suffix and suffix in FORMATS:
        return FORMATS[suffix]
    return IndexedDataset


def open_tokens(entry: str | Path) -> TokenFile:
    """Open the token file of an entry of data.train, or of data.valid. Raises DataError if the file is unusable."""
    format_class = _find_format(entry)
    file = format_class(entry)
    if format_class is not IndexedDataset:
        check_token_file(file, format_class.fields(entry))
    return file


def list_token_files(entry: str | Path) -> list[Path]:
    """Return the paths of the files that make up the token file of an entry."""
    return _find_format(entry).files(entry)


def find_sample_fields(entry: str | Path) -> SampleFields:
    """Return the optional fields that samples of an entry carry, without opening its token file."""
    return _find_format(entry).fields(entry)


def is_text(entry: str | Path) -> bool:
    """Return whether an entry of data.train is text: a file or folder that is not a token file."""
    path = Path(entry)
    suffix = path.suffix[1:].lower()
    # Do not look up an empty suffix, which would load plugins. A known suffix is not text even if files are missing.
    if suffix and suffix in FORMATS and not path.is_dir():
        return False
    return path.exists() and not pair_paths(entry)[1].exists()
