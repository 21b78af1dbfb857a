"""`dataset.json`: the contents of a built data set, and the yardsticks for its held-out loss. No torch."""

from __future__ import annotations

import json
import lzma
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.core.atomic_files import write_atomically
from megascale.core.untrusted_files import read_bounded
from megascale.data.dataset.file_hash import fingerprint_file, sha256_file
from megascale.data.dataset.formats import token_files
from megascale.errors import DataError

MANIFEST = "dataset.json"
FORMAT = 1
_MAX_BYTES = 16 << 20  # of a manifest, which has a few kilobytes
# xz -9e reads about 1.5 MB/s; of longer held-out text only the beginning is compressed.
MAX_COMPRESSED_BYTES = 4_000_000


@dataclass(frozen=True)
class Compressed:
    """Sizes in bytes of a text, of `zlib -9` and of `xz -9e` (one stream each, over all documents joined)."""

    bytes: int
    zlib: int
    xz: int

    @property
    def zlib_bits_per_byte(self) -> float:
        """Bits of zlib output per byte of text."""
        return 8 * self.zlib / max(self.bytes, 1)

    @property
    def xz_bits_per_byte(self) -> float:
        """Bits of xz output per byte of text."""
        return 8 * self.xz / max(self.bytes, 1)


def compress(texts: Iterable[bytes]) -> Compressed:
    """Compress the first MAX_COMPRESSED_BYTES of the concatenation of `texts` in bounded memory."""
    deflate = zlib.compressobj(9)
    xz = lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME)
    size = zlib_size = xz_size = 0
    for text in texts:
        data = text[: MAX_COMPRESSED_BYTES - size]
        size += len(data)
        zlib_size += len(deflate.compress(data))
        xz_size += len(xz.compress(data))
        if size >= MAX_COMPRESSED_BYTES:
            break
    return Compressed(size, zlib_size + len(deflate.flush()), xz_size + len(xz.flush()))


def bits_per_byte(loss: float, tokens: int, text_bytes: int, lost_bytes: int = 0) -> float:
    """Return bits per byte for a mean loss in nats per token over `tokens` tokens of `text_bytes` bytes of text.

    Bytes without a token count 8 bits each, since predicting an unknown token is easy.
    """
    return loss * tokens / (math.log(2) * text_bytes) + 8 * lost_bytes / text_bytes


@dataclass(frozen=True)
class DataSetPart:
    """One token file of a data set.

    Attributes:
        documents, tokens: counts; each document's end is one token.
        bytes: UTF-8 bytes of the text that was encoded.
        lost_bytes: about how many of these bytes have no token of their own: they are unknown tokens or were dropped.
        bin_bytes, idx_bytes: sizes of the files.
        idx_sha256: hash of the index.
        bin_sha256, bin_fingerprint: hash of the tokens, and of a sample of them; empty if they are not recorded.
        compressed: general compressors' sizes of the same text (held-out part only).
        counted_tokens: tokens that count in the loss, of conversations; None: all.
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
    counted_tokens: int | None = None

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token."""
        return self.bytes / max(self.tokens, 1)


@dataclass(frozen=True)
class Manifest:
    """A data set's folder.

    Attributes:
        sources: its inputs, as given.
        recipe: hash of everything that decides the result; equal recipes need no second build.
        tokenizer: file name in the folder, sha256, vocab_size, end_of_document, begin_of_document, eos_token.
        dtype: type of a stored token.
        parts: `train` and `valid`.
        skipped: number of files and records left out, by reason.
        version: of the megascale that built it.
        notes: remarks for the reader of the build's report.
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
        """Write the manifest atomically."""
        write_atomically(folder / MANIFEST, json.dumps(asdict(self), indent=2) + "\n")


def read_manifest(folder: str | Path) -> Manifest | None:
    """Return the manifest of a data set's folder, None if it has none; DataError if the file is damaged."""
    path = Path(folder) / MANIFEST
    try:
        record = strict_json.loads(read_bounded(path, _MAX_BYTES), _MAX_BYTES)
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
    """Return the record of a token file in the manifest of its folder, None for a file that was not built here."""
    path = Path(prefix)
    manifest = read_manifest(path.parent)
    if manifest is None:
        return None
    return manifest.parts.get(path.name.removesuffix(".bin").removesuffix(".idx"))


def check_sample(setting: str, prefix: str) -> bool:
    """Compare a sample of a token file with its manifest; return False if the manifest has no fingerprint of it.

    Args:
        setting: the key or option that named the file.

    Raises DataError if they differ.
    """
    return _check_tokens(setting, prefix, lambda part: part.bin_fingerprint, fingerprint_file)


def check_all_bytes(setting: str, prefix: str) -> bool:
    """Compare all bytes of a token file with its manifest, as `check_sample` compares a sample."""
    return _check_tokens(setting, prefix, lambda part: part.bin_sha256, sha256_file)


def _check_tokens(
    setting: str, prefix: str, recorded_hash: Callable[[DataSetPart], str], hash_file: Callable[[Path], str]
) -> bool:
    path = next((file for file in token_files(prefix) if file.suffix == ".bin" and file.exists()), None)
    part = find_part(prefix)
    if path is not None and part is not None and part.counted_tokens is not None:
        _require_weights(setting, path.with_suffix(".weights"))
    if path is None or part is None or not recorded_hash(part):
        return False
    if hash_file(path) != recorded_hash(part):
        raise DataError(
            f"{setting}: {path} does not hold the tokens that were built (its checksum is in the folder's "
            "dataset.json): it was damaged or replaced. Copy the data set again, or build it again with "
            "`megascale data build`"
        )
    return True


def _require_weights(setting: str, weights: Path) -> None:
    """Raise DataError if the loss weights of conversations are missing, since every token would count."""
    if not weights.exists():
        raise DataError(
            f"{setting}: {weights} is missing, so every token would count in the loss; the folder's dataset.json says "
            "that it was built with loss weights. Copy the data set again, or build it again with `megascale data "
            "build --chat`"
        )
