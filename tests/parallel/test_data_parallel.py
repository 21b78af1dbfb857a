"""Bucket collectives on two data-parallel ranks: they leave as the schedule states, by the record of calls."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from megascale.core import calls
from megascale.optim import sharded_adamw
from megascale.parallel.data_parallel import DataParallel
from tests.exact.cases import case
from tests.exact.conftest import pool  # noqa: F401 - a fixture
from tests.exact.training import RankReport, make_engine, run_step

pytestmark = pytest.mark.xdist_group("processes")


class Log(calls.NullCallLog):
    """Notes where the schedule stands and what is sent, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin_call(self, group: str, op: str, size: int) -> int:
        if group != "world":
            self.lines.append(op)
        return 0

    def set_action(self, action: bytes, chunk: int = -1, microbatch: int = -1, index: int = -1) -> None:
        self.lines.append(f"{action.decode()} {chunk} {microbatch}")


def logged(rank: int, world: int, tree: dict[str, Any]) -> tuple[list[str], int]:
    """The third of three steps, with a line for each contribution to a gradient and each update of a shard, and how
    many buckets each chunk has."""
    log, report = Log(), RankReport()
    mark, apply = DataParallel._count_contribution, sharded_adamw.adamw_apply

    def marked(self: DataParallel, buckets: Any, number: int) -> None:
        log.lines.append("gradient")
        mark(self, buckets, number)

    def updated(*args: Any, **kwargs: Any) -> None:
        log.lines.append("update")
        apply(*args, **kwargs)

    with (
        mock.patch.object(DataParallel, "_count_contribution", marked),
        mock.patch.object(sharded_adamw, "adamw_apply", updated),
    ):
        engine = make_engine(rank, world, tree)
        engine.runtime.calls = log
        run_step(engine, 1, report)
        log.lines.clear()
        run_step(engine, 2, report)
    engine.synchronize()
    return log.lines, len(engine.buffers[0].shards)


def between(lines: list[str], first: str, stop: str) -> list[str]:
    start = lines.index(first)
    return lines[start : lines.index(stop, start)]


@pytest.mark.parametrize("virtual", [1, 2])
def test_buckets_leave_within_the_backward_that_fills_them_and_under_the_update(virtual, pool):  # noqa: F811
    rounds = {"micro_batch_group_size": 3} if virtual > 1 else {}
    single = case(data=2, virtual=virtual, microbatches=3, parallel={"bucket_elements": 900, **rounds})
    for lines, buckets in pool.run(logged, 2, single.tree):
        assert buckets > 3
        last, after = "backward 0 2", "reduce -1 -1"
        assert lines.index("reduce_grads 0 -1") == lines.index(last) - 1
        inside = between(lines, last, after)
        sent = [n for n, line in enumerate(inside) if line == "reduce_scatter"]
        # All of the chunk's buckets, each once, and none is left for the end: gradients come after most of them.
        assert len(sent) == buckets
        assert inside[sent[0] :].count("gradient") > buckets
        assert "reduce_scatter" not in between(lines, after, "optimizer -1 -1")
        # Micro-batches before the last reduce nothing.
        assert "reduce_scatter" not in between(lines, "backward 0 1", "reduce_grads 0 -1")
        # The next step's first gather is armed: a bucket leaves behind each of the first chunk's updates.
        update = lines[lines.index("optimizer -1 -1") + 1 :]
        assert update[: 2 * buckets] == ["update", "all_gather"] * buckets
        assert set(update[2 * buckets :]) <= {"update"}
