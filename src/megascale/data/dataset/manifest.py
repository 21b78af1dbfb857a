"""`dataset.json`: what a built data set consists of, and what its held-out loss is to be measured against."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.core.untrusted_files import read_bounded
from megascale.data.dataset.compressors import Compressed
from megascale.errors import DataError

NAME = "dataset.json"
FORMAT = 1
_MOST_BYTES = 16 << 20  # of a manifest, which has a few kilobytes


@dataclass(frozen=True)
class DataSetPart:
    """One token file of a data set.

    Attributes:
        documents, tokens: counts; each document's end is one token.
        bytes: UTF-8 bytes of the text that was encoded.
        lost_bytes: of these about as many that no token of their own stands for: unknown to the tokenizer or dropped.
        bin_bytes, idx_bytes: sizes of the files.
        idx_sha256: hash of the index.
        bin_sha256, bin_fingerprint: hash of the tokens, and of a sample of them; empty if an older version built it.
        compressed: general compressors' sizes of the same text (held-out part only).
    """

    documents: int
    tokens: int
    bytes: int
    bin_bytes: int
    idx_bytes: int
    idx_sha256: str
    compressed: Compressed | None = None
    lost_bytes: int = 0
    bin_sha256: str = ""
    bin_fingerprint: str = ""

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text a token stands for, on average."""
        return self.bytes / max(self.tokens, 1)


@dataclass(frozen=True)
class Manifest:
    """A data set's folder.

    Attributes:
        sources: what it was made of, as given.
        recipe: hash of everything that decides the result; equal recipes need no second build.
        tokenizer: file name in the folder, sha256, vocab_size, end_of_document, begin_of_document, eos_token.
        dtype: type of a stored token.
        parts: `train` and `valid`.
        skipped: number of files and records left out, by reason.
        version: of megascale that built it.
        notes: what a reader of the build's report should know.
    """

    sources: list[str]
    recipe: str
    tokenizer: dict[str, Any]
    dtype: str
    parts: dict[str, DataSetPart]
    skipped: dict[str, int] = field(default_factory=dict)
    version: str = ""
    format: int = FORMAT
    notes: list[str] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        new = folder / f"{NAME}.{os.getpid()}.tmp"
        new.write_text(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(new, folder / NAME)


def read_manifest(folder: str | Path) -> Manifest | None:
    """The manifest of a data set's folder, None if it has none; DataError if it cannot be understood."""
    path = Path(folder) / NAME
    try:
        record = strict_json.loads(read_bounded(path, _MOST_BYTES), _MOST_BYTES)
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']} where {FORMAT} is known")
        parts = {}
        for name, part in record.pop("parts").items():
            sizes = part.pop("compressed")
            parts[name] = DataSetPart(**part, compressed=Compressed(**sizes) if sizes else None)
        return Manifest(**record, parts=parts)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DataError(
            f"{path} is not a data set's manifest ({error}); delete the folder and build it again"
        ) from None


def find_part(prefix: str | Path) -> DataSetPart | None:
    """What the manifest beside a token file says of it, None for a file that was not built here."""
    path = Path(prefix)
    manifest = read_manifest(path.parent)
    return manifest.parts.get(path.name.removesuffix(".bin").removesuffix(".idx")) if manifest else None


def sha256_file(path: Path) -> str:
    """Hash of a file's contents, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
