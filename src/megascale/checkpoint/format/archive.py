"""The bytes of a data file: each chunk is a small uncompressed zip that `torch.load` reads, its data at a known offset.

torch's distributed checkpoint format stores each chunk of a tensor as a `torch.save` archive inside a larger file.
This module writes the archive without torch and leaves the tensor's bytes in one aligned range. The loader thus reads
and checks a chunk with one read and no pickle, and plain `dcp.load` reads the same file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from math import prod

from isal.isal_zlib import crc32, crc32_combine  # the checksum of zlib's crc32, seven times faster

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "build_archive_frame",
    "combine_crc32",
    "crc32",
    "element_size",
    "head_length",
    "pickle_text",
    "tail_length",
]

ALIGNMENT = 64

# Names of dtypes as stored in the index, their torch storage classes and element sizes in bytes.
DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("DoubleStorage", 8),
    "float32": ("FloatStorage", 4),
    "bfloat16": ("BFloat16Storage", 2),
    "float16": ("HalfStorage", 2),
    "int64": ("LongStorage", 8),
    "int32": ("IntStorage", 4),
    "int16": ("ShortStorage", 2),
    "int8": ("CharStorage", 1),
    "uint8": ("ByteStorage", 1),
    "bool": ("BoolStorage", 1),
}

_LOCAL_HEADER = struct.Struct("<IHHHHHIIIHH")
_DIRECTORY_ENTRY = struct.Struct("<IHHHHHHIIIHHHHHII")
_END_RECORD = struct.Struct("<IHHHHIIH")
_DOS_DATE = 33  # 1 January 1980: the archive holds no clock, so equal tensors give equal bytes


def element_size(dtype: str) -> int:
    """Return the bytes of one element."""
    return DTYPES[dtype][1]


def combine_crc32(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two concatenated byte ranges, from their CRCs and the second range's length."""
    return crc32_combine(first, second, length)


def pickle_text(value: str) -> bytes:
    """Return the pickle operation that pushes a string."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _pickle_tuple(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(b"J" + struct.pack("<i", value) for value in values) + b"t"


@lru_cache(4096)
def _pickle_tensor(dtype: str, sizes: tuple[int, ...]) -> bytes:
    """Return the pickle, protocol 2, of a contiguous CPU tensor over storage "0"."""
    count = 1
    strides = []
    for size in reversed(sizes):
        strides.append(count)
        count *= max(size, 1)
    elements = 0 if 0 in sizes else count
    storage = b"(" + pickle_text("storage") + f"ctorch\n{DTYPES[dtype][0]}\n".encode()
    storage += pickle_text("0") + pickle_text("cpu") + b"J" + struct.pack("<i", elements) + b"tQ"
    arguments = b"(" + storage + b"J\0\0\0\0" + _pickle_tuple(sizes) + _pickle_tuple(strides[::-1]) + b"\x89"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"ccollections\nOrderedDict\n)RtR."


def _zip_member(name: str, crc: int, length: int, offset: int, align: bool) -> tuple[bytes, bytes]:
    """Return a member's local header and directory entry.

    Args:
        align: pad the header so that the member's data begins at a multiple of ALIGNMENT.
    """
    encoded = name.encode()
    extra = b""
    if align:
        padding = -(offset + _LOCAL_HEADER.size + len(encoded) + 4) % ALIGNMENT
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    local = _LOCAL_HEADER.pack(0x04034B50, 0, 0, 0, 0, _DOS_DATE, crc, length, length, len(encoded), len(extra))
    entry = _DIRECTORY_ENTRY.pack(
        0x02014B50, 0, 0, 0, 0, 0, _DOS_DATE, crc, length, length, len(encoded), 0, 0, 0, 0, 0, offset
    )  # fmt: skip
    return local + encoded + extra, entry + encoded


@lru_cache(256)
def _frame_lengths(dtype: str, dims: int) -> tuple[int, int]:
    """Return the bytes before and, without padding, after the elements of any chunk of this dtype and rank."""
    head, tail = _build_unpadded_frame(dtype, (1,) * dims, 0)
    return len(head), len(tail)


def head_length(dtype: str, dims: int) -> int:
    """Return the bytes before a chunk's elements, a multiple of ALIGNMENT."""
    return _frame_lengths(dtype, dims)[0]


def tail_length(dtype: str, dims: int) -> int:
    """Return the fewest bytes after a chunk's elements; up to 65,535 more may pad the archive."""
    return _frame_lengths(dtype, dims)[1]


def build_archive_frame(dtype: str, sizes: tuple[int, ...], crc: int, length: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after a chunk's elements that make the whole a `torch.save` archive.

    Args:
        dtype: the chunk's element type.
        sizes: the chunk's shape.
        crc: CRC-32 of its elements.
        length: bytes of the whole archive, head and tail included; the tail is padded to it. The archive must begin at
            a multiple of ALIGNMENT in the file, so that its elements do.
    """
    head, tail = _build_unpadded_frame(dtype, sizes, crc)
    padding = length - len(head) - prod(sizes) * element_size(dtype) - len(tail)
    # The padding is the zip's comment, which belongs to the archive.
    return head, tail[:-2] + struct.pack("<H", padding) + bytes(padding)


def _build_unpadded_frame(dtype: str, sizes: tuple[int, ...], crc: int) -> tuple[bytes, bytes]:
    size = prod(sizes) * element_size(dtype)
    head = b""
    directory = b""
    members = {
        "archive/data.pkl": _pickle_tensor(dtype, sizes),
        "archive/byteorder": b"little",
        "archive/version": b"3\n",
    }
    for name, body in members.items():
        local, entry = _zip_member(name, crc32(body), len(body), len(head), align=False)
        head += local + body
        directory += entry
    local, entry = _zip_member("archive/data/0", crc, size, len(head), align=True)
    head += local
    directory += entry
    return head, directory + _END_RECORD.pack(0x06054B50, 0, 0, 4, 4, len(directory), len(head) + size, 0)
