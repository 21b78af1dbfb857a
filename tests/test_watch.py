"""`megascale.watch`: a status file and a line of rank 0 in a launched job, nothing elsewhere; time without waits."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megascale import watch
from megascale.core.status import read_status
from megascale.resilience.agent.progress_patterns import ProgressReader, Reading
from megascale.torch_private import autograd_engine
from megascale.watch.waits import READ_INTERVAL_SECONDS, DeviceClock, HostClock


@pytest.fixture
def launched(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_reporter", None)
    monkeypatch.setenv("MEGASCALE_STATUS", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    return tmp_path


def read_line(capsys) -> Reading | None:
    return ProgressReader([]).read(capsys.readouterr().out.strip().rpartition("\n")[2])


def test_a_step_is_reported_in_a_launched_job_only(launched, monkeypatch, capsys):
    monkeypatch.delenv("MEGASCALE_STATUS")
    watch.step(1, loss=2.0)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("MEGASCALE_STATUS", str(launched))
    watch.step(7, loss=0.25, tokens=100, grad_norm=1.5)
    status = read_status(launched / "rank-0.status")
    assert status is not None
    assert (status.phase, status.step) == ("train", 7)
    assert read_line(capsys) == Reading(7, loss=0.25, grad_norm=1.5)


@pytest.mark.parametrize("make_number", [np.int64, torch.tensor])
def test_steps_of_any_whole_type_are_stored(make_number, launched):
    watch.step(make_number(7))
    status = read_status(launched / "rank-0.status")
    assert status is not None
    assert status.step == 7


def test_losses_of_any_numeric_type_are_printed_as_numbers(launched, capsys):
    watch.step(7, loss=np.float64(0.25), grad_norm=torch.tensor(1.5))
    assert read_line(capsys) == Reading(7, loss=0.25, grad_norm=1.5)


def test_time_after_the_last_gradient_and_in_waits_is_not_own_time():
    clock = HostClock()
    value = torch.ones(3, requires_grad=True)
    loss = (value * 2).sum()
    wait = clock.time_wait(lambda: time.sleep(0.05))

    def compute_for_a_while(gradient: torch.Tensor) -> None:
        time.sleep(0.2)
        # As DistributedDataParallel does once its last bucket is ready: the wait counts once.
        autograd_engine.queue_callback(wait)

    value.register_hook(compute_for_a_while)
    backward = clock.time_backward(torch.autograd.backward, autograd_engine.queue_callback)
    backward(loss)
    assert torch.equal(value.grad, torch.full((3,), 2.0))
    assert 0.05 <= clock.wait_seconds < 0.2
    assert clock.measure_step(1.0) == pytest.approx(0.9, abs=0.06)
    wait()
    assert clock.measure_step(0.01) == 0.0
    assert clock.measure_step(0.01) == 0.01


class RecordedSteps:
    """Steps of a rank on NCCL with the test's clock, and the calls of the flight recorder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        self.entries: list[dict[str, float]] = []
        self.clock = DeviceClock(lambda: json.dumps({"entries": self.entries}))
        monkeypatch.setattr(time, "perf_counter", lambda: self.seconds)
        monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * self.seconds))
        self.run(0.1, calls=0.01)  # the first read starts a period

    def run(self, seconds: float, *, calls: float) -> float:
        """Run a step with a call in its middle, and return the compute seconds that the clock reports."""
        entry = {"record_id": len(self.entries), "duration_ms": 1000 * calls}
        self.entries.append(entry | {"time_created_ns": int(1e9 * (self.seconds + seconds / 2))})
        self.seconds += seconds
        return self.clock.measure_step(seconds)


def test_durations_of_calls_on_a_device_are_not_own_time(monkeypatch):
    steps = RecordedSteps(monkeypatch)
    for step in range(1, 11):
        compute_seconds = steps.run(READ_INTERVAL_SECONDS / 10 + 1e-6, calls=0.2)
        assert (compute_seconds > 0) == (step == 10)
    assert compute_seconds == pytest.approx(0.3, abs=1e-3)
    # Calls that the recorder has dropped make the period unknown, so the last value stays.
    steps.entries[:] = [{"record_id": 5000, "duration_ms": 1.0, "time_created_ns": int(1e9 * steps.seconds)}]
    steps.seconds += 2 * READ_INTERVAL_SECONDS
    assert steps.clock.measure_step(0.5) == compute_seconds


def test_a_call_that_ends_after_a_read_counts_for_its_step(monkeypatch):
    """Let the device lag behind the host, and let another group's call end first."""
    steps = RecordedSteps(monkeypatch)
    step_seconds = READ_INTERVAL_SECONDS / 10 + 1e-6
    for _ in range(9):
        steps.run(step_seconds, calls=0.1)
    late = {"record_id": len(steps.entries), "duration_ms": None, "time_created_ns": int(1e9 * steps.seconds) + 1}
    steps.entries.append(late)
    assert steps.run(step_seconds, calls=0.1) == pytest.approx(0.4, abs=1e-3)  # nine steps
    late["duration_ms"] = 300.0
    for _ in range(9):
        steps.run(step_seconds, calls=0.2)
    # The late step has 0.4 s of calls, and the other ten have 0.2 s.
    assert steps.run(step_seconds, calls=0.2) == pytest.approx((0.1 + 10 * 0.3) / 11, abs=1e-3)


def test_a_call_that_never_ends_does_not_end_the_measurement(monkeypatch):
    steps = RecordedSteps(monkeypatch)
    steps.entries.append({"record_id": 1, "duration_ms": None, "time_created_ns": int(1e9 * steps.seconds) + 1})
    step_seconds = READ_INTERVAL_SECONDS / 10 + 1e-6
    for _ in range(10):
        compute_seconds = steps.run(step_seconds, calls=0.1)
    assert compute_seconds == 0  # its step and all later ones wait for it
    for _ in range(10):
        compute_seconds = steps.run(step_seconds, calls=0.1)
    assert compute_seconds == pytest.approx(0.4, abs=1e-3)


def test_a_call_of_a_dropped_step_does_not_count_in_a_later_period(monkeypatch):
    """Start a period by the first of two reads, and give up the call by the second. The call ends after both."""
    steps = RecordedSteps(monkeypatch)
    step_seconds = READ_INTERVAL_SECONDS / 10 + 1e-6
    late = {"record_id": 1, "duration_ms": None, "time_created_ns": int(1e9 * steps.seconds) + 1}
    steps.entries.append(late)
    for _ in range(20):
        steps.run(step_seconds, calls=0.1)
    late["duration_ms"] = 400.0
    for _ in range(10):
        compute_seconds = steps.run(step_seconds, calls=0.2)
    assert compute_seconds == pytest.approx(0.3, abs=1e-3)


@pytest.mark.parametrize("calls_in_save", [0.1, 3.9])
def test_a_save_in_a_period_does_not_count_as_own_time(monkeypatch, calls_in_save):
    steps = RecordedSteps(monkeypatch)
    for _ in range(5):
        steps.run(0.4, calls=0.1)
    steps.run(4.0, calls=calls_in_save)
    assert steps.run(0.4, calls=0.1) == pytest.approx(0.3)


def test_the_callback_of_hugging_face_trainer_reports_steps_and_losses(launched, capsys):
    pytest.importorskip("transformers")
    from megascale.watch.huggingface import WatchCallback

    state = SimpleNamespace(global_step=3)
    callback = WatchCallback()
    callback.on_step_end(None, state, None)
    callback.on_log(None, state, None, logs={"loss": "0.5", "grad_norm": 2.0})
    callback.on_log(None, state, None, logs={"eval_loss": 1.0})
    assert read_status(launched / "rank-0.status").step == 3
    assert read_line(capsys) == Reading(3, loss=0.5, grad_norm=2.0)


def test_the_callback_of_lightning_reports_optimizer_steps_and_logged_losses(launched, capsys):
    pytest.importorskip("pytorch_lightning")
    from megascale.watch.lightning import WatchCallback

    callback = WatchCallback()
    for step in (1, 1, 2):
        trainer = SimpleNamespace(global_step=step, log_every_n_steps=2)
        callback.on_train_batch_end(trainer, None, {"loss": torch.tensor(0.5)}, None, 0)
    assert read_status(launched / "rank-0.status").step == 2
    assert read_line(capsys) == Reading(2, loss=0.5)


def test_backward_of_an_iterator_and_of_graph_edges_gives_the_usual_gradients():
    backward = HostClock().time_backward(torch.autograd.backward, autograd_engine.queue_callback)
    value = torch.ones(3, requires_grad=True)
    backward(loss for loss in ((value * 2).sum(), (value * 3).sum()))
    assert torch.equal(value.grad, torch.full((3,), 5.0))
    edge = torch.autograd.graph.get_gradient_edge((value * 4).sum())
    backward((edge,), (torch.ones(()),))
    assert torch.equal(value.grad, torch.full((3,), 9.0))
