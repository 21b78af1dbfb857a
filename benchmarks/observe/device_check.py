"""Timers on a real GPU beside CUDA's own events: lengths, waits, the clocks, and that the host waits for none."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from megascale.core.spans import SpanAxis, SpanKind
from megascale.observe.store.frames import SPANS

_SIZE, _GEMMS, _SLEEP_CYCLES = 8192, 8, 20_000_000


class _Kept:
    """Keeps the spans of every step."""

    def __init__(self) -> None:
        self.spans: dict[int, tuple[np.ndarray[Any, Any], int]] = {}

    def write(self, kind: int, step: int, records: np.ndarray[Any, Any], error_ns: int) -> None:
        if kind == SPANS:
            self.spans[step] = (records, error_ns)

    def wants(self, step: int) -> bool:
        return True

    def keeps(self, step: int) -> None: ...


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
    kept = _Kept()
    timers = DeviceTimers(device, kept)
    own: list[list[Any]] = []
    queued = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        timers.step_begins(step)
        timers.begin_action(SpanKind.FORWARD, 0, 0)
        marks[0].record()
        for _ in range(_GEMMS):
            torch.mm(a, b, out=out)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch_private.cuda_sleep(_SLEEP_CYCLES)
        since = timers.mark()
        marks[1].record()
        main.wait_stream(side)
        timers.record_wait(since, SpanKind.WAIT, SpanAxis.TENSOR)
        marks[2].record()
        timers.end_action()
        marks[3].record()
        timers.step_ended()
        queued.append(time.perf_counter() - began)
        own.append(marks)
        if step > 2:
            own[step - 3][3].synchronize()  # as the loop reads the loss of the step before
            timers.collect()
    own[-1][3].synchronize()
    ended = time.perf_counter_ns()
    timers.close()
    lengths: list[float] = []
    stalls: list[float] = []
    device_seconds = []
    for step, its in enumerate(own, 1):
        spans = kept.spans[step][0]
        for kind, first, last, found in (
            (SpanKind.FORWARD, 0, 3, lengths),
            (SpanKind.WAIT, 1, 2, stalls),
        ):
            (span,) = spans[spans["kind"] == kind]
            mine = its[first].elapsed_time(its[last]) / 1e3
            found.append(abs((int(span["end_ns"]) - int(span["start_ns"])) / 1e9 - mine))
        device_seconds.append(its[0].elapsed_time(its[3]) / 1e3)
    last_spans, error_ns = kept.spans[steps]
    (forward,) = last_spans[last_spans["kind"] == SpanKind.FORWARD]
    return {
        "steps": steps,
        "told": len(kept.spans),
        "dropped": timers.dropped,
        "step_seconds": float(np.median(device_seconds)),
        "queue_seconds": float(np.median(queued)),
        "length_error": float(np.max(lengths)),
        "stall_error": float(np.max(stalls)),
        "clock_error": error_ns / 1e9,
        "clock_off": (ended - int(forward["end_ns"])) / 1e9,
    }


def missed(found: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    told = []
    if found["told"] != found["steps"] or found["dropped"]:
        told.append(f"{found['told']} of {found['steps']} steps were told")
    if found["length_error"] > 50e-6 or found["stall_error"] > 50e-6:
        most = max(found["length_error"], found["stall_error"])
        told.append(f"lengths differ by {1e6 * most:.0f} us from CUDA's events")
    if found["queue_seconds"] > found["step_seconds"] / 2:
        told.append("the host waits for the device")
    if abs(found["clock_off"]) > found["clock_error"] + 300e-6:
        off, said = 1e3 * found["clock_off"], 1e3 * found["clock_error"]
        told.append(f"the device's clock is {off:.2f} ms off, and {said:.2f} were told")
    return told
