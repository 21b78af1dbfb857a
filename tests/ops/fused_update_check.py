"""Recomputed updates through Triton's interpreter: the bits of the fused update, and a wrong one is seen."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.config import OptimizerConfig
from megascale.ops import dispatch
from megascale.ops.segments import TILE, Segments
from megascale.optim.base import Shards, ShardState, StatePart, UpdateStep
from megascale.optim.rules import RULES
from megascale.parallel.buffers import FlatShard
from megascale.train.update_check import UpdateCheck

ROWS = [(3, 9000, True, 0), (9000, 9100, False, 1), (9216, 17500, True, 2)]  # ragged and full tiles
ELEMENTS = 17500
CHECKS = 3  # ranges of two tiles


@pytest.fixture(autouse=True, scope="module")
def _fused():
    with dispatch.Kernels("fused").as_current():
        yield


class SingleRankPeers:
    """Peers of a job with one rank."""

    def all_gather(self, value: Any, _: type) -> list[Any]:
        return [value]


def make_optimizer(name: str) -> Any:
    """Return what a check reads of an optimizer, with one shard in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    master, grads, average = (torch.randn(ELEMENTS, generator=generator) for _ in range(3))
    state_tensors = {"exp_avg": 0.1 * average, "exp_avg_sq": average.square() + 0.01}
    part = StatePart(0, ELEMENTS, [], Segments(ROWS, 3, "cpu"), state_tensors)
    state = ShardState(FlatShard(master.bfloat16(), grads, []), master, [part], [])
    config = OptimizerConfig(name=name)
    rule = RULES[name](config, Shards([state], [state], ["a", "b", "c"]))
    return SimpleNamespace(config=config, rule=rule, states=[state], before_update=None)


def check_update(name: str, number: int, wrong: int | None) -> tuple[Tensor, UpdateCheck]:
    """Update and recompute. Return which checksums differ. `wrong`: element whose weight is written wrongly."""
    optimizer = make_optimizer(name)
    check = UpdateCheck(optimizer, lambda tensor, distance: tensor, SingleRankPeers(), elements=2 * TILE)
    check.begin(number)
    step = UpdateStep(1e-3, 5, torch.tensor(0.5), torch.tensor(False))
    optimizer.before_update(step)
    optimizer.rule.update(step, lambda shard: None)
    if wrong is not None:
        optimizer.states[0].master[wrong : wrong + 1].view(torch.int32).bitwise_xor_(1 << 5)
    return check.sum_updated() != check.recompute(0), check


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_a_recomputed_update_has_the_bits_of_the_fused_update(name):
    for number in range(CHECKS):
        differs, _ = check_update(name, number, wrong=None)
        assert not differs.any()
    kernel = "adamw" if name == "adamw" else "lamb"
    assert dispatch.list_choices()[kernel] == "triton"


@pytest.mark.parametrize(("wrong", "owner", "tensors"), [(5, 0, "of a"), (9050, 1, "from a to c"), (17000, 2, "of c")])
def test_a_wrong_weight_is_seen_by_the_one_check_whose_range_has_it(wrong, owner, tensors):
    for number in range(CHECKS):
        differs, check = check_update("adamw", number, wrong)
        assert check.description == "8,192 elements of an update are recomputed; 3 checks recompute all elements"
        assert differs.sum() == int(number == owner)
        if number == owner:
            assert check.describe(int(differs.nonzero())) == f"master weights {tensors}"
