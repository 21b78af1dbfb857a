"""Hashes of files, of all bytes or of samples in constant time. No torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_SAMPLE = 4096  # bytes read at each offset
_EVEN = 16  # offsets spread evenly, both ends included
_DRAWN = 64  # parts of the file, in each of which one offset is drawn
_SMALL = 1 << 18  # bytes of a file that is read completely


def fingerprint_file(path: Path) -> str:
    """Return a file's size, a hash of samples spread evenly over it, and one of samples drawn at random in it.

    A file that was cut off, replaced, appended to or mostly zeroed has another fingerprint; a byte changed between the
    samples may go unnoticed. The offsets depend on the size alone. Text that is tokenised on the fly is checked
    completely as it is read (text_stream.py).
    """
    size = path.stat().st_size
    salt = size.to_bytes(8, "big")
    even = hashlib.blake2b(salt, digest_size=12)
    drawn = hashlib.blake2b(salt, digest_size=12)
    with open(path, "rb", buffering=0) as file:
        descriptor = file.fileno()
        for i in range(_EVEN):
            even.update(os.pread(descriptor, _SAMPLE, max(0, size - _SAMPLE) * i // (_EVEN - 1)))
        if size <= _SMALL:
            drawn.update(os.pread(descriptor, size, 0))
        else:
            for i in range(_DRAWN):
                drawn.update(os.pread(descriptor, _SAMPLE, _draw_offset(size, i)))
    return f"{size}-{even.hexdigest()}-{drawn.hexdigest()}"


def _draw_offset(size: int, part: int) -> int:
    """Return the offset that is read in one of the _DRAWN parts of a file."""
    start = size * part // _DRAWN
    stop = size * (part + 1) // _DRAWN
    number = int.from_bytes(hashlib.blake2b(f"{size} {part}".encode(), digest_size=8).digest(), "big")
    return start + number % max(1, stop - start - _SAMPLE)


def sha256_file(path: Path) -> str:
    """Return the hash of a file's contents, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
