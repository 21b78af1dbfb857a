"""A few training steps with replays, as ranks of the differential suite's workers run them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from megascale.core.replay_verdict import ReplayVerdict
from megascale.train.replay_check import ReplayCheck, ReplayEvidence
from tests.chaos.corruption.bit_flips import BitFlip, Corruption
from tests.exact.training import Told, make_engine, run_step, state_of


@dataclass
class CheckedResult:
    """What a rank reports.

    Attributes:
        verdicts: of each mismatch.
        confirmed_step: last step whose replays agreed.
        flips: bits flipped by this rank.
        state: weights and moments after the last step.
    """

    verdicts: list[ReplayVerdict]
    confirmed_step: int
    flips: int
    state: list[Any]


def train_checked(
    rank: int, world: int, tree: dict[str, Any], steps: int, interval: int, flip: BitFlip | None
) -> CheckedResult:
    """Train `steps` steps with a check once per `interval` steps (0: none), and go on after each mismatch.

    The first check is in step 2 or later: the first step of a process is not checked.
    """
    engine = make_engine(rank, world, tree)
    evidence: list[ReplayEvidence] = []
    if interval:
        engine.replay_check = ReplayCheck(
            engine, rank, f"cpu {rank}", "cpu", interval=interval, on_mismatch=evidence.append
        )
    corruption = Corruption(engine, flip) if flip is not None and flip.rank == rank else None
    with ExitStack() as resources:
        if corruption is not None:
            resources.enter_context(corruption.inject())
        for step in range(1, steps + 1):
            if corruption is not None:
                corruption.begin_step(step)
            run_step(engine, step, Told())
    return CheckedResult(
        [item.verdict for item in evidence],
        engine.replay_check.checked_step if engine.replay_check else 0,
        corruption.count if corruption is not None else 0,
        [(box.name, box.offsets, box.values.tobytes()) for box in state_of(engine)],
    )
