"""An optimizer of another package: declared, trained on any layout, saved and counted like ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megascale.config import from_tree
from megascale.config.parts import OptimizerFacts
from megascale.core.parameter_counts import count_state_elements
from megascale.optim.base import UpdateRule, UpdateStep
from megascale.optim.rules import register
from megascale.parallel.buffers import FlatShard
from tests.exact.cases import case
from tests.exact.compare import assert_equal
from tests.exact.training import RankReport, train

pytestmark = pytest.mark.xdist_group("processes")

STEPS = 2


class Lion(UpdateRule):
    """Chen et al. 2023: the sign of a momentum, and decoupled decay."""

    def update(self, step: UpdateStep, updated: Callable[[FlatShard], None]) -> None:
        """One pass over each shard."""
        config = self.config
        for s in self.shards.update_order:
            for part in s.parts:
                stored, grad = part.state["average"], part.view(s.shard.grads)
                grad = grad if step.grad_scale is None else grad * step.grad_scale.to(grad.dtype)
                for row in part.segments.ranges:
                    where = slice(row.start, row.stop)
                    w = part.view(s.master)[where]
                    m = stored[where]
                    g = grad[where]
                    # A smooth sign: near zero the sign itself would turn rounding into a difference.
                    sign = torch.tanh(1e3 * torch.lerp(m, g, 1 - config.beta1))
                    new = w - step.learning_rate * (sign + config.weight_decay * row.decay * w)
                    w.copy_(torch.where(step.skip, w, new))
                    m.copy_(torch.where(step.skip, m, torch.lerp(m, g, 1 - config.beta2)))
                if s.param_out is not None:
                    part.view(s.param_out).copy_(part.view(s.master))
            updated(s.shard)


register("lion", OptimizerFacts(lambda name, shape: ("average",), default_peak=1e-4), Lion)


def train_own(rank: int, world: int, tree: dict[str, Any], steps: int) -> RankReport:
    """Train as `train`. The worker's lookup of this function here registers the optimizer."""
    return train(rank, world, tree, steps)


def test_it_trains_on_a_layout_as_on_one_process(pool):
    local = case(2, 2, 2, virtual=2, microbatches=2, optimizer={"name": "lion"}, parallel={"bucket_elements": 700})
    [reference] = pool.run(train_own, 1, local.twin, STEPS)
    result = pool.run(train_own, local.world, local.tree, STEPS)
    assert_equal(reference, result, from_tree(local.tree).model)
    assert {box.name.split(".")[1] for box in reference.state if box.name.startswith("optimizer.")} == {"average"}


def test_its_declaration_is_what_planner_and_configuration_read():
    config = from_tree({"optimizer": {"name": "lion"}, "model": {"vocab_size": 50}})
    assert config.lr.peak == 1e-4
    assert count_state_elements("lion", config.model, 1000, [], 100) == 1000
