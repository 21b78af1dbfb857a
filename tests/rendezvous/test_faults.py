"""Faults of a Redis server: each ends in recovery or in an error that names it, and never hangs."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from megascale.errors import ConfigError
from megascale.plugins.redis.redis_connection import Address
from megascale.plugins.redis.redis_store import RedisStore
from megascale.rendezvous.agree import VERDICT
from megascale.rendezvous.stores import StoreFault, StoreFenced, Superseded
from tests.conftest import POLL_INTERVAL
from tests.rendezvous.conftest import free_port, needs_redis

pytestmark = needs_redis


def open_store(url: str, owner: bool = True, seconds: float = 5, password: str | None = None, **tls) -> RedisStore:
    address = Address.parse(url, password, **tls)
    return RedisStore.open(address, "test", owner=owner, timeout=timedelta(seconds=seconds))


def wait_in_thread(store, key: str):
    """Start `store.get(key)` in a thread; returns the thread and where its answer or error will be."""
    answers: list = []

    def get() -> None:
        try:
            answers.append(store.get(key))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=get)
    thread.start()
    return thread, answers


def until_blocked(server, clients: int) -> None:
    deadline = time.monotonic() + 10
    while f"blocked_clients:{clients}".encode() not in server.ask("INFO", "clients"):
        assert time.monotonic() < deadline
        time.sleep(POLL_INTERVAL)


# Restarts


def test_restart_without_memory_while_others_wait(redis_server, opened):
    """The owner's values come back although it makes no call: a rank that sits in NCCL does not look at its store."""
    server = redis_server()
    a, b = opened(server), opened(server)
    a.set("before", "1")
    assert a.add("count", 2) == 2
    thread, answers = wait_in_thread(b, "after")
    until_blocked(server, 1)
    server.restart()
    assert server.ask("DBSIZE") is not None
    deadline = time.monotonic() + 10
    while b.connections.restore_count == 0 or a.connections.restore_count == 0:
        assert time.monotonic() < deadline, "no rank noticed the restart"
        time.sleep(0.01)
    assert b.get("before") == b"1"
    assert b.add("count", 1) == 3
    a.set("after", "2")
    thread.join(10)
    assert answers == [b"2"]


def test_restart_with_memory_changes_nothing(redis_server, opened):
    server = redis_server("--appendonly", "yes", "--appendfsync", "always")
    a, b = opened(server), opened(server)
    a.set("k", "1")
    for _ in range(5):
        b.add("n", 1)
    thread, answers = wait_in_thread(b, "late")
    until_blocked(server, 1)
    server.restart()
    assert a.get("k") == b"1"
    assert a.add("n", 1) == 6
    a.set("late", "x")
    thread.join(10)
    assert answers == [b"x"]
    assert a.connections.restore_count == b.connections.restore_count == 0


def test_what_a_log_had_not_got_yet_is_made_again(redis_server, opened):
    """The log is written once a second, and later while the disk is busy: a killed server forgets its last changes."""
    server = redis_server("--appendonly", "yes", "--appendfsync", "always")
    a, b = opened(server), opened(server)
    a.set("k", "old")
    assert [a.add("n", 1), b.add("n", 1)] == [1, 2]
    a.set("gone", "1")
    logged = server.folder / "logged"
    shutil.copytree(server.folder / "appendonlydir", logged)
    a.delete_key("gone")
    b.set("k", "new")
    assert [b.add("n", 1), a.add("n", 5), b.add("m", 2)] == [3, 8, 2]
    server.kill()
    shutil.rmtree(server.folder / "appendonlydir")
    logged.rename(server.folder / "appendonlydir")
    server.start()
    deadline = time.monotonic() + 10
    while a.add("n", 0) < 8 or b.add("m", 0) < 2:  # both reconnect by themselves
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (a.get("k"), a.add("n", 0), a.add("m", 0)) == (b"new", 8, 2)
    assert not b.check(["gone"])
    # Once more, with a log that has it all.
    server.restart()
    assert (a.get("k"), a.add("n", 0), b.add("m", 0)) == (b"new", 8, 2)
    assert a.connections.restore_count == b.connections.restore_count == 0


def test_an_old_snapshot_does_not_bring_back_old_values(redis_server, opened):
    """Without a log of changes the server may restart with an hour-old state, which counts as lost."""
    server = redis_server()
    a, b = opened(server), opened(server)
    a.set("k", "old")
    a.set("gone", "1")
    b.add("n", 1)
    server.ask("SAVE")
    a.set("k", "new")
    a.delete_key("gone")
    b.add("n", 1)
    server.restart()
    assert a.get("k") == b"new"
    assert not a.check(["gone"])
    deadline = time.monotonic() + 10
    while b.connections.restore_count == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert a.add("n", 0) == 2


def test_a_server_that_does_not_come_back_is_named_in_time(redis_server, opened):
    server = redis_server()
    a, b = opened(server), opened(server, seconds=1.5)
    thread, answers = wait_in_thread(b, "never")
    server.kill()
    thread.join(15)
    assert isinstance(answers[0], StoreFault)
    assert f"127.0.0.1:{server.port} cannot be reached" in str(answers[0])
    a.set_timeout(timedelta(seconds=1))
    with pytest.raises(StoreFault, match="cannot be reached"):
        a.set("k", "v")


def test_a_server_that_hangs_is_named_in_time(redis_server, opened):
    server = redis_server()
    opened(server)
    b = opened(server, seconds=1)
    server.freeze()
    began = time.monotonic()
    with pytest.raises(StoreFault, match="did not answer in time"):
        b.get("k")
    assert time.monotonic() - began < 20
    server.thaw()


def test_wait_time_out_says_that_the_server_forgot(redis_server, opened):
    server = redis_server()
    opened(server)
    b = opened(server, seconds=2)
    b.set("mine", "1")
    thread, answers = wait_in_thread(b, "never")
    until_blocked(server, 1)
    server.restart()
    thread.join(15)
    assert isinstance(answers[0], dist.DistStoreError)
    assert "lost its data" in str(answers[0])


class Proxy:
    """Sits before the server and, when told, cuts the connection instead of passing an answer on."""

    def __init__(self, port: int) -> None:
        self.target, self.cut = port, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self.listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self.target))
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if answers and self.cut:
                    self.cut -= 1
                    break
                target.sendall(data)
        for side in (source, target):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listener.close()


def test_a_change_whose_answer_is_lost_happens_once(redis_server):
    server = redis_server()
    proxy = Proxy(server.port)
    store = open_store(f"redis://127.0.0.1:{proxy.port}")
    try:
        for turn in range(1, 4):
            proxy.cut = 1
            assert store.add("n", 1) == turn
            proxy.cut = 1
            store.append("log", "x")
            proxy.cut = 1
            store.queue_push("q", str(turn))
        assert store.get("n") == b"3"
        assert store.get("log") == b"xxx"
        assert store.queue_len("q") == 3
        proxy.cut = 1
        assert store.queue_pop("q", False) == b"1"
        proxy.cut = 1
        assert store.queue_pop("q") == b"2"
        assert store.queue_pop("q") == b"3"
        assert store.queue_len("q") == 0
        proxy.cut = 1
        assert store.compare_set("c", "", "v") == b"v"
        proxy.cut = 1
        assert store.delete_key("c") is True
        proxy.cut = 1
        assert store.get("n") == b"3"
    finally:
        store.close()
        proxy.close()


# Attempts


def test_a_late_write_of_an_older_attempt_is_refused(redis_server, opened):
    server = redis_server()
    old_owner, old = opened(server, attempt=1), opened(server, attempt=1)
    old.set("k", "old")
    new = opened(server, owner=True, attempt=2)
    for late in (
        lambda: old.set("k", "late"),
        lambda: old.add("n", 1),
        lambda: old.compare_set("c", "", "late"),
        lambda: old_owner.multi_set(["k"], ["late"]),
        lambda: old.queue_push("q", "late"),
        lambda: old.delete_key("k"),
    ):
        with pytest.raises(StoreFenced, match=r"attempt 1 of job 'test' is over: attempt 2 has begun"):
            late()
    assert new.num_keys() == 0
    assert not old.check(["k"])  # what it had written is gone too
    with pytest.raises(StoreFenced, match="attempt 2 has begun"):
        opened(server, owner=True, attempt=1)


def test_attempts_and_jobs_do_not_see_each_other(redis_server, opened):
    server = redis_server()
    a = opened(server, job="one")
    b = opened(server, job="two", owner=True)
    a.set("k", "one")
    b.set("k", "two")
    assert (a.get("k"), b.get("k")) == (b"one", b"two")
    a.remove_all()
    assert b.get("k") == b"two"


def test_ranks_that_joined_a_dead_start_go_to_the_new_one(redis_server, opened):
    server = redis_server()
    opened(server)  # an owner that dies without a word
    early = opened(server)
    thread, answers = wait_in_thread(early, VERDICT)
    until_blocked(server, 1)
    fresh = opened(server, owner=True)
    thread.join(10)
    assert isinstance(answers[0], Superseded)
    repeated = opened(server)
    fresh.set("k", "v")
    assert repeated.get("k") == b"v"
    with pytest.raises(Superseded):
        early.set("k", "late")


def test_the_door_closes_and_a_late_rank_does_not_find_an_old_start(redis_server, opened):
    server = redis_server()
    owner = opened(server)
    owner.seal()
    with pytest.raises(dist.DistStoreError):
        opened(server, owner=False, seconds=0.3)


def test_the_door_of_a_dead_owner_closes_by_itself(redis_server, opened):
    server = redis_server()
    owner = opened(server)
    door = owner.connections.keys.join
    assert 0 < server.ask("PTTL", door) <= 10_000
    opened(server)  # passing through does not hold it open
    assert 0 < server.ask("PTTL", door) <= 10_000


def test_everything_expires_and_nothing_is_left_after_a_job(redis_server, opened):
    server = redis_server()
    a, b = opened(server, expiry=100.0), opened(server, expiry=100.0)
    a.set("k", "v")
    b.add("n", 1)
    b.append("log", "x")
    a.queue_push("q", "1")
    a.queue_push("q", "2")
    b.queue_pop("q")
    a.get("k")
    assert len(server.keys()) >= 6
    for key in server.keys():  # noqa: SIM118 - not a dict
        assert 0 < server.ask("PTTL", key) <= 100_000, key
    a.expire_soon(30)
    for key in server.keys():  # noqa: SIM118
        assert 0 < server.ask("PTTL", key) <= 30_000, key
    b.remove_all()
    assert server.keys() == []
    with pytest.raises(StoreFenced, match="the job has ended, its keys expired, or the server was emptied"):
        a.set("k", "late")
    assert server.keys() == []


def test_closing_ends_a_waiting_call(redis_server, opened):
    server = redis_server()
    a = opened(server)
    thread, answers = wait_in_thread(a, "never")
    until_blocked(server, 1)
    a.close()
    thread.join(10)
    assert isinstance(answers[0], StoreFault)


# Access


def test_passwords(redis_server):
    server = redis_server("--requirepass", "rätsel/:@")
    with pytest.raises(ConfigError, match="refuses the user or password"):
        open_store(server.url)
    with pytest.raises(ConfigError, match="refuses the user or password") as caught:
        open_store(f"redis://:guess@127.0.0.1:{server.port}")
    assert "guess" not in str(caught.value)
    store = open_store(f"redis://:r%C3%A4tsel%2F%3A%40@127.0.0.1:{server.port}")
    store.set("k", "v")
    store.close()
    store = open_store(server.url, password="rätsel/:@")
    assert store.connections.address.password not in f"{store.connections.address!r} {store.connections.address}"
    store.close()


def test_a_user_with_too_few_rights(redis_server):
    server = redis_server()
    server.ask("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+get", "+info")
    with pytest.raises(ConfigError, match="does not permit"):
        open_store(f"redis://reader:pw@127.0.0.1:{server.port}")


def test_memory_limit_reached(redis_server, opened):
    server = redis_server("--maxmemory", "3mb")
    store = opened(server)

    def fill() -> None:
        for i in range(100):
            store.set(f"k{i}", "x" * 100_000)

    with pytest.raises(StoreFault, match="reached its memory limit"):
        fill()
    store.remove_all()
    assert server.keys() == []


def test_a_server_that_drops_keys_is_warned_of(redis_server, opened, caplog):
    opened(redis_server("--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"))
    assert "noeviction is safe" in caplog.text


def test_too_many_clients_are_let_in_when_places_become_free(redis_server):
    server = redis_server("--maxclients", "2")
    first, second = open_store(server.url), open_store(server.url, owner=False)
    threading.Timer(0.3, second.close).start()
    third = open_store(server.url, owner=False)
    third.set("k", "v")
    assert first.get("k") == b"v"
    first.close()
    third.close()


def test_not_a_redis_server():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            with suppress(OSError):
                while True:
                    peer = listener.accept()[0]
                    peer.recv(100)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    peer.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(StoreFault, match="does not speak the Redis protocol"):
            open_store(f"redis://127.0.0.1:{port}", seconds=1)


def test_nobody_there():
    with pytest.raises(StoreFault, match="refused"):
        open_store(f"redis://127.0.0.1:{free_port()}", seconds=0.5)


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, a server's and a client's certificate by it, and one of a stranger."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl"] + list(arguments), cwd=folder, check=True, capture_output=True)

    for name in ("ca", "stranger"):
        openssl(
            *f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={name} -keyout {name}.key -out {name}.pem".split()
        )
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        openssl(*f"req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr".split())
        openssl(
            *f"x509 -req -days 2 -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out {name}.pem".split(),
            "-extfile",
            "names",
        )
    return folder


def tls_options(folder, clients: str) -> list[str]:
    files = [f"--tls-cert-file {folder}/server.pem", f"--tls-key-file {folder}/server.key"]
    files += [f"--tls-ca-cert-file {folder}/ca.pem", f"--tls-auth-clients {clients}"]
    return " ".join(files).split()


def test_tls(redis_server, certificates):
    server = redis_server(*tls_options(certificates, "no"), tls=True)
    a = open_store(server.url, ca=f"{certificates}/ca.pem")
    b = open_store(server.url, owner=False, ca=f"{certificates}/ca.pem")
    thread, answers = wait_in_thread(b, "k")
    a.set("k", "x" * 100_000)
    thread.join(10)
    assert answers == [b"x" * 100_000]
    assert isinstance(a.connections._context, ssl.SSLContext)
    for wrong in (None, f"{certificates}/stranger.pem"):
        with pytest.raises(ConfigError, match=r"CERTIFICATE_VERIFY_FAILED.*rendezvous\.tls_ca"):
            open_store(server.url, owner=False, ca=wrong)
    with pytest.raises(ConfigError, match="cannot use"):
        open_store(server.url, ca=f"{certificates}/absent.pem")
    server.restart()
    assert b.get("k") == b"x" * 100_000
    a.close()
    b.close()


def test_tls_with_client_certificates(redis_server, certificates):
    server = redis_server(*tls_options(certificates, "yes"), tls=True)
    local = {"certificate": f"{certificates}/client.pem", "key": f"{certificates}/client.key"}
    store = open_store(server.url, ca=f"{certificates}/ca.pem", **local)
    store.set("k", "v")
    store.close()
    with pytest.raises(ConfigError, match="tls_certificate"):
        open_store(server.url, ca=f"{certificates}/ca.pem")


def test_tls_to_a_server_without_it_and_the_other_way(redis_server, certificates):
    plain = redis_server()
    with pytest.raises(StoreFault, match="does the server speak TLS"):
        open_store(plain.url.replace("redis:", "rediss:"), seconds=1, ca=f"{certificates}/ca.pem")
    secret = redis_server(*tls_options(certificates, "no"), tls=True)
    with pytest.raises(StoreFault):
        open_store(secret.url.replace("rediss:", "redis:"), seconds=0.5)
