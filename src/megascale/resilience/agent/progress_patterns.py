"""Patterns of the progress lines of foreign trainers, from which the agent reads steps and metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megascale.core.bounded_pattern import MAX_CHARACTERS, BoundedPattern

# A number with thousands separators, a fraction and an exponent, each optional; or NaN or infinity.
NUMBER = r"[-+]?(?:[0-9][0-9,]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|(?i:nan|inf))"
# A larger number is not a step, and does not fit into a heartbeat.
_MAX_STEP = 1 << 53
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # code of a terminal that changes the colour
_COLOUR_FACTOR = 4  # A line with codes of colours may have this many times the characters of its text.


@dataclass(frozen=True)
class ProgressPattern:
    """Pattern of the progress lines of one trainer.

    Attributes:
        trainer: program that prints the lines.
        pattern: regular expression with a group `step`, and optionally groups for the fields of `Reading`. If it has
            the groups `epoch` and `epoch_steps`, `step` counts from the start of the epoch.
        example: line that the pattern matches.
        is_last_rank: whether the last rank prints the lines. Otherwise rank 0 does.
    """

    trainer: str
    pattern: str
    example: str
    is_last_rank: bool = False


@dataclass(frozen=True)
class Reading:
    """Contents of a progress line. Numbers that the line lacks are None.

    Attributes:
        is_last_rank: whether the last rank prints such lines. Otherwise rank 0 does.
        total: number of steps of a progress bar. The bar of an evaluation has another total than the training's.
    """

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    is_last_rank: bool = False
    total: int | None = None


# Line of any progress bar, which shows that a rank works.
BAR = re.compile(r"(?<![0-9])[0-9]{1,16}/[0-9]{1,16} \[[0-9:]+<[0-9]")

SHIPPED = (
    ProgressPattern(
        trainer="megascale.watch",
        # A progress bar does not end its line, so it may precede this text.
        pattern=rf"\bmegascale step: (?P<step>[0-9]+) loss: (?P<loss>{NUMBER})"
        rf"(?: grad_norm: (?P<grad_norm>{NUMBER}))?(?: tokens_per_second: (?P<tokens_per_second>{NUMBER}))?",
        example="megascale step: 20 loss: 7.03125 grad_norm: 1.25 tokens_per_second: 7123.0",
    ),
    ProgressPattern(
        trainer="torchtitan",
        # A line of a validation has the same fields after "validate step:". A pipeline stage without a loss prints -1.
        pattern=rf"(?<!validate )\bstep: *(?P<step>[0-9]+) +loss: *(?:-[0-9.]+|(?P<loss>{NUMBER}))"
        rf"(?: +grad_norm: *(?P<grad_norm>{NUMBER}))?(?:.*\btps: *(?P<tokens_per_second>{NUMBER}))?",
        example="[titan] 2026-09-02 10:11:12,345 - root - INFO - step: 20  loss:  7.0312  grad_norm:  1.2345  "
        "memory: 36.98GiB(46.74%)  tps: 7,123  tflops: 412.30  mfu: 41.69%",
    ),
    ProgressPattern(
        trainer="Megatron-LM",
        pattern=rf"\biteration +(?P<step>[0-9]+)/ *[0-9]+ \|(?:.*\blm loss: *(?P<loss>{NUMBER}))?"
        rf"(?:.*\bgrad norm: *(?P<grad_norm>{NUMBER}))?",
        example=" [2026-09-02 10:11:12] iteration       20/     100 | consumed samples:          320 | elapsed time "
        "per iteration (ms): 812.3 | learning rate: 1.0E-04 | global batch size:    16 | lm loss: 1.041232E+01 | "
        "loss scale: 1.0 | grad norm: 4.512 | number of skipped iterations:   0 |",
        is_last_rank=True,
    ),
    ProgressPattern(
        trainer="Megatron-Core",  # its simple example loop, whose steps start at 0
        pattern=rf"^Iteration (?P<step>[0-9]+): Losses reduced: (?:\[{{'lm loss': tensor\((?P<loss>{NUMBER}))?",
        example="Iteration 20: Losses reduced: [{'lm loss': tensor(4.6052, device='cuda:0', grad_fn=<DivBackward0>)}]",
    ),
    ProgressPattern(
        trainer="Hugging Face Trainer",
        # Bars with a description, such as those of datasets, show other work.
        pattern=r"^ *[0-9]+%\|[^|]*\| *(?P<step>[0-9]+)/(?P<total>[0-9]+) "
        rf"\[[0-9:]+<[0-9:?]+, *{NUMBER} *(?:it/s|s/it)",
        example=" 20%|##        | 20/100 [00:14<00:56,  1.42it/s]",
    ),
    ProgressPattern(
        trainer="Lightning",
        pattern=rf"\bEpoch (?P<epoch>[0-9]+)(?:/[0-9]+)?:[^/]{{0,300}}?"
        rf"\b(?P<step>[0-9]+)/(?P<epoch_steps>[0-9]+|\?) \[[0-9:]+<[0-9:?]+"
        rf"(?:,.*?loss(?:_step)?= *(?P<loss>{NUMBER}))?",
        example="Epoch 3:  20%|##        | 20/100 [00:14<00:56,  1.42it/s, v_num=0, train_loss_step=7.031]",
    ),
    ProgressPattern(
        trainer="nanochat",
        # Fine-tuning (scripts.chat_sft) prints no total.
        pattern=rf"\bstep (?P<step>[0-9]+)(?:/[0-9]+)? \([^)]*\) \| loss: (?P<loss>{NUMBER})"
        rf"(?:.*\bgrad norm: *(?P<grad_norm>{NUMBER}))?(?:.*\btok/sec: (?P<tokens_per_second>{NUMBER}))?",
        example="step 00020/21400 (0.09%) | loss: 7.031250 | grad norm: 0.4123 | lrm: 1.00 | dt: 1403.20ms | "
        "tok/sec: 373,644 | mfu: 48.12 | total time: 0.23m",
    ),
)


class ProgressReader:
    """Reader of progress lines. The first pattern that matches is used: the user's patterns, then SHIPPED.

    The search of a line takes bounded time. Lines are truncated to MAX_CHARACTERS, and a user's pattern that takes too
    long is switched off.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._user_patterns = [BoundedPattern("foreign.patterns", pattern) for pattern in patterns]
        # The pattern of Hugging Face Trainer is last, because it matches progress bars of other programs too.
        ordered = sorted(SHIPPED, key=lambda shipped: shipped.trainer == "Hugging Face Trainer")
        self._shipped_patterns = [(re.compile(shipped.pattern), shipped) for shipped in ordered]

    def read(self, line: str) -> Reading | None:
        """Return the contents of a progress line, or None for other lines. Of a progress bar the last state is read."""
        line = line.rstrip("\r").rpartition("\r")[2]
        line = _COLOUR.sub("", line[: _COLOUR_FACTOR * MAX_CHARACTERS])[:MAX_CHARACTERS]
        for user_pattern in self._user_patterns:
            match = user_pattern.search(line)
            if match is not None:
                return _convert(match.groupdict())
        for expression, shipped in self._shipped_patterns:
            shipped_match = expression.search(line)
            if shipped_match is not None:
                return _convert(shipped_match.groupdict(), shipped.is_last_rank)
        return None

    def describe_problems(self) -> str:
        """Return why patterns of the user are switched off, or an empty text if none is."""
        return "; ".join(pattern.problem for pattern in self._user_patterns if pattern.problem)


def _convert(groups: dict[str, str], is_last_rank: bool = False) -> Reading | None:
    """Return the reading of a match, or None if a group is not a valid number."""
    try:
        step = int(groups["step"].replace(",", ""))
        if (groups.get("epoch_steps") or "?") != "?":  # "?": the number of steps per epoch is unknown
            step += int(groups["epoch"]) * int(groups["epoch_steps"])
        total = int(groups["total"]) if groups.get("total") else None
        metrics = {}
        for name in ("loss", "grad_norm", "tokens_per_second"):
            if groups.get(name):
                metrics[name] = float(groups[name].replace(",", ""))
    except (AttributeError, TypeError, ValueError):
        return None
    if not 0 <= step <= _MAX_STEP:
        return None
    return Reading(step, is_last_rank=is_last_rank, total=total, **metrics)
