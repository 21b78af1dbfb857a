"""Learning rate as a function of the step."""

from __future__ import annotations

import math

from megascale.config import LrConfig


def learning_rate(lr: LrConfig, step: int, steps: int) -> float:
    """The rate of optimizer step `step` (1-based) of a run of `steps`.

    Linear warm-up reaches `peak` at step `warmup_steps`; the decay reaches `min` at `decay_steps` (default: the end
    of the run) and stays there.
    """
    if step <= lr.warmup_steps:
        return lr.peak * step / lr.warmup_steps
    end = lr.decay_steps or steps
    part = 1.0 if end <= lr.warmup_steps else min(1.0, (step - lr.warmup_steps) / (end - lr.warmup_steps))
    if lr.decay == "constant":
        return lr.peak
    fall = part if lr.decay == "linear" else (1 - math.cos(math.pi * part)) / 2
    return lr.peak - (lr.peak - lr.min) * fall
