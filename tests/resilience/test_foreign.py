"""A trainer without MegaScale under the driver: a hang is named, and the trainer resumes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from megascale.cli.main import main
from megascale.config import load
from tests.chaos.foreign.job import DDP_PATTERN, TRAINERS, ForeignJob, Trainer
from tests.forked import popen

STEPS = 30  # the hang is in step 18
PLAIN = Trainer(str(Path(__file__).with_name("plain_trainer.py")), settings=(DDP_PATTERN,))


@pytest.fixture
def launch_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Launch jobs whose driver and agents are forked; the trainer's processes are new ones."""
    pytest.importorskip("fastapi")
    monkeypatch.setitem(TRAINERS, "plain", PLAIN)
    jobs = []

    def begin(fault: str, rank: int) -> ForeignJob:
        with mock.patch.object(subprocess, "Popen", popen):
            return begin_forked(fault, rank)

    def begin_forked(fault: str, rank: int) -> ForeignJob:
        jobs.append(ForeignJob(tmp_path, "plain", fault, rank, steps=STEPS, nodes=2))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def test_a_hang_is_named_and_the_trainer_resumes(launch_foreign):
    """Trainers load torch anew at each start, so `python -m tests.chaos foreign` has the other faults."""
    job = launch_foreign("sleep", 1)
    job.wait(lambda: job.step() >= 20, "a step after the hang")
    hang = job.events("hang")[0]
    assert hang.ranks == (1,), hang.evidence
    text = " ".join(hang.evidence)
    assert "all_gather" in text
    assert "break_rank" in text
    assert job.finish() == 0, job.output.read_text()
    assert not job.events("process_killed")
    assert job.step() == STEPS
    log = (job.run / "logs" / "rank-0.log").read_text()
    assert log.count("iter 1,") == 1
    config = load(job.run / "config.toml")
    assert config.foreign.per_node == 1
    assert config.foreign.command[-1] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--"], "is not followed by a command"), (["--per-node", "2"], "is for another trainer's command")],
)
def test_an_incomplete_command_line_is_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["megascale", "launch"] + list(arguments))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
