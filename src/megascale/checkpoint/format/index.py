"""The index of a checkpoint: tensor, box, file, position and checksum of each stored chunk. No torch.

The index is kept as columns of integers in one `.npz` without pickles, since a large run stores hundreds of thousands
of chunks. Its writer is not trusted: every number is checked before it is used to allocate or to look up. Next to it
`.metadata` holds the same facts in torch's own (pickled) form, for plain `dcp.load`; this loader never opens that file.
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
_HEADER_BYTES = 32 << 20  # names of a thousand layers written by a hundred thousand processes take ten
_NAME_LENGTH = 512
_MAX_BYTES = 1 << 62  # of a tensor: no storage holds more, and sums of it fit into 64 bits
_MAX_DIMS = 32
_ZIP_END_RECORD = struct.Struct("<IHHHHIIH")
_MAX_ZIP_MEMBERS = 16
_MAX_ZIP_DIRECTORY_BYTES = 4096


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored logical tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return prod(self.shape) * element_size(self.dtype)


class CheckpointIndex:
    """All chunks of a checkpoint, found by tensor name.

    Attributes:
        tensors: shape and dtype by logical name, sorted by name.
        files: names of data files.
        columns: one row per chunk: `tensor` (number in tensors), `in_file` (number in files), `start` and `length` of
            its archive and `data`, where its elements begin (bytes), `crc` (CRC-32 of its elements) and `box`
            ([2, dims]: offsets and sizes).
    """

    def __init__(self, tensors: dict[str, TensorInfo], files: list[str], columns: dict[str, np.ndarray]) -> None:
        self.tensors = tensors
        self.files = files
        self.columns = columns
        self.names = list(tensors)
        owner = columns["tensor"]
        self._order = np.argsort(owner, kind="stable")
        self._bounds = np.searchsorted(owner[self._order], np.arange(len(self.names) + 1))
        self._number = {name: i for i, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.columns["tensor"])

    def with_generation(self, generation: str, crc: np.ndarray) -> CheckpointIndex:
        """Return the same layout with the file names and the checksums of a generation."""
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

        Raises ValueError if it is another kind of file or a number is invalid: every chunk lies inside its tensor and
        refers to an existing tensor and file. Whether chunks fill the tensors is checked by `chunks.check_coverage`.
        """
        columns = read_npz_columns(data, ("header",) + _COLUMNS)
        text = columns.pop("header")
        if text.dtype != np.uint8:
            raise ValueError("its header is not text")
        header = strict_json.loads(text.tobytes(), _HEADER_BYTES)
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
        """Raise ValueError unless every chunk lies within its file and no two chunks share bytes.

        A load then never reads more bytes than are stored.

        Args:
            sizes: bytes of each file by name.
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
        same_file = np.diff(file[order]) == 0
        if (same_file & ((start + length)[order][:-1] > start[order][1:])).any():
            raise ValueError("two chunks lie in the same bytes of a file")

    def rows(self, name: str) -> np.ndarray:
        """Return the row numbers of a tensor's chunks."""
        i = self._number[name]
        return self._order[self._bounds[i] : self._bounds[i + 1]]

    def overlapping(self, name: str, box: Box) -> np.ndarray:
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
        """Return the bytes of a chunk's elements."""
        info = self.info(row)
        return int(prod(self.columns["box"][row, 1, : len(info.shape)].tolist())) * element_size(info.dtype)

    def file(self, row: int) -> str:
        """Return the name of the file that holds a chunk."""
        return self.files[self.columns["in_file"][row]]


def is_tensor_name(name: str) -> bool:
    """Return whether a logical tensor may have this name: printable text of bounded length."""
    return 0 < len(name) <= _NAME_LENGTH and name.isprintable()


def used_dimensions(tensors: Mapping[str, TensorInfo], dims: int) -> np.ndarray:
    """Return [tensors, dims] whether each tensor has each dimension."""
    return np.arange(dims) < np.array([len(info.shape) for info in tensors.values()], np.int64).reshape(-1, 1)


def count_box_bytes(tensors: Mapping[str, TensorInfo], owner: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Return [rows] the bytes of each box's elements.

    Args:
        owner: [rows] number of each box's tensor.
        box: [rows, 2, dims] offsets and sizes.
    """
    item = np.array([element_size(info.dtype) for info in tensors.values()], np.int64)
    sizes = np.where(used_dimensions(tensors, box.shape[2])[owner], box[:, 1], 1)
    return sizes.prod(axis=1, dtype=np.int64) * item[owner]


def join_indexes(parts: Sequence[CheckpointIndex]) -> CheckpointIndex:
    """Return one index of several that describe the same tensors (or some of them) in different files."""
    tensors = dict(sorted({name: info for part in parts for name, info in part.tensors.items()}.items()))
    number = {name: i for i, name in enumerate(tensors)}
    files: list[str] = []
    columns: dict[str, list[np.ndarray]] = {}
    dims = max((part.columns["box"].shape[2] for part in parts), default=0)
    for part in parts:
        renumbered = dict(part.columns)
        renumbered["tensor"] = np.array([number[name] for name in part.names], np.int32)[renumbered["tensor"]]
        renumbered["in_file"] = renumbered["in_file"] + np.int32(len(files))
        missing_dims = dims - renumbered["box"].shape[2]
        renumbered["box"] = np.pad(renumbered["box"], ((0, 0), (0, 0), (0, missing_dims)))
        files += part.files
        for name, column in renumbered.items():
            columns.setdefault(name, []).append(column)
    return CheckpointIndex(tensors, files, {name: np.concatenate(columns[name]) for name in columns})


# Parsing ----------------------------------------------------------------------------------------------------------


def _parse_tensors(record: Any) -> dict[str, TensorInfo]:
    if not isinstance(record, dict):
        raise ValueError("its tensors have no names")
    tensors = {}
    for name, entry in record.items():
        if not is_tensor_name(name):
            raise ValueError(f"{name[:_NAME_LENGTH]!r} is not a valid tensor name")
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], list):
            raise ValueError(f"{name} has no shape and type")
        shape, dtype = entry
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"{name} is of type {str(dtype)[:50]!r}; known: {', '.join(DTYPES)}")
        if len(shape) > _MAX_DIMS or any(type(n) is not int or not 0 <= n < _MAX_BYTES for n in shape):
            raise ValueError(f"{name} has the invalid shape {str(shape)[:200]}")
        # Empty dimensions are left out, or a zero would hide a product that exceeds 64 bits.
        if prod(n for n in shape if n) * element_size(dtype) > _MAX_BYTES:
            raise ValueError(f"{name} of shape {str(shape)[:200]} is larger than any storage")
        tensors[name] = TensorInfo(tuple(shape), dtype)
    return tensors


def _check_columns(tensors: dict[str, TensorInfo], files: list[str], columns: dict[str, np.ndarray]) -> None:
    """Raise ValueError unless every row refers to an existing tensor and file and to a box inside the tensor."""
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
    for name, entries in (("tensor", tensors), ("in_file", files)):
        if int(columns[name].max()) >= len(entries):
            raise ValueError(f"its column {name} refers to number {int(columns[name].max())} of {len(entries)}")
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
    """Return the named members of a `.npz` file as read-only integer arrays over `data`; ignore other members.

    Memory is bounded by the size of the file. numpy's own reader inflates compressed members without a limit, so three
    megabytes can become gigabytes; an index is never compressed, so compressed members are refused. Raises ValueError
    if a member is missing or the file is not as numpy writes it.
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
        chosen = {name: members[name] for name in names}
        for name, info in chosen.items():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ValueError(f"its column {name} is compressed, which an index never is")
        if sum(info.file_size for info in chosen.values()) > len(data):
            raise ValueError("its columns are larger than the file")
        return {name: _parse_npy(name, archive.read(info)) for name, info in chosen.items()}


def _check_zip_directory(data: bytes) -> None:
    """Raise ValueError for a longer list of members than an index has: parsing it would need more than the file."""
    if len(data) < _ZIP_END_RECORD.size:
        raise ValueError("it ends before its list of members")
    mark, _, _, _, count, size, _, comment = _ZIP_END_RECORD.unpack(data[-_ZIP_END_RECORD.size :])
    # The locator of a second, larger list (zip64) would lie right before.
    has_zip64 = data[-_ZIP_END_RECORD.size - 20 : -_ZIP_END_RECORD.size].startswith(b"PK\x06\x07")
    is_too_large = count > _MAX_ZIP_MEMBERS or size > _MAX_ZIP_DIRECTORY_BYTES
    if mark != 0x06054B50 or comment or has_zip64 or is_too_large:
        raise ValueError("its list of members is not as numpy writes it")


def _parse_npy(name: str, data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f"its column {name} is of another version of numpy's format")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.kind not in "iu" or dtype == np.uint64 or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"its column {name} is of {dtype}{list(shape)}, not of integers of up to 63 bits")
    if prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"its column {name} does not hold the {list(shape)} numbers that it announces")
    flat = np.frombuffer(data, dtype, offset=file.tell())
    if fortran:
        return flat.reshape(shape[::-1]).T
    return flat.reshape(shape)
