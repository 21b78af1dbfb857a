"""Orders to a rank that stays in its process between attempts."""

from __future__ import annotations

import os
import threading

import pytest

from megascale.core.process_orders import Park, Resume, encode_order
from megascale.train.parking import LeaveAttempt, Parking


def test_an_order_to_leave_that_follows_the_order_to_resume_at_once_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASCALE_ATTEMPT", "1")
    reading_end, writing_end = os.pipe()
    parking = Parking(reading_end)
    os.write(writing_end, encode_order(Resume({"MEGASCALE_ATTEMPT": "2"})) + encode_order(Park(2)))
    os.close(writing_end)
    for thread in threading.enumerate():
        if thread.name == "megascale-orders":
            thread.join()
    parking._join_attempt()
    assert os.environ["MEGASCALE_ATTEMPT"] == "2"
    with pytest.raises(LeaveAttempt):
        parking.check()
    os.close(reading_end)
