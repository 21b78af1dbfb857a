"""Orders to a rank that stays in its process between attempts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale import config, torch_private
from megascale.checkpoint.object_collectives import Peers
from megascale.core.exit_record import ExitKind, find_exit_record
from megascale.core.grid import Grid
from megascale.core.layout import lay_out
from megascale.core.process_orders import (
    DYING_VARIABLE,
    EARLY_VARIABLE,
    PREPARED_VARIABLE,
    Park,
    PrepareGroups,
    Resume,
    encode_order,
)
from megascale.core.status import PARKED, read_status
from megascale.errors import TrainingError
from megascale.observe.hang.flight import read_flight
from megascale.parallel.peer_watch import Member, PeerWatch, describe_process, has_ended, make_page
from megascale.parallel.runtime import Runtime
from megascale.rendezvous import start_job
from megascale.rendezvous.abort import list_groups
from megascale.rendezvous.groups import Groups, shutdown
from megascale.train import parking as parking_module
from megascale.train.engine_axes import make_axis, make_p2p_streams
from megascale.train.loop import Trainer
from megascale.train.parking import LeaveAttempt, Parking
from megascale.train.predecessors import await_predecessors
from megascale.train.rank_info import RankInfo
from megascale.train.run_folder import RunFolder
from megascale.train.stop_requests import StopRequests
from megascale.train.telemetry import _list_groups
from tests.forked import context
from tests.rendezvous.conftest import free_port

SECONDS = 20.0  # far above what a loaded machine needs
LIMIT = 60.0  # seconds of a start, much less than the limits of the settings


def test_an_order_to_leave_that_follows_the_order_to_resume_at_once_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASCALE_ATTEMPT", "1")
    reading_end, writing_end = os.pipe()
    parking = Parking(reading_end)
    os.write(writing_end, encode_order(Resume({"MEGASCALE_ATTEMPT": "2"})) + encode_order(Park(2)))
    os.close(writing_end)
    for thread in threading.enumerate():
        if thread.name == "megascale-orders":
            thread.join()
    parking._set_environment(parking._await_resume())
    assert os.environ["MEGASCALE_ATTEMPT"] == "2"
    with pytest.raises(LeaveAttempt):
        parking.check()
    os.close(reading_end)


def _start(rank: int, port: int, settings: list[str], must_leave: Any, is_waiting: Any, results: Any) -> None:
    """Start as one of two ranks, leave on the order that follows `must_leave`, and put what came of it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), MEGASCALE_ATTEMPT="1", GLOO_SOCKET_IFNAME="lo")
    reading_end, writing_end = os.pipe()
    parking = Parking(reading_end)

    def send_order() -> None:
        must_leave.wait()
        os.write(writing_end, encode_order(Park(1)))

    threading.Thread(target=send_order, daemon=True).start()
    parking.watch_start()
    is_waiting.set()
    try:
        start_job.initialise(
            config.load(None, settings), rank=rank, world=2, local_rank=rank, device="cpu", check=parking.check
        )
    except LeaveAttempt as error:
        failure: Exception = error
    except TrainingError as error:
        failure = error
        try:
            parking.leave_start(torch.device("cpu"))
        except LeaveAttempt as left:
            failure = left
    parking.is_reused = True  # and its last start made no step, which would be a doubt once it had its groups
    results.put((type(failure).__name__, parking.decide_stay(failure), parking.doubt, dist.is_initialized()))


def _agree_and_die(rank: int, port: int) -> None:
    """Agree with the other rank on the settings, and end before the groups are made."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    start_job._make_default_group = lambda *arguments, **options: os._exit(9)
    start_job.initialise(config.load(None, []), rank=rank, world=2, local_rank=rank, device="cpu")


_CONCURRENT = "rendezvous.concurrent_connections=true"


def _agree_and_hang(rank: int, port: int, is_connecting: Any) -> None:
    """Make the groups with the other rank, and hang while ranks connect."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")

    def hang(device: torch.device, connects_pairs: bool) -> None:
        is_connecting.set()
        threading.Event().wait()

    start_job._connect_default_group = hang
    start_job.initialise(config.load(None, [_CONCURRENT]), rank=rank, world=2, local_rank=rank, device="cpu")


@pytest.mark.parametrize("case", ["no peer", "no server", "a peer that dies", "a peer that hangs"])
def test_a_rank_leaves_a_start_in_which_a_peer_is_missing(case: str) -> None:
    must_leave, is_waiting, results = context.Event(), context.Event(), context.Queue()
    port = free_port()
    rank = 1 if case == "no server" else 0
    settings = [_CONCURRENT] if case == "a peer that hangs" else []
    waiting = context.Process(target=_start, args=(rank, port, settings, must_leave, is_waiting, results))
    waiting.start()
    peers = []
    try:
        assert is_waiting.wait(LIMIT)
        if case == "a peer that dies":
            peer = context.Process(target=_agree_and_die, args=(1, port))
            peer.start()
            peer.join(LIMIT)
            assert peer.exitcode == 9
        if case == "a peer that hangs":
            is_connecting = context.Event()
            peers.append(context.Process(target=_agree_and_hang, args=(1, port, is_connecting)))
            peers[0].start()
            assert is_connecting.wait(LIMIT)
        ordered = time.monotonic()
        must_leave.set()
        assert results.get(timeout=LIMIT) == ("LeaveAttempt", True, "", False)
        assert time.monotonic() - ordered < LIMIT
    finally:
        for process in [waiting, *peers]:
            process.kill()
            process.join()


def _meet_in_two_attempts(rank: int, option: str, ports: tuple[int, int], folder: Path, results: Any) -> None:
    """Make the groups of two attempts in this process, and put the names that torch, axes and files give them."""
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", TORCH_FR_BUFFER_SIZE="100")
    reading_end, _ = os.pipe()
    parking = Parking(reading_end)
    layout = lay_out(config.load(None, [option, "--model.vocab_size=64", "--train.global_batch=16"]), 2)
    info = RankInfo(rank, world=2, local_rank=rank, local_world=2, device=torch.device("cpu"))
    for attempt, port in enumerate(ports, start=1):
        os.environ.update(MASTER_PORT=str(port), MEGASCALE_ATTEMPT=str(attempt))
        groups = Trainer(layout, info, parking).attempt._make_groups()
        in_torch = [group.group_name for group in groups.by_kind.values()]
        in_torch += [channel.group.group_name for channel in groups.p2p.values()]
        plain = [make_axis(Runtime(), groups, kind).name for kind in groups.by_kind]
        plain += [stream.name for stream in make_p2p_streams(groups).values()]
        dump = folder / f"flight-{attempt}-rank-{rank}.json"
        dump.write_text(torch_private.dump_flight_recorder())
        results.put(
            {
                "attempt": attempt,
                "torch": in_torch,
                "plain": plain,
                "record of calls": [name for name, _ in _list_groups(groups)],
                "flight recorder": list(read_flight(dump, rank).record.groups),
                "aborts": [name for name, _ in list_groups()],
            }
        )
        shutdown(groups, failed=True)


@pytest.mark.parametrize(
    ("option", "name"), [("--parallel.data=2", "data_reduce/0"), ("--parallel.pipeline=2", "forward/0-1")]
)
def test_groups_of_two_attempts_have_one_name_for_people_and_two_for_torch(
    option: str, name: str, tmp_path: Path
) -> None:
    """torch's symmetric memory would otherwise take the store of the first attempt, which has ended."""
    ports, results = (free_port(), free_port()), context.Queue()
    processes = []
    for rank in range(2):
        arguments = (rank, option, ports, tmp_path, results)
        processes.append(context.Process(target=_meet_in_two_attempts, args=arguments))
        processes[-1].start()
    try:
        entries = [results.get(timeout=LIMIT) for _ in range(4)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    for entry in entries:
        assert name in entry["plain"]
        assert entry["torch"] == [f"{plain_name}@{entry['attempt']}" for plain_name in entry["plain"]]
        assert entry["record of calls"] == ["world", *entry["plain"]]
        assert set(entry["aborts"]) > set(entry["plain"])
        # It has collectives of the start; gloo does not record messages.
        assert {"world"} < set(entry["flight recorder"]) <= {"world", *entry["plain"]}


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
    parking = Parking(reading_end)
    yield parking, writing_end
    os.close(writing_end)
    parking._drop_groups("the test has ended")
    await_condition(lambda: "megascale-groups" not in [thread.name for thread in threading.enumerate()])


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


def test_a_replacement_waits_until_a_killed_process_has_freed_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    dying = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setenv(DYING_VARIABLE, f"{dying.pid},{ended.pid}")
    checks: list[bool] = []

    def check() -> None:
        checks.append(has_ended(dying.pid))
        if len(checks) == 3:
            dying.kill()

    await_predecessors(check)
    assert checks[:3] == [False, False, False]
    assert has_ended(dying.pid)
    count = len(checks)
    assert await_predecessors(check) < SECONDS  # a later call of the attempt does not wait
    assert len(checks) == count
    for process in (dying, ended):
        process.communicate()


def test_a_replacement_does_not_wait_forever_for_a_process_id_that_is_used_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DYING_VARIABLE, str(os.getpid()))
    assert await_predecessors(lambda: None, limit_seconds=0.05) >= 0.05
    assert f"processes [{os.getpid()}], which were killed, have not ended" in caplog.text


def test_a_process_that_prepares_for_a_join_waits_for_the_memory_of_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parking
) -> None:
    parked, writing_end = parking
    dying = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for name, value in ((PREPARED_VARIABLE, "1"), (DYING_VARIABLE, str(dying.pid)), ("MEGASCALE_NODE", "n0")):
        monkeypatch.setenv(name, value)
    has_prepared = threading.Event()
    ended_before_warm_up: list[bool] = []

    def kill_once_awaited() -> None:
        while DYING_VARIABLE in os.environ and not has_prepared.wait(0.01):
            pass
        dying.kill()

    def note_warm_up(*_: Any, **__: Any) -> None:
        ended_before_warm_up.append(has_ended(dying.pid))
        has_prepared.set()

    monkeypatch.setattr(parking_module, "warm_up", note_warm_up)
    threading.Thread(target=kill_once_awaited, daemon=True).start()
    os.write(writing_end, encode_order(Resume({"MEGASCALE_ATTEMPT": "2"})))
    options = [f"--train.runs={tmp_path}", "--checkpoint.background=false", "--model.vocab_size=32"]
    parked.wait_for_first_attempt(config.load(None, options), RankInfo(0, 1, 0, 1, torch.device("cpu")))
    dying.communicate()
    assert ended_before_warm_up == [True]


def test_a_replacement_that_waits_leaves_on_an_order(monkeypatch: pytest.MonkeyPatch, parking) -> None:
    monkeypatch.setenv(DYING_VARIABLE, str(os.getpid()))
    parked, _ = parking
    parked.must_leave_now = True
    with pytest.raises(LeaveAttempt):
        await_predecessors(parked.check)


@pytest.mark.parametrize(
    ("keeps_cache", "free_gib", "is_emptied"), [(True, 6, False), (True, 2, True), (False, 6, True)]
)
def test_the_first_step_of_an_engine_that_stays_uses_the_cached_memory(
    keeps_cache: bool, free_gib: int, is_emptied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Communicators allocate outside of the cache, so some of the device's memory must be free."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    parking_module._free_memory(keeps_cache=keeps_cache)
    assert calls == ["emptied"] * is_emptied


def test_a_process_that_waited_describes_its_preparation_and_the_way_to_the_other_ranks(
    monkeypatch: pytest.MonkeyPatch, parking
) -> None:
    parked, writing_end = parking
    assert parked.take_joining_text() == ""
    monkeypatch.setenv(EARLY_VARIABLE, "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    os.write(writing_end, encode_order(Resume({"MEGASCALE_ATTEMPT": "2"})))
    parked.wait_if_early(config.load(None, ["--train.device=cpu", "--model.vocab_size=32"]))
    parked.watch_start()
    text = parked.take_joining_text()
    assert re.match(r"met the other ranks \d+\.\d\d s after the order \(order read \S+, start \S+\); ", text)
    assert text.endswith("of the warm-up: no GPU")
    assert parked.take_joining_text() == ""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of attempt 1, which this process serves."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def begin_preparation(parked: Parking, orders: int, store: dist.TCPStore, world: int) -> None:
    """Order groups for `world` ranks of attempt 2, and begin to make them."""
    os.write(orders, encode_order(PrepareGroups(1, 3, 0, world, world, ("127.0.0.1", store.port))))
    await_condition(lambda: parked._groups_order is not None)
    info = RankInfo(0, 1, 0, 1, torch.device("cpu"))
    grid = Grid.from_world_size(1)
    groups = Groups(grid, 0, grid.coordinate(0), info.device, root_store=store)
    parked.start_preparation(config.load(None, []), info, groups)
    assert parked.preparation is not None


def await_condition(is_met: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("after_step", [False, True])
def test_an_order_to_leave_during_a_preparation_drops_it(after_step: bool, parking, store) -> None:
    parked, orders = parking
    begin_preparation(parked, orders, store, world=2)  # the other rank never comes
    preparation = parked.preparation
    os.write(orders, encode_order(Park(1, after_step)))
    preparation.wait()
    await_condition(lambda: "megascale-groups" not in [thread.name for thread in threading.enumerate()])
    assert preparation.failure
    assert parked.decide_stay(LeaveAttempt("the rank leaves the attempt after step 7"))
    assert not parked.keeps_groups
    assert not parked.doubt


@pytest.mark.parametrize("after_step", [False, True])
def test_complete_groups_survive_an_order_to_leave_after_a_step_only(after_step: bool, parking, store) -> None:
    parked, orders = parking
    begin_preparation(parked, orders, store, world=1)
    preparation = parked.preparation
    await_condition(lambda: preparation.is_connected)
    assert preparation.warm_up(SECONDS)
    os.write(orders, encode_order(Park(1, after_step)))
    await_condition(lambda: parked.must_leave_after_step or parked.must_leave_now)
    assert not parked.joins_at_once
    if not after_step:
        await_condition(lambda: preparation.failure)
    assert parked.decide_stay(LeaveAttempt("the rank leaves the attempt after step 7"))
    assert (parked.keeps_groups, preparation.is_warm) == (after_step, after_step)


class TwoRanks:
    """Peers of this rank and another one.

    Args:
        other_flag: flag of the other rank.
    """

    def __init__(self, other_flag: bool) -> None:
        self.other_flag = other_flag

    def all_true(self, flag: bool) -> bool:
        return flag and self.other_flag


@pytest.mark.parametrize("joins_at_once", [False, True])
def test_the_order_to_leave_says_whether_the_state_needs_a_copy(joins_at_once: bool, parking) -> None:
    parked, orders = parking
    requests = StopRequests(2, parked)
    os.write(orders, encode_order(Park(1, after_step=True, joins_at_once=joins_at_once)))
    await_condition(lambda: parked.must_leave_after_step)
    assert not requests.needs_no_copy(Peers())  # the ranks have not agreed to leave yet
    requests.follow(requests.choose(must_stop=False))
    assert requests.needs_no_copy(Peers()) == joins_at_once
    other_rank: Any = TwoRanks(other_flag=False)  # the order has reached the other rank
    assert requests.needs_no_copy(other_rank)
    os.write(orders, encode_order(Resume({"MEGASCALE_ATTEMPT": "2"})))
    await_condition(lambda: not parked.must_leave_after_step)
    assert not parked.joins_at_once


def test_another_order_replaces_a_preparation_and_one_of_another_attempt_does_not(parking, store) -> None:
    parked, orders = parking
    begin_preparation(parked, orders, store, world=2)
    first = parked.preparation
    os.write(orders, encode_order(PrepareGroups(4, 9, 0, 2, 2, ("127.0.0.1", store.port))))
    os.write(orders, encode_order(PrepareGroups(1, 5)))  # the driver withdraws it
    await_condition(lambda: first.failure)
    assert first.failure == "the driver has ordered other groups or none"
    assert parked._groups_order is None
    begin_preparation(parked, orders, store, world=1)
    assert parked.preparation is not first


def test_a_process_prepares_no_groups_if_its_attempt_has_begun(parking, store) -> None:
    parked, orders = parking
    parked._awaits_first_attempt = True
    order = PrepareGroups(3, 3, 0, 2, 2, ("127.0.0.1", store.port))
    os.write(orders, encode_order(order) + encode_order(Resume({"MEGASCALE_ATTEMPT": "4"})))
    await_condition(lambda: parked._resumes.qsize() == 2)
    assert parked._resumes.get() == order
    parked._prepare_while_waiting(order, config.load(None, []), torch.device("cpu"))
    assert parked.preparation is None
    assert isinstance(parked._await_resume(), Resume)


@pytest.mark.parametrize("begins_at_once", [False, True])
def test_a_process_that_joins_reports_when_its_preparation_has_ended(
    begins_at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parking, store
) -> None:
    """The order to begin the attempt ends a preparation too, since a peer that is lost may never end it."""
    parked, orders = parking
    for name, value in ((PREPARED_VARIABLE, "1"), ("MEGASCALE_NODE", "n0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parking_module, "warm_up", lambda *_, **__: None)
    options = [f"--train.runs={tmp_path}", "--checkpoint.background=false", "--model.vocab_size=32"]
    settings = config.load(None, options)
    info = RankInfo(0, 1, 0, 1, torch.device("cpu"))

    def read_record() -> Any:
        files = list((settings.run_folder / "status").glob("*.status"))
        return read_status(files[0]) if files else None

    waiting = threading.Thread(target=parked.wait_for_first_attempt, args=(settings, info), daemon=True)
    waiting.start()
    await_condition(lambda: (record := read_record()) is not None and record.phase == PARKED)
    first_time = read_record().time_ns
    # The process has waited for several attempts, so its own number is an earlier one.
    os.write(orders, encode_order(PrepareGroups(3, 3, 0, 2, 2, ("127.0.0.1", store.port))))
    await_condition(lambda: parked.preparation is not None)
    dist.PrefixStore("prepared/3", store).wait(["present/count"])
    assert read_record().time_ns == first_time
    preparation = parked.preparation
    if not begins_at_once:
        os.write(orders, encode_order(Park(3, after_step=True)))
        await_condition(lambda: read_record().time_ns > first_time)
    os.write(orders, encode_order(Resume({"MEGASCALE_ATTEMPT": "4"})))
    waiting.join(SECONDS)
    assert not waiting.is_alive()
    assert preparation.failure == "the next attempt begins before they are complete"
    assert os.environ["MEGASCALE_ATTEMPT"] == "4"
    assert read_record() is None
