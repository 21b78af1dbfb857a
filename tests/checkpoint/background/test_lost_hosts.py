"""A lost host is not waited for: by ranks that leave an attempt, by a group that lost a service, by a replica."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from megascale.checkpoint import Checkpointer
from megascale.checkpoint.background.replica import ReplicaSender
from megascale.checkpoint.background.service import connect_checkpoint_service
from megascale.checkpoint.background.service_protocol import (
    ListSnapshots,
    StageSnapshot,
    locate_service,
    private_folder,
)
from megascale.checkpoint.background.snapshot_memory import Progress, make_slots
from megascale.checkpoint.background.staging import make_rank_index
from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.write_plan import make_offer, make_plan
from megascale.checkpoint.saver import get_dtype_name
from tests.checkpoint.background.conftest import await_other, background, run, service_pid
from tests.checkpoint.conftest import cut, logical_state, run_group

__all__ = ["run"]


def _save_without_last_host(rank: int, size: int, run: Path, reopen: bool) -> list[tuple[int, bool, str]]:
    """Begin a save to storage in which the last host loses its service before it writes its part."""
    config = background(replicas=True, location=str(run / "checkpoints"))
    host = run / f"host-{rank}"
    checkpointer = Checkpointer(config, host, cut(logical_state(1), "flat", rank, size))
    checkpointer.prepare()
    assert checkpointer.snapshots is not None
    if rank == size - 1:

        def lose_service(*arguments: Any) -> None:
            os.kill(service_pid(host), signal.SIGKILL)
            raise ConnectionError("the service is gone")

        checkpointer.snapshots._stage_copy = lose_service  # type: ignore[method-assign]
    assert checkpointer.save(1, {"step": 1}, wait=True)
    if not reopen:
        began = time.monotonic()
        slots = checkpointer.leave()
        assert time.monotonic() - began < 15, "the process waited for the part of the lost host"
        return [(len(slots), False, "")]
    checkpointer.before_update(2)
    if rank == size - 1:
        del checkpointer.snapshots._stage_copy
    while not checkpointer.save(2, {"step": 2}, wait=True):
        checkpointer.before_update(2)
    return sorted((outcome.step, outcome.committed, outcome.reason) for outcome in checkpointer.finish())


def test_a_rank_that_leaves_does_not_wait_for_a_commit_that_lacks_a_lost_host(run: Path) -> None:
    assert run_group(2, _save_without_last_host, run, False) == [[(1, False, "")]] * 2


def test_training_goes_on_if_a_host_loses_its_service_during_a_save(run: Path) -> None:
    outcomes = run_group(2, _save_without_last_host, run, True)
    assert outcomes[0][0] == (1, False, "its commit is not known: a host has lost its checkpoint service")
    assert outcomes[0][-1] == (2, True, "")
    assert outcomes[1][0] == (1, False, "the service is gone")


def test_a_replica_is_given_up_once_its_trainer_has_left_and_its_peer_is_silent() -> None:
    """The kernel of a frozen host still takes bytes, so that no connection breaks."""
    values = cut(logical_state(1), "flat", 0, 1)
    shards: list[TensorShard] = list(values)
    (part,) = make_plan([make_offer((s.name, s.shape, get_dtype_name(s.tensor), s.box) for s in shards)]).file_layouts
    index = make_rank_index(shards, part, 0)
    (slot,) = make_slots(1, part.size, index)
    progress = Progress()
    progress.advance(part.size)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        staged = StageSnapshot(
            rank=0, slot=0, step=1, generation="00000001-a", identity="", state="{}", ranks=1, size=part.size,
            persist=False, storage="", required_bytes=0, keep=1, base_generation="", local_ranks=(0,), leader=True,
            plan="", token="74" * 16,
        )  # fmt: skip
        staged = msgspec.structs.replace(staged, peer=("127.0.0.1", frozen.getsockname()[1]))
        began = time.monotonic()
        sender = ReplicaSender(staged, 1, slot, progress)
        assert sender.finish([0] * len(index), is_awaited=lambda: False)
        assert time.monotonic() - began < 20
    slot.memory.close()


def test_a_service_outlasts_its_linger_time_while_a_rank_waits_for_the_next_attempt(run: Path) -> None:
    config = background(memory_interval=1, linger=0.2)
    checkpointer = Checkpointer(config, run, cut(logical_state(1), "flat", 0, 1))
    checkpointer.prepare()
    assert checkpointer.save(1, {"step": 1}, persist=False, wait=True)
    location = locate_service(private_folder(run))
    slots = checkpointer.leave()
    time.sleep(1.2)  # the service would end 0.2 s after its last client
    pid = location.find_service_pid()
    assert pid is not None
    successor = Checkpointer(config, run, cut(logical_state(1), "flat", 0, 1), reused_slots=slots)
    successor.prepare()
    successor.finish()
    await_other(lambda: location.find_service_pid() is None)


def _save_on_hosts(rank: int, size: int, run: Path, hosts: list[int], steps: list[int]) -> list[tuple[int, bool]]:
    """Save in memory, and return (rank, whether it is a replica) of all snapshots that this rank's host then has."""
    config = background(replicas=True, memory_interval=1, memory_wait=True, location=str(run / "checkpoints"))
    host = run / f"host-{hosts[rank]}"
    checkpointer = Checkpointer(config, host, cut(logical_state(1), "flat", rank, size))
    checkpointer.load()
    checkpointer.prepare()
    for step in steps:
        assert checkpointer.save(step, {"step": step}, persist=False, wait=True)
    checkpointer.finish(run_ended=False)
    own_service = connect_checkpoint_service(private_folder(host))
    snapshots = own_service.request(ListSnapshots()).snapshots
    own_service.close()
    return sorted({(snapshot.rank, snapshot.replica) for snapshot in snapshots})


def test_memory_of_ranks_that_moved_to_another_host_is_freed(run: Path) -> None:
    """Two ranks exchange their hosts. The older snapshots stay until two newer saves are whole."""
    assert run_group(2, _save_on_hosts, run, [0, 1], [1, 2]) == [[(0, False), (1, True)], [(0, True), (1, False)]]
    everything = [(0, False), (0, True), (1, False), (1, True)]
    assert run_group(2, _save_on_hosts, run, [1, 0], [3, 4]) == [everything] * 2
    freed = run_group(2, _save_on_hosts, run, [0, 1], [5, 6, 7, 8, 9])
    assert freed == [[(0, False), (1, True)], [(0, True), (1, False)]]
