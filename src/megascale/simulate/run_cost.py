"""GPU hours, cost and energy of a run."""

from __future__ import annotations

from dataclasses import dataclass

from megascale.simulate.step import StepEstimate


@dataclass(frozen=True)
class RunCost:
    """Cost of a run.

    Attributes:
        gpu_hours: hours of all GPUs, including the time without useful steps.
        money: cost in the currency of the price; None without a price.
        megawatt_hours: energy; None without a power.
    """

    gpu_hours: float
    money: float | None
    megawatt_hours: float | None

    def as_dict(self) -> dict[str, float | None]:
        """Return the fields of --json."""
        return {"gpu_hours": self.gpu_hours, "money": self.money, "megawatt_hours": self.megawatt_hours}


def estimate_run_cost(
    result: StepEstimate, tokens: float, share: float = 1.0, price: float | None = None, watts: float | None = None
) -> RunCost:
    """Return the cost of a run of `tokens` tokens at this step time.

    Args:
        share: effective share of the time, which is spent on useful steps (effective.py).
        price: price of one GPU for one hour.
        watts: power of one GPU with its share of host, network and cooling.
    """
    gpu_hours = result.days(tokens) * 24.0 / share * result.scenario.gpus
    money = None if price is None else gpu_hours * price
    megawatt_hours = None if watts is None else gpu_hours * watts / 1e6
    return RunCost(gpu_hours, money, megawatt_hours)
