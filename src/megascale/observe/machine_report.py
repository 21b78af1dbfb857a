"""Report on a machine's features for training, with the cost of each missing feature."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megascale.core.capacity import usable_cores


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        verdict: "good", "slow" (training works but is slower) or "missing" (a feature is off).
    """

    subject: str
    value: str
    verdict: Literal["good", "slow", "missing"]
    advice: str = ""


def examine_machine() -> list[Finding]:
    """Check Python, PyTorch, devices, memory, disk and optional packages."""
    import torch

    findings = [_check_python(), Finding("PyTorch", torch.__version__, "good")] + _check_devices()
    findings += [_check_cpu(), _check_shared_memory(), _check_disk()] + _check_programs() + _check_packages()
    return findings


def _check_python() -> Finding:
    return Finding("Python", f"{platform.python_version()} at {sys.executable}", "good")


def _check_devices() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        return [Finding("GPU", "none", "slow", "all features work on CPU with gloo; only small models are practical")]
    findings = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        findings.append(Finding(f"GPU {i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", "good"))
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    findings.append(Finding("NCCL", version, "good"))
    pairs = [(a, b) for a in range(len(findings) - 1) for b in range(len(findings) - 1) if a != b]
    if pairs and not all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs):
        findings.append(Finding("GPU peer access", "not among all", "slow", "fused tensor-parallel operators are off"))
    return findings


def _check_cpu() -> Finding:
    cores = usable_cores()
    cpu_info = Path("/proc/cpuinfo")
    flags: list[str] = []
    if cpu_info.exists():
        flags = [line for line in cpu_info.read_text().splitlines() if line.startswith("flags")]
    has_bf16 = bool(flags) and ("avx512_bf16" in flags[0] or "amx_bf16" in flags[0])
    if has_bf16:
        note = "bfloat16 GEMMs in hardware"
    else:
        note = "no bfloat16 GEMMs: train.precision=float32 is faster here"
    return Finding("CPU", f"{cores} cores usable", "good", note)


def _check_shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return Finding("shared memory", "no /dev/shm", "missing", "the processes of a host cannot share data")
    size = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.free < 1 << 30:
        return Finding("shared memory", size, "slow", "little room; in a container give --shm-size=8g or more")
    return Finding("shared memory", size, "good")


def _check_disk() -> Finding:
    usage = shutil.disk_usage(".")
    size = f"{usage.free / 2**30:.1f} GiB free here"
    if usage.free < 5 << 30:
        return Finding(
            "disk", size, "slow", "checkpoints need 12 bytes per parameter, and one more checkpoint while saving"
        )
    return Finding("disk", size, "good")


def _check_programs() -> list[Finding]:
    programs = {"redis-server": "start-up through redis:// needs a server (apt-get install redis-server)"}
    findings = []
    for name, consequence in programs.items():
        path = shutil.which(name)
        if path:
            findings.append(Finding(name, path, "good"))
        else:
            findings.append(Finding(name, "not found", "missing", consequence))
    return findings


def _check_packages() -> list[Finding]:
    packages = {
        "triton": "fused operators are off on GPUs; PyTorch's operators are used instead",
        "tensorboard": "no TensorBoard files are written",
        "matplotlib": "no plots are drawn",
    }
    findings = []
    for name, consequence in packages.items():
        if importlib.util.find_spec(name):
            findings.append(Finding(name, "installed", "good"))
        else:
            findings.append(Finding(name, "none", "missing", consequence))
    return findings
