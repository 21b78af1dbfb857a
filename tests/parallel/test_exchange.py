"""The exchange's protocol under every order in which a device may run its queues: no part is read before it is there,
none is overwritten while a peer still reads it, and nobody waits for ever."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.parallel import exchange as module
from megascale.parallel.exchange import Exchange

QUEUES = ("main", "side", "copy")


class Device:
    """One rank's queues: what is asked for is written down and run later, by `Machine`."""

    def __init__(self, rank: int, flags: dict[tuple[int, int], int]) -> None:
        self.rank, self.flags = rank, flags
        # (what must be true, what to do)
        self.queues: dict[str, deque[tuple[Callable[[], bool], Callable[[], Any]]]] = {q: deque() for q in QUEUES}

    def put(self, queue: str, do: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        self.queues[queue].append((ready, do))

    def compute(self, work: Callable[[], Any], queue: str = "main") -> None:
        self.put(queue, work)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert to.shape == source.shape
        half = to.shape[0] // 2  # a copy takes time: others may come between
        self.put("copy", lambda: to[:half].copy_(source[:half]))
        self.put("copy", lambda: to[half:].copy_(source[half:]))

    def signal(self, peer: int, number: int) -> None:
        self.put("copy", lambda: self.flags.__setitem__((peer, self.rank), number))

    def wait_for(self, peer: int, number: int) -> None:
        self.put("copy", lambda: None, lambda: self.flags.get((self.rank, peer), 0) >= number)

    def record_event(self, queue: str) -> dict[str, bool]:
        point = {"reached": False}
        self.put(queue, lambda: point.update(reached=True))
        return point

    def stream_wait(self, queue: str, event: dict[str, bool]) -> None:
        self.put(queue, lambda: None, lambda: event["reached"])


def run(devices: list[Device], rng: random.Random) -> None:
    """Run all queues to their ends in a random order that the device could have; some ranks and queues are slow."""
    speed = {(d.rank, q): rng.choice((1.0, 1.0, 0.05)) for d in devices for q in QUEUES}
    waiting = [(d, q) for d in devices for q in QUEUES]
    while waiting := [(d, q) for d, q in waiting if d.queues[q]]:
        able = [(d, q) for d, q in waiting if d.queues[q][0][0]()]
        assert able, "every queue waits: a deadlock"
        device, queue = rng.choices(able, [speed[d.rank, q] for d, q in able])[0]
        device.queues[queue].popleft()[1]()


SHAPE = (2, 3)
OPS = ("gather", "consume", "consume and keep", "scatter", "scatter now")


def play(
    size: int, program: list[str], lag: int, seed: int, on_side_stream: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run a program of calls on `size` ranks, results that may be waited for later `lag` calls later.

    Returns (found, expected) for each result of each rank.
    """
    nbytes = 8 * SHAPE[0] * SHAPE[1]
    memory = [torch.zeros(Exchange.bytes_needed(size, nbytes), dtype=torch.uint8) for _ in range(size)]
    flags: dict[tuple[int, int], int] = {}
    devices = [Device(rank, flags) for rank in range(size)]
    exchanges = [
        Exchange(rank, size, memory, nbytes, devices[rank], on_side_stream=on_side_stream) for rank in range(size)
    ]
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(size, size, *SHAPE, generator=generator, dtype=torch.float64) for _ in program]
    for rank, (device, ex) in enumerate(zip(devices, exchanges, strict=True)):

        def save(found: torch.Tensor, expected: torch.Tensor, device: Device = device) -> None:
            kept = torch.empty_like(expected)
            device.put("main", lambda: kept.copy_(found))
            results.append((kept, expected))

        pending: deque[tuple[Callable[[], torch.Tensor], torch.Tensor]] = deque()
        for op, data in zip(program, inputs, strict=True):
            gathered = data[:, 0]
            # A scatter's result is waited for before the next; a gather may be under way meanwhile.
            while op in ("scatter", "scatter now") and any(e.shape == SHAPE for _, e in pending):
                wait, expected = pending.popleft()
                save(wait(), expected)
            if op == "gather":
                pending.append((ex.gather(data[rank, 0]), gathered.flatten(0, 1)))
            elif op == "scatter":
                own = data[rank]
                pending.append(
                    (ex.scatter(lambda out, own=own: out.copy_(own), SHAPE, own), data[:, rank].sum(0))  # type: ignore[misc]
                )
            elif op == "scatter now":
                own = data[rank]
                found = ex.scatter_now(lambda out, own=own: out.copy_(own), SHAPE, own)  # type: ignore[misc]
                save(found, data[:, rank].sum(0))
            else:
                seen = torch.zeros(size, *SHAPE, dtype=torch.float64)
                keep = op == "consume and keep"
                whole = ex.gather_and_consume(data[rank, 0], lambda part, r, seen=seen: seen[r].copy_(part), keep)  # type: ignore[misc]
                save(seen, gathered)
                if keep:
                    save(whole, gathered.flatten(0, 1))
            while len(pending) > lag:
                wait, expected = pending.popleft()
                save(wait(), expected)
        for wait, expected in pending:
            save(wait(), expected)
    run(devices, random.Random(seed))
    return results


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(st.sampled_from(OPS), min_size=1, max_size=9),
    st.integers(0, 1),
    st.integers(0, 1 << 40),
    st.booleans(),
)
def test_every_order_of_queues_gives_the_right_sums_and_parts(
    size: int, program: list[str], lag: int, seed: int, on_side_stream: bool
) -> None:
    for found, expected in play(size, program, lag, seed, on_side_stream):
        torch.testing.assert_close(found, expected)


def test_a_backward_pass_gathers_and_scatters_at_once() -> None:
    for seed in range(60):
        program = ["scatter", "gather"] * 4 + ["consume and keep", "scatter now"]
        for found, expected in play(2 + seed % 3, program, 1, seed):
            torch.testing.assert_close(found, expected)


def test_a_result_that_nobody_waited_for_is_not_overwritten() -> None:
    memory = [torch.zeros(Exchange.bytes_needed(2, 64), dtype=torch.uint8) for _ in range(2)]
    ex, like = Exchange(0, 2, memory, 64, Device(0, {})), torch.zeros(2)
    wait = ex.scatter(lambda out: None, (2,), like)
    ex.scatter_now(lambda out: None, (2,), like)
    with pytest.raises(RuntimeError, match="before the next scatter but one"):
        ex.scatter_now(lambda out: None, (2,), like)
    wait()


def test_one_turn_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: with memory for one call, some order overwrites what a peer still reads."""
    monkeypatch.setattr(module, "BUFFERS", 1)
    found = [pair for seed in range(60) for pair in play(2, ["gather"] * 6, 0, seed)]
    assert not all(torch.equal(*pair) for pair in found)


def test_a_part_too_large_is_refused() -> None:
    memory = [torch.zeros(Exchange.bytes_needed(2, 16), dtype=torch.uint8) for _ in range(2)]
    with pytest.raises(ValueError, match="24 bytes; this exchange was made for 16"):
        Exchange(0, 2, memory, 16, Device(0, {})).gather(torch.zeros(3, dtype=torch.float64))
