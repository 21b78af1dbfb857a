"""`dataset.json`, the manifest of a built data set, with the compressed size of its held-out text. No torch.

The bits per byte of zlib and xz are a yardstick for the held-out loss.
"""

from __future__ import annotations

import json
import lzma
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from megascale.core import strict_json
from megascale.core.atomic_files import write_atomically
from megascale.core.untrusted_files import read_bounded
from megascale.data.dataset.file_hash import fingerprint_file, sha256_file
from megascale.data.dataset.formats import list_token_files
from megascale.errors import DataError

MANIFEST = "dataset.json"
FORMAT = 1
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_MAX_MANIFEST_BYTES = 16 << 20  # a manifest usually has a few kilobytes
# Only the beginning of longer held-out text is compressed, since `xz -9e` reads about 1.5 MB/s.
MAX_COMPRESSED_BYTES = 4_000_000


@dataclass(frozen=True)
class CompressedSizes:
    """Bytes of a text, and of its compressed forms by `zlib -9` and `xz -9e` (one stream over all documents)."""

    bytes: _Count
    zlib: _Count
    xz: _Count

    @property
    def zlib_bits_per_byte(self) -> float:
        """Bits of zlib output per byte of text."""
        return 8 * self.zlib / max(self.bytes, 1)

    @property
    def xz_bits_per_byte(self) -> float:
        """Bits of xz output per byte of text."""
        return 8 * self.xz / max(self.bytes, 1)


def measure_compression(texts: Iterable[bytes]) -> CompressedSizes:
    """Return the compressed sizes of the first MAX_COMPRESSED_BYTES of the joined `texts`, in bounded memory."""
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
    return CompressedSizes(size, zlib_size + len(deflate.flush()), xz_size + len(xz.flush()))


def compute_bits_per_byte(loss: float, tokens: int, text_bytes: int, lost_bytes: int = 0) -> float:
    """Return bits per byte of text for a mean loss per token.

    Args:
        loss: mean loss in nats per token.
        tokens: number of tokens.
        text_bytes: bytes of the text that the tokens encode.
        lost_bytes: bytes of the text without a token of their own. Each counts 8 bits, since an unknown token is easy
            to predict.
    """
    return loss * tokens / (math.log(2) * text_bytes) + 8 * lost_bytes / text_bytes


@dataclass(frozen=True)
class DataSetPart:
    """One token file of a data set.

    Attributes:
        documents, tokens: number of documents and tokens, with one end token per document.
        bytes: UTF-8 bytes of the text that was encoded.
        lost_bytes: approximate number of these bytes that became unknown tokens or were dropped.
        bin_bytes, idx_bytes: sizes of the files.
        idx_sha256: hash of the index.
        bin_sha256, bin_fingerprint: hash of all tokens, and of a sample of them; "" if it is not recorded.
        compressed: compressed sizes of the text; None except for held-out text.
        counted_tokens: number of tokens with loss weight 1, for conversations; None: all tokens count.
    """

    documents: _Count
    tokens: _Count
    bytes: _Count
    bin_bytes: _Count
    idx_bytes: _Count
    idx_sha256: str
    compressed: CompressedSizes | None = None
    lost_bytes: _Count = 0
    bin_sha256: str = ""
    bin_fingerprint: str = ""
    counted_tokens: _Count | None = None

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token."""
        return self.bytes / max(self.tokens, 1)


@dataclass(frozen=True)
class Manifest:
    """Contents of a data set's folder.

    Attributes:
        sources: inputs of the build, as the user named them.
        recipe: hash of all inputs and settings; a build with the same hash finds its result in the folder.
        tokenizer: record with file name, sha256, vocab_size, end_of_document, begin_of_document and eos_token.
        dtype: type of a stored token.
        parts: token files by split, `train` and `valid`.
        skipped: number of files and records left out, by reason.
        version: version of megascale that built the data set.
        format: version of the manifest's format.
        notes: remarks for the report of the build.
        template_dates: dates that the chat template has written into conversations, by the pattern of `strftime_now`.
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
    template_dates: dict[str, str] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the manifest atomically."""
        write_atomically(folder / MANIFEST, json.dumps(asdict(self), indent=2) + "\n")


def read_manifest(folder: str | Path) -> Manifest | None:
    """Return the manifest of a data set's folder, or None without one. Raises DataError if the file is damaged."""
    path = Path(folder) / MANIFEST
    try:
        record = strict_json.loads(read_bounded(path, _MAX_MANIFEST_BYTES), _MAX_MANIFEST_BYTES)
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']}, and only format {FORMAT} is known")
        parts = {}
        for name, part in record.pop("parts").items():
            sizes = part.pop("compressed")
            parts[name] = DataSetPart(**part, compressed=CompressedSizes(**sizes) if sizes else None)
        manifest = Manifest(**record, parts=parts)
        return msgspec.convert(asdict(manifest), Manifest)  # checks the types, which dataclasses do not
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DataError(
            f"{path} is not a data set's manifest ({error}); delete the folder and build it again"
        ) from None


def find_part(prefix: str | Path) -> DataSetPart | None:
    """Return the record of a token file in its folder's manifest, or None if no manifest has the file."""
    path = Path(prefix)
    manifest = read_manifest(path.parent)
    if manifest is None:
        return None
    return manifest.parts.get(path.name.removesuffix(".bin").removesuffix(".idx"))


def check_sampled_tokens(setting: str, prefix: str) -> bool:
    """Compare a sample of a token file's bytes with the fingerprint in its manifest.

    Args:
        setting: the key or option that named the file.
        prefix: the token file.

    Returns False if no manifest has a fingerprint of the file. Raises DataError if the fingerprints differ.
    """
    return _compare_hash(setting, prefix, lambda part: part.bin_fingerprint, fingerprint_file)


def check_all_bytes(setting: str, prefix: str) -> bool:
    """Compare all bytes of a token file with the hash in its manifest, as `check_sampled_tokens` compares a sample."""
    return _compare_hash(setting, prefix, lambda part: part.bin_sha256, sha256_file)


def _compare_hash(
    setting: str, prefix: str, recorded_hash: Callable[[DataSetPart], str], hash_file: Callable[[Path], str]
) -> bool:
    paths = [file for file in list_token_files(prefix) if file.suffix == ".bin" and file.exists()]
    part = find_part(prefix)
    if not paths or part is None:
        return False
    path = paths[0]
    if part.counted_tokens is not None:
        _require_weights(setting, path.with_suffix(".weights"))
    if not recorded_hash(part):
        return False
    if hash_file(path) != recorded_hash(part):
        raise DataError(
            f"{setting}: {path} does not hold the tokens that were built, as their checksum in the "
            "folder's dataset.json shows: the file was damaged or replaced. Copy the data set again, or build it again "
            "with `megascale data build`"
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
