"""User code between steps: `train.callbacks` names callbacks, which `register` has added.

Every rank constructs its callbacks at each start and calls them at the same points. A callback may therefore use
collectives, if it does so on all ranks. Its time is part of the step. On a GPU, a callback that reads a tensor waits
for the device.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.config import Config
from megascale.config.parts import CALLBACKS, PartFacts
from megascale.config.registry import Registry
from megascale.errors import ConfigError, TrainingError

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
        self._callbacks = {name: _make_callback(name) for name in names}

    def begin_run(self, step: int) -> None:
        """Call `run_begins` of each callback. Raises ConfigError if a callback has changed what is trained."""
        self.run.step = step
        for name, callback in self._callbacks.items():
            before = _describe_model(self.run)
            with _refuse_exit(name):
                callback.run_begins(self.run)
            _check_model(name, before, _describe_model(self.run))

    def end_step(self, step: int) -> None:
        """Call `step_ends` of each callback."""
        self.run.step = step
        for name, callback in self._callbacks.items():
            with _refuse_exit(name):
                callback.step_ends(self.run)

    def report_evaluation(self, evaluation: Evaluation) -> None:
        """Call `evaluated` of each callback."""
        for name, callback in self._callbacks.items():
            with _refuse_exit(name):
                callback.evaluated(self.run, evaluation)

    def close(self) -> None:
        """Call `run_ends` of each callback."""
        for name, callback in self._callbacks.items():
            with _refuse_exit(name):
                callback.run_ends(self.run)


# Methods that a run calls, with the number of their arguments besides self.
_HOOKS = {"run_begins": 1, "step_ends": 1, "evaluated": 2, "run_ends": 1}


def _make_callback(name: str) -> Callback:
    """Return a new callback. Raises ConfigError if the run could not call it, or would never call it."""
    setting = f"train.callbacks={name}"
    factory: object = KINDS[name]
    if not callable(factory):
        raise ConfigError(
            f"{setting}: register a class of callbacks, not {type(factory).__name__}, which is not callable"
        )
    try:
        callback = factory()
    except TypeError as error:
        raise ConfigError(f"{setting}: {error}; register a class or function that needs no arguments") from error
    kind = type(callback)
    if not isinstance(callback, Callback):
        raise ConfigError(
            f"{setting}: {kind.__name__} is not a callback; derive it from megascale.train.callbacks.Callback"
        )
    hooks = [hook for hook in _HOOKS if getattr(kind, hook) is not getattr(Callback, hook)]
    if not hooks:
        methods = [key for key, value in vars(kind).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ConfigError(
            f"{setting}: {kind.__name__} defines {', '.join(methods) or 'no method'}, which a run never calls; define "
            f"{', '.join(_HOOKS)}"
        )
    for hook in hooks:
        method = getattr(callback, hook)
        if inspect.iscoroutinefunction(method):
            raise ConfigError(f"{setting}: {kind.__name__}.{hook} is a coroutine, which never runs; remove `async`")
        try:
            inspect.signature(method).bind(*range(_HOOKS[hook]))
        except TypeError as error:
            raise ConfigError(
                f"{setting}: {kind.__name__}.{hook} cannot be called: {error}; its arguments are those of "
                f"megascale.train.callbacks.Callback.{hook}"
            ) from None
    return callback


@contextlib.contextmanager
def _refuse_exit(name: str) -> Iterator[None]:
    """Raise TrainingError if the callback ends the process, which would look like a successful end."""
    try:
        yield
    except SystemExit as error:
        raise TrainingError(
            f"train.callbacks={name} called sys.exit({error.code!r}); call run.stop(), which saves the run, or "
            "raise an error"
        ) from error


def _describe_model(run: RunView) -> dict[str, object]:
    """Return what a callback must not change before the first step, by name."""
    import torch

    facts: dict[str, object] = {"torch.is_grad_enabled()": torch.is_grad_enabled()}
    for index, chunk in enumerate(run.engine.chunks):
        facts[f"training mode of chunk {index}"] = chunk.training
        for name, parameter in chunk.named_parameters():
            facts[f"type of {name}"] = parameter.dtype
            facts[f"requires_grad of {name}"] = parameter.requires_grad
            facts[f"memory of {name}"] = (parameter.device, parameter.data_ptr())
    return facts


def _check_model(name: str, before: dict[str, object], after: dict[str, object]) -> None:
    """Raise ConfigError if a callback has changed the model in a way that training would not notice."""
    for fact, value in before.items():
        if after.get(fact) != value:
            raise ConfigError(
                f"train.callbacks={name} changed the {fact} from {value} to {after.get(fact)} before the first step, "
                "and the model would train in another way than its settings say; use train.precision, train.lora or "
                "model.dropout instead, and change values of parameters in place only"
            )
