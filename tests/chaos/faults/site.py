"""A place where jobs run and faults are injected, as the runner sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.harness.launched import Launched, make
from megascale.errors import TrainingError

Row = dict[str, Any]
Weights = dict[str, torch.Tensor]


class FaultSite(ABC):
    """A context manager: the site runs between `__enter__` and `__exit__`.

    Args:
        folder: for runs, logs and the weights of undisturbed runs.

    Attributes:
        name: of the site on the command line.
        kinds: kind of fault -> its definition, in the order of a campaign.
    """

    name: str
    kinds: Mapping[str, Any]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference = ReferenceWeights(folder)

    @classmethod
    def find_problem(cls) -> str:
        """Return why the site cannot run on this machine, or an empty string."""
        return ""

    @classmethod
    def find_problem_of(cls, kind: str) -> str:
        """Return why one kind of fault cannot be injected on this machine, or an empty string."""
        return ""

    @classmethod
    def describe(cls) -> dict[str, str]:
        """Return versions that belong into the report."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    @abstractmethod
    def run_once(self, kind: str, name: str) -> Row:
        """Train, inject one fault of a kind, and return what followed.

        The row has `right`, `same` (weights equal those of an undisturbed run, None if not compared), `lost` (steps),
        `actions`, seconds by phase (`detect`, `stop`, `load`, `step`, `total`) where they were measured, and `wrong`
        (sentences) or other evidence where it is not right.
        """

    def show_session(self, write: Callable[[str], None]) -> bool:
        """Run the session that the documentation shows; return whether it ended as it should."""
        raise TrainingError(f"the site {self.name} has no session to show")


class ReferenceWeights:
    """Weights of undisturbed runs, trained once per number of steps and kept in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._weights: dict[int, Weights] = {}

    def after(self, steps: int) -> Weights:
        """Return the weights after `steps`. Raise TrainingError if the undisturbed run fails."""
        if steps in self._weights:
            return self._weights[steps]
        saved = self._folder / f"reference-{steps}.pt"
        if saved.exists():
            weights: Weights = torch.load(saved, weights_only=True)
        else:
            weights = self._train(steps)
            partial = saved.with_suffix(".tmp")
            torch.save(weights, partial)
            partial.replace(saved)
        self._weights[steps] = weights
        return weights

    def _train(self, steps: int) -> Weights:
        work = self._folder / f"reference-{steps}"
        work.mkdir(parents=True, exist_ok=True)
        arguments = [f"--train.steps={steps}", "--resilience.spares=0", "--resilience.test_spares=false"]
        job = Launched(make(work), f"undisturbed-{steps}", arguments, pace=0.001)
        code = job.end()
        if code:
            raise TrainingError(f"the undisturbed run ended with {code}: {job.output.read_text()[-2000:]}")
        return job.weights()


def equal_weights(weights: Weights, reference: Weights) -> bool:
    """Return whether two models have the same tensors, at least one, and are equal bit for bit."""
    if not weights or weights.keys() != reference.keys():
        return False
    return all(torch.equal(tensor, reference[name]) for name, tensor in weights.items())
