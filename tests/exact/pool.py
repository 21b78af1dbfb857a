"""Worker processes that serve the whole test run: importing torch costs more than a tiny training step.

Workers fork from a server that has the engine loaded, so starting them (again) takes milliseconds. Consecutive jobs of
one world use the same process groups (`kept_groups`), which come from a store of the parent's under a prefix of their
own. A job that fails or hangs costs the workers: they are killed and the next job gets new ones, so nothing it left
behind can touch another test. `renew_groups` gives the next job new groups after one with an injected bug.
"""

from __future__ import annotations

import gc
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from megascale import torch_private
from tests.exact import kept_groups
from tests.forked import context

PROCESSES = 8
OWN_WORKERS = (1, 2, 4)  # sizes of worlds that share no workers with other sizes
COLLECTION_INTERVAL = 8  # jobs of a worker between collections of Python's garbage
TIMEOUT = 120.0  # seconds for a job; the machine may be busy with other tests
GROUP_TIMEOUT = timedelta(seconds=100)


class JobFailed(AssertionError):
    """A job raised, hung or lost a process; the message has every rank's own story."""


class Pool:
    """Up to `PROCESSES` workers per size of a world, started when first used.

    Worlds of 1, 2 and 4 have workers of their own, so that jobs of other worlds between them do not end their groups.
    """

    def __init__(self) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        self._port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._workers: dict[int, list[tuple[Any, Connection]]] = {}  # by number of workers
        self._groups: dict[int, tuple[int, int]] = {}  # (world, number of its default group), by number of workers
        self._made_groups = 0
        self.started = 0

    def run(self, function: Callable[..., Any], world: int, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """`function(rank, world, *args)` in `world` processes of one gloo group; what each returned, by rank.

        Raises JobFailed if one raised or died, or if they took longer than `timeout` seconds.
        """
        size = world if world in OWN_WORKERS else PROCESSES
        workers = self._workers.setdefault(size, [])
        while len(workers) < world:
            workers.append(self._start())
        if self._groups.get(size, (0, 0))[0] != world:
            self._made_groups += 1
            self._groups[size] = (world, self._made_groups)
        number = self._groups[size][1]
        local = workers[:world]
        for rank, (_, pipe) in enumerate(local):
            pipe.send((number, rank, world, function, args))
        answers: dict[int, tuple[bool, Any, bool]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < world:
            pipes = {pipe: rank for rank, (_, pipe) in enumerate(local) if rank not in answers}
            for pipe in wait(list(pipes), max(0.0, deadline - time.monotonic())):
                try:
                    answers[pipes[pipe]] = pipe.recv()  # type: ignore[index, union-attr]
                except (EOFError, ConnectionResetError):
                    answers[pipes[pipe]] = (False, "the process died", False)  # type: ignore[index]
            failed = any(not ok for ok, *_ in answers.values())
            if failed:
                deadline = min(deadline, time.monotonic() + 1.0)  # peers may still say what they saw
            if (failed or len(answers) < world) and time.monotonic() >= deadline:
                break
        if len(answers) < world or not all(ok for ok, *_ in answers.values()):
            self.close()
            stories = [
                f"rank {r}: {answers[r][1]}" if r in answers else f"rank {r}: no answer in {timeout:g} s"
                for r in range(world)
                if r not in answers or not answers[r][0]
            ]
            raise JobFailed("\n".join(stories))
        if not all(keeps_groups for *_, keeps_groups in answers.values()):
            del self._groups[size]
        return [answers[rank][1] for rank in range(world)]

    def renew_groups(self) -> None:
        """Give the next job of each world new process groups."""
        self._groups.clear()

    def close(self) -> None:
        """End all workers; the next job starts new ones."""
        processes = [worker for workers in self._workers.values() for worker in workers]
        for process, pipe in processes:
            process.kill()
            pipe.close()
        for process, _ in processes:
            process.join()
        self._workers.clear()
        self.renew_groups()

    def _start(self) -> tuple[Any, Connection]:
        self.started += 1
        local, present = context.Pipe()
        process = context.Process(target=_serve, args=(present, self._port), daemon=True)
        process.start()
        present.close()
        return process, local


def _serve(pipe: Connection, port: int) -> None:
    """A worker: jobs from the pipe until it closes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # The flight recorder walks Python's stack in each collective. No job reads it.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # Python's own collections take 3% of the time of the jobs, and leave most groups of earlier jobs.
    gc.disable()
    present_groups = 0
    job_count = 0
    while True:
        try:
            number, rank, world, function, args = pipe.recv()
        except EOFError:
            return
        try:
            if number != present_groups:
                if dist.is_initialized():
                    dist.destroy_process_group()
                if world > 1:
                    _make_group(dist.PrefixStore(f"groups {number}", store), rank, world)
                present_groups = number
            default_group = dist.group.WORLD
            kept_groups.begin_job()
            result = function(rank, world, *args)
            keeps_groups = dist.group.WORLD is default_group and kept_groups.has_room()
            pipe.send((True, result, keeps_groups))
            del result
            job_count += 1
            if job_count % COLLECTION_INTERVAL == 0:
                gc.collect()
        except BaseException:
            pipe.send((False, traceback.format_exc(), False))


def _make_group(store: dist.Store, rank: int, world: int) -> None:
    """Make the default group."""
    with torch_private.share_gloo_loop():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=GROUP_TIMEOUT)
