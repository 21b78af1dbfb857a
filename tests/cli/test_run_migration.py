"""Run folders and a journal of an older version are read, evaluated and gone on with.

`old_runs.tar.xz` was made with commit 8ef3f18, in which keys, events and fields of the journal had other names:
`megascale train config.toml --train.name=alone`, and `megascale launch config.toml --train.name=job --parallel.data=2
--nodes 2 --train.steps=60 --checkpoint.interval=30`, of which rank 1 and then rank 0 was killed. Of the first the
checkpoint of step 4 was kept, of the second that of step 60; status files, plots and the token were left out.
"""

from __future__ import annotations

import sqlite3
import tarfile
from pathlib import Path

import pytest

from megascale import config
from megascale.core.events import Event
from megascale.resilience.driver.audit_log import AuditLog
from megascale.resilience.driver.state import recall
from megascale.resilience.driver.state.job_state import Phase
from megascale.resilience.driver.state.journal import FILE, JournalReader
from megascale.resilience.driver.state.lasting_journal import LastingJournal
from tests.conftest import lines

ARCHIVE = Path(__file__).parent / "old_runs.tar.xz"
RENAMED = ("overlap.products", "resilience.patience", "resilience.fruitless")
KINDS = ["driver_started", "node_joined", "node_joined", "attempt_started", "first_step"]
KINDS += ["process_killed", "recovery_action", "attempt_started", "first_step"] * 2 + ["job_done", "driver_ended"]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The folder with `config.toml`, `tokens` and `runs`, which is where commands run."""
    with tarfile.open(ARCHIVE) as archive:
        # The filter came with Python 3.11.4; the archive is this repository's own.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return tmp_path


def noted(said: str) -> list[str]:
    """Keys that were noted as old, in order."""
    return sorted(line.split(" ")[1] for line in said.splitlines() if line.startswith("note: "))


def losses(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in lines(run / "metrics.jsonl") if "loss" in r}


def test_the_archive_is_of_the_old_names(old):
    text = (old / "runs" / "job" / "config.toml").read_text()
    assert all(f"\n{key.partition('.')[2]} = " in text for key in RENAMED)
    assert '"event": "ladder"' in (old / "runs" / "job" / "events.jsonl").read_text()
    db = sqlite3.connect(old / "runs" / "job" / FILE)
    assert db.execute("SELECT count(*) FROM events WHERE kind = 'ladder'").fetchone() == (2,)
    assert '"fruitless": 1' in db.execute("SELECT state FROM job").fetchone()[0]
    db.close()


def test_a_run_is_evaluated_and_gone_on_with(old, megascale):
    run = old / "runs" / "alone"
    before = losses(run)
    evaluated = megascale("evaluate", "runs/alone", "--device", "cpu")
    assert evaluated.returncode == 0, evaluated.stderr
    assert noted(evaluated.stderr) == sorted(RENAMED)
    done = megascale("train", "config.toml", "--train.name=alone")
    assert done.returncode == 0, done.stderr
    assert noted(done.stderr) == sorted(RENAMED)
    assert "settings changed" not in done.stdout + done.stderr
    resumed = [r for r in lines(run / "events.jsonl") if r["event"] == "resumed"]
    assert [r["step"] for r in resumed] == [4]
    assert losses(run) == pytest.approx(before, rel=1e-4)
    assert before.keys() == set(range(1, 9))
    found = config.load(run / "config.toml")
    assert (found.overlap.gemms, found.resilience.grace_period, found.resilience.no_progress_limit) == ("off", 50, 4)


def test_commands_show_a_job_with_todays_names(old, megascale):
    events = megascale("events", "runs/job")
    assert events.returncode == 0, events.stderr
    assert events.stdout.count("recovery_action on n") == 2
    assert "ladder" not in events.stdout
    assert '"kind": "recovery_action"' in megascale("events", "runs/job", "--all", "--json").stdout
    nodes = megascale("nodes", "runs/job")
    assert "no driver" in nodes.stdout
    assert all(word in nodes.stdout for word in ("n0", "127.0.1.2", "n1", "127.0.1.3"))
    jobs = megascale("jobs", "runs")
    assert "every rank ended well" in jobs.stdout
    assert "done" in jobs.stdout


def test_a_journal_has_todays_events_and_fields(old):
    run = old / "runs" / "job"
    reader = JournalReader(run)
    assert [entry.kind for entry in reader.events()] == KINDS
    assert set(KINDS) <= set(Event)
    assert (reader.job.phase, reader.job.best, reader.job.starts_without_progress) == (Phase.DONE, 15, 1)
    reader.close()
    journal, damaged = LastingJournal.take(run, 0.05)
    assert not damaged
    assert journal.epoch == 2
    assert recall.restore(journal, run) == recall.Recalled(0, 3)
    uses = AuditLog(run, journal, lambda who, text: None).uses()
    assert [(use.action, use.node) for use in uses] == [("retry", "n1"), ("retry", "n0")]
    journal.close()


def test_events_that_an_old_journal_has_lost_come_back_with_todays_names(old):
    run = old / "runs" / "job"
    db = sqlite3.connect(run / FILE)
    db.execute("DELETE FROM events WHERE id > 6")
    db.commit()
    db.close()
    journal, _ = LastingJournal.take(run, 0.05)
    assert recall.restore(journal, run).events == len(KINDS) - 6
    assert [entry.kind for entry in journal.events()] == KINDS
    assert recall.restore(journal, run).events == 0
    journal.close()


def test_a_job_goes_on_under_todays_driver(old, megascale):
    pytest.importorskip("fastapi")
    run = old / "runs" / "job"
    words = ["--train.name=job", "--parallel.data=2", "--nodes=2", "--resilience.test_spares=false"]
    done = megascale("launch", "config.toml", *words, "--train.steps=64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert noted(done.stderr) == sorted(RENAMED)
    assert losses(run).keys() == set(range(1, 65))
    reader = JournalReader(run)
    kinds = [entry.kind for entry in reader.events()]
    assert kinds[: len(KINDS)] == KINDS
    assert kinds[-2:] == ["job_done", "driver_ended"]
    assert (reader.job.phase, reader.job.attempt) == (Phase.DONE, 4)
    reader.close()
