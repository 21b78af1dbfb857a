"""`python -m tests.chaos soak --parts crashes`: jobs whose ranks end at one step in every start, by one cause each.

Each must end by itself within ten starts, with exit code 1 and a verdict that names the step and the samples that it
trains. A cause during a save does not belong to a step: that job must end, and name no samples.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.launched import Launched, make
from tests.chaos.soak.command import Report, SoakCase

MOST = 10  # starts
BATCH = 4  # samples a step, as launched.make has it
GRACE_PERIOD = 900.0  # seconds; only a job that never ends takes them


@dataclass(frozen=True)
class CrashCause:
    """Cause that ends the ranks. named: whether the verdict must name the step and its samples."""

    name: str
    fault: dict[str, Any]
    ranks: tuple[int, ...] = (0, 1)
    words: tuple[str, ...] = ()
    named: bool = True


_CUDA = "CUDA error: an illegal memory access was encountered"
_NETWORK = "NCCL error: remote process exited or there was a network error"
CAUSES = (
    CrashCause("segfault", {"kind": "segfault"}),
    CrashCause("CUDA error", {"kind": "exception", "text": _CUDA}),
    CrashCause("network error", {"kind": "exception", "text": _NETWORK}),
    CrashCause("exit code 9", {"kind": "exception", "code": 9}),
    CrashCause("segfault of one rank", {"kind": "segfault"}, (1,)),
    CrashCause("exception", {"kind": "exception"}),
    CrashCause("hang", {"kind": "spin"}, (1,)),
    CrashCause("CUDA error of one rank", {"kind": "exception", "text": _CUDA}, (1,)),
    CrashCause("out of memory", {"kind": "out-of-memory"}),
    CrashCause(
        "killed while saving",
        {"kind": "half-checkpoint"},
        words=(
            "--checkpoint.interval=2",
            "--checkpoint.background=false",
            "--checkpoint.memory_interval=0",
            "--checkpoint.replicas=false",
        ),
        named=False,
    ),
)


def run(cases: range, seed: int, folder: Path, report: Report) -> None:
    """A job a case, one cause after the other, each at a random step."""
    file = make(folder)
    rng = random.Random(seed)
    steps = [rng.randrange(3, 13) for _ in range(cases.stop)]  # of the cases before the first, too
    for number in cases:
        cause, step = CAUSES[number % len(CAUSES)], steps[number]
        report(_case(file, f"crash-{number}", cause, step))


def _case(file: Path, name: str, cause: CrashCause, step: int) -> SoakCase:
    faults = [json.dumps(cause.fault | {"rank": rank, "step": step, "persistent": True}) for rank in cause.ranks]
    arguments = ["--train.steps=100", "--resilience.test_spares=false"] + list(cause.words)
    job = Launched(file, name, arguments, pace=0.01, faults=faults)
    try:
        code = job.end(GRACE_PERIOD)
    finally:
        job.end(0.1)
        job.end_agents()
    subject = f"{cause.name} at step {step} in rank{'s' * (len(cause.ranks) > 1)} {', '.join(map(str, cause.ranks))}"
    events = job.events()
    starts = sum(e.kind == "attempt_started" for e in events)
    fatal = [e for e in events if e.kind == "fatal_step"]
    wrong = []
    if code != 1:
        wrong.append(f"exit code {code}" if code >= 0 else f"it did not end within {GRACE_PERIOD:g} s")
    if starts > MOST:
        wrong.append(f"{starts} starts")
    if cause.named:
        first = (step - 1) * BATCH
        samples = [s["sample"] for s in (fatal[0].details.get("samples") or ())] if fatal else None
        if not fatal or fatal[0].details.get("step") != step:
            wrong.append(f"step {step} is not named: {[e.evidence for e in fatal]}")
        elif samples != list(range(first, first + BATCH)):
            wrong.append(f"samples {samples} are named in place of {first} to {first + BATCH - 1}")
    elif fatal:
        wrong.append(f"a step is named: {fatal[0].evidence}")
    if wrong:
        return SoakCase(subject, False, "; ".join(wrong))
    named = f", step {step} and samples {first} to {first + BATCH - 1} named" if cause.named else ", no step named"
    return SoakCase(subject, True, f"ended after {starts} start{'s' * (starts > 1)}{named}")
