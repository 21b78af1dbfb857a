"""Hashes of files: of all bytes, or of samples in constant time. No torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_SAMPLE_BYTES = 4096  # bytes read at each offset
_EVEN_SAMPLES = 16  # at offsets spread evenly, both ends included
_DRAWN_SAMPLES = 64  # at pseudo-random offsets, one in each of 64 sections of the file
_SMALL_FILE_BYTES = 1 << 18  # a file up to this size is read completely


def fingerprint_file(path: Path) -> str:
    """Return a fingerprint of a file: size, hash of evenly spread samples, and hash of pseudo-random samples.

    A file that was cut off, replaced, appended to or mostly zeroed has another fingerprint. A byte changed between the
    samples may go unnoticed. The offsets depend only on the size. Text that is tokenised on the fly is also checked
    completely as it is read (text_stream.py).
    """
    size = path.stat().st_size
    salt = size.to_bytes(8, "big")
    even_hash = hashlib.blake2b(salt, digest_size=12)
    drawn_hash = hashlib.blake2b(salt, digest_size=12)
    with open(path, "rb", buffering=0) as file:
        descriptor = file.fileno()
        for i in range(_EVEN_SAMPLES):
            even_hash.update(
                os.pread(descriptor, _SAMPLE_BYTES, max(0, size - _SAMPLE_BYTES) * i // (_EVEN_SAMPLES - 1))
            )
        if size <= _SMALL_FILE_BYTES:
            drawn_hash.update(os.pread(descriptor, size, 0))
        else:
            for i in range(_DRAWN_SAMPLES):
                drawn_hash.update(os.pread(descriptor, _SAMPLE_BYTES, _draw_offset(size, i)))
    return f"{size}-{even_hash.hexdigest()}-{drawn_hash.hexdigest()}"


def _draw_offset(size: int, section: int) -> int:
    """Return the pseudo-random offset of the sample in one of the _DRAWN_SAMPLES sections of a file."""
    start = size * section // _DRAWN_SAMPLES
    stop = size * (section + 1) // _DRAWN_SAMPLES
    number = int.from_bytes(hashlib.blake2b(f"{size} {section}".encode(), digest_size=8).digest(), "big")
    return start + number % max(1, stop - start - _SAMPLE_BYTES)


def sha256_file(path: Path) -> str:
    """Return the hash of a file's contents, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
