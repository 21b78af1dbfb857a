"""Measurements of `python -m benchmarks checkpoint`: each function returns plain figures."""

from __future__ import annotations

import bisect
import contextlib
import mmap
import multiprocessing
import os
import pickle
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megascale.checkpoint import Checkpointer, LoadReport, TensorShard, load, save
from megascale.checkpoint.format.step_folders import prune
from megascale.config import CheckpointConfig

Figures = dict[str, Any]
_context = multiprocessing.get_context("forkserver")


def model(gigabytes: float, fill: bool = True) -> list[TensorShard]:
    """About that many 10^9 bytes of float32 tensors, as a layer's matrices lie: 16 MB each."""
    count = max(1, round(gigabytes * 1e9 / (2048 * 2048 * 4)))
    make = torch.randn if fill else torch.zeros
    return [TensorShard(f"model.layers.{i}.weight", (2048, 2048), (0, 0), make(2048, 2048)) for i in range(count)]


def data_bytes(shards: list[TensorShard]) -> int:
    """Bytes of the tensors."""
    return sum(s.tensor.nbytes for s in shards)


def ready_memory(size: int) -> mmap.mmap:
    """About that many bytes of random numbers on huge pages: small ones cost the disk a tenth.

    Made once: memory given back to a virtual machine's host, and had anew, slows down the writes that follow.
    """
    block = 16 << 20
    memory = mmap.mmap(-1, size // block * block)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    random = np.random.default_rng(0).integers(0, 255, block, np.uint8)
    for at in range(0, len(memory), block):
        np.frombuffer(memory, np.uint8)[at : at + block] = random
    return memory


def disk_rate(folder: Path, memory: mmap.mmap) -> float:
    """Bytes a second that the disk takes: one large file past the page cache, synced, from memory that is ready.

    No byte is sent twice: one block again and again, which stays in the processor's cache, is taken half again as fast
    (3.0 against 2.0 GB/s on a virtual disk), and no save can do that.
    """
    block = 16 << 20
    path = folder / "disk-rate"
    try:
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT, 0o600)
    except OSError:
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    begun = time.perf_counter()
    with memoryview(memory) as data:
        for at in range(0, len(data), block):
            os.pwrite(handle, data[at : at + block], at)
    os.fsync(handle)
    seconds = time.perf_counter() - begun
    os.close(handle)
    path.unlink()
    return len(memory) / seconds


def saving(folder: Path, gigabytes: float, repeats: int) -> Figures:
    """Return rates of saving at once and in the background next to the disk's own, in random turns.

    A virtual disk's rate wanders by half, and it goes on working on what was removed before: each turn begins when the
    disk has settled, and medians are compared.
    """
    shards = model(gigabytes)
    size = data_bytes(shards)
    memory = ready_memory(size)
    run = folder / "run"
    checkpointer = Checkpointer(CheckpointConfig(background=True, keep=1, linger=600), run, shards)
    checkpointer.save(1, {"step": 1}, wait=True)  # allocates; not counted
    checkpointer.finish(run_ended=False)
    rates: dict[str, list[float]] = {"disk": [], "front": [], "back": []}
    stalls: list[float] = []
    removals: list[float] = []
    order = np.random.default_rng(0)
    for step in range(2, repeats + 2):
        for subject in order.permutation(list(rates)):
            os.sync()
            if subject == "disk":
                rates["disk"].append(disk_rate(folder, memory))
            elif subject == "front":
                begun = time.perf_counter()
                save(folder / "front", step, shards, {"step": step}, keep=2)
                rates["front"].append(size / (time.perf_counter() - begun))
                begun = time.perf_counter()
                prune(folder / "front", keep=1)  # what a save with keep=1 does after its commit
                if step > 2:
                    removals.append(time.perf_counter() - begun)
            else:
                checkpointer.save(step, {"step": step}, wait=True)
                checkpointer.before_update()
                (outcome,) = checkpointer.finish(run_ended=False)
                if not outcome.committed:
                    raise RuntimeError(f"a save failed: {outcome.reason}")
                rates["back"].append(size / outcome.seconds)
                stalls.append(outcome.stall)
    checkpointer.save(repeats + 2, {}, wait=True)
    checkpointer.finish()
    middle = {method: statistics.median(match) for method, match in rates.items()}
    return {
        "bytes": size,
        "disk_mb_s": [rate / 1e6 for rate in rates["disk"]],
        "save_mb_s": [rate / 1e6 for rate in rates["front"]],
        "background_mb_s": [rate / 1e6 for rate in rates["back"]],
        "background_stall_s": stalls,
        "removal_s": removals,
        "save_of_disk": middle["front"] / middle["disk"],
        "background_of_disk": middle["back"] / middle["disk"],
    }


def _forget(folder: Path) -> None:
    """Drop files from the page cache, so that the next read comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def _read_by_process() -> int:
    """Bytes this process has read from files, as the kernel counts them."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar"):
            return int(line.split()[1])
    return 0


def _load_child(rank: int, size: int, folder: Path, gigabytes: float, results: Any) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{size}", rank=rank, world_size=size)
    shards = model(gigabytes, fill=False)
    report = LoadReport()
    dist.barrier()
    before, begun = _read_by_process(), time.perf_counter()
    load(folder / "front", shards, report=report)
    seconds = time.perf_counter() - begun
    # What gloo reads from sockets is not counted by rchar; the rest of the difference is files.
    results.put((rank, report.read_bytes, _read_by_process() - before, seconds))
    dist.barrier()
    dist.destroy_process_group()


def loading(folder: Path, gigabytes: float, worlds: tuple[int, ...]) -> list[Figures]:
    """Bytes read from storage, all processes together, when data-parallel replicas load: once, however many."""
    shards = model(gigabytes)
    save(folder / "front", 1, shards, {}, keep=1)
    stored = data_bytes(shards)
    del shards
    result = []
    for size in worlds:
        _forget(folder / "front")
        results = _context.Queue()
        children = [
            _context.Process(target=_load_child, args=(rank, size, folder, gigabytes, results)) for rank in range(size)
        ]
        for child in children:
            child.start()
        got = [results.get(timeout=300) for _ in children]
        for child in children:
            child.join()
        result.append(
            {
                "replicas": size,
                "checkpoint_bytes": stored,
                "read_bytes": sum(g[1] for g in got),
                "kernel_read_bytes": sum(g[2] for g in got),
                "ratio": sum(g[1] for g in got) / stored,
                "most_one_read": max(g[1] for g in got) / stored,
                "seconds": max(g[3] for g in got),
            }
        )
    return result


def memory_against_storage(folder: Path, gigabytes: float, repeats: int) -> Figures:
    """Seconds to load from the service's memory, from storage with a cold page cache, and from a slow store.

    "slow" is the same load with storage held to 200 MB/s, about what one client of a busy shared file system gets.
    """
    from megascale.checkpoint import loader
    from megascale.checkpoint.object_collectives import Peers
    from megascale.checkpoint.storage.local_disk import LocalStorage

    shards = model(gigabytes)
    run = folder / "memory-run"
    config = CheckpointConfig(background=True, keep=1, linger=10)
    checkpointer = Checkpointer(config, run, shards)
    checkpointer.save(1, {"step": 1}, wait=True)
    checkpointer.finish(run_ended=False)
    memory, storage = [], []
    for _ in range(repeats):
        begun = time.perf_counter()
        checkpointer.load()
        memory.append(time.perf_counter() - begun)
        if checkpointer.loaded_from != "memory":
            raise RuntimeError(f"loaded from {checkpointer.loaded_from}")
        _forget(run)
        begun = time.perf_counter()
        load(run / "checkpoints", shards)
        storage.append(time.perf_counter() - begun)

    class Slow(LocalStorage):
        def read(self, path: str, offset: int = 0, length: int | None = None) -> memoryview:
            data = super().read(path, offset, length)
            time.sleep(len(data) / 200e6)
            return data

    slow = Slow(run / "checkpoints")
    commits = loader.find_candidates(slow, None)
    begun = time.perf_counter()
    assert not isinstance(commits, str)
    loader.load_commit(slow, commits[0], shards, Peers())
    slow_seconds = time.perf_counter() - begun
    checkpointer.save(2, {})
    checkpointer.finish()
    return {
        "bytes": data_bytes(shards),
        "memory_s": memory,
        "storage_s": storage,
        "slow_storage_s": slow_seconds,
        "times_faster": min(storage) / min(memory),
        "times_faster_than_slow": slow_seconds / min(memory),
    }


def planning(preset: str, tensor: int, pipeline: int, data: int) -> Figures:
    """Plan the save of a model at full scale, in a process of its own so that its memory is its own."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "offers"
        begun = time.perf_counter()
        count = 0
        with open(path, "wb") as file:
            for offer in offers(preset, tensor, pipeline, data):
                pickle.dump(offer, file, protocol=5)
                count += 1
        built = time.perf_counter() - begun
        results = _context.Queue()
        child = _context.Process(target=_plan_child, args=(path, count, results))
        child.start()
        figures = results.get(timeout=600)
        child.join()
    return {"ranks": count, "offer_s_each": built / count, **figures}


def _plan_child(path: Path, count: int, results: Any) -> None:
    from megascale.checkpoint.background.pending_saves import BLANK
    from megascale.checkpoint.format.torch_index import make_torch_metadata
    from megascale.checkpoint.format.write_plan import make_plan

    with open(path, "rb") as file:
        stored = [pickle.load(file) for _ in range(count)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    plan = make_plan(stored)
    planned = time.perf_counter()
    blank = plan.index.with_generation(BLANK, plan.index.columns["crc"])
    metadata = make_torch_metadata(blank)
    template = time.perf_counter()
    # What each save adds once the plan is there: new checksums, new names.
    crcs = np.arange(len(plan.index), dtype=np.uint32)
    index = plan.index.with_generation("00000007-0123abcd", crcs).to_bytes()
    metadata = metadata.replace(BLANK.encode(), b"00000007-0123abcd")
    repeated = time.perf_counter()
    results.put(
        {
            "chunks": len(plan.index),
            "files": len(plan.index.files),
            "checkpoint_bytes": plan.size,
            "plan_s": planned - begun,
            "metadata_s": template - planned,
            "first_save_s": template - begun,
            "later_save_s": repeated - template,
            "index_bytes": len(index),
            "metadata_bytes": len(metadata),
            "offers_rss_gib": before / 2**20,
            "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "most_one_writes": max(part.size for part in plan.file_layouts),
            "least_one_writes": min(part.size for part in plan.file_layouts),
        }
    )


def offers(preset: str, tensor: int, pipeline: int, data: int) -> Iterator[Any]:
    """Yield what each rank of a run with ZeRO-1 saves, in rank order: its flat range of weights and of two moments.

    Chunks, buffers and cuts are those of the engine, on the meta device.
    """
    from megascale.checkpoint.format.write_plan import make_offer
    from megascale.config import from_tree
    from megascale.core.layout import lay_out

    world = tensor * pipeline * data
    config = from_tree(
        {
            "model": {"preset": preset},
            "parallel": {"tensor": tensor, "pipeline": pipeline},
            "train": {"micro_batch": 1, "global_batch": data},
        }
    )
    layout = lay_out(config, world)
    for stage in range(pipeline):
        cuts = [_flat_cuts(config, layout.stage_layers(stage), stage, t, tensor, pipeline, data) for t in range(tensor)]
        for d in range(data):
            for t in range(tensor):
                yield make_offer(_boxes(cuts[t], d, data))


def _flat_cuts(
    config: Any, chunks: list[Any], stage: int, rank: int, tensor: int, pipeline: int, data: int
) -> list[Any]:
    """(layout of a chunk's buffer, its pieces by place) for each chunk of a (stage, tensor rank)."""
    from megascale.model.transformer import Chunk
    from megascale.parallel.buffer_layout import BufferMember, lay_out
    from megascale.parallel.buffers import TIED
    from megascale.parallel.collectives import Axis
    from megascale.parallel.parameters import get_spec

    result = []
    tied = config.model.tied_embeddings and pipeline > 1 and stage in (0, pipeline - 1)
    for number, layers in enumerate(chunks):
        location = number * pipeline + stage
        last = pipeline * len(chunks) - 1
        module = Chunk(
            config.model,
            layers,
            is_first=location == 0,
            is_last=location == last,
            axis=Axis(None, tensor, rank),
            dtype=torch.float32,
            recompute=config.parallel.recompute,
        )
        parameters = list(module.parameters())
        specs = [get_spec(p) for p in parameters]
        members = [
            BufferMember(
                p.numel(),
                any(piece.decay for piece in spec.pieces),
                spec.summed_axes,
                tied and any(piece.name == TIED for piece in spec.pieces),
            )
            for p, spec in zip(parameters, specs, strict=True)
        ]
        flat = lay_out(members, data, config.parallel.bucket_elements if data > 1 else None)
        pieces = []
        for start, spec in zip(flat.starts, specs, strict=True):
            for piece in spec.pieces:
                pieces.append((start, piece))
                start += piece.box.count
        pieces.sort(key=lambda item: item[0])
        result.append((flat, pieces, [start for start, _ in pieces]))
    return result


def _boxes(cuts: list[Any], rank: int, ranks: int) -> Iterator[Any]:
    from megascale.config.parts import OPTIMIZERS
    from megascale.core.tensors import flat_boxes

    for flat, pieces, starts in cuts:
        for bucket in range(len(flat.buckets)):
            low, high = flat.find_shard(bucket, rank, ranks)
            first = max(bisect.bisect_right(starts, low) - 1, 0)
            for start, piece in pieces[first : bisect.bisect_left(starts, high)]:
                a, b = max(low, start) - start, min(high, start + piece.box.count) - start
                if a < b:
                    for box, _, _ in flat_boxes(piece.box, a, b):
                        yield f"model.{piece.name}", piece.shape, "float32", box
                        for retained in OPTIMIZERS["adamw"].state_names(piece.name, piece.shape):
                            yield f"optimizer.{retained}.{piece.name}", piece.shape, "float32", box
