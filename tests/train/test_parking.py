"""Orders to a rank that stays in its process between attempts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale.core.exit_record import ExitKind, find_exit_record
from megascale.core.process_orders import Park, Resume, encode_order
from megascale.core.status import PARKED, read_status
from megascale.errors import TrainingError
from megascale.parallel.peer_watch import Member, PeerWatch, describe_process, make_page
from megascale.train import parking as parking_module
from megascale.train.parking import LeaveAttempt, Parking
from megascale.train.run_folder import RunFolder

SECONDS = 20.0  # far above what a loaded machine needs


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


class ExchangeOfTwo:
    """The watch of an exchange with a live peer, and a device that is idle once the exchange's waits are released."""

    def __init__(self, folder: Path) -> None:
        self.peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.released = threading.Event()
        local = describe_process(0)
        members = [local, Member(1, self.peer.pid, local.namespace)]
        page = make_page(2)
        self.watch = PeerWatch(
            rank=0,
            members=members,
            page=page,
            release=self.released.set,
            count_calls=lambda: 1,
            is_idle=lambda: True,
            timeout=600.0,
        )
        Path(page).unlink()

    def close(self) -> None:
        self.watch.stop()
        self.peer.kill()
        self.peer.communicate()


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[ExchangeOfTwo]:
    exchange = ExchangeOfTwo(tmp_path)
    yield exchange
    exchange.close()


@pytest.fixture
def parking(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Parking, int]]:
    """A parking in attempt 1, and the end of the pipe to which its orders are written."""
    monkeypatch.setenv("MEGASCALE_ATTEMPT", "1")
    reading_end, writing_end = os.pipe()
    yield Parking(reading_end), writing_end
    os.close(writing_end)


def list_watch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("peer watch")]


def test_an_order_to_leave_releases_waits_for_peers_and_a_parked_process_stops_their_watch(
    parking, exchange, tmp_path, monkeypatch
):
    parked, orders = parking
    os.write(orders, encode_order(Park(1)))
    assert exchange.released.wait(SECONDS)  # the main thread may wait for the peer, which lives
    with pytest.raises(TrainingError, match="rank 0: this rank leaves the attempt") as caught:
        exchange.watch.check()
    assert parked.decide_stay(caught.value)

    def synchronize() -> None:
        exchange.released.clear()
        assert exchange.released.wait(SECONDS)

    monkeypatch.setattr(parking_module, "_synchronize_device", synchronize)
    os.write(orders, encode_order(Resume({"MEGASCALE_ATTEMPT": "2"})))
    folder = RunFolder(tmp_path)
    parked.wait_for_next_attempt(folder, 0, 7)
    assert list_watch_threads() == []
    status = read_status(folder.status / "rank-0.status")
    assert (status.phase, status.exit.kind) == (PARKED, ExitKind.LOST_PEER)


def test_a_process_whose_device_has_failed_ends_instead_of_parking(parking, exchange, tmp_path, monkeypatch):
    parked, _ = parking
    assert parked.decide_stay(LeaveAttempt("the rank leaves the attempt after step 7"))

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(parking_module, "_synchronize_device", fail)
    folder = RunFolder(tmp_path)
    with pytest.raises(TrainingError, match="the rank leaves the attempt after step 7") as caught:
        parked.wait_for_next_attempt(folder, 0, 7)
    assert find_exit_record(caught.value).kind is ExitKind.LOST_PEER
    status = read_status(folder.status / "rank-0.status")
    assert status.phase == "failed"
    assert "CUDA error: an illegal memory access" in status.doubt
