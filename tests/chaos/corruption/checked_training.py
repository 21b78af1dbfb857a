"""A few training steps with replays, as ranks of the differential suite's workers run them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from megascale.core.batch import NO_FIELDS, SampleFields
from megascale.core.replay_verdict import ReplayVerdict
from megascale.train.replay_check import ReplayCheck, ReplayEvidence
from megascale.train.update_check import RANGE
from tests.chaos.corruption.bit_flips import EVERY_RANK, BitFlip, Corruption, settle
from tests.exact.training import RankReport, make_engine, run_step, state_of


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
    rank: int,
    world: int,
    tree: dict[str, Any],
    steps: int,
    interval: int,
    flip: BitFlip | None,
    unchecked_steps: Sequence[int] = (),
    update_range: int = RANGE,
    fields: SampleFields = NO_FIELDS,
) -> CheckedResult:
    """Train `steps` steps with a check once per `interval` steps (0: none), and go on after each mismatch.

    The first check is in step 2 or later: the first step of a process is not checked. The check is taken out of the
    engine during `unchecked_steps`, as `python -m benchmarks alternate` does. `update_range`: elements that are
    recomputed of an update. `fields`: optional fields of the samples.
    """
    engine = make_engine(rank, world, tree, fields)
    evidence: list[ReplayEvidence] = []
    check: ReplayCheck | None = None
    if interval:
        check = ReplayCheck(
            engine,
            rank,
            f"cpu {rank}",
            "cpu",
            interval=interval,
            on_mismatch=evidence.append,
            update_range=update_range,
        )
    corruption = Corruption(engine, flip) if flip is not None and flip.rank in (rank, EVERY_RANK) else None
    with ExitStack() as resources:
        if corruption is not None:
            resources.enter_context(corruption.inject())
        for step in range(1, steps + 1):
            settle(engine, flip)
            if corruption is not None:
                corruption.begin_step(step)
            engine.replay_check = None if step in unchecked_steps else check
            run_step(engine, step, RankReport())
    return CheckedResult(
        [item.verdict for item in evidence],
        check.checked_step if check is not None else 0,
        corruption.count if corruption is not None else 0,
        [(box.name, box.offsets, box.values.tobytes()) for box in state_of(engine)],
    )


@dataclass
class Trial:
    """What a rank reports of one fault.

    Attributes:
        verdict: of the first mismatch; None without one.
        intervals: checks up to the mismatch.
        flips: bits flipped by this rank.
        healthy_checks: checks after the fault had gone.
        alarms: mismatches among these.
    """

    verdict: ReplayVerdict | None = None
    intervals: int = 0
    flips: int = 0
    healthy_checks: int = 0
    alarms: int = 0


def run_trials(rank: int, world: int, tree: dict[str, Any], faults: list[BitFlip]) -> list[Trial]:
    """Inject faults one after another into one training that is checked each step, with a healthy step after each.

    Each fault starts from the state after the first step, since wrong bits in it may grow into infinite weights.
    """
    engine = make_engine(rank, world, tree)
    evidence: list[ReplayEvidence] = []
    check = ReplayCheck(engine, rank, f"cpu {rank}", "cpu", interval=1, on_mismatch=evidence.append)
    engine.replay_check = check
    step = 1
    run_step(engine, step, RankReport())
    state = [tensor for state in engine.optimizer.states for tensor in (state.master, *state.state_tensors())]
    healthy_state = [tensor.clone() for tensor in state]
    trials = []
    for fault in faults:
        trial = Trial()
        corruption = Corruption(engine, replace(fault, step=step + 1))
        with corruption.inject() if fault.rank == rank else nullcontext():
            for _ in range(2):
                step += 1
                trial.intervals += 1
                settle(engine, fault)
                if fault.rank == rank:
                    corruption.begin_step(step)
                run_step(engine, step, RankReport())
                if evidence:
                    trial.verdict = evidence[0].verdict
                    break
        trial.flips = corruption.count
        evidence.clear()
        engine.synchronize()
        with engine.loading_weights():
            for tensor, healthy_tensor in zip(state, healthy_state, strict=True):
                tensor.copy_(healthy_tensor)
        check.restart()
        step += 1
        run_step(engine, step, RankReport())
        trial.healthy_checks = 1
        trial.alarms = len(evidence)
        evidence.clear()
        trials.append(trial)
    return trials
