"""The file with the driver's address: what a command says if it is missing, damaged or unreadable."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from megascale.errors import DataError, TrainingError
from megascale.resilience.driver.api.client import send_request
from megascale.resilience.driver.state.job_state import JobState, Phase
from megascale.resilience.driver.state.journal import Journal
from megascale.resilience.protocol.contact import Contact, read_contact, write_contact


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "driver").mkdir()
    write_contact(tmp_path, Contact("job", 1, 1, ("127.0.0.1", 1), "http://127.0.0.1:9"))
    return tmp_path


def test_a_run_without_a_driver_is_named(tmp_path: Path, run: Path) -> None:
    assert read_contact(run).job == "job"
    (run / "driver" / "contact.json").unlink()
    with pytest.raises(DataError, match="no driver was started there"):
        read_contact(run)


@pytest.mark.parametrize("text", ["", "[]", '{"agents": 3}', '{"job": "a"', '{"agents": ["a", 1], "unknown": 2}'])
def test_a_damaged_file_is_not_called_missing(run: Path, text: str) -> None:
    (run / "driver" / "contact.json").write_text(text)
    with pytest.raises(DataError, match=r"contact\.json is damaged .* start it again"):
        read_contact(run)


def test_a_file_of_another_user_is_not_called_missing() -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:  # other users cannot enter the folders of `tmp_path`
        os.chmod(folder, 0o755)
        file = Path(folder) / "driver" / "contact.json"
        file.parent.mkdir()
        file.touch(0)
        if user == 0:  # root may read every file
            os.seteuid(65534)
        try:
            with pytest.raises(DataError, match="cannot be read: it belongs to the user of the job"):
                read_contact(Path(folder))
        finally:
            os.seteuid(user)


def test_orders_to_an_ended_job_say_that_it_has_ended(run: Path) -> None:
    journal, _ = Journal.take(run, 0.05)
    journal.save_job(replace(JobState("job"), phase=Phase.DONE))
    journal.close()
    for name in ("token.read", "token.act"):
        (run / "driver" / name).touch(0o600)
        (run / "driver" / name).write_text("0" * 64)
    with pytest.raises(TrainingError, match=r"the job of .* has ended: it is done") as error:
        send_request(run, "POST", "/v1/job/pause", {"why": "test"})
    assert "urlopen" not in str(error.value)
    (run / "journal.sqlite").unlink()
    with pytest.raises(TrainingError, match=r"does not answer at http://127\.0\.0\.1:9 \(Connection refused\); start"):
        send_request(run, "POST", "/v1/job/pause", {"why": "test"})
