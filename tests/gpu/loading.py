"""Loading from snapshots in memory (checkpoint/chunk_transfer.py) into real GPUs: values compared, and GB per second.

    PYTHONPATH=src:. torchrun --nproc-per-node 2 tests/gpu/loading.py --gb 8

Each process has so many GB of tensors on its GPU (in host memory where there is none). Cases:

    own    each process reads its own part, as after a restart of trainers
    peer   process 0 reads everything and sends the others theirs, as after a node was replaced
    cut    each reads its own part and needs an equal share of everybody's, as after a change of layout

Every case is loaded --turns times; it ends with 1 if a value is not the one that was saved.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megascale.checkpoint import TensorShard, save
from megascale.checkpoint.background.snapshot_memory import map_shared
from megascale.checkpoint.chunk_source import ChunkSource, LoadReport
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.loader import fill_shards
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.storage.opening import open_storage
from tests.gpu.command_line import make_parser, require_gpu

WIDTH = 4096
MATRIX = 100 << 20  # bytes of a tensor: two chunks
Shards = list[TensorShard]


class MappedChunks(ChunkSource):
    """Chunks in mapped files."""

    def __init__(
        self, name: str, index: CheckpointIndex, views: dict[str, memoryview], holders: dict[str, list[int]]
    ) -> None:
        super().__init__(name, index, {}, holders)
        self._views = views

    def read(self, file: str, start: int, stop: int) -> memoryview:
        return self._views[file][start:stop]


def main() -> int:
    """0: every value is the one that was saved."""
    parser = make_parser(__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="GB per process")
    parser.add_argument("--turns", type=int, default=3, help="number of loads")
    parser.add_argument(
        "--memory", type=Path, help="folder for the snapshots; default: /dev/shm, or /tmp where it is small"
    )
    inputs = parser.parse_args()
    require_gpu()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    peers, count = Peers(), max(1, round(inputs.gb * 1e9 / MATRIX))
    if rank == 0:
        print(f"checksums: {checksum_rate() / 1e9:.1f} GB/s a thread")
    memory = inputs.memory or roomy(1.1 * size * count * MATRIX)
    folder = Path(tempfile.mkdtemp(dir=memory)) if rank == 0 else None
    folder = Path(peers.broadcast(str(folder), str))
    wrong = 0
    try:
        custom = rows(count, size, rank, device)
        for shard in custom:
            shard.tensor.copy_(expected(shard))
        save(folder, 1, custom, {}, keep=1)
        del custom
        storage = open_storage(folder)
        index = folders.read_index(storage, folders.list_commits(storage)[0][-1])
        location = folder / folders.step_name(1)
        views = {file: memoryview(mapped(location / file)) for file in index.files}
        local = {file: [int(file.removesuffix(".distcp").rsplit("-", 1)[1])] for file in index.files}
        cases = {"own": (rows, local), "peer": (rows, {file: [0] for file in index.files}), "cut": (columns, local)}
        for name, (make, holders) in cases.items():
            duration = []
            for _ in range(inputs.turns):
                shards, report = make(count, size, rank, device), LoadReport()
                for shard in shards:
                    shard.tensor.fill_(-1.0)
                peers.all_true(True)
                began = time.perf_counter()
                damage = fill_shards(MappedChunks(name, index, views, holders), shards, peers, report)
                peers.all_true(True)
                duration.append(time.perf_counter() - began)
                bad = [s.name for s in shards if not torch.equal(s.tensor, expected(s))]
                if damage or bad:
                    print(f"process {rank}, {name}: {damage or f'other values in {len(bad)} tensors'}", flush=True)
                wrong += not peers.all_true(not damage and not bad)
                del shards
            if rank == 0:
                total = count * MATRIX / 1e9
                messages = ", ".join(f"{seconds:.2f}" for seconds in duration)
                print(f"{name:5} {total:.1f} GB a process: {messages} s, {total / min(duration):.1f} GB/s", flush=True)
        views.clear()
    finally:
        if rank == 0:
            for file in sorted(folder.rglob("*"), reverse=True):
                if file.is_dir():
                    file.rmdir()
                else:
                    file.unlink()
            folder.rmdir()
    dist.destroy_process_group()
    return int(wrong > 0)


def roomy(size: float) -> Path:
    """A file system in memory if it has room, else the disk, whose files stay in memory for so short a time too."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and shutil.disk_usage(shared).free > size else Path(tempfile.gettempdir())


def checksum_rate() -> float:
    """Bytes a second of one thread."""
    data, best = os.urandom(MATRIX), float("inf")
    for _ in range(3):
        began = time.perf_counter()
        crc32(memoryview(data))
        best = min(best, time.perf_counter() - began)
    return len(data) / best


def mapped(file: Path) -> memoryview:
    """A file of the memory file system, as a process maps a snapshot."""
    handle = os.open(file, os.O_RDONLY)
    try:
        return memoryview(map_shared(handle, file.stat().st_size, writable=False))
    finally:
        os.close(handle)


def names(count: int, size: int) -> list[str]:
    """Return the names of all processes' tensors, each with its own `count` in sequence."""
    return [f"model.{owner}.{number}" for owner in range(size) for number in range(count)]


def rows(count: int, size: int, rank: int, device: torch.device) -> Shards:
    """This process's tensors, whole."""
    shape = (MATRIX // 4 // WIDTH, WIDTH)
    chosen = names(count, size)[rank * count : (rank + 1) * count]
    return [TensorShard(name, shape, (0, 0), torch.empty(shape, device=device)) for name in chosen]


def columns(count: int, size: int, rank: int, device: torch.device) -> Shards:
    """Some columns of all tensors."""
    height = MATRIX // 4 // WIDTH
    start, stop = WIDTH * rank // size, WIDTH * (rank + 1) // size
    built = []
    for name in names(count, size):
        tensor = torch.empty((height, stop - start), device=device)
        built.append(TensorShard(name, (height, WIDTH), (0, start), tensor))
    return built


def expected(shard: TensorShard) -> torch.Tensor:
    """Values that tell place and tensor."""
    of = sum(map(ord, shard.name)) * 7919 + int(shard.name.rsplit(".", 1)[1])
    (top, remaining), (height, width) = shard.offsets, shard.tensor.shape
    device = shard.tensor.device
    locations = torch.arange(top, top + height, device=device)[:, None] * WIDTH
    locations = locations + torch.arange(remaining, remaining + width, device=device)
    return (locations * 31 + of).remainder_(1 << 23).float()


if __name__ == "__main__":
    sys.exit(main())
