"""Every operation of torch's Store, on TCPStore and on Redis alike: torch's own store tests, ported in meaning."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from megascale.plugins.redis.redis_keys import SUPERSEDED
from tests.conftest import POLL_INTERVAL
from tests.rendezvous.conftest import REDIS, Server

KINDS = ["tcp", "redis"]


@pytest.fixture(params=KINDS)
def pair(request):
    """Two clients of one store: `a` made it."""
    if request.param == "tcp":
        limit = timedelta(seconds=60)  # ten were once too few for a busy machine to connect
        a = dist.TCPStore("127.0.0.1", 0, None, True, timeout=limit, wait_for_workers=False)
        yield a, dist.TCPStore("127.0.0.1", a.port, None, False, timeout=limit, wait_for_workers=False)
        return
    server = request.getfixturevalue("redis_server")()
    opened = request.getfixturevalue("opened")
    yield opened(server), opened(server)


def finish(store: dist.Store) -> None:
    """All that `store` sent has reached the server.

    TCPStore's set, append and push do not wait for an answer: another client's request may overtake them.
    """
    store.num_keys()


def test_set_and_get_any_bytes(pair):
    a, b = pair
    a.set("key", "value")
    assert b.get("key") == b"value"
    b.set("key", b"\x00\xff\r\n$5")
    assert a.get("key") == b"\x00\xff\r\n$5"
    a.set("empty", "")
    assert b.get("empty") == b""
    big = bytes(range(256)) * 20_000
    a.set("big", big)
    assert b.get("big") == big
    a.set("key with spaces: {braces} und Umlaute ä", "x")
    assert b.get("key with spaces: {braces} und Umlaute ä") == b"x"


def test_add_counts_across_clients_and_reads_as_text(pair):
    a, b = pair
    assert a.add("n", 5) == 5
    assert b.add("n", -7) == -2
    assert a.get("n") == b"-2"
    assert b.add("n", 0) == -2
    a.set("given", "41")
    finish(a)
    assert b.add("given", 1) == 42


def test_add_is_exact_in_64_bits(opened, redis_server):
    store = opened(redis_server())
    assert store.add("n", 2**62) == 2**62
    assert store.add("n", 1) == 2**62 + 1
    assert store.get("n") == str(2**62 + 1).encode()


def test_compare_set(pair):
    a, b = pair
    assert a.compare_set("k", "wrong", "new") == b"wrong"
    assert not a.check(["k"])
    assert a.compare_set("k", "", "first") == b"first"
    assert b.compare_set("k", "", "second") == b"first"
    assert b.compare_set("k", "first", "second") == b"second"
    assert a.get("k") == b"second"


def test_check_and_delete(pair):
    a, b = pair
    a.set("x", "1")
    a.set("y", "2")
    finish(a)
    assert b.check(["x", "y"])
    assert b.check([])
    assert not b.check(["x", "missing"])
    assert b.delete_key("x") is True
    assert b.delete_key("x") is False
    assert not a.check(["x"])


def test_num_keys_and_list_keys(pair):
    a, b = pair
    before = a.num_keys()
    for i in range(5):
        a.set(f"key{i}", "v")
    finish(a)
    b.add("counter", 1)
    assert b.num_keys() == before + 6
    a.delete_key("key0")
    assert b.num_keys() == before + 5
    assert {"key1", "counter"} <= set(b.list_keys())
    assert "key0" not in b.list_keys()


def test_append_multi_get_multi_set(pair):
    a, b = pair
    assert a.has_extended_api()
    a.append("log", "one ")
    finish(a)
    b.append("log", "two")
    finish(b)
    assert a.get("log") == b"one two"
    a.multi_set(["p", "q"], ["1", "2"])
    assert b.multi_get(["q", "p", "log"]) == [b"2", b"1", b"one two"]
    large = [f"m{i}" for i in range(500)]
    a.multi_set(large, large)
    assert b.multi_get(large) == [m.encode() for m in large]


def test_get_and_multi_get_wait_for_the_last_key(pair):
    a, b = pair
    a.set("there", "1")
    late = threading.Thread(target=lambda: [a.set(f"late{i}", str(i)) for i in (2, 0, 1)])
    got: list[list[bytes]] = []
    waiter = threading.Thread(target=lambda: got.append(b.multi_get(["late0", "there", "late1", "late2"])))
    waiter.start()
    late.start()
    waiter.join(10)
    late.join(10)
    assert got == [[b"0", b"1", b"1", b"2"]]


def test_wait_ends_at_its_time_out_and_names_the_key(pair):
    _, b = pair
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"wait timeout.*absent"):
        b.wait(["absent"], timedelta(milliseconds=200))
    assert 0.15 < time.monotonic() - began < 5
    b.set_timeout(timedelta(milliseconds=100))
    with pytest.raises(dist.DistStoreError):
        b.get("absent")


def test_a_client_is_whole_after_a_time_out(pair):
    a, b = pair
    with pytest.raises(dist.DistStoreError):
        b.wait(["one", "two"], timedelta(milliseconds=50))
    a.set("one", "1")
    a.set("two", "2")
    assert b.multi_get(["two", "one"]) == [b"2", b"1"]


def test_queues(pair):
    a, b = pair
    a.queue_push("q", "1")
    assert a.queue_len("q") == 1
    b.queue_push("q", "2")
    assert b.queue_len("q") == 2
    assert [b.queue_pop("q"), a.queue_pop("q", False)] == [b"1", b"2"]
    with pytest.raises(dist.QueueEmptyError):
        a.queue_pop("q", False)
    got: list[bytes] = []
    waiter = threading.Thread(target=lambda: got.append(b.queue_pop("q")))
    waiter.start()
    a.queue_push("q", "3")
    waiter.join(10)
    assert got == [b"3"]
    b.set_timeout(timedelta(milliseconds=100))
    with pytest.raises(dist.DistStoreError):
        b.queue_pop("q")


def test_clone_sees_the_same_data(pair):
    a, b = pair
    clone = b.clone()
    a.set("k", "1")
    assert clone.get("k") == b"1"
    clone.set("k2", "2")
    assert a.get("k2") == b"2"


def test_through_prefix_stores_as_torch_uses_it(pair):
    a, b = pair
    inner = dist.PrefixStore("outer", dist.PrefixStore("inner", a))
    inner.set("k", "v")
    assert b.get("inner/outer/k") == b"v" or b.get("outer/inner/k") == b"v"
    assert inner.get("k") == b"v"
    assert inner.add("n", 3) == 3
    assert inner.compare_set("c", "", "w") == b"w"
    assert inner.check(["k", "n", "c"])
    assert inner.multi_get(["k", "c"]) == [b"v", b"w"]
    inner.multi_set(["s"], ["t"])
    inner.append("s", "u")
    assert inner.clone().get("s") == b"tu"
    assert inner.delete_key("k")
    assert inner.num_keys() >= 3
    with pytest.raises(dist.DistStoreError):
        inner.wait(["absent"], timedelta(milliseconds=50))


def test_a_store_lives_as_long_as_torch_uses_it(opened, redis_server):
    """torch keeps only the C++ half, and no reference here holds the Python half."""
    server = redis_server()
    prefix = dist.PrefixStore("p", opened(server).clone())
    clone = prefix.clone()
    clone.set("k", "v")
    assert prefix.get("k") == b"v"


def test_torchs_own_barrier_over_many_threads(pair):
    a, b = pair
    stores = [a, b] + [a.clone() for _ in range(6)]
    passed: list[int] = []

    def connect(index: int) -> None:
        stores[index].barrier("meet", len(stores), timedelta(seconds=10))
        passed.append(index)

    threads = [threading.Thread(target=connect, args=(i,)) for i in range(len(stores) - 1)]
    for thread in threads:
        thread.start()
    assert passed == []
    connect(len(stores) - 1)
    for thread in threads:
        thread.join(10)
    assert sorted(passed) == list(range(len(stores)))


def test_counts_stay_exact_when_many_threads_add(opened, redis_server):
    store = opened(redis_server())
    observed: list[int] = []
    threads = [threading.Thread(target=lambda: observed.extend(store.add("n", 1) for _ in range(50))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(observed) == list(range(1, 401))


def test_all_waiters_wake_and_nobody_polls(opened, redis_server):
    """While 20 threads wait, the server sees no command at all; one set wakes them all."""
    server = redis_server()
    a, b = opened(server), opened(server)
    a.seal()
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(b.get("go"))) for _ in range(20)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while b"blocked_clients:20" not in server.ask("INFO", "clients"):
        assert time.monotonic() < deadline
        time.sleep(POLL_INTERVAL)
    first = _commands(server)
    time.sleep(1.0)
    assert _commands(server) - first <= 1  # the question itself
    a.set("go", "now")
    for thread in threads:
        thread.join(10)
    assert got == [b"now"] * 20


def test_a_time_out_keeps_the_connection(opened, redis_server):
    """Thousands of ranks whose wait ends at once must not all connect anew."""
    server = redis_server()
    store = opened(server)
    store.seal()
    store.set("k", "v")
    before = _statistic(server, "total_connections_received")
    for _ in range(3):
        with pytest.raises(dist.DistStoreError):
            store.wait(["absent"], timedelta(milliseconds=20))
    assert store.get("k") == b"v"
    assert _statistic(server, "total_connections_received") == before + 1  # the question itself


def _commands(server: Server) -> int:
    return _statistic(server, "total_commands_processed")


def _statistic(server: Server, name: str) -> int:
    return int(server.ask("INFO", "stats").decode().partition(f"{name}:")[2].split()[0])


KEYS = st.sampled_from(["a", "b", "c/d"])
VALUES = st.one_of(st.binary(max_size=12), st.sampled_from([b"", b"1", b"x", SUPERSEDED]))


class SameAsTorch(RuleBasedStateMachine):
    """Any sequence of operations gives what torch's own HashStore gives."""

    server: Server
    epoch = 0

    @initialize()
    def open(self) -> None:
        from megascale.plugins.redis.redis_connection import Address
        from megascale.plugins.redis.redis_store import RedisStore

        SameAsTorch.epoch += 1
        address = Address.parse(self.server.url)
        self.stores = [
            RedisStore.open(address, f"job{self.epoch}", owner=owner, timeout=timedelta(seconds=10))
            for owner in (True, False)
        ]
        self.model = dist.HashStore()
        self.numbers: set[str] = set()

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            self.stores[0].remove_all()
            for store in self.stores:
                store.close()

    @rule(key=KEYS, value=VALUES, client=st.integers(0, 1))
    def set(self, key, value, client):
        self.numbers.discard(key)
        self.model.set(key, value)
        self.stores[client].set(key, value)

    @rule(key=KEYS, old=VALUES, new=VALUES, client=st.integers(0, 1))
    def compare_set(self, key, old, new, client):
        self.numbers.discard(key)
        assert self.stores[client].compare_set(key, old, new) == self.model.compare_set(key, old, new)

    @rule(key=KEYS, number=st.integers(-(2**40), 2**40), client=st.integers(0, 1))
    def add(self, key, number, client):
        if key not in self.numbers:  # adding to text is an error everywhere, and in torch of another kind
            self.delete(key, client)
            self.numbers.add(key)
        assert self.stores[client].add(key, number) == self.model.add(key, number)

    @rule(key=KEYS, client=st.integers(0, 1))
    def delete(self, key, client):
        self.numbers.discard(key)
        assert self.stores[client].delete_key(key) == self.model.delete_key(key)

    @rule(key=KEYS, value=VALUES, client=st.integers(0, 1))
    def append(self, key, value, client):
        self.numbers.discard(key)
        self.model.append(key, value)
        self.stores[client].append(key, value)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4), client=st.integers(0, 1))
    def read(self, keys, client):
        present = self.model.check(keys)
        assert self.stores[client].check(keys) == present
        assert self.stores[client].num_keys() == self.model.num_keys()
        if present:
            assert self.stores[client].multi_get(keys) == self.model.multi_get(keys)


@pytest.mark.skipif(REDIS is None, reason="redis-server is not installed")
def test_same_as_torch(redis_server):
    SameAsTorch.server = redis_server()
    machine = SameAsTorch.TestCase
    machine.settings = settings(
        max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    machine("runTest").runTest()
    assert SameAsTorch.server.keys() == []
