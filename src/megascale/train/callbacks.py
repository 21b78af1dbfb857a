"""Code of one's own between steps: `train.callbacks` names what `register` has added.

A callback is made on every rank of every start and called on all of them at the same places, so it may communicate, as
long as all ranks do so alike. What it takes is time of the step: on a GPU, reading a tensor waits for the device.
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
    """What a callback sees of a run.

    Attributes:
        config: of the run; folder: the run folder, which is rank 0's to write in.
        rank, world: of this process.
        engine: with the model's chunks, `engine.chunks`.
        step: steps done.
        wants_stop: whether a callback here has asked for the end.
    """

    config: Config
    folder: Path
    rank: int
    world: int
    engine: Engine
    step: int = 0
    wants_stop: bool = field(default=False, init=False)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's parameters, whole only where nothing is on its way: (name, tensor)."""
        self.engine.gather_parameters()
        for chunk in self.engine.chunks:
            yield from chunk.named_parameters()

    def stop(self) -> None:
        """End the run after the next step, on all ranks, as Ctrl-C does: it is saved and can go on."""
        self.wants_stop = True


class Callback:
    """What is called; each method does nothing unless a subclass has its own. An error in one ends the run."""

    def run_begins(self, run: RunView) -> None:
        """Before the first step of this start; `run.step` is what it goes on from."""

    def step_ends(self, run: RunView) -> None:
        """After each step's update of the weights."""

    def evaluated(self, run: RunView, found: Evaluation) -> None:
        """After each evaluation of held-out data.

        At the end of the run the whole file is evaluated too; `found.whole` tells it from train.eval_samples.
        """

    def run_ends(self, run: RunView) -> None:
        """However this rank ends, unless it is killed."""


MakeCallback = Callable[[], Callback]
KINDS: Registry[MakeCallback] = Registry("train.callbacks", {}, home="megascale.train")


def register(name: str, made: MakeCallback, about: str = "") -> None:
    """Let `train.callbacks` name `name`; made() is called on every rank at each start."""
    CALLBACKS.register(name, PartFacts(about))
    KINDS.register(name, made)


class Callbacks:
    """Those of a run, in the order in which the setting names them."""

    def __init__(self, run: RunView) -> None:
        self.run = run
        self._all = [KINDS[name]() for name in dict.fromkeys(run.config.train.callbacks)]

    def run_begins(self, step: int) -> None:
        """Tell them."""
        self.run.step = step
        for one in self._all:
            one.run_begins(self.run)

    def step_ends(self, step: int) -> None:
        """Tell them."""
        self.run.step = step
        for one in self._all:
            one.step_ends(self.run)

    def evaluated(self, found: Evaluation) -> None:
        """Tell them."""
        for one in self._all:
            one.evaluated(self.run, found)

    def close(self) -> None:
        """Tell them that the run ends."""
        for one in self._all:
            one.run_ends(self.run)
