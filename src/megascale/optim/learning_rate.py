"""Learning-rate schedules in a registry, by `lr.schedule`. Other packages add a schedule with `register`.

The rate is a function of the step alone. A resumed run therefore needs no saved state of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megascale.config import LrConfig
from megascale.config.parts import LR_SCHEDULES, LrScheduleFacts
from megascale.config.registry import Registry
from megascale.errors import ConfigError

# (lr section, step, end) -> learning rate of a step after the warm-up. The decay ends at step `end`.
LrSchedule = Callable[[LrConfig, int, int], float]
_CHECKED_STEPS = 10_000  # `check_schedule` calls a schedule for about as many steps


def compute_learning_rate(lr: LrConfig, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 1) in a run of `steps` steps.

    Linear warm-up reaches `lr.peak` at step `lr.warmup_steps`. Later steps follow `lr.schedule`, whose decay ends at
    step `lr.decay_steps`, or with the run if that is not set.
    """
    if step <= lr.warmup_steps:
        return lr.peak * step / lr.warmup_steps
    schedule = SCHEDULES[lr.schedule]
    if lr.schedule in SCHEDULES.builtin_names:
        return schedule(lr, step, lr.decay_steps or steps)
    return _call_schedule(lr, schedule, step, lr.decay_steps or steps)


def explain_warmup(lr: LrConfig, steps: int) -> str:
    """Return a note if the warm-up leaves no step of the run, or of the decay, else an empty string.

    A short first part of a longer run may be meant, so this is not an error.
    """
    if 0 < steps <= lr.warmup_steps:
        return (
            f"lr.warmup_steps={lr.warmup_steps} is not below train.steps={steps}: the learning rate rises until the "
            f"last step, where it is {compute_learning_rate(lr, steps, steps):.2g} (lr.peak={lr.peak:g}), and does not "
            "fall; use fewer warm-up steps, or more steps"
        )
    if lr.decay_steps is not None and lr.decay_steps <= lr.warmup_steps:
        return (
            f"lr.decay_steps={lr.decay_steps} is not above lr.warmup_steps={lr.warmup_steps}: the learning rate falls "
            "from lr.peak to lr.min in one step; use fewer warm-up steps, or a later end of the decay"
        )
    return ""


def check_schedule(lr: LrConfig, steps: int) -> None:
    """Call a schedule of a package for the steps of a run, or for many of them if there are more.

    Raises ConfigError if the schedule raises an exception, if a rate is negative, infinite or NaN, or if a rate depends
    on earlier calls.
    """
    if lr.schedule in SCHEDULES.builtin_names:
        return
    first = lr.warmup_steps + 1
    stride = max(1, (steps - first) // _CHECKED_STEPS)
    checked_steps = list(range(first, steps + 1, stride))
    if checked_steps and checked_steps[-1] != steps:
        checked_steps.append(steps)
    rates = [compute_learning_rate(lr, step, steps) for step in checked_steps]
    for step, rate in zip(checked_steps, rates, strict=True):
        repeated = compute_learning_rate(lr, step, steps)
        if repeated != rate:
            raise ConfigError(
                f"lr.schedule={lr.schedule} returned {rate} and then {repeated} for step {step}; compute the rate from "
                "the step alone, because a resumed run calls the schedule from its own first step on"
            )
    if len(rates) > 1 and not any(rates):
        raise ConfigError(
            f"lr.schedule={lr.schedule} returned 0 for all of the steps {first} to {steps}, so that nothing would be "
            "trained; return the rate itself, such as lr.peak times a factor"
        )


def _call_schedule(lr: LrConfig, schedule: LrSchedule, step: int, end: int) -> float:
    """Return the rate of a package's schedule. Raises ConfigError unless it is finite and at least 0."""
    name = f"lr.schedule={lr.schedule}"
    try:
        result = schedule(lr, step, end)
    except Exception as error:
        raise ConfigError(
            f"{name} raised {type(error).__name__} for step {step} of {end}: {error}; correct the schedule, which "
            "receives the section lr, the step and the last step of the decay"
        ) from error
    try:
        if isinstance(result, str | bytes):
            raise TypeError
        rate = float(result)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{name} returned {result!r} for step {step} of {end}; return the rate as a number") from None
    if not math.isfinite(rate) or rate < 0:
        raise ConfigError(
            f"{name} returned {rate} for step {step} of {end}; rates must be finite and at least 0, such as "
            "max(lr.min, rate)"
        )
    return rate


def constant(lr: LrConfig, step: int, end: int) -> float:
    """Return `lr.peak` for every step."""
    return lr.peak


def cosine(lr: LrConfig, step: int, end: int) -> float:
    """Return the rate of a decay to `lr.min` along half a cosine (Loshchilov and Hutter 2017, without restarts)."""
    return _interpolate(lr, _decay_cosine(_progress(step, lr.warmup_steps, end)))


def linear(lr: LrConfig, step: int, end: int) -> float:
    """Return the rate of a linear decay to `lr.min`."""
    return _interpolate(lr, _progress(step, lr.warmup_steps, end))


def wsd(lr: LrConfig, step: int, end: int) -> float:
    """Return the rate of warm-up, stable, decay: the peak, then a decay to `lr.min` in the last steps before `end`.

    The decay takes the fraction `lr.decay_fraction` of the steps up to `end`, at least one step, and has the shape
    `lr.decay_shape`. Hu et al. 2024 (MiniCPM) introduced the schedule. Haegele et al. 2024 compare shapes: "sqrt" over
    a fifth of the steps is best.
    """
    decay_steps = max(1, round(lr.decay_fraction * end))
    start = max(lr.warmup_steps, end - decay_steps)
    if step <= start:
        return lr.peak
    return _interpolate(lr, _DECAY_SHAPES[lr.decay_shape](_progress(step, start, end)))


def inverse_sqrt(lr: LrConfig, step: int, end: int) -> float:
    """Return peak * sqrt(warmup_steps / step), at least `lr.min` (Vaswani et al. 2017).

    Without warm-up the rate is peak / sqrt(step).
    """
    return max(lr.min, lr.peak * math.sqrt(max(1, lr.warmup_steps) / step))


def _progress(step: int, start: int, end: int) -> float:
    """Return the fraction of the steps from `start` to `end` that have passed, from 0 to 1."""
    if end <= start:
        return 1.0
    return min(1.0, (step - start) / (end - start))


def _interpolate(lr: LrConfig, fraction: float) -> float:
    """Return the rate between `lr.peak` (fraction 0) and `lr.min` (fraction 1)."""
    return lr.peak - (lr.peak - lr.min) * fraction


def _decay_linear(progress: float) -> float:
    return progress


def _decay_cosine(progress: float) -> float:
    return (1 - math.cos(math.pi * progress)) / 2


def _decay_exponential(progress: float) -> float:
    """Return 1 - c, where c = 2 * 0.5^progress - 1 is the coefficient of Megatron-LM's exponential decay."""
    return 2 - 2 * 0.5**progress


# By shape: function from the passed fraction of the decay's steps to the fraction of the way from peak to minimum.
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
    """Register a schedule with a description of one line for the reference. Raises ConfigError if the name exists."""
    LR_SCHEDULES.register(name, LrScheduleFacts(description))
    SCHEDULES.register(name, schedule)
