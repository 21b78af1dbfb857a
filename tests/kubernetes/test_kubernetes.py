"""What befalls pods and nodes, and what becomes of training, on a real control plane with real kubelets and containers.

The cases and what is right in each are those of `python -m tests.chaos kubernetes`, which repeats and times them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.launched import make
from megascale.core import strict_json
from tests.chaos.kubernetes.campaign import one
from tests.chaos.kubernetes.faults import FAULTS
from tests.chaos.kubernetes.session import session


@pytest.fixture(scope="module")
def file(site) -> Path:
    return make(site.folder)


@pytest.mark.timeout(900)  # many-lost starts 62 agents on however few cores there are
@pytest.mark.parametrize("kind", FAULTS)
def test_what_is_right_comes_of_it(site, file, kind, tmp_path_factory, record_property):
    row = one(site, file, kind, kind, tmp_path_factory.getbasetemp())
    record_property("row", strict_json.dumps(row))  # with --junitxml, for the tables
    assert row["wrong"] == []
    assert row["doubles"] == []
    assert row["right"], row


def test_the_session_that_the_documentation_shows(site, tmp_path):
    said: list[str] = []
    assert session(site, tmp_path, said.append), "\n".join(said)
    site.repair()
    assert any("spare" in line for line in said)
