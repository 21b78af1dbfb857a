"""`tests.chaos soak`: a soak that was ended goes on at a case, with the cases that the whole one would have had."""

from __future__ import annotations

import pytest

from megascale.errors import ConfigError, TrainingError
from tests.chaos.soak import crashes as soak_crashes
from tests.chaos.soak.command import PARTS, SoakCase, soak


def test_going_on_at_a_case_gives_the_same_cases(tmp_path, monkeypatch, capsys):
    ran: list[tuple[str, str, int]] = []

    def case(file, name, cause, step):
        ran.append((name, cause.name, step))
        return SoakCase(name, len(ran) < 13, f"step {step}")  # the last of all fails

    monkeypatch.setattr(soak_crashes, "_case", case)
    out = tmp_path / "soak.json"
    soak(parts="crashes", count=None, first=1, seed=3, keep=tmp_path / "whole", out=out, minutes=None, every=60.0)
    full = ran[:]
    assert len(full) == PARTS["crashes"] == len({cause for _, cause, _ in full})
    with pytest.raises(TrainingError, match="1 cases did not hold: crashes: crash-9"):
        soak(parts="crashes", count=None, first=8, seed=3, keep=tmp_path / "rest", out=out, minutes=None, every=60.0)
    assert ran[len(full) :] == full[7:]
    assert "crashes 8/10" in capsys.readouterr().out


def test_a_case_that_there_is_not_or_that_needs_those_before_it_is_refused(tmp_path):
    def start(parts, first, count=None):
        soak(
            parts=parts,
            count=count,
            first=first,
            seed=0,
            keep=tmp_path,
            out=tmp_path / "soak.json",
            minutes=None,
            every=60.0,
        )

    with pytest.raises(ConfigError, match="--first=2: each case of journal depends on those before it"):
        start("crashes,journal", 2)
    with pytest.raises(ConfigError, match="--first=4: layouts has 3 cases"):
        start("layouts", 4, count=3)
    assert not list(tmp_path.iterdir())
