"""Figures of one machine for the step simulator: GEMMs by shape, attention, streaming kernels, launches, collectives,
power. `megascale simulate measure` writes them into a cluster file. Works on a GPU and, slowly and small, on a CPU."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as functional

# Shapes [rows, columns, depth] of layers of 4,096 to 12,288, whole and cut over tensor ranks.
GPU_SHAPES = (
    (4096, 4096, 4096), (8192, 8192, 8192), (4096, 12288, 4096), (4096, 16384, 4096), (2048, 6144, 12288),
    (2048, 12288, 1536), (4096, 5120, 20480), (4096, 7680, 5120), (8192, 5120, 5120), (2048, 4608, 12288),
)  # fmt: skip
CPU_SHAPES = ((256, 256, 256), (512, 512, 512))
HEAD = 128


def clock(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median seconds of a call over about `seconds`, after a warm-up."""
    for _ in range(3):
        call()
    _wait(device)
    took: list[float] = []
    began = time.perf_counter()
    while len(took) < 3 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        call()
        _wait(device)
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gemms(device: torch.device, seconds: float) -> list[tuple[int, int, int, float]]:
    """(rows, columns, depth, TFLOP/s) of each shape, in a burst of milliseconds; bf16 on a GPU, fp32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = []
    for m, n, k in GPU_SHAPES if device.type == "cuda" else CPU_SHAPES:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        out = torch.empty(m, n, device=device, dtype=dtype)
        # Several in a row, so that the launch hides behind the one before.

        def several(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> None:
            for _ in range(8):
                torch.mm(a, b, out=out)

        took = clock(several, device, seconds / 20) / 8
        found.append((m, n, k, 2.0 * m * n * k / took / 1e12))
        if device.type == "cuda":
            time.sleep(min(1.0, seconds / 20))  # the power limit looks at the last tenths of a second
    return found


def sustained(device: torch.device, seconds: float) -> tuple[float, float | None]:
    """TFLOP/s of large GEMMs held for `seconds`, and watts in the middle of it (None where nothing tells)."""
    size = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    began, calls, watts = time.perf_counter(), 0, None
    _wait(device)
    while (past := time.perf_counter() - began) < seconds or not calls:
        for _ in range(10):
            torch.mm(a, b, out=out)
        if watts is None and past > seconds / 2:
            watts = board_watts(device)
        _wait(device)
        calls += 10
    return 2.0 * size**3 * calls / (time.perf_counter() - began) / 1e12, watts


def board_watts(device: torch.device) -> float | None:
    """What the GPU's board draws now, by nvidia-smi; None without one."""
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={uuid}", "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        return float(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0])
    return None


def attention(device: torch.device, seconds: float) -> list[tuple[int, float]]:
    """(sequence, TFLOP/s of the causal half, forward and backward together) of PyTorch's fastest kernel."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch, heads = (4, 32) if device.type == "cuda" else (1, 2)
    found = []
    for length in (2048, 8192) if device.type == "cuda" else (128,):
        q, k, v = (
            torch.randn(batch, heads, length, HEAD, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        )

        def both(q: Any = q, k: Any = k, v: Any = v) -> None:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            out.backward(torch.ones_like(out))

        half = 2.0 * batch * heads * length * length * HEAD
        found.append((length, 3.5 * half / clock(both, device, seconds / 4) / 1e12))
        batch = max(1, batch // 4)
    return found


def streaming(device: torch.device, seconds: float) -> tuple[float, float]:
    """GB/s of a large copy and of a large addition (bytes read and written)."""
    count = 2**28 if device.type == "cuda" else 2**22
    a, b = torch.ones(count, device=device), torch.ones(count, device=device)
    out = torch.empty_like(a)
    copy = clock(lambda: out.copy_(a), device, seconds / 8)
    add = clock(lambda: torch.add(a, b, out=out), device, seconds / 8)
    return 8.0 * count / copy / 1e9, 12.0 * count / add / 1e9


def launches(device: torch.device, seconds: float) -> float:
    """Microseconds of the host for one small eager kernel, many in a row."""
    x = torch.ones(16, device=device)

    def many() -> None:
        for _ in range(200):
            torch.add(x, 1.0, out=x)

    return clock(many, device, seconds / 10) / 200 * 1e6


def _collective(rank: int, world: int, store: str, cuda: bool, count: int, path: str) -> None:
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    try:
        mine = torch.ones(count // world, device=device)
        whole = torch.empty(count // world * world, device=device)
        pair = torch.empty_like(mine)

        def gather() -> None:
            dist.all_gather_into_tensor(whole, mine)

        def swap() -> None:
            other = rank ^ 1
            if other < world:
                first = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, pair, other)]
                for request in dist.batch_isend_irecv(first):
                    request.wait()

        took = [_rounds(call, device) for call in (gather, swap)]
        small = torch.ones(world, device=device)
        tiny = _rounds(lambda: dist.all_gather_into_tensor(small, small[:1].clone()), device)
        if rank == 0:
            torch.save((took, tiny, whole.numel() * 4, mine.numel() * 4), path)
    finally:
        dist.destroy_process_group()


def _rounds(call: Callable[[], object], device: torch.device, rounds: int = 10) -> float:
    """Seconds a call; the same count on every rank, since all must take part."""
    for _ in range(3):
        call()
    _wait(device)
    began = time.perf_counter()
    for _ in range(rounds):
        call()
    _wait(device)
    return (time.perf_counter() - began) / rounds


def collectives(cuda: bool, worlds: Sequence[int], megabytes: float) -> list[tuple[int, float, float, float]]:
    """(ranks, all-gather's bus GB/s, send-and-receive GB/s each way, microseconds of the smallest) on this host."""
    found = []
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "took.pt")
            arguments = (world, os.path.join(folder, "store"), cuda, int(megabytes * 2**18), path)
            mp.spawn(_collective, args=arguments, nprocs=world)
            (gather, swap), tiny, whole, mine = torch.load(path)
        found.append((world, whole * (world - 1) / world / gather / 1e9, mine / swap / 1e9, tiny * 1e6))
    return found


def measure_machine(device: torch.device, seconds: float, processes: int) -> dict[str, Any]:
    """All measurements of this machine, in minutes on a GPU with the default `seconds`.

    `processes`: for collectives; a pair and all of them are measured, one measures none.
    """
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    worlds = sorted({n for n in (2, processes) if 2 <= n <= processes})
    held, watts = sustained(device, seconds)
    return {
        "device": properties.name if properties else "cpu",
        "processors": properties.multi_processor_count if properties else torch.get_num_threads(),
        "memory_gib": properties.total_memory / 2**30 if properties else None,
        "host": socket.gethostname(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "gemms": gemms(device, seconds),
        "sustained_tflops": held,
        "watts": watts,
        "attention": attention(device, seconds),
        "copy_gbs": (streamed := streaming(device, seconds))[0],
        "add_gbs": streamed[1],
        "launch_us": launches(device, seconds),
        "collectives": collectives(device.type == "cuda", worlds, 64 if device.type == "cuda" else 1) if worlds else [],
    }
