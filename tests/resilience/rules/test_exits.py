"""Processes that ended: each has a cause, a culprit, and what follows."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal

import pytest
from msgspec.structs import replace

from megascale.core.exit_record import ExitKind, ExitRecord, attach_record, find_exit_record
from megascale.errors import EXIT_FAILED, EXIT_USAGE, ConfigError, FitError, TrainingError
from megascale.resilience import rules
from megascale.resilience.agent import node_health
from megascale.resilience.protocol.heartbeat import Worker
from megascale.resilience.rules import exits, foreign_messages, silence
from megascale.resilience.rules.view import Verdict
from tests.resilience.rules.views import ended, heartbeat, one, trace, view, worker

EXITS = [
    ({"state": "signalled", "code": signal.SIGSEGV}, "segmentation_fault", "recover"),
    ({"state": "signalled", "code": signal.SIGKILL}, "process_killed", "recover"),
    (
        {"state": "exited", "code": 1, "stderr_tail": trace("RuntimeError: CUDA error: an illegal memory access")},
        "cuda_error",
        "recover",
    ),
    (
        {"state": "exited", "code": 1, "stderr_tail": trace("torch.OutOfMemoryError: CUDA out of memory.")},
        "out_of_memory",
        "recover",
    ),
    (
        {"state": "exited", "code": 1, "exit": ExitRecord(ExitKind.DISK_FULL, subject="runs")},
        "disk_full",
        "recover",
    ),
    (
        {"state": "exited", "code": 1, "exit": ExitRecord(ExitKind.NONFINITE_LOSS, step=7)},
        "nonfinite_loss",
        "diagnose",
    ),
    (
        {"state": "exited", "code": 1, "exit": ExitRecord(ExitKind.NONFINITE_GRADIENT, step=9)},
        "nonfinite_gradient",
        "diagnose",
    ),
    ({"state": "exited", "code": 1, "stderr_tail": trace("KeyError: 'text'")}, "user_error", "recover"),
    ({"state": "exited", "code": 3, "exit": ExitRecord(ExitKind.REFUSED)}, "user_error", "stop"),
    (
        {"state": "exited", "code": 1, "stderr_tail": "RuntimeError: NCCL error: unhandled system error"},
        "network_error",
        "recover",
    ),
    ({"state": "exited", "code": 9, "stderr_tail": ""}, "process_exit", "recover"),
]


@pytest.mark.parametrize(("how", "kind", "action"), EXITS)
def test_an_exit_has_a_cause_a_culprit_and_its_words(how, kind, action):
    verdict = one(ended(worker(1, **how)), kind)
    assert (verdict.nodes, verdict.ranks, verdict.action) == (("node-1",), (1,), action)
    assert verdict.needs_person == (action == "stop")
    assert "rank 1 (process 101 on node-1)" in verdict.evidence[0]


def test_a_rank_that_lost_a_peer_is_not_to_blame():
    message = "rank 0 lost contact with another rank in step 11"
    victim = worker(0, state="exited", code=1, message=message, exit=ExitRecord(ExitKind.LOST_PEER, step=11))
    result = ended(victim, worker(1, state="signalled", code=signal.SIGSEGV))
    assert [(v.kind, v.ranks) for v in result] == [("segmentation_fault", (1,))]
    alone = one(ended(victim), "process_exit")
    assert alone.nodes == ()
    assert alone.action == "recover"


def test_ranks_that_computed_other_bits_are_evicted_tested_or_left_to_a_person():
    wrong = {"state": "exited", "code": 1, "exit": ExitRecord(ExitKind.WRONG_BITS, rank=1, step=9, subject="loss")}
    peer = worker(0, state="exited", code=1, message="rank 1 erred", exit=ExitRecord(ExitKind.LOST_PEER, step=9))
    named = one(ended(peer, worker(1, **wrong)), "replay_mismatch")
    assert (named.nodes, named.ranks, named.action) == (("node-1",), (1,), "evict")
    pair = ended(worker(0, **wrong), worker(1, **wrong))
    first = one(pair, "replay_mismatch")
    assert (first.nodes, first.action) == (("node-0", "node-1"), "diagnose")
    repeated = one(ended(worker(0, **wrong), worker(1, **wrong), past=[(1.0, first)]), "replay_mismatch")
    assert (repeated.action, repeated.needs_person) == ("stop", True)


def test_ranks_that_ended_as_they_were_asked_to_are_not_to_blame_however_often():
    """A pod is deleted twice, and the driver hears of the ranks elsewhere first."""
    requested = worker(0, state="exited", code=130, error="Exit: 130")
    first = one(ended(requested), "process_exit")
    assert (first.nodes, first.ranks, first.action, first.needs_person) == ((), (0,), "recover", False)
    assert "ended by SIGTERM or SIGINT" in first.evidence[0]
    repeated = one(
        ended(requested, worker(1, state="exited", code=130, error="Exit: 130"), past=[(1.0, first)]), "process_exit"
    )
    assert (repeated.nodes, repeated.action) == ((), "recover")
    result = ended(requested, worker(1, state="signalled", code=signal.SIGSEGV))
    assert [(v.kind, v.ranks) for v in result] == [("segmentation_fault", (1,))]


def test_a_rank_whose_agent_was_told_to_end_says_whose_machine_it_was():
    requested = worker(0, state="exited", code=130, error="Exit: 130")
    verdict = one(
        ended(requested, worker(1, state="exited", code=130, error="Exit: 130", by_agent=True)), "process_exit"
    )
    assert (verdict.nodes, verdict.ranks, verdict.action) == (("node-1",), (1,), "recover")


def test_the_same_exception_on_several_ranks_is_the_users():
    error = {"state": "exited", "code": 1, "stderr_tail": trace("KeyError: 'text'")}
    verdict = one(ended(worker(0, **error), worker(1, **error)), "user_error")
    assert verdict.needs_person
    assert verdict.action == "stop"
    assert any("KeyError: 'text'" in line for line in verdict.evidence)


@pytest.mark.parametrize(("code", "action"), [(EXIT_USAGE, "stop"), (EXIT_FAILED, "recover")])
def test_the_message_of_the_rank_that_refuses_a_start_comes_first(code, action):
    def refuse(rank: int, message: str, refusing_rank: int) -> Worker:
        record = ExitRecord(ExitKind.REFUSED, rank=refusing_rank)
        return worker(rank, state="exited", code=code, message=message, exit=record)

    workers = [
        refuse(0, "rank 2 refused this start", 2),
        refuse(1, "rank 2 refused this start", 2),
        refuse(2, "data.train=a.bin is damaged; build it again", -1),
    ]
    verdict = rules.judge(view({w.rank: [heartbeat(w.rank, 1, [w])] for w in workers}))[0]
    assert verdict.action == action
    assert verdict.evidence[0] == "rank 2 reported: data.train=a.bin is damaged; build it again"
    assert len([text for text in verdict.evidence if "is damaged" in text]) == 1
    assert "its last message: rank 2 refused this start" in verdict.evidence
    assert "the cause is unknown" not in "; ".join(verdict.evidence)


def test_an_exception_that_comes_again_is_the_users_and_one_that_differs_is_not():
    def fails(text: str, past: list[Verdict]) -> Verdict:
        how = {"state": "exited", "code": 1, "stderr_tail": trace(text)}
        return one(ended(worker(1, **how), past=[(1.0, v) for v in past]), "user_error")

    first = fails("ValueError: bad row", [])
    assert (first.action, first.needs_person) == ("recover", False)
    repeated = fails("ValueError: bad row", [first])
    assert (repeated.action, repeated.needs_person) == ("stop", True)
    second = fails("OSError: [Errno 5] Input/output error", [first])
    assert (second.action, second.needs_person) == ("recover", False)


def test_a_killed_process_on_a_full_node_ran_out_of_memory():
    hardware = node_health.describe_hardware()  # as agents send it
    rss = int(0.95 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    dead = worker(1, state="signalled", code=signal.SIGKILL)
    beats = [heartbeat(1, 1, [worker(1, rss=rss)], hardware=hardware), heartbeat(1, 2, [dead], hardware=hardware)]
    assert one(rules.judge(view({0: [heartbeat(0, 1, [worker(0)])], 1: beats})), "out_of_memory").ranks == (1,)


def test_a_signal_is_not_explained_by_a_line_before_it():
    old = "RuntimeError: NCCL error: Connection reset, trying again\nNo space left on device\nstep 8\nstep 9\n" * 5
    for number, kind in ((signal.SIGKILL, "process_killed"), (signal.SIGSEGV, "segmentation_fault")):
        dead = worker(1, state="signalled", code=number, stderr_tail=old)
        assert one(ended(dead), kind).ranks == (1,)
    quiet = old + "step\n" * 20
    assert one(ended(worker(1, state="signalled", code=signal.SIGABRT, stderr_tail=quiet)), "segmentation_fault")
    output = quiet + "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: unspecified\n"
    assert one(
        ended(worker(1, state="signalled", code=signal.SIGABRT, stderr_tail=output + "frame\n" * 30)), "cuda_error"
    )
    # An exception that was caught is not what ended it either.
    tail = trace("OSError: Connection reset by peer") + "step 8\n" + trace("KeyError: 'text'")
    assert one(ended(worker(1, state="exited", code=1, stderr_tail=tail)), "user_error")


@pytest.mark.parametrize(("lines_after", "kind"), [(9, "cuda_error"), (10, "segmentation_fault")])
def test_only_the_last_lines_explain_an_end_without_a_trace(lines_after, kind):
    tail = "CUDA error: unspecified launch failure\n" + "step\n" * lines_after
    dead = worker(1, state="signalled", code=signal.SIGABRT, stderr_tail=tail)
    assert [verdict.kind for verdict in ended(dead)] == [kind]


def test_a_signal_that_ends_the_survivors_is_no_cause_of_its_own():
    mistake = worker(0, state="exited", code=1, stderr_tail=trace("KeyError: 'text'"), ended_age=0.4)
    terminated = worker(1, state="signalled", code=signal.SIGTERM, ended_age=0.4)
    assert [verdict.kind for verdict in ended(mistake, terminated)] == ["user_error"]
    assert [verdict.kind for verdict in ended(terminated)] == ["process_killed"]


def test_last_words_are_the_line_that_names_an_error():
    """Later lines, such as advice of a library, say less."""
    tail = trace("torch.OutOfMemoryError: CUDA out of memory") + "See the documentation for Memory Management.\n"
    assert exits.get_last_message(worker(1, stderr_tail=tail)) == "torch.OutOfMemoryError: CUDA out of memory"
    assert exits.get_last_message(worker(1, stderr_tail="error: no such file\nadvice\n")) == "error: no such file"
    assert exits.get_last_message(worker(1, stderr_tail="first\nlast\n")) == "last"
    assert exits.get_last_message(worker(1, message="m" * 301, stderr_tail=tail)) == "m" * 300


def test_a_calm_line_of_the_log_is_nobodys_last_words():
    calm = "2026-11-24T04:27:29.274Z attempt 1 rank 1 INFO megascale.train: process 12379 on vm, one of 2 ranks, begins"
    report = worker(1, state="signalled", code=signal.SIGKILL, stderr_tail=calm)
    assert exits.get_last_message(report) == ""
    warned = calm.replace("INFO", "WARNING")
    assert exits.get_last_message(worker(1, state="exited", code=1, stderr_tail=f"{warned}\n{calm}")) == warned


def test_who_failed_first_and_by_itself_names_the_cause():
    first = worker(0, state="exited", code=1, error="ModuleNotFoundError: No module named 'x'", ended_age=0.4)
    first = replace(first, exit=ExitRecord(ExitKind.EXCEPTION))
    killed = worker(1, state="signalled", code=signal.SIGKILL, ended_age=0.2)
    assert [v.kind for v in ended(first, killed)] == ["user_error"]
    aborted = replace(killed, code=signal.SIGABRT)
    assert [v.kind for v in ended(first, aborted)] == ["user_error"]
    assert [v.kind for v in ended(first, replace(killed, by_agent=True, ended_age=0.9))] == ["user_error"]
    # Earlier than any other, a signal is the cause.
    result = ended(replace(first, error="RuntimeError: Connection closed by peer"), replace(killed, ended_age=0.9))
    assert [v.kind for v in result] == ["process_killed"]


def test_a_port_taken_is_tried_again_elsewhere_within_bounds():
    failed = worker(
        1, state="exited", code=2, exit=ExitRecord(ExitKind.PORT_TAKEN), error="ConfigError: rank 0 cannot serve"
    )
    past: list[tuple[float, Verdict]] = []
    for _ in range(exits.PORT_LIMIT - 1):
        verdict = one(ended(failed, past=past), "port_taken")
        assert (verdict.action, verdict.needs_person) == ("recover", False)
        past.append((1.0, verdict))
    last = one(ended(failed, past=past), "port_taken")
    assert (last.action, last.needs_person) == ("stop", True)
    assert "ports in a row" in last.evidence[-1]
    between = past + [(2.0, Verdict("segmentation_fault"))]
    assert one(ended(failed, past=between), "port_taken").action == "recover"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_known_by_its_number_or_its_room_and_by_no_line_of_a_log(number):
    failed = worker(
        1, state="exited", code=1, exit=find_exit_record(OSError(number, "something")), error="OSError: something"
    )
    assert one(ended(failed), "disk_full").action == "recover"
    assert exits.judge_failed_start("n0", (0,), "why", number).kind == "disk_full"
    line = worker(1, state="exited", code=9, stderr_tail="copying: No space left on device, left out\n")
    assert one(ended(line), "process_exit")
    for how in ({"state": "exited", "code": 9}, {"state": "signalled", "code": signal.SIGBUS}):
        for remaining, kind in ((0.0, "disk_full"), (1e9, None)):
            beat = heartbeat(1, 1, [worker(1, **how)], disks={"/runs/a": remaining})
            result = rules.judge(view({0: [heartbeat(0, 1, [worker(0)])], 1: [beat]}))
            if kind is None:
                assert "disk_full" not in {v.kind for v in result}
            else:
                assert "the disk of /runs/a has 0 bytes left" in one(result, kind).evidence


def test_the_same_full_disk_ends_the_job_whatever_the_figures():
    def fails(disk: str, text: str, past: list[Verdict]) -> Verdict:
        record = ExitRecord(ExitKind.DISK_FULL, subject=disk)
        how = {"state": "exited", "code": 1, "message": text, "exit": record}
        return one(ended(worker(1, **how), past=[(1.0, v) for v in past]), "disk_full")

    first = fails("/a", "the disk of '/a' is full: a checkpoint needs 417,792 bytes and 212,992 are free", [])
    assert first.action == "recover"
    later = "the checkpoint of the last step, 12, failed: the disk of {} is full: a checkpoint needs 417,792 bytes"
    repeated = fails("/a", later.format("'/a'"), [first])
    assert (repeated.action, repeated.needs_person) == ("stop", True)
    assert fails("/b", later.format("'/b'"), [first]).action == "recover"


def test_a_node_that_lacks_memory_where_the_job_has_trained_is_met_by_another():
    """All ranks report the shortage of one rank, and end with its message."""
    arguments = "rank 1 on b7: staging memory for checkpoints could not be had ([Errno 12] 3 of 5 bytes are free)"
    of_it = worker(1, state="exited", code=3, exit=ExitRecord(ExitKind.HOST_MEMORY, rank=1), message=arguments)
    report = worker(0, state="exited", code=3, exit=ExitRecord(ExitKind.REFUSED, rank=1), message=arguments)
    trained = {"usual_durations": {silence.FIRST_STEP: 10.0}, "phase": "starting"}
    for peers in ((), (report,)):
        verdict = one(ended(of_it, *peers, **trained), "out_of_memory")
        assert (verdict.nodes, verdict.action, verdict.needs_person) == (("node-1",), "recover", False)
        assert any("another program holds its memory" in line for line in verdict.evidence)
    repeated = [(900.0, verdict)]
    assert one(ended(of_it, report, past=repeated, **trained), "out_of_memory").action == "evict"
    # Elsewhere it is the first time; alone there is no other node to say whose it is.
    present = [(900.0, dataclasses.replace(verdict, nodes=("node-7",)))]
    assert one(ended(of_it, past=present, **trained), "out_of_memory").action == "recover"
    local = replace(
        of_it, rank=0, exit=ExitRecord(ExitKind.HOST_MEMORY, rank=0), message=arguments.replace("rank 1", "rank 0")
    )
    past = [(900.0, dataclasses.replace(verdict, nodes=("node-0",)))]
    alone = view({0: [heartbeat(0, 1, [local])]}, past=past)
    alone.usual_durations |= trained["usual_durations"]
    assert one(rules.judge(alone), "out_of_memory").action == "stop"
    pair = one(
        ended(of_it, replace(of_it, rank=0, exit=ExitRecord(ExitKind.HOST_MEMORY, rank=0)), **trained), "out_of_memory"
    )
    assert (pair.nodes, pair.action) == (("node-0", "node-1"), "recover")
    # Who speaks first is not to blame, nor is anybody before the first step of all: then a person is told.
    assert one(ended(report, **trained), "process_exit").nodes == ()
    first = ended(of_it, report)
    assert {(v.action, v.needs_person) for v in first} == {("stop", True)}
    assert any("settings or data are wrong" in line for v in first for line in v.evidence)


MESSAGES = list(foreign_messages.ENDS) + list(foreign_messages.BROKEN_HARDWARE)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.pattern)
def test_each_message_of_another_program_is_recognised_by_its_example(message):
    table = foreign_messages.ENDS if message in foreign_messages.ENDS else foreign_messages.BROKEN_HARDWARE
    assert foreign_messages.find_fault(message.example, table) is message.fault
    for mark in (foreign_messages.END_MARK, foreign_messages.EXCEPTION_LINE):
        assert re.search(mark.pattern, mark.example)


def test_an_exception_is_recorded_as_a_code_with_its_subject():
    def chained(cause: BaseException, error: BaseException) -> BaseException:
        error.__cause__ = cause
        return error

    full = attach_record(TrainingError("full"), ExitKind.DISK_FULL, subject="/a")
    assert find_exit_record(chained(full, SystemExit(1))) == ExitRecord(ExitKind.DISK_FULL, subject="/a")
    assert find_exit_record(chained(OSError(errno.ENOMEM, "x"), FitError("y"))).kind is ExitKind.HOST_MEMORY
    assert find_exit_record(OSError(errno.ENOMEM, "x")).kind is ExitKind.OUT_OF_MEMORY
    assert find_exit_record(chained(OSError(errno.EADDRINUSE, "x"), ConfigError("y"))).kind is ExitKind.PORT_TAKEN
    assert find_exit_record(MemoryError()).kind is ExitKind.OUT_OF_MEMORY
    assert find_exit_record(ConfigError("y")).kind is ExitKind.REFUSED
    assert find_exit_record(KeyError("y")).kind is ExitKind.EXCEPTION
    assert find_exit_record(KeyboardInterrupt()).kind is ExitKind.INTERRUPTED
    assert find_exit_record(SystemExit(1)).kind is ExitKind.UNKNOWN
