"""All self-checks of a node in order. Rates are compared with those of earlier runs on the same kind of hardware."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megascale.errors import ConfigError
from megascale.resilience.diagnose import alltoall, compute, memory_check, nics
from megascale.resilience.diagnose.check import Expected, SelfCheck, describe_hardware, run_guarded

# The checks by name, in the order in which they run.
CHECKS: dict[str, Callable[[], Iterable[SelfCheck]]] = {
    "gemm": compute.check_gemms,
    "model": compute.check_small_model,
    "memory": memory_check.check_bandwidth,
    "patterns": memory_check.check_patterns,
    "host-device": memory_check.check_host_device,
    "device-pairs": memory_check.check_device_pairs,
    "all-to-all": alltoall.check_all_to_all,
    "nic-links": nics.check_links,
    "nic-streams": nics.check_streams,
    "rdma-ports": nics.check_rdma_ports,
    "rdma-loopback": nics.check_rdma_loopback,
}


def run_checks(names: Iterable[str], expected: Expected) -> Iterator[tuple[SelfCheck, float]]:
    """Run the named checks, all without names; yield (judged check, seconds since the previous one).

    Raises ConfigError for an unknown name.
    """
    names = list(names) or list(CHECKS)
    for name in names:
        if name not in CHECKS:
            raise ConfigError(f"there is no self-check {name!r}; known: {', '.join(CHECKS)}")
    for name in names:
        started = time.perf_counter()
        for check in run_guarded(name, CHECKS[name]):
            yield expected.judge(check), time.perf_counter() - started
            started = time.perf_counter()


def load_expectations(file: Path) -> Expected:
    """Return the expectations for this kind of machine. Raises DataError for a malformed file."""
    import torch

    return Expected.load(file, describe_hardware(), torch.__version__)


def make_report(kind: str, checks: Iterable[SelfCheck]) -> dict[str, Any]:
    """Return the report as a JSON object. `kind` describes the hardware."""
    checks = list(checks)
    return {
        "hardware": kind,
        "passed": all(check.has_passed for check in checks),
        "checks": [dataclasses.asdict(check) | {"passed": check.has_passed} for check in checks],
    }
