"""A hash of a file that takes constant time, whatever the file's size. No torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_SPOT = 4096  # bytes read at each place
_EVEN = 16  # places that are spread evenly, both ends included
_DRAWN = 64  # parts of the file in each of which a place is drawn
_WHOLE = 1 << 18  # bytes of a file that is read as a whole


def fingerprint_file(path: Path) -> str:
    """Return a file's size, a hash of places spread evenly over it, and one of places drawn at random in it.

    A file that was cut off, replaced, appended to or zeroed for the most part shows; a byte changed between the places
    may not. The places depend on the size alone. Text that is tokenised on the fly is checked whole as it is read (see
    text_stream.py).
    """
    size = path.stat().st_size
    salt = size.to_bytes(8, "big")
    even = hashlib.blake2b(salt, digest_size=12)
    drawn = hashlib.blake2b(salt, digest_size=12)
    with open(path, "rb", buffering=0) as file:
        for i in range(_EVEN):
            even.update(os.pread(file.fileno(), _SPOT, max(0, size - _SPOT) * i // (_EVEN - 1)))
        if size <= _WHOLE:
            drawn.update(os.pread(file.fileno(), size, 0))
        else:
            for i in range(_DRAWN):
                drawn.update(os.pread(file.fileno(), _SPOT, _place(size, i)))
    return f"{size}-{even.hexdigest()}-{drawn.hexdigest()}"


def _place(size: int, part: int) -> int:
    """Return the offset that is read in one of the _DRAWN parts of a file."""
    start, stop = size * part // _DRAWN, size * (part + 1) // _DRAWN
    number = int.from_bytes(hashlib.blake2b(f"{size} {part}".encode(), digest_size=8).digest(), "big")
    return start + number % max(1, stop - start - _SPOT)


def even_part(fingerprint: str) -> str:
    """Return what versions before drawn places knew of a file."""
    return "-".join(fingerprint.split("-")[:2])


def is_same_file(recorded: str, present: str) -> bool:
    """Return whether two fingerprints are of one content; the recorded one may be without drawn places."""
    return recorded == (present if recorded.count("-") == 2 else even_part(present))
