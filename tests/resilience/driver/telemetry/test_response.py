"""Responses to verdicts. Lists of calls replace the driver's other parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megascale.core.events import Event
from megascale.resilience.driver.recovery.attempts import RecoveryTimeline
from megascale.resilience.driver.recovery.response import Response
from megascale.resilience.rules.view import Verdict

SLOW = Verdict(Event.SLOW_NODE, ("n1",), (1,), "evict", ("rank 1 computes 1.4 x as long",))


class Parts:
    """A running job, with so many spares; `noted` and `evicted` are what came of verdicts."""

    def __init__(self, spares: int) -> None:
        self.noted: list[tuple[str, str, tuple[str, ...]]] = []
        self.evicted: list[frozenset[str]] = []
        self.standing = [object()] * spares
        state = SimpleNamespace(attempt=1, distrust=False, updating=False, starts_without_progress=0, hopeless_step=0)
        job = SimpleNamespace(state=state, is_at_work=True, apply=lambda *_, **__: None)
        self.response = Response(
            run=Path(),
            job=job,
            nodes=SimpleNamespace(list_spares=lambda: self.standing, all=list),
            attempts=SimpleNamespace(timeline=RecoveryTimeline()),
            recovery=SimpleNamespace(reasons={}, recover=lambda blamed, evict: self.evicted.append(evict)),
            settings=SimpleNamespace(limits=SimpleNamespace(no_progress_limit=3)),
            tasks=None,
            record_event=self._note,
        )

    def _note(self, kind: str, action: str, evidence: tuple[str, ...], **_: Any) -> None:
        self.noted.append((kind, action, evidence))


@pytest.fixture(autouse=True)
def _no_steps(monkeypatch):
    monkeypatch.setattr("megascale.resilience.driver.recovery.escalation.find_end_step", lambda *_: 0)
    monkeypatch.setattr("megascale.resilience.driver.recovery.escalation.compute_progress", lambda *_: {})


def test_a_slow_node_goes_on_until_a_spare_can_take_its_ranks():
    """Evicted without one, a job of slow or busy nodes ends for want of nodes."""
    parts = Parts(spares=0)
    for _ in range(3):
        parts.response.act([SLOW])
    assert [(kind, action) for kind, action, _ in parts.noted] == [(Event.SLOW_NODE, "alert")]
    assert "no spare is available" in parts.noted[0][2][-1]
    assert parts.evicted == []
    parts.standing.append(object())
    parts.response.act([SLOW])
    assert [action for _, action, _ in parts.noted] == ["alert", "evict"]
    assert parts.evicted == [frozenset({"n1"})]


def test_a_broken_node_is_evicted_all_the_same():
    parts = Parts(spares=0)
    parts.response.act([Verdict(Event.CHECKSUM_MISMATCH, ("n1",), (1,), "evict", ("weights changed",))])
    assert parts.evicted == [frozenset({"n1"})]
