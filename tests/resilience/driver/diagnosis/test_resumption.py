"""The first step of another trainer after a restart: from its newest checkpoint, or not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megascale.config import from_tree
from megascale.resilience.driver.diagnosis.observations import Observations
from megascale.resilience.driver.state.job_state import Phase
from megascale.resilience.protocol.heartbeat import Heartbeat, Worker


@pytest.mark.parametrize(
    ("first_step", "saved_step", "sentence"),
    [
        (21, 20, "it is step 21; 8 steps are repeated; the newest checkpoint is that of step 20"),
        (1, 20, "it is step 1; 28 steps are repeated; the trainer did not resume from its newest checkpoint"),
        (21, 0, "it is step 21; 8 steps are repeated"),
    ],
)
def test_a_start_says_from_where_it_resumed(first_step, saved_step, sentence):
    heartbeat = Heartbeat("job", 2, "n0", 1, 0, saved_step=saved_step)
    node = SimpleNamespace(heartbeat=heartbeat)
    events = []
    job = SimpleNamespace(
        state=SimpleNamespace(attempt=2, step=28, missing_since=0),
        phase=Phase.STARTING,
        advance=lambda step: None,
        apply=lambda event: True,
    )
    observations = Observations(
        job=job,
        nodes=SimpleNamespace(all=lambda: [node]),
        attempts=SimpleNamespace(started=0.0, timeline=SimpleNamespace(finish=lambda nodes, time: None)),
        response=None,
        settings=SimpleNamespace(config=from_tree({"foreign": {"command": ["python", "train.py"]}})),
        record_event=lambda kind, **details: events.append(details),
    )
    worker = Worker(0, 100, "running", phase="train", step=first_step + 2, completed_steps=3)
    observations.follow_progress(5.0, [worker])
    assert events[0]["evidence"][1].startswith(sentence)
