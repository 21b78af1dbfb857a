"""Runs the fused_*.py files in one process where Triton interprets its kernels on the CPU: loading costs as much as
most of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parent
FILES = sorted(p.stem for p in FOLDER.glob("fused_*.py"))

pytestmark = [pytest.mark.xdist_group("triton"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[ElementTree.Element]]:
    """Each file's test cases, as JUnit has them."""
    pytest.importorskip("triton", reason="Triton is not installed")
    pytest.importorskip("triton.runtime.interpreter", reason="this Triton has no interpreter")
    record = tmp_path_factory.mktemp("fused") / "record.xml"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path + [str(FOLDER)])}
    env.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={record}"]
    command += [str(FOLDER / f"{file}.py") for file in FILES]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=850)
    assert record.exists(), done.stdout[-6000:] + done.stderr[-2000:]
    result: dict[str, list[ElementTree.Element]] = {file: [] for file in FILES}
    for case in ElementTree.parse(record).iter("testcase"):
        result[case.get("classname", "").rpartition(".")[2] or case.get("name", "").rpartition(".")[2]].append(case)
    return result


@pytest.mark.parametrize("file", FILES)
def test_interpreted(file: str, outcomes: dict[str, list[ElementTree.Element]]) -> None:
    cases = outcomes[file]
    assert cases
    report = [
        f"{case.get('name')}: {part.tag}\n{part.text}" for case in cases for part in case if part.tag != "system-out"
    ]
    assert not report, "\n".join(report)[-6000:]
