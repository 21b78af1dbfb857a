"""Dumps of the flight recorder on request: a dump that fails leaves the next request answered."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time

from megascale.core.group_names import ATTEMPT_KEY
from megascale.train import telemetry
from megascale.train.telemetry import Telemetry
from tests.conftest import POLL_INTERVAL


def test_a_dump_that_fails_does_not_end_the_answers(tmp_path, monkeypatch, caplog):
    answers = iter([RuntimeError("no recorder yet"), '{"pg_status": {}}'])
    failed = threading.Event()

    def records() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            failed.set()
            raise answer
        return answer

    monkeypatch.setattr(telemetry.torch_private, "dump_flight_recorder", records)
    rank = object.__new__(Telemetry)
    rank._is_answering = True
    rank._attempt = 2
    rank._pipe = tmp_path / "rank-0.ask"
    rank._flight_file = tmp_path / "rank-0.json"
    os.mkfifo(rank._pipe)
    thread = threading.Thread(target=rank._answer_requests, daemon=True)
    thread.start()
    rank._pipe.write_text("")
    assert failed.wait(30.0)
    rank._pipe.write_text("")
    deadline = time.monotonic() + 30.0
    while not rank._flight_file.exists():
        assert thread.is_alive()
        assert time.monotonic() < deadline, caplog.text
        time.sleep(POLL_INTERVAL)
    assert json.loads(rank._flight_file.read_text()) == {ATTEMPT_KEY: 2, "pg_status": {}}
    assert "a dump of the flight recorder failed (RuntimeError: no recorder yet)" in caplog.text
    rank._is_answering = False
    while thread.is_alive():
        with contextlib.suppress(OSError):  # it is not waiting yet
            os.close(os.open(rank._pipe, os.O_WRONLY | os.O_NONBLOCK))
        time.sleep(POLL_INTERVAL)
