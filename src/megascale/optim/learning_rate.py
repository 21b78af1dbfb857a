"""Learning-rate schedule."""

from __future__ import annotations

import math

from megascale.config import LrConfig


def learning_rate(lr: LrConfig, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 1) of a run of `steps`.

    Linear warm-up reaches `peak` at step `warmup_steps`; the decay reaches `min` at `decay_steps` (default: the end
    of the run) and stays there.
    """
    if step <= lr.warmup_steps:
        return lr.peak * step / lr.warmup_steps
    if lr.decay == "constant":
        return lr.peak
    end = lr.decay_steps or steps
    progress = 1.0
    if end > lr.warmup_steps:
        progress = min(1.0, (step - lr.warmup_steps) / (end - lr.warmup_steps))
    if lr.decay == "linear":
        decayed = progress
    else:
        decayed = (1 - math.cos(math.pi * progress)) / 2
    return lr.peak - (lr.peak - lr.min) * decayed
