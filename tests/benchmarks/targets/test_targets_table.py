"""`python -m benchmarks targets`: figures out of what benches write, ratios, verdicts and the table."""

from __future__ import annotations

import pytest

from benchmarks.targets import table as targets_table
from benchmarks.targets.cases import FIGURES, load
from benchmarks.targets.predicted import predicted
from benchmarks.targets.runs import Record
from benchmarks.training import exposed
from megascale.core.flops import flops_per_token
from tests.benchmarks.targets.target_cases import add_runs, case, make_result


def test_figures_of_steps():
    steps = [1.0] * 50 + [1.02] * 450
    result = targets_table.figures(case(), make_result(1.02, all_step_seconds=steps))
    assert result["first_over_last"] == pytest.approx(1 - 1 / 1.02)
    assert result["p99_over_median"] == pytest.approx(1.0)
    assert (result["mfu"], result["memory_gib"], result["step_seconds"]) == (0.6, 42.0, 1.02)
    on_cpu = targets_table.figures(case(), make_result(1.0, mfu=None, peak_memory_gib=None))
    assert not on_cpu.keys() & {"mfu", "memory_gib"}
    assert targets_table.of_gemm(make_result(1.0)) is None
    model = case(arguments=["gpt-1.3b", "--train.micro_batch=4"]).config(1).model
    rate = flops_per_token(model).training
    share = targets_table.of_gemm(
        make_result(1.0, tokens_per_second_per_device=3.0, gemm_flop_per_s=[3 * rate, 5 * rate])
    )
    assert share == pytest.approx(0.75)


def test_figures_of_a_trace():
    def rank(wait: float) -> dict:
        stretches = [(0.0, 6.0, exposed.COMPUTE), (6.0, 7.0, "data gather"), (7.0, 7.5, "data reduce")]
        stretches += [(7.5, 7.5 + wait, "pipeline" + exposed.WAITS), (9.0, 10.0, "tensor")]
        times = exposed.shares([exposed.BusyTime(*stretch) for stretch in stretches])
        return {"stage": 0, "times": times, "alone": {"data gather": 5.0, "data reduce": 10.0, "tensor": 4.0}}

    single = case(bench="exposed", gpus=2)
    result = targets_table.figures(single, {"step_seconds": 10.0, "ranks": [rank(1.0), rank(0.5)]})
    assert result["data_exposed"] == pytest.approx(0.1)
    assert result["tensor_exposed"] == pytest.approx(0.25)
    assert result["idle_share"] == pytest.approx((0.05 + 0.1) / 2)
    assert "pipeline_exposed" not in result  # one that only waits has moved nothing


def test_ratios_compare_repeats_with_each_other(tmp_path):
    keys = {"arguments": ["tiny", "--train.micro_batch=4"]}
    base, single = case("B", **keys), case("A", **keys, over="B", must={"step_ratio": 1.15, "speed_up": 0.5})
    record = Record(tmp_path / "t.json", 1)
    add_runs(record, base, 1.0, 2.0)
    add_runs(record, single, 1.1, 2.1, 9.0)  # its third has no partner
    row = targets_table.row(single, record, {"B": base})
    assert row.values["step_ratio"] == pytest.approx((1.1 + 1.05) / 2)
    assert row.values["speed_up"] == pytest.approx((1 / 1.1 + 1 / 1.05) / 2)
    assert [goal[3] for goal in row.goals] == ["reached", "reached"]
    assert row.relative_spread == pytest.approx((9.0 - 1.1) / 2.1)


@pytest.mark.parametrize(
    ("value", "replicas", "output"),
    [
        (0.56, 2, "missed"),
        (0.57, 2, "reached"),
        (0.61, 2, "aim reached"),
        (0.61, 1, "smaller run"),
        (None, 2, "not known"),
    ],
)
def test_verdicts(value, replicas, output):
    single = case(data=2, must={"mfu": 0.57}, aim={"mfu": 0.60})
    assert targets_table.verdict(single, "mfu", value, replicas) == output
    turned = case(data=2, must={"step_seconds": -0.57}, aim={"step_seconds": -0.60})
    assert targets_table.verdict(turned, "step_seconds", None if value is None else -value, replicas) == output


@pytest.mark.parametrize(
    ("name", "gpus", "output"),
    [
        ("T1", 8, "TP2 PP2x5 DP2"),
        ("T1", 4, "TP2 PP2x5 DP1 of 2"),
        ("F2", 4, "DP4 of 8"),
        ("F1", 4, "1 GPU"),
        ("F3", 2, "needs 4 GPUs"),
    ],
)
def test_a_smaller_run_is_told_from_the_targets(tmp_path, name, gpus, output):
    by_name = {item.name: item for item in load(None)}
    assert targets_table.row(by_name[name], Record(tmp_path / "t.json", gpus), by_name).layout == output


def test_what_was_predicted_stands_by_what_came(tmp_path, capsys):
    cases = [item for item in load(None) if item.name in ("EhT", "EhD")]
    record = Record(tmp_path / "t.json", 2)
    add_runs(record, cases[0], 0.85, 0.86)
    second = case(arguments=["tiny", "--train.micro_batch=4"])
    targets_table.show(cases + [second], {entry.name: entry for entry in cases}, record)
    lines = capsys.readouterr().out.splitlines()
    output = predicted(cases[0], 2)
    assert f"{output:.3f}" in next(line for line in lines if line.startswith("EhD "))
    assert any("said: step that the simulator said before" in line for line in lines)
    capsys.readouterr()
    targets_table.show([second], {}, record)
    assert "said" not in capsys.readouterr().out


def test_the_table_of_all_shipped_cases_fits_a_hundred_columns(tmp_path, capsys):
    cases = load(None)
    record = Record(tmp_path / "t.json", 8)
    for item in cases:
        if item.bench == "train":
            watched = [[0.5, 1755.0, 690.0, 45.0]] if item.watch else None
            add_runs(record, item, 12.345, 12.321, watched=watched)
    targets_table.show(cases, {entry.name: entry for entry in cases}, record)
    lines = capsys.readouterr().out.splitlines()
    table = lines[1 : next(i for i, line in enumerate(lines) if line.startswith("MFU:"))]
    assert len(table) == 3 + 2 * len(cases)  # no cell needed a third line
    assert max(len(line.rstrip()) for line in table) <= 100
    assert all(any(line.startswith(target.name + " ") for line in table) for target in cases)
    assert any("clock 1,755" in line for line in lines)
    assert all(figure.label for figure in FIGURES.values())
