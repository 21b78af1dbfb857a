"""The campaign of restarts reports starts that fail by themselves."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

import pytest

from megascale.config import from_tree
from megascale.errors import TrainingError
from tests.chaos.faults.site import equal_weights
from tests.chaos.kubernetes.scale import list_missed_targets
from tests.chaos.local import restarts
from tests.chaos.local.restarts import RestartedRun


def test_a_start_that_ends_before_its_kill_is_an_error(tmp_path: Path) -> None:
    """It would otherwise count as killed, and the next start would resume as if nothing had happened."""
    config = from_tree({"train": {"runs": str(tmp_path), "device": "cpu"}, "data": {"train": [str(tmp_path / "none")]}})
    with pytest.raises(TrainingError, match=r"run first ended with 4 before it was killed: .*none"):
        RestartedRun(config, "first").attempt(random.Random(1), pace=5.0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("_GRACE_PERIOD", r"run first has made no step after step 0 in 0 s: started"),
        ("_END_SECONDS", r"run first has not ended 0 s after the kill of rank 1: started"),
    ],
)
def test_a_run_that_hangs_is_named_and_ended(
    setting: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HangingRun(RestartedRun):
        def start(self) -> None:
            self.log.write_text("started\n")
            self.process = subprocess.Popen(["sleep", "600"])

        def _kill(self, rng: random.Random) -> str:
            return "rank 1"  # the other processes do not end after it

    monkeypatch.setattr(restarts, setting, 0.0)
    monkeypatch.setattr(restarts, "_EARLY", float(setting == "_END_SECONDS"))
    monkeypatch.setattr(restarts.time, "sleep", lambda seconds: None)
    run = HangingRun(from_tree({"train": {"runs": str(tmp_path), "device": "cpu"}}), "first")
    with pytest.raises(TrainingError, match=message):
        run.attempt(random.Random(1), pace=5.0)
    assert run.process.returncode == -signal.SIGKILL


def test_models_without_tensors_are_not_equal() -> None:
    assert not equal_weights({}, {})


def test_a_missed_or_absent_figure_of_a_thousand_pods_is_named() -> None:
    figures = {"requests a second": 0.2, "change seen after s, most": 0.47, "current after expiry s": 1.6}
    assert list_missed_targets(figures) == []
    assert list_missed_targets(figures | {"change seen after s, most": None}) == [
        "change seen after s, most: None, at most 5"
    ]
    assert list_missed_targets(figures | {"requests a second": float("nan")}) == ["requests a second: nan, at most 50"]
