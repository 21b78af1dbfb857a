"""The repetition of failed tests: a test that fails alone fails the suite, an unsteady test is listed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "repeat_failed.py"
TESTS = """
import pathlib

def test_steady():
    pass

def test_broken():
    assert False

def test_sometimes():
    runs = pathlib.Path("runs")
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    assert len(runs.read_text()) < 3
"""


@pytest.mark.parametrize(
    ("failed", "code", "line"),
    [
        (["steady"], 0, "unsteady test_some.py::test_steady: passed 3 of 3 alone"),
        (["steady", "broken"], 1, "FAILED test_some.py::test_broken: passed 0 of 3 alone"),
        (["sometimes"], 1, "FAILED test_some.py::test_sometimes: passed 2 of 3 alone"),
        (["steady", "broken", "sometimes"], 1, "3 tests failed; only 1 to 2 are repeated"),
        ([], 1, "0 tests failed"),
    ],
)
def test_failed_tests_are_repeated_alone(tmp_path, failed, code, line):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "lastfailed").write_text(json.dumps({f"test_some.py::test_{name}": True for name in failed}))
    command = [sys.executable, str(SCRIPT), "--times", "3", "--most", "2", "--cache", "lastfailed"]
    # Without the environment's plugins each pytest process loads in a quarter of the time.
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    assert line in result.stdout
