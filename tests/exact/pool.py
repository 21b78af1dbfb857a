"""Worker processes that serve the whole test run: importing torch costs more than a tiny training step.

Workers fork from a server that has the engine loaded, so starting them (again) takes milliseconds. Each job gets a
fresh process group over a store of the parent's under a prefix of its own. A job that fails or hangs costs the
workers: they are killed and the next job gets new ones, so nothing it left behind can touch another test.
"""

from __future__ import annotations

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
from tests.forked import context

PROCESSES = 8
TIMEOUT = 120.0  # seconds for a job; the machine may be busy with other tests
GROUP_TIMEOUT = timedelta(seconds=100)


class JobFailed(AssertionError):
    """A job raised, hung or lost a process; the message has every rank's own story."""


class Pool:
    """Up to `PROCESSES` workers, started when first used."""

    def __init__(self) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        self._port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._workers: list[tuple[Any, Connection]] = []
        self._jobs = 0
        self.started = 0

    def run(self, function: Callable[..., Any], world: int, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """`function(rank, world, *args)` in `world` processes of one gloo group; what each returned, by rank.

        Raises JobFailed if one raised or died, or if they took longer than `timeout` seconds.
        """
        while len(self._workers) < world:
            self._workers.append(self._start())
        self._jobs += 1
        local = self._workers[:world]
        for rank, (_, pipe) in enumerate(local):
            pipe.send((self._jobs, rank, world, function, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < world:
            pipes = {pipe: rank for rank, (_, pipe) in enumerate(local) if rank not in answers}
            for pipe in wait(list(pipes), max(0.0, deadline - time.monotonic())):
                try:
                    answers[pipes[pipe]] = pipe.recv()  # type: ignore[index, union-attr]
                except (EOFError, ConnectionResetError):
                    answers[pipes[pipe]] = (False, "the process died")  # type: ignore[index]
            failed = any(not ok for ok, _ in answers.values())
            if failed:
                deadline = min(deadline, time.monotonic() + 1.0)  # peers may still say what they saw
            if (failed or len(answers) < world) and time.monotonic() >= deadline:
                break
        if len(answers) < world or not all(ok for ok, _ in answers.values()):
            self.close()
            stories = [
                f"rank {r}: {answers[r][1]}" if r in answers else f"rank {r}: no answer in {timeout:g} s"
                for r in range(world)
                if r not in answers or not answers[r][0]
            ]
            raise JobFailed("\n".join(stories))
        return [answers[rank][1] for rank in range(world)]

    def close(self) -> None:
        """End all workers; the next job starts new ones."""
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        for process, _ in self._workers:
            process.join()
        self._workers = []

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
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            number, rank, world, function, args = pipe.recv()
        except EOFError:
            return
        try:
            if world > 1:
                with torch_private.share_gloo_loop():
                    dist.init_process_group(
                        "gloo",
                        store=dist.PrefixStore(f"job {number}", store),
                        rank=rank,
                        world_size=world,
                        timeout=GROUP_TIMEOUT,
                    )
            result = function(rank, world, *args)
            if world > 1:
                dist.destroy_process_group()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
