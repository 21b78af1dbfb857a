"""Measurements of a machine for the step simulator: GEMMs, attention, copies, launches, power and collectives.

`megascale simulate measure` writes the results into a cluster file. The measurements run on a GPU or, with smaller
sizes, on a CPU.
"""

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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as functional


class MeasuredSizes(NamedTuple):
    """Sizes of the measured operators.

    Attributes:
        gemms: rows, columns and depth of each GEMM.
        sustained: rows, columns and depth of the sustained GEMM.
        sequences: sequence lengths of attention, each four times as long as the previous one.
        batch, heads: batch of attention at the first length, and its heads.
        elements: elements of a streamed tensor.
        mebibytes: size of a gathered tensor.
    """

    gemms: tuple[tuple[int, int, int], ...]
    sustained: int
    sequences: tuple[int, ...]
    batch: int
    heads: int
    elements: int
    mebibytes: int


GPU_SIZES = MeasuredSizes(
    # Layers of width 4,096 to 12,288, unsharded and sharded over tensor ranks.
    gemms=(
        (4096, 4096, 4096), (8192, 8192, 8192), (4096, 12288, 4096), (4096, 16384, 4096), (2048, 6144, 12288),
        (2048, 12288, 1536), (4096, 5120, 20480), (4096, 7680, 5120), (8192, 5120, 5120), (2048, 4608, 12288),
    ),
    sustained=8192,
    sequences=(2048, 8192),
    batch=4,
    heads=32,
    elements=2**28,
    mebibytes=64,
)  # fmt: skip
CPU_SIZES = MeasuredSizes(
    gemms=((256, 256, 256), (512, 512, 512)),
    sustained=512,
    sequences=(128,),
    batch=1,
    heads=2,
    elements=2**22,
    mebibytes=1,
)
HEAD_WIDTH = 128
_GEMMS_PER_CALL = 8  # GEMMs that run in a row, so that each launch overlaps with the previous GEMM
_LAUNCHES_PER_CALL = 200


class GemmRate(NamedTuple):
    """Rate of a GEMM [rows, depth] x [depth, columns]."""

    rows: int
    columns: int
    depth: int
    tflops: float


class CollectiveRate(NamedTuple):
    """Rates of collectives between `ranks` ranks.

    Attributes:
        bus_gbs: bus GB/s of an all-gather: bytes that each rank receives, per second.
        exchange_gbs: GB/s of a send and receive between pairs of ranks, in each direction.
        small_us: microseconds of an all-gather of one element per rank.
    """

    ranks: int
    bus_gbs: float
    exchange_gbs: float
    small_us: float


def measure_seconds(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median seconds of a call, measured for about `seconds` after a warm-up."""
    for _ in range(3):
        call()
    _synchronise(device)
    durations: list[float] = []
    begin = time.perf_counter()
    while len(durations) < 3 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        _synchronise(device)
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def _synchronise(device: torch.device) -> None:
    """Wait until a GPU is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _choose_sizes(device: torch.device) -> MeasuredSizes:
    if device.type == "cuda":
        return GPU_SIZES
    return CPU_SIZES


def _choose_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 for a GPU, float32 for a CPU."""
    if device.type == "cuda":
        return torch.bfloat16
    return torch.float32


def measure_gemms(device: torch.device, seconds: float) -> list[GemmRate]:
    """Return the rate of each shape in short bursts, with pauses in between: bf16 on a GPU, fp32 on a CPU.

    Args:
        seconds: time of all measurements, roughly.
    """
    dtype = _choose_dtype(device)
    results = []
    for m, n, k in _choose_sizes(device).gemms:
        a = torch.randn(m, k, device=device, dtype=dtype)
        b = torch.randn(k, n, device=device, dtype=dtype)
        out = torch.empty(m, n, device=device, dtype=dtype)

        def run_gemms(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> None:
            for _ in range(_GEMMS_PER_CALL):
                torch.mm(a, b, out=out)

        gemm_seconds = measure_seconds(run_gemms, device, seconds / 20) / _GEMMS_PER_CALL
        results.append(GemmRate(m, n, k, tflops=2.0 * m * n * k / gemm_seconds / 1e12))
        if device.type == "cuda":
            # The power limit holds for the mean power over tenths of a second, so a pause restores the full clock.
            time.sleep(min(1.0, seconds / 20))
    return results


def measure_sustained(device: torch.device, seconds: float) -> tuple[float, float | None]:
    """Return the TFLOP/s of large GEMMs over `seconds`, and the power in watts after half of the time.

    The power is None if it cannot be read.
    """
    size = _choose_sizes(device).sustained
    dtype = _choose_dtype(device)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    begin = time.perf_counter()
    calls = 0
    watts = None
    _synchronise(device)
    while time.perf_counter() - begin < seconds or not calls:
        for _ in range(10):
            torch.mm(a, b, out=out)
        if watts is None and time.perf_counter() - begin > seconds / 2:
            watts = read_board_watts(device)
        _synchronise(device)
        calls += 10
    return 2.0 * size**3 * calls / (time.perf_counter() - begin) / 1e12, watts


def read_board_watts(device: torch.device) -> float | None:
    """Return the current power of the GPU's board from nvidia-smi; None without it."""
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={uuid}", "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        return float(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0])
    return None


def measure_attention(device: torch.device, seconds: float) -> list[tuple[int, float]]:
    """Return sequence length and TFLOP/s of causal attention, forward and backward, by the kernel that PyTorch chooses.

    The FLOPs are those of the causal half of the scores.
    """
    dtype = _choose_dtype(device)
    sizes = _choose_sizes(device)
    batch = sizes.batch
    heads = sizes.heads
    results = []
    for length in sizes.sequences:
        q, k, v = (
            torch.randn(batch, heads, length, HEAD_WIDTH, device=device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )

        def run_forward_and_backward(q: Any = q, k: Any = k, v: Any = v) -> None:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            out.backward(torch.ones_like(out))

        # Forward has two GEMMs. Per head and channel, each has length x length / 2 products of 2 FLOPs. Forward and
        # backward have seven GEMMs, 3.5 times as many.
        forward_flops = 2.0 * batch * heads * length * length * HEAD_WIDTH
        pass_seconds = measure_seconds(run_forward_and_backward, device, seconds / 4)
        results.append((length, 3.5 * forward_flops / pass_seconds / 1e12))
        batch = max(1, batch // 4)  # the next length is four times as long
    return results


def measure_streaming(device: torch.device, seconds: float) -> tuple[float, float]:
    """Return GB/s of a large float32 copy and of a large float32 addition, counting bytes read and written."""
    element_count = _choose_sizes(device).elements
    a = torch.ones(element_count, device=device)
    b = torch.ones(element_count, device=device)
    out = torch.empty_like(a)
    copy_seconds = measure_seconds(lambda: out.copy_(a), device, seconds / 8)
    add_seconds = measure_seconds(lambda: torch.add(a, b, out=out), device, seconds / 8)
    # A copy transfers 8 bytes per element, an addition 12.
    return 8.0 * element_count / copy_seconds / 1e9, 12.0 * element_count / add_seconds / 1e9


def measure_launch(device: torch.device, seconds: float) -> float:
    """Return the microseconds that the host takes to launch a small eager kernel."""
    x = torch.ones(16, device=device)

    def launch_kernels() -> None:
        for _ in range(_LAUNCHES_PER_CALL):
            torch.add(x, 1.0, out=x)

    return measure_seconds(launch_kernels, device, seconds / 10) / _LAUNCHES_PER_CALL * 1e6


def _run_collectives(rank: int, world: int, store: str, is_cuda: bool, element_count: int, path: str) -> None:
    """Measure collectives in one of `world` processes; rank 0 saves the results to the file `path` as a dictionary.

    Args:
        store: file through which the processes meet.
        element_count: float32 elements of the gathered tensor.
    """
    if is_cuda:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    try:
        shard = torch.ones(element_count // world, device=device)
        gathered = torch.empty(element_count // world * world, device=device)
        received = torch.empty_like(shard)

        def gather() -> None:
            dist.all_gather_into_tensor(gathered, shard)

        def exchange_with_peer() -> None:
            peer = rank ^ 1  # ranks 0 and 1, 2 and 3, ...
            if peer < world:
                operations = [dist.P2POp(dist.isend, shard, peer), dist.P2POp(dist.irecv, received, peer)]
                for request in dist.batch_isend_irecv(operations):
                    request.wait()

        small = torch.ones(world, device=device)
        results = {
            "gather_seconds": _measure_rounds(gather, device),
            "exchange_seconds": _measure_rounds(exchange_with_peer, device),
            "small_seconds": _measure_rounds(lambda: dist.all_gather_into_tensor(small, small[:1].clone()), device),
            "gathered_bytes": gathered.numel() * 4,
            "shard_bytes": shard.numel() * 4,
        }
        if rank == 0:
            torch.save(results, path)
    finally:
        dist.destroy_process_group()


def _measure_rounds(call: Callable[[], object], device: torch.device, rounds: int = 10) -> float:
    """Return the seconds per call. The number of calls is fixed, because every rank must take part in each call."""
    for _ in range(3):
        call()
    _synchronise(device)
    start = time.perf_counter()
    for _ in range(rounds):
        call()
    _synchronise(device)
    return (time.perf_counter() - start) / rounds


def measure_collectives(is_cuda: bool, world_sizes: Sequence[int], mebibytes: float) -> list[CollectiveRate]:
    """Measure collectives with several numbers of ranks.

    Args:
        world_sizes: the numbers of ranks, with one measurement each.
        mebibytes: size of the gathered tensor, float32.
    """
    results = []
    for world in world_sizes:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "results.pt")
            arguments = (world, os.path.join(folder, "store"), is_cuda, int(mebibytes * 2**18), path)
            mp.spawn(_run_collectives, args=arguments, nprocs=world)
            measured = torch.load(path)
        received_bytes = measured["gathered_bytes"] * (world - 1) / world
        results.append(
            CollectiveRate(
                ranks=world,
                bus_gbs=received_bytes / measured["gather_seconds"] / 1e9,
                exchange_gbs=measured["shard_bytes"] / measured["exchange_seconds"] / 1e9,
                small_us=measured["small_seconds"] * 1e6,
            )
        )
    return results


def _describe_device(device: torch.device) -> dict[str, Any]:
    """Return the name, the SMs and the memory of a GPU, or the threads of a CPU."""
    if device.type != "cuda":
        return {"device": "cpu", "processors": torch.get_num_threads(), "memory_gib": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "memory_gib": properties.total_memory / 2**30,
    }


def measure_machine(
    device: torch.device, seconds: float, processes: int, report: Callable[[str], object] = lambda name: None
) -> dict[str, Any]:
    """Return all measurements of this machine.

    Args:
        seconds: time of the sustained GEMMs; other measurements take fractions of it.
        processes: largest number of ranks of the collectives; two ranks are measured too. 1 measures no collectives.
        report: called with the name of each kind of measurement before it begins.
    """
    is_cuda = device.type == "cuda"
    mebibytes = _choose_sizes(device).mebibytes
    world_sizes = sorted({n for n in (2, processes) if 2 <= n <= processes})
    report("sustained GEMMs")
    sustained_tflops, watts = measure_sustained(device, seconds)
    report("GEMMs of several shapes")
    gemms = measure_gemms(device, seconds)
    report("attention")
    attention = measure_attention(device, seconds)
    report("copies and additions")
    copy_gbs, add_gbs = measure_streaming(device, seconds)
    report("launches")
    launch_us = measure_launch(device, seconds)
    report("collectives")
    collectives = measure_collectives(is_cuda, world_sizes, mebibytes)
    return {
        **_describe_device(device),
        "host": socket.gethostname(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "gemms": gemms,
        "sustained_tflops": sustained_tflops,
        "watts": watts,
        "attention": attention,
        "copy_gbs": copy_gbs,
        "add_gbs": add_gbs,
        "launch_us": launch_us,
        "collectives": collectives,
    }
