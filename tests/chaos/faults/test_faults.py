"""The fault runner: one real fault on the local site, rows that are kept, and calls that are refused."""

from __future__ import annotations

import json
import stat

import pytest

from megascale.errors import ConfigError
from tests.chaos.faults.command import SITES, load_site, open_work_folder
from tests.chaos.faults.report import show
from tests.chaos.faults.site import Row
from tests.forked import CHAOS, Forked

# Python that runs before the command. A campaign kills as late as its last run needs; one run needs few steps after.
FEW_STEPS = """
from dataclasses import replace
from tests.chaos.local.fault_cases import CASES
CASES["kill-rank"] = replace(CASES["kill-rank"], steps=80)
"""


def test_one_real_fault_is_injected_reported_and_not_repeated(chaos, tmp_path):
    arguments = [
        "faults",
        "--kind",
        "kill-rank",
        "--runs",
        "1",
        "--folder",
        tmp_path / "kept",
        "--out",
        tmp_path / "a.json",
    ]
    process = Forked(arguments, module=CHAOS, before=FEW_STEPS, cwd=tmp_path)
    try:
        output, _ = process.communicate(timeout=240)
        assert process.wait() == 0, output
    finally:
        process.kill()
    report = json.loads((tmp_path / "a.json").read_text())
    (row,) = report["rows"]
    assert (report["site"], row["kind"], row["right"], row["same"]) == ("local", "kill-rank", True, True)
    assert (tmp_path / "kept" / "reference-80.pt").exists()
    assert row["verdicts"] == ["process_killed"]
    assert all(row[phase] is not None for phase in ("detect", "stop", "load", "step", "total"))
    repeated = chaos(*arguments)
    assert repeated.returncode == 0
    assert json.loads((tmp_path / "a.json").read_text())["rows"] == [row]
    assert "1 of 1" in repeated.stdout


@pytest.mark.parametrize("name", SITES)
def test_every_site_lists_its_kinds(name, chaos):
    site = load_site(name)
    assert site.name == name
    assert list(site.kinds)
    problem = site.find_problem()
    if problem:
        done = chaos("faults", "--site", name, "--runs", "1")
        assert done.returncode == 2
        assert problem in " ".join(done.stderr.split())


def test_other_users_can_enter_the_temporary_work_folder_and_cannot_write_to_it():
    with open_work_folder(None) as work:
        assert stat.S_IMODE(work.stat().st_mode) == 0o755
    assert not work.exists()


def test_unknown_sites_and_kinds_are_named(chaos):
    with pytest.raises(ConfigError, match="--site=moon is unknown; known: local, machines"):
        load_site("moon")
    done = chaos("faults", "--kind", "meteor")
    assert done.returncode == 2
    assert "--kind=meteor is unknown on the site local" in done.stderr


def test_the_table_counts_right_runs_and_shows_the_worst(capsys):
    rows: list[Row] = [
        {"kind": "a", "right": True, "same": True, "detect": 1.0, "lost": 0, "actions": ["retry"]},
        {"kind": "a", "right": False, "same": None, "detect": 3.0, "lost": 4},
        {"kind": "b", "skipped": "no redis"},
    ]
    show(rows, ["a", "b", "c"])
    lines = capsys.readouterr().out.splitlines()
    assert any("1 of 2" in line and "1 of 1" in line and "2.0 (3.0)" in line and "2 (4)" in line for line in lines)
    assert any(line.split() == ["b", "skipped"] for line in lines)
