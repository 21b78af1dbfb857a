"""Whether token files still hold what was built: a sample at each start, all of it on request. No torch."""

from __future__ import annotations

from pathlib import Path

from megascale.config import Config
from megascale.data.dataset.file_hash import fingerprint_file
from megascale.data.dataset.formats import is_text, token_files
from megascale.data.dataset.manifest import DataSetPart, find_part, sha256_file
from megascale.errors import DataError


def check_samples(config: Config) -> None:
    """Check a sample of each token file of data.train and data.valid that was built here; DataError as check_sample."""
    for entry in config.data.train:
        if not is_text(entry):
            check_sample("data.train", entry)
    if config.data.valid is not None:
        check_sample("data.valid", config.data.valid)


def check_sample(what: str, prefix: str) -> bool:
    """Compare a sample of a token file with what its manifest recorded; return False if it recorded nothing.

    Args:
        what: the key or option that named the file.

    Raises DataError if they differ.
    """
    path, part = _tokens_of(prefix)
    if path is None or part is None or not part.bin_fingerprint:
        return False
    if fingerprint_file(path) != part.bin_fingerprint:
        raise _damaged(what, path)
    return True


def check_whole(what: str, prefix: str) -> bool:
    """Do as `check_sample` does with all bytes of a token file."""
    path, part = _tokens_of(prefix)
    if path is None or part is None or not part.bin_sha256:
        return False
    if sha256_file(path) != part.bin_sha256:
        raise _damaged(what, path)
    return True


def _tokens_of(prefix: str) -> tuple[Path | None, DataSetPart | None]:
    """Return the .bin file of a token file, if it is there, and what its manifest says of it."""
    path = next((file for file in token_files(prefix) if file.suffix == ".bin" and file.exists()), None)
    return path, find_part(prefix) if path is not None else None


def _damaged(what: str, path: Path) -> DataError:
    return DataError(
        f"{what}: {path} does not hold the tokens that were built (the dataset.json beside it has their checksum): it "
        "was damaged or replaced. Copy the data set again, or build it again with `megascale data build`"
    )
