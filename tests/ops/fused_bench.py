"""`megascale bench kernels --tiny`: every row is measured, and a wrong kernel is a row that says so."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
from importlib.metadata import version

import pytest
import torch

from benchmarks.kernels import peers
from megascale.bench import kernel_float8
from megascale.bench.kernel_cases import list_cases
from megascale.bench.kernel_measures import MEASUREMENTS, measure_case, run, start_bench
from megascale.bench.kernel_rows import TINY, Bench
from megascale.bench.kernels import main, print_result
from megascale.errors import ConfigError
from megascale.ops import dispatch


@pytest.fixture(autouse=True, scope="module")
def _fused():
    with dispatch.Kernels("fused").as_current():
        yield


def test_every_operator_is_checked_and_timed(capsys, tmp_path):
    measurements = [name for name in MEASUREMENTS if name != "float8"]
    result = run(TINY, torch.device("cpu"), 0.0, tmp_path / "kernels.json", measurements)
    assert [row for row in result["rows"] if row["error"]] == []
    assert len(result["rows"]) >= 29
    assert all(row["fused"] for row in result["rows"])
    assert result["dropout_bits_equal_cpu"] is True
    descriptions = {
        op: choice for op, choice in result["active"].items() if choice != "triton" and "float64" not in choice
    }
    # How Triton kernels read rows, in the last call of each shape.
    assert descriptions == {
        "experts' rows, 32 to 48": "by tensor descriptors",
        "experts' rows, 48 to 32": "by pointers (descriptors need inner sizes that divide by 64)",
        "experts' rows in float8, 32 to 48": "by tensor descriptors",
        "experts' rows in float8, 48 to 32": "by tensor descriptors",
    }
    print_result(result)
    assert "layer norm" in capsys.readouterr().out


def test_float8_casts_and_gemms_are_checked_and_timed(tmp_path):
    result = run(TINY, torch.device("cpu"), 0.0, tmp_path / "kernels.json", ["float8"])
    assert [row for row in result["rows"] if row["error"]] == []
    ops = [row["op"] for row in result["rows"]]
    assert all(op.startswith(("float8", "tiny")) for op in ops)
    checks = [row for row in result["rows"] if row["op"].endswith("check")]
    assert [row["dtype"] for row in checks] == ["bfloat16", "float32"] * 2
    assert all(row["fused"] for row in result["rows"] if row not in checks)
    assert {"tiny y", "tiny y, fast", "tiny dx, precise", "tiny dw += float32", "tiny dw += float32, precise"} <= {*ops}
    assert all(row["tflops"] for row in result["rows"] if row["op"].startswith("tiny"))
    assert result["active"]["float8 cast"] == "triton"


def test_a_wrong_float8_cast_is_a_row(tmp_path, monkeypatch):
    right = kernel_float8.cast_by_amax
    monkeypatch.setattr(kernel_float8, "cast_by_amax", lambda x, *arguments, **more: right(-x, *arguments, **more))
    bench = Bench(TINY, torch.device("cpu"), 0.0, tmp_path / "kernels.json")
    kernel_float8.check_casts(bench, 24, 40)
    assert "reference's bytes: counting (" in bench.rows[0].error
    assert "row-wise" not in bench.rows[0].error


def test_a_device_without_float8_is_a_printed_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kernel_float8, "explain_missing_float8", lambda device: "A100 has 8.0")
    result = run(TINY, torch.device("cpu"), 0.0, tmp_path / "kernels.json", ["float8"])
    assert result["rows"] == []
    print_result(result)
    assert "float8 is not measured: A100 has 8.0" in capsys.readouterr().out


def test_an_unknown_measurement_is_named(tmp_path):
    with pytest.raises(ConfigError, match="'float9' is unknown; choose from operators,"):
        main(tmp_path / "kernels.json", tiny=True, compile_until=0.0, only="float8,float9")


def test_a_wrong_kernel_and_a_crash_are_rows(tmp_path):
    bench = Bench(TINY, torch.device("cpu"), 0.0, tmp_path / "kernels.json")
    bench.facts["copy_bytes_per_s"] = 1e9
    case = list_cases(TINY, bench.device)[0]
    right = case.fused
    case.fused = lambda *tensors: right(*tensors) * 1.1
    measure_case(bench, case)
    assert "norm-wise error" in bench.rows[0].error

    def broken(bench, case):
        raise RuntimeError("out of shared memory")

    bench.run_guarded("layer norm", "64", lambda: broken(bench, case))
    assert bench.rows[-1].error == "RuntimeError: out of shared memory"


def test_other_packages_have_columns_and_a_wrong_one_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.nn.functional, "layer_norm", lambda x, *arguments: x * arguments[1])
    bench = start_bench(TINY, torch.device("cpu"), 0.0, tmp_path / "kernels.json")
    peers.measure(bench)
    rows = {row.op: row for row in bench.rows}
    assert rows["rms norm"].peers["torch"] > 0
    assert rows["cross entropy"].peers["torch"] > 0
    assert "torch" not in rows["layer norm"].peers
    peers.show(bench)
    shown = capsys.readouterr().out
    assert "layer norm, torch: " in shown
    assert "torch us" in shown
    assert bench.facts["packages"]["torch"] == f"torch {version('torch')}"
