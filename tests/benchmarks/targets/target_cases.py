"""Cases of `python -m benchmarks targets` and runs of them that were never made."""

from __future__ import annotations

from benchmarks.targets.cases import TargetCase
from benchmarks.targets.runs import Record, TargetJob, TargetRun


def case(name: str = "A", **keys) -> TargetCase:
    return TargetCase(
        **({"name": name, "title": name, "arguments": ["tiny"], "gpus": 1, "batch": 4, "seconds": 1} | keys)
    )


def make_result(seconds: float, **more) -> dict:
    config = case(arguments=["gpt-1.3b", "--train.micro_batch=4"]).config(1)
    settings = config.model_dump(mode="json", exclude_none=True, include={"model", "train"})
    details = {"settings": settings, "device": "1 x NVIDIA H200", "date": "2026-11-22", "versions": {"torch": "2.11.0"}}
    details |= {"step_seconds": seconds, "all_step_seconds": [seconds] * 20, "mfu": 0.6, "peak_memory_gib": 42.0}
    details |= {"gemm_flop_per_s": None, "mfu_convention": "convention; peak 1", "tokens_per_second_per_device": 1.0}
    return details | more


def add_runs(record: Record, single: TargetCase, *seconds: float, **more) -> None:
    replicas = single.replicas(record.gpus)
    for repeat, value in enumerate(seconds):
        record.keep(
            TargetJob(single, repeat, replicas, 1),
            TargetRun(single.key(replicas), replicas, "", 1.0, make_result(value, **more)),
        )
