"""`python -m benchmarks observe --parts stragglers,decline` on small jobs: what is found is counted, what is not is
missed."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from benchmarks.observe import command as observe_bench
from benchmarks.observe import decline as decline_bench
from benchmarks.observe import stragglers as straggler_bench
from benchmarks.observe.replayed_job import Extra, replayed
from benchmarks.observe.synthetic_spans import Job
from megascale.bench.train import load_shape_config
from megascale.core.layout import lay_out
from megascale.errors import ConfigError
from megascale.simulate.planner.layout_cost import make_plan


def test_replayed_ranks_wait_for_each_other_by_the_schedule():
    """A rank's parts and waits add up to its step; one rank's delay is a wait of all others, and of itself none."""
    job = Job(tensor=2, stages=2, virtual=2, data=2, microbatches=4)
    quiet = dict(replayed(job, 3, 1))
    late = dict(replayed(job, 3, 1, extra=Extra(late_ns=[[500e6 * (rank == 5) for rank in range(job.world)]])))
    for step in (1, 2, 3):
        grown = late[step]["total_ns"][:, 4] - quiet[step]["total_ns"][:, 4]
        assert (grown > 300e6).all()
        waited = late[step]["waited_ns"][:, 4] - quiet[step]["waited_ns"][:, 4]
        assert waited[5] < 100e6 < waited[[0, 3, 7]].min()


def test_the_bench_counts_what_is_found(tmp_path):
    record = straggler_bench.measure(tmp_path, runs=1, data=4, seed=2)
    assert record["world"] == 256
    assert set(straggler_bench.scores(record).values()) == {(1, 1)}, record
    assert straggler_bench.missed(record) == []
    worse = copy.deepcopy(record)
    worse["clean"][0]["gpus"] = [3]
    worse["two"][0]["gpus"] = []
    assert [text.partition(":")[2] for text in straggler_bench.missed(worse)] == [
        " clean runs without a false alarm: 0 of 1",
        " two slow GPUs found, none else: 0 of 1",
    ]
    assert any("256 ranks" in line for line in straggler_bench.lines(record))


def test_a_cause_that_is_not_named_first_is_missed():
    runs = [
        {"cause": cause, "named": [cause] if cause else [], "growth": 0.05, "shares": {}}
        for cause in decline_bench.CAUSES
    ]
    record = {"world": 128, "steps": 300, "seed": 1, "runs": runs}
    assert decline_bench.missed(record) == []
    runs[0]["named"] = ["samples", "garbage collection"]
    runs[-1]["named"] = ["update"]
    assert decline_bench.missed(record) == ["decline: garbage collection: 0 of 1", "decline: no decline: 0 of 1"]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="here are two GPUs")
def test_two_gpus_are_asked_for_and_their_want_is_said(tmp_path, capsys):
    """The part runs where two GPUs are; elsewhere it says that it is blocked, and is neither passed nor missed."""
    record: dict = {}
    assert observe_bench._local(record, tmp_path, "cuda", 1.0, {"tensor": 2, "data": 2}) == []
    assert "blocked: a slow GPU is told from healthy ones of 4, a rank each; here are" in capsys.readouterr().out
    assert record["local"]["blocked"]


def test_a_layout_of_the_real_job_is_keys_of_parallel():
    assert straggler_bench.axes("tensor=2,pipeline=2,virtual_stages=3") == {
        "tensor": 2,
        "pipeline": 2,
        "virtual_stages": 3,
    }
    assert straggler_bench.ranks(straggler_bench.axes("tensor=2,pipeline=2,virtual_stages=3")) == 4
    for wrong in ("data", "data=0", "date=2", "data=1", "data=2,"):
        with pytest.raises(ConfigError, match=f"--layout={wrong}"):
            straggler_bench.axes(wrong)


@pytest.mark.parametrize(("devices", "gib", "layers"), [(4, 140, 40), (8, 140, 40), (4, 79, 20), (8, 79, 20)])
def test_the_cost_is_of_the_fast_layout_where_it_fits(monkeypatch, devices, gib, layers):
    """On four GPUs and more all of gpt-13b, or half on small ones, a replica on each four; words that lay out."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=gib * 2**30))
    replicas = devices // 4
    ((name, arguments, bound),) = observe_bench._shapes()
    assert (f"DP{replicas}" in name, bound) == (True, 0.004)
    settings = [word for word in arguments[2:] if word != "--each=1"]
    config = load_shape_config([f"--model.preset={arguments[0]}", "--train.precision=bfloat16"] + settings)
    assert config.model.layers == layers
    assert lay_out(config, devices).grid.data == replicas
    assert config.count_microbatches(replicas) == 4
    assert make_plan(config, devices, gib).fits
