"""A real Slurm, once for all tests of this folder.

`make test-slurm` runs them. In the default suite they are listed as skipped: each trains for about a minute.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.slurm.site import SlurmSite, impossible
from tests.chaos.slurm.slurm_faults_site import NODES

WHY = impossible() or ("" if os.environ.get("MEGASCALE_TEST_SLURM") else "trains under a real Slurm: make test-slurm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if WHY and str(item.path).startswith(folder):
            item.add_marker(pytest.mark.skip(reason=WHY))


@pytest.fixture(scope="session")
def site() -> Iterator[SlurmSite]:
    folder = Path(tempfile.mkdtemp(prefix="ms"))  # short: munged's socket lies in it
    try:
        with SlurmSite(folder / "s", NODES) as present:
            yield present
    finally:
        shutil.rmtree(folder, ignore_errors=True)
