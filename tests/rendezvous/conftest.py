"""Real servers and real processes for the rendezvous tests."""

from __future__ import annotations

import faulthandler
import os
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from megascale.plugins.redis.redis_connection import Address, BrokenConnection, Connection
from megascale.plugins.redis.redis_store import RedisStore
from tests.forked import context

REDIS = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(REDIS is None, reason="redis-server is not installed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A redis-server on loopback that can be killed, stopped and started again on its port."""

    def __init__(self, folder, *options: str, tls: bool = False) -> None:
        self.folder = folder
        self.options = options
        self.tls = tls
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        port = ["--port", "0", "--tls-port", str(self.port)] if self.tls else ["--port", str(self.port)]
        arguments = (
            [str(REDIS), "--bind", "127.0.0.1"] + port + ["--save", "", "--dir", str(self.folder)] + list(self.options)
        )
        self.process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"redis-server ended with {self.process.returncode}"
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.01)
        raise AssertionError("redis-server does not listen")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def freeze(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def ask(self, *arguments: Any) -> Any:
        """One command on a connection of its own (servers without password or TLS)."""
        connection = Connection(Address("127.0.0.1", self.port), None, 5)
        try:
            connection.send(arguments)
            return connection.read(5)
        finally:
            connection.close()

    def keys(self) -> list[str]:
        return sorted(key.decode() for key in self.ask("KEYS", "*"))

    def close(self) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError):
            self.thaw()
        self.kill()


@pytest.fixture
def redis_server(tmp_path):
    """Starts servers: `redis_server("--requirepass", "x")`; all end with the test."""
    if REDIS is None:
        pytest.skip("redis-server is not installed")
    servers: list[Server] = []

    def start(*options: str, tls: bool = False) -> Server:
        folder = tmp_path / f"redis-{len(servers)}"
        folder.mkdir()
        servers.append(Server(folder, *options, tls=tls))
        return servers[-1]

    yield start
    for server in servers:
        with suppress(BrokenConnection):
            server.close()


@pytest.fixture
def opened(redis_server):
    """Opens stores of one job on a server and closes them: `opened(server)`, the first call is the owner."""
    stores: list[RedisStore] = []

    def open_store(server: Server, owner: bool | None = None, attempt: int = 0, seconds: float = 10, **more: Any):
        store = RedisStore.open(
            Address.parse(server.url),
            more.pop("job", "test"),
            attempt,
            owner=not stores if owner is None else owner,
            timeout=timedelta(seconds=seconds),
            **more,
        )
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        store.close()


class Ranks:
    """Processes that each run `work(rank, *arguments)` with the environment of this process at their start.

    They are forked from the suite's fork server, which has one thread. A fork of this process could inherit a lock that
    one of its other threads holds, and wait for it for ever.
    """

    def __init__(self) -> None:
        self._answers: Any = context.Queue()
        self._stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the ranks
        self.processes: list[Any] = []

    def start(self, work: Callable[..., Any], ranks: range | list[int], *arguments: Any) -> None:
        stacks = f"/proc/{os.getpid()}/fd/{self._stacks.fileno()}"
        for rank in ranks:
            process = context.Process(
                target=_run_rank, args=(self._answers, dict(os.environ), stacks, work, rank, arguments), daemon=True
            )
            process.start()
            self.processes.append(process)

    def results(self, count: int, seconds: float = 60) -> dict[int, Any]:
        """Return the results or exceptions of `count` ranks. Raise AssertionError if they hang."""
        result: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(result) < count:
            try:
                rank, value = self._answers.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                stacks = self._dump_stacks()
                raise AssertionError(
                    f"only ranks {sorted(result)} ended within {seconds} s; stacks:\n{stacks}"
                ) from None
            result[rank] = value
        return result

    def _dump_stacks(self) -> str:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR2)
                process.join(1)
        self._stacks.seek(0)
        return self._stacks.read()

    def close(self) -> None:
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._stacks.close()


def _run_rank(
    answers: Any,
    environment: dict[str, str],
    stacks: str,
    work: Callable[..., Any],
    rank: int,
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR2, open(stacks, "a"), all_threads=True)  # noqa: SIM115 - open until the end
    try:
        answers.put((rank, work(rank, *arguments)))
    except BaseException as error:
        traceback.print_exc()
        answers.put((rank, error if isinstance(error, Exception) else RuntimeError(repr(error))))


@pytest.fixture
def ranks(monkeypatch):
    """A fresh set of rank processes on a free MASTER_PORT."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    for name in ("MEGASCALE_JOB", "MEGASCALE_ATTEMPT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    every = Ranks()
    yield every
    every.close()
