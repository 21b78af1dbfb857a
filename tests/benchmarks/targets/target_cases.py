"""Cases of `python -m benchmarks targets`, and made-up runs of them."""

from __future__ import annotations

from benchmarks.targets.cases import TargetCase
from benchmarks.targets.runs import ResultFile, TargetJob, TargetRun


def case(name: str = "A", **keys) -> TargetCase:
    """Return a case of one GPU with these keys."""
    defaults = {"name": name, "title": name, "arguments": ["tiny"], "gpus": 1, "batch": 4, "seconds": 1}
    return TargetCase(**(defaults | keys))


def make_run(item: TargetCase, replicas: int = 1, *, seconds: float = 1.0, report: dict | None = None) -> TargetRun:
    return TargetRun(item.make_key(replicas), replicas, command="", seconds=seconds, report=report)


def make_report(seconds: float, **more) -> dict:
    """Return what `bench train` reports for steps of so many seconds."""
    config = case(arguments=["gpt-1.3b", "--train.micro_batch=4"]).make_config(1)
    settings = config.model_dump(mode="json", exclude_none=True, include={"model", "train"})
    report = {"settings": settings, "device": "1 x NVIDIA H200", "date": "2026-11-22", "versions": {"torch": "2.11.0"}}
    report |= {"step_seconds": seconds, "all_step_seconds": [seconds] * 20, "mfu": 0.6, "peak_memory_gib": 42.0}
    report |= {"gemm_flop_per_s": None, "mfu_convention": "convention; peak 1", "tokens_per_second_per_device": 1.0}
    return report | more


def add_runs(results: ResultFile, item: TargetCase, *seconds: float, **more) -> None:
    """Save a run of each of these steps in seconds."""
    replicas = item.count_replicas(results.gpus)
    for repeat, step_seconds in enumerate(seconds):
        job = TargetJob(item, repeat, replicas=replicas, seconds=1)
        results.save(job, make_run(item, replicas, report=make_report(step_seconds, **more)))
