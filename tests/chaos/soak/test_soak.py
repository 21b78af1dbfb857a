"""`tests.chaos soak`: a soak that was ended goes on at a case, with the cases that the whole one would have had."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from megascale.errors import ConfigError, TrainingError
from tests.chaos.soak import crashes as soak_crashes
from tests.chaos.soak import endurance
from tests.chaos.soak.command import PARTS, SoakCase, soak


def test_going_on_at_a_case_gives_the_same_cases(tmp_path, monkeypatch, capsys):
    ran: list[tuple[str, str, int]] = []

    def case(file, name, cause, step):
        ran.append((name, cause.name, step))
        return SoakCase(name, len(ran) < 13, f"step {step}")  # the last of all fails

    monkeypatch.setattr(soak_crashes, "_case", case)
    out = tmp_path / "soak.json"
    soak(
        parts="crashes",
        count=None,
        first=1,
        seed=3,
        keep=tmp_path / "whole",
        out=out,
        minutes=None,
        every=60.0,
        resume=None,
    )
    full = ran[:]
    assert len(full) == PARTS["crashes"] == len({cause for _, cause, _ in full})
    with pytest.raises(TrainingError, match="1 cases did not hold: crashes: crash-9"):
        soak(
            parts="crashes",
            count=None,
            first=8,
            seed=3,
            keep=tmp_path / "rest",
            out=out,
            minutes=None,
            every=60.0,
            resume=None,
        )
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
            resume=None,
        )

    with pytest.raises(ConfigError, match="--first=2: each case of journal depends on those before it"):
        start("crashes,journal", 2)
    with pytest.raises(ConfigError, match="--first=4: layouts has 3 cases"):
        start("layouts", 4, count=3)
    assert not list(tmp_path.iterdir())


def test_a_pause_longer_than_a_call_goes_on_in_the_next_one():
    report = {"seed": 1, "every": 120.0}

    def divide(available):
        return endurance.divide_pause(report, random.Random("1-0"), available)

    full, remaining = divide(1e9)
    assert remaining == 0
    assert full > endurance.LEAST + 20
    assert divide(20.0) == (20.0, full - 20)
    report["waited"] = 20.0
    assert divide(1e9) == (full - 20, 0)
    report["waited"] = full - 1
    assert divide(1e9) == (endurance.LEAST, 0)  # since the start of the call


def test_calls_of_a_soak_add_up(tmp_path, monkeypatch):
    """Each call adds faults of the numbers that follow. The summary counts all calls, also one that was killed."""
    out = tmp_path / "soak.json"
    report = endurance.load_report(120.0, 7, out)
    rows = [("kill-rank", 1.0, 1, ""), ("kill-rank", 3.0, 0, ""), ("stop-rank", 11.0, 1, ""), ("kill-rank", 0, 0, "x")]
    for number, (kind, seconds, lost, problem) in enumerate(rows):
        row = {"number": number, "kind": kind, "problem": problem}
        outcome = {"total": seconds, "cost": seconds + lost, "lost": lost, "kept": 1, "seconds": {"detect": seconds}}
        report["faults"].append(row if problem else row | outcome)
    report["calls"] = [
        {"seconds": 1800.0, "problem": "", "remains": []},
        {"seconds": 900.0, "problem": "fault 3: x", "remains": ["process 5: sleep", "folder or file /t/a"]},
    ]
    summary = endurance.summarise(report)
    assert (summary["calls"], summary["hours"], summary["faults"]) == (2, 0.75, 4)
    assert (summary["problems"], summary["remains"]) == (1, 2)
    assert summary["kinds"]["kill-rank"] == {
        "faults": 3,
        "recovered": 2,
        "mean_seconds": 2.0,
        "mean_cost": 2.5,
        "mean_lost_steps": 0.5,
    }
    assert summary["kinds"]["segfault"] == {"faults": 0, "recovered": 0}
    out.write_text(json.dumps(report))
    assert endurance.load_report(120.0, 7, out) == report
    assert endurance.read_settings(out) == (7, 120.0)
    with pytest.raises(ConfigError, match="holds a soak of --seed=7 --every=120; name another file"):
        endurance.load_report(120.0, 8, out)

    def resume(file, minutes):
        soak(parts="crashes", count=None, first=1, seed=0, keep=None, out=out, minutes=minutes, every=60.0, resume=file)

    called = []

    def endure(*arguments: Any) -> dict[str, Any]:
        called.append(arguments)
        return report

    monkeypatch.setattr(endurance, "endure", endure)
    with pytest.raises(TrainingError, match="3 problems"):
        resume(out, 2.0)
    assert called == [(2.0, 120.0, 7, out)]
    with pytest.raises(ConfigError, match="is not the report of a soak"):
        resume(tmp_path / "other.json", 2.0)
    with pytest.raises(ConfigError, match="needs --minutes"):
        resume(out, None)
