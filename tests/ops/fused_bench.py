"""`megascale bench kernels --tiny`: every row is measured, and a wrong kernel is a row that says so."""

from __future__ import annotations

import interpreted  # noqa: F401  (first: it prepares the interpreter)
import pytest
import torch

from megascale.bench.kernel_cases import TINY, cases
from megascale.bench.kernel_measures import Bench, measure_case, run
from megascale.bench.kernels import show
from megascale.ops import dispatch


@pytest.fixture(autouse=True, scope="module")
def _fused():
    dispatch.configure("fused")
    yield
    dispatch.configure("auto")


def test_every_operator_is_checked_and_timed(capsys, tmp_path):
    result = run(TINY, torch.device("cpu"), 0.0, tmp_path / "kernels.json")
    assert [row for row in result["rows"] if row["error"]] == []
    assert len(result["rows"]) >= 29
    assert all(row["fused"] for row in result["rows"])
    assert result["dropout_bits_equal_cpu"] is True
    assert not [op for op, choice in result["active"].items() if choice != "triton" and "float64" not in choice]
    show(result)
    assert "layer norm" in capsys.readouterr().out


def test_a_wrong_kernel_and_a_crash_are_rows(tmp_path):
    bench = Bench(TINY, torch.device("cpu"), 0.0, tmp_path / "kernels.json")
    bench.facts["copy_bytes_per_s"] = 1e9
    case = cases(TINY, bench.device)[0]
    right = case.fused
    case.fused = lambda *tensors: right(*tensors) * 1.1
    measure_case(bench, case)
    assert "away from the float64 reference" in bench.rows[0].error

    def broken(bench, case):
        raise RuntimeError("out of shared memory")

    bench.guard("layer norm", "64", lambda: broken(bench, case))
    assert bench.rows[-1].error == "RuntimeError: out of shared memory"
