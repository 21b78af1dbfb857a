"""Runs the fused_*.py files, each in a process where Triton interprets its kernels on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", sorted(p.name for p in HERE.glob("fused_*.py")))
@pytest.mark.xdist_group("triton")
def test_interpreted(file: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    pytest.importorskip("triton.runtime.interpreter", reason="this Triton has no interpreter")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)])}
    env.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
