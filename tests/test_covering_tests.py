"""`scripts/covering_tests.py`: factors of a job, and the cheapest tests that cover what all cover."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.exact.cases import case

FOLDER = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    module = ModuleType("")
    for name in ("redundant_tests", "covering_tests"):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module


def test_factors_are_axes_and_settings_in_classes(script: ModuleType) -> None:
    layout = case(2, 2, 1, microbatches=3, model={"window": 3, "dropout": 0.1}, parallel={"recompute": "full"})
    factors = script.describe_job(test_factors_are_axes_and_settings_in_classes, layout.world, (layout.tree, 2, True))
    expected = {
        "world": "several",
        "parallel.tensor": "several",
        "parallel.data": "1",
        "parallel.recompute": "full",
        "model.window": "set",
        "micro-batches": "uneven",
        "argument 2": "True",
    }
    assert factors.items() >= expected.items()
    assert "argument 1" not in factors  # the number of steps
    assert factors["job"] == "test_factors_are_axes_and_settings_in_classes"


def make_record(lines: list[int], **factors: str) -> dict[str, Any]:
    """Return what `record` writes of a test with one job."""
    job = [factors] if factors else []
    return {"lines": {"src/a.py": lines}, "jobs": job, "parameters": {}, "is_parametrized": True, "is_campaign": False}


def choose(script: ModuleType, records: dict[str, Any], seconds: dict[str, float]) -> set[str]:
    return script.choose(script.list_candidates(records, seconds), ())


def test_the_cheapest_tests_with_all_pairs_stay(script: ModuleType) -> None:
    records = {f"t.py::f[{a}{b}]": make_record([1], tensor=a, zero=b) for a in ("1", "2") for b in ("0", "3")}
    assert choose(script, records, dict.fromkeys(records, 1.0)) == set(records)
    records["t.py::f[again]"] = make_record([1], tensor="2", zero="3")
    seconds = dict.fromkeys(records, 1.0) | {"t.py::f[23]": 2.0}
    assert choose(script, records, seconds) == set(records) - {"t.py::f[23]"}


def test_a_pair_may_be_in_another_function_and_a_value_may_not(script: ModuleType) -> None:
    records = {
        "t.py::f[0]": make_record([1], tensor="1", zero="0"),
        "t.py::f[1]": make_record([1], tensor="1", zero="3"),
        "t.py::f[2]": make_record([1], tensor="2", zero="0"),
        "t.py::f[3]": make_record([1], tensor="2", zero="3"),
        "t.py::g[0]": make_record([1], tensor="2", zero="3"),
    }
    seconds = dict.fromkeys(records, 1.0)
    assert choose(script, records, seconds) == set(records) - {"t.py::f[3]"}
    del records["t.py::f[2]"]  # now only f[3] has this value in its function
    assert choose(script, records, seconds) == set(records)


def test_lines_are_covered_in_the_same_file(script: ModuleType) -> None:
    records = {
        "t.py::f[0]": make_record([1, 2]),
        "t.py::f[1]": make_record([2]),
        "u.py::f[1]": make_record([2]),
    }
    assert choose(script, records, {}) == {"t.py::f[0]", "u.py::f[1]"}


def test_values_that_tests_share_are_factors_and_names_are_not(script: ModuleType) -> None:
    records = {f"t.py::f[{name}]": make_record([1]) for name in "abc"}
    for name, record in records.items():
        record["parameters"] = {"name": name, "is_late": str(name.endswith("c]"))}
    records["t.py::f[d]"] = records["t.py::f[c]"] | {"parameters": {"name": "d", "is_late": "True"}}
    chosen = choose(script, records, {})
    assert len(chosen & {"t.py::f[a]", "t.py::f[b]"}) == 1
    assert len(chosen & {"t.py::f[c]", "t.py::f[d]"}) == 1
