"""Checkpoints to and from other forms: safetensors, torch files, foreign torch distributed checkpoints, other cuts.

Everything goes tensor by tensor (or chunk by chunk), so memory holds the largest tensor, never the model.
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
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.chunks import CHUNK_BYTES, split_box
from megascale.checkpoint.format.foreign_index import read_index
from megascale.checkpoint.format.index import TensorInfo, is_tensor_name
from megascale.checkpoint.format.torch_index import torch_metadata
from megascale.checkpoint.format.write_plan import data_file, make_offer, make_plan
from megascale.checkpoint.saver import host_bytes
from megascale.checkpoint.storage.base import Storage
from megascale.core.tensors import Box
from megascale.errors import ConfigError, DataError

# A source of logical tensors: their shapes and types, and a way to read a box of one.
Source = tuple[Mapping[str, TensorInfo], Callable[[str, Box], torch.Tensor]]
Told = Callable[[str], None]
Found = tuple[str, TensorInfo, Callable[[], torch.Tensor]]

_SAFE = {
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
    storage: Storage, step: int, source: Source, state: dict[str, Any], files: int, on_file: Told
) -> int:
    """Commit a step with the tensors of `source` in `files` files of about equal size; its bytes."""
    tensors, read = source
    total = sum(info.nbytes for info in tensors.values())
    limit = min(CHUNK_BYTES, max(total // (4 * files), 64))  # small enough that files come out about equal
    pieces = [
        (name, info.shape, info.dtype, box)
        for name, info in sorted(tensors.items())
        for box in split_box(Box((0,) * len(info.shape), info.shape), archive.element_size(info.dtype), limit)
    ]
    sizes = np.cumsum([box.count * archive.element_size(dtype) for _, _, dtype, box in pieces])
    which = np.minimum(sizes * files // max(int(sizes[-1]), 1), files - 1) if len(sizes) else []
    shares: list[list[Any]] = [[] for _ in range(files)]
    for piece, file in zip(pieces, which, strict=True):
        shares[int(file)].append(piece)
    plan = make_plan([make_offer(share) for share in shares])
    generation = folders.new_generation(storage)
    crcs, names = [], {}
    for rank, (part, share) in enumerate(zip(plan.parts, shares, strict=True)):
        if not part.size:
            continue
        name = f"{generation}-{data_file(rank)}"
        on_file(name)
        sink = storage.create(f"{folders.step_name(step)}/{name}")
        whole = 0
        try:
            for number, length in zip(part.chunks.tolist(), part.length.tolist(), strict=True):
                tensor, _, dtype, box = share[number]
                data = host_bytes(read(tensor, box))
                crc = crc32(data)
                head, tail = archive.wrap(dtype, box.sizes, crc, length)
                for run in (head, data, tail):
                    sink.write(run)
                    whole = crc32(run, whole)
                crcs.append(crc)
            sink.finish()
        except BaseException:
            sink.abort()
            folders.withdraw(storage, step, generation)
            raise
        names[name] = (part.size, whole)
    index = plan.index.with_generation(generation, np.array(crcs, np.uint32))
    return folders.commit_save(storage, step, generation, index, names, torch_metadata(index), state).size


def source_of(whole: CompleteCheckpoint) -> Source:
    """A checkpoint as a source."""
    return whole.tensors, whole.box


def export_safetensors(
    whole: CompleteCheckpoint, folder: Path, names: Mapping[str, str], shard_bytes: int, told: Told
) -> list[Path]:
    """Write tensors as `.safetensors` files of at most about `shard_bytes`, with an index where there are several.

    Args:
        names: which tensors, and what each is called in the file.

    ConfigError if the folder holds such files already: readers could not tell which set of weights counts.
    """
    if existing := sorted(file.name for file in folder.glob("*.safetensors*")):
        raise ConfigError(f"{str(folder)!r} holds {existing[0]} already; name a new folder or remove those files")
    groups: list[list[str]] = [[]]
    filled = 0
    for name in names:
        size = whole.tensors[name].nbytes
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    folder.mkdir(parents=True, exist_ok=True)
    many = len(groups) > 1
    paths, weight_map = [], {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if many else "model.safetensors"
        told(file)
        _write_safetensors(whole, folder / file, {name: names[name] for name in group})
        weight_map.update({names[name]: file for name in group})
        paths.append(folder / file)
    if many:
        total = sum(whole.tensors[name].nbytes for name in names)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        paths.append(folder / "model.safetensors.index.json")
        paths[-1].write_text(json.dumps(index, indent=1))
    return paths


def _write_safetensors(whole: CompleteCheckpoint, path: Path, names: Mapping[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, called in names.items():
        info = whole.tensors[name]
        header[called] = {"dtype": _SAFE[info.dtype], "shape": info.shape, "data_offsets": [at, at + info.nbytes]}
        at += info.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(host_bytes(whole.read_tensor(name)))


def export_torch(whole: CompleteCheckpoint, path: Path, names: Mapping[str, str]) -> Path:
    """Write tensors as one `torch.save` file (a flat dictionary; all of it is held in memory)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({called: whole.read_tensor(name) for name, called in names.items()}, path)
    return path


def read_foreign(path: Path, prefix: str) -> Source:
    """Tensors of a `.safetensors` file or folder of them, a `torch.save` file, or a torch distributed checkpoint.

    Nested dictionaries become dotted names; `prefix` is put before each. Nothing but tensors is unpickled. DataError
    if it is none of these.
    """
    if path.is_dir() and (path / folders.METADATA).is_file():
        found = _from_distributed(path)
    elif path.is_dir() or path.suffix == ".safetensors":
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise DataError(f"{str(path)!r} holds neither .safetensors files nor a torch distributed checkpoint")
        found = _from_safetensors(files)
    else:
        found = _from_torch(path)
    tensors, readers = {}, {}
    for name, info, reader in found:
        if not is_tensor_name(prefix + name):
            raise DataError(f"{str(path)!r}: {name[:200]!r} is no name that a checkpoint can hold")
        if prefix + name in tensors:
            raise DataError(
                f"{str(path)!r} holds {name[:200]!r} more than once, so it is unclear which one counts; name one file, "
                "or a folder that holds one set of weights"
            )
        tensors[prefix + name], readers[prefix + name] = info, reader
    if not tensors:
        raise DataError(f"{str(path)!r} holds no tensors")
    held: dict[str, torch.Tensor] = {}

    def read(name: str, box: Box) -> torch.Tensor:
        if name not in held:
            held.clear()
            held[name] = readers[name]()
        where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        return held[name][where] if where else held[name]

    return tensors, read


def _from_safetensors(files: list[Path]) -> Iterator[Found]:
    from safetensors import SafetensorError, safe_open

    dtypes = {safe: name for name, safe in _SAFE.items()}
    for file in files:
        try:
            opened = safe_open(file, framework="pt")
            names = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise DataError(f"{str(file)!r} is not a safetensors file: {error}") from None
        for name in names:
            part = opened.get_slice(name)
            if part.get_dtype() not in dtypes:
                raise DataError(f"{str(file)!r}: {name} is of type {part.get_dtype()}, which a checkpoint cannot hold")
            yield name, TensorInfo(tuple(part.get_shape()), dtypes[part.get_dtype()]), partial(opened.get_tensor, name)


def _from_torch(path: Path) -> Iterator[Found]:
    try:
        tree = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise DataError(f"there is no file {str(path)!r}") from None
    except Exception as error:  # whatever a file that is something else, or lies, makes of torch's own reader
        raise DataError(f"{str(path)!r} is not a file of tensors that torch.save wrote: {_first_line(error)}") from None
    try:
        found = list(_flatten("", tree))
    except RecursionError:
        raise DataError(f"{str(path)!r} holds tables in each other without end; it is no file of tensors") from None
    for name, tensor in found:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise DataError(f"{str(path)!r}: {name} is a {tensor.layout} tensor, which a checkpoint cannot hold")
        kind = _dtype(path, name, tensor.dtype)
        yield name, TensorInfo(tuple(tensor.shape), kind), partial(torch.Tensor.detach, tensor)


def _flatten(prefix: str, tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield prefix.removesuffix("."), tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten(f"{prefix}{key}.", value)
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from _flatten(f"{prefix}{i}.", value)


def _from_distributed(path: Path) -> Iterator[Found]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    def read(name: str, entry: TensorStorageMetadata) -> torch.Tensor:
        try:
            state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
            dcp.load(state, storage_reader=Reader(path), no_dist=True)
        except (Exception, CheckpointException) as error:  # files that may hold anything; tensors alone are unpickled
            causes = list(error.failures.values()) if isinstance(error, CheckpointException) else []
            cause = causes[0][0] if causes else error
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            raise DataError(
                f"{str(path)!r}: {name} cannot be read ({_first_line(cause)}); get the files again"
            ) from None
        return state[name]

    metadata = read_index(path / folders.METADATA)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            yield (
                name,
                TensorInfo(tuple(entry.size), _dtype(path, name, entry.properties.dtype)),
                partial(read, name, entry),
            )


def _dtype(path: Path, name: str, dtype: torch.dtype) -> str:
    kind = str(dtype).removeprefix("torch.")
    if kind not in archive.DTYPES:
        raise DataError(f"{str(path)!r}: {name} is of type {kind}, which a checkpoint cannot hold")
    return kind


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
