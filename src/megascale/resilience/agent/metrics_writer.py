"""Writer of metrics.jsonl for trainers whose metrics the agent reads from their output."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from megascale.core import strict_json
from megascale.resilience.agent.progress_patterns import Reading


class MetricsWriter:
    """Writer of metrics.jsonl for one attempt of a foreign trainer, which does not write the file.

    A resumed trainer repeats steps. The first step of an attempt therefore removes the records of that step and of
    later steps. So does a step that is lower than its predecessor, because the trainer has returned to a checkpoint.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._last_step: int | None = None  # newest step that was written, or None before the first
        self._last_time = 0.0  # when it was written (time.monotonic())

    def write(self, readings: Sequence[Reading]) -> None:
        """Append the records of steps that were read together. They share the mean step time since the last call.

        Without an earlier call, or if the steps are not newer than the last one, the records have no step time.
        """
        current_time = time.monotonic()
        last_step = self._last_step
        lowest_step = min(reading.step for reading in readings)
        newest_step = readings[-1].step
        step_seconds: float | None = None
        if last_step is not None and newest_step > last_step:
            step_seconds = (current_time - self._last_time) / (newest_step - last_step)
        if last_step is None or lowest_step < last_step:
            self._remove_from(lowest_step)
        lines = []
        for reading in _drop_repeated_steps(readings, last_step):
            lines.append(_format_record(reading, step_seconds))
        self._last_step = newest_step
        self._last_time = current_time
        # A full disk must not end the heartbeats.
        with contextlib.suppress(OSError), open(self._file, "a") as file:
            file.writelines(lines)

    def _remove_from(self, step: int) -> None:
        """Remove the records of `step` and later steps, and an incomplete last record."""
        try:
            lines = self._file.read_bytes().splitlines(keepends=True)
        except OSError:
            return
        # Records are sorted by step, so the loop parses only the last ones. Parsing all records of a long run would
        # delay heartbeats. A damaged record has the step -1 and is removed too.
        while lines and not 0 <= _read_step(lines[-1]) < step:
            lines.pop()
        temporary = self._file.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            temporary.write_bytes(b"".join(lines))
            os.replace(temporary, self._file)


def _drop_repeated_steps(readings: Sequence[Reading], last_step: int | None) -> list[Reading]:
    """Return the readings without further lines of the same step, and without steps that the trainer repeats.

    Args:
        last_step: step before the readings, or None if there is none.
    """
    kept_readings: list[Reading] = []
    for reading in readings:
        if last_step is not None and reading.step < last_step:  # the trainer has returned to a checkpoint
            kept_readings = [earlier for earlier in kept_readings if earlier.step < reading.step]
        if reading.step != last_step:
            kept_readings.append(reading)
        last_step = reading.step
    return kept_readings


def _format_record(reading: Reading, step_seconds: float | None) -> str:
    """Return a line of metrics.jsonl with the values that are known."""
    record: dict[str, float | int | None] = {
        "step": reading.step,
        "time": time.time(),
        "loss": reading.loss,
        "grad_norm": reading.grad_norm,
        "tokens_per_second": reading.tokens_per_second,
        "seconds": step_seconds,
    }
    return strict_json.dumps({name: value for name, value in record.items() if value is not None}) + "\n"


def _read_step(line: bytes) -> int:
    """Return the step of a record, or -1 if the record is damaged."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1
