"""Measure how long training waits for a save, and how much slower the step under the copy is.

One process per GPU (or two on the CPU) holds the given state and runs a stand-in for a training step: GEMMs
for about as long as asked, an all-reduce, an update of the state in place. Some steps begin a save, most do not.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megascale.checkpoint import Checkpointer, TensorShard
from megascale.config import CheckpointConfig

_context = multiprocessing.get_context("spawn")
_WARM, _BETWEEN = 4, 4


def stalls(folder: Path, gigabytes: float, step_seconds: float, saves: int, persist: bool) -> dict[str, Any]:
    """Figures over all processes: the slowest counts.

    Args:
        gigabytes: state of all processes together, in 10^9 bytes.
        step_seconds: how long a step without a save should last.
        saves: how many saves to measure.
        persist: also write them to `folder`, else they stay in memory.
    """
    if torch.cuda.is_available():
        world = torch.cuda.device_count()
    else:
        world = 2
    results = _context.Queue()
    arguments = (world, folder, gigabytes, step_seconds, saves, persist, results)
    children = [_context.Process(target=_child, args=(rank,) + arguments) for rank in range(world)]
    for child in children:
        child.start()
    got = [results.get(timeout=1800) for _ in children]
    for child in children:
        child.join()
    broken = next((g for g in got if isinstance(g, str)), None)
    if broken:
        raise RuntimeError(broken)
    plain = statistics.median(max(times) for times in zip(*(g["plain"] for g in got), strict=True))
    under = [max(times) for times in zip(*(g["under"] for g in got), strict=True)]
    return {
        "processes": world,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "state_bytes": sum(g["bytes"] for g in got),
        "staging_bytes": sum(g["staging"] for g in got),
        "pinned": all(g["pinned"] for g in got),
        "prepare_s": max(g["prepare"] for g in got),
        "in_place_s": max(g["in_place"] for g in got),
        "plain_step_s": plain,
        "save_step_s": under,
        "slower": statistics.median(under) / plain - 1,
        "stall_s": [max(times) for times in zip(*(g["stalls"] for g in got), strict=True)],
        "staged_s": [max(times) for times in zip(*(g["seconds"] for g in got), strict=True)],
        "skipped": max(g["skipped"] for g in got),
    }


def _child(rank: int, *arguments: Any) -> None:
    *remaining, results = arguments
    try:
        results.put(_measure(rank, *remaining))
    except BaseException as error:
        results.put(f"process {rank}: {error!r}")
        raise


def _measure(
    rank: int, world: int, folder: Path, gigabytes: float, step_seconds: float, saves: int, persist: bool
) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    if cuda:
        device = torch.device("cuda", rank)
    else:
        device = torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    backend = "cuda:nccl,cpu:gloo" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/stall-store", rank=rank, world_size=world)
    # One flat buffer, cut as optimizer shards are: a piece of it is a row range of a logical matrix.
    width = 8192 if gigabytes > 1 else 1024
    rows = max(1, int(gigabytes * 1e9 / world / 4 / width / 64))
    state = torch.zeros(64, rows, width, device=device)
    shards = [TensorShard(f"model.{i}.weight", (rows * world, width), (rank * rows, 0), state[i]) for i in range(64)]
    config = CheckpointConfig(background=True, keep=1, linger=5.0, location=str(folder / "checkpoints"))
    checkpointer = Checkpointer(config, folder / "run", shards)
    begun = time.perf_counter()
    checkpointer.prepare()
    prepare = time.perf_counter() - begun
    assert checkpointer.snapshots is not None
    pinned = checkpointer.snapshots.wait_for_memory()
    in_place = time.perf_counter() - begun
    work = _Step(device, state, checkpointer)
    work.calibrate(step_seconds)
    plain: list[float] = []
    under: list[float] = []
    skipped = 0
    for number in range(_WARM + saves * (_BETWEEN + 1)):
        # The first save is not counted: memory is touched for the first time.
        saving = number >= _WARM - 1 and (number - _WARM + 1) % (_BETWEEN + 1) == 0
        work.sync()
        dist.barrier()
        begun = time.perf_counter()
        if saving:
            skipped += not checkpointer.save(number + 1, {"step": number + 1}, persist=persist)
        work.run()
        work.sync()
        seconds = time.perf_counter() - begun
        if number >= _WARM:
            (under if saving else plain).append(seconds)
    outcomes = sorted(checkpointer.finish(), key=lambda o: o.step)[1:]
    failed = [o.reason for o in outcomes if o.reason]
    if failed:
        raise RuntimeError(failed[0])
    dist.destroy_process_group()
    return {
        "bytes": state.nbytes,
        "staging": work.staging,
        "pinned": pinned,
        "prepare": prepare,
        "in_place": in_place,
        "plain": plain,
        "under": under,
        "stalls": [o.stall for o in outcomes],
        "seconds": [o.seconds for o in outcomes],
        "skipped": skipped,
    }


class _Step:
    """GEMMs, an all-reduce of gradients' size, an update of all of the state."""

    def __init__(self, device: torch.device, state: torch.Tensor, checkpointer: Checkpointer) -> None:
        self.device = device
        self.state = state
        self.checkpointer = checkpointer
        snapshots = checkpointer.snapshots
        assert snapshots is not None
        self.staging = snapshots.memory
        n = 8192 if device.type == "cuda" else 512
        if device.type == "cuda":
            dtype = torch.bfloat16
        else:
            dtype = torch.float32
        self.a = torch.randn(n, n, device=device, dtype=dtype)
        self.b = torch.randn(n, n, device=device, dtype=dtype)
        self.grads = torch.zeros(min(64 << 20, state[0].numel()), device=device)
        self.gemms = 1

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def calibrate(self, seconds: float) -> None:
        """Return the number of GEMMs that last about `seconds`, the same on all processes."""
        for _ in range(2):
            self.sync()
            begun = time.perf_counter()
            for _ in range(8):
                torch.mm(self.a, self.b)
            self.sync()
            each = (time.perf_counter() - begun) / 8
        count = torch.tensor([max(1, int(seconds / each))])
        dist.all_reduce(count, dist.ReduceOp.MIN)
        self.gemms = int(count)

    def run(self) -> None:
        """One step."""
        for _ in range(self.gemms):
            torch.mm(self.a, self.b)
        dist.all_reduce(self.grads)
        self.checkpointer.before_update()
        self.state.add_(1.0)
