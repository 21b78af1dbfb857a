"""Checksums of a file's parts combine to the file's, equal to zlib's for all lengths."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from megascale.checkpoint.format.archive import combine_crc32, crc32

CRC = st.integers(0, (1 << 32) - 1)
LENGTH = st.integers(0, 1 << 61)  # bytes; far beyond what 32 bits count


@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_two_parts_make_the_whole(first: bytes, second: bytes) -> None:
    expected = zlib.crc32(first + second)
    assert combine_crc32(crc32(first), crc32(second), len(second)) == crc32(first + second) == expected


@given(a=CRC, b=CRC, c=CRC, b_bytes=LENGTH, c_bytes=LENGTH)
def test_parts_of_any_size_are_joined_in_any_order(a: int, b: int, c: int, b_bytes: int, c_bytes: int) -> None:
    left_first = combine_crc32(combine_crc32(a, b, b_bytes), c, c_bytes)
    assert left_first == combine_crc32(a, combine_crc32(b, c, c_bytes), b_bytes + c_bytes)
