"""User code between steps: `train.callbacks` names callbacks, which `register` has added.

Every rank constructs its callbacks at each start and calls them at the same points. A callback may therefore use
collectives, if it does so on all ranks. Its time is part of the step. On a GPU, a callback that reads a tensor waits
for the device.
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
    """The view of a run that its callbacks receive.

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

        Collective. With parallel.zero=3 a tensor is complete only until the iterator continues.
        """
        self.engine.gather_parameters()
        for chunk_index, chunk in enumerate(self.engine.chunks):
            for name, param in chunk.named_parameters():
                self.engine.data_parallel.gather_parameter(chunk_index, param)
                yield name, param

    def stop(self) -> None:
        """Let the run end after the next step on all ranks, as Ctrl-C does: it is saved and can be resumed."""
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
        """Act when this rank's run ends, after an error too; not if the process is killed."""


MakeCallback = Callable[[], Callback]
KINDS: Registry[MakeCallback] = Registry("train.callbacks", {}, home="megascale.train")


def register(name: str, factory: MakeCallback, description: str = "") -> None:
    """Register a callback, so that `train.callbacks` can contain `name`.

    Args:
        factory: returns the callback; every rank calls it at each start.
        description: text for the configuration reference.
    """
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
