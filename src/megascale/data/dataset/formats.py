"""The formats of token files: what an entry of data.train is, by its suffix.

One without a known suffix is the prefix of a `.bin/.idx` pair (indexed.py), or else text, which is tokenised on the fly
(sources.py). Another package adds a format with `FORMATS.register("suffix", TokenFileClass)`; it is read, blended,
evaluated, resumed and watched for changes like ours. No torch.
"""

from __future__ import annotations

from pathlib import Path

from megascale.config.registry import Registry
from megascale.data.dataset.indexed import IndexedDataset, paths
from megascale.data.dataset.token_file import TokenFile

# By suffix, lower case and without its dot.
FORMATS: Registry[type[TokenFile]] = Registry(
    "data.train", {"bin": IndexedDataset, "idx": IndexedDataset}, home="megascale.data.dataset"
)


def _format(entry: str | Path) -> type[TokenFile]:
    suffix = Path(entry).suffix[1:].lower()
    return FORMATS[suffix] if suffix and suffix in FORMATS else IndexedDataset


def open_tokens(entry: str | Path) -> TokenFile:
    """The token file that an entry of data.train, or data.valid, names; DataError if it cannot be used."""
    return _format(entry)(entry)


def token_files(entry: str | Path) -> list[Path]:
    """The files that a token file consists of."""
    return _format(entry).files(entry)


def is_text(entry: str | Path) -> bool:
    """Whether an entry of data.train is text: a file or folder that is not a token file."""
    suffix = Path(entry).suffix[1:].lower()
    # An entry without a suffix must not load plugins. Half of a pair whose other half is missing is not text either.
    if suffix and suffix in FORMATS and not Path(entry).is_dir():
        return False
    return Path(entry).exists() and not paths(entry)[1].exists()
