"""Reader of the index (`.metadata`) of a foreign torch distributed checkpoint, without executing code of the pickle.

An index may refer only to certain classes, by module and name. For each of them, unpickling creates a record of a class
of this module, which is new for every file. No module is imported and no attribute is looked up, so a pickle can
neither call a function nor change a class. The records are checked and then converted to torch's types.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch

from megascale import torch_private
from megascale.core.untrusted_files import check_pickle, read_bounded
from megascale.errors import DataError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_MAX_INDEX_BYTES = 4 << 30  # size of an index with ten million chunks
_TORCH = "torch.distributed.checkpoint"
_FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")
_RECORDS = (
    (f"{_TORCH}.metadata", "Metadata"),
    (f"{_TORCH}.metadata", "MetadataIndex"),
    (f"{_TORCH}.metadata", "StorageMeta"),
    (f"{_TORCH}.metadata", "TensorProperties"),
    (f"{_TORCH}.metadata", "ChunkStorageMetadata"),
    (f"{_TORCH}.metadata", "TensorStorageMetadata"),
    (f"{_TORCH}.metadata", "BytesStorageMetadata"),
    (f"{_TORCH}.metadata", "_MEM_FORMAT_ENCODING"),
    # Python 3.11 before 3.11.4 writes an enum member as getattr(class, name). This record calls no getattr.
    ("builtins", "getattr"),
    (f"{_TORCH}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    # Other modules of the same classes in older releases of torch, and in older and newer releases of Python.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "PurePosixPath"),
)


class _Record:
    """Arguments and state from which unpickling would create an object of the index. A record executes nothing."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute of the object that the record represents."""
        if isinstance(self.state, dict):
            return self.state.get(key, default)
        return default


def _make_classes() -> dict[tuple[str, str], Any]:
    """Return the class or value for each pair of module and name. Each record gets a new class of the original name."""
    classes: dict[tuple[str, str], Any] = {pair: type(pair[1], (_Record,), {}) for pair in _RECORDS}
    classes |= {("torch", name): getattr(torch, name) for name in _FLOATS + _INTEGERS}
    return classes | {("torch", "Size"): tuple, ("collections", "OrderedDict"): OrderedDict}


class _Unpickler(pickle.Unpickler):
    """Unpickler that resolves only the pairs of `_make_classes` and refuses all other names."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._classes = _make_classes()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._classes:
            return self._classes[module, name]
        raise DataError(f"it names {module}.{name}, which an index has no use for; nothing of it was loaded")


def read_torch_index(path: Path) -> Metadata:
    """Return the index in the file `path`. Raises DataError if the file has other contents."""
    try:
        data = read_bounded(path, _MAX_INDEX_BYTES)
        check_pickle(data)
        return _convert_index(_Unpickler(data).load())
    except DataError as error:
        raise DataError(f"{str(path)!r} is not a torch distributed checkpoint's index: {error}") from None
    except Exception as error:  # a forged pickle can fail in any way
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"{str(path)!r} is not a torch distributed checkpoint's index that can be read "
            f"({type(error).__name__}: {reason}); it is damaged, or of another kind"
        ) from None


def _convert_index(root: Any) -> Metadata:
    """Convert the records to torch's types. Raises DataError if a record is not as torch writes it."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

    metadata = _check_record(root, "Metadata", "the file")
    entries: dict[str, Any] = {}
    for key, entry in _check_type(metadata.get("state_dict_metadata"), dict, "state_dict_metadata").items():
        name = _check_type(key, str, "a tensor's name")
        is_bytes = type(entry).__name__ == "BytesStorageMetadata"
        if is_bytes:
            entries[name] = BytesStorageMetadata()
        else:
            entries[name] = _convert_tensor(entry, name)
    storage = {}
    for key, value in _check_type(metadata.get("storage_data"), dict, "storage_data").items():
        location = _check_record(key, "MetadataIndex", "storage_data")
        info = _check_record(value, "_StorageInfo", "storage_data")
        name = _check_type(location.get("fqn"), str, "a chunk's name")
        offset = location.get("offset")
        if offset is None:
            sizes = None
        else:
            sizes = _check_sizes(offset, f"{name}'s offset")
        file = _check_type(info.get("relative_path"), str, f"{name}'s file")
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\0" in file or not file:
            raise DataError(f"{name} lies in the file {file!r}, which is not inside the checkpoint's folder")
        start, length = _check_sizes((info.get("offset"), info.get("length")), f"{name}'s position")
        transforms = info.get("transform_descriptors")
        if transforms:
            raise DataError(f"{name} is stored through {transforms!r}; only plain tensors are read")
        number = location.get("index")
        chunk = MetadataIndex(name, sizes, number if type(number) is int else None)
        storage[chunk] = torch_private.StorageInfo(file, start, length)
    return Metadata(state_dict_metadata=entries, storage_data=storage)


def _convert_tensor(entry: Any, name: str) -> Any:
    """Return the TensorStorageMetadata of a tensor. Raises DataError for invalid or incomplete chunks."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    record = _check_record(entry, "TensorStorageMetadata", name)
    properties = _check_record(record.get("properties"), "TensorProperties", name)
    # TensorProperties pickles its fields as a tuple, dtype first. Older releases of torch pickle a dictionary.
    has_tuple = isinstance(properties.state, tuple) and properties.state
    if has_tuple:
        dtype = properties.state[0]
    else:
        dtype = properties.get("dtype")
    if not isinstance(dtype, torch.dtype):
        raise DataError(f"{name} has no type of numbers")
    chunks = record.get("chunks")
    if not isinstance(chunks, list):
        raise DataError(f"{name} has no list of chunks")
    shape = _check_sizes(record.get("size"), f"{name}'s size")
    torch_chunks = []
    for chunk in chunks:
        chunk_record = _check_record(chunk, "ChunkStorageMetadata", name)
        offsets = _check_sizes(chunk_record.get("offsets"), f"{name}'s chunk")
        sizes = _check_sizes(chunk_record.get("sizes"), f"{name}'s chunk")
        has_dims = len(offsets) == len(sizes) == len(shape)
        if not has_dims or any(
            offset + size > dimension for offset, size, dimension in zip(offsets, sizes, shape, strict=True)
        ):
            raise DataError(f"{name} of size {list(shape)} has a chunk of size {list(sizes)} at {list(offsets)}")
        torch_chunks.append(ChunkStorageMetadata(offsets, sizes))
    if sum(prod(chunk_record.sizes) for chunk_record in torch_chunks) < prod(shape):
        raise DataError(f"{name} of size {list(shape)} is incomplete: its chunks leave a part of it out")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, torch_chunks)


def _check_record(value: Any, name: str, label: str) -> _Record:
    """Return `value` if it is a record of the class `name`. Otherwise raise DataError that starts with `label`."""
    if isinstance(value, _Record) and type(value).__name__ == name:
        return value
    raise DataError(f"{label} is of type {type(value).__name__} where {name} is expected")


def _check_sizes(value: Any, label: str) -> torch.Size:
    """Return a tuple of non-negative integers as torch.Size. Raises DataError for any other value."""
    _check_type(value, tuple, label)
    if any(type(n) is not int or n < 0 for n in value):
        raise DataError(f"{label} is {value!r}, not integers from 0")
    return torch.Size(value)


def _check_type(value: Any, expected_type: Callable[..., Any], label: str) -> Any:
    """Return `value` if it has the type. Otherwise raise DataError that starts with `label`."""
    if isinstance(value, expected_type):  # type: ignore[arg-type]
        return value
    raise DataError(f"{label} is of type {type(value).__name__} where {expected_type.__name__} is expected")
