"""Series of measurements in the same ranks: what an item leaves behind."""

from __future__ import annotations

import gc
import os
import weakref

import pytest

from benchmarks.harness.rank_series import SERIES_VARIABLE, RankSeries, SeriesServer
from megascale.bench.measured_steps import measure_steps
from megascale.bench.step_monitor import StepMonitor
from megascale.bench.train import load_shape_config
from megascale.errors import TrainingError
from megascale.train import engine as engine_module
from megascale.train.rank_info import find_rank_info

SETTINGS = ["--model.preset=tiny", "--model.layers=1", "--train.micro_batch=1", "--train.global_batch=1"]


@pytest.fixture
def series(monkeypatch):
    monkeypatch.setenv(SERIES_VARIABLE, "")  # restored after the test
    server = SeriesServer()
    server.begin_launch([0, 1])
    return server, RankSeries(0, 1)


@pytest.mark.parametrize("fails", [False, True])
def test_no_model_outlives_its_item(series, monkeypatch, fails):
    """A model that stayed would take the memory of the next one."""
    _, ranks = series
    models = []
    original = engine_module.Engine.__init__

    def remember(engine, *arguments, **options):
        original(engine, *arguments, **options)
        models.append(weakref.ref(engine))

    monkeypatch.setattr(engine_module.Engine, "__init__", remember)
    config = load_shape_config(SETTINGS + ["--train.device=cpu", "--observe.peak_tflops=1"])

    def measure(item):
        if fails:
            monkeypatch.setattr(engine_module.Engine, "step", lambda *_, **__: 1 / 0)
        return measure_steps(config, find_rank_info(config), groups=None, steps=2, warmup=1)

    outcome = ranks.run(0, 60, measure)
    if fails:
        assert outcome.error.startswith("rank 0: ZeroDivisionError: division by zero (test_rank_series.py:")
    else:
        assert outcome.error == ""
    assert len(models) == 1
    assert models[0]() is None
    assert gc.isenabled()


def test_a_failure_is_known_to_the_process_that_starts_the_ranks(series):
    server, ranks = series
    assert not server.has_begun(1)

    def measure(item):
        raise RuntimeError("two\nlines")

    outcome = ranks.run(1, 60, measure)
    assert outcome.error.startswith("rank 0: RuntimeError: two lines (test_rank_series.py:")
    assert server.has_begun(1)
    assert server.read_failure(1) == outcome.error
    assert not ranks.is_lost


def test_groups_are_aborted_before_they_are_left(series):
    _, ranks = series
    calls = []

    def measure(item):
        item.on_end(abort=lambda: calls.append("abort"), leave=lambda failed: calls.append(f"leave {failed}"))
        if item.rank == 0 and len(calls) == 0:
            raise RuntimeError("no memory")

    ranks.run(0, 60, measure)
    assert calls[-1] == "leave True"
    assert set(calls[:-1]) == {"abort"}
    calls.clear()
    ranks.run(1, 60, lambda item: item.on_end(abort=lambda: calls.append("abort"), leave=calls.append))
    assert calls == [False]


def test_figures_that_cannot_be_computed_leave_the_groups_aborted(series, capsys):
    _, ranks = series
    calls = []

    def measure(item):
        monitor = StepMonitor("shape", warmup=0, steps=1, prints=False)
        monitor.make_result = lambda: {"step_seconds": 1 / 0}
        item.watch_steps(monitor)
        item.on_end(abort=lambda: calls.append("abort"), leave=lambda failed: calls.append(f"leave {failed}"))
        item._watch_store.set("limit", "1")  # as the watch of any rank does
        raise TrainingError("the time limit is over")

    outcome = ranks.run(0, 60, measure)
    assert outcome.error == "rank 0: TrainingError: the time limit is over"
    assert outcome.partial is None
    assert set(calls[:-1]) == {"abort"}
    assert calls[-1] == "leave True"
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_an_error_while_leaving_ends_the_series(series):
    _, ranks = series

    def leave(failed):
        raise RuntimeError("the device has failed")

    outcome = ranks.run(0, 60, lambda item: item.on_end(abort=lambda: None, leave=leave))
    assert ranks.is_lost
    assert outcome.error.startswith("rank 0: RuntimeError: the device has failed (")


def test_a_result_outlives_an_error_while_leaving(series):
    _, ranks = series

    def leave(failed):
        raise RuntimeError("the communicators did not abort")

    def measure(item):
        item.on_end(abort=lambda: None, leave=leave)
        return {"step_seconds": 1.5}

    outcome = ranks.run(0, 60, measure)
    assert ranks.is_lost
    assert outcome.result == {"step_seconds": 1.5}
    assert outcome.error == ""
    assert outcome.end_error.startswith("rank 0: RuntimeError: the communicators did not abort (")


def test_the_address_of_an_item_has_a_listener(series, monkeypatch):
    """Rank 0's store takes the socket, so that no other process can take the port in between."""
    for variable in ("MASTER_ADDR", "MASTER_PORT", "MEGASCALE_STORE_LISTENER"):
        monkeypatch.setenv(variable, "")
    _, ranks = series
    ports = []

    def measure(item):
        item.set_address()
        ports.append(os.environ["MASTER_PORT"])

    ranks.run(0, 60, measure)
    ranks.run(1, 60, measure)
    assert ports[0] != ports[1]
