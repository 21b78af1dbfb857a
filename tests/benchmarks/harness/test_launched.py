"""Events of a launched job as the benches read them."""

from __future__ import annotations

import pytest

from benchmarks.harness.launched import Launched
from megascale.core.status import FAILED_IN_STEP, StatusFile


@pytest.mark.parametrize(
    ("phase", "done"),
    [("train", 6), (FAILED_IN_STEP, 6), ("failed", 7), ("save", 7), ("done", 7)],
)
def test_a_step_that_rank_0_was_in_is_not_done(tmp_path, phase, done):
    """As train/ending.py tells: the step that an error came within, or the last one done."""
    job = Launched.__new__(Launched)  # of a run that is there
    job.run = tmp_path
    assert job.step() == 0
    status = StatusFile(tmp_path / "status", 0)
    status.update(phase, 7)
    assert job.step() == done
