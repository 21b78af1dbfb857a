"""The record of calls and the status, read by one process while another writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megascale.core.calls import CallLog, read_calls
from megascale.core.status import StatusFile, read_status
from tests.forked import context

_ROUNDS = 20_000
_STATUSES = 5_000


def _write_calls(folder: Path) -> None:
    log = CallLog(folder, 0, 1)
    log.register_group("world", 1)
    for _ in range(_ROUNDS):
        log.begin_step(1 << 40)
        log.set_action(b"forward", 0, 1, 3)
        call = log.begin_call("world", "all_reduce", 4)
        log.begin_wait(call)
        log.end_call(call)


def _write_status(folder: Path) -> None:
    status = StatusFile(folder, 0)
    for step in range(_STATUSES):
        status.update("train", step, message=f"{step:05} " * 60)


def _while_written(folder: Path, write: Callable[[Path], None], look: Callable[[], None]) -> None:
    writer = context.Process(target=write, args=(folder,))
    writer.start()
    while writer.is_alive():
        for _ in range(100):
            look()
    look()
    assert writer.exitcode == 0


def test_a_reader_of_calls_sees_words_that_were_written(tmp_path):
    """What only grows never goes back, and no word reads as 0 while it is written."""
    last = (0, 0, 0, 0)
    steps = set()

    def look() -> None:
        nonlocal last
        record = read_calls(tmp_path / "rank-0.calls", history=False)
        if record is None or "world" not in record.groups:
            assert last == (0, 0, 0, 0)  # only before the record is made
            return
        counts = record.groups["world"]
        current = (record.events, record.waited_ns, counts.started, counts.finished)
        assert all(new >= old for new, old in zip(current, last, strict=True))
        last = current
        if record.events > 1:
            steps.add(record.step)

    _while_written(tmp_path, _write_calls, look)
    assert last[2:] == (_ROUNDS, _ROUNDS)
    assert steps <= {0, 1 << 40}


def test_a_status_that_is_being_written_is_none_or_whole(tmp_path):
    def look() -> None:
        status = read_status(tmp_path / "rank-0.status")
        if status is not None and status.phase == "train":
            assert status.message == (f"{status.step:05} " * 60)[:400]

    _while_written(tmp_path, _write_status, look)
    result = read_status(tmp_path / "rank-0.status")
    assert result is not None
    assert result.step == _STATUSES - 1
