"""`python -m benchmarks targets`: figures from reports, ratios, verdicts and the table."""

from __future__ import annotations

import pytest

from benchmarks.targets import table
from benchmarks.targets.cases import FIGURES, load_cases
from benchmarks.targets.predicted import find_predicted_seconds
from benchmarks.targets.runs import ResultFile
from benchmarks.training import exposed
from megascale.core.flops import flops_per_token
from tests.benchmarks.targets.target_cases import add_runs, case, make_report


def test_figures_of_steps():
    steps = [1.0] * 50 + [1.02] * 450
    figures = table.compute_figures(case(), make_report(1.02, all_step_seconds=steps))
    assert figures["first_over_last"] == pytest.approx(1 - 1 / 1.02)
    assert figures["p99_over_median"] == pytest.approx(1.0)
    assert (figures["mfu"], figures["memory_gib"], figures["step_seconds"]) == (0.6, 42.0, 1.02)
    cpu_figures = table.compute_figures(case(), make_report(1.0, mfu=None, peak_memory_gib=None))
    assert not cpu_figures.keys() & {"mfu", "memory_gib", table.GEMM_SHARE}
    model = case(arguments=["gpt-1.3b", "--train.micro_batch=4"]).make_config(1).model
    flops = flops_per_token(model).training
    report = make_report(1.0, tokens_per_second_per_device=3.0, gemm_flop_per_s=[3 * flops, 5 * flops])
    assert table.compute_figures(case(), report)[table.GEMM_SHARE] == pytest.approx(0.75)


def test_figures_of_a_trace():
    def make_rank(wait: float) -> dict:
        stretches = [(0.0, 6.0, exposed.COMPUTE), (6.0, 7.0, "data gather"), (7.0, 7.5, "data reduce")]
        stretches += [(7.5, 7.5 + wait, "pipeline" + exposed.WAITS), (9.0, 10.0, "tensor")]
        times = exposed.shares([exposed.BusyTime(*stretch) for stretch in stretches])
        return {"stage": 0, "times": times, "alone": {"data gather": 5.0, "data reduce": 10.0, "tensor": 4.0}}

    report = {"step_seconds": 10.0, "ranks": [make_rank(1.0), make_rank(0.5)]}
    figures = table.compute_figures(case(bench="exposed", gpus=2), report)
    assert figures["data_exposed"] == pytest.approx(0.1)
    assert figures["tensor_exposed"] == pytest.approx(0.25)
    assert figures["idle_share"] == pytest.approx((0.05 + 0.1) / 2)
    assert "pipeline_exposed" not in figures  # a kind that only waits has moved no bytes


def test_ratios_compare_steps_of_the_same_repeat(tmp_path):
    keys = {"arguments": ["tiny", "--train.micro_batch=4"]}
    baseline = case("B", **keys)
    compared = case("A", **keys, baseline="B", target={"step_ratio": 1.15, "speed_up": 0.5})
    results = ResultFile(tmp_path / "results.json", 1)
    add_runs(results, baseline, 1.0, 2.0)
    add_runs(results, compared, 1.1, 2.1, 9.0)  # the third repeat has no baseline
    row = table.make_row(compared, results, {"B": baseline})
    assert row.figures["step_ratio"] == pytest.approx((1.1 + 1.05) / 2)
    assert row.figures["speed_up"] == pytest.approx((1 / 1.1 + 1 / 1.05) / 2)
    assert [goal.verdict for goal in row.goals] == ["met", "met"]
    assert row.relative_spread == pytest.approx((9.0 - 1.1) / 2.1)


@pytest.mark.parametrize(
    ("value", "replicas", "verdict"),
    [
        (0.56, 2, "missed"),
        (0.57, 2, "met"),
        (0.61, 2, "stretch met"),
        (0.61, 1, "smaller run"),
        (None, 2, "not measured"),
    ],
)
def test_verdicts(value, replicas, verdict):
    higher = case(data=2, target={"mfu": 0.57}, stretch={"mfu": 0.60})
    assert table.judge(higher, "mfu", value, replicas) == verdict
    lower = case(data=2, target={"step_seconds": -0.57}, stretch={"step_seconds": -0.60})
    assert table.judge(lower, "step_seconds", None if value is None else -value, replicas) == verdict


@pytest.mark.parametrize(
    ("name", "gpus", "layout"),
    [
        ("T1", 8, "TP2 PP2x5 DP2"),
        ("T1", 4, "TP2 PP2x5 DP1 of 2"),
        ("F2", 4, "DP4 of 8"),
        ("F1", 4, "1 GPU"),
        ("F3", 2, "needs 4 GPUs"),
    ],
)
def test_the_layout_shows_a_run_smaller_than_its_target(tmp_path, name, gpus, layout):
    by_name = {item.name: item for item in load_cases(None)}
    assert table.make_row(by_name[name], ResultFile(tmp_path / "results.json", gpus), by_name).layout == layout


def test_the_table_shows_predicted_next_to_measured_steps(tmp_path, capsys):
    cases = [item for item in load_cases(None) if item.name in ("EhT", "EhD")]
    results = ResultFile(tmp_path / "results.json", 2)
    add_runs(results, cases[0], 0.85, 0.86)
    unpredicted = case(arguments=["tiny", "--train.micro_batch=4"])
    add_runs(results, unpredicted, 0.5, 0.6)
    table.print_results(cases + [unpredicted], {item.name: item for item in cases}, results)
    lines = capsys.readouterr().out.splitlines()
    assert f"{find_predicted_seconds(cases[0], 2):.3f}" in next(line for line in lines if line.startswith("EhD "))
    assert any(line.startswith("predicted: ") for line in lines)
    table.print_results([unpredicted], {}, results)
    output = capsys.readouterr().out
    assert " spread " in output
    assert "predicted" not in output


@pytest.mark.parametrize(("width", "steps"), [(80, (2.345, 2.321)), (table.FULL_WIDTH, (12.345, 12.321))])
def test_the_table_of_all_shipped_cases_fits_the_terminal(tmp_path, capsys, monkeypatch, width, steps):
    monkeypatch.setenv("COLUMNS", str(width))
    cases = load_cases(None)
    results = ResultFile(tmp_path / "results.json", 8)
    for item in cases:
        if item.bench == "train":
            watched = [[0.5, 1755.0, 690.0, 45.0]] if item.watch else None
            add_runs(results, item, *steps, watched=watched)
    table.print_results(cases, {item.name: item for item in cases}, results)
    lines = capsys.readouterr().out.splitlines()
    end = next(index for index, line in enumerate(lines) if line.startswith("MFU:"))
    start = next(index for index, line in enumerate(lines) if line.startswith("──")) + 1
    rows = lines[start:end]
    assert rows[0].startswith("F1 ")
    assert len(rows) <= 2 * len(cases)  # no cell needs a third line
    assert "…" not in "".join(lines[:end])
    assert max(len(line.rstrip()) for line in lines[:end]) <= width
    assert all(any(line.startswith(item.name + " ") for line in rows) for item in cases)
    assert sum("gpt-1.3b, 500 steps" in line for line in lines) == 1
    assert any("clock 1,755" in line for line in lines)
    assert all(figure.label for figure in FIGURES.values())


def test_a_pipe_gets_the_full_table(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    item = case(arguments=["tiny", "--train.micro_batch=4"], title="half gpt-13b")
    table.print_results([item], {}, ResultFile(tmp_path / "results.json", 1))
    assert "model, layout" in capsys.readouterr().out
