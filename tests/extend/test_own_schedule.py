"""A pipeline schedule of another package: registered, checked, trained, planned and priced like ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megascale.config import from_tree
from megascale.core.layout import lay_out
from megascale.core.schedule import Action, ActionKind, Schedule, build_1f1b
from megascale.core.schedule_registry import SCHEDULES, ScheduleDefinition
from tests.exact.cases import case
from tests.exact.compare import assert_equal
from tests.exact.training import STEPS, RankReport, train

pytestmark = pytest.mark.xdist_group("processes")


def forwards_first(
    stages: int, virtual: int, microbatches: int, reduce_each: bool, micro_batch_group_size: int | None
) -> Schedule:
    """GPipe (Huang et al. 2019): all forwards, then all backwards, the last micro-batch's first."""
    tables = []
    for stage in range(stages):
        actions = [Action(ActionKind.GATHER_PARAMS, 0, -1)]
        for i in range(microbatches):
            actions += [Action(ActionKind.RECV_FORWARD, 0, i)] * (stage > 0)
            actions += [Action(ActionKind.FORWARD, 0, i)]
            actions += [Action(ActionKind.SEND_FORWARD, 0, i)] * (stage < stages - 1)
        for i in reversed(range(microbatches)):
            actions += [Action(ActionKind.RECV_BACKWARD, 0, i)] * (stage < stages - 1)
            if reduce_each or i == 0:
                actions += [Action(ActionKind.REDUCE_GRADS, 0, i if reduce_each else -1)]
            actions += [Action(ActionKind.BACKWARD, 0, i)]
            actions += [Action(ActionKind.SEND_BACKWARD, 0, i)] * (stage > 0)
        tables.append(np.array(actions, dtype=np.int32))
    return Schedule("forwards first", stages, virtual, microbatches, tuple(tables))


SCHEDULES.register("forwards_first", ScheduleDefinition(forwards_first))


def train_own(rank: int, world: int, tree: dict[str, Any], steps: int) -> RankReport:
    """Train as `train`. The worker's lookup of this function here registers the schedule."""
    return train(rank, world, tree, steps)


@pytest.mark.parametrize(
    ("shape", "zero"), [((1, 2, 1), 1), ((1, 2, 2), 1), ((1, 2, 2), 2)], ids=["PP2", "PP2 x DP2", "PP2 x DP2, ZeRO-2"]
)
def test_it_trains_as_one_process_does(shape, zero, pool, one_process):
    local = case(*shape, microbatches=3, zero=zero, parallel={"schedule": "forwards_first", "bucket_elements": 900})
    layout = lay_out(from_tree(local.tree), local.world)
    assert [a.kind for a in layout.schedule()[0] if a.kind.is_compute] == [ActionKind.FORWARD] * 3 + [
        ActionKind.BACKWARD
    ] * 3
    assert layout.schedule() != build_1f1b(2, 3)
    assert_equal(
        one_process(local.twin), pool.run(train_own, local.world, local.tree, STEPS), from_tree(local.tree).model
    )
