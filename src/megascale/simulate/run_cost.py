"""GPU hours, cost and energy of a run, if a price and a power are given."""

from __future__ import annotations

from dataclasses import dataclass

from megascale.simulate.step import StepEstimate


@dataclass(frozen=True)
class RunCost:
    """Cost of a run.

    Attributes:
        gpu_hours: of all GPUs, including the time in which they do not step.
        money: in the currency of the price; None without a price.
        megawatt_hours: None without a power.
    """

    gpu_hours: float
    money: float | None
    megawatt_hours: float | None

    def as_dict(self) -> dict[str, float | None]:
        """Return the fields of --json."""
        return {"gpu_hours": self.gpu_hours, "money": self.money, "megawatt_hours": self.megawatt_hours}


def run_cost(
    result: StepEstimate, tokens: float, share: float = 1.0, price: float | None = None, watts: float | None = None
) -> RunCost:
    """Return the cost of a run of `tokens` at this step time.

    Args:
        share: share of the time that is spent stepping (see `effective`).
        price: price of one GPU for one hour.
        watts: power of one GPU with its part of host, network and cooling.
    """
    hours = result.days(tokens) * 24.0 / share * result.scenario.gpus
    return RunCost(hours, None if price is None else hours * price, None if watts is None else hours * watts / 1e6)
