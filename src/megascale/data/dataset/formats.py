"""The formats of token files, by the suffix of an entry of data.train.

An entry without a known suffix is the prefix of a `.bin/.idx` pair (indexed.py), or text that is tokenised on the fly
(sources.py). Another package adds a format with `FORMATS.register("suffix", TokenFileClass)`; it is read, blended,
evaluated, resumed and checked for changes like the formats here. No torch.
"""

from __future__ import annotations

from pathlib import Path

from megascale.config.registry import Registry
from megascale.core.batch import SampleFields
from megascale.data.dataset.indexed import IndexedDataset, pair_paths
from megascale.data.dataset.token_file import TokenFile

# By suffix, lower case and without its dot.
FORMATS: Registry[type[TokenFile]] = Registry(
    "data.train", {"bin": IndexedDataset, "idx": IndexedDataset}, home="megascale.data.dataset"
)


def _format(entry: str | Path) -> type[TokenFile]:
    suffix = Path(entry).suffix[1:].lower()
    if suffix and suffix in FORMATS:
        return FORMATS[suffix]
    return IndexedDataset


def open_tokens(entry: str | Path) -> TokenFile:
    """Open the token file of an entry of data.train, or of data.valid; DataError if it is unusable."""
    return _format(entry)(entry)


def token_files(entry: str | Path) -> list[Path]:
    """Return the files of a token file."""
    return _format(entry).files(entry)


def sample_fields(entry: str | Path) -> SampleFields:
    """Return the optional fields of a token file's samples, without opening it."""
    return _format(entry).fields(entry)


def is_text(entry: str | Path) -> bool:
    """Return whether an entry of data.train is text: a file or folder that is not a token file."""
    path = Path(entry)
    suffix = path.suffix[1:].lower()
    # An entry without a suffix must not load plugins. Half of a pair whose other half is missing is not text either.
    if suffix and suffix in FORMATS and not path.is_dir():
        return False
    return path.exists() and not pair_paths(entry)[1].exists()
