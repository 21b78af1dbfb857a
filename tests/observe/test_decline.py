"""Why steps grew: replayed runs with one cause each, read from their spans and counters."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.observe import decline as decline_bench
from benchmarks.observe.replayed_job import Extra, replayed
from benchmarks.observe.replayed_runs import keep
from benchmarks.observe.synthetic_spans import Job
from megascale.cli.decline import print_tables, to_dict
from megascale.core import strict_json
from megascale.observe.analysis.decline import Decline, choose_windows, explain_decline
from megascale.observe.analysis.plots import draw_decline
from megascale.observe.analysis.rank_times import read_rank_times
from megascale.observe.store.tables import SpanTables

JOB = Job(tensor=2, stages=2, virtual=1, data=8, microbatches=8)
STEPS = 150


@pytest.mark.parametrize("cause", decline_bench.CAUSES)
def test_each_cause_is_named(cause, tmp_path):
    random = np.random.default_rng(3)
    extra, throttled = decline_bench.extra_of(cause, JOB.world, STEPS, random)
    counters = decline_bench.gpu_counters(JOB.world, throttled, STEPS)
    result = decline_bench.look(keep(tmp_path / "run", JOB, replayed(JOB, STEPS, 9, extra=extra), counters))
    assert result.has_declined == bool(cause)
    if not cause:
        assert result.main_causes == ()
        return
    first = result.main_causes[0]
    assert first.name == cause
    assert first.evidence
    assert sum(item.share for item in result.causes) <= 1.001
    if cause == "throttling":
        assert set(first.ranks) <= set(throttled)
        assert "power cap" in first.evidence[0]
        assert "1720 MHz, 1980 MHz before" in first.evidence[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One rank that became slow, and metrics with MFU beside the spans."""
    folder = tmp_path_factory.mktemp("decline") / "run"
    pace = np.ones((STEPS, JOB.world))
    pace[STEPS // 2 :, 9] *= 1.3
    keep(folder, JOB, replayed(JOB, STEPS, 9, extra=Extra(pace=pace)))
    rows = [{"step": step, "mfu": 0.5 if step <= STEPS // 2 else 0.4} for step in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("".join(strict_json.dumps(row) + "\n" for row in rows))
    return folder


def test_one_rank_that_became_slow_is_a_slow_rank_and_mfu_is_told(run):
    with SpanTables(run) as tables:
        first, second, series = choose_windows(tables, 1)
        result = explain_decline(lambda low, high: read_rank_times(tables, 1, low, high), first, second, tables, series)
    assert (first, second) == ((4, 32), (122, 150))
    assert result.mfu == (0.5, 0.4)
    assert [(item.name, item.ranks) for item in result.main_causes] == [("slow rank", (9,))]
    assert len(result.step_seconds[0]) == STEPS - 3


def test_the_command(run, megascale, tmp_path):
    report = " ".join(megascale("decline", run, "--plot", tmp_path / "why.png").stdout.split())
    assert "MFU 50.0%, then 40.0%" in report
    assert "slow rank: rank 9 is the last in" in report
    assert (tmp_path / "why.png").stat().st_size > 10_000
    equal = strict_json.loads(megascale("decline", run, "--json", "--before", "10-40", "--after", "41-70").stdout)
    assert (equal["declined"], equal["named"], equal["before"]) == (False, [], [10, 40])
    wrong = megascale("decline", run, "--before", "10-40")
    assert (wrong.returncode, "--after" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(("error", "arguments"), [(1.0, "of up to 300%"), (np.inf, "of any size")])
def test_a_large_growth_that_chance_explains_is_not_called_no_decline(tmp_path, capsys, error, arguments):
    steps = np.arange(20), np.linspace(1.0, 4.0, 20)
    result = Decline((1, 10), (11, 20), (1.0, 3.31), error, 2.31, (np.nan, np.nan), (), steps)
    assert (result.verdict, result.has_declined, result.main_causes) == ("uncertain", False, ())
    print_tables(result)
    text = " ".join(capsys.readouterr().out.split())
    assert "+231.0%" in text
    assert "no decline" not in text
    assert "undecided: steps are 231.0% longer" in text
    assert f"chance explains a growth {arguments}; compare longer windows" in text
    assert to_dict(result)["verdict"] == "uncertain"
    draw_decline(result, tmp_path / "why.png")
