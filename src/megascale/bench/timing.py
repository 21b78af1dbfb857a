"""Measurements of device time and of GEMM and copy rates.

Small functions are captured in a CUDA graph and replayed, so that their time excludes the launches by the host.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

REPEATS = 9  # timed replays; the median is taken


class GemmRates(NamedTuple):
    """FLOP/s of one GEMM, in a burst of milliseconds and sustained for seconds."""

    burst: float
    sustained: float


def measure_device_seconds(function: Callable[[], Any], replay_seconds: float = 2e-3) -> float:
    """Return the device seconds of one call: the median over REPEATS replays of a graph of several calls.

    A function that cannot be captured is timed call after call; without a GPU one call is timed. The current stream
    must not be the default stream, which cannot be captured.

    Args:
        replay_seconds: approximate duration of one replay, which has at most 64 calls.
    """
    if not torch.cuda.is_available():
        return _measure_cpu_seconds(function)
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    calls = max(1, min(64, round(replay_seconds / max(_measure_seconds_per_call(function, 3), 1e-7))))
    graph = torch.cuda.CUDAGraph()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                for _ in range(calls):
                    function()
        is_empty = False
        for warning in caught:
            if "Graph is empty" in str(warning.message):
                is_empty = True
            else:
                warnings.warn(warning.message, warning.category, stacklevel=2)
    except Exception:  # The function cannot be captured, for example because it synchronizes with the device.
        torch.cuda.synchronize()
        is_empty = True
    if is_empty:
        return _measure_seconds_per_call(function, REPEATS)
    graph.replay()
    return statistics.median(_measure_seconds_per_call(graph.replay, 1) for _ in range(REPEATS)) / calls


def measure_launch_seconds(function: Callable[[], Any], calls: int = 20) -> float | None:
    """Return the seconds that the host takes to launch one call, or None without a GPU.

    Without CUDA graphs, this time limits the speed of small micro-batches.
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


def _measure_seconds_per_call(function: Callable[[], Any], calls: int) -> float:
    start = torch.cuda.Event(enable_timing=True)
    stop = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        function()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls / 1e3


def _measure_cpu_seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure_copy_rate(device: torch.device, byte_count: int = 1 << 30) -> float:
    """Return the bytes/s, read plus written, of a device copy of `byte_count` bytes: the limit of memory-bound kernels.

    The result is the rate of a copy or of an elementwise kernel, whichever is larger. A copy inside a graph may use a
    copy engine, whose rate on an H200 is two thirds of a kernel's.
    """
    source = torch.zeros(byte_count // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_seconds = measure_device_seconds(lambda: target.copy_(source))
    kernel_seconds = measure_device_seconds(lambda: torch.neg(source, out=target))
    return 2 * source.nbytes / min(copy_seconds, kernel_seconds)


def measure_gemm_rates(device: torch.device, seconds: float = 2.0, size: int = 8192) -> GemmRates:
    """Measure a bfloat16 GEMM of [size, size] matrices in a burst of milliseconds, and sustained for `seconds`."""
    a = torch.randn(size, size, device=device).bfloat16()
    b = torch.randn(size, size, device=device).bfloat16()
    out = torch.empty_like(a)
    flops = 2 * size**3
    burst_rate = flops / measure_device_seconds(lambda: torch.mm(a, b, out=out), replay_seconds=1e-2)
    return GemmRates(burst_rate, measure_sustained_gemm_rate(device, seconds, size))


def measure_sustained_gemm_rate(device: torch.device, seconds: float, size: int = 8192) -> float:
    """Return the FLOP/s of a bfloat16 GEMM of [size, size] matrices, repeated for `seconds`."""
    a = torch.randn(size, size, device=device).bfloat16()
    b = torch.randn(size, size, device=device).bfloat16()
    out = torch.empty_like(a)
    calls = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(20):  # A batch of launches keeps the device busy while the host synchronizes.
            torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        calls += 20
    return 2 * size**3 * calls / (time.perf_counter() - start)
