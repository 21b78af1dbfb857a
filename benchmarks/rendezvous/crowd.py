"""Thousands of store clients on one machine: a server, some processes, and a connection for every rank.

The client of TCPStore is C++ that blocks: each rank is a thread. The Redis store is Python, and a thousand Python
threads would mostly fight over the interpreter, which ranks of a real job do not share: there each rank is a
greenlet, an own stack of calls that lets the others go on while it waits for its socket. Both run the same code
that training runs, unchanged.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import resource
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.errors import ConfigError, FitError, TrainingError

if TYPE_CHECKING:
    from torch.distributed import Store

STORES = ("tcp", "tcp-legacy", "redis")
TIMEOUT = 600.0
# A rank's part: given its store and its number, passes its phases and returns when each ended.
Part = Callable[["Store", int], list[float]]
# How a rank gets its store.
Connect = Callable[[int], "Store"]

_STACK = 256 * 1024
_SPARE = 1200  # open files of a process besides its connections


def free_port() -> int:
    """Return a port of loopback that has no listener now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def open_files(expected: int) -> None:
    """Raise this process's limit of open files to `wanted`; FitError if the machine does not allow it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= expected:
        return
    if hard != resource.RLIM_INFINITY and hard < expected:
        raise FitError(
            f"{expected} connections need as many open files, but this machine allows {hard} a process; run with fewer "
            "--ranks or raise the limit (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (expected, hard))


def cpu_seconds(process_id: int) -> float:
    """CPU time that a process has used; 0 where there is no /proc."""
    try:
        arguments = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(arguments[11]) + int(arguments[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serve(store: str, ranks: int, redis_server: str = "redis-server") -> Iterator[tuple[Connect, int]]:
    """A fresh server of one of STORES on loopback, for the block; yields how a rank connects and its process id."""
    open_files(ranks + _SPARE)
    if store == "redis":
        with serve_redis(ranks, redis_server) as (port, process_id):
            yield _connect_redis(port), process_id
        return
    # torch's client asks for the server's name; under thousands of questions a name server drops some, and the
    # usual 5 seconds until the next try would be all that is measured.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    port = free_port()
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_serve_tcp, args=(port, store == "tcp", ready, done), daemon=True)
    process.start()
    try:
        if not ready.wait(30):
            raise TrainingError(f"the TCPStore server did not start on port {port}")
        yield _connect_tcp(port, store == "tcp"), process.pid or 0
    finally:
        done.set()
        process.join(20)
        if process.is_alive():
            process.terminate()


@contextmanager
def serve_redis(clients: int, program: str = "redis-server", *options: str) -> Iterator[tuple[int, int]]:
    """A redis-server on loopback that keeps nothing on disk; yields its port and process id."""
    result = shutil.which(program)
    if result is None:
        raise ConfigError(f"{program!r} is not installed; install redis-server or leave redis out of --store")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", folder]
        arguments += ["--maxclients", str(clients + 1000), "--tcp-backlog", "4096"] + list(options)
        process = subprocess.Popen([result] + arguments, stdout=subprocess.DEVNULL)
        try:
            _until_listening(port, process)
            yield port, process.pid
        finally:
            process.terminate()
            process.wait(20)


def _until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise TrainingError(f"redis-server ended at once with code {process.returncode}")
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise TrainingError(f"redis-server does not listen on port {port}")


def _serve_tcp(port: int, libuv: bool, ready: Any, done: Any) -> None:
    from torch.distributed import TCPStore

    from megascale.rendezvous.stores import open_listener

    # As in training: a listener of our own, whose queue of newcomers is longer than torch's.
    if libuv:
        listener = open_listener("127.0.0.1", port).detach()
    else:
        listener = None
    server = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, use_libuv=libuv, master_listen_fd=listener)
    ready.set()
    done.wait()
    del server


def _connect_tcp(port: int, libuv: bool) -> Connect:
    def connect(rank: int) -> Store:
        from torch.distributed import TCPStore

        limit = timedelta(seconds=TIMEOUT)
        return TCPStore("127.0.0.1", port, None, False, timeout=limit, wait_for_workers=False, use_libuv=libuv)

    return connect


def _connect_redis(port: int) -> Connect:
    def connect(rank: int) -> Store:
        from megascale.plugins.redis.redis_connection import Address
        from megascale.plugins.redis.redis_store import RedisStore

        limit = timedelta(seconds=TIMEOUT)
        return RedisStore.open(Address("127.0.0.1", port), "bench", owner=rank == 0, timeout=limit)

    return connect


def run(ranks: int, connect: Connect, part: Part, processes: int, cooperative: bool) -> tuple[list[float], float]:
    """Let `ranks` clients in `processes` processes connect and play their part, all starting together.

    Args:
        cooperative: ranks are greenlets, which only the Redis store can be; else they are threads.

    Returns the seconds from the common start until the last rank had connected and had ended each phase, and the
    CPU seconds of all ranks.

    Raises:
        TrainingError: a rank failed; names the first.
    """
    context = multiprocessing.get_context("fork")
    answers: Any = context.SimpleQueue()
    start = context.Value("d", 0.0)
    gates = [context.Event() for _ in range(processes)]
    shares = [range(index, ranks, processes) for index in range(processes)]
    work = _greenlets if cooperative else _threads
    workers = [
        context.Process(target=_worker, args=(work, share, connect, part, gate, start, answers), daemon=True)
        for share, gate in zip(shares, gates, strict=True)
    ]
    for worker in workers:
        worker.start()
    try:
        for _ in workers:
            answers.get()  # its ranks stand ready
        start.value = time.monotonic() + 0.2
        for gate in gates:
            gate.set()
        ends: list[list[float]] = []
        cpu = 0.0
        for _ in workers:
            error, phases, used = answers.get()
            cpu += used
            if error:
                raise TrainingError(f"the bench failed: {error}")
            ends.append(phases)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    return [max(phase) - start.value for phase in zip(*ends, strict=True)], cpu


# Of one rank: an error or "", and when each phase ended.
Ended = tuple[str, list[float]]


def _worker(
    work: Callable[..., list[Ended]],
    share: Sequence[int],
    connect: Connect,
    part: Part,
    gate: Any,
    start: Any,
    answers: Any,
) -> None:
    open_files(len(share) + _SPARE)
    gc.disable()  # a rank of a real job does not share its collector with a thousand others
    retained: list[Store] = []

    def play(rank: int) -> Ended:
        try:
            store = connect(rank)
            retained.append(store)
            return "", [time.monotonic()] + part(store, rank)
        except Exception as error:
            return f"rank {rank}: {type(error).__name__}: {error}", []

    def begin() -> None:
        answers.put("ready")
        gate.wait()
        time.sleep(max(0.0, start.value - time.monotonic()))

    before = time.process_time()
    results = work(share, play, begin)
    failed = [error for error, _ in results if error]
    if failed:
        phases = []
    else:
        phases = [max(phase) for phase in zip(*(times for _, times in results), strict=True)]
    answers.put((failed[0] if failed else "", phases, time.process_time() - before))
    threading.Event().wait()  # connections stay open until everybody is done


def _threads(share: Sequence[int], play: Callable[[int], Ended], begin: Callable[[], None]) -> list[Ended]:
    threading.stack_size(_STACK)
    go = threading.Event()
    ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()

    def rank_thread(rank: int) -> None:
        go.wait()
        ended.put(play(rank))

    for rank in share:
        threading.Thread(target=rank_thread, args=(rank,), daemon=True).start()
    begin()
    go.set()
    return [ended.get() for _ in share]


def _greenlets(share: Sequence[int], play: Callable[[int], Ended], begin: Callable[[], None]) -> list[Ended]:
    from benchmarks.rendezvous.hub import Hub

    hub = Hub()
    begin()
    return hub.run([partial(play, rank) for rank in share])
