"""The optimizers that `optimizer.name` may say, with the facts about them that need no torch: what each keeps of a
tensor, which settings it alone reads. Memory, checkpoints and resuming derive from these; what runs stands under the
same name in `optim/rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megascale.config.registry import Registry

# Half of what came out best in docs/reports/convergence.md, for 0.05 to 0.16 more loss: those runs were short.
LAMB_PEAK = 5e-3
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerFacts:
    """An optimizer as planner, checkpoints and configuration see it.

    Attributes:
        state: (logical name, shape) -> names of the tensors that it keeps for it beside the master weights, each as
            large as it and zero before the first step.
        settings: keys of [optimizer] that have no influence on any other optimizer.
        peak: its own default of lr.peak; None: the general one.
    """

    state_names: Callable[[str, tuple[int, ...]], tuple[str, ...]]
    own_settings: tuple[str, ...] = ()
    default_peak: float | None = None


def _moments(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    return MOMENTS


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a logical tensor is a matrix between activations: in a layer, neither embedding nor output."""
    return name.startswith("layers.") and len(shape) == 2


def _muon(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    return ("momentum",) if is_hidden_matrix(name, shape) else MOMENTS


OPTIMIZERS: Registry[OptimizerFacts] = Registry(
    "optimizer.name",
    {
        "adamw": OptimizerFacts(_moments),
        "lamb": OptimizerFacts(_moments, ("trust_min", "trust_max", "lamb_bias_correction"), LAMB_PEAK),
        "muon": OptimizerFacts(_muon, ("muon_momentum", "muon_nesterov", "muon_steps", "muon_rms")),
    },
    home="megascale.optim",
)
