"""What the fork server of a node with GPUs prepares."""

from __future__ import annotations

import sys

import pytest
import torch

from megascale.resilience.agent.rank_programs import OwnTrainer
from megascale.train import warm_up


def test_the_fork_server_imports_late_modules_where_a_gpu_is(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process imports them, so that none waits seconds for its engine after a failure."""
    assert f"{warm_up.__name__}:{warm_up.import_late_modules.__name__}" in OwnTrainer.modules
    monkeypatch.setattr(warm_up, "_LATE_MODULES", ("not_there", "this"))  # `this` prints a poem
    monkeypatch.delitem(sys.modules, "this", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    warm_up.import_late_modules(tmp_path)
    assert "this" not in sys.modules
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    warm_up.import_late_modules(tmp_path)
    assert "this" not in sys.modules
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    warm_up.import_late_modules(tmp_path)
    assert "this" in sys.modules
