"""Threads of OpenMP sleep where they wait: a command says so before torch loads the library."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# The library prints what it has understood when it is loaded.
CODE = """
import ctypes, sys
from megascale.cli.main import main
sys.argv[1:] = ["--version"]
try:
    main()
except SystemExit:
    pass
assert "torch" not in sys.modules
ctypes.CDLL({library!r})
"""


def library() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    result = list((Path(spec.origin or "").parent / "lib").glob("libgomp*.so*"))
    if not result:
        pytest.skip("this torch does not use GNU's OpenMP")
    return result[0]


@pytest.mark.parametrize(("inputs", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_sleep_at_barriers_unless_the_user_says_otherwise(inputs, expected):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "true", **inputs}
    command = [sys.executable, "-c", CODE.format(library=str(library()))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"OMP_WAIT_POLICY = '{expected}'" in done.stderr
