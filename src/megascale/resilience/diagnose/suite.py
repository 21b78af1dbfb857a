"""All self-checks of a node in order, judged against what its kind of hardware has reached before."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megascale.errors import ConfigError
from megascale.resilience.diagnose import alltoall, compute, memory_check, nics
from megascale.resilience.diagnose.check import SelfCheck, guarded
from megascale.resilience.diagnose.expected import Expected, hardware

CHECKS: dict[str, Callable[[], Iterable[SelfCheck]]] = {
    "gemm": compute.gemms,
    "model": compute.small_model,
    "memory": memory_check.bandwidth,
    "patterns": memory_check.patterns,
    "host-device": memory_check.host_device,
    "device-pairs": memory_check.device_pairs,
    "all-to-all": alltoall.all_to_all,
    "nic-links": nics.links,
    "nic-streams": nics.streams,
    "rdma-ports": nics.rdma_ports,
    "rdma-loopback": nics.rdma_loopback,
}


def run_checks(names: Iterable[str], expected: Expected) -> Iterator[tuple[SelfCheck, float]]:
    """Run checks by name, each judged: (check, seconds since the one before). ConfigError for an unknown name."""
    names = list(names) or list(CHECKS)
    for name in names:
        if name not in CHECKS:
            raise ConfigError(f"there is no self-check {name!r}; known: {', '.join(CHECKS)}")
    for name in names:
        started = time.perf_counter()
        for check in guarded(name, CHECKS[name]):
            yield expected.judge(check), time.perf_counter() - started
            started = time.perf_counter()


def expectations(file: Path) -> Expected:
    """What is known of this machine's kind."""
    import torch

    return Expected.load(file, hardware(), torch.__version__)


def as_json(kind: str, checks: Iterable[SelfCheck]) -> dict[str, Any]:
    """The report for machines."""
    checks = list(checks)
    return {
        "hardware": kind,
        "passed": all(check.passed for check in checks),
        "checks": [dataclasses.asdict(check) | {"passed": check.passed} for check in checks],
    }
