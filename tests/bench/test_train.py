"""`megascale bench train`: figures of a step other than its time, which tests/simulate/test_measured_runs.py has."""

from __future__ import annotations

import os

import pytest

from megascale.bench import measured_steps
from megascale.bench import train as train_bench
from megascale.bench.random_samples import RandomSamples
from megascale.core.batch import Batch
from megascale.errors import ConfigError


def test_each_rank_has_cores_of_its_own(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5, 8, 9}, raising=False)
    assert [train_bench.find_cores(2, rank) for rank in range(2)] == [{2, 3}, {5, 8}]
    with pytest.raises(ConfigError, match=r"--cores=2: this process may use 5 cores, and 3 ranks need 6"):
        train_bench.find_cores(2, 2)


def test_too_few_cores_are_an_error_before_any_rank_starts(megascale, tmp_path):
    result = megascale("bench", "train", "tiny", "--parallel.data=4", "--cores=1000", "--train.device=cpu")
    assert result.returncode == 2
    assert "--cores=1000" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_profiled_step_waits_for_its_gathers_before_the_profiler_ends(tmp_path):
    """torch records the end of a collective in the profiler in which it began, and crashes if that one has ended."""
    torch = pytest.importorskip("torch")
    recorded = []

    class Engine:
        def start_gather(self):
            recorded.append(("gather", torch.autograd._profiler_enabled()))

        def step(self, *arguments, **options):
            recorded.append(("step", torch.autograd._profiler_enabled()))

        def synchronize(self):
            recorded.append(("synchronize", torch.autograd._profiler_enabled()))

    samples = RandomSamples(Batch(torch.zeros(2, 1), torch.zeros(2, 1)))
    measured_steps._profile_step(Engine(), samples, 4, out=tmp_path / "trace.json", rank=1, is_cuda=False)
    assert recorded == [("gather", True), ("step", True), ("synchronize", True)]


def test_host_seconds_exclude_waits_for_the_device(monkeypatch):
    """Advance a fake clock by 2 s in total for launches and by 5 s for each wait for the device."""
    torch = pytest.importorskip("torch")
    current = [0.0]
    monkeypatch.setattr(measured_steps.time, "perf_counter", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: current.__setitem__(0, current[0] + 5.0))

    class Engine:
        def start_gather(self):
            current[0] += 0.5

        def step(self, batches, step, rate, has_next_step, sum_weights):
            for i in range(3):
                assert batches(i).tokens.shape == batches(i).targets.shape
                current[0] += 0.5
            return type("Result", (), {"loss": 0.0})

    samples = RandomSamples(Batch(torch.zeros(2, 1), torch.zeros(2, 1)))
    assert measured_steps._measure_host_seconds(Engine(), samples, 4) == 2.0


def test_random_documents_fill_the_samples(capsys):
    """Documents have the requested mean length, and the FLOPs count attention inside documents only."""
    tree = ["--model.preset=tiny", "--train.micro_batch=2", "--train.global_batch=2", "--train.device=cpu"]
    config = train_bench.load_shape_config(tree + ["--data.document_mask=true", "--observe.peak_tflops=1"])
    result = measured_steps.measure_training(config, 1, 1, None, mean_document=32)
    plain = measured_steps.measure_training(
        train_bench.load_shape_config(tree + ["--observe.peak_tflops=1"]), 1, 1, None
    )
    length = config.model.sequence_length
    assert 2 * length / 64 < result["documents"] < 2 * length / 16
    assert plain["documents"] is None
    rates = [figures["tokens_per_second_per_device"] / figures["mfu"] for figures in (result, plain)]
    assert rates[0] > rates[1]  # fewer FLOPs per token
    result["active"]["attention"] = "sdpa (flash4: run pip install -e '.[flash4]')"
    train_bench.print_result(result)
    output = capsys.readouterr().out
    assert "per micro-batch, with" in output
    assert "pip install -e '.[flash4]'" in output
    assert "documents as sequences of their own" in output
    with pytest.raises(ConfigError, match=r"--mean-document=1: .*--data.max_documents="):
        measured_steps.measure_training(config, 1, 1, None, mean_document=1)


def test_even_experts_of_a_model_without_experts_are_refused():
    config = train_bench.load_shape_config(["--model.preset=tiny", "--observe.peak_tflops=1"])
    with pytest.raises(ConfigError, match="the model has no experts"):
        measured_steps.measure_training(config, 1, 0, None, even_experts=True)
