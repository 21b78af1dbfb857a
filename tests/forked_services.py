"""Host services for tests, forked from the suite's fork server as commands are.

Loading a service's modules takes more processor time than the requests of a test. A service outlives the process that
starts it, and a trainer has threads by then. So a service is a child of the fork server, not of its starter.

Tests of the start of services, and of their reaction to the starter's death, start new processes.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, process, reduction, resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock

from megascale.services.host_service import Launch
from tests.forked import context, listen

MODULES = (
    "megascale.data.loader.loader_service",
    "megascale.checkpoint.background.service",
    "megascale.observe.store.span_service",
)


@functools.cache
def await_server() -> None:
    """Wait until the fork server has loaded what it forks: who asks it for a service counts the seconds."""
    process = context.Process(target=os.getpid)
    process.start()
    process.join()


@contextmanager
def forked_services() -> Iterator[None]:
    """Let this process fork its services inside the context."""
    await_server()
    with mock.patch.object(Launch, "spawn", _spawn):
        yield


def fork_services() -> None:
    """Let this process, a child of the fork server, fork its services from now on."""
    Launch.spawn = _spawn  # type: ignore[method-assign, assignment]
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]  # or it would start its own


def reach_server_anew() -> None:
    """Replace the pipes of the fork server and the resource tracker in a process whose files were all closed."""
    forkserver._forkserver._forkserver_alive_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    resource_tracker._resource_tracker._fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)  # type: ignore[attr-defined]


class _Handle:
    """A file descriptor that is sent along with a pickled process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(sent: Any) -> int:
    return sent.detach()


class _Service:
    """Replacement of subprocess.Popen with the members that are used."""

    def __init__(self, launch: Launch, arguments: Sequence[str], files: Sequence[int]) -> None:
        output = [str(argument) for argument in launch.arguments] + list(arguments)
        # A file has another number there.
        inputs: list[Any] = [_Handle(int(word)) if word in map(str, files) else word for word in output]
        variables = os.environ | dict(launch.environment)
        args = (launch.module, inputs, variables, os.getcwd(), str(launch.log or os.devnull))
        self._process = context.Process(target=_serve, args=args)
        self._process.start()
        process._children.discard(self._process)  # type: ignore[attr-defined]  # who ends does not wait for it
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process._popen.wait(timeout)  # type: ignore[attr-defined]
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


_new = Launch.spawn


def _spawn(self: Launch, *arguments: str, files: Sequence[int] = ()) -> Any:
    if self.module not in MODULES:
        return _new(self, *arguments, files=files)
    if self.log is not None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
    return _Service(self, arguments, files)


def _serve(module: str, arguments: list[str | int], env: Mapping[str, str], cwd: str, log: str) -> None:
    """Run the service in the forked process."""
    os.setsid()
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for number in (1, 2):
        os.dup2(handle, number)
    os.close(handle)
    listen()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    Path("/proc/self/comm").write_text(module.rpartition(".")[2][:15])
    sys.argv = [module] + [str(argument) for argument in arguments]
    if "--parent" in sys.argv:
        sys.argv[sys.argv.index("--parent") + 1] = str(os.getppid())
    importlib.import_module(module).main()
