"""The watch over the processes of an exchange: real processes that die, close or hang, and waits that end."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascale.core.exit_record import ExitKind, find_exit_record
from megascale.data.loader.host_loader import _measure_work
from megascale.errors import TrainingError
from megascale.parallel import peer_watch
from megascale.parallel.peer_watch import Member, PeerWatch, describe_process, has_ended, make_page

SECONDS = 20.0  # far above what a loaded machine needs


class Peer:
    """A process that waits for its input to end."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def kill(self) -> None:
        """End it; its parent has not waited for it yet, as with a launcher that does other work."""
        self.process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def peer() -> Iterator[Peer]:
    process = Peer()
    yield process
    process.close()


class Waits:
    """A rank's waits, which `release` ends, and its progress."""

    def __init__(self) -> None:
        self.count: Callable[[], int] = lambda: 7
        self.is_idle: Callable[[], bool] = lambda: True
        self.released = threading.Event()

    def release(self) -> None:
        self.released.set()


@pytest.fixture
def page() -> Iterator[str]:
    path = make_page(3)
    yield path
    Path(path).unlink()


def watch_peer(peer: Peer, page: str, waits: Waits, timeout: float = 600.0) -> PeerWatch:
    local = describe_process(4)
    members = [local, Member(5, peer.process.pid, local.namespace)]
    return PeerWatch(0, members, page, waits.release, waits.count, waits.is_idle, timeout)


def without_descriptors(pid: int) -> int:
    raise OSError(38, "no such system call")


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_killed_peer_ends_the_waits_with_an_error(peer, page, monkeypatch, has_descriptors):
    if not has_descriptors:
        monkeypatch.setattr(os, "pidfd_open", without_descriptors)
        monkeypatch.setattr(peer_watch, "_POLL_SECONDS", 0.02)
    waits = Waits()
    watch = watch_peer(peer, page, waits)
    watch.check()
    assert not waits.released.is_set()
    peer.kill()
    assert waits.released.wait(SECONDS)
    waits.released.clear()
    assert waits.released.wait(SECONDS)  # again, because later calls wait as well
    with pytest.raises(TrainingError, match=rf"rank 4: rank 5 \(process {peer.process.pid}\) has ended") as caught:
        watch.check()
    record = find_exit_record(caught.value)
    assert (record.kind, record.rank) == (ExitKind.LOST_PEER, 5)
    watch.close(failed=True)
    waits.released.clear()
    assert waits.released.wait(SECONDS)  # until the process has ended
    watch.close()
    assert Path(page).read_bytes()[0] == 0  # its own peers do not take a failure for a planned end


def test_a_peer_that_closes_is_not_missed(peer, page):
    waits = Waits()
    watch = watch_peer(peer, page, waits)
    with Path(page).open("r+b") as file:  # as the peer's own watch does
        file.seek(1)
        file.write(b"\1")
    peer.kill()
    peer.process.wait()
    watch.close()
    watch.check()
    assert not waits.released.is_set()
    assert Path(page).read_bytes()[0] == 1


def test_calls_without_progress_end_after_the_timeout(peer, page):
    waits = Waits()
    waits.is_idle = lambda: False
    watch = watch_peer(peer, page, waits, timeout=0.1)
    assert waits.released.wait(SECONDS)
    with pytest.raises(TrainingError, match=r"rank 4: the exchange has made no progress for 0.1 seconds") as caught:
        watch.check()
    assert find_exit_record(caught.value).rank == -1
    watch.close()


@pytest.mark.parametrize("case", ["idle", "in progress"])
def test_an_exchange_that_is_idle_or_makes_progress_has_no_timeout(peer, page, case):
    waits = Waits()
    looks = threading.Semaphore(0)
    calls = itertools.count()

    def count_calls() -> int:
        looks.release()
        return next(calls) if case == "in progress" else 7

    waits.count = count_calls
    waits.is_idle = lambda: case == "idle"
    watch = watch_peer(peer, page, waits, timeout=0.02)
    for _ in range(12):  # several times the time-out
        assert looks.acquire(timeout=SECONDS)
    watch.close()
    watch.check()
    assert not waits.released.is_set()


def test_a_peer_out_of_reach_is_refused(peer, page):
    waits = Waits()
    local = describe_process(0)
    with pytest.raises(OSError, match="rank 3 is in another PID namespace"):
        PeerWatch(0, [local, Member(3, local.pid, "pid:[1]")], page, waits.release, waits.count, waits.is_idle, 1.0)
    peer.kill()
    peer.process.wait()
    with pytest.raises(OSError, match="rank 5 has ended"):
        watch_peer(peer, page, waits)


STUCK = """
import sys, threading, time
from megascale.data.loader.host_loader import _measure_work
from megascale.parallel import peer_watch
limit, blocked = sys.argv[3:]
setattr(peer_watch, limit, 0.1)
peer_watch._POLL_SECONDS = 0.05
driver = threading.Event()
block = lambda *_: driver.wait()
release = block if "release" in blocked else lambda: None
is_idle = block if "is_idle" in blocked else lambda: True
local = peer_watch.describe_process(0)
members = [local, peer_watch.Member(1, int(sys.argv[1]), local.namespace)]
watch = peer_watch.PeerWatch(0, members, sys.argv[2], release, lambda: 0, is_idle, timeout=4.0)
print("watching", flush=True)
time.sleep(600)  # as in a collective that the dead peer would have to join
"""


@pytest.mark.parametrize(
    ("limit", "blocked", "reason"),
    [
        ("_RAISE_SECONDS", "", "the host has made no check for 0.1 seconds"),
        # A host that launches into a full queue blocks other threads' calls of the driver.
        ("_BLOCKED_SECONDS", "release is_idle", "a release of its waits has not returned for 0.1 seconds"),
    ],
)
def test_a_process_that_cannot_go_on_is_ended(peer, page, limit, blocked, reason):
    command = [sys.executable, "-c", STUCK, str(peer.process.pid), page, limit, blocked]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as stuck:
        assert stuck.stdout.readline() == "watching\n"
        peer.kill()
        _, errors = stuck.communicate(timeout=60)
    assert stuck.returncode == 1
    failure = f"rank 0: rank 1 (process {peer.process.pid}) has ended during the exchange with it"
    assert f"{failure}; ending: {reason}" in errors


def test_a_process_whose_name_is_not_unicode_is_read():
    code = "open('/proc/self/comm', 'wb').write(b'\\xff\\xfe'); print('named', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"named\n"
        assert not has_ended(process.pid)
        assert _measure_work(process.pid) >= 0
        process.communicate(b"\n")
    assert has_ended(process.pid)


def test_a_rank_that_leaves_its_attempt_releases_waits_until_its_process_parks(peer, page):
    waits = Waits()
    watch = watch_peer(peer, page, waits)
    peer_watch.release_all("this rank leaves the attempt")
    assert waits.released.wait(SECONDS)
    with pytest.raises(TrainingError, match="rank 4: this rank leaves the attempt") as caught:
        watch.check()
    assert find_exit_record(caught.value).kind is ExitKind.LOST_PEER
    watch.close(failed=True)

    def synchronize() -> None:
        waits.released.clear()
        assert waits.released.wait(SECONDS)  # the device becomes idle only while waits are released

    peer_watch.stop_all(synchronize)
    assert list_watch_threads() == []
    assert Path(page).read_bytes()[0] == 0  # peers do not take the failure for a planned end
    peer_watch.release_all("a later attempt")  # a stopped watch has no pipe to write to
    peer_watch.stop_all(pytest.fail)


LEAVING = """
import sys, threading, time
from megascale.parallel import peer_watch
peer_watch._RAISE_SECONDS = 0.05
released = [threading.Event() for _ in range(20)]
pending = iter(released)
release = lambda: next(pending, released[-1]).set()
local = peer_watch.describe_process(0)
members = [local, peer_watch.Member(1, int(sys.argv[1]), local.namespace)]
watch = peer_watch.PeerWatch(0, members, sys.argv[2], release, lambda: 0, lambda: True, timeout=60.0)
if sys.argv[3] == "after a failure":
    watch._fail("rank 1 has ended")
peer_watch.release_all("this rank leaves the attempt")
ends = watch._is_closing.wait(1.0)  # twenty times the limit; the process would have ended
peer_watch.stop_all(lambda: None)
print("parked", flush=True)
"""


@pytest.mark.parametrize("case", ["on an order", "after a failure"])
def test_a_process_that_leaves_its_attempt_may_take_longer_than_one_that_does_not_know(case, peer, page):
    """It copies state to memory meanwhile. The agent limits the time that this takes."""
    command = [sys.executable, "-c", LEAVING, str(peer.process.pid), page, case]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "parked\n", "")


@pytest.mark.parametrize("is_late", [False, True])
def test_updates_are_held_before_waits_are_released(is_late, peer, page):
    """Work that follows a released wait has wrong values, which must not reach the optimizer's state."""
    waits = Waits()
    watch = watch_peer(peer, page, waits)
    order: list[str] = []

    def release() -> None:
        order.append("release")
        waits.release()

    watch._release = release
    if not is_late:
        watch.call_on_failure(lambda: order.append("hold"))
    peer.kill()
    assert waits.released.wait(SECONDS)
    if is_late:  # an engine is made while a peer dies, and has run no step
        watch.call_on_failure(lambda: order.append("hold"))
        assert "hold" in order
    else:
        assert order[0] == "hold"
    watch.stop()


def test_a_rank_that_fails_without_a_lost_peer_releases_its_waits(peer, page):
    waits = Waits()
    watch = watch_peer(peer, page, waits)
    watch.close(failed=True)
    assert waits.released.wait(SECONDS)
    peer_watch.stop_all(lambda: None)
    assert list_watch_threads() == []


def list_watch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("peer watch")]


def test_members_on_several_hosts_or_in_several_namespaces_are_counted() -> None:
    local = peer_watch.describe_process(0)
    assert local.boot_id
    assert peer_watch.explain_separation([local, local._replace(world_rank=1)]) == ""
    assert peer_watch.explain_separation([local, local._replace(boot_id="other")]) == "its ranks are on 2 hosts"
    separated = [local, local._replace(namespace="pid:[1]")]
    assert peer_watch.explain_separation(separated) == "its ranks are in 2 PID namespaces"


def test_hosts_without_a_boot_id_do_not_end_the_start(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(peer_watch, "_BOOT_ID", tmp_path / "missing")
    local = peer_watch.describe_process(0)
    assert local.boot_id == ""
    assert peer_watch.explain_separation([local, local._replace(world_rank=1)]) == ""
    assert peer_watch.explain_separation([local, local._replace(boot_id="other")]) == "its ranks are on 2 hosts"
