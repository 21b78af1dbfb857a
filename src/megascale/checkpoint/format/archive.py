"""Bytes of a data file: every chunk is a small uncompressed zip that `torch.load` reads, its data at a known offset.

torch's distributed checkpoint format stores each chunk of a tensor as a `torch.save` archive inside a larger file.
Writing the archive by hand (it needs no torch) leaves the tensor's bytes in one aligned run, so that our own reader
fetches and checks them with one read and no pickle, while plain `dcp.load` still reads the same file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from math import prod

from isal.isal_zlib import crc32, crc32_combine  # seven times faster than zlib's, the same checksum

__all__ = ["ALIGNMENT", "DTYPES", "combine_crc32", "crc32", "element_size", "head_length", "tail_length", "wrap"]

ALIGNMENT = 64

# Names of dtypes as stored in our index, their torch storage classes and element sizes in bytes.
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

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_DOS_DATE = 33  # 1 January 1980: the archive holds no clock, so equal tensors give equal bytes


def element_size(dtype: str) -> int:
    """Bytes of one element."""
    return DTYPES[dtype][1]


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _tuple(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(b"J" + struct.pack("<i", v) for v in values) + b"t"


@lru_cache(4096)
def _pickle(dtype: str, sizes: tuple[int, ...]) -> bytes:
    """The pickle of a contiguous CPU tensor over storage "0", protocol 2."""
    count, strides = 1, []
    for size in reversed(sizes):
        strides.append(count)
        count *= max(size, 1)
    total = 0 if 0 in sizes else count
    storage = b"(" + _text("storage") + f"ctorch\n{DTYPES[dtype][0]}\n".encode()
    storage += _text("0") + _text("cpu") + b"J" + struct.pack("<i", total) + b"tQ"
    arguments = b"(" + storage + b"J\0\0\0\0" + _tuple(sizes) + _tuple(strides[::-1]) + b"\x89"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"ccollections\nOrderedDict\n)RtR."


def _record(name: str, crc: int, length: int, at: int, align: bool) -> tuple[bytes, bytes]:
    """Local header (padded so that the data begins at a multiple of ALIGNMENT) and directory entry."""
    encoded = name.encode()
    extra = b""
    if align:
        padding = -(at + _LOCAL.size + len(encoded) + 4) % ALIGNMENT
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    local = _LOCAL.pack(0x04034B50, 0, 0, 0, 0, _DOS_DATE, crc, length, length, len(encoded), len(extra))
    entry = _CENTRAL.pack(
        0x02014B50, 0, 0, 0, 0, 0, _DOS_DATE, crc, length, length, len(encoded), 0, 0, 0, 0, 0, at
    )  # fmt: skip
    return local + encoded + extra, entry + encoded


@lru_cache(256)
def _frame(dtype: str, dims: int) -> tuple[int, int]:
    """Bytes before and (without padding) after the elements of any chunk of this type and number of dimensions."""
    head, tail = _build(dtype, (1,) * dims, 0)
    return len(head), len(tail)


def head_length(dtype: str, dims: int) -> int:
    """Bytes that stand before a chunk's elements; a multiple of ALIGNMENT."""
    return _frame(dtype, dims)[0]


def tail_length(dtype: str, dims: int) -> int:
    """Least bytes that stand after a chunk's elements; up to 65,535 more may pad the archive."""
    return _frame(dtype, dims)[1]


def wrap(dtype: str, sizes: tuple[int, ...], crc: int, length: int) -> tuple[bytes, bytes]:
    """What stands before and after a chunk's bytes so that all together are a `torch.save` archive.

    Args:
        dtype, sizes: the chunk's element type and shape.
        crc: CRC-32 of its bytes.
        length: bytes of the whole archive, head and tail included; the rest pads the tail. The archive must begin at
            a multiple of ALIGNMENT in the file, so that its elements do.
    """
    head, tail = _build(dtype, sizes, crc)
    padding = length - len(head) - prod(sizes) * element_size(dtype) - len(tail)
    # The padding is the zip's comment, which belongs to the archive.
    return head, tail[:-2] + struct.pack("<H", padding) + bytes(padding)


def _build(dtype: str, sizes: tuple[int, ...], crc: int) -> tuple[bytes, bytes]:
    count = prod(sizes) * element_size(dtype)
    head = directory = b""
    small = {"archive/data.pkl": _pickle(dtype, sizes), "archive/byteorder": b"little", "archive/version": b"3\n"}
    for name, body in small.items():
        local, entry = _record(name, crc32(body), len(body), len(head), align=False)
        head += local + body
        directory += entry
    local, entry = _record("archive/data/0", crc, count, len(head), align=True)
    head += local
    directory += entry
    return head, directory + _END.pack(0x06054B50, 0, 0, 4, 4, len(directory), len(head) + count, 0)


def combine_crc32(first: int, second: int, length: int) -> int:
    """CRC-32 of two runs of bytes laid end to end, from their CRCs and the second's length."""
    return crc32_combine(first, second, length)
