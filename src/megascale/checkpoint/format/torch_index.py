"""An index in the form of torch's distributed checkpoint (`.metadata`, a pickle), written quickly and without torch.

At ten thousand processes the index has millions of chunks: as Python objects they would cost minutes and gigabytes.
Every chunk of a tensor pickles to the same operations with other integers, so the pickle is laid out as a table of
fixed-width records and filled by column. A test compares it with the objects that torch unpickles.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from megascale.checkpoint.format.archive import pickle_text
from megascale.checkpoint.format.index import CheckpointIndex

_METADATA = "torch.distributed.checkpoint.metadata"
_VERSION = "1.0.0"
# Encodings of an integer: opcode, numpy type, struct format. J: 4 bytes; LONG1 of 8 bytes; LONG_BINGET: 4 bytes.
_INTEGERS = {"narrow": (b"J", "<i4", "<i"), "wide": (b"\x8a\x08", "<i8", "<q"), "memo": (b"j", "<u4", "<I")}
MAX_SMALL_TABLE = 8  # rows up to which creating a NumPy record type costs more than packing row by row
_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}

# A piece of a record: constant bytes, or (encoding of an integer, its column).
Field = bytes | tuple[str, np.ndarray]


class _Pickle:
    """A pickle under construction, protocol 2, which keeps repeated objects in its memo."""

    def __init__(self) -> None:
        self.parts: list[bytes] = [b"\x80\x02"]
        self._memo: dict[str, int] = {}

    def memoize(self, key: str, operations: bytes) -> None:
        """Make `get(key)` stand for the object that the operations create."""
        number = len(self._memo)
        self._memo[key] = number
        self.parts.append(operations + b"r" + struct.pack("<I", number) + b"0")

    def get(self, key: str) -> bytes:
        """Return the operations that push a memoized object."""
        number = self._memo[key]
        if number < 256:
            return b"h" + bytes([number])
        return b"j" + struct.pack("<I", number)

    def number(self, key: str) -> int:
        """Return a memoized object's number."""
        return self._memo[key]

    def open_object(self, name: str) -> bytes:
        """Return the operations that create an object of a memoized class, up to the items of its dictionary."""
        return self.get(name) + b")\x81}("

    def size_fields(self, columns: np.ndarray) -> list[Field]:
        """Return the fields of a torch.Size whose dimensions are integer columns [rows, dims]."""
        dims = columns.shape[1]
        dimensions = [_encode_column(columns[:, d]) for d in range(dims)]
        opening, closing = (b"", _TUPLES[dims]) if dims <= 3 else (b"(", b"t")
        return [self.get("Size") + opening] + dimensions + [closing + b"\x85R"]


def make_torch_metadata(index: CheckpointIndex) -> bytes:
    """Return the bytes of `.metadata`."""
    pickle = _Pickle()
    for name in ("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex"):
        pickle.memoize(name, _pickle_class(_METADATA, name))
    pickle.memoize("_StorageInfo", _pickle_class("torch.distributed.checkpoint.filesystem", "_StorageInfo"))
    pickle.memoize("Size", _pickle_class("torch", "Size"))
    layout = _pickle_class("torch.serialization", "_get_layout") + pickle_text("torch.strided") + b"\x85R"
    pickle.memoize("strided", layout)
    pickle.memoize("contiguous", _pickle_class(_METADATA, "_MEM_FORMAT_ENCODING") + b"K\0\x85R")
    for word in ("offsets", "sizes", "fqn", "index", "offset", "relative_path", "length"):
        pickle.memoize(word, pickle_text(word))
    for name in index.tensors:
        pickle.memoize(f"tensor {name}", pickle_text(name))
    for name in index.files:
        pickle.memoize(f"file {name}", pickle_text(name))
    metadata = _pickle_class(_METADATA, "Metadata") + b")\x81}(" + pickle_text("state_dict_metadata") + b"}"
    pickle.parts.append(metadata)
    for name in index.tensors:
        _append_tensor(pickle, index, name)
    pickle.parts.append(pickle_text("planner_data") + b"}" + pickle_text("storage_data") + b"}")
    files = np.array([pickle.number(f"file {name}") for name in index.files], np.int64)
    for name in index.tensors:
        _append_chunk_locations(pickle, index, name, files)
    ids = b"".join(pickle_text(word) + b"N" for word in ("checkpoint_id", "save_id", "load_id"))
    storage_meta = _pickle_class(_METADATA, "StorageMeta") + b")\x81}(" + ids + pickle_text("modules") + b"]ub"
    pickle.parts.append(pickle_text("storage_meta") + storage_meta)
    pickle.parts.append(pickle_text("version") + pickle_text(_VERSION) + b"ub.")
    return b"".join(pickle.parts)


def _append_tensor(pickle: _Pickle, index: CheckpointIndex, name: str) -> None:
    """Append one item of state_dict_metadata: dtype, shape and chunks of a tensor."""
    info = index.tensors[name]
    dtype = _pickle_class("torch", info.dtype)
    state = b"(" + dtype + pickle.get("strided") + b"\x89" + pickle.get("contiguous") + b"\x89tb"
    shape = _encode_records(pickle.size_fields(np.array([info.shape], np.int64).reshape(1, -1)), 1)
    pickle.parts.append(b"(" + pickle.get(f"tensor {name}") + pickle.open_object("TensorStorageMetadata"))
    properties = pickle_text("properties") + pickle.get("TensorProperties") + b")\x81" + state
    pickle.parts.append(properties + pickle_text("size") + shape)
    pickle.parts.append(pickle_text("chunks") + b"](")
    rows = index.rows(name)
    box = index.columns["box"][rows][:, :, : len(info.shape)]
    fields: list[Field] = [pickle.open_object("ChunkStorageMetadata") + pickle.get("offsets")]
    fields += pickle.size_fields(box[:, 0])
    fields.append(pickle.get("sizes"))
    fields += pickle.size_fields(box[:, 1])
    fields.append(b"ub")
    pickle.parts.append(_encode_records(fields, len(rows)))
    pickle.parts.append(b"eubu")


def _append_chunk_locations(pickle: _Pickle, index: CheckpointIndex, name: str, files: np.ndarray) -> None:
    """Append the items of storage_data: file, offset and length of each chunk of a tensor."""
    rows = index.rows(name)
    columns = index.columns
    box = columns["box"][rows][:, :, : len(index.tensors[name].shape)]
    tensor = pickle.get("fqn") + pickle.get(f"tensor {name}")
    fields: list[Field] = [pickle.open_object("MetadataIndex") + tensor + pickle.get("offset")]
    fields += pickle.size_fields(box[:, 0])
    fields += [pickle.get("index"), _encode_column(np.arange(len(rows)))]
    fields.append(b"ub" + pickle.open_object("_StorageInfo") + pickle.get("relative_path"))
    fields.append(("memo", files[columns["in_file"][rows]]))
    fields += [pickle.get("offset"), _encode_column(columns["start"][rows])]
    fields += [pickle.get("length"), _encode_column(columns["length"][rows])]
    fields.append(b"ub")
    pickle.parts.append(b"(" + _encode_records(fields, len(rows)) + b"u")


def _pickle_class(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _encode_column(column: np.ndarray) -> Field:
    is_wide = len(column) and int(column.max()) >= 1 << 31
    return ("wide" if is_wide else "narrow", column)


def _encode_records(fields: Sequence[Field], count: int) -> bytes:
    """Return `count` consecutive rows of constant bytes and integers."""
    if count <= MAX_SMALL_TABLE:
        return _encode_small_table(fields, count)
    return _encode_large_table(fields, count)


def _encode_small_table(fields: Sequence[Field], count: int) -> bytes:
    parts: list[bytes] = []
    for row in range(count):
        for field in fields:
            if isinstance(field, bytes):
                parts.append(field)
            else:
                encoding, column = field
                opcode, _, packed = _INTEGERS[encoding]
                parts.append(opcode + struct.pack(packed, int(column[row])))
    return b"".join(parts)


def _encode_large_table(fields: Sequence[Field], count: int) -> bytes:
    layout: list[tuple[str, str]] = []
    values: list[bytes | np.ndarray] = []
    for field in fields:
        pieces: list[tuple[str, bytes | np.ndarray]]
        if isinstance(field, bytes):
            pieces = [(f"V{len(field)}", field)]
        else:
            encoding, column = field
            opcode, number, _ = _INTEGERS[encoding]
            pieces = [(f"V{len(opcode)}", opcode), (number, column)]
        for type_name, value in pieces:
            layout.append((f"f{len(layout)}", type_name))
            values.append(value)
    table = np.zeros(count, np.dtype(layout))
    for (name, _), value in zip(layout, values, strict=True):
        if isinstance(value, bytes):
            table[name] = np.void(value)
        else:
            table[name] = value
    return table.tobytes()
