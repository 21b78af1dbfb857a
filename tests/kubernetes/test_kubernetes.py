"""What befalls pods and nodes, and what becomes of training, on a real control plane with real kubelets and containers.

The cases are those of `python -m tests.chaos faults --site kubernetes`, which repeats and times them.
"""

from __future__ import annotations

import pytest

from megascale.core import strict_json
from tests.chaos.kubernetes.faults import FAULTS
from tests.chaos.kubernetes.kubernetes_faults_site import KubernetesFaultSite
from tests.chaos.kubernetes.session import session


@pytest.fixture(scope="module")
def faults(site) -> KubernetesFaultSite:
    return KubernetesFaultSite(site.folder, site)


@pytest.mark.timeout(900)  # many-lost starts 62 agents on however few cores there are
@pytest.mark.parametrize("kind", FAULTS)
def test_what_is_right_comes_of_it(faults, kind, record_property):
    row = faults.run_once(kind, f"{kind}-0")
    record_property("row", strict_json.dumps(row))  # with --junitxml, for the tables
    assert row["wrong"] == []
    assert row["doubles"] == []
    assert row["right"], row


def test_the_session_that_the_documentation_shows(site, tmp_path):
    output: list[str] = []
    assert session(site, tmp_path, output.append), "\n".join(output)
    site.repair()
    assert any("spare" in line for line in output)
