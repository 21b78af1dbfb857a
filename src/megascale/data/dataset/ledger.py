"""The ledger of a run's samples: proof that each was trained once, and which ones they were. No torch.

Rank 0 appends a line per step to `samples/ledger.jsonl`: the step, its first sample's number, how many, a hash of
their ids (epoch, file, window) as the loader drew them, and running totals of the checksums of what all ranks have
read (read_checksum.py). A resumed run drops the lines of steps that it does again. Totals go on from the checkpoint,
so a line that a crash has cut leaves no gap in the proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megascale.data.dataset.formats import is_text
from megascale.data.dataset.read_checksum import ReadSums, ReadTotals, parts_of, sum_of_numbers, sums_of
from megascale.data.dataset.samples import SampleSource, hash_ids

# Tokens that are read again by default, of steps that lie evenly over the run; text is tokenised again for it.
_TOKENS = 1 << 26
_TOKENS_OF_TEXT = 1 << 20


@dataclass
class Checked:
    """What a ledger proves.

    Attributes:
        steps, samples: in it.
        distinct: different ids among them; equal to `samples` where no epoch was left unfinished and begun again.
        epochs: passes over the data.
        recorded: steps whose lines say what ranks have read; those of older versions do not.
        compared: steps whose tokens were read again and compared with what ranks had read.
        missing: a sentence for each run of steps that have no line, as a crash leaves it.
        unknown: samples of such steps that no totals account for.
        other_data: steps before the last change of the data that was accepted: those samples cannot be drawn again.
        faults: a sentence each; empty where every sample from 0 on was trained once, in order, as the seed says.
    """

    steps: int = 0
    samples: int = 0
    distinct: int = 0
    epochs: float = 0.0
    recorded: int = 0
    compared: int = 0
    unknown: int = 0
    other_data: int = 0
    missing: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Stretch:
    """Samples begin .. end - 1, of steps whose last is `step`, and the sums of what ranks read of them."""

    step: int
    begin: int
    end: int
    sums: ReadSums
    since: int


def check_ledger(
    lines: Sequence[dict[str, Any]], source: SampleSource | None, shown: int = 10, full: bool = False
) -> Checked:
    """Check a ledger's lines; with `source` the ids too, by drawing them again, and the tokens, by reading them again.

    Args:
        source: None: numbers alone are compared.
        shown: most faults that are told.
        full: read the tokens of all steps; default: of at most _TOKENS tokens, of text _TOKENS_OF_TEXT.
    """
    result = Checked()
    stretches = _stretches(lines)
    _check_order(lines, {stretch.step: stretch.begin for stretch in stretches}, result)
    totals = [ReadTotals.from_record(line.get("read")) for line in lines]
    recorded = [each for each in totals if each is not None]
    since = recorded[-1].first if recorded else 0
    # Lines of older versions do not tell of a change of the data, and are compared.
    pairs = zip(lines, totals, strict=True)
    comparable = [line for line, total in pairs if total is None or total.first == since]
    result.other_data = len(lines) - len(comparable)
    if source is not None:
        _check_ids(comparable, source, result)
    result.recorded = len(recorded)
    for stretch in stretches:
        if sum_of_numbers(stretch.begin, stretch.end) != stretch.sums.numbers:
            result.faults.append(f"{_named(stretch)}: the numbers that ranks read are others, or some came twice")
    if source is not None:
        chosen = [stretch for stretch in stretches if stretch.since == since]
        if not full:
            text = any(map(is_text, source.config.data.train))
            chosen = _choose(chosen, source.sequence_length, _TOKENS_OF_TEXT if text else _TOKENS)
        result.compared = len(chosen)
        for stretch in chosen:
            if _read_again(stretch, source).tokens != stretch.sums.tokens:
                result.faults.append(f"{_named(stretch)}: the tokens that ranks read are not those of the files")
    if len(result.faults) > shown:
        result.faults[shown:] = [f"and {len(result.faults) - shown} more"]
    return result


def _check_order(lines: Sequence[dict[str, Any]], begins: Mapping[int, int], result: Checked) -> None:
    """Compare each line's step and first sample with what is due after the line before.

    Args:
        begins: of each step whose line says what ranks have read, the first sample that it accounts for.
    """
    step, due = 0, 0
    for line in lines:
        first, end = line["first"], line["first"] + line["count"]
        if line["step"] > step + 1 and first > due:
            last = line["step"] - 1
            lost = f"step {last} has" if last == step + 1 else f"steps {step + 1} to {last} have"
            is_known = begins.get(line["step"], first) <= due
            how = "were read, as the totals after them say" if is_known else "are accounted for nowhere"
            result.unknown += 0 if is_known else first - due
            result.missing.append(f"{lost} no line; samples {due} to {first - 1} {how}")
        else:
            if line["step"] != step + 1:
                result.faults.append(f"step {line['step']} follows step {step}")
            if first != due:
                how = "repeats" if first < due else "skips"
                result.faults.append(f"step {line['step']} begins at sample {first} where {due} is due: it {how} some")
        step, due = line["step"], end
        result.steps += 1
        result.samples += line["count"]


def _check_ids(lines: Sequence[dict[str, Any]], source: SampleSource, result: Checked) -> None:
    """Draw the samples' ids again, compare those of each line, and look for one that comes twice."""
    ids: list[np.ndarray] = []
    end = 0
    for line in lines:
        drawn = source.ids(line["first"], line["count"])
        if f"{hash_ids(drawn):016x}" != line["ids"]:
            result.faults.append(f"step {line['step']} trained other samples than the seed and the files give")
        ids.append(drawn)
        end = line["first"] + line["count"]
    if not ids:
        return
    unique, counts = np.unique(np.concatenate(ids), axis=0, return_counts=True)
    result.distinct, result.epochs = len(unique), source.epochs(end)
    for i in np.flatnonzero(counts > 1):
        result.faults.append(f"sample {tuple(unique[i].tolist())} was trained {counts[i]} times")


def _stretches(lines: Sequence[dict[str, Any]]) -> list[_Stretch]:
    """Return what ranks read from one line's totals to the next; a line that is missing makes a stretch longer."""
    stretches = []
    totals, end = ReadTotals(), 0
    for line in lines:
        first, stop = line["first"], line["first"] + line["count"]
        now = ReadTotals.from_record(line.get("read"))
        if now is None:
            totals, end = ReadTotals(first=stop), stop
            continue
        if now.first != totals.first:  # counted anew, as after a change of the data that was accepted
            totals, end = ReadTotals(first=now.first), now.first
        # Where lines are out of order, which _check_order tells, the totals say nothing of this line alone.
        if end <= first:
            stretches.append(_Stretch(line["step"], end, stop, now.sums - totals.sums, now.first))
        totals, end = now, stop
    return stretches


def _choose(stretches: list[_Stretch], sequence_length: int, most: int) -> list[_Stretch]:
    """Return stretches of at most `most` tokens in all (but at least one), evenly over the run."""
    tokens = sum(stretch.end - stretch.begin for stretch in stretches) * (sequence_length + 1)
    count = min(len(stretches), max(1, int(len(stretches) * most / max(tokens, 1))))
    return [stretches[(i + 1) * len(stretches) // count - 1] for i in range(count)] if stretches else []


def _read_again(stretch: _Stretch, source: SampleSource) -> ReadSums:
    sums = ReadSums()
    for first, count in parts_of(stretch.begin, stretch.end):
        sums += sums_of(first, source.batch(first, count).T)
    return sums


def _named(stretch: _Stretch) -> str:
    return f"samples {stretch.begin} to {stretch.end - 1} (up to step {stretch.step})"


def find_step_samples(lines: Sequence[dict[str, Any]], step: int, global_batch: int) -> tuple[int, int]:
    """(first sample's number, how many) of a step, done or the next to be done.

    A step that is not in the ledger follows the last one before it that is, at `global_batch` samples a step.
    """
    before = [line for line in lines if line["step"] <= step]
    if not before:
        return (step - 1) * global_batch, global_batch
    last = max(before, key=lambda line: line["step"])
    if last["step"] == step:
        return last["first"], last["count"]
    return last["first"] + last["count"] + (step - last["step"] - 1) * global_batch, global_batch
