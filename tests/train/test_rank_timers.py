"""The clock of steps on a host, and the times of a rank that its metrics hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale.config import from_tree
from megascale.core.grid import Grid
from megascale.core.spans import Recorder
from megascale.train import rank_timers
from megascale.train.rank_timers import RankTimers, StepClock


class Host:
    """A host's clock that a test sets."""

    def __init__(self) -> None:
        self.time = 100.0

    def perf_counter(self) -> float:
        return self.time


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    clock = Host()
    monkeypatch.setattr(rank_timers, "time", clock)
    return clock


def run_step(clock: StepClock, host: Host, before: float, seconds: float) -> None:
    """Run a step of `seconds` that begins `before` seconds after now."""
    host.time += before
    clock.start()
    host.time += seconds
    clock.stop()


def test_a_step_lasts_from_the_end_of_the_one_before(host: Host) -> None:
    """Idle time between steps counts; the first step lasts from its own start."""
    clock = StepClock(torch.device("cpu"))
    for before, seconds in ((5.0, 1.0), (0.25, 2.0), (0.0, 4.0)):
        run_step(clock, host, before, seconds)
    assert [clock.read() for _ in range(3)] == [1.0, 2.25, 4.0]


def test_a_pause_is_part_of_no_step(host: Host) -> None:
    clock = StepClock(torch.device("cpu"))
    run_step(clock, host, 0.0, 1.0)
    clock.pause()
    run_step(clock, host, 8.0, 2.0)
    run_step(clock, host, 0.5, 2.0)
    assert [clock.read() for _ in range(3)] == [1.0, 2.0, 2.5]


def test_steps_are_read_in_order(host: Host) -> None:
    clock = StepClock(torch.device("cpu"))
    run_step(clock, host, 0.0, 1.0)
    assert clock.read() == 1.0
    run_step(clock, host, 0.0, 3.0)
    run_step(clock, host, 0.0, 5.0)
    assert clock.read() == 3.0
    assert clock.read() == 5.0
    with pytest.raises(IndexError):
        clock.read()


class Times:
    """Timers whose last step is given."""

    def __init__(self, last: Any) -> None:
        self.last_totals = last
        self.collected = 0
        self.is_closed = False

    def collect(self) -> None:
        self.collected += 1

    def close(self) -> None:
        self.is_closed = True


def make_timers(**observe: Any) -> tuple[RankTimers, SimpleNamespace]:
    runtime = SimpleNamespace(recorder="unchanged")
    config = from_tree({"observe": observe})
    rank: Any = SimpleNamespace(rank=0, local_rank=0, local_world=1, world=1, device=torch.device("cpu"))
    grid: Any = None
    return RankTimers(config, rank, runtime, grid, 0), runtime  # type: ignore[arg-type]


def test_without_timers_a_rank_has_no_times() -> None:
    timers, runtime = make_timers(timers=False)
    status: Any = SimpleNamespace(compute_seconds=None)
    assert timers.read(3, status) == {}
    timers.close()
    assert (runtime.recorder, status.compute_seconds) == ("unchanged", None)


def test_a_step_has_the_times_of_just_that_step() -> None:
    timers, runtime = make_timers(timers=False)
    status: Any = SimpleNamespace(compute_seconds=None)
    for last in (None, SimpleNamespace(step=2), SimpleNamespace(step=4)):
        times = Times(last)
        timers.timers = times  # type: ignore[assignment]
        assert timers.read(3, status) == {}
        assert (times.collected, status.compute_seconds) == (1, None)
    times = Times(SimpleNamespace(step=3, own_seconds=0.5, waits={"tensor": 0.25, "data": 0.125}))
    timers.timers = times  # type: ignore[assignment]
    assert list(timers.read(3, status).items()) == [
        ("compute_seconds", 0.5),
        ("wait_data_seconds", 0.125),
        ("wait_tensor_seconds", 0.25),
    ]
    assert status.compute_seconds == 0.5
    timers.close()
    assert times.is_closed
    assert isinstance(runtime.recorder, Recorder)


@pytest.mark.parametrize("failing", ["ring", "link"])
def test_a_rank_without_spans_still_has_times(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    rings: list[Any] = []

    def make_ring(rank: int, attempt: int) -> Any:
        if failing == "ring":
            raise OSError("no shared memory")
        rings.append(Times(None))
        return rings[-1]

    def connect(self: RankTimers, *arguments: Any) -> Any:
        raise OSError("the folder is not usable")

    monkeypatch.setattr(rank_timers, "SpanRing", make_ring)
    monkeypatch.setattr(RankTimers, "_connect", connect)
    timers, runtime = make_timers()
    assert timers.timers is not None
    assert runtime.recorder is timers.timers
    assert all(ring.is_closed for ring in rings)
    timers.close()


def test_a_span_link_knows_the_hosts_and_coordinates_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    links: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(rank_timers, "SpanLink", lambda *arguments, **named: links.append((arguments, named)))
    config = from_tree({"observe": {"spans_mib": 17}, "train": {"runs": "here", "name": "a"}})
    grid = Grid(tensor=2, pipeline=2, data=3, ranks_per_host=4)
    timers: Any = RankTimers.__new__(RankTimers)
    for rank in (0, 5, 9):
        timers._rank_info = SimpleNamespace(
            rank=rank, local_rank=rank % 5, local_world=5, world=12, device=torch.device("cpu")
        )
        timers._connect(config, "ring", grid)
    for (arguments, named), rank, host in zip(links, (0, 5, 9), (0, 1, 1), strict=True):
        ring, folder, name, number, facts, mebibytes, log_file = arguments
        at = grid.coordinate(rank)
        assert (ring, name, number, mebibytes, named["hosts"]) == ("ring", "a", host, 17, 3)
        assert (facts["tensor"], facts["pipeline"], facts["data"]) == (str(at.tensor), str(at.pipeline), str(at.data))
        assert log_file.name == f"spans-{host}.log"
        assert str(host) in folder.name
