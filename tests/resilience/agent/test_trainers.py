"""Real trainers of a node: the cause of their end is reported by number and text, regardless of their logs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from megascale.config import ForeignConfig, ResilienceConfig
from megascale.core.exit_record import ExitKind, ExitRecord, attach_record
from megascale.core.grid import Grid
from megascale.core.process_orders import DYING_VARIABLE, PrepareGroups, Resume, read_orders
from megascale.core.secrets import REPLICA_VARIABLE
from megascale.core.status import PARKED, StatusFile
from megascale.observe.hang.evidence import read_process_state
from megascale.resilience import rules
from megascale.resilience.agent import early_processes, process_usage
from megascale.resilience.agent.early_processes import EarlyProcesses
from megascale.resilience.agent.foreign_program import ForeignProgram
from megascale.resilience.agent.fork_server_link import ForkServerLink
from megascale.resilience.agent.fork_server_process import LOG_FILE, start_fork_server
from megascale.resilience.agent.rank_programs import LONG_SILENCE, MegascaleTrainer, Progress, TrainerProcess
from megascale.resilience.agent.trainers import Trainers
from megascale.resilience.process_birth import read_birth_time
from megascale.resilience.protocol.agent_messages import FROM_AGENT, Start
from megascale.resilience.protocol.agent_messages import PrepareGroups as GroupsOrder
from megascale.resilience.protocol.fork_messages import (
    FROM_CHILD,
    FROM_FORK_SERVER,
    TO_FORK_SERVER,
    Ended,
    Fork,
    Forked,
    ForkFailed,
    ForkServerReady,
    Instruct,
)
from megascale.resilience.protocol.heartbeat import Heartbeat, Worker
from megascale.resilience.rules.view import NodeView, Verdict, View
from megascale.services.messages import FrameReader, Message
from tests.conftest import POLL_INTERVAL
from tests.forked import call_forked


def judged(workers: tuple[Worker, ...], disks: dict[str, float]) -> list[Verdict]:
    beat = Heartbeat("job", 1, "n0", 1, 0, workers=workers, disks=disks)
    member = NodeView("n0", tuple(w.rank for w in workers), 100.0, beat, deque([(100.0, beat)]))
    view = View("job", 1, "starting", 100.0, 90.0, [member], Grid(data=len(workers)), 5.0, 1.0, 60.0)
    return rules.judge(FROM_AGENT.decode(FROM_AGENT.encode(beat)) and view)


def ended(
    tmp_path: Path,
    file: Path,
    *arguments: str,
    ranks: int = 1,
    port: int = 1,
    before: Callable[[Trainers], None] | None = None,
) -> list[Verdict]:
    """Start ranks with the settings of a file. Return the verdicts when the first rank has ended."""
    (tmp_path / "node").mkdir()
    text = file.read_text() if file.exists() else ""

    async def run() -> list[Verdict]:
        changed = asyncio.Event()
        local = Trainers(tmp_path / "runs" / "tiny", tmp_path / "node", changed.set)
        local.start_server()
        order = Start(1, 1, "tiny", tuple(range(ranks)), ranks, ("127.0.0.1", 0), text, arguments)
        try:
            async with asyncio.timeout(120):
                while not local._fork_server.is_ready and local._fork_server.process is not None:
                    changed.clear()
                    await changed.wait()
                if before is not None:
                    before(local)
                local.start(replace(order, master=("127.0.0.1", port)), "127.0.0.1", b"t" * 64)
                while not any(t.status for t in local.trainers.values()):
                    changed.clear()
                    await changed.wait()
            return judged(local.describe_workers(), local.measure_free_disks())
        finally:
            local.end_server()

    return asyncio.run(run())


def ended_in_fork(*arguments: Any, **options: Any) -> list[Verdict]:
    """Return the verdicts of `ended` in a forked process. The fork server of its ranks has torch loaded already."""
    return call_forked(partial(ended, **options), *arguments)


def terminate_server(local: Trainers) -> None:
    """Send SIGTERM to the fork server."""
    local._fork_server.process.send_signal(signal.SIGTERM)


def limit_files(log: Path, local: Trainers) -> None:
    """Limit the size of files as `faults inject full-disk` does it. Ranks inherit the limit from their fork server."""
    resource.prlimit(local._fork_server.process.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    log.parent.mkdir(parents=True)
    log.write_text("x" * 5000 + "\n")


def kill_server_after_fork(local: Trainers) -> None:
    """Kill the fork server as soon as it has forked a rank."""

    def handle_report(message: object) -> None:
        if isinstance(message, Forked):
            os.kill(local._fork_server.process.pid, signal.SIGKILL)

    local._fork_server.on_report = handle_report


def test_a_port_that_was_taken_is_nobodys_mistake(tiny, tmp_path):
    with socket.socket() as second:
        second.bind(("127.0.0.1", 0))
        second.listen()
        port = second.getsockname()[1]
        # A signal that Slurm sends to all processes does not end the fork server, which would end its ranks.
        [verdict] = ended_in_fork(tmp_path, tiny, "--parallel.data=2", ranks=2, port=port, before=terminate_server)
    assert (verdict.kind, verdict.action, verdict.ranks) == ("port_taken", "recover", (0,)), verdict.evidence


def test_a_full_disk_is_known_though_the_log_could_not_be_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # what it imports, Python would leave a part of

    log = tmp_path / "runs" / "tiny" / "logs" / "rank-0.log"
    [verdict] = ended_in_fork(tmp_path, tiny, before=partial(limit_files, log))
    assert (verdict.kind, verdict.action) == ("disk_full", "recover"), verdict.evidence
    assert "File too large" in verdict.evidence[-1]


def test_an_import_that_fails_is_told_as_such(tmp_path, monkeypatch):
    (tmp_path / "broken_trainer.py").write_text("import module_that_is_not_there\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(MegascaleTrainer, "modules", ("broken_trainer",))
    verdicts = ended(tmp_path, tmp_path / "x.toml", ranks=2)
    assert [(v.kind, v.action, v.ranks) for v in verdicts] == [("user_error", "stop", (0, 1))]
    assert "No module named 'module_that_is_not_there'" in " ".join(verdicts[0].evidence)


def given_environments(folder: Path, job: str, token: bytes) -> list[dict[str, str]]:
    """Record the environments of a node's ranks instead of starting them by a fork server."""
    folder.mkdir()
    local = Trainers(folder / "runs" / job, folder, lambda: None)
    orders = FrameReader(TO_FORK_SERVER)
    local._fork_server._socket, theirs = socket.socketpair()
    with theirs:
        local.start(Start(1, 1, job, (0, 1), 2, ("127.0.0.1", 1), ""), "127.0.0.1", token)
        result = [order.env for order in orders.feed(theirs.recv(1 << 20))]
        local._fork_server._socket.close()
    return result


def test_agents_of_a_job_give_the_replicas_one_token_that_is_not_the_jobs(tmp_path, monkeypatch):
    monkeypatch.delenv(REPLICA_VARIABLE, raising=False)
    secret = b"ab" * 32
    single, equal, other_job, other_secret = (
        {env[REPLICA_VARIABLE] for env in given_environments(tmp_path / node, job, token)}
        for node, job, token in (("n0", "a", secret), ("n1", "a", secret), ("n2", "b", secret), ("n3", "a", secret[1:]))
    )
    assert len(single | other_job | other_secret) == 3
    assert single == equal
    (token,) = single
    assert len(token) == 64
    assert secret.decode() not in token
    monkeypatch.setenv(REPLICA_VARIABLE, "m" * 32)  # a person's own goes first
    assert [env[REPLICA_VARIABLE] for env in given_environments(tmp_path / "n4", "a", secret)] == ["m" * 32] * 2


def test_a_fork_server_uses_its_idle_time_and_still_forks(tmp_path):
    marker, failed = tmp_path / "marker", tmp_path / "failed"
    (tmp_path / "early.py").write_text(
        "import gc, os\nprint('collects during imports:', gc.isenabled())\n"
        f"def fail():\n    open({str(failed)!r}, 'w').write(os.environ['OMP_WAIT_POLICY'])\n    raise OSError('no')\n"
        "def fail_without_log():\n    os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n    raise OSError('lost')\n"
        f"def work():\n    with open({str(marker)!r}, 'w') as out:\n        out.write(str(os.getpid()))\n"
        "    print('collects when idle:', gc.isenabled(), flush=True)\n"
    )
    local, remote = socket.socketpair()
    with local, remote, open(tmp_path / "out", "wb") as out:
        names = [str(remote.fileno()), str(os.getpid()), "early:fail", "early:fail_without_log", "early:work"]
        server = subprocess.Popen(
            [sys.executable, "-m", "megascale.resilience.agent.fork_server"] + names,
            pass_fds=[remote.fileno()],
            stdout=out,
            stderr=out,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )
        remote.close()
        try:
            local.settimeout(60)
            frames, output = FrameReader(FROM_FORK_SERVER), []

            def wait_for(kind):
                while not any(isinstance(message, kind) for message in output):
                    output.extend(frames.feed(local.recv(65536)))
                return next(message for message in output if isinstance(message, kind))

            assert wait_for(ForkServerReady).pid == server.pid
            deadline = time.monotonic() + 30
            while not (marker.exists() and marker.read_text()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert marker.read_text() == str(server.pid)
            assert failed.read_text() == "PASSIVE"
            local.sendall(TO_FORK_SERVER.encode_frame(Fork(0, 1, {}, ("--version",), str(tmp_path / "log"))))
            assert wait_for(Ended).status == 0
            assert wait_for(Forked).pid == wait_for(Ended).pid
        finally:
            server.kill()
            server.wait()
    output_text = (tmp_path / "out").read_text()
    assert "no" in output_text
    assert "collects during imports: False" in output_text
    assert "collects when idle: True" in output_text


def test_ranks_that_die_with_their_fork_server_are_told_of_it(tiny, tmp_path):
    [verdict] = ended_in_fork(tmp_path, tiny, before=kill_server_after_fork)
    assert verdict.kind == "process_killed"
    assert "fork server" in " ".join(verdict.evidence)
    assert "signal SIGKILL" in " ".join(verdict.evidence)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_long_exception_in_any_script_fits_the_pipe():
    from megascale.resilience.agent.fork_server import report_exception

    read, write = os.pipe()
    for text in ("x" * 10_000, "\U0001f600" * 10_000, "\udcff\n" * 5000):
        error = attach_record(OSError(errno.ENOSPC, text), ExitKind.DISK_FULL, subject="\U0001f600" * 200)
        report_exception(write, error)
        (arguments,) = FrameReader(FROM_CHILD).feed(os.read(read, 65536))
        assert arguments.record.kind is ExitKind.DISK_FULL
        assert arguments.error.startswith("OSError")
    os.close(read)
    os.close(write)


def test_a_process_that_a_signal_holds_is_told():
    """The phase does not matter: rules/silence.py gives a stopped process no extra time."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        assert process_usage.read_usage(child)[2] is False
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        assert process_usage.read_usage(child)[2] is True
        os.kill(child, signal.SIGCONT)
        os.waitpid(child, os.WCONTINUED)
        assert process_usage.read_usage(child)[2] is False
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert process_usage.read_usage(child) == (0, 0.0, False)


def test_a_fork_server_whose_answers_cannot_be_read_is_replaced_with_its_ranks(tmp_path, monkeypatch):
    """The end of its ranks would never be known otherwise."""

    async def run() -> TrainerProcess:
        changed = asyncio.Event()
        local = Trainers(tmp_path / "runs" / "tiny", tmp_path, changed.set)
        monkeypatch.setattr(local._fork_server, "on_report", lambda message: 1 / 0)
        server = local._fork_server.process = subprocess.Popen(["sleep", "60"])
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        local._fork_server._socket = ours
        rank = local.trainers[0] = TrainerProcess(0, tmp_path / "log", 0, pid=1)
        listening = asyncio.create_task(local._fork_server._read_reports(ours))
        theirs.sendall(FROM_FORK_SERVER.encode_frame(ForkServerReady(pid=1)))
        async with asyncio.timeout(30):
            await listening
        theirs.close()
        assert server.returncode == -signal.SIGKILL
        assert changed.is_set()
        return rank

    rank = asyncio.run(run())
    assert (rank.status, rank.by_agent) == (signal.SIGKILL, True)
    assert "cannot be read: division by zero" in rank.error


def replace_killed_processes(tmp_path: Path, settings: str) -> tuple[int, int, int, int]:
    """Kill a rank in two attempts.

    Return the process ids of the first replacement, of the second attempt, of the second replacement and of the third
    attempt, whose settings differ.
    """

    async def run() -> tuple[int, int, int, int]:
        changed = asyncio.Event()
        local = Trainers(tmp_path / "runs" / "tiny", tmp_path / "node", changed.set)
        local.start_server()
        order = Start(
            1, 1, "tiny", (0,), 1, ("127.0.0.1", 1), settings, ("--train.steps=1000000", "--checkpoint.interval=0")
        )

        async def wait_until(is_true: Callable[[], object]) -> None:
            while not is_true():
                changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), 0.2)

        async def kill_and_wait() -> int:
            await wait_until(lambda: local.trainers[0].pid)
            os.kill(local.trainers[0].pid, signal.SIGKILL)
            await wait_until(lambda: local._early.pids.get(0))
            return local._early.pids[0]

        try:
            async with asyncio.timeout(240):
                await wait_until(lambda: local._fork_server.is_ready)
                local.start(order, "127.0.0.1", b"t" * 64)
                first = await kill_and_wait()
                local.start(replace(order, attempt=2), "127.0.0.1", b"t" * 64)
                second_attempt = local.trainers[0].pid
                await wait_until(lambda: (local._read_progress(local.trainers[0]), local.trainers[0].progress)[1])
                second = await kill_and_wait()
                local.start(replace(order, attempt=3, settings=settings + "# changed\n"), "127.0.0.1", b"t" * 64)
                await wait_until(lambda: local.trainers[0].pid and not os.path.exists(f"/proc/{second}"))
                return first, second_attempt, second, local.trainers[0].pid
        finally:
            local.end_server()

    return asyncio.run(run())


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_replacement_is_started_at_once_and_ended_if_the_order_does_not_suit_it(tiny, tmp_path):
    """The first order takes the waiting process; the second one changes the settings."""
    (tmp_path / "node").mkdir()
    first, second_attempt, second, last = call_forked(replace_killed_processes, tmp_path, tiny.read_text())
    assert second_attempt == first
    assert len({first, second, last}) == 3


_UNUSED_PID = 1 << 23  # above the largest process id of Linux


@pytest.mark.parametrize("is_second", [False, True])
def test_a_replacement_that_no_attempt_takes_is_ended(is_second, tmp_path, monkeypatch):
    """Its node may stay without ranks; or the rank has a waiting process already."""
    monkeypatch.setattr(early_processes, "EARLY_SECONDS", 1000.0 if is_second else 0.01)

    async def run() -> tuple[int, dict[int, int]]:
        local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None)
        local._early.pids = {0: _UNUSED_PID if is_second else 0}
        process = await asyncio.create_subprocess_exec("sleep", "100")
        local._handle_report(Forked(rank=0, pid=process.pid, attempt=0))
        try:
            return await asyncio.wait_for(process.wait(), 30), local._early.pids
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    status, early = asyncio.run(run())
    assert status == -signal.SIGKILL
    assert early == ({0: _UNUSED_PID} if is_second else {})


@pytest.mark.parametrize("end", ["end_server", "kill_from_thread", "the server is killed"])
def test_processes_that_another_trainer_started_end_with_it(end, tmp_path):
    """A manager of multiprocessing, or a worker of a data loader."""
    (tmp_path / "node").mkdir()
    pid_file = tmp_path / "pid"
    script = f"sleep 1000 & echo $! > {pid_file}.tmp; mv {pid_file}.tmp {pid_file}; wait"
    settings = f"[foreign]\ncommand = ['sh', '-c', '{script}']\nper_node = 1\nfolder = '{tmp_path}'\n"

    async def run() -> int:
        local = Trainers(
            tmp_path / "runs" / "tiny", tmp_path / "node", lambda: None, limits=ResilienceConfig(preload=False)
        )
        local.start_server()
        local.start(Start(1, 1, "tiny", (0,), 1, ("127.0.0.1", 1), settings, ()), "127.0.0.1", b"t" * 64)
        try:
            async with asyncio.timeout(120):
                while not pid_file.exists() or not local.trainers[0].pid:
                    await asyncio.sleep(0.02)
            if end == "kill_from_thread":
                local.kill_from_thread("a test")
            if end == "the server is killed":
                local._fork_server.process.kill()
                async with asyncio.timeout(60):
                    while local.list_running():
                        await asyncio.sleep(0.02)
        finally:
            local.end_server()
        return int(pid_file.read_text())

    child = asyncio.run(run())
    deadline = time.monotonic() + 60
    while read_process_state(child) != "gone":
        assert time.monotonic() < deadline, "the child process lives"
        time.sleep(POLL_INTERVAL)


def test_a_rank_without_its_process_group_gets_its_signal_in_a_later_round(tmp_path):
    """Its process makes the group after the fork."""
    local = Trainers(tmp_path, tmp_path, lambda: None)
    process = subprocess.Popen(["sleep", "1000"])
    try:
        local.program = ForeignProgram(tmp_path, ForeignConfig(), max_restarts=1)
        local.trainers[0] = TrainerProcess(0, tmp_path / "log", 0, pid=process.pid)
        assert local._signal_ranks(signal.SIGTERM) == set()
        process.kill()
        process.wait()
        process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        local.trainers[0].pid = process.pid
        assert local._signal_ranks(signal.SIGTERM) == {process.pid}
        assert process.wait(60) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_a_kill_is_known_before_the_process_is_reaped(tmp_path, caplog):
    """The kernel frees tens of gigabytes for seconds before the fork server learns of the end."""
    changes = []
    local = Trainers(tmp_path / "runs" / "a", tmp_path, lambda: changes.append(1))
    local._fork_server.process = mock.Mock(pid=os.getpid(), **{"poll.return_value": None})
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)] + [subprocess.Popen(["false"])]
    local.trainers = {
        rank: TrainerProcess(rank, tmp_path / "log", 0, pid=child.pid) for rank, child in enumerate(children)
    }
    children[0].kill()
    for child in (children[0], children[2]):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    local.note_kills()
    assert [trainer.status for trainer in local.trainers.values()] == [signal.SIGKILL, None, None]
    assert len(changes) == 1
    exits = asyncio.new_event_loop()
    with pytest.raises(TimeoutError):
        exits.run_until_complete(asyncio.wait_for(local.await_exits("kill"), 0.05))
    # The driver would evict a node whose report waits for the kernel longer than two windows.
    local._limits = ResilienceConfig(window=0.05)
    exits.run_until_complete(asyncio.wait_for(local.await_exits("kill"), 30))
    assert f"the killed processes [{children[0].pid}] within 0.05 s" in caplog.text
    # Only the replacement waits if the other ranks stay in their processes.
    exits.run_until_complete(asyncio.wait_for(local.await_exits("keep"), 30))
    assert local._dying.pids == {children[0].pid}
    ended = local.trainers[0].ended
    last_words = ExitRecord(ExitKind.OUT_OF_MEMORY, step=3)
    local._handle_report(Ended(children[0].pid, signal.SIGKILL, last_words, "MemoryError: 2 GiB"))
    exits.run_until_complete(local.await_exits("kill"))
    exits.close()
    assert (local.trainers[0].record, local.trainers[0].error) == (last_words, "MemoryError: 2 GiB")
    assert local.trainers[0].ended == ended  # the end began with the kill
    assert len(changes) == 2
    local._fork_server.process.poll.return_value = -signal.SIGKILL
    children[1].kill()
    os.waitid(os.P_PID, children[1].pid, os.WEXITED | os.WNOWAIT)
    local.note_kills()
    assert local.trainers[1].status is None  # it follows from the fork server's end, which is reported elsewhere
    for child in children:
        child.wait()


@pytest.mark.parametrize("how", ["kill", "keep"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_rank_that_sigkill_does_not_end_is_reported(has_begun: bool, how: Any, tmp_path: Path) -> None:
    """A device or disk may block a process, also at its end while the kernel frees its memory."""
    window = 0.05
    limits = ResilienceConfig(window=window, keep_seconds=0.01)
    local = Trainers(tmp_path / "runs" / "a", tmp_path, lambda: None, limits=limits)
    local._fork_server.process = mock.Mock(pid=os.getpid(), **{"poll.return_value": None})
    agent_end, server_end = socket.socketpair()
    local._fork_server._socket = agent_end
    signals: list[int] = []

    def send_signal(pid: int, number: int) -> None:
        signals.append(number)
        if has_begun:
            os.kill(pid, number)  # no fork server reports the end

    local.program.signal = send_signal  # type: ignore[method-assign]
    with agent_end, server_end, subprocess.Popen(["sleep", "600"]) as process:
        local.trainers = {0: TrainerProcess(0, tmp_path / "log", 0, pid=process.pid)}
        try:
            problem = asyncio.run(asyncio.wait_for(local.stop(how, 0.0), 30))
        finally:
            process.kill()
    limit = window * (1 + has_begun)
    assert problem.startswith(f"SIGKILL has not ended rank 0 (process {process.pid}) within {limit:g} s: ")
    assert signal.SIGKILL in signals


def test_a_rank_whose_fork_server_creates_no_process_is_reported(tmp_path: Path) -> None:
    local = Trainers(tmp_path / "runs" / "a", tmp_path, lambda: None, limits=ResilienceConfig(window=0.01))
    local._fork_server.process = mock.Mock(pid=os.getpid())
    local.trainers = {0: TrainerProcess(0, tmp_path / "log", 0)}
    problem = asyncio.run(asyncio.wait_for(local.stop("kill", 0.0), 30))
    assert problem.startswith("SIGKILL has not ended rank 0 (process not created yet) within 0.02 s: ")


def test_a_start_that_fails_ends_the_early_processes_that_it_was_to_use(tmp_path: Path) -> None:
    """They occupy device memory, and no later attempt would know them."""
    order = Start(1, 2, "tiny", (0,), 1, ("127.0.0.1", 1), "", ())
    local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None)
    local._start_order = order
    agent_end, server_end = socket.socketpair()
    local._fork_server._socket = agent_end
    (tmp_path / "job.toml").mkdir()  # as a full disk, this raises OSError when the settings are written
    with agent_end, server_end, subprocess.Popen(["sleep", "600"]) as early:
        local._early.pids = {0: early.pid}
        try:
            with pytest.raises(OSError, match=r"job\.toml"):
                local.start(replace(order, attempt=3), "127.0.0.1", b"t" * 64)
            assert early.wait(30) == -signal.SIGKILL
        finally:
            early.kill()


def test_prepared_processes_wait_on_for_a_later_attempt(tmp_path: Path) -> None:
    """A second loss begins another attempt without them. They must not start as its ranks."""
    local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None)
    first = Start(1, 2, "tiny", (3,), 4, ("127.0.0.1", 1), "", ("--parallel.data=4",), prepares=True)
    local._start_order, local._is_preparing, local.attempt = first, True, 2
    local.trainers = {3: TrainerProcess(3, tmp_path / "log", 0, pid=5)}
    later = replace(first, attempt=3, ranks=(2,), world=3, words=("--parallel.data=3",))
    assert not local.continue_preparation(replace(later, prepares=False))
    assert not local.continue_preparation(replace(later, settings="[train]"))
    assert not local.continue_preparation(replace(later, ranks=(2, 3)))
    # Its fork server's report would have the number of an earlier attempt, so its process id would stay unknown.
    local.trainers[3].pid = 0
    assert not local.continue_preparation(later)
    local.trainers[3].pid = 5
    local.trainers[3].by_agent = True  # it was killed, and the kernel still frees its memory
    assert not local.continue_preparation(later)
    local.trainers[3].by_agent = False
    assert local.attempt == 2
    assert local.continue_preparation(later)
    assert (local.attempt, local._start_order) == (3, later)
    local.trainers[3].end(9)
    assert not local.continue_preparation(replace(later, attempt=4))


@pytest.mark.parametrize("is_joining", [False, True])
def test_ranks_receive_the_order_to_prepare_groups(is_joining: bool, tmp_path: Path) -> None:
    local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None)
    agent_end, server_end = socket.socketpair()
    local._fork_server._socket, local._is_preparing, local.attempt = agent_end, is_joining, 2
    local.trainers = {3: TrainerProcess(3, tmp_path / "log", 0, pid=5), 4: TrainerProcess(4, tmp_path / "log", 0)}
    local.trainers[4].end(9)
    local.trainers[3].progress = Progress(PARKED)
    order = GroupsOrder(1, 2, number=8, ranks=(2, 3), world=4, data=4, master=("h", 7))
    local.prepare_groups(replace(order, attempt=1))  # of an earlier attempt
    local.prepare_groups(replace(order, ranks=(2,)))  # for another number of ranks
    assert local.trainers[3].is_parked
    local.prepare_groups(order)
    local.prepare_groups(GroupsOrder(1, 2, number=9))
    agent_end.close()
    instructions = list(FrameReader(TO_FORK_SERVER).feed(server_end.recv(65536)))
    server_end.close()
    assert [instruction.pid for instruction in instructions] == [5, 5]
    reading_end, writing_end = os.pipe()
    os.write(writing_end, b"".join(instruction.line for instruction in instructions))
    os.close(writing_end)
    made, dropped = read_orders(reading_end)
    os.close(reading_end)
    assert made == PrepareGroups(attempt=2, number=8, rank=2, world=4, data=4, master=("h", 7))
    assert dropped == PrepareGroups(attempt=2, number=9, rank=3)
    # A process that joins counts as prepared again only after a new record of its status.
    assert local.trainers[3].is_parked is not is_joining
    del local.trainers[4]
    assert local.find_ended_groups() == 0
    if is_joining:
        local.trainers[3].progress = Progress(PARKED)
        assert local.find_ended_groups() == 9


@pytest.mark.parametrize("was_preparing", [False, True], ids=["parked after an attempt", "being killed"])
def test_an_order_to_prepare_resumes_no_process(was_preparing: bool, tmp_path: Path) -> None:
    """A process that is resumed begins the present attempt, in which its node has no ranks."""
    order = Start(1, 2, "tiny", (0,), 2, ("127.0.0.1", 1), "", ())
    preparation = replace(order, attempt=3, prepares=True)

    async def run() -> tuple[list[TrainerProcess], int, list[TrainerProcess]]:
        local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None, limits=ResilienceConfig(preload=False))
        local.start_server()
        sleeper = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
        local._start_order, local._is_preparing, local.attempt = order, was_preparing, 2
        if was_preparing:
            local._start_order = replace(order, prepares=True)
        local.trainers = {0: TrainerProcess(0, tmp_path / "log", 0, pid=sleeper.pid, by_agent=was_preparing)}
        if not was_preparing:
            local.trainers[0].progress = Progress(PARKED)
        earlier = list(local.trainers.values())
        try:
            assert not local.continue_preparation(preparation)
            local.end_preparation()
            assert not local.has_active_ranks()
            local.start(preparation, "127.0.0.1", b"t" * 64)
            status = await asyncio.wait_for(sleeper.wait(), 30)
            return earlier, status, list(local.trainers.values())
        finally:
            local.end_server()
            with contextlib.suppress(ProcessLookupError):
                sleeper.kill()

    [earlier], status, [trainer] = asyncio.run(run())
    assert status == -signal.SIGKILL
    assert earlier.status == signal.SIGKILL
    assert trainer.attempt_start_ns == 0  # it was forked, not resumed
    assert trainer.is_waiting


def test_ranks_of_an_attempt_are_not_ended_for_a_preparation(tmp_path: Path) -> None:
    local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None)
    local.trainers = {0: TrainerProcess(0, tmp_path / "log", 0, pid=_UNUSED_PID, progress=Progress("train"))}
    local.end_preparation()
    assert local.has_active_ranks()


def test_a_replacement_learns_which_killed_processes_have_not_ended(tmp_path: Path) -> None:
    """It waits for their memory. A rank that stays in its process does not."""
    order = Start(1, 2, "tiny", (0, 1), 2, ("127.0.0.1", 1), "", ())
    agent_end, server_end = socket.socketpair()
    local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None)
    local._fork_server._socket = agent_end
    local._start_order, local.attempt, local._dying.pids = order, 2, {77, 78}
    parked = TrainerProcess(0, tmp_path / "log", 0, pid=5, progress=Progress(PARKED))
    killed = TrainerProcess(1, tmp_path / "log", 0, pid=77, status=signal.SIGKILL)
    local.trainers = {0: parked, 1: killed}
    local.start(replace(order, attempt=3), "127.0.0.1", b"t" * 64)
    instruct, fork = FrameReader(TO_FORK_SERVER).feed(server_end.recv(1 << 20))
    assert isinstance(fork, Fork)
    assert fork.env[DYING_VARIABLE] == "77,78"
    assert isinstance(instruct, Instruct)
    reading_end, writing_end = os.pipe()
    os.write(writing_end, instruct.line)
    os.close(writing_end)
    [resume] = read_orders(reading_end)
    os.close(reading_end)
    assert isinstance(resume, Resume)
    assert resume.environment[DYING_VARIABLE] == ""
    agent_end.close()
    server_end.close()


def test_a_fork_server_that_the_kernel_cannot_end_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None)
    server = mock.Mock(pid=_UNUSED_PID)
    server.wait.side_effect = lambda seconds: (_ for _ in ()).throw(subprocess.TimeoutExpired("server", seconds))
    local._fork_server.process = server
    local.end_server()
    assert server.kill.called
    assert local._fork_server.process is None
    assert f"process {_UNUSED_PID}) has not ended" in caplog.text


def test_processes_of_a_new_fork_server_learn_of_those_that_died_under_the_old_one(tmp_path: Path) -> None:
    order = Start(1, 2, "tiny", (0,), 1, ("127.0.0.1", 1), "", ())
    local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None)
    dying = subprocess.Popen(["sleep", "600"])
    local._dying.pids = {dying.pid, _UNUSED_PID}
    agent_end, server_end = socket.socketpair()
    with agent_end, server_end:
        try:
            local.end_server()
            asyncio.run(asyncio.wait_for(local.await_exits("kill"), 30))  # no report would end this wait
            # Another process has the id of the process that had ended by then.
            assert local._dying._unreported_births == {dying.pid: read_birth_time(dying.pid), _UNUSED_PID: 0}
            local._dying._unreported_births[os.getpid()] = local._dying._unreported_births.pop(_UNUSED_PID)
            for attempt in (3, 4):
                local._fork_server._socket = agent_end
                local.start(replace(order, attempt=attempt), "127.0.0.1", b"t" * 64)
                local.trainers = {}
        finally:
            dying.kill()
            dying.wait()
        forks = FrameReader(TO_FORK_SERVER).feed(server_end.recv(1 << 20))
        assert [fork.env[DYING_VARIABLE] for fork in forks] == [str(dying.pid), ""]


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_replacements_learn_of_ranks_that_ended_with_their_fork_server(tmp_path: Path, ends_by_itself: bool) -> None:
    """The kernel frees the memory of the rank and of its standby process for seconds, and no server reports the end."""
    order = Start(1, 2, "tiny", (0, 1), 2, ("127.0.0.1", 1), "", ())
    local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None)
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    server, rank, early = processes
    local._fork_server.process = server
    local.trainers = {
        0: TrainerProcess(0, tmp_path / "log", 0, pid=rank.pid, progress=Progress("train")),
        1: TrainerProcess(1, tmp_path / "log", 0, pid=_UNUSED_PID, status=0),
    }
    local._early.pids = {0: early.pid, 1: 0}
    try:
        if ends_by_itself:
            server.kill()
            local._record_server_end()
        local.end_server()
        assert local.trainers[0].status == signal.SIGKILL
        agent_end, server_end = socket.socketpair()
        with agent_end, server_end:
            local._fork_server._socket = agent_end
            local.start(replace(order, attempt=3), "127.0.0.1", b"t" * 64)
            forks = FrameReader(TO_FORK_SERVER).feed(server_end.recv(1 << 20))
        expected = ",".join(str(pid) for pid in sorted([rank.pid, early.pid]))
        assert [fork.env[DYING_VARIABLE] for fork in forks] == [expected] * 2
        os.kill(rank.pid, signal.SIGKILL)
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        local._dying._unreported_births = {rank.pid: 1}
        assert local._dying.list_all() == [rank.pid]
        local._dying._unreported_births = {os.getpid(): 1}  # another process has this process id by now
        assert local._dying.list_all() == []
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_replacements_learn_of_the_ranks_of_a_killed_agent(tmp_path: Path) -> None:
    order = Start(1, 2, "tiny", (0, 1), 2, ("127.0.0.1", 1), "", ())
    killed = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None)
    killed.attempt = 1
    ranks = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    try:
        for rank, process in enumerate(ranks):
            killed.trainers[rank] = TrainerProcess(rank, tmp_path / "log", 0)
            killed._handle_report(Forked(rank, attempt=1, pid=process.pid))
        local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None)
        agent_end, server_end = socket.socketpair()
        with agent_end, server_end:
            local._fork_server._socket = agent_end
            local.start(order, "127.0.0.1", b"t" * 64)
            forks = FrameReader(TO_FORK_SERVER).feed(server_end.recv(1 << 20))
        expected = ",".join(str(pid) for pid in sorted(process.pid for process in ranks))
        assert [fork.env[DYING_VARIABLE] for fork in forks] == [expected] * 2
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_a_standby_process_that_ends_is_not_started_again_in_its_attempt(tmp_path: Path) -> None:
    """It may lack memory. Each start would take memory and time of the ranks that train."""
    order = Start(1, 2, "tiny", (0, 1), 2, ("127.0.0.1", 1), "", ())
    limits = ResilienceConfig(standby_processes=True)
    local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None, limits=limits)
    agent_end, server_end = socket.socketpair()
    server = subprocess.Popen(["sleep", "600"])
    orders = FrameReader(TO_FORK_SERVER)

    def train_a_step() -> list[int]:
        """Let each rank complete a step, and return the ranks whose standby processes are started."""
        for rank, trainer in local.trainers.items():
            trainer.pid, trainer.first_step, trainer.progress = _UNUSED_PID + rank, 0, Progress("train", 1)
        local._start_standby_processes()
        messages = orders.feed(server_end.recv(1 << 20))
        forks = [message for message in messages if isinstance(message, Fork) and message.attempt == 0]
        for fork in forks:
            local._handle_report(Forked(rank=fork.rank, pid=_UNUSED_PID + 10 + fork.rank, attempt=0))
        return [fork.rank for fork in forks]

    try:
        with agent_end, server_end:
            local._fork_server.process, local._fork_server._socket = server, agent_end
            local.start(order, "127.0.0.1", b"t" * 64)
            assert train_a_step() == [0, 1]
            local._handle_report(Ended(_UNUSED_PID + 11, 1 << 8, error="CUDA error: out of memory"))
            local._start_standby_processes()
            server_end.setblocking(False)
            with pytest.raises(BlockingIOError):
                server_end.recv(1)
            server_end.setblocking(True)
            for trainer in local.trainers.values():
                trainer.end(signal.SIGKILL)
            local.start(replace(order, attempt=3), "127.0.0.1", b"t" * 64)
            assert train_a_step() == [0, 1]  # the next attempt tries again
    finally:
        server.kill()
        server.wait()


def test_a_rank_that_loads_has_completed_no_step(tmp_path: Path) -> None:
    """A driver that restarts meanwhile would take the start for a running job."""
    (tmp_path / "node").mkdir()
    local = Trainers(tmp_path / "run", tmp_path / "node", lambda: None)
    local.trainers = {0: TrainerProcess(0, tmp_path / "log", 0, pid=os.getpid())}
    status = StatusFile(tmp_path / "run" / "status", 0)
    stages = []
    for phase, step in (("load", 0), ("train", 5), ("train", 6), ("evaluate", 6)):
        status.update(phase, step)
        stages.append(local.read_stages()[0])
    status.close()
    assert stages == [("load", False, 0), ("train", False, 0), ("train", True, 0), ("evaluate", True, 0)]


def kill_ranks_with_standby(tmp_path: Path, settings: str) -> tuple[list[int], list[int]]:
    """Kill a rank in two attempts. Return the process ids of the ranks and of their standby processes."""

    async def run() -> tuple[list[int], list[int]]:
        limits = ResilienceConfig(standby_processes=True)
        local = Trainers(tmp_path / "runs" / "tiny", tmp_path / "node", lambda: None, limits=limits)
        local.start_server()
        words = ("--train.steps=1000000", "--checkpoint.interval=0")
        order = Start(1, 1, "tiny", (0,), 1, ("127.0.0.1", 1), settings, words)

        async def wait_for_standby() -> int:
            while not local._early.pids.get(0):
                local.read_stages()
                await asyncio.sleep(0.02)
            assert local.trainers[0].has_stepped
            return local._early.pids[0]

        trainer_pids, standby_pids = [], []
        try:
            async with asyncio.timeout(240):
                for attempt in (1, 2):
                    local.start(replace(order, attempt=attempt), "127.0.0.1", b"t" * 64)
                    standby_pids.append(await wait_for_standby())
                    trainer_pids.append(local.trainers[0].pid)
                    os.kill(local.trainers[0].pid, signal.SIGKILL)
                    while local.list_running() or local._dying.pids:
                        local.read_stages()
                        await asyncio.sleep(0.02)
                    assert local._early.pids[0] == standby_pids[-1]  # no further process is started for it
            return trainer_pids, standby_pids
        finally:
            local.end_server()

    return asyncio.run(run())


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_standby_process_replaces_a_killed_rank_and_gets_a_successor(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    trainer_pids, standby_pids = call_forked(kill_ranks_with_standby, tmp_path, tiny.read_text())
    assert trainer_pids[1] == standby_pids[0]
    assert len({trainer_pids[0], *standby_pids}) == 3


@pytest.mark.parametrize("has_standby", [False, True])
def test_standby_processes_of_ranks_that_stay_are_kept(has_standby: bool, tmp_path: Path) -> None:
    order = Start(1, 2, "tiny", (0, 1, 2), 3, ("127.0.0.1", 1), "", ())
    limits = ResilienceConfig(standby_processes=has_standby)
    local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None, limits=limits)
    local._start_order = order
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    local._early.pids = {0: sleepers[0].pid, 1: sleepers[1].pid}
    try:
        used = local._take_early_processes(replace(order, attempt=3), {0: 5, 2: 6})
        assert used == {1: sleepers[1].pid}
        assert local._early.pids == ({0: sleepers[0].pid} if has_standby else {})
        if not has_standby:
            assert sleepers[0].wait(30) == -signal.SIGKILL
        assert sleepers[1].poll() is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_an_early_process_of_another_gpu_is_not_used(tmp_path: Path) -> None:
    """Nodes before this one are lost, so its ranks move. Rank 3 gets the GPU that rank 2 had."""
    order = Start(1, 2, "tiny", (2, 3), 4, ("127.0.0.1", 1), "", ())
    local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None)
    local._start_order = order
    sleeper = subprocess.Popen(["sleep", "600"])
    local._early.pids = {3: sleeper.pid}
    try:
        assert local._take_early_processes(replace(order, attempt=3, ranks=(3, 4)), {}) == {}
        assert sleeper.wait(30) == -signal.SIGKILL
    finally:
        sleeper.kill()
        sleeper.wait()


def test_standby_processes_need_ranks_that_stay() -> None:
    with pytest.raises(ValueError, match=r"resilience\.standby_processes=true needs resilience\.keep_seconds above 0"):
        ResilienceConfig(standby_processes=True, keep_seconds=0)


def test_the_next_heartbeat_comes_once_all_ranks_have_stood_still(tmp_path: Path) -> None:
    local = Trainers(tmp_path / "run", tmp_path, lambda: None)
    assert local.compute_next_silence(10.0) == math.inf
    current_time = time.monotonic()
    for rank, age in ((0, 4.0), (1, 9.0)):
        trainer = TrainerProcess(rank, tmp_path / "log", 0, pid=1, progress=Progress("train", 5))
        trainer.progress_time = current_time - age
        local.trainers[rank] = trainer
    assert 5.0 < local.compute_next_silence(10.0) <= 6.0
    assert local.compute_next_silence(3.0) == math.inf  # an earlier heartbeat has reported it
    local.trainers[0].end(0)
    assert 0.0 < local.compute_next_silence(10.0) <= 1.0


def test_a_rank_that_continues_after_a_silence_has_another_stage(tmp_path: Path) -> None:
    """The heartbeat that follows tells the driver of the move at once. Otherwise it may end a job that continues."""
    (tmp_path / "node").mkdir()
    local = Trainers(tmp_path / "run", tmp_path / "node", lambda: None)
    trainer = TrainerProcess(0, tmp_path / "log", 0, pid=os.getpid())
    local.trainers = {0: trainer}
    status = StatusFile(tmp_path / "run" / "status", 0)
    stages = []
    for step, silence in ((5, 60.0), (6, LONG_SILENCE - 1.0), (7, LONG_SILENCE + 0.1), (8, 0.0)):
        trainer.progress_time = time.monotonic() - silence
        status.update("train", step)
        stages.append(local.read_stages()[0])
    status.close()
    # The first report ends no silence.
    assert [silences for _, _, silences in stages] == [0, 0, 1, 1]


@pytest.mark.parametrize("continues", [False, True])
def test_a_stopped_rank_has_a_replacement_while_its_hang_is_examined(continues: bool, tmp_path: Path) -> None:
    """If the rank continues, its replacement ends, because it occupies memory."""
    local = Trainers(tmp_path / "run", tmp_path, lambda: None, limits=ResilienceConfig())
    order = Start(1, 2, "tiny", (0, 1), 2, ("127.0.0.1", 1), "", ())
    agent_end, server_end = socket.socketpair()
    ranks = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    replacement = subprocess.Popen(["sleep", "600"])
    server = subprocess.Popen(["sleep", "600"])
    try:
        with agent_end, server_end:
            local._fork_server.process, local._fork_server._socket = server, agent_end
            local.start(order, "127.0.0.1", b"t" * 64)
            orders = FrameReader(TO_FORK_SERVER)
            orders.feed(server_end.recv(1 << 20))
            for trainer, process in zip(local.trainers.values(), ranks, strict=True):
                trainer.pid, trainer.progress = process.pid, Progress("train", 1)
            ranks[1].send_signal(signal.SIGSTOP)
            os.waitpid(ranks[1].pid, os.WUNTRACED)
            local.prepare_replacements()
            (fork,) = orders.feed(server_end.recv(1 << 20))
            assert (fork.rank, fork.attempt) == (1, 0)
            local._early.pids[1] = replacement.pid
            if continues:
                local.trainers[1].advance(Progress("train", 2))
            local._end_needless_replacements()
            assert local._early.pids == ({} if continues else {1: replacement.pid})
            if continues:
                assert replacement.wait(30) == -signal.SIGKILL
    finally:
        for process in [*ranks, replacement, server]:
            process.kill()
            process.wait()


@pytest.mark.parametrize("preload", [True, False])
def test_an_agent_uses_the_fork_server_that_was_started_before_its_imports(preload: bool, tmp_path: Path) -> None:
    """A server that imports other modules than the agent needs is replaced."""
    modules = ("json",)
    early = start_fork_server(tmp_path / LOG_FILE, modules if preload else ("csv",))

    async def connect() -> tuple[int, int]:
        ready = asyncio.Event()
        reports: list[Message] = []

        def note(message: Message) -> None:
            reports.append(message)
            ready.set()

        link = ForkServerLink(tmp_path / LOG_FILE, note, ready.set, early)
        try:
            link.start(modules)
            await asyncio.wait_for(ready.wait(), 60)
            assert link.process is not None
            assert link.is_ready
            first = link.process.pid
            assert reports == [ForkServerReady(first)]
            link.kill()
            link.start(modules)  # after the end of the first server
            return first, link.process.pid
        finally:
            link.kill()

    first, second = asyncio.run(connect())
    assert (first == early.process.pid) == preload
    assert second not in (first, early.process.pid)
    assert early.process.returncode == -signal.SIGKILL


def test_the_entry_module_of_an_agent_imports_nothing_that_delays_its_fork_server() -> None:
    code = "import sys, megascale.resilience.agent.main; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    modules = set(result.stdout.split())
    assert "megascale.resilience.agent.fork_server_process" in modules
    assert not modules & {"asyncio", "msgspec", "pydantic", "torch", "megascale.config", "megascale.services"}


def test_a_process_whose_request_was_dropped_does_not_serve_a_later_request() -> None:
    """The later request may name another GPU."""
    killed: list[int] = []
    early = EarlyProcesses(are_standby=True, kill=killed.append)
    assert early.reserve(0)
    early.end_all()  # before the fork
    assert early.reserve(0)
    early.add(0, 11)
    early.add(0, 12)
    assert (killed, early.pids) == ([11], {0: 12})
    early.end(0)
    assert early.reserve(0)
    early.end_all()
    early.forget()  # the fork server has ended, and reports no process of the dropped request
    assert early.reserve(0)
    early.add(0, 13)
    assert (killed, early.pids) == ([11, 12], {0: 13})


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_an_order_to_a_fork_server_that_has_just_ended_is_reported_by_its_end(tmp_path: Path) -> None:
    """An order to stop would otherwise fail, and the driver would get no answer."""

    async def run() -> list[str]:
        ended = asyncio.Event()
        link = ForkServerLink(tmp_path / LOG_FILE, lambda message: None, ended.set)
        link.start(["csv"])
        assert link.process is not None
        try:
            link.end_reason = "the lease has expired"
            link.process.kill()
            link.process.wait()
            link.send(Instruct(1, b"order\n"))  # before the event loop sees the end
            await asyncio.wait_for(ended.wait(), 30)
            reasons = [link.describe_end()]
            link.end_reason = "the lease has expired"
            link.kill()
            link.start(["csv"])
            link.process.kill()
            reasons.append(link.describe_end())
            return reasons
        finally:
            link.kill()

    reasons = asyncio.run(run())
    assert reasons[0] == "the lease has expired"
    assert reasons[1].endswith("ended with signal SIGKILL"), "the reason of an earlier server does not count"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_rank_whose_process_cannot_be_created_fails_without_its_fork_server(tiny: Path, tmp_path: Path) -> None:
    """Otherwise a replacement that lacks memory would end the ranks that train."""
    (tmp_path / "node").mkdir()
    order = Start(1, 1, "tiny", (0,), 1, ("127.0.0.1", 1), tiny.read_text(), ())

    async def run() -> tuple[Worker, Worker]:
        changed = asyncio.Event()
        local = Trainers(tmp_path / "runs" / "tiny", tmp_path / "node", changed.set)
        local.start_server()

        async def wait_until(is_reached: Callable[[], bool]) -> None:
            while not is_reached():
                changed.clear()
                await changed.wait()

        try:
            async with asyncio.timeout(120):
                await wait_until(lambda: local._fork_server.is_ready)
                server = local._fork_server.process
                assert server is not None
                limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
                resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
                local.start(order, "127.0.0.1", b"t" * 64)
                await wait_until(lambda: local.trainers[0].status is not None)
                (failed,) = local.describe_workers()
                resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
                local.start(replace(order, attempt=2), "127.0.0.1", b"t" * 64)
                await wait_until(lambda: local.trainers[0].pid > 0)
                assert local._fork_server.process is server
                assert server.poll() is None
                (running,) = local.describe_workers()
                return failed, running
        finally:
            local.end_server()

    failed, running = asyncio.run(run())
    assert (failed.state, failed.code) == ("exited", 1)
    assert "Too many open files" in failed.error
    assert running.state == "running"


def test_a_failed_request_for_an_early_process_is_not_repeated_in_its_attempt(tmp_path: Path) -> None:
    local = Trainers(tmp_path / "runs" / "tiny", tmp_path, lambda: None)
    assert local._early.reserve(0)
    local._handle_report(ForkFailed(0, 0, ExitRecord(), "OSError: no memory"))
    assert local._early.pids == {}
    assert local._early.failed_ranks == {0}
