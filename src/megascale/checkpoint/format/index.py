"""Index of a checkpoint: tensor, box, file, position and checksum of each stored chunk. Needs no torch.

The index has columns of integers in one `.npz` file without pickles, because a large run stores hundreds of thousands
of chunks. The writer of an index is not trusted, so every number is checked before it is used. The file `.metadata`
next to it has the same contents in torch's pickled format, for plain `dcp.load`. This loader never opens `.metadata`.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from megascale.checkpoint.format.archive import DTYPES, element_size
from megascale.core import strict_json
from megascale.core.tensors import Box
from megascale.core.untrusted_files import is_plain_name

_COLUMNS = ("tensor", "in_file", "start", "length", "data", "crc", "box")
_MAX_HEADER_BYTES = 32 << 20  # a thousand layers written by a hundred thousand processes need a third of it
_MAX_NAME_LENGTH = 512
_MAX_TENSOR_BYTES = 1 << 62  # no storage holds more, and sums of such sizes fit into 64 bits
_MAX_DIMS = 32
_ZIP_END_RECORD = struct.Struct("<IHHHHIIH")
_ZIP_END_SIGNATURE = 0x06054B50
_MAX_ZIP_MEMBERS = 16
_MAX_ZIP_DIRECTORY_BYTES = 4096


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored logical tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Return the size of the whole tensor in bytes."""
        return prod(self.shape) * element_size(self.dtype)


class CheckpointIndex:
    """All chunks of a checkpoint, with look-up by tensor name.

    Attributes:
        tensors: shape and dtype by logical name, sorted by name.
        files: names of the data files.
        columns: columns with one row per chunk. `tensor` and `in_file` are positions in `tensors` and `files`. `start`
            and `length` are offset and size of the chunk's archive in bytes, and `data` is the offset of its elements.
            `crc` is the CRC-32 of the elements, and `box` [2, dims] has offsets and sizes in the tensor.
    """

    def __init__(self, tensors: dict[str, TensorInfo], files: list[str], columns: dict[str, np.ndarray]) -> None:
        self.tensors = tensors
        self.files = files
        self.columns = columns
        self.names = list(tensors)
        tensor_column = columns["tensor"]
        self._rows_by_tensor = np.argsort(tensor_column, kind="stable")
        self._row_bounds = np.searchsorted(tensor_column[self._rows_by_tensor], np.arange(len(self.names) + 1))
        self._positions = {name: i for i, name in enumerate(self.names)}

    @classmethod
    def make_empty(cls) -> CheckpointIndex:
        """Return an index without chunks."""
        columns = {name: np.zeros(0, np.int32) for name in _COLUMNS}
        return cls({}, [], {**columns, "box": np.zeros((0, 2, 0), np.int64)})

    def __len__(self) -> int:
        return len(self.columns["tensor"])

    def with_generation(self, generation: str, crc: np.ndarray) -> CheckpointIndex:
        """Return an index of the same layout, with the file names and the checksums of a generation."""
        files = [f"{generation}-{name}" for name in self.files]
        return CheckpointIndex(self.tensors, files, {**self.columns, "crc": crc})

    def to_bytes(self) -> bytes:
        """Return the `.npz` file."""
        header = {
            "tensors": {name: [list(info.shape), info.dtype] for name, info in self.tensors.items()},
            "files": self.files,
        }
        out = io.BytesIO()
        text = np.frombuffer(json.dumps(header, separators=(",", ":")).encode(), np.uint8)
        np.savez(out, header=text, **self.columns)  # type: ignore[arg-type]
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> CheckpointIndex:
        """Parse the output of `to_bytes`.

        `chunks.check_coverage` checks separately whether the chunks fill the tensors.

        Raises:
            ValueError: the file has another format, a chunk refers to a missing tensor or file, or a chunk lies outside
                its tensor.
        """
        columns = read_npz_columns(data, ("header",) + _COLUMNS)
        text = columns.pop("header")
        if text.dtype != np.uint8:
            raise ValueError("its header is not text")
        header = strict_json.loads(text.tobytes(), _MAX_HEADER_BYTES)
        if not isinstance(header, dict) or not {"tensors", "files"} <= header.keys():
            raise ValueError("its header does not name tensors and files")
        tensors = _parse_tensors(header["tensors"])
        files = header["files"]
        if not isinstance(files, list):
            raise ValueError(f"its files are {str(files)[:200]!r}, not a list of names")
        invalid = [name for name in files if not isinstance(name, str) or not is_plain_name(name)]
        if invalid:
            raise ValueError(f"it names the file {str(invalid[0])[:200]!r}, which is not a plain name in its folder")
        if len(set(files)) != len(files):
            raise ValueError("it names a file twice")
        _check_columns(tensors, files, columns)
        return cls(tensors, files, columns)

    def check_bounds(self, sizes: Mapping[str, int]) -> None:
        """Raise ValueError if a chunk lies outside its file, or two chunks share bytes of a file.

        After this check, a load reads no more bytes than are stored.

        Args:
            sizes: size of each file in bytes by name.
        """
        missing = [name for name in self.files if name not in sizes]
        if missing:
            raise ValueError(f"it names the file {missing[0]}, which the checkpoint does not have")
        if not len(self):
            return
        start = self.columns["start"].astype(np.int64)
        length = self.columns["length"].astype(np.int64)
        data = self.columns["data"].astype(np.int64)
        file = self.columns["in_file"].astype(np.int64)
        file_size = np.array([sizes[name] for name in self.files], np.int64)[file]
        # Each number is compared with the remainder of the one before, so that no sum exceeds 64 bits.
        if ((start > file_size) | (length > file_size - np.minimum(start, file_size))).any():
            raise ValueError("a chunk reaches outside its file")
        nbytes = count_box_bytes(self.tensors, self.columns["tensor"], self.columns["box"])
        if ((data < start) | (data - start > length) | (nbytes > length - (data - start))).any():
            raise ValueError("a chunk's elements reach outside its part of the file")
        order = np.lexsort((start, file))
        is_in_one_file = np.diff(file[order]) == 0
        if (is_in_one_file & ((start + length)[order][:-1] > start[order][1:])).any():
            raise ValueError("two chunks lie in the same bytes of a file")

    def rows(self, name: str) -> np.ndarray:
        """Return the row numbers of a tensor's chunks."""
        position = self._positions[name]
        return self._rows_by_tensor[self._row_bounds[position] : self._row_bounds[position + 1]]

    def find_overlapping(self, name: str, box: Box) -> np.ndarray:
        """Return the row numbers of a tensor's chunks that share elements with `box`."""
        rows = self.rows(name)
        dims = len(box.sizes)
        if 0 in box.sizes:
            return rows[:0]
        starts = self.columns["box"][rows, 0, :dims]
        sizes = self.columns["box"][rows, 1, :dims]
        low = np.array(box.offsets, np.int64)
        high = low + np.array(box.sizes, np.int64)
        return rows[((starts < high) & (low < starts + sizes)).all(axis=1)]

    def info(self, row: int) -> TensorInfo:
        """Return shape and dtype of a chunk's tensor."""
        return self.tensors[self.name(row)]

    def name(self, row: int) -> str:
        """Return the name of a chunk's tensor."""
        return self.names[self.columns["tensor"][row]]

    def box(self, row: int) -> Box:
        """Return a chunk's box."""
        dims = len(self.info(row).shape)
        offsets, sizes = self.columns["box"][row, :, :dims].tolist()
        return Box(tuple(offsets), tuple(sizes))

    def nbytes(self, row: int) -> int:
        """Return the size of a chunk's elements in bytes."""
        info = self.info(row)
        return int(prod(self.columns["box"][row, 1, : len(info.shape)].tolist())) * element_size(info.dtype)

    def file(self, row: int) -> str:
        """Return the name of the file that holds a chunk."""
        return self.files[self.columns["in_file"][row]]


def is_tensor_name(name: str) -> bool:
    """Return whether a logical tensor may have this name: printable text of at most _MAX_NAME_LENGTH characters."""
    return 0 < len(name) <= _MAX_NAME_LENGTH and name.isprintable()


def get_used_dimensions(tensors: Mapping[str, TensorInfo], dims: int) -> np.ndarray:
    """Return a mask [tensors, dims] of the dimensions that each tensor has."""
    return np.arange(dims) < np.array([len(info.shape) for info in tensors.values()], np.int64).reshape(-1, 1)


def count_box_bytes(tensors: Mapping[str, TensorInfo], tensor: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Return the size of each box's elements in bytes, [rows].

    Args:
        tensor: [rows] position of each box's tensor in `tensors`.
        box: [rows, 2, dims] offsets and sizes.
    """
    element_bytes = np.array([element_size(info.dtype) for info in tensors.values()], np.int64)
    sizes = np.where(get_used_dimensions(tensors, box.shape[2])[tensor], box[:, 1], 1)
    return sizes.prod(axis=1, dtype=np.int64) * element_bytes[tensor]


def join_indexes(indexes: Sequence[CheckpointIndex]) -> CheckpointIndex:
    """Join indexes with different files into one. Each of them may have all or some of the tensors."""
    tensors: dict[str, TensorInfo] = {}
    for index in indexes:
        tensors |= index.tensors
    tensors = dict(sorted(tensors.items()))
    positions = {name: i for i, name in enumerate(tensors)}
    files: list[str] = []
    columns: dict[str, list[np.ndarray]] = {}
    dims = max((index.columns["box"].shape[2] for index in indexes), default=0)
    for index in indexes:
        new_columns = dict(index.columns)
        new_columns["tensor"] = np.array([positions[name] for name in index.names], np.int32)[new_columns["tensor"]]
        new_columns["in_file"] = new_columns["in_file"] + np.int32(len(files))
        missing_dims = dims - new_columns["box"].shape[2]
        new_columns["box"] = np.pad(new_columns["box"], ((0, 0), (0, 0), (0, missing_dims)))
        files += index.files
        for name, column in new_columns.items():
            columns.setdefault(name, []).append(column)
    return CheckpointIndex(tensors, files, {name: np.concatenate(columns[name]) for name in columns})


# Parsing ----------------------------------------------------------------------------------------------------------


def _parse_tensors(record: Any) -> dict[str, TensorInfo]:
    """Return shape and dtype by name. Raises ValueError for an invalid name, shape or dtype."""
    if not isinstance(record, dict):
        raise ValueError("its tensors have no names")
    tensors = {}
    for name, shape_and_dtype in record.items():
        if not is_tensor_name(name):
            raise ValueError(f"{name[:_MAX_NAME_LENGTH]!r} is not a valid tensor name")
        is_pair = isinstance(shape_and_dtype, list) and len(shape_and_dtype) == 2
        if not is_pair or not isinstance(shape_and_dtype[0], list):
            raise ValueError(f"{name} has no shape and type")
        shape, dtype = shape_and_dtype
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"{name} is of type {str(dtype)[:50]!r}; known: {', '.join(DTYPES)}")
        if len(shape) > _MAX_DIMS or any(type(n) is not int or not 0 <= n < _MAX_TENSOR_BYTES for n in shape):
            raise ValueError(f"{name} has the invalid shape {str(shape)[:200]}")
        # Dimensions of size 0 are left out, because the zero would hide that the other sizes exceed 64 bits.
        if prod(n for n in shape if n) * element_size(dtype) > _MAX_TENSOR_BYTES:
            raise ValueError(f"{name} of shape {str(shape)[:200]} is larger than any storage")
        tensors[name] = TensorInfo(tuple(shape), dtype)
    return tensors


def _check_columns(tensors: dict[str, TensorInfo], files: list[str], columns: dict[str, np.ndarray]) -> None:
    """Raise ValueError if a row refers to a missing tensor or file, or to a box outside its tensor."""
    if columns["tensor"].ndim == 1:
        count = len(columns["tensor"])
    else:
        count = -1
    box = columns["box"]
    dims = max((len(info.shape) for info in tensors.values()), default=0)
    if box.ndim != 3 or box.shape[:2] != (count, 2) or not (dims <= box.shape[2] <= _MAX_DIMS or not count):
        raise ValueError(f"its boxes are of shape {list(box.shape)} for {count} chunks of up to {dims} dimensions")
    for name in _COLUMNS[:-1]:
        if columns[name].shape != (count,):
            raise ValueError(f"its column {name} is of shape {list(columns[name].shape)} for {count} chunks")
        if count and int(columns[name].min()) < 0:
            raise ValueError(f"its column {name} holds a number below 0")
    if not count:
        return
    for name, targets in (("tensor", tensors), ("in_file", files)):
        if int(columns[name].max()) >= len(targets):
            raise ValueError(f"its column {name} refers to number {int(columns[name].max())} of {len(targets)}")
    shape = np.zeros((len(tensors), box.shape[2]), np.int64)
    for i, info in enumerate(tensors.values()):
        shape[i, : len(info.shape)] = info.shape
    chunk_shape = shape[columns["tensor"]]
    outside = (box[:, 0] > chunk_shape) | (box[:, 1] > chunk_shape - np.minimum(box[:, 0], chunk_shape))
    if ((box < 0).any(axis=1) | outside).any():
        raise ValueError("a chunk reaches outside its tensor")
    if int(columns["crc"].max()) >> 32:
        raise ValueError("a checksum is longer than 32 bits")


def read_npz_columns(data: bytes, names: Collection[str]) -> dict[str, np.ndarray]:
    """Return the members `names` of a `.npz` file as read-only integer arrays that share memory with `data`.

    Compressed members are refused, because an index is never compressed. numpy's own reader would decompress them
    without a limit, so that three megabytes could become gigabytes.

    Raises:
        ValueError: a member is missing, or the file is not as numpy writes it.
    """
    try:
        return _read_npz_members(data, names)
    except ValueError:
        raise
    except Exception as error:  # a forged file can fail in any way
        raise ValueError(f"it is not a readable .npz file: {type(error).__name__}: {error}") from None


def _read_npz_members(data: bytes, names: Collection[str]) -> dict[str, np.ndarray]:
    _check_zip_directory(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        missing = [name for name in names if name not in members]
        if missing:
            raise ValueError(f"it has no column {missing[0]}")
        requested = {name: members[name] for name in names}
        for name, info in requested.items():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ValueError(f"its column {name} is compressed, which an index never is")
        if sum(info.file_size for info in requested.values()) > len(data):
            raise ValueError("its columns are larger than the file")
        return {name: _parse_npy(name, archive.read(info)) for name, info in requested.items()}


def _check_zip_directory(data: bytes) -> None:
    """Raise ValueError for a longer list of members than an index has, because parsing it could need much memory."""
    if len(data) < _ZIP_END_RECORD.size:
        raise ValueError("it ends before its list of members")
    signature, _, _, _, count, size, _, comment_bytes = _ZIP_END_RECORD.unpack(data[-_ZIP_END_RECORD.size :])
    # The locator of a larger list (zip64) would be right before the end record.
    has_zip64 = data[-_ZIP_END_RECORD.size - 20 : -_ZIP_END_RECORD.size].startswith(b"PK\x06\x07")
    is_too_large = count > _MAX_ZIP_MEMBERS or size > _MAX_ZIP_DIRECTORY_BYTES
    if signature != _ZIP_END_SIGNATURE or comment_bytes or has_zip64 or is_too_large:
        raise ValueError("its list of members is not as numpy writes it")


def _parse_npy(name: str, data: bytes) -> np.ndarray:
    """Return the array of a `.npy` file. Raises ValueError if it is not an array of integers of up to 63 bits."""
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f"its column {name} is of another version of numpy's format")
    shape, is_fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.kind not in "iu" or dtype == np.uint64 or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"its column {name} is of {dtype}{list(shape)}, not of integers of up to 63 bits")
    if prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"its column {name} does not hold the {list(shape)} numbers that it announces")
    flat = np.frombuffer(data, dtype, offset=file.tell())
    if is_fortran_order:
        return flat.reshape(shape[::-1]).T
    return flat.reshape(shape)
