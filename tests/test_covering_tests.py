"""`scripts/covering_tests.py`: factors of a job, and the cheapest tests that cover what all cover."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megascale.core.batch import SampleFields
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
    arguments = (layout.tree, 2, True, SampleFields(positions=True), "/tmp/checkpoints")
    factors = script.describe_job(test_factors_are_axes_and_settings_in_classes, layout.world, arguments)
    expected = {
        "world": "several",
        "parallel.tensor": "several",
        "parallel.data": "1",
        "parallel.recompute": "full",
        "model.window": "set",
        "micro-batches": "uneven",
        "argument 2": "True",
        "SampleFields.positions": "True",
    }
    assert factors.items() >= expected.items()
    assert factors.keys().isdisjoint(("argument 1", "SampleFields.loss_weights", "argument 4"))
    assert factors["job"] == "test_factors_are_axes_and_settings_in_classes"


def make_record(lines: list[int], **factors: str) -> dict[str, Any]:
    """Return what `record` writes of a test with one job, with factors of the section `parallel`."""
    job = [{f"parallel.{name}": value for name, value in factors.items()}] if factors else []
    return {"lines": {"src/a.py": lines}, "jobs": job, "parameters": {}, "is_campaign": False}


def choose(script: ModuleType, records: dict[str, Any], seconds: dict[str, float]) -> set[str]:
    return script.choose(script.list_candidates(records, seconds), ())


def test_the_cheapest_tests_with_all_pairs_stay(script: ModuleType) -> None:
    records = {f"t.py::f[{a}{b}]": make_record([1], tensor=a, data=b) for a in "23" for b in "23"}
    assert choose(script, records, dict.fromkeys(records, 1.0)) == set(records)
    records["u.py::f[again]"] = make_record([1], tensor="3", data="3", pipeline="1")
    seconds = dict.fromkeys(records, 1.0) | {"t.py::f[33]": 2.0}
    assert choose(script, records, seconds) == set(records) - {"t.py::f[33]"}


def test_defaults_form_no_pairs(script: ModuleType) -> None:
    records = {
        "t.py::f[0]": make_record([1], tensor="2", pipeline="1"),
        "t.py::f[1]": make_record([1], tensor="2", zero="3"),
    }
    assert choose(script, records, {}) == {"t.py::f[1]"}


def test_values_of_other_factors_are_covered_without_pairs(script: ModuleType) -> None:
    records = {f"t.py::f[{a}{b}]": make_record([1], tensor=a, transfers=b) for a in "23" for b in ("async", "off")}
    chosen = choose(script, records, dict.fromkeys(records, 1.0))
    assert len(chosen) == 2
    assert {record["jobs"][0]["parallel.tensor"] for name, record in records.items() if name in chosen} == {"2", "3"}
    transfers = {record["jobs"][0]["parallel.transfers"] for name, record in records.items() if name in chosen}
    assert transfers == {"async", "off"}


def test_each_line_and_each_function_has_a_test(script: ModuleType) -> None:
    records = {
        "t.py::f[0]": make_record([1, 2]),
        "t.py::f[1]": make_record([2]),
        "u.py::f[1]": make_record([2]),
        "u.py::f[2]": make_record([1, 2, 3]),
    }
    assert choose(script, records, {}) == {"t.py::f[0]", "u.py::f[2]"}


def test_values_that_tests_share_are_factors_and_names_are_not(script: ModuleType) -> None:
    records = {f"t.py::f[{name}]": make_record([1]) for name in "abc"}
    for name, record in records.items():
        record["parameters"] = {"name": name, "is_late": str(name.endswith("c]"))}
    records["t.py::f[d]"] = records["t.py::f[c]"] | {"parameters": {"name": "d", "is_late": "True"}}
    chosen = choose(script, records, {})
    assert len(chosen & {"t.py::f[a]", "t.py::f[b]"}) == 1
    assert len(chosen & {"t.py::f[c]", "t.py::f[d]"}) == 1


def test_three_parameters_are_covered_by_pairs(script: ModuleType) -> None:
    records = {f"t.py::f[{a}{b}{c}]": make_record([1]) for a in "01" for b in "01" for c in "01"}
    for name, record in records.items():
        record["parameters"] = dict(zip("abc", name[-4:-1], strict=True))
    chosen = choose(script, records, {})
    assert 4 <= len(chosen) < 8
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert len({(name[-4:-1][first], name[-4:-1][second]) for name in chosen}) == 4


def test_tests_without_parameters_and_of_cheap_functions_stay(script: ModuleType) -> None:
    records = {name: make_record([1]) for name in ("t.py::f", "t.py::g[0]", "t.py::g[1]", "t.py::h[0]", "t.py::h[1]")}
    seconds = dict.fromkeys(records, 0.3) | {"t.py::h[1]": 0.8}
    required = script.list_required(script.list_candidates(records, seconds))
    assert required == {"t.py::f", "t.py::g[0]", "t.py::g[1]"}
