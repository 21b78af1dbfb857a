"""An engine that loses its groups within a step goes on with new ones, and comes to the same bits as if undisturbed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megascale import config as configuration
from megascale import torch_private
from megascale.checkpoint.object_collectives import forget_groups
from megascale.core.group_names import make_attempt_suffix
from megascale.core.layout import lay_out
from megascale.optim.update_hold import UpdateHold
from megascale.parallel import parameter_slots
from megascale.rendezvous.group_sockets import cut_connections, list_new_sockets, list_sockets
from megascale.rendezvous.groups import make_groups
from megascale.train.engine import Engine
from megascale.train.engine_rejoin import find_complete_step, leave_groups, rejoin_groups
from megascale.train.replay_check import ReplayCheck, ReplayEvidence
from tests.exact import test_uneven_shares
from tests.exact.cases import Case, case
from tests.exact.training import STEPS, RankReport, make_engine, observe, run_step, state_of, train

pytestmark = pytest.mark.xdist_group("processes")
FAILED_STEP = 2  # it has gradients to overwrite, and a gather that was begun in the step before
LIMIT = timedelta(seconds=100)

CASES = {
    "data, ZeRO-0": (case(data=2, microbatches=2, zero=0), 2),
    "data, ZeRO-1": (case(data=4, microbatches=2), 2),
    "data, ZeRO-2": (case(data=2, microbatches=2, zero=2), 2),
    "data, ZeRO-3": (case(data=2, microbatches=2, zero=3), 2),
    "tensor x pipeline x data": (case(2, 2, 2, microbatches=2), 1),
    "interleaved": (case(pipeline=2, data=2, microbatches=2, virtual=2), 3),
    "tied": (case(pipeline=2, data=2, microbatches=2, model={"tied_embeddings": True}), 2),
}


class Injected(Exception):
    """The failure of one rank."""


def train_through_failure(
    rank: int,
    world: int,
    tree: dict[str, Any],
    forwards: int,
    replays: bool = False,
    run_step: Callable[[Engine, int, RankReport], None] = run_step,
) -> RankReport:
    """Train as `train` does, but the last rank fails after some forwards of a step, and all ranks get new groups.

    With `replays`, replicas check each other in all steps but the first one of each attempt.
    """
    store = torch_private.lookup("torch.distributed.distributed_c10d", "_get_default_store")()
    # A rank is connected before its peers have noticed. If it closed its connections now, a peer that still takes
    # part in the pool's start would fail.
    dist.barrier()
    sockets = list_sockets()
    _make_world(store, "first", rank, world)
    engine = make_engine(rank, world, tree)
    sockets = list_new_sockets(sockets)
    report = RankReport()
    observe(engine, report)
    if replays:
        _check_replays(engine, rank)
    for step in range(1, FAILED_STEP):
        run_step(engine, step, report)
    complete_steps = len(report.gradients)
    if rank == world - 1:
        _fail_after(engine, forwards)
    with pytest.raises((Injected, RuntimeError)):
        run_step(engine, FAILED_STEP, report)
    cut_connections(sockets)
    del report.gradients[complete_steps:]
    leave_groups(engine)
    forget_groups()
    _make_world(store, "second", rank, world)
    config = configuration.from_tree(tree)
    layout = lay_out(config, world)
    groups = make_groups(
        layout.grid,
        rank,
        chunk_map=layout.chunk_map,
        tied=config.model.tied_embeddings,
        timeout=LIMIT,
        name_suffix=make_attempt_suffix(2),
    )
    rejoin_groups(engine, groups, {})
    check = _check_replays(engine, rank) if replays else None
    with engine.loading_weights():
        pass  # a rank whose state stays loads nothing
    for step in range(FAILED_STEP, STEPS + 1):
        run_step(engine, step, report)
    report.state = state_of(engine)
    if check is not None:
        assert check.checked_step == STEPS
    return report


def _check_replays(engine: Any, rank: int) -> ReplayCheck:
    """Let replicas check each other in each step. A difference raises AssertionError."""

    def fail(evidence: ReplayEvidence) -> None:
        raise AssertionError(evidence.message)

    engine.replay_check = ReplayCheck(engine, rank, "cpu", "cpu", interval=1, on_mismatch=fail)
    return engine.replay_check


def _make_world(store: dist.Store, name: str, rank: int, world: int) -> None:
    torch_private.abort_process_group()
    with torch_private.share_gloo_loop():
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world, timeout=LIMIT)


def _fail_after(engine: Any, forwards: int) -> None:
    """Let the engine fail instead of its next forward after some."""
    count = 0
    chunk_forward = engine.chunk_forward
    original = chunk_forward._run_chunk

    def run_chunk(*arguments: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == forwards:
            chunk_forward._run_chunk = original
            raise Injected
        return original(*arguments)

    chunk_forward._run_chunk = run_chunk


@pytest.mark.parametrize("name", CASES)
def test_new_groups_after_a_failed_step_give_the_bits_of_an_undisturbed_run(name: str, pool):
    chosen, forwards = CASES[name]
    check(chosen, forwards, pool)


@pytest.mark.parametrize("forwards", [1, 2], ids=["in a replay", "after it"])
@pytest.mark.parametrize("name", ["ZeRO-1", "ZeRO-2"])
def test_replays_go_on_with_new_groups(name: str, forwards: int, pool):
    check(case(data=2, microbatches=2, zero=int(name[-1])), forwards, pool, replays=True)


@pytest.mark.parametrize("name", ["ZeRO-1", "pipeline", "experts"])
def test_uneven_shares_go_on_with_new_groups(name: str, pool):
    """A second fault while a replica is missing: the last rank fails before a blank micro-batch."""
    chosen = test_uneven_shares.LAYOUTS[name]
    expected = pool.run(test_uneven_shares.train, chosen.world, chosen.tree)
    result = pool.run(train_through_failure, chosen.world, chosen.tree, 2, False, test_uneven_shares.run_step)
    assert_same(expected, result)


def fail_in_gather(rank: int, world: int, tree: dict[str, Any], gathers: int) -> list[bool]:
    """Let a step fail in the call of a gather. Return whether each unit owns its slot after the step is dropped."""
    engine = make_engine(rank, world, tree)
    report = RankReport()
    run_step(engine, 1, report)
    engine.synchronize()
    count = 0
    original = parameter_slots.all_gather_into

    def gather(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == gathers:
            raise Injected
        return original(*arguments)

    with mock.patch.object(parameter_slots, "all_gather_into", gather), pytest.raises(Injected):
        run_step(engine, 2, report)
    engine.data_parallel.drop_communication()
    slots = engine.data_parallel.parameter_slots
    return [unit is not None and unit.owns_slot for units in slots.units for unit in units]


def test_a_unit_whose_gather_failed_is_gathered_again(pool):
    """Otherwise a rank would skip the gather in the next attempt, and its peers would wait for it."""
    layout = CASES["data, ZeRO-3"][0]
    for owns_slot in pool.run(fail_in_gather, layout.world, layout.tree, 2):
        assert not any(owns_slot)


def check(chosen: Case, forwards: int, pool, replays: bool = False) -> None:
    expected = pool.run(train, chosen.world, chosen.tree)
    assert_same(expected, pool.run(train_through_failure, chosen.world, chosen.tree, forwards, replays))


def assert_same(expected: Sequence[RankReport], result: Sequence[RankReport]) -> None:
    for calm, broken in zip(expected, result, strict=True):
        assert broken.losses == calm.losses
        assert broken.norms == calm.norms
        for ours, theirs in zip(broken.state, calm.state, strict=True):
            assert ours.name == theirs.name
            assert np.array_equal(ours.values, theirs.values), ours.name


HELD_STEP = 2


def train_to_held_step(rank: int, world: int, tree: dict[str, Any]) -> tuple[int, float, list[bool], float]:
    """Train until rank 0 holds back a step, of which all ranks take part. Return what came of the step.

    Returns:
        (complete step, requests of the held step, whether each tensor of the state is as before, norm of the next
        step).
    """
    engine = make_engine(rank, world, tree)
    hold = UpdateHold(engine.device)
    engine.hold_updates(hold)
    engine.set_start_step(0)
    report = RankReport()
    results: list[Any] = []
    make_result = engine._make_result

    def keep_result(*arguments: Any) -> Any:
        results.append(make_result(*arguments))
        return results[-1]

    engine._make_result = keep_result  # type: ignore[method-assign]
    for step in range(1, HELD_STEP):
        run_step(engine, step, report)
    engine.synchronize()
    before = state_of(engine)
    if rank == 0:
        hold.request()
    run_step(engine, HELD_STEP, report)
    engine.synchronize()
    is_equal = [np.array_equal(old.values, new.values) for old, new in zip(before, state_of(engine), strict=True)]
    complete_step = find_complete_step(engine)
    hold.release()
    run_step(engine, HELD_STEP, report)
    return complete_step, float(results[HELD_STEP - 1].hold_sum), is_equal, float(results[HELD_STEP].hold_sum)


@pytest.mark.parametrize("name", ["data, ZeRO-1", "tensor x pipeline x data"])
def test_an_update_that_one_rank_holds_back_changes_no_rank(name: str, pool):
    """The rank's gradients may be wrong, and its peers have received what follows from them."""
    chosen, _ = CASES[name]
    for complete_step, request_sum, is_equal, next_request_sum in pool.run(
        train_to_held_step, chosen.world, chosen.tree
    ):
        assert complete_step == HELD_STEP - 1
        assert request_sum == 1
        assert is_equal
        assert all(is_equal)
        assert next_request_sum == 0
