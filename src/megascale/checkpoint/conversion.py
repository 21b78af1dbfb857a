"""Conversion between checkpoints and safetensors files, torch files and foreign torch distributed checkpoints.

A conversion handles one tensor (or chunk) after the other, so it needs memory for the largest tensor only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megascale.checkpoint.complete_checkpoint import CompleteCheckpoint
from megascale.checkpoint.format import archive
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.chunks import CHUNK_BYTES, split_box
from megascale.checkpoint.format.commit import METADATA
from megascale.checkpoint.format.foreign_index import read_torch_index
from megascale.checkpoint.format.index import TensorInfo, is_tensor_name
from megascale.checkpoint.format.torch_index import make_torch_metadata
from megascale.checkpoint.format.write_plan import data_file_name, make_offer, make_plan
from megascale.checkpoint.saver import to_host_bytes, write_chunk
from megascale.checkpoint.storage.base import Storage
from megascale.core.tensors import Box
from megascale.errors import ConfigError, DataError

# Tensors to convert, as a pair: shape and dtype by name, and a function that reads a box of a tensor.
Source = tuple[Mapping[str, TensorInfo], Callable[[str, Box], torch.Tensor]]
# Function that is called with the name of each file before the file is written.
FileCallback = Callable[[str], None]
# Tensor of a foreign file: name, shape and dtype, and a function that reads the tensor.
ForeignTensor = tuple[str, TensorInfo, Callable[[], torch.Tensor]]

_SAFETENSORS_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_checkpoint(
    storage: Storage, step: int, source: Source, state: dict[str, Any], files: int, on_file: FileCallback
) -> int:
    """Commit a step with the tensors of `source`.

    Args:
        state: state besides tensors.
        files: number of data files, which have about equal sizes.
        on_file: called with the name of each data file before it is written.

    Returns:
        The size of the checkpoint in bytes.
    """
    tensors, read_box = source
    total_bytes = sum(info.nbytes for info in tensors.values())
    # At least four chunks per file, so that the files can have about equal sizes.
    chunk_bytes = min(CHUNK_BYTES, max(total_bytes // (4 * files), 64))
    chunks: list[tuple[str, tuple[int, ...], str, Box]] = []
    for name, info in sorted(tensors.items()):
        tensor_box = Box((0,) * len(info.shape), info.shape)
        for box in split_box(tensor_box, archive.element_size(info.dtype), chunk_bytes):
            chunks.append((name, info.shape, info.dtype, box))
    ends = np.cumsum([box.count * archive.element_size(dtype) for _, _, dtype, box in chunks])
    if len(ends):
        file_numbers = np.minimum(ends * files // max(int(ends[-1]), 1), files - 1)
    else:
        file_numbers = []
    chunks_by_file: list[list[Any]] = [[] for _ in range(files)]
    for chunk, file_number in zip(chunks, file_numbers, strict=True):
        chunks_by_file[int(file_number)].append(chunk)
    plan = make_plan([make_offer(file_chunks) for file_chunks in chunks_by_file])
    generation = folders.make_generation(storage)
    crcs = []
    written_files = {}
    for rank, (file_layout, file_chunks) in enumerate(zip(plan.file_layouts, chunks_by_file, strict=True)):
        if not file_layout.size:
            continue
        name = f"{generation}-{data_file_name(rank)}"
        on_file(name)
        writer = storage.create(f"{folders.step_name(step)}/{name}")
        file_crc = 0
        try:
            for number, length in zip(file_layout.chunks.tolist(), file_layout.length.tolist(), strict=True):
                tensor_name, _, dtype, box = file_chunks[number]
                elements = to_host_bytes(read_box(tensor_name, box))
                crc, file_crc = write_chunk(writer, dtype, box.sizes, elements, length, file_crc)
                crcs.append(crc)
            writer.finish()
        except BaseException:
            writer.abort()
            folders.withdraw_save(storage, step, generation)
            raise
        written_files[name] = (file_layout.size, file_crc)
    index = plan.index.with_generation(generation, np.array(crcs, np.uint32))
    return folders.commit_save(storage, step, generation, index, written_files, make_torch_metadata(index), state).size


def as_source(checkpoint: CompleteCheckpoint) -> Source:
    """Return a checkpoint as the source of a conversion."""
    return checkpoint.tensors, checkpoint.read_box


def export_safetensors(
    checkpoint: CompleteCheckpoint, folder: Path, names: Mapping[str, str], shard_bytes: int, on_file: FileCallback
) -> list[Path]:
    """Write tensors as `.safetensors` files of at most about `shard_bytes`, with an index if there are several.

    Args:
        names: names in the file by names of the tensors to write.
        shard_bytes: size of a file above which a new file begins.

    Returns:
        The paths of the written files.

    Raises:
        ConfigError: the folder already has such files, so that readers could mix two sets of weights.
    """
    existing = sorted(file.name for file in folder.glob("*.safetensors*"))
    if existing:
        raise ConfigError(f"{str(folder)!r} already has {existing[0]}; name a new folder or remove those files")
    groups: list[list[str]] = [[]]
    group_bytes = 0
    for name in names:
        size = checkpoint.tensors[name].nbytes
        if groups[-1] and group_bytes + size > shard_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(name)
        group_bytes += size
    folder.mkdir(parents=True, exist_ok=True)
    has_index = len(groups) > 1
    paths = []
    weight_map = {}
    for number, group in enumerate(groups, 1):
        if has_index:
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        else:
            file = "model.safetensors"
        on_file(file)
        _write_safetensors(checkpoint, folder / file, {name: names[name] for name in group})
        weight_map.update({names[name]: file for name in group})
        paths.append(folder / file)
    if has_index:
        total = sum(checkpoint.tensors[name].nbytes for name in names)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        paths.append(folder / "model.safetensors.index.json")
        paths[-1].write_text(json.dumps(index, indent=1))
    return paths


def _write_safetensors(checkpoint: CompleteCheckpoint, path: Path, names: Mapping[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, exported_name in names.items():
        info = checkpoint.tensors[name]
        stop = offset + info.nbytes
        dtype = _SAFETENSORS_TYPES[info.dtype]
        header[exported_name] = {"dtype": dtype, "shape": info.shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(to_host_bytes(checkpoint.read_tensor(name)))


def export_torch(checkpoint: CompleteCheckpoint, path: Path, names: Mapping[str, str]) -> Path:
    """Write tensors as one `torch.save` file with a flat dictionary. Memory must hold all tensors at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({exported_name: checkpoint.read_tensor(name) for name, exported_name in names.items()}, path)
    return path


class _ForeignReader:
    """Reader of boxes of foreign tensors. It caches the last tensor, because its boxes are read one after the other."""

    def __init__(self, readers: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self._readers = readers
        self._last: dict[str, torch.Tensor] = {}

    def read_box(self, name: str, box: Box) -> torch.Tensor:
        """Return the elements of a box of a tensor."""
        if name not in self._last:
            self._last.clear()
            self._last[name] = self._readers[name]()
        slices = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
        return self._last[name][slices]


def read_foreign_tensors(path: Path, prefix: str) -> Source:
    """Return the tensors of a `.safetensors` file or folder, a `torch.save` file, or a torch distributed checkpoint.

    The names of nested dictionaries are joined with dots. Only tensors are unpickled.

    Args:
        prefix: text before each name.

    Raises:
        DataError: the file has another format, no tensors, or two tensors of one name.
    """
    if path.is_dir() and (path / METADATA).is_file():
        foreign = _read_distributed(path)
    elif path.is_dir() or path.suffix == ".safetensors":
        if path.is_dir():
            files = sorted(path.glob("*.safetensors"))
        else:
            files = [path]
        if not files:
            raise DataError(f"{str(path)!r} holds neither .safetensors files nor a torch distributed checkpoint")
        foreign = _read_safetensors(files)
    else:
        foreign = _read_torch_file(path)
    tensors = {}
    readers = {}
    for name, info, reader in foreign:
        full_name = prefix + name
        if not is_tensor_name(full_name):
            raise DataError(f"{str(path)!r}: a checkpoint cannot hold a tensor named {name[:200]!r}")
        if full_name in tensors:
            raise DataError(
                f"{str(path)!r} holds {name[:200]!r} more than once, so it is unclear which one counts; name one file, "
                "or a folder that holds one set of weights"
            )
        tensors[full_name] = info
        readers[full_name] = reader
    if not tensors:
        raise DataError(f"{str(path)!r} holds no tensors")
    return tensors, _ForeignReader(readers).read_box


def _read_safetensors(files: list[Path]) -> Iterator[ForeignTensor]:
    from safetensors import SafetensorError, safe_open

    dtypes = {type_name: dtype for dtype, type_name in _SAFETENSORS_TYPES.items()}
    for file in files:
        try:
            opened = safe_open(file, framework="pt")
            names = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise DataError(f"{str(file)!r} is not a safetensors file: {error}") from None
        for name in names:
            tensor_slice = opened.get_slice(name)
            if tensor_slice.get_dtype() not in dtypes:
                raise DataError(
                    f"{str(file)!r}: {name} is of type {tensor_slice.get_dtype()}, which a checkpoint cannot hold"
                )
            yield (
                name,
                TensorInfo(tuple(tensor_slice.get_shape()), dtypes[tensor_slice.get_dtype()]),
                partial(opened.get_tensor, name),
            )


def _read_torch_file(path: Path) -> Iterator[ForeignTensor]:
    try:
        tree = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise DataError(f"there is no file {str(path)!r}") from None
    except Exception as error:  # torch's reader can fail in any way on another kind of file or a forged one
        raise DataError(f"{str(path)!r} is not a file of tensors that torch.save wrote: {_first_line(error)}") from None
    try:
        entries = list(_flatten("", tree))
    except RecursionError:
        raise DataError(f"{str(path)!r} holds dictionaries nested without end; it is not a file of tensors") from None
    for name, tensor in entries:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise DataError(f"{str(path)!r}: {name} is a {tensor.layout} tensor, which a checkpoint cannot hold")
        info = TensorInfo(tuple(tensor.shape), _check_dtype(path, name, tensor.dtype))
        yield name, info, partial(torch.Tensor.detach, tensor)


def _flatten(prefix: str, tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested dictionaries and lists by dotted name."""
    if isinstance(tree, torch.Tensor):
        yield prefix.removesuffix("."), tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten(f"{prefix}{key}.", value)
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from _flatten(f"{prefix}{i}.", value)


def _read_distributed(path: Path) -> Iterator[ForeignTensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    class Reader(dcp.FileSystemReader):
        """Reader that uses the checked index instead of unpickling the index file."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    def read(name: str, entry: TensorStorageMetadata) -> torch.Tensor:
        try:
            state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
            dcp.load(state, storage_reader=Reader(path), no_dist=True)
        except (Exception, CheckpointException) as error:  # a forged file can raise any error
            cause: BaseException = error
            if isinstance(error, CheckpointException) and error.failures:
                cause, _ = next(iter(error.failures.values()))
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            raise DataError(
                f"{str(path)!r}: {name} cannot be read ({_first_line(cause)}); get the files again"
            ) from None
        return state[name]

    metadata = read_torch_index(path / METADATA)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):  # other entries are objects, which are not converted
            info = TensorInfo(tuple(entry.size), _check_dtype(path, name, entry.properties.dtype))
            yield name, info, partial(read, name, entry)


def _check_dtype(path: Path, name: str, dtype: torch.dtype) -> str:
    """Return the name of a dtype. Raises DataError if a checkpoint cannot hold it."""
    dtype_text = str(dtype).removeprefix("torch.")
    if dtype_text not in archive.DTYPES:
        raise DataError(f"{str(path)!r}: {name} is of type {dtype_text}, which a checkpoint cannot hold")
    return dtype_text


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
