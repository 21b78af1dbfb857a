"""Trainers that rest before every step, for jobs that only have to go on while something is done to them.

A step of a tiny model takes milliseconds: a job that is to last for as long as a test needs it would keep every core
busy meanwhile, and be the dearest part of the test. Python runs this file at its start where this folder is on
PYTHONPATH; tests/forked.py runs it in processes that have the trainer loaded.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ENGINE = "megascale.train.engine"
PAUSE = float(os.environ.get("MEGASCALE_TEST_REST", "0.03"))  # seconds


def _pace(module: ModuleType) -> None:
    step = module.Engine.step

    def rested(*inputs: Any, **more: Any) -> Any:
        time.sleep(PAUSE)
        return step(*inputs, **more)

    module.Engine.step = rested


class _Finder(MetaPathFinder):
    """Paces the engine once it is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _pace(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if ENGINE in sys.modules:
    _pace(sys.modules[ENGINE])
else:
    sys.meta_path.insert(0, _Finder())
