"""`megascale.watch.step`: a status file and a line of rank 0 in a launched job, nothing elsewhere."""

from __future__ import annotations

from megascale import watch
from megascale.core.status import read_status
from megascale.resilience.agent.progress_patterns import ProgressReader, Reading


def test_a_step_is_reported_in_a_launched_job_only(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watch, "_status", None)
    monkeypatch.delenv("MEGASCALE_STATUS", raising=False)
    watch.step(1, loss=2.0)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("MEGASCALE_STATUS", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    watch.step(7, loss=0.25, tokens=100)
    status = read_status(tmp_path / "rank-0.status")
    assert status is not None
    assert (status.phase, status.step) == ("train", 7)
    reading = ProgressReader([]).read(capsys.readouterr().out.rstrip("\n"))
    assert reading is not None
    assert (reading.step, reading.loss) == (7, 0.25)
    assert isinstance(reading, Reading)
