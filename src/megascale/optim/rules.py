"""The update rule of each optimizer that `optimizer.name` may say. Another package adds one with `register`."""

from __future__ import annotations

from megascale.config.optimizers import OPTIMIZERS, OptimizerFacts
from megascale.config.registry import Registry
from megascale.optim.base import UpdateRule
from megascale.optim.sharded_adamw import ShardedAdamW
from megascale.optim.sharded_lamb import ShardedLamb
from megascale.optim.sharded_muon import ShardedMuon

RULES: Registry[type[UpdateRule]] = Registry(
    "optimizer.name", {"adamw": ShardedAdamW, "lamb": ShardedLamb, "muon": ShardedMuon}
)


def register(name: str, facts: OptimizerFacts, rule: type[UpdateRule]) -> None:
    """Add an optimizer: what it keeps, and how it updates. ConfigError if the name is taken."""
    OPTIMIZERS.register(name, facts)
    RULES.register(name, rule)
