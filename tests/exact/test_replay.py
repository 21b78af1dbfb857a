"""Replays on another replica: equal bits while all are well, the right rank after one wrong bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megascale.rendezvous.groups import make_groups
from megascale.train.replay_check import ReplayCheck, ReplayEvidence
from tests.exact.cases import TWO_LAYERS, case
from tests.exact.training import Told, make_engine, observe, run_step, state_of

INTERVAL = 2


def train_checked(rank: int, world: int, tree: dict[str, Any], steps: int) -> list[Any]:
    engine = make_engine(rank, world, tree)
    found: list[ReplayEvidence] = []
    check = attach(engine, rank, found)
    report = Told()
    for step in range(1, steps + 1):
        run_step(engine, step, report)
    state = [(box.name, box.offsets, box.values.tobytes()) for box in state_of(engine)]
    return [state, [e.message for e in found], check.checked_step]


def attach(engine, rank, found):
    engine.replay_check = ReplayCheck(engine, rank, f"cpu {rank}", "cpu", interval=INTERVAL, on_mismatch=found.append)
    return engine.replay_check


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2), (2, 1, 2)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_quiet(layout, zero, pool):
    c = case(*layout, microbatches=2, zero=zero, model={**TWO_LAYERS, "dropout": 0.1})
    res = pool.run(train_checked, c.world, c.tree, 3)
    for state, found, checked in res:
        assert not found
        assert checked == 2
