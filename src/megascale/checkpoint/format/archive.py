"""Format of data files: each chunk is a small uncompressed zip archive that `torch.load` can read.

torch's distributed checkpoint format stores each chunk of a tensor as a `torch.save` archive inside a larger file. This
module builds the archives without torch, with the elements of the chunk in one aligned range at a known offset. The
loader reads and checks a chunk with one read and without unpickling, and plain `dcp.load` can read the same file.
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

ALIGNMENT = 64  # bytes; archives and elements start at multiples of it

# torch storage class and element size in bytes, by name of the dtype in the index.
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
# First field of each of these structs.
_LOCAL_SIGNATURE = 0x04034B50
_DIRECTORY_SIGNATURE = 0x02014B50
_END_SIGNATURE = 0x06054B50
_DOS_DATE = 33  # 1 January 1980 in every archive, so that equal tensors give equal bytes


def element_size(dtype: str) -> int:
    """Return the size of an element in bytes."""
    return DTYPES[dtype][1]


def combine_crc32(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two concatenated byte ranges, from their CRC-32s and the length of the second range."""
    return crc32_combine(first, second, length)


def pickle_text(value: str) -> bytes:
    """Return the pickle operation that pushes a string."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _pickle_tuple(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(b"J" + struct.pack("<i", value) for value in values) + b"t"


def _pickle_tensor(dtype: str, sizes: tuple[int, ...]) -> bytes:
    """Return the pickle (protocol 2) of a contiguous CPU tensor with the storage "0"."""
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
    """Return the local header and the directory entry of a zip member.

    Args:
        crc: CRC-32 of the member's data.
        length: size of the data in bytes.
        offset: offset of the local header in the archive.
        align: whether to pad the header so that the data starts at a multiple of ALIGNMENT.
    """
    encoded = name.encode()
    extra = b""
    if align:
        # An extra field of the zip format pads the header. torch.save uses the same identifier, FB, and filler, Z.
        padding = -(offset + _LOCAL_HEADER.size + len(encoded) + 4) % ALIGNMENT
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    local = _LOCAL_HEADER.pack(_LOCAL_SIGNATURE, 0, 0, 0, 0, _DOS_DATE, crc, length, length, len(encoded), len(extra))
    entry = _DIRECTORY_ENTRY.pack(
        _DIRECTORY_SIGNATURE, 0, 0, 0, 0, 0, _DOS_DATE, crc, length, length, len(encoded), 0, 0, 0, 0, 0, offset
    )  # fmt: skip
    return local + encoded + extra, entry + encoded


@lru_cache(256)
def _frame_lengths(dtype: str, dims: int) -> tuple[int, int]:
    """Return the numbers of bytes before and, without padding, after the elements of a chunk with `dims` dimensions."""
    head, tail = _build_unpadded_frame(dtype, (1,) * dims, 0)
    return len(head), len(tail)


def head_length(dtype: str, dims: int) -> int:
    """Return the number of bytes before a chunk's elements, a multiple of ALIGNMENT."""
    return _frame_lengths(dtype, dims)[0]


def tail_length(dtype: str, dims: int) -> int:
    """Return the smallest number of bytes after a chunk's elements. Up to 65,535 bytes of padding may follow."""
    return _frame_lengths(dtype, dims)[1]


def build_archive_frame(dtype: str, sizes: tuple[int, ...], crc: int, length: int) -> tuple[bytes, bytes]:
    """Return head and tail of a chunk: the bytes before and after its elements in a `torch.save` archive.

    The archive must start at a multiple of ALIGNMENT in the file, so that the elements do too.

    Args:
        dtype: name of the elements' dtype.
        sizes: shape of the chunk.
        crc: CRC-32 of the elements.
        length: size of the whole archive in bytes, to which the tail is padded.
    """
    head, tail = _build_unpadded_frame(dtype, sizes, crc)
    padding = length - len(head) - prod(sizes) * element_size(dtype) - len(tail)
    # The padding is the comment of the zip archive. Its length is in the last two bytes of the end record.
    return head, tail[:-2] + struct.pack("<H", padding) + bytes(padding)


@lru_cache(4096)
def _build_fixed_members(dtype: str, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the members before the elements, and their directory entries."""
    head = b""
    directory = b""
    members = {
        "archive/data.pkl": _pickle_tensor(dtype, sizes),
        "archive/byteorder": b"little",
        "archive/version": b"3\n",
    }
    for name, data in members.items():
        local, entry = _zip_member(name, crc32(data), len(data), len(head), align=False)
        head += local + data
        directory += entry
    return head, directory


def _build_unpadded_frame(dtype: str, sizes: tuple[int, ...], crc: int) -> tuple[bytes, bytes]:
    element_bytes = prod(sizes) * element_size(dtype)
    head, directory = _build_fixed_members(dtype, sizes)
    local, entry = _zip_member("archive/data/0", crc, element_bytes, len(head), align=True)
    head += local
    directory += entry
    return head, directory + _END_RECORD.pack(_END_SIGNATURE, 0, 0, 4, 4, len(directory), len(head) + element_bytes, 0)
