"""The index (`.metadata`) of somebody else's torch distributed checkpoint: a pickle, read so that nothing of it runs.

Each exact pair of module and name that such an index consists of stands for a record of ours, made anew for every
file. No module is looked into and no name is followed, so a pickle cannot reach a function, and cannot change a class
either. What comes out is checked, and only then put into torch's own terms.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch

from megascale import torch_private
from megascale.core.plain_pickle import check_pickle
from megascale.core.untrusted_files import read_bounded
from megascale.errors import DataError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_MOST_BYTES = 4 << 30  # of an index: ten million chunks
_TORCH = "torch.distributed.checkpoint"
_DTYPES = (
    *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
_RECORDS = (
    *((f"{_TORCH}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_TORCH}.metadata", f"{kind}StorageMetadata") for kind in ("Chunk", "Tensor", "Bytes")),
    (f"{_TORCH}.metadata", "_MEM_FORMAT_ENCODING"),
    # Python 3.11 before 3.11.4 writes an enum's member as getattr(class, name): a record as well, which gets nothing.
    ("builtins", "getattr"),
    (f"{_TORCH}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    # Where older versions of torch have the first, and newer ones of Python the last two.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
)


class _Record:
    """What an object of the index was made of; it never does anything with it."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute of the object that the record stands for."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


def _stand_ins() -> dict[tuple[str, str], Any]:
    """What each pair of module and name becomes; the records are classes made anew, named as what they stand for."""
    made: dict[tuple[str, str], Any] = {pair: type(pair[1], (_Record,), {}) for pair in _RECORDS}
    made |= {("torch", name): getattr(torch, name) for name in _DTYPES}
    return made | {("torch", "Size"): tuple, ("collections", "OrderedDict"): OrderedDict}


class _Unpickler(pickle.Unpickler):
    """Knows exactly the pairs above: any other name, dotted or not, is refused before anything is looked up."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._known = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        raise DataError(f"it names {module}.{name}, which an index has no use for; nothing of it was loaded")


def read_torch_index(path: Path) -> Metadata:
    """The index of a checkpoint's folder; DataError if the file holds anything else than that."""
    try:
        data = read_bounded(path, _MOST_BYTES)
        check_pickle(data)
        return _index(_Unpickler(data).load())
    except DataError as error:
        raise DataError(f"{str(path)!r} is not a torch distributed checkpoint's index: {error}") from None
    except Exception as error:  # a pickle that lies fails in any way it likes
        first = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"{str(path)!r} is not a torch distributed checkpoint's index that can be read "
            f"({type(error).__name__}: {first}); it is damaged, or of another kind"
        ) from None


def _index(root: Any) -> Metadata:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

    made = _is(root, "Metadata", "the file")
    entries = {
        _text(name, "a tensor's name"): BytesStorageMetadata()
        if type(entry).__name__ == "BytesStorageMetadata"
        else _tensor(entry, name)
        for name, entry in _mapping(made.get("state_dict_metadata"), "state_dict_metadata").items()
    }
    storage = {}
    for key, info in _mapping(made.get("storage_data"), "storage_data").items():
        place, info = _is(key, "MetadataIndex", "storage_data"), _is(info, "_StorageInfo", "storage_data")
        name, offset, number = _text(place.get("fqn"), "a chunk's name"), place.get("offset"), place.get("index")
        sizes = None if offset is None else _sizes(offset, f"{name}'s offset")
        file = _text(info.get("relative_path"), f"{name}'s file")
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\0" in file or not file:
            raise DataError(f"{name} lies in the file {file!r}, which is not inside the checkpoint's folder")
        at, length = _sizes((info.get("offset"), info.get("length")), f"{name}'s place")
        transforms = info.get("transform_descriptors")
        if transforms:
            raise DataError(f"{name} is stored through {transforms!r}; only plain tensors are read")
        chunk = MetadataIndex(name, sizes, number if type(number) is int else None)
        storage[chunk] = torch_private.StorageInfo(file, at, length)
    return Metadata(state_dict_metadata=entries, storage_data=storage)


def _tensor(entry: Any, name: str) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    made = _is(entry, "TensorStorageMetadata", name)
    kept = _is(made.get("properties"), "TensorProperties", name)
    dtype = kept.state[0] if isinstance(kept.state, tuple) and kept.state else kept.get("dtype")
    if not isinstance(dtype, torch.dtype):
        raise DataError(f"{name} has no type of numbers")
    chunks = made.get("chunks")
    if not isinstance(chunks, list):
        raise DataError(f"{name} has no list of chunks")
    size = _sizes(made.get("size"), f"{name}'s size")
    parts = []
    for chunk in chunks:
        part = _is(chunk, "ChunkStorageMetadata", name)
        offsets, sizes = _sizes(part.get("offsets"), f"{name}'s chunk"), _sizes(part.get("sizes"), f"{name}'s chunk")
        if not len(offsets) == len(sizes) == len(size) or any(
            o + n > whole for o, n, whole in zip(offsets, sizes, size, strict=True)
        ):
            raise DataError(f"{name} of size {list(size)} has a chunk of size {list(sizes)} at {list(offsets)}")
        parts.append(ChunkStorageMetadata(offsets, sizes))
    if sum(prod(part.sizes) for part in parts) < prod(size):
        raise DataError(f"{name} of size {list(size)} is incomplete: its chunks leave a part of it out")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, parts)


def _is(value: Any, name: str, where: str) -> _Record:
    if isinstance(value, _Record) and type(value).__name__ == name:
        return value
    raise DataError(f"{where} is of type {type(value).__name__} where {name} is expected")


def _mapping(value: Any, where: str) -> Mapping[Any, Any]:
    return _kind(value, dict, where)


def _text(value: Any, where: str) -> str:
    return _kind(value, str, where)


def _sizes(value: Any, where: str) -> torch.Size:
    """torch.Size of whole numbers, none below 0."""
    _kind(value, tuple, where)
    if any(type(n) is not int or n < 0 for n in value):
        raise DataError(f"{where} is {value!r}, not whole numbers from 0")
    return torch.Size(value)


def _kind(value: Any, kind: Callable[..., Any], where: str) -> Any:
    if isinstance(value, kind):  # type: ignore[arg-type]
        return value
    raise DataError(f"{where} is of type {type(value).__name__} where {kind.__name__} is expected")
