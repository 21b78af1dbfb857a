"""Device time of small functions, captured in a CUDA graph and replayed, so that launch time does not count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

REPEATS = 9  # timed replays; the median is taken


class GemmRates(NamedTuple):
    """FLOP/s of one GEMM, in a burst of milliseconds and sustained for seconds."""

    burst: float
    sustained: float


def device_seconds(function: Callable[[], Any], replay_seconds: float = 2e-3) -> float:
    """Return seconds of device time of one call, the median of REPEATS replays of a graph of several calls.

    A function that cannot be captured is timed call after call; on CPU one call is timed. The current stream must not
    be the default one, which cannot be captured.

    Args:
        replay_seconds: approximate duration of one replay (at most 64 calls).
    """
    if not torch.cuda.is_available():
        return _cpu_seconds(function)
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    calls = max(1, min(64, round(replay_seconds / max(_seconds_per_call(function, 3), 1e-7))))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(calls):
                function()
    except Exception:  # it synchronizes with the device
        torch.cuda.synchronize()
        return _seconds_per_call(function, REPEATS)
    graph.replay()
    return statistics.median(_seconds_per_call(graph.replay, 1) for _ in range(REPEATS)) / calls


def launch_seconds(function: Callable[[], Any], calls: int = 20) -> float | None:
    """Return the host time to launch one call in seconds, None on CPU.

    It limits small micro-batches when CUDA graphs are off.
    """
    if not torch.cuda.is_available():
        return None
    function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls


def _seconds_per_call(function: Callable[[], Any], calls: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls / 1e3


def _cpu_seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def copy_rate(device: torch.device, size: int = 1 << 30) -> float:
    """Return bytes/s (read + written) of a device copy of `size` bytes, the upper limit for memory-bound kernels.

    It is the larger rate of a copy and of a kernel that reads and writes. A copy inside a graph may go to a copy
    engine, whose rate on an H200 is two thirds of a kernel's.
    """
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_seconds = device_seconds(lambda: target.copy_(source))
    kernel_seconds = device_seconds(lambda: torch.neg(source, out=target))
    return 2 * source.nbytes / min(copy_seconds, kernel_seconds)


def measure_gemm_rates(device: torch.device, seconds: float = 2.0, size: int = 8192) -> GemmRates:
    """Measure a square bfloat16 GEMM in a burst of milliseconds, and sustained for `seconds`."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    flops = 2 * size**3
    burst = flops / device_seconds(lambda: torch.mm(a, b, out=out), 1e-2)
    return GemmRates(burst, sustained_gemm_rate(device, seconds, size))


def sustained_gemm_rate(device: torch.device, seconds: float, size: int = 8192) -> float:
    """Return FLOP/s of a square bfloat16 GEMM that runs for `seconds`."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    calls = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(20):
            torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        calls += 20
    return 2 * size**3 * calls / (time.perf_counter() - start)
