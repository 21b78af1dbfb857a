"""State of torch after a failed capture, with graphs that fail as on a GPU. tests/gpu/graphs.py has real captures."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch

from megascale import torch_private
from megascale.parallel.captures import CudaCapturePool

POOL = (0, 7)


class FailingGraph:
    """A CUDA graph whose methods raise the errors that `failures` names."""

    failures: ClassVar[dict[str, str]] = {}
    events: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.events.append("new")

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        self._run("begin")

    def capture_end(self) -> None:
        self._run("end")

    def replay(self) -> None:
        self._run("replay")

    def _run(self, name: str) -> None:
        self.events.append(name)
        if name in self.failures:
            raise RuntimeError(self.failures[name])


class Stream:
    def wait_stream(self, stream: Any) -> None: ...


class Generator:
    """A generator that records its new state."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def clone_state(self) -> str:
        return "copy"

    def graphsafe_set_state(self, state: str) -> None:
        self._events.append(f"generator: {state}")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the parts of torch that need a GPU, and return what the pool does with them."""
    recorded: list[str] = []
    monkeypatch.setattr(FailingGraph, "events", recorded)
    monkeypatch.setattr(FailingGraph, "failures", {})
    cuda = {
        "CUDAGraph": FailingGraph,
        "graph_pool_handle": lambda: POOL,
        "current_stream": Stream,
        "current_device": lambda: 0,
        "stream": lambda stream: nullcontext(),
        "default_generators": (Generator(recorded),),
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch_private, "end_allocate_to_pool", lambda *where: recorded.append(f"end pool {where}"))
    monkeypatch.setattr(torch_private, "release_pool", lambda *where: recorded.append(f"release pool {where}"))
    return recorded


RESTORED = ["generator: copy", f"end pool {(0, POOL)}", f"release pool {(0, POOL)}"]


def capture(work: Any = lambda: None) -> Any:
    pool: Any = CudaCapturePool(Stream())  # type: ignore[arg-type]
    return pool.capture(work)


def fail() -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_capture_ends_its_graph(events):
    capture().replay()
    assert events == ["new", "begin", "end", "replay"]


def test_work_that_fails_in_a_capture_that_can_end(events):
    with pytest.raises(RuntimeError, match="stream is capturing"):
        capture(fail)
    assert events == ["new", "begin", "end"]


@pytest.mark.parametrize(
    ("failures", "work", "message"),
    [
        ({"end": "invalidated"}, fail, "stream is capturing"),
        ({"end": "invalidated"}, lambda: None, "invalidated"),
        ({"begin": "no memory", "end": "invalidated"}, lambda: None, "no memory"),
    ],
)
def test_a_capture_that_cannot_end_restores_generator_and_allocator(failures, work, message, events):
    FailingGraph.failures.update(failures)
    with pytest.raises(RuntimeError, match=message):
        capture(work)
    assert events[-3:] == RESTORED


def test_memory_is_not_released_twice(events, monkeypatch):
    """An allocator that has left its capturing mode releases the memory with the graph."""

    def refuse(*where: Any) -> None:
        raise RuntimeError("endAllocatePool: not currently recording")

    monkeypatch.setattr(torch_private, "end_allocate_to_pool", refuse)
    FailingGraph.failures["end"] = "cannot instantiate"
    with pytest.raises(RuntimeError, match="cannot instantiate"):
        capture()
    assert events[-1] == "generator: copy"
