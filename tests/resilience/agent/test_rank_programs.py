"""Another trainer's command as a rank: torchrun's environment, progress from its log, metrics of repeated steps."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascale.config import ForeignConfig
from megascale.core import strict_json
from megascale.core.secrets import REPLICA_VARIABLE
from megascale.core.status import PARKED, UNOBSERVED, StatusFile
from megascale.observe.hang.evidence import collect_evidence
from megascale.resilience.agent.foreign_program import SITE_FOLDER, ForeignProgram
from megascale.resilience.agent.metrics_writer import MetricsWriter
from megascale.resilience.agent.progress_patterns import Reading
from megascale.resilience.agent.rank_programs import MegascaleTrainer, TrainerProcess
from megascale.resilience.protocol.agent_messages import Start
from tests.conftest import POLL_INTERVAL

ORDER = Start(epoch=1, attempt=3, job="j", ranks=(2, 3), world=4, master=("h", 29500), settings="")
COMMON = {REPLICA_VARIABLE: "secret", "RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}


@pytest.fixture
def program(tmp_path: Path) -> ForeignProgram:
    foreign = ForeignConfig(command=["python", "train.py"], per_node=2, folder="/work")
    program = ForeignProgram(tmp_path, foreign, max_restarts=5)
    program.prepare(ORDER)
    return program


def test_the_environment_is_that_of_torchrun_without_secrets(program, tmp_path):
    fork = program.make_fork(2, 3, COMMON, tmp_path / "rank-2.log")
    assert fork.executes
    assert (fork.arguments, fork.folder) == (("python", "train.py"), "/work")
    expected = {
        "GROUP_RANK": "1",
        "ROLE_RANK": "2",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "j",
        "RANK": "2",
    }
    assert expected.items() <= fork.env.items()
    assert REPLICA_VARIABLE not in fork.env
    assert fork.env["PYTHONPATH"].split(os.pathsep)[0] == str(SITE_FOLDER)


def test_progress_is_the_log_until_a_step_is_printed(program, tmp_path):
    log = tmp_path / "rank-3.log"
    log.write_text("step: 5 loss: 1.0 of an earlier attempt\n")
    program.make_fork(3, 3, COMMON, log)
    trainer = TrainerProcess(3, log, log.stat().st_size)
    program.read_progress(trainer)
    assert trainer.progress is not None
    assert trainer.progress.phase == UNOBSERVED
    with open(log, "a") as out:
        out.write("loading\n")
    program.read_progress(trainer)
    assert trainer.progress.action == "8 bytes of output, 0 collectives"
    with open(log, "a") as out:
        out.write("step: 6 loss: 1.0\rstep: 7 loss: 0.5\n")
    program.read_progress(trainer)
    assert (trainer.progress.phase, trainer.progress.step, trainer.progress.completed_steps) == ("train", 7, 2)
    assert not program.writes_metrics([2, 3])  # rank 0 prints the metrics of such lines


def test_bars_of_an_evaluation_are_progress_without_a_step(program, tmp_path):
    log = tmp_path / "rank-3.log"
    program.make_fork(3, 3, COMMON, log)
    trainer = TrainerProcess(3, log, 0)
    bars = ["  0%|  | 0/40 [00:00<?, ?it/s]", " 25%|# | 10/40 [00:01<00:56,  1.42it/s]"]
    steps = []
    for bar in (*bars, " 50%|# | 2/4 [00:01<00:01,  1.42it/s]", "Validation: 50%|# | 3/4 [00:01<00:01,  1.42it/s]"):
        with open(log, "a") as out:
            out.write(bar + "\r")
        program.read_progress(trainer)
        steps.append((trainer.progress.phase, trainer.progress.step, trainer.progress.action))
    assert steps[1:] == [
        ("train", 10, ""),
        ("train", 10, "1 states of other progress bars"),
        ("train", 10, "2 states of other progress bars"),
    ]


def test_the_last_rank_writes_the_metrics_of_megatron(program, tmp_path):
    log = tmp_path / "rank-3.log"
    program.make_fork(3, 3, COMMON, log)
    log.write_text(" iteration        9/     100 | lm loss: 1.5E+00 | grad norm: 2.0 |\n")
    program.read_progress(TrainerProcess(3, log, 0))
    assert program.writes_metrics([2, 3])
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["step"], record["loss"], record["grad_norm"]) == (9, 1.5, 2.0)


def test_a_resumed_attempt_replaces_the_steps_that_it_repeats(tmp_path):
    file = tmp_path / "metrics.jsonl"
    first = MetricsWriter(file)
    first.write([Reading(1, loss=1.0), Reading(2, loss=2.0)])
    first.write([Reading(2, loss=9.0), Reading(3, loss=3.0)])
    MetricsWriter(file).write([Reading(2, loss=2.5)])
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(record["step"], record["loss"]) for record in records] == [(1, 1.0), (2, 2.5)]


def test_a_trainer_that_goes_back_within_an_attempt_replaces_the_steps_that_it_repeats(tmp_path):
    file = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(file)
    writer.write([Reading(step, loss=1.0) for step in range(1, 6)])
    writer.write([Reading(6, loss=1.0), Reading(3, loss=2.0), Reading(4, loss=2.0)])
    writer.write([Reading(4, loss=9.0), Reading(5, loss=2.0)])
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in records] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


@pytest.mark.parametrize("end", [b'{"step": 2, "lo', b"\xff\x00" * 9])
def test_a_record_that_was_not_completely_written_is_removed_before_the_next(end, tmp_path):
    file = tmp_path / "metrics.jsonl"
    MetricsWriter(file).write([Reading(1, loss=1.0)])
    with open(file, "ab") as out:
        out.write(end)
    MetricsWriter(file).write([Reading(2, loss=2.0)])
    assert [json.loads(line)["step"] for line in file.read_bytes().splitlines()] == [1, 2]


def test_a_loss_that_is_not_finite_is_written_as_valid_json(tmp_path):
    file = tmp_path / "metrics.jsonl"
    MetricsWriter(file).write([Reading(1, loss=math.nan)])
    text = file.read_text()
    assert json.loads(text)["loss"] == "NaN"
    assert math.isnan(strict_json.loads(text)["loss"])


LOGS = {
    "states of a bar": (b"\r 20%|# | 20/100 [00:14<00:56,  1.42it/s]\r 21%|# | 21/100 [00:14<00:56,  1.42it/s]", 20),
    "a long line": (b"x" * 600_000 + b"\nstep: 20 loss: 1.0\n", 20),
    "binary output": (bytes(range(256)) * 2000 + b"\nstep: 20 loss: 1.0\n", 20),
    "Windows line ends": (b"step: 20 loss: 1.0\r\n", 20),
    "a loss without a number": (b"step: 20 loss: nan\n", 20),
    "a line that is not complete": (b"step: 20 loss: 1.0\nstep: 21", 20),
}


@pytest.mark.parametrize(("output", "step"), LOGS.values(), ids=LOGS)
def test_steps_are_seen_in_any_output(output, step, program, tmp_path):
    log = tmp_path / "rank-2.log"
    program.make_fork(2, 3, COMMON, log)
    log.write_bytes(output)
    trainer = TrainerProcess(2, log, 0)
    program.read_progress(trainer)
    assert trainer.progress is not None
    assert (trainer.progress.phase, trainer.progress.step) == ("train", step)


def test_output_without_line_ends_is_progress(program, tmp_path):
    log = tmp_path / "rank-2.log"
    program.make_fork(2, 3, COMMON, log)
    trainer = TrainerProcess(2, log, 0)
    actions = []
    for _ in range(2):
        with open(log, "ab") as out:
            out.write(b".")
        program.read_progress(trainer)
        assert trainer.progress is not None
        actions.append(trainer.progress.action)
    assert actions == ["1 bytes of output, 0 collectives", "2 bytes of output, 0 collectives"]


def test_a_log_that_a_rotation_empties_is_read_from_its_begin(program, tmp_path):
    log = tmp_path / "rank-2.log"
    log.write_text("of an earlier attempt\n" * 9)
    program.make_fork(2, 3, COMMON, log)
    trainer = TrainerProcess(2, log, log.stat().st_size)
    program.read_progress(trainer)
    os.truncate(log, 0)
    with open(log, "a") as out:
        out.write("step: 20 loss: 1.0\nKeyError: 1\n")
    program.read_progress(trainer)
    assert trainer.progress is not None
    assert trainer.progress.step == 20
    assert trainer.read_tail().endswith("KeyError: 1\n")


def test_a_rank_gives_its_stack_and_keeps_the_sitecustomize_of_its_environment(tmp_path):
    own_folder = tmp_path / "own"
    own_folder.mkdir()
    (own_folder / "sitecustomize.py").write_text("import sys; sys.own = 1")
    for name in ("status", "flight"):
        (tmp_path / name).mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\ndef wait_here():\n    print(sys.own, flush=True)\n    time.sleep(60)\nwait_here()\n"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SITE_FOLDER), str(own_folder)]),
        "RANK": "0",
        "MEGASCALE_STATUS": str(tmp_path / "status"),
        "MEGASCALE_FLIGHT": str(tmp_path / "flight"),
    }
    process = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        evidence = collect_evidence(tmp_path, watch_seconds=0).ranks[0]
        assert (evidence.process, evidence.answered, evidence.pid) == ("running", True, process.pid)
        assert any("wait_here" in frame for frame in evidence.stack)
        assert evidence.flight is not None
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while collect_evidence(tmp_path, ask=False, watch_seconds=0).ranks[0].process != "stopped":
            assert time.monotonic() < deadline
            time.sleep(POLL_INTERVAL)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert collect_evidence(tmp_path, watch_seconds=0).ranks[0].process == "gone"


def test_a_rank_without_the_handler_is_not_signalled(tmp_path):
    (tmp_path / "status").mkdir()
    process = subprocess.Popen([sys.executable, "-S", "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        birth = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        record = f"{process.pid} {birth} {os.uname().nodename}\n"
        (tmp_path / "status" / "rank-0.process").write_text(record)
        evidence = collect_evidence(tmp_path, watch_seconds=0).ranks[0]
        assert (evidence.process, evidence.answered) == ("running", None)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


# BPF that answers ptrace and process_vm_readv with EPERM on x86-64 and allows the other calls.
FORBID_PTRACE = """
import ctypes, struct, sys
from pathlib import Path
instructions = [(0x20, 0, 0, 0), (0x15, 1, 0, 101), (0x15, 0, 1, 310)]
instructions += [(0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
header = struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(program))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, header, 0, 0) == 0
assert libc.ptrace(16, int(sys.argv[2]), 0, 0) == -1 and ctypes.get_errno() == 1
from megascale.observe.hang.evidence import collect_evidence
evidence = collect_evidence(Path(sys.argv[1]), watch_seconds=0).ranks[0]
print(evidence.answered, *evidence.stack)
"""


@pytest.fixture
def start_rank(tmp_path):
    for name in ("status", "flight"):
        (tmp_path / name).mkdir()
    processes = []

    def start(code: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "PYTHONPATH": str(SITE_FOLDER),
            "RANK": "0",
            "MEGASCALE_STATUS": str(tmp_path / "status"),
            "MEGASCALE_FLIGHT": str(tmp_path / "flight"),
        }
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are those of x86-64")
def test_a_stack_is_given_where_ptrace_is_forbidden(start_rank, tmp_path):
    process = start_rank(
        "import time\ndef wait_here():\n    print('ready', flush=True)\n    time.sleep(60)\nwait_here()"
    )
    command = [sys.executable, "-c", FORBID_PTRACE, str(tmp_path), str(process.pid)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert answer.startswith("True")
    assert "wait_here" in answer


def test_a_rank_that_writes_a_checkpoint_moves_and_a_loop_does_not(start_rank, tmp_path):
    start_rank(f"print('ready', flush=True)\nwhile True: open({str(tmp_path / 'x')!r}, 'w').write('x' * (1 << 22))")
    assert collect_evidence(tmp_path, watch_seconds=0.5).moving == {0}
    for file in (tmp_path / "status").iterdir():
        file.unlink()
    start_rank("print('ready', flush=True)\nwhile True: pass")
    assert collect_evidence(tmp_path, watch_seconds=0.5).moving == frozenset()


SAVE = "open('/dev/null', 'w').write('x' * (1 << 22))"
CHILDREN = {
    "it writes": (SAVE, True),
    "it computes": ("pass", True),
    "it waits": ("__import__('time').sleep(60)", False),
}


@pytest.mark.parametrize(("work", "moves"), CHILDREN.values(), ids=CHILDREN)
def test_a_rank_that_waits_for_a_child_process_moves_if_the_child_does(work, moves, start_rank, tmp_path):
    """Megatron-Core's save starts processes that import for many seconds and write."""
    start = (
        f"child = subprocess.Popen([sys.executable, '-c', \"print(1, flush=True)\\nwhile True: {work}\"], stdout=-1)"
    )
    end = "child.stdout.readline()\nprint('ready', flush=True)\ntime.sleep(60)"
    start_rank(f"import subprocess, sys, time\n{start}\n{end}")
    try:
        assert collect_evidence(tmp_path, watch_seconds=1.0).moving == (frozenset([0]) if moves else frozenset())
    finally:
        pid = int((tmp_path / "status" / "rank-0.process").read_text().split()[0])
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)


def test_a_process_whose_name_is_not_text_does_not_disturb(start_rank, tmp_path):
    """The kernel cuts names to 15 bytes, also within a character."""
    rename = "ctypes.CDLL(None).prctl(15, b'x' * 14 + bytes([0xE8]), 0, 0, 0)"
    start_rank(f"import ctypes, time\n{rename}\nprint('ready', flush=True)\ntime.sleep(60)")
    evidence = collect_evidence(tmp_path, watch_seconds=0.1)
    assert (evidence.ranks[0].process, evidence.moving) == ("running", frozenset())


def test_a_process_that_waits_for_its_first_attempt_has_a_status_file_of_its_own(tmp_path: Path) -> None:
    """Two nodes may prepare processes for the same rank, and a rank of the present attempt may have the number too."""
    run = tmp_path / "run"
    node = tmp_path / "nodes" / "n1"
    program = MegascaleTrainer(run, node / "job.toml", shared=True)
    waiting = TrainerProcess(2, tmp_path / "log", 0, is_waiting=True, pid=os.getpid())
    StatusFile(run / "status", 2).update("train", 5)
    StatusFile(run / "status", 2, waiting_node="n2").update(PARKED, 0)
    program.read_progress(waiting)
    assert waiting.progress is None
    StatusFile(run / "status", 2, waiting_node="n1").update(PARKED, 0)
    program.read_progress(waiting)
    assert waiting.is_parked
    rank = TrainerProcess(2, tmp_path / "log", 0, pid=os.getpid())
    program.read_progress(rank)
    assert rank.progress is not None
    assert (rank.progress.phase, rank.progress.step) == ("train", 5)
