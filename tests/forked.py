"""Commands and ranks for tests, forked from a server that has loaded the package once.

Loading torch takes a command about twenty times as long as its work with a tiny model. A forked process differs from a
new one only by its loaded modules. It has arguments, environment, folder, output and signals of its own. Tests of how a
process starts use a new process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import IO, Any

from tests.line_recorder import record_process

COMMAND = "megascale.cli.main"
BENCHMARKS = "benchmarks.__main__"
CHAOS = "tests.chaos.__main__"
POD = "megascale.resilience.agent.pod"
# Without services: ranks start these, which have threads by then, and most of them do without torch.
MODULES = (COMMAND, BENCHMARKS, "megascale.resilience.agent.main", "megascale.resilience.agent.fork_server")
# These have no function that is their whole run.
SCRIPTS = ("megascale.resilience.diagnose.pairs", "megascale.resilience.diagnose.alltoall")
_Popen = subprocess.Popen
# Python for `before`: trainers rest between steps, in a run that only has to go on while something is done to it.
PACED = f"import runpy; runpy.run_path({str(Path(__file__).parent / 'paced' / 'sitecustomize.py')!r})"

# Set where a test looks for services by what they were started with: they are new processes then.
NEW_SERVICES = "MEGASCALE_TEST_NEW_SERVICES"
# Set where a test looks at the picture of the losses that a training draws at its end.
DRAW = "MEGASCALE_TEST_DRAW"

context = multiprocessing.get_context("forkserver")
# One server serves all that a process of the suite forks: the workers of tests/exact and benches too. Who set other
# modules before it is started would have each command load the rest for itself.
context.set_forkserver_preload(
    [
        "tests.uncollected",
        "torch.distributed",
        "torch.fx.experimental.symbolic_shapes",  # with sympy; loaded by the first backward pass of a pipeline stage
        "torch._dynamo",  # loaded by the first layer that is recomputed in full
        "megascale.bench.train",
        "megascale.train.engine",
        "megascale.train.launcher",
        "megascale.train.loop",
        "megascale.train.rank_info",
        "megascale.train.restore",
        "megascale.checkpoint.saver",
        "megascale.checkpoint.loader",
        "megascale.checkpoint.checkpointer",
        "megascale.data.loader.feed",
        "megascale.data.loader.loader_service",
        "megascale.checkpoint.background.service",
        "megascale.observe.store.span_service",
        "duckdb",
        "tests.forked_services",
        "tokenizers",
        "megascale.cli.main",
        "megascale.cli.train",
        "rich.table",
        "rich.status",
        "rich._emoji_codes",  # loaded by the first table that is printed
        "encodings.utf_8_sig",  # loaded by the first configuration file
        "typer._adapters",  # loaded by the first command that is parsed
        "megascale.core.output_console",
        "megascale.simulate.planner.layout_cost",  # loaded by a training that describes its layout
        "megascale.api",
        "megascale.cli.launch",
        "megascale.resilience.driver.start_driver",
        "megascale.resilience.driver.api.http_api",
        "uvicorn",
        "megascale.resilience.agent.agent",
        "megascale.resilience.agent.main",
        "megascale.resilience.agent.fork_server",
        "matplotlib.pyplot",
        "matplotlib.backends.backend_agg",
        # What modules of tests load whose functions workers are to run.
        "pytest",
        "_pytest.main",
        "hypothesis",
        "tests.frozen",
    ]
)
context.set_forkserver_preload = lambda module_names: None  # type: ignore[method-assign]


SERVER = "MEGASCALE_TEST_FORK_SERVER"


def share_server() -> None:
    """Start a fork server for the later child processes of this process. It ends with this process."""
    if sys.version_info < (3, 14):  # from then on, who asks for a process proves that it may
        # Libraries say on stderr what they have not freed when it ends.
        null, retained = os.open(os.devnull, os.O_RDWR), [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(null, number)
        forkserver._forkserver.ensure_running()
        for number, file in zip((1, 2), retained, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.close(null)
        os.environ[SERVER] = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]


def use_shared_server() -> None:
    """Let the fork server of the parent process fork processes, if the parent shares it."""
    address = os.environ.pop(SERVER, None)
    if address:
        server = forkserver._forkserver
        server._forkserver_address = address  # type: ignore[attr-defined]
        # Children inherit this descriptor, which keeps a server alive while they live. The parent owns the server.
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)  # type: ignore[attr-defined]
        server.ensure_running = lambda: None  # type: ignore[method-assign]


class Forked:
    """A forked `megascale ARGUMENTS`, with the part of subprocess.Popen's interface that tests use.

    Ranks, runs, agents and their fork servers that the command starts on this host are forked from it in turn.

    Args:
        arguments: of the command line.
        env: variables in addition to those of this process.
        cwd: working directory.
        before: Python code that runs before the command.
        split: return stderr separately from stdout.
        output: file that receives the output. `communicate` then returns empty strings.
        module: program that receives the arguments: COMMAND, BENCHMARKS, CHAOS or POD.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        before: str = "",
        split: bool = False,
        output: Path | None = None,
        module: str = COMMAND,
    ) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self._outputs = [tempfile.TemporaryFile("w+") for _ in range(1 + split)]  # noqa: SIM115 - read at its end
        files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._outputs]
        if output is not None:
            output.touch()
            files = [str(output)]
        variables = os.environ | dict(env or {})
        # A daemon, so that none outlives the tests.
        self._process = context.Process(
            target=_command,
            args=(module, self.arguments, variables, str(cwd or Path.cwd()), before, files),
            daemon=True,
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._polling = threading.Lock()  # the code is read from a pipe, once

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._polling:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        connection.wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the output on stdout and stderr, after the process has ended."""
        self.wait(timeout)
        output = []
        for file in self._outputs:
            file.seek(0)
            output.append(file.read())
        return output[0], output[1] if len(output) > 1 else ""


def call_forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module in a forked process, and return its result.

    Commands that the function starts are forked from that process. Raises AssertionError with the traceback of the
    function.
    """
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, dict(os.environ), function, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        result, failure = receiver.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"the forked process ended with code {process.exitcode}") from None
    process.join()
    assert not failure, failure
    return result


def _call(
    sender: connection.Connection, env: Mapping[str, str], function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """Call the function in the forked process."""
    listen()
    _leave_to_parent()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    os.environ.clear()
    os.environ.update(env)
    subprocess.Popen = _start_child  # type: ignore[assignment,misc]
    record_process()
    result, failure = None, ""
    try:
        result = function(*arguments)
    except BaseException:
        failure = traceback.format_exc()
    sender.send((result, failure))


def popen(
    command: list[str], *, stdout: IO[bytes], env: Mapping[str, str], cwd: Path | None = None, **_: Any
) -> Forked:
    """Replace subprocess.Popen where code under test starts a command with its output in a file."""
    module, arguments = _split_command(command)
    assert module == COMMAND
    return Forked(arguments, env=env, cwd=cwd, output=Path(stdout.name))


def start_pod(command: list[str], env: Mapping[str, str], log: Path) -> Forked:
    """Fork the command of a pod in a session of its own, with output to `log`. Its trainers rest between steps."""
    module, arguments = _split_command(command)
    assert (module, arguments) == (POD, [])
    return Forked(arguments, env=env, before=f"import os; os.setsid()\n{PACED}", output=log, module=POD)


def _command(module: str, arguments: list[str], env: dict[str, str], cwd: str, before: str, files: list[str]) -> None:
    """Run the command in the forked process."""
    for number, path in ((1, files[0]), (2, files[-1])):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    listen()
    _leave_to_parent()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    sys.dont_write_bytecode = True  # some commands meet a limit on files, at which Python would leave a part of one
    os.environ.clear()
    os.environ.update(env)
    # As a new Python has it; entry points of what lies there are found too.
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    os.chdir(cwd)
    subprocess.Popen = _start_child  # type: ignore[assignment,misc]
    if NEW_SERVICES not in env:
        importlib.import_module("tests.forked_services").fork_services()
    if before:
        exec(before, {})
    _run(module, arguments)


def _plot_nothing(runs: list[Path], out: Path, **_: Any) -> Path:
    """Replace `plot_runs`: a figure takes a sixth of a tiny training, and its pixels as long as the training."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(b"")
    return out


def listen() -> None:
    """Set the signal handlers that a new process has."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _leave_to_parent() -> None:
    """Remove the cleanups that belong to the parent process.

    torch alone unregisters each operator that Python has registered, which takes longer than most commands.
    """
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]


def _run(module: str, arguments: list[str]) -> None:
    program = module.removesuffix(".__main__").rpartition(".")[2]
    Path("/proc/self/comm").write_text(f"{program} {' '.join(arguments)}"[:15])  # for ps
    if arguments and arguments[0] in ("train", "launch", "agent") and DRAW not in os.environ:
        plots = importlib.import_module("megascale.observe.plots")
        plots.plot_runs = _plot_nothing  # type: ignore[attr-defined]
    sys.argv = ["megascale"] + arguments
    record_process()
    try:
        if module in SCRIPTS:
            runpy.run_module(module, run_name="__main__")
        else:
            importlib.import_module(module).main()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        atexit._run_exitfuncs()


def _start_child(command: Any, *inputs: Any, **options: Any) -> subprocess.Popen[Any]:
    """Replace subprocess.Popen in a forked command: commands that load torch are forked."""
    if not isinstance(command, str):
        module, arguments = _split_command([str(argument) for argument in command])
        if module in MODULES + SCRIPTS and options.get("stdin") in (None, subprocess.DEVNULL):
            return _Child([module] + arguments, *inputs, **options)
    return _Popen(command, *inputs, **options)


def _split_command(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return module and arguments of a command of this interpreter. The module is empty for other commands."""
    start, arguments = list(command[:2]), list(command[2:])
    if start == [sys.executable, "-P"]:
        start, arguments = [sys.executable] + arguments[:1], arguments[1:]
    if start != [sys.executable, "-m"] or not arguments:
        return "", []
    module = {"megascale": COMMAND, "benchmarks": BENCHMARKS}.get(arguments[0], arguments[0])
    return module, arguments[1:]


class _Child(subprocess.Popen[Any]):
    """A forked rank, run or agent of a forked command. Waiting, reading and signals are those of Popen."""

    def __init__(
        self,
        command: list[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        start_new_session: bool = False,
        preexec_fn: Callable[[], None] = lambda: None,
        pass_fds: Sequence[int] = (),
        text: bool = False,
        universal_newlines: bool = False,
        shell: bool = False,
        bufsize: int = -1,
    ) -> None:
        assert stdin in (None, subprocess.DEVNULL)
        assert not shell
        self.args = command
        self.returncode = None
        self.stdin = None
        self._child_created, self._waitpid_lock = True, threading.Lock()
        self._communication_started = False
        self._input = None
        self._sigint_wait_secs = 0.25
        self.text_mode = text or universal_newlines
        self.encoding = self.errors = self.pipesize = None
        # For each of the two: what the parent reads from, and where the child writes.
        (self.stdout, out), (self.stderr, err) = (self._ends(where, bufsize) for where in (stdout, stderr))
        if stderr == subprocess.STDOUT:
            err = out
        for file in (sys.stdout, sys.stderr):
            file.flush()  # or the child would say it again
        # Only the launcher handles a signal, not the rank.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for where, end in ((stdout, out), (stderr, err)):
                if where in (subprocess.PIPE, subprocess.DEVNULL) and end is not None:
                    os.close(end)
            return
        code = 1
        try:
            listen()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if start_new_session:
                os.setsid()
            preexec_fn()
            for number, end in ((1, out), (2, err)):
                if end is not None:
                    os.dup2(end, number)
            if stdin == subprocess.DEVNULL:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            gc.freeze()  # what is its parent's must not close numbers that are its own by then
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) not in pass_fds:
                    with contextlib.suppress(OSError):  # the one that lists them
                        os.close(int(name))
            importlib.import_module("tests.forked_services").reach_server_anew()
            _leave_to_parent()
            variables = dict(os.environ if env is None else env)
            os.environ.clear()
            os.environ.update(variables)
            _run(command[0], command[1:])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _ends(self, where: IO[bytes] | int | None, bufsize: int) -> tuple[IO[Any] | None, int | None]:
        if where == subprocess.PIPE:
            read, write = os.pipe()
            file = open(read, "rb", bufsize)  # noqa: SIM115 - Popen closes it
            return io.TextIOWrapper(file) if self.text_mode else file, write
        if where in (None, subprocess.STDOUT):
            return None, None
        if where == subprocess.DEVNULL:
            return None, os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        return None, where if isinstance(where, int) else where.fileno()
