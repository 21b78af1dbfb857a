"""A real Kubernetes, once for all tests of this folder.

`make test-kubernetes` builds its programs once and runs them. In the default suite they are listed as skipped: each
trains for about a minute.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.kubernetes.kubernetes_faults_site import NODES
from tests.chaos.kubernetes.site import KubernetesSite, impossible

_REQUESTED = os.environ.get("MEGASCALE_TEST_KUBERNETES")
WHY = impossible() if _REQUESTED else "trains on a real Kubernetes: make test-kubernetes"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if WHY and str(item.path).startswith(folder):
            item.add_marker(pytest.mark.skip(reason=WHY))


@pytest.fixture(scope="session")
def site() -> Iterator[KubernetesSite]:
    folder = Path(tempfile.mkdtemp(prefix="ms"))
    try:
        with KubernetesSite(folder / "s", NODES, gpus=1) as present:
            yield present
    finally:
        shutil.rmtree(folder, ignore_errors=True)
