"""Registry of update rules by `optimizer.name`. Other packages add a rule with `register`."""

from __future__ import annotations

from megascale.config.parts import OPTIMIZERS, OptimizerFacts
from megascale.config.registry import Registry
from megascale.errors import ConfigError
from megascale.optim.base import UpdateRule
from megascale.optim.sharded_adamw import ShardedAdamW
from megascale.optim.sharded_lamb import ShardedLamb
from megascale.optim.sharded_muon import ShardedMuon

RULES: Registry[type[UpdateRule]] = Registry(
    "optimizer.name", {"adamw": ShardedAdamW, "lamb": ShardedLamb, "muon": ShardedMuon}
)


def register(name: str, facts: OptimizerFacts, rule: type[UpdateRule]) -> None:
    """Register an optimizer: its state per tensor (`facts`) and its update.

    Raises ConfigError if the name exists, or if `facts.state_names` does not return names.
    """
    names: object = facts.state_names("layers.0.mlp.in.weight", (4, 4))
    if not isinstance(names, tuple | list) or not all(isinstance(state_name, str) for state_name in names):
        raise ConfigError(
            f"optimizer.name={name}: the state names of a parameter are {names!r}; return a tuple of texts, such as "
            '("momentum",), or () for an optimizer without state'
        )
    OPTIMIZERS.register(name, facts)
    RULES.register(name, rule)
