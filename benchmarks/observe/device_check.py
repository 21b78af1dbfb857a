"""Timers on a real GPU compared with CUDA's own events: lengths, waits, clocks, and that the host waits for none."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from megascale.core.spans import SpanAxis, SpanKind
from megascale.observe.store.frames import SPANS

_SIZE = 8192
_GEMMS = 8
_SLEEP_CYCLES = 20_000_000


class _RecordedSteps:
    """Keeps the spans of every step."""

    def __init__(self) -> None:
        self.spans: dict[int, tuple[np.ndarray[Any, Any], int]] = {}

    def write(self, kind: int, step: int, records: np.ndarray[Any, Any], error_ns: int) -> None:
        if kind == SPANS:
            self.spans[step] = (records, error_ns)

    def is_requested(self, step: int) -> bool:
        return True

    def mark_sampled(self, step: int) -> None: ...


def measure(steps: int = 40) -> dict[str, Any]:
    """Steps of GEMMs with a stall on another stream in each; how timers and CUDA's own events differ, in seconds."""
    import torch

    from megascale import torch_private
    from megascale.observe.rank.device_timers import DeviceTimers

    device = torch.device("cuda", torch.cuda.current_device())
    a, b = (torch.randn(_SIZE, _SIZE, device=device).bfloat16() for _ in range(2))
    out, side = torch.empty_like(a), torch.cuda.Stream(device)
    main = torch.cuda.current_stream(device)
    for _ in range(3):
        torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    retained = _RecordedSteps()
    timers = DeviceTimers(device, retained)
    custom: list[list[Any]] = []
    queued = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        timers.begin_step(step)
        timers.begin_action(SpanKind.FORWARD, 0, 0)
        marks[0].record()
        for _ in range(_GEMMS):
            torch.mm(a, b, out=out)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch_private.cuda_sleep(_SLEEP_CYCLES)
        start = timers.mark()
        marks[1].record()
        main.wait_stream(side)
        timers.record_wait(start, SpanKind.WAIT, SpanAxis.TENSOR)
        marks[2].record()
        timers.end_action()
        marks[3].record()
        timers.end_step()
        queued.append(time.perf_counter() - began)
        custom.append(marks)
        if step > 2:
            custom[step - 3][3].synchronize()  # as the loop reads the loss of the step before
            timers.collect()
    custom[-1][3].synchronize()
    ended = time.perf_counter_ns()
    timers.close()
    lengths: list[float] = []
    stalls: list[float] = []
    device_seconds = []
    for step, matching in enumerate(custom, 1):
        spans = retained.spans[step][0]
        for kind, first, last, match in (
            (SpanKind.FORWARD, 0, 3, lengths),
            (SpanKind.WAIT, 1, 2, stalls),
        ):
            (span,) = spans[spans["kind"] == kind]
            local = matching[first].elapsed_time(matching[last]) / 1e3
            match.append(abs((int(span["end_ns"]) - int(span["start_ns"])) / 1e9 - local))
        device_seconds.append(matching[0].elapsed_time(matching[3]) / 1e3)
    last_spans, error_ns = retained.spans[steps]
    (forward,) = last_spans[last_spans["kind"] == SpanKind.FORWARD]
    return {
        "steps": steps,
        "told": len(retained.spans),
        "dropped": timers.dropped,
        "step_seconds": float(np.median(device_seconds)),
        "queue_seconds": float(np.median(queued)),
        "length_error": float(np.max(lengths)),
        "stall_error": float(np.max(stalls)),
        "clock_error": error_ns / 1e9,
        "clock_off": (ended - int(forward["end_ns"])) / 1e9,
    }


def missed(result: dict[str, Any]) -> list[str]:
    """Return the failed checks."""
    report = []
    if result["told"] != result["steps"] or result["dropped"]:
        report.append(f"{result['told']} of {result['steps']} steps were reported")
    if result["length_error"] > 50e-6 or result["stall_error"] > 50e-6:
        most = max(result["length_error"], result["stall_error"])
        report.append(f"lengths differ by {1e6 * most:.0f} us from CUDA's events")
    if result["queue_seconds"] > result["step_seconds"] / 2:
        report.append("the host waits for the device")
    if abs(result["clock_off"]) > result["clock_error"] + 300e-6:
        off, output = 1e3 * result["clock_off"], 1e3 * result["clock_error"]
        report.append(f"the device's clock is {off:.2f} ms off, and {output:.2f} were reported")
    return report
