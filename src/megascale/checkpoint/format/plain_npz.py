"""Reading a `.npz` of integer columns that may be anybody's: what it takes is bounded by the bytes of the file.

numpy's own reader inflates whatever a member says, so three megabytes become gigabytes. What is written here is never
compressed, and so nothing that is gets read: each member's length must be what its header says, before its bytes
are looked at.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Collection
from math import prod

import numpy as np

_END = struct.Struct("<IHHHHIIH")
_MEMBERS = 16  # most that an index has, with what older versions of numpy added
_DIRECTORY = 4096  # bytes of the list of members


def read_columns(data: bytes, names: Collection[str]) -> dict[str, np.ndarray]:
    """The named members as arrays over `data`; ValueError if one is missing or the file is not as numpy writes it.

    Members that are not named are left alone. The arrays are of integers and cannot be written to.
    """
    try:
        return _read(data, names)
    except ValueError:
        raise
    except Exception as error:  # a file that lies fails in any way it likes
        raise ValueError(f"not a .npz file that can be read: {type(error).__name__}: {error}") from None


def _read(data: bytes, names: Collection[str]) -> dict[str, np.ndarray]:
    _check_directory(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if missing := [name for name in names if name not in members]:
            raise ValueError(f"it has no column {missing[0]}")
        chosen = {name: members[name] for name in names}
        for name, info in chosen.items():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ValueError(f"its column {name} is compressed, which no index is that was written here")
        if sum(info.file_size for info in chosen.values()) > len(data):
            raise ValueError("its columns are larger than the file")
        return {name: _array(name, archive.read(info)) for name, info in chosen.items()}


def _check_directory(data: bytes) -> None:
    """ValueError for a list of members that is longer than any of ours: making it would cost more than the file."""
    if len(data) < _END.size:
        raise ValueError("it ends before its list of members")
    mark, _, _, _, count, size, _, comment = _END.unpack(data[-_END.size :])
    # The locator of a second, larger list would stand right before.
    larger = data[-_END.size - 20 : -_END.size].startswith(b"PK\x06\x07")
    if mark != 0x06054B50 or comment or larger or count > _MEMBERS or size > _DIRECTORY:
        raise ValueError("its list of members is not as numpy writes it")


def _array(name: str, data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f"its column {name} is of another version of numpy's format")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.kind not in "iu" or dtype == np.uint64 or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"its column {name} is of {dtype}{list(shape)}, which are not whole numbers of up to 63 bits")
    if prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"its column {name} does not hold the {list(shape)} numbers that it says")
    flat = np.frombuffer(data, dtype, offset=file.tell())
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
