"""User code between steps: `train.callbacks` names the callbacks that `register` has added.

Every rank makes its callbacks at each start and calls them at the same points, so a callback may communicate if all
ranks do so alike. Its time is part of the step: on a GPU, reading a tensor waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.config import Config
from megascale.config.parts import CALLBACKS, PartFacts
from megascale.config.registry import Registry

if TYPE_CHECKING:
    import torch

    from megascale.train.engine import Engine
    from megascale.train.evaluation import Evaluation


@dataclass
class RunView:
    """A run as its callbacks see it.

    Attributes:
        config: the run's resolved configuration.
        folder: the run folder, in which rank 0 may write.
        rank, world: this process's rank, and the number of ranks.
        engine: the engine, with the model's chunks in `engine.chunks`.
        step: optimizer steps done.
        wants_stop: whether a callback of this rank has called `stop`.
    """

    config: Config
    folder: Path
    rank: int
    world: int
    engine: Engine
    step: int = 0
    wants_stop: bool = field(default=False, init=False)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's parameters as (name, tensor), after all gathers of them have ended.

        Collective. With parallel.zero=3 a tensor is complete until the next one is asked for.
        """
        self.engine.gather_parameters()
        for number, chunk in enumerate(self.engine.chunks):
            for name, param in chunk.named_parameters():
                self.engine.data_parallel.gather_parameter(number, param)
                yield name, param

    def stop(self) -> None:
        """End the run after the next step on all ranks, as Ctrl-C does: it is saved and can be resumed."""
        self.wants_stop = True


class Callback:
    """Base class of callbacks. Each method does nothing by default. An error in a callback ends the run."""

    def run_begins(self, run: RunView) -> None:
        """Act before the first step of this start; `run.step` is the step that it resumes from."""

    def step_ends(self, run: RunView) -> None:
        """Act after each step's update of the weights."""

    def evaluated(self, run: RunView, evaluation: Evaluation) -> None:
        """Act after each evaluation of held-out data.

        At the end of the run the complete file is evaluated too: `evaluation.complete` is then true.
        """

    def run_ends(self, run: RunView) -> None:
        """Act when this rank ends in any way but by a kill."""


MakeCallback = Callable[[], Callback]
KINDS: Registry[MakeCallback] = Registry("train.callbacks", {}, home="megascale.train")


def register(name: str, factory: MakeCallback, description: str = "") -> None:
    """Let `train.callbacks` name `name`; every rank calls factory() at each start."""
    CALLBACKS.register(name, PartFacts(description))
    KINDS.register(name, factory)


class Callbacks:
    """The callbacks of a run, called in the order in which train.callbacks names them."""

    def __init__(self, run: RunView) -> None:
        self.run = run
        names = dict.fromkeys(run.config.train.callbacks)
        self._callbacks = [KINDS[name]() for name in names]

    def begin_run(self, step: int) -> None:
        """Call `run_begins` of each callback."""
        self.run.step = step
        for callback in self._callbacks:
            callback.run_begins(self.run)

    def end_step(self, step: int) -> None:
        """Call `step_ends` of each callback."""
        self.run.step = step
        for callback in self._callbacks:
            callback.step_ends(self.run)

    def report_evaluation(self, evaluation: Evaluation) -> None:
        """Call `evaluated` of each callback."""
        for callback in self._callbacks:
            callback.evaluated(self.run, evaluation)

    def close(self) -> None:
        """Call `run_ends` of each callback."""
        for callback in self._callbacks:
            callback.run_ends(self.run)
