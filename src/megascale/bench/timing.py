"""Device time of small functions: captured in a CUDA graph and replayed, so that the host's pace does not count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

REPEATS = 9  # timed replays; the median is taken


def device_seconds(function: Callable[[], Any], target: float = 2e-3) -> float:
    """Seconds of device time of one call, the median of REPEATS replays of a graph that holds several calls.

    target: seconds that one replay should last at least. A function that cannot be captured is timed call after
    call; on CPU one call is timed. The current stream must not be the default one, which cannot be captured.
    """
    if not torch.cuda.is_available():
        return _host_seconds(function)
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    calls = max(1, min(64, round(target / max(_events(function, 3), 1e-7))))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(calls):
                function()
    except Exception:  # something in it waits for the device; its calls are timed as they are
        torch.cuda.synchronize()
        return _events(function, REPEATS)
    graph.replay()
    return statistics.median(_events(graph.replay, 1) for _ in range(REPEATS)) / calls


def host_seconds(function: Callable[[], Any], calls: int = 20) -> float | None:
    """Seconds the host needs to issue one call: what bounds small micro-batches without graphs. None on CPU."""
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


def _events(function: Callable[[], Any], calls: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls / 1e3


def _host_seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def copy_rate(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes a second (read + written) of a device copy of `size` bytes: the bound of what only moves bytes.

    The better of a copy and of a kernel that reads and writes: a copy inside a graph may go to a copy engine, which
    reaches two thirds of what kernels do on an H200.
    """
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return 2 * source.nbytes / min(device_seconds(way) for way in ways)


def gemm_rate(device: torch.device, seconds: float = 2.0, size: int = 8192) -> tuple[float, float]:
    """FLOP/s of a square bfloat16 GEMM: in a burst of milliseconds, and held for `seconds`."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    flops = 2 * size**3
    once = lambda: torch.mm(a, b, out=out)
    burst = flops / device_seconds(once, 1e-2)
    start = time.perf_counter()
    done = 0
    while time.perf_counter() - start < seconds:
        for _ in range(8):
            once()
        done += 8
        _synchronise()
    return burst, flops * done / (time.perf_counter() - start)
