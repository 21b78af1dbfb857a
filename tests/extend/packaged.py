"""Packages of other people, as pip would leave them: found by every process that a test starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megascale.config import registry


def install(folder: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one module that is a plugin; returns the module's file."""
    details = folder / f"{name}-1.0.dist-info"
    details.mkdir(parents=True)
    module = folder / f"{name}.py"
    module.write_text(source)
    (details / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (details / "entry_points.txt").write_text(f"[{registry.PLUGIN_GROUP}]\n{name} = {name}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return module
