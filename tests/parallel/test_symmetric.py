"""The flags of an exchange in memory, with a driver that works at once on the host."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale.config import load
from megascale.ops.peer_max import RELEASED, WORD_BYTES, PeerMax
from megascale.parallel import symmetric
from megascale.parallel.collectives import Axis
from megascale.parallel.copy_plan import IN_ORDER, TOGETHER, TWO_QUEUES, CopyPlan
from megascale.parallel.exchange import Exchange
from megascale.parallel.exchange_buffers import count_buffer_bytes, count_lent_bytes
from megascale.parallel.runtime import Runtime
from megascale.parallel.symmetric import FLAG_BYTES, CudaStreams
from megascale.train.engine_rejoin import find_state_obstacle

_WIDTHS = {symmetric._WRITE_VALUE: ctypes.c_uint32, symmetric._WRITE_WORD: ctypes.c_uint64}


class HostDriver:
    """Writes at once, and lists the waits that did not pass, each (address, value, has to be equal).

    `submitted` lists the calls on a stream: the kinds of the operations of a batch, or the name of the function.
    """

    def __init__(self) -> None:
        self.waits: list[tuple[int, int, bool]] = []
        self.submitted: list[Any] = []

    def get_context(self) -> int:
        return 1

    def create_urgent_stream(self) -> int:
        return 2

    def set_context(self, context: int) -> None:
        assert context == 1

    def is_idle(self, stream: int) -> bool:
        return not self.waits

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self.submitted.append("copy")

    def create_event(self) -> int:
        return 4

    def record(self, event: int, stream: int) -> None:
        self.submitted.append("record")

    def stream_wait(self, stream: int, event: int) -> None:
        self.submitted.append("stream_wait")

    def batch(self, stream: int, *operations: tuple[int, int, int, int]) -> None:
        self.submitted.append([operation[0] for operation in operations])
        for kind, address, value, flags in operations:
            if kind == symmetric._WAIT_VALUE:
                self.waits.append((address, value, flags == symmetric._EQUAL))
            elif value:  # a zero follows a wait, which writes it when it passes
                _WIDTHS[kind].from_address(address).value = value
        self.pass_waits()

    def pass_waits(self) -> None:
        """Drop the waits whose flag has come, and reset the flags of captured ones."""
        for address, value, is_equal in tuple(self.waits):
            flag = ctypes.c_uint32.from_address(address)
            difference = (flag.value - value) % (1 << 32)
            if difference == 0 or (not is_equal and difference < 1 << 31):
                self.waits.remove((address, value, is_equal))
                if is_equal:
                    flag.value = 0


@pytest.fixture
def host_streams(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the streams of rank `rank` of three, whose flags lie in one tensor per rank."""
    monkeypatch.setattr(symmetric, "_Driver", HostDriver)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **options: SimpleNamespace(cuda_stream=3))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory = [torch.zeros(3 * 3 * FLAG_BYTES, dtype=torch.uint8) for _ in range(3)]
    buffer = torch.zeros(PeerMax.count_memory_bytes(3) // WORD_BYTES, dtype=torch.int64)

    def make(rank: int) -> CudaStreams:
        flags = [part.data_ptr() for part in memory]
        return CudaStreams(rank, flags, torch.device("cuda", 0), words=buffer)

    return SimpleNamespace(make=make, memory=memory, buffer=buffer)


@pytest.mark.parametrize("number", [1, 2, (1 << 32) - 1, (1 << 32) + 5])
@pytest.mark.parametrize("is_captured", [False, True])
def test_a_signal_ends_its_own_wait_only(host_streams, number, is_captured):
    waiting, signalling = host_streams.make(0), host_streams.make(2)
    for streams in (waiting, signalling):
        streams.capture(is_captured)
    if not is_captured and number > 1:
        signalling.signal(0, number - 1)  # the call before
        signalling.submit_flags()
    waiting.wait_for(2, number)
    waiting.submit_flags()
    assert len(waiting._driver.waits) == 1
    other = host_streams.make(1)
    other.signal(0, number)
    other.submit_flags()
    waiting._driver.pass_waits()
    assert len(waiting._driver.waits) == 1
    signalling.signal(0, number)
    signalling.submit_flags()
    waiting._driver.pass_waits()
    assert not waiting._driver.waits


@pytest.mark.parametrize("number", [1, 2, (1 << 31) + 1, (1 << 32) - 1, (1 << 32) + 5])
def test_released_flags_end_every_wait_and_later_ones(host_streams, number):
    streams = host_streams.make(1)
    peers = (host_streams.make(0), host_streams.make(2))
    for peer in peers:
        peer.signal(1, max(1, number) - 1)
        peer.submit_flags()
    driver = streams._driver
    for is_captured in (False, True):
        streams.capture(is_captured)
        for call in (number, number + 1):
            for peer in (0, 2):
                streams.wait_for(peer, call)
        streams.submit_flags()
    streams.capture(False)
    assert len(driver.waits) == 8
    assert not streams.is_idle()
    neighbours = [host_streams.memory[0].clone(), host_streams.memory[2].clone()]
    streams.release_waits()
    driver.pass_waits()
    assert streams.is_idle()
    streams.wait_for(0, number + 2)  # of a call that began before the failure was seen
    streams.submit_flags()
    assert streams.is_idle()
    assert (host_streams.buffer == RELEASED).all()
    assert torch.equal(host_streams.memory[0], neighbours[0])
    assert torch.equal(host_streams.memory[2], neighbours[1])


def test_a_capture_is_not_looked_at(host_streams):
    streams = host_streams.make(0)
    streams.wait_for(1, 1)
    streams.submit_flags()
    assert not streams.is_idle()
    streams.capture(True)
    assert streams.is_idle()


@pytest.mark.parametrize("is_captured", [False, True])
def test_flags_between_two_operations_are_one_call_of_the_driver(host_streams, is_captured):
    """The order is kept: peers are signalled before this rank waits, and nothing is copied before the wait."""
    streams = host_streams.make(0)
    streams.capture(is_captured)
    driver = streams._driver
    driver.submitted.clear()
    tensor = torch.zeros(4)
    write, wait = symmetric._WRITE_VALUE, symmetric._WAIT_VALUE
    awaited = [wait, write] if is_captured else [wait]
    for peer in (2, 1):
        streams.signal(peer, 1)
    streams.wait_for(1, 1)
    assert driver.submitted == []
    streams.copy(tensor, tensor)
    assert driver.submitted == [[write, write, *awaited], "copy"]
    streams.wait_for(2, 1)
    event = streams.record_event("copy")
    assert driver.submitted[2:] == [awaited, "record"]
    streams.signal(2, 2)
    streams.stream_wait("copy", event)
    assert driver.submitted[4:] == [[write], "stream_wait"]
    streams.submit_flags()
    assert len(driver.submitted) == 6


def test_flags_of_each_queue_of_copies_precede_its_copies(host_streams):
    streams = host_streams.make(0)
    streams.capture(True)
    driver = streams._driver
    driver.submitted.clear()
    tensor = torch.zeros(4)
    write, wait = symmetric._WRITE_VALUE, symmetric._WAIT_VALUE
    streams.signal(1, 1)
    streams.wait_for(2, 1, "copy 1")
    assert driver.submitted == []
    streams.copy(tensor, tensor, "copy 1")
    assert driver.submitted == [[wait, write], "copy"]
    streams.stream_wait("copy", streams.record_event("copy 1"))
    assert driver.submitted[2:] == ["record", [write], "stream_wait"]


@pytest.mark.parametrize(
    ("plan", "flag_nodes_and_copies"),
    [
        (CopyPlan(waits_first=True), ["wwff", "copy", "copy"]),
        (TWO_QUEUES, ["wwff", "copy", "copy"]),
        (TOGETHER, ["wwff", "copy", "copy"]),
        (IN_ORDER, ["wwf", "copy", "f", "copy"]),
        (CopyPlan(queues=0), ["ww", "f", "copy", "f", "copy"]),
    ],
)
def test_nodes_of_a_captured_gather_of_three_ranks(host_streams, monkeypatch, plan, flag_nodes_and_copies):
    """A node of flags writes (w) some, and awaits and resets (f) some."""
    monkeypatch.setitem(vars(symmetric.torch_private), "current_raw_stream", lambda device: 5)
    streams = host_streams.make(0)
    memory = [torch.zeros(count_buffer_bytes(3, 64), dtype=torch.uint8) for _ in range(3)]
    exchange = Exchange(0, 3, memory, 64, streams)
    exchange.copy_plan = plan
    # Main copies this rank's shard for the peers, and then into the result.
    assert list_gather_nodes(exchange) == ["copy", "copy", *flag_nodes_and_copies]


def list_gather_nodes(exchange: Exchange, lend: bool = False) -> list[str]:
    """Return the nodes of a captured gather: "copy", or the letters of a node of flags."""
    submitted = exchange._streams._driver.submitted  # type: ignore[attr-defined]
    submitted.clear()
    with exchange.capture():
        exchange.gather(torch.zeros(16), lend=lend)()
        operations = list(submitted)
    letters = {symmetric._WRITE_VALUE: "w", symmetric._WAIT_VALUE: "f"}
    nodes = []
    for operation in operations:
        if isinstance(operation, list):
            nodes.append("".join(letters[kind] for kind in operation).replace("fw", "f"))
        elif operation == "copy":
            nodes.append(operation)
    return nodes


def test_nodes_of_a_captured_gather_with_pushes(host_streams, monkeypatch):
    """Pushes come first, then the copy of the own shard on main and one node of flags."""
    monkeypatch.setitem(vars(symmetric.torch_private), "current_raw_stream", lambda device: 5)
    memory = [torch.zeros(count_buffer_bytes(3, 64), dtype=torch.uint8) for _ in range(3)]
    lent_memory = [torch.zeros(count_lent_bytes(3, 64), dtype=torch.uint8) for _ in range(3)]
    exchange = Exchange(0, 3, memory, 64, host_streams.make(0), lent_memory=lent_memory)
    assert list_gather_nodes(exchange, lend=True) == ["copy", "copy", "copy", "wwff"]


def test_an_engine_whose_ranks_agree_on_an_exchange_is_made_anew_also_where_there_is_none(monkeypatch, tmp_path):
    """A new process meets its peers in these collectives, in which a kept engine would not take part."""
    monkeypatch.setattr(symmetric, "_gather_text", lambda text, axis, device: [text] * axis.size)
    monkeypatch.setattr(symmetric.dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(symmetric, "make_page", lambda size: str(tmp_path / "page"))
    runtime = Runtime()
    axis = Axis(group=object(), size=2, runtime=runtime)
    assert isinstance(symmetric.make_exchange(axis, 512, torch.device("cpu")), str)
    assert runtime.rejoin_obstacle == ""  # no collective was made
    assert isinstance(symmetric.make_exchange(axis, 512, torch.device("cuda", 99)), str)
    assert "when an engine is made" in runtime.rejoin_obstacle
    assert runtime.state_obstacle == ""  # another engine can take over weights and optimizer state


@pytest.mark.parametrize(
    ("exchanges", "has_copies", "obstacle"),
    [
        (("tensor",), False, ""),
        (("tensor", "reduction"), True, ""),
        (("gather",), True, ""),
        (("gather",), False, "its weights are in memory that is mapped for the exchange between GPUs"),
    ],
)
def test_state_stays_unless_peers_have_mapped_it(exchanges: tuple[str, ...], has_copies: bool, obstacle: str) -> None:
    params = torch.zeros(2)
    master = params.clone() if has_copies else params
    state = SimpleNamespace(master=master, shard=SimpleNamespace(params=params))
    runtime = Runtime(rejoin_obstacle="its ranks agree on an exchange between GPUs when an engine is made")
    engine: Any = SimpleNamespace(
        config=load(None, []),
        optimizer=SimpleNamespace(states=[state]),
        gather_exchange=object() if "gather" in exchanges else None,
        reduction_exchange=object() if "reduction" in exchanges else None,
        tensor_axis=SimpleNamespace(exchange=object() if "tensor" in exchanges else None),
        runtime=runtime,
    )
    assert find_state_obstacle(engine) == obstacle
    runtime.state_obstacle = "a replay gave other bits than this training"
    assert find_state_obstacle(engine) == (obstacle or runtime.state_obstacle)
