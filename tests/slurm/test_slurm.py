"""What Slurm does to nodes and jobs, and what becomes of training, under a real slurmctld with real slurmds.

The cases are those of `python -m tests.chaos faults --site slurm`, which repeats and times them.
"""

from __future__ import annotations

import pytest

from tests.chaos.slurm.faults import FAULTS
from tests.chaos.slurm.session import session
from tests.chaos.slurm.slurm_faults_site import SlurmFaultSite


@pytest.fixture(scope="module")
def faults(site) -> SlurmFaultSite:
    return SlurmFaultSite(site.folder, site)


@pytest.mark.parametrize("kind", FAULTS)
def test_training_goes_on_to_the_weights_of_an_undisturbed_run(faults, kind):
    row = faults.run_once(kind, f"{kind}-0")
    assert row["wrong"] == []
    assert row["right"], row


def test_the_session_that_the_documentation_shows(site, tmp_path):
    output: list[str] = []
    assert session(site, tmp_path, output.append), "\n".join(output)
    site.repair()
    assert any("spare" in line for line in output)
