"""The clone of the repository that benchmarks and chaos campaigns run from."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def export_python_path() -> None:
    """Add the clone's root to PYTHONPATH, so that child processes import `benchmarks` and `tests` from any folder."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, paths)])
