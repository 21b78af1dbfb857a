"""Learning-rate schedules by `lr.schedule`: one function per shape, in a registry. A package adds one with `register`.

The rate is a function of the step alone, so a resumed run continues it without a state of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megascale.config import LrConfig
from megascale.config.parts import LR_SCHEDULES, LrScheduleFacts
from megascale.config.registry import Registry

# (lr, step, end) -> rate of a step after the warm-up; the decay ends at step `end`, lr.decay_steps or train.steps.
LrSchedule = Callable[[LrConfig, int, int], float]


def learning_rate(lr: LrConfig, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 1) of a run of `steps`.

    Linear warm-up reaches `peak` at step `warmup_steps`; the rest follows `lr.schedule`.
    """
    if step <= lr.warmup_steps:
        return lr.peak * step / lr.warmup_steps
    return SCHEDULES[lr.schedule](lr, step, lr.decay_steps or steps)


def constant(lr: LrConfig, step: int, end: int) -> float:
    """Return the peak."""
    return lr.peak


def cosine(lr: LrConfig, step: int, end: int) -> float:
    """Return half a cosine from the peak to `min` (Loshchilov and Hutter 2017, without restarts)."""
    return _decay(lr, _decay_cosine(_progress(step, lr.warmup_steps, end)))


def linear(lr: LrConfig, step: int, end: int) -> float:
    """Return a straight line from the peak to `min`."""
    return _decay(lr, _progress(step, lr.warmup_steps, end))


def wsd(lr: LrConfig, step: int, end: int) -> float:
    """Return the peak, and from it a decay to `min` in the last part of the steps: warm-up, stable, decay.

    `decay_fraction` of the steps up to `end`, at least one, decay in the shape of `decay_shape`. Hu et al. 2024
    (MiniCPM) introduced the schedule. Haegele et al. 2024 compare shapes: "sqrt" over a fifth of the steps is best.
    """
    decay_steps = max(1, round(lr.decay_fraction * end))
    start = max(lr.warmup_steps, end - decay_steps)
    if step <= start:
        return lr.peak
    return _decay(lr, _DECAY_SHAPES[lr.decay_shape](_progress(step, start, end)))


def inverse_sqrt(lr: LrConfig, step: int, end: int) -> float:
    """Return peak * sqrt(warm-up / step), at least `min` (Vaswani et al. 2017); without warm-up peak / sqrt(step)."""
    return max(lr.min, lr.peak * math.sqrt(max(1, lr.warmup_steps) / step))


def _progress(step: int, start: int, end: int) -> float:
    """Return how much of the steps from `start` to `end` have passed, from 0 to 1."""
    if end <= start:
        return 1.0
    return min(1.0, (step - start) / (end - start))


def _decay(lr: LrConfig, decayed: float) -> float:
    """Return the rate after `decayed`, from 0 to 1, of the way from the peak to `min`."""
    return lr.peak - (lr.peak - lr.min) * decayed


def _decay_linear(progress: float) -> float:
    return progress


def _decay_cosine(progress: float) -> float:
    return (1 - math.cos(math.pi * progress)) / 2


def _decay_exponential(progress: float) -> float:
    """Return 1 less the exponential of Megatron-LM, 2 * 0.5^progress - 1."""
    return 2 - 2 * 0.5**progress


_DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": _decay_linear,
    "cosine": _decay_cosine,
    "sqrt": math.sqrt,
    "exponential": _decay_exponential,
}

SCHEDULES: Registry[LrSchedule] = Registry(
    "lr.schedule",
    {"cosine": cosine, "linear": linear, "wsd": wsd, "constant": constant, "inverse_sqrt": inverse_sqrt},
)


def register(name: str, schedule: LrSchedule, description: str) -> None:
    """Register a schedule; description: one line for people. Raises ConfigError if the name exists."""
    LR_SCHEDULES.register(name, LrScheduleFacts(description))
    SCHEDULES.register(name, schedule)
