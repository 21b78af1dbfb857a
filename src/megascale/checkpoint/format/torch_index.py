"""Writer of an index in torch's distributed checkpoint format (`.metadata`, a pickle). Needs no torch.

With ten thousand processes the index has millions of chunks, which as Python objects would need minutes and gigabytes.
The pickles of a tensor's chunks have the same operations and differ only in integers. This module therefore writes them
as a table of records of fixed width, which it fills by column. A test compares the result with the objects that torch
unpickles.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from megascale.checkpoint.format.archive import pickle_text
from megascale.checkpoint.format.index import CheckpointIndex

_METADATA = "torch.distributed.checkpoint.metadata"
_VERSION = "1.0.0"
# Pickle opcode, numpy type and struct format of each encoding of an integer. The opcodes are BININT (4 bytes), LONG1
# with 8 bytes, and LONG_BINGET (number of an object in the memo, 4 bytes).
_INTEGERS = {"narrow": (b"J", "<i4", "<i"), "wide": (b"\x8a\x08", "<i8", "<q"), "memo": (b"j", "<u4", "<I")}
# Up to this number of rows, packing row by row is faster than creating a NumPy record type.
MAX_SMALL_TABLE = 8
_TUPLE_OPCODES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}  # by length of the tuple

# Field of a record: constant bytes, or the encoding of an integer and the column of its values.
Field = bytes | tuple[str, np.ndarray | list[int]]


class _Pickle:
    """Pickle of protocol 2 under construction. Repeated objects are in its memo."""

    def __init__(self) -> None:
        self.operations: list[bytes] = [b"\x80\x02"]
        self._memo: dict[str, int] = {}

    def memoize(self, key: str, operations: bytes) -> None:
        """Append operations that create an object and store it in the memo under `key`."""
        number = len(self._memo)
        self._memo[key] = number
        self.operations.append(operations + b"r" + struct.pack("<I", number) + b"0")

    def get(self, key: str) -> bytes:
        """Return the operations that push a memoized object."""
        number = self._memo[key]
        if number < 256:
            return b"h" + bytes([number])
        return b"j" + struct.pack("<I", number)

    def get_number(self, key: str) -> int:
        """Return the number of a memoized object in the memo."""
        return self._memo[key]

    def open_object(self, name: str) -> bytes:
        """Return the operations that create an object of a memoized class and open its attributes' dictionary."""
        # Opcodes: empty tuple of arguments, NEWOBJ, empty dictionary, MARK.
        return self.get(name) + b")\x81}("

    def size_fields(self, columns: np.ndarray) -> list[Field]:
        """Return the fields of a torch.Size, whose dimensions are the columns of an integer array [rows, dims]."""
        dims = columns.shape[1]
        dimensions = [_encode_column(columns[:, d]) for d in range(dims)]
        if dims <= 3:
            opening = b""
            closing = _TUPLE_OPCODES[dims]
        else:
            opening = b"("
            closing = b"t"
        return [self.get("Size") + opening] + dimensions + [closing + b"\x85R"]


def make_torch_metadata(index: CheckpointIndex) -> bytes:
    """Return the contents of the file `.metadata` for an index."""
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
    pickle.operations.append(metadata)
    for name in index.tensors:
        _append_tensor(pickle, index, name)
    pickle.operations.append(pickle_text("planner_data") + b"}" + pickle_text("storage_data") + b"}")
    files = np.array([pickle.get_number(f"file {name}") for name in index.files], np.int64)
    for name in index.tensors:
        _append_chunk_locations(pickle, index, name, files)
    ids = b"".join(pickle_text(word) + b"N" for word in ("checkpoint_id", "save_id", "load_id"))
    storage_meta = _pickle_class(_METADATA, "StorageMeta") + b")\x81}(" + ids + pickle_text("modules") + b"]ub"
    pickle.operations.append(pickle_text("storage_meta") + storage_meta)
    pickle.operations.append(pickle_text("version") + pickle_text(_VERSION) + b"ub.")
    return b"".join(pickle.operations)


def _append_tensor(pickle: _Pickle, index: CheckpointIndex, name: str) -> None:
    """Append an item of state_dict_metadata: dtype, shape and chunks of one tensor."""
    info = index.tensors[name]
    dtype = _pickle_class("torch", info.dtype)
    state = b"(" + dtype + pickle.get("strided") + b"\x89" + pickle.get("contiguous") + b"\x89tb"
    shape = _encode_records(pickle.size_fields(np.array([info.shape], np.int64).reshape(1, -1)), 1)
    pickle.operations.append(b"(" + pickle.get(f"tensor {name}") + pickle.open_object("TensorStorageMetadata"))
    properties = pickle_text("properties") + pickle.get("TensorProperties") + b")\x81" + state
    pickle.operations.append(properties + pickle_text("size") + shape)
    pickle.operations.append(pickle_text("chunks") + b"](")
    rows = index.rows(name)
    box = index.columns["box"][rows][:, :, : len(info.shape)]
    fields: list[Field] = [pickle.open_object("ChunkStorageMetadata") + pickle.get("offsets")]
    fields += pickle.size_fields(box[:, 0])
    fields.append(pickle.get("sizes"))
    fields += pickle.size_fields(box[:, 1])
    fields.append(b"ub")
    pickle.operations.append(_encode_records(fields, len(rows)))
    pickle.operations.append(b"eubu")


def _append_chunk_locations(pickle: _Pickle, index: CheckpointIndex, name: str, files: np.ndarray) -> None:
    """Append the items of storage_data for one tensor: file, offset and length of each chunk.

    Args:
        files: [files] number of each file's name in the memo.
    """
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
    pickle.operations.append(b"(" + _encode_records(fields, len(rows)) + b"u")


def _pickle_class(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _encode_column(column: np.ndarray) -> Field:
    """Return a field of non-negative integers, in 4 bytes each if all fit."""
    values: np.ndarray | list[int] = column
    if len(column) <= MAX_SMALL_TABLE:
        # Most tensors have few chunks. NumPy takes ten times as long as Python for the maximum of so few values.
        values = column.tolist()
        largest = max(values, default=0)
    else:
        largest = int(column.max())
    return ("wide" if largest >= 1 << 31 else "narrow", values)


def _encode_records(fields: Sequence[Field], count: int) -> bytes:
    """Return the bytes of `count` records with the same fields."""
    if count <= MAX_SMALL_TABLE:
        return _encode_small_table(fields, count)
    return _encode_large_table(fields, count)


def _encode_small_table(fields: Sequence[Field], count: int) -> bytes:
    encoded_fields: list[bytes] = []
    for row in range(count):
        for field in fields:
            if isinstance(field, bytes):
                encoded_fields.append(field)
            else:
                encoding, column = field
                opcode, _, struct_format = _INTEGERS[encoding]
                encoded_fields.append(opcode + struct.pack(struct_format, column[row]))
    return b"".join(encoded_fields)


def _encode_large_table(fields: Sequence[Field], count: int) -> bytes:
    layout: list[tuple[str, str]] = []
    values: list[bytes | np.ndarray | list[int]] = []
    for field in fields:
        field_columns: list[tuple[str, bytes | np.ndarray | list[int]]]
        if isinstance(field, bytes):
            field_columns = [(f"V{len(field)}", field)]
        else:
            encoding, column = field
            opcode, numpy_type, _ = _INTEGERS[encoding]
            field_columns = [(f"V{len(opcode)}", opcode), (numpy_type, column)]
        for type_name, value in field_columns:
            layout.append((f"f{len(layout)}", type_name))
            values.append(value)
    table = np.zeros(count, np.dtype(layout))
    for (name, _), value in zip(layout, values, strict=True):
        if isinstance(value, bytes):
            table[name] = np.void(value)
        else:
            table[name] = value
    return table.tobytes()
