"""What Slurm does to nodes and jobs, and what becomes of training, under a real slurmctld with real slurmds.

The cases and what is right in each are those of `python -m tests.chaos slurm`, which repeats and times them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.launched import make
from tests.chaos.slurm.campaign import one
from tests.chaos.slurm.faults import FAULTS
from tests.chaos.slurm.session import session


@pytest.fixture(scope="module")
def file(site) -> Path:
    return make(site.folder)


@pytest.fixture(scope="module")
def calm() -> dict[int, dict[str, Any]]:
    """Weights of undisturbed runs by their steps."""
    return {}


@pytest.mark.parametrize("kind", FAULTS)
def test_training_goes_on_to_the_weights_of_an_undisturbed_run(site, file, calm, kind):
    row = one(site, file, kind, kind, calm)
    assert row["wrong"] == []
    assert row["right"], row


def test_the_session_that_the_documentation_shows(site, tmp_path):
    said: list[str] = []
    assert session(site, tmp_path, said.append), "\n".join(said)
    site.repair()
    assert any("spare" in line for line in said)
