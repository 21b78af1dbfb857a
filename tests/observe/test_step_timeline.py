"""Where a step's time went: hand-made steps whose bubbles and causes are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megascale.observe.analysis.run_steps import ActionSpan, InnerSpan, RankStep
from megascale.observe.analysis.step_timeline import build_timeline

MS = 1_000_000


def wait(axis: str, begin: int, end: int, on: int = -1) -> InnerSpan:
    return InnerSpan("wait", axis, begin * MS, end * MS, 0, on)


def moved(axis: str, begin: int, end: int) -> InnerSpan:
    return InnerSpan("transfer", axis, begin * MS, end * MS, 8, -1)


def act(name: str, batch: int, begin: int, end: int, *inner: InnerSpan) -> ActionSpan:
    return ActionSpan(name, 0, batch, begin * MS, end * MS, list(inner))


def rank(number: int, location: tuple[int, int, int], end: int, *acts: ActionSpan) -> RankStep:
    return RankStep(1, number, location, 0, end * MS, 0, list(acts))


def three_stages() -> dict[int, RankStep]:
    """Stage 0 is slow, stage 1 waits for it, stage 2 for stage 1; a message takes 2 ms."""
    first = rank(0, (0, 0, 0), 60, act("forward", 0, 0, 40), act("send_forward", 0, 40, 41))
    second = rank(
        1, (0, 1, 0), 60,
        act("recv_forward", 0, 0, 1), act("forward", 0, 1, 47, wait("pipeline", 1, 42, 0)),
        act("send_forward", 0, 47, 48),
    )  # fmt: skip
    third = rank(2, (0, 2, 0), 60, act("recv_forward", 0, 0, 1), act("forward", 0, 1, 54, wait("pipeline", 1, 49, 1)))
    return {0: first, 1: second, 2: third}


def test_a_wait_is_a_bubble_until_the_message_is_sent_and_names_with_whom_it_began():
    result = build_timeline(1, three_stages(), [0, 1, 2], view="pipeline", stages=3)
    slow, middle, last = result.tracks
    assert slow.seconds == pytest.approx({"compute": 0.040, "bubble": 0, "samples": 0, "optimizer": 0, "other": 0.020})
    assert (middle.seconds["bubble"], middle.seconds["exposed pipeline"]) == pytest.approx((0.039, 0.002))
    assert middle.seconds["compute"] == pytest.approx(0.005)
    assert (last.seconds["bubble"], last.seconds["exposed pipeline"]) == pytest.approx((0.046, 0.002))
    bubble = last.waits[0]
    assert (bubble.waited_on, bubble.root) == (1, 0)
    assert bubble.reason == "rank 1 had not yet sent it: in forward of micro-batch 0, which itself waited"
    assert middle.waits[0].reason == "rank 0 had not yet sent it: in forward of micro-batch 0"
    assert result.bubbles == pytest.approx({0: 0.085})
    # Planned: 40, 5 and 5 ms of work one after another, with two messages of 2 ms.
    assert result.planned_seconds == pytest.approx(0.054)
    assert result.pipeline_seconds == pytest.approx(0.054)
    assert [(send, to) for send, _, to, _ in result.messages] == [(0, 1), (1, 2)]


def test_a_collective_is_exposed_from_its_last_member_on():
    """Two tensor peers: the first comes to the collective at 5 ms, the second at 9; it ends at 12 for both."""
    steps = {
        0: rank(0, (0, 0, 0), 20, act("forward", 0, 0, 20, moved("tensor", 5, 12), wait("tensor", 5, 12))),
        1: rank(1, (1, 0, 0), 20, act("forward", 0, 0, 20, moved("tensor", 9, 12), wait("tensor", 9, 12))),
    }
    result = build_timeline(1, steps, [0, 1], view="tensor", stages=1)
    assert [t.seconds["bubble"] for t in result.tracks] == pytest.approx([0.004, 0])
    assert [t.seconds["exposed tensor"] for t in result.tracks] == pytest.approx([0.003, 0.003])
    assert result.tracks[0].waits[0].waited_on == 1


def test_a_collective_that_began_in_an_earlier_action_is_found():
    steps = {
        0: rank(0, (0, 0, 0), 20, act("backward", 0, 0, 10, moved("data", 4, 18)),
                act("finish_reductions", -1, 10, 20, wait("data", 10, 18))),
        1: rank(1, (0, 0, 1), 20, act("backward", 0, 0, 16, moved("data", 15, 18)),
                act("finish_reductions", -1, 16, 20, wait("data", 16, 18))),
    }  # fmt: skip
    result = build_timeline(1, steps, [0, 1], view="data", stages=1)
    assert [t.seconds["bubble"] for t in result.tracks] == pytest.approx([0.005, 0])
    assert [t.seconds["exposed data"] for t in result.tracks] == pytest.approx([0.003, 0.002])


def test_context_ranks_wait_for_the_ranks_of_their_own_sequence():
    """Four ranks in two pairs: the second rank of each pair is the last to join its exchange, at 9 and at 15 ms."""
    steps = {}
    for number, begin, end in ((0, 5, 12), (1, 9, 12), (2, 5, 18), (3, 15, 18)):
        exchange = act("forward", 0, 0, 20, moved("context", begin, end), wait("context", begin, end))
        steps[number] = replace(rank(number, (0, 0, number), 20, exchange), context=number % 2)
    result = build_timeline(1, steps, list(steps), view="data", stages=1)
    assert [t.seconds["bubble"] for t in result.tracks] == pytest.approx([0.004, 0, 0.010, 0])
    assert [t.seconds["exposed context"] for t in result.tracks] == pytest.approx([0.003] * 4)
    assert [t.waits[0].waited_on for t in result.tracks] == [1, 1, 3, 3]
