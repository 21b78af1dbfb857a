"""Replays on another replica: equal bits while all are well, the right rank after one wrong bit."""

from __future__ import annotations

from typing import Any

import pytest

from megascale.core.replay_verdict import ReplayVerdict
from megascale.train.replay_check import ReplayCheck, ReplayEvidence
from tests.chaos.corruption.bit_flips import BitFlip, Corruption
from tests.exact.cases import TWO_LAYERS, case
from tests.exact.training import Told, make_engine, run_step, state_of

INTERVAL = 2


def train_checked(
    rank: int, world: int, tree: dict[str, Any], steps: int, flip: BitFlip | None
) -> list[ReplayVerdict]:
    engine = make_engine(rank, world, tree)
    evidence: list[ReplayEvidence] = []
    engine.replay_check = ReplayCheck(
        engine, rank, f"cpu {rank}", "cpu", interval=INTERVAL, on_mismatch=evidence.append
    )
    report = Told()
    if flip is None or flip.rank != rank:
        for step in range(1, steps + 1):
            run_step(engine, step, report)
    else:
        corruption = Corruption(engine, flip)
        with corruption.inject():
            for step in range(1, steps + 1):
                corruption.begin_step(step)
                run_step(engine, step, report)
        assert corruption.count
    return [item.verdict for item in evidence]


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2), (2, 1, 2)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_quiet(layout, zero, pool):
    c = case(*layout, microbatches=2, zero=zero, model={**TWO_LAYERS, "dropout": 0.1})
    for verdicts in pool.run(train_checked, c.world, c.tree, 3, None):
        assert not verdicts


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 1, 3), (1, 2, 2), (2, 1, 2), (2, 1, 3)])
@pytest.mark.parametrize("kind", ["gemm", "activation", "activation gradient", "weight gradient"])
@pytest.mark.parametrize("persistent", [False, True])
def test_flip(layout, kind, persistent, pool):
    c = case(*layout, microbatches=2, zero=2, model={**TWO_LAYERS, "dropout": 0.1})
    if kind == "activation gradient" and layout[1] == 1: return
    for pos in (0,1,4,7):
        rank = pos % c.world
        if kind == "activation gradient": rank = c.world//2 + rank % (c.world//2)
        flip = BitFlip(kind, rank, 2, persistent, pos, 40)
        res = pool.run(train_checked, c.world, c.tree, 2, flip)
        print(flip, res[0])
