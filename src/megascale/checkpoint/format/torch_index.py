"""An index as torch's distributed checkpoint keeps it (`.metadata`, a pickle), written without torch and quickly.

At ten thousand processes the index has millions of chunks: as Python objects they would cost minutes and gigabytes.
Every chunk of a tensor pickles to the same operations with other integers, so the pickle is laid out as a table of
fixed-width records and filled by column. A test holds it against what torch unpickles.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from megascale.checkpoint.format.index import CheckpointIndex

_METADATA = "torch.distributed.checkpoint.metadata"
_VERSION = "1.0.0"
# How an integer is pickled. J: 4 bytes; LONG1 of 8 bytes; LONG_BINGET: 4 bytes.
_INTEGERS = {"narrow": (b"J", "<i4", "<i"), "wide": (b"\x8a\x08", "<i8", "<q"), "memo": (b"j", "<u4", "<I")}
# Up to so many records NumPy takes longer to make their type than all else takes.
MAX_SMALL_TABLE = 8
_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}

# Pieces of a record: constant bytes, or (how an integer is written, its column).
Field = bytes | tuple[str, np.ndarray]


class _Pickle:
    """A pickle being written, protocol 2, with what is used again kept in its memo."""

    def __init__(self) -> None:
        self.parts: list[bytes] = [b"\x80\x02"]
        self._memo: dict[str, int] = {}

    def keep(self, key: str, operations: bytes) -> None:
        """Let `get(key)` stand for what the operations make."""
        number = self._memo[key] = len(self._memo)
        self.parts.append(operations + b"r" + struct.pack("<I", number) + b"0")

    def get(self, key: str) -> bytes:
        """Operations that push something kept."""
        number = self._memo[key]
        return b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)

    def number(self, key: str) -> int:
        """Its place in the memo."""
        return self._memo[key]


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _class(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _integer(column: np.ndarray) -> Field:
    wide = len(column) and int(column.max()) >= 1 << 31
    return ("wide" if wide else "narrow", column)


def _records(fields: Sequence[Field], count: int) -> bytes:
    """`count` rows of constant bytes and integers, one after the other."""
    return _few_records(fields, count) if count <= MAX_SMALL_TABLE else _many_records(fields, count)


def _few_records(fields: Sequence[Field], count: int) -> bytes:
    parts: list[bytes] = []
    for row in range(count):
        for field in fields:
            if isinstance(field, bytes):
                parts.append(field)
            else:
                kind, column = field
                code, _, packed = _INTEGERS[kind]
                parts.append(code + struct.pack(packed, int(column[row])))
    return b"".join(parts)


def _many_records(fields: Sequence[Field], count: int) -> bytes:
    layout: list[tuple[str, str]] = []
    values: list[bytes | np.ndarray] = []
    for field in fields:
        pieces: list[tuple[str, bytes | np.ndarray]]
        if isinstance(field, bytes):
            pieces = [(f"V{len(field)}", field)]
        else:
            kind, column = field
            code, number, _ = _INTEGERS[kind]
            pieces = [(f"V{len(code)}", code), (number, column)]
        for kind, value in pieces:
            layout.append((f"f{len(layout)}", kind))
            values.append(value)
    table = np.zeros(count, np.dtype(layout))
    for (name, _), value in zip(layout, values, strict=True):
        table[name] = np.void(value) if isinstance(value, bytes) else value
    return table.tobytes()


def _size(p: _Pickle, columns: np.ndarray) -> list[Field]:
    """torch.Size of integer columns, [rows, dims]."""
    dims = columns.shape[1]
    inside = [_integer(columns[:, d]) for d in range(dims)]
    opened, closed = (b"", _TUPLES[dims]) if dims <= 3 else (b"(", b"t")
    return [p.get("Size") + opened, *inside, closed + b"\x85R"]


def _object(p: _Pickle, name: str) -> bytes:
    """A new object of a kept class, up to the items of its dictionary."""
    return p.get(name) + b")\x81}("


def torch_metadata(index: CheckpointIndex) -> bytes:
    """The bytes of `.metadata`."""
    p = _Pickle()
    for name in ("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex"):
        p.keep(name, _class(_METADATA, name))
    p.keep("_StorageInfo", _class("torch.distributed.checkpoint.filesystem", "_StorageInfo"))
    p.keep("Size", _class("torch", "Size"))
    p.keep("strided", _class("torch.serialization", "_get_layout") + _text("torch.strided") + b"\x85R")
    p.keep("contiguous", _class(_METADATA, "_MEM_FORMAT_ENCODING") + b"K\0\x85R")
    for word in ("offsets", "sizes", "fqn", "index", "offset", "relative_path", "length"):
        p.keep(word, _text(word))
    for name in index.tensors:
        p.keep(f"tensor {name}", _text(name))
    for name in index.files:
        p.keep(f"file {name}", _text(name))
    p.parts.append(_class(_METADATA, "Metadata") + b")\x81}(" + _text("state_dict_metadata") + b"}")
    for name in index.tensors:
        _tensor(p, index, name)
    p.parts.append(_text("planner_data") + b"}" + _text("storage_data") + b"}")
    files = np.array([p.number(f"file {name}") for name in index.files], np.int64)
    for name in index.tensors:
        _places(p, index, name, files)
    nothing = b"".join(_text(word) + b"N" for word in ("checkpoint_id", "save_id", "load_id"))
    meta = _class(_METADATA, "StorageMeta") + b")\x81}(" + nothing + _text("modules") + b"]ub"
    p.parts.append(_text("storage_meta") + meta + _text("version") + _text(_VERSION) + b"ub.")
    return b"".join(p.parts)


def _tensor(p: _Pickle, index: CheckpointIndex, name: str) -> None:
    """One item of state_dict_metadata: type, shape and chunks of a tensor."""
    info = index.tensors[name]
    dtype = _class("torch", info.dtype)
    state = b"(" + dtype + p.get("strided") + b"\x89" + p.get("contiguous") + b"\x89tb"
    shape = _records(_size(p, np.array([info.shape], np.int64).reshape(1, -1)), 1)
    p.parts.append(b"(" + p.get(f"tensor {name}") + _object(p, "TensorStorageMetadata"))
    p.parts.append(_text("properties") + p.get("TensorProperties") + b")\x81" + state + _text("size") + shape)
    p.parts.append(_text("chunks") + b"](")
    rows = index.rows(name)
    box = index.columns["box"][rows][:, :, : len(info.shape)]
    begin = _object(p, "ChunkStorageMetadata") + p.get("offsets")
    fields = _joined([begin], _size(p, box[:, 0]), [p.get("sizes")], _size(p, box[:, 1]), [b"ub"])
    p.parts.append(_records(fields, len(rows)))
    p.parts.append(b"eubu")


def _places(p: _Pickle, index: CheckpointIndex, name: str, files: np.ndarray) -> None:
    """Items of storage_data: where each chunk of a tensor lies."""
    rows = index.rows(name)
    c = index.columns
    box = c["box"][rows][:, :, : len(index.tensors[name].shape)]
    key = [_object(p, "MetadataIndex") + p.get("fqn") + p.get(f"tensor {name}") + p.get("offset")]
    number: list[Field] = [p.get("index"), _integer(np.arange(len(rows)))]
    file: Field = ("memo", files[c["in_file"][rows]])
    place: list[Field] = [b"ub" + _object(p, "_StorageInfo") + p.get("relative_path"), file]
    where: list[Field] = [p.get("offset"), _integer(c["start"][rows]), p.get("length"), _integer(c["length"][rows])]
    fields = _joined(key, _size(p, box[:, 0]), number, place, where, [b"ub"])
    p.parts.append(b"(" + _records(fields, len(rows)) + b"u")


def _joined(*groups: Sequence[Field]) -> list[Field]:
    return [field for group in groups for field in group]
