"""Copies in a peer's memory: a lost host is replaced by them, updates wait for them, a token is asked for."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.checkpoint import Checkpointer, object_collectives
from megascale.checkpoint.background import replica, replica_setup, service, service_protocol
from megascale.checkpoint.background.replica import Replicas, ReplicaSender, pair_hosts
from megascale.checkpoint.background.service_protocol import (
    BETWEEN_SERVICES,
    ListSnapshots,
    StageSnapshot,
)
from megascale.checkpoint.background.snapshot_memory import Progress, frame_chunks, make_slots
from megascale.checkpoint.background.staging import ReplicaBarrier, SaveOutcome, SnapshotCopy, make_rank_index
from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.write_plan import make_offer, make_plan
from megascale.checkpoint.saver import get_dtype_name
from megascale.core.secrets import REPLICA_VARIABLE
from megascale.errors import TrainingError
from megascale.services.conversation import Conversation
from tests.checkpoint.background.conftest import await_other, background, service_pid
from tests.checkpoint.conftest import blank, cut, full_shards, logical_state, run_group


def _on_two_hosts(rank: int, size: int, run: Path, save_it: bool) -> Any:
    """Ranks 0, 1 on one host, 2, 3 on another: each host is a run folder, hence a service, of its own."""
    tensors = logical_state(5) if save_it else blank(logical_state())
    config = background(replicas=True, location=str(run / "checkpoints"))
    host = run / f"host-{rank // 2}"
    host.mkdir(exist_ok=True)
    checkpointer = Checkpointer(config, host, cut(tensors, "flat", rank, size))
    state = checkpointer.load()
    if save_it:
        checkpointer.save(4, {"step": 4})
        checkpointer.save(5, {"step": 5}, persist=False, wait=True)
        outcomes = checkpointer.finish(run_ended=False)
        return sorted((o.step, o.committed, o.reason, o.replica) for o in outcomes)
    for a, b in zip(cut(tensors, "flat", rank, size), cut(logical_state(5), "flat", rank, size), strict=True):
        assert torch.equal(a.tensor, b.tensor)
    return checkpointer.loaded_from, state


def test_a_lost_host_is_replaced_by_its_peers_copies(run: Path) -> None:
    outcomes = run_group(4, _on_two_hosts, run, True)
    assert outcomes[0] == [(4, True, "", None), (5, False, "", None)]
    assert outcomes[3] == [(4, False, "", None), (5, False, "", None)]
    assert run_group(4, _on_two_hosts, run, False) == [("memory", {"step": 5})] * 4
    os.kill(service_pid(run / "host-1"), signal.SIGKILL)
    assert run_group(4, _on_two_hosts, run, False) == [("a peer's memory", {"step": 5})] * 4
    for host in ("host-0", "host-1"):
        os.kill(service_pid(run / host), signal.SIGKILL)
    # Both gone: only step 4 was written.
    got = blank(logical_state())
    checkpointer = Checkpointer(background(location=str(run / "checkpoints")), run / "host-0", full_shards(got))
    assert checkpointer.load() == {"step": 4}
    assert checkpointer.loaded_from == "storage"


def _kept_at_each_update(rank: int, size: int, run: Path) -> list[bool]:
    """Return for each update whether the peer's service held the complete copy of the step before it."""
    tensors = logical_state(1)
    config = background(replicas=True, memory_interval=1, location=str(run / "checkpoints"))
    checkpointer = Checkpointer(config, run / f"host-{rank}", cut(tensors, "flat", rank, size))
    checkpointer.prepare()
    assert checkpointer.snapshots is not None
    checkpointer.snapshots._replica_barrier = ReplicaBarrier(60.0)  # A busy machine must not skip the replica.
    peer = service.connect_checkpoint_service(service_protocol.private_folder(run / f"host-{1 - rank}"))
    is_replicated = []
    for step in range(1, 13):
        assert checkpointer.save(step, {"step": step}, persist=False, wait=True)
        checkpointer.before_update(step + 1)
        snapshots = peer.request(ListSnapshots()).snapshots
        is_replicated.append(any(each.replica and each.rank == rank and each.step == step for each in snapshots))
    peer.close()
    checkpointer.finish(run_ended=False)
    return is_replicated


def test_an_update_waits_for_the_last_snapshot_at_the_peer(run: Path) -> None:
    """So that a host that is lost costs one step: the state after it is not made before the state before it is safe."""
    assert run_group(2, _kept_at_each_update, run) == [[True] * 12] * 2


def test_a_peer_that_does_not_answer_is_waited_for_once(caplog: pytest.LogCaptureFixture) -> None:
    def copy(step: int) -> SnapshotCopy:
        return SnapshotCopy(SaveOutcome(step), _staged(step), 0.0)

    last = ReplicaBarrier(timeout=0.01)
    last.wait()  # there is none
    late = copy(1)
    last.track(late)
    last.wait()
    assert "the snapshot of step 1 is not at the peer" in caplog.text
    last.track(copy(2))
    last.wait()
    assert "step 2" not in caplog.text
    late.replicated.set()
    last.wait()
    assert "the snapshot of step 2 is not at the peer" in caplog.text


def _staged(step: int) -> StageSnapshot:
    return StageSnapshot(
        rank=0, slot=0, step=step, generation="", identity="", state="", ranks=1, size=0, persist=False, storage="",
        required_bytes=0, keep=1, base_generation="", local_ranks=(0,), leader=True, plan="", peer=("10.0.0.1", 1),
        token="",
    )  # fmt: skip


def _spoken(rank: int, size: int, run: Path, token: str) -> tuple[str, bytes]:
    """(what a start with replicas failed of, all that this process said to the others)."""
    if token:
        os.environ[REPLICA_VARIABLE] = token * (rank + 1)
    sent, dump = bytearray(), object_collectives.encode_value

    def record(value: Any) -> bytes:
        data = dump(value)
        sent.extend(data)
        return data

    object_collectives.encode_value = record  # type: ignore[assignment]
    config = background(replicas=True, location=str(run / "checkpoints"))
    checkpointer = Checkpointer(config, run / f"host-{rank}", cut(logical_state(1), "flat", rank, size))
    try:
        checkpointer.prepare()
    except TrainingError as error:
        return str(error), bytes(sent)
    checkpointer.finish()
    return "", bytes(sent)


def test_the_replicas_token_is_never_sent_and_must_be_the_same(run: Path) -> None:
    for host in ("host-0", "host-1"):
        (run / host).mkdir()
    messages = run_group(2, _spoken, run, "")
    file = run / "checkpoints" / replica_setup.TOKEN_FILE
    token = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert [error for error, _ in messages] == ["", ""]
    assert all(len(sent) > 100 for _, sent in messages)
    for secret in (token.encode(), bytes.fromhex(token), token.encode().hex().encode()):
        assert all(secret not in output for _, output in messages)
    for error, _ in run_group(2, _spoken, run, "x" * 32):
        assert "ranks [1] have another token than rank 0" in error
    file.chmod(0o644)
    for error, _ in run_group(2, _spoken, run, ""):
        assert "chmod 600" in error


def test_addresses_that_other_machines_reach_are_told(caplog: pytest.LogCaptureFixture) -> None:
    replica_setup.warn_if_reachable([("127.0.0.1", 1), ("::1", 2)])
    assert not caplog.records
    replica_setup.warn_if_reachable([(f"10.0.0.{n}", 7) for n in range(6)] * 2)
    (record,) = caplog.records
    message = record.getMessage()
    assert "10.0.0.0:7, 10.0.0.1:7, 10.0.0.2:7, 10.0.0.3:7 and 2 more" in message
    assert "checkpoint.replica_address" in message
    assert "set checkpoint.replicas=false" in message


def test_the_token_is_asked_for() -> None:
    left_end, right_end = socket.socketpair()
    errors: list[Exception] = []

    def answer_peer(token: bytes) -> None:
        try:
            Conversation(right_end, BETWEEN_SERVICES, BETWEEN_SERVICES).authenticate(token, "replicas", "server")
        except ConnectionError as error:
            errors.append(error)

    for token, good in ((b"right", True), (b"wrong", False)):
        thread = threading.Thread(target=answer_peer, args=(token,))
        thread.start()
        if good:
            Conversation(left_end, BETWEEN_SERVICES, BETWEEN_SERVICES).authenticate(b"right", "replicas", "client")
        else:
            with pytest.raises(ConnectionError, match="token"):
                Conversation(left_end, BETWEEN_SERVICES, BETWEEN_SERVICES).authenticate(b"right", "replicas", "client")
        thread.join()
    assert len(errors) == 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=40))
def test_partners_are_in_other_domains_where_that_can_be(domains: list[int]) -> None:
    partners = pair_hosts(domains)
    assert sorted(partners) == list(range(len(domains)))
    assert all(host != partner for host, partner in enumerate(partners))
    largest = max(domains.count(d) for d in domains)
    shared_domains = sum(domains[host] == domains[peer] for host, peer in enumerate(partners))
    # Of a domain with more than half of the hosts, some must pair among themselves.
    assert shared_domains <= max(0, 2 * largest - len(domains))


@pytest.fixture
def snapshot() -> Any:
    """(its slot, what its trainer says of it, a peer's copies), of several chunks whose elements are in place."""
    copies, token = Replicas(), b"t" * 16
    values = torch.arange(1 << 21, dtype=torch.float32)  # in all more than sockets hold
    shards = [TensorShard(name, tuple(values.shape), (0,), values) for name in "abcd"]
    (part,) = make_plan([make_offer((s.name, s.shape, get_dtype_name(s.tensor), s.box) for s in shards)]).file_layouts
    index = make_rank_index(shards, part, 0)
    (slot,) = make_slots(1, part.size, index)
    assert slot.memory.page_filler.wait(60)
    for row in range(len(index)):
        at = int(index.columns["data"][row])
        slot.memory.view[at : at + index.nbytes(row)] = values.numpy().tobytes()
    peer = ("127.0.0.1", copies.listen("127.0.0.1", token))
    staged = msgspec.structs.replace(
        _staged(3), size=part.size, generation="00000003-a", state="{}", peer=peer, token=token.hex()
    )
    yield slot, staged, copies
    for item in [slot] + [copy for slots in copies._slots.values() for copy in slots]:
        item.memory.close()


def test_a_copy_is_sent_while_its_snapshot_is_completed(snapshot: Any) -> None:
    slot, staged, copies = snapshot
    progress, view = Progress(), slot.memory.view
    copying = ReplicaSender(staged, 2, slot, progress)

    def rows() -> Iterator[int]:
        """Half of the chunks; the others once the peer has the first half."""
        yield 2
        end = int(slot.index.columns["start"][2])
        await_other(lambda: copies._slots.get(0) and bytes(copies._slots[0][0].memory.view[:end]) == bytes(view[:end]))
        assert not copies.list_complete()
        yield 4

    crcs, _ = frame_chunks(view[: staged.size], slot.index, rows(), progress)
    assert copying.finish(crcs.tolist()) is None
    assert copying.finish(None) is None  # as a service says it in any case
    ((rank, copy),) = copies.list_complete()
    assert (rank, copy.step, copy.generation, copy.crcs) == (0, 3, "00000003-a", crcs.tolist())
    assert bytes(copy.memory.view[: staged.size]) == bytes(view[: staged.size])


def test_a_snapshot_that_is_never_completed_leaves_no_copy(snapshot: Any) -> None:
    slot, staged, copies = snapshot
    progress = Progress()
    copying = ReplicaSender(staged, 2, slot, progress)
    await_other(lambda: copies._slots.get(0))
    progress.advance(int(slot.index.columns["start"][2]))
    assert "ended before its state was copied" in str(copying.finish(None))
    await_other(lambda: not copies._slots[0][0].busy.locked())
    assert not copies.list_complete()
    # The memory is free for the next.
    crcs, _ = frame_chunks(slot.memory.view[: staged.size], slot.index, iter([4]), progress := Progress())
    assert ReplicaSender(staged, 2, slot, progress).finish(crcs.tolist()) is None
    assert len(copies.list_complete()) == 1


def test_a_copy_that_is_not_as_its_checksums_say_does_not_count(snapshot: Any) -> None:
    slot, staged, copies = snapshot
    crcs, _ = frame_chunks(slot.memory.view[: staged.size], slot.index, iter([4]), progress := Progress())
    wrong = list(crcs.tolist()[:-1]) + [1]
    for checksums in (wrong, crcs.tolist()[:-1]):
        assert "arrived damaged" in str(ReplicaSender(staged, 2, slot, progress).finish(checksums))
        assert not copies.list_complete()


@pytest.mark.parametrize("token", ["", "74" * 16, "no hexadecimal"])
def test_a_copy_that_cannot_be_sent_is_a_problem_whatever_the_reason(snapshot: Any, token: str) -> None:
    """A peer that hangs up at once, or fails unexpectedly, does not count as present."""
    slot, staged, _ = snapshot
    crcs, _ = frame_chunks(slot.memory.view[: staged.size], slot.index, iter([4]), progress := Progress())
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = ("127.0.0.1", server.getsockname()[1])
        copying = ReplicaSender(msgspec.structs.replace(staged, peer=peer, token=token), 2, slot, progress)
        server.accept()[0].close()
        assert copying.finish(crcs.tolist())


@pytest.mark.parametrize("segment_bytes", [16 << 20, 100_000])
def test_the_error_of_a_copy_names_what_the_peer_lacks(
    snapshot: Any, segment_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one stream and with several. Without the reason, an operator sees a peer that hangs up in each step."""
    slot, staged, _ = snapshot

    def lack_memory(count: int, size: int, index: Any) -> Any:
        raise OSError(errno.ENOMEM, f"25 of {count * size} bytes are free (MemAvailable)")

    monkeypatch.setattr(replica, "_SEGMENT_BYTES", segment_bytes)
    monkeypatch.setattr(replica, "make_slots", lack_memory)
    crcs, _ = frame_chunks(slot.memory.view[: staged.size], slot.index, iter([4]), progress := Progress())
    problem = str(ReplicaSender(staged, 2, slot, progress).finish(crcs.tolist()))
    assert f"no memory for the copy: [Errno 12] 25 of {2 * staged.size} bytes are free (MemAvailable)" in problem


def test_a_peer_that_takes_nothing_does_not_hold_up_a_snapshot_that_is_given_up(snapshot: Any) -> None:
    """The replacement of a dead trainer waits for its memory."""
    slot, staged, copies = snapshot
    begun = threading.Event()
    ended = threading.Event()
    real = copies._reserve_slot

    def room(*arguments: Any) -> Any:
        begun.set()
        ended.wait(60)
        return real(*arguments)

    copies._reserve_slot = room
    progress = Progress()
    progress.advance(staged.size)
    copying = ReplicaSender(staged, 2, slot, progress)
    assert begun.wait(30)
    before = time.monotonic()
    assert "ended before its state was copied" in str(copying.finish(None))
    assert time.monotonic() - before < 3
    ended.set()
    await_other(lambda: copies._slots.get(0) and not copies._slots[0][0].busy.locked())


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of which a snapshot has many, so that several streams carry it."""
    monkeypatch.setattr(replica, "_SEGMENT_BYTES", 100_000)


def test_several_streams_carry_a_copy(snapshot: Any, small_segments: None, monkeypatch: pytest.MonkeyPatch) -> None:
    slot, staged, copies = snapshot
    streams: set[int] = set()
    real = replica._Arrival.receive

    def receive(arrival: replica._Arrival, sender: Conversation, stream: int) -> None:
        streams.add(stream)
        real(arrival, sender, stream)

    monkeypatch.setattr(replica._Arrival, "receive", receive)
    crcs, _ = frame_chunks(slot.memory.view[: staged.size], slot.index, iter([4]), progress := Progress())
    assert ReplicaSender(staged, 2, slot, progress).finish(crcs.tolist()) is None
    ((_, copy),) = copies.list_complete()
    assert streams == set(range(8))
    assert bytes(copy.memory.view[: staged.size]) == bytes(slot.memory.view[: staged.size])
    assert not copies._arrivals


def test_a_stream_that_ends_early_leaves_no_copy_and_its_memory_serves_the_next(
    snapshot: Any, small_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, staged, copies = snapshot
    real = ReplicaSender._send_segments

    def fail_on_one_stream(sender: ReplicaSender, peer: Conversation, stream: int) -> None:
        if stream == 3:
            raise OSError("no route to the host")
        real(sender, peer, stream)

    monkeypatch.setattr(ReplicaSender, "_send_segments", fail_on_one_stream)
    crcs, _ = frame_chunks(slot.memory.view[: staged.size], slot.index, iter([4]), progress := Progress())
    assert ReplicaSender(staged, 2, slot, progress).finish(crcs.tolist())
    await_other(lambda: not copies._slots[0][0].busy.locked())
    assert not copies.list_complete()
    assert not copies._arrivals
    monkeypatch.setattr(ReplicaSender, "_send_segments", real)
    assert ReplicaSender(staged, 2, slot, progress).finish(crcs.tolist()) is None
    assert len(copies.list_complete()) == 1


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 50), st.integers(1, 9))
def test_segments_of_all_streams_cover_a_snapshot_once(size: int, segment_bytes: int, streams: int) -> None:
    segments = [
        segment for stream in range(streams) for segment in replica.list_segments(size, segment_bytes, stream, streams)
    ]
    covered = sorted(position for _, start, stop in segments for position in range(start, stop))
    assert covered == list(range(size))
    assert sorted(number for number, _, _ in segments) == list(range(-(-size // segment_bytes)))


@pytest.mark.parametrize(
    ("size", "local_ranks", "streams"), [(0, 1, 1), (28 << 30, 1, 8), (28 << 30, 8, 4), (48 << 20, 1, 3)]
)
def test_ranks_of_a_host_share_its_streams(size: int, local_ranks: int, streams: int) -> None:
    assert replica.choose_streams(size, local_ranks) == streams
