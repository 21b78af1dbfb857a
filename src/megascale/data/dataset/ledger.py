"""The ledger of a run's samples: proof that each was trained once, and which samples they were. No torch.

Rank 0 appends a line per step to `samples/ledger.jsonl`: the step, its first sample's number, the number of samples, a
hash of their ids (epoch, file, window) as the loader drew them, and running totals of the checksums of the samples that
all ranks have read (read_checksum.py). A resumed run drops the lines of steps that it repeats. Totals continue from the
checkpoint, so a line that a crash has cut off leaves no gap in the proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megascale.data.dataset.formats import is_text
from megascale.data.dataset.read_checksum import ReadSums, ReadTotals, split_range, sum_numbers, sum_samples
from megascale.data.dataset.samples import SampleSource, hash_ids

# Tokens read again by default, in steps spread evenly over the run; text must be tokenised again for it.
_MAX_TOKENS = 1 << 26
_MAX_TEXT_TOKENS = 1 << 20


@dataclass
class LedgerReport:
    """Results of checking a ledger.

    Attributes:
        steps, samples: number of steps and samples in it.
        distinct: number of different ids; equal to `samples` unless an epoch was abandoned and begun again.
        epochs: passes over the data.
        recorded: steps whose lines have totals of the samples that ranks read.
        compared: steps whose tokens were read again and compared with those totals.
        missing: a sentence for each run of steps that have no line, as after a crash.
        unknown: samples of such steps that no totals account for.
        steps_before_change: steps before the last accepted change of the data, whose samples cannot be drawn again.
        faults: one sentence each; empty if every sample from 0 on was trained once, in the order of the seed.
    """

    steps: int = 0
    samples: int = 0
    distinct: int = 0
    epochs: float = 0.0
    recorded: int = 0
    compared: int = 0
    unknown: int = 0
    steps_before_change: int = 0
    missing: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Span:
    """Samples begin .. end - 1 of steps up to `step`, and the sums of what ranks read of them.

    `counted_from` is the first sample of the running totals that the sums are taken from.
    """

    step: int
    begin: int
    end: int
    sums: ReadSums
    counted_from: int

    def __str__(self) -> str:
        return f"samples {self.begin} to {self.end - 1} (up to step {self.step})"


def check_ledger(
    lines: Sequence[dict[str, Any]], source: SampleSource | None, shown: int = 10, full: bool = False
) -> LedgerReport:
    """Check a ledger's lines. With `source`, also draw the samples' ids and read their tokens again.

    Args:
        source: None compares numbers only.
        shown: largest number of faults reported.
        full: read the tokens of all steps; default: at most _MAX_TOKENS tokens, of text _MAX_TEXT_TOKENS.
    """
    report = LedgerReport()
    spans = _find_spans(lines)
    _check_order(lines, {span.step: span.begin for span in spans}, report)
    totals = [ReadTotals.from_record(line.get("read")) for line in lines]
    recorded = [total for total in totals if total is not None]
    counted_from = recorded[-1].first if recorded else 0
    # A line without totals does not show a change of the data, so it is compared.
    comparable = [
        line for line, total in zip(lines, totals, strict=True) if total is None or total.first == counted_from
    ]
    report.steps_before_change = len(lines) - len(comparable)
    report.recorded = len(recorded)
    if source is not None:
        _check_ids(comparable, source, report)
    for span in spans:
        if sum_numbers(span.begin, span.end) != span.sums.numbers:
            report.faults.append(f"{span}: the numbers that ranks read are others, or some came twice")
    if source is not None:
        selected = [span for span in spans if span.counted_from == counted_from]
        if not full:
            has_text = any(map(is_text, source.data.train))
            selected = _select(selected, source.sequence_length, _MAX_TEXT_TOKENS if has_text else _MAX_TOKENS)
        report.compared = len(selected)
        for span in selected:
            if _read_again(span, source).tokens != span.sums.tokens:
                report.faults.append(f"{span}: the tokens that ranks read are not those of the files")
    if len(report.faults) > shown:
        report.faults[shown:] = [f"and {len(report.faults) - shown} more"]
    return report


def _check_order(lines: Sequence[dict[str, Any]], begins: Mapping[int, int], report: LedgerReport) -> None:
    """Compare each line's step and first sample with those due after the line before.

    Args:
        begins: the first sample that each step with totals accounts for.
    """
    step = due = 0
    for line in lines:
        first = line["first"]
        if line["step"] > step + 1 and first > due:
            last = line["step"] - 1
            if last == step + 1:
                missing = f"step {last} has"
            else:
                missing = f"steps {step + 1} to {last} have"
            if begins.get(line["step"], first) <= due:
                state = "were read, as the totals after them say"
            else:
                state = "are accounted for nowhere"
                report.unknown += first - due
            report.missing.append(f"{missing} no line; samples {due} to {first - 1} {state}")
        else:
            if line["step"] != step + 1:
                report.faults.append(f"step {line['step']} follows step {step}")
            if first != due:
                verb = "repeats" if first < due else "skips"
                report.faults.append(f"step {line['step']} begins at sample {first} where {due} is due: it {verb} some")
        step = line["step"]
        due = first + line["count"]
        report.steps += 1
        report.samples += line["count"]


def _check_ids(lines: Sequence[dict[str, Any]], source: SampleSource, report: LedgerReport) -> None:
    """Draw the samples' ids again, compare those of each line, and find ids that come twice."""
    ids: list[np.ndarray] = []
    end = 0
    for line in lines:
        drawn = source.ids(line["first"], line["count"])
        if f"{hash_ids(drawn):016x}" != line["ids"]:
            report.faults.append(f"step {line['step']} trained other samples than the seed and the files give")
        ids.append(drawn)
        end = line["first"] + line["count"]
    if not ids:
        return
    unique, counts = np.unique(np.concatenate(ids), axis=0, return_counts=True)
    report.distinct = len(unique)
    report.epochs = source.count_epochs(end)
    for i in np.flatnonzero(counts > 1):
        report.faults.append(f"sample {tuple(unique[i].tolist())} was trained {counts[i]} times")


def _find_spans(lines: Sequence[dict[str, Any]]) -> list[_Span]:
    """Return the spans of samples between consecutive totals; a missing line makes a span longer."""
    spans = []
    totals = ReadTotals()
    end = 0
    for line in lines:
        first = line["first"]
        stop = first + line["count"]
        line_totals = ReadTotals.from_record(line.get("read"))
        if line_totals is None:
            totals = ReadTotals(first=stop)
            end = stop
            continue
        if line_totals.first != totals.first:  # the totals were reset, as after an accepted change of the data
            totals = ReadTotals(first=line_totals.first)
            end = line_totals.first
        # Where lines are out of order, which _check_order reports, the totals prove nothing about this line alone.
        if end <= first:
            spans.append(_Span(line["step"], end, stop, line_totals.sums - totals.sums, line_totals.first))
        totals = line_totals
        end = stop
    return spans


def _select(spans: list[_Span], sequence_length: int, max_tokens: int) -> list[_Span]:
    """Return spans of at most `max_tokens` tokens in all (but at least one span), evenly over the run."""
    if not spans:
        return []
    tokens = sum(span.end - span.begin for span in spans) * (sequence_length + 1)
    count = min(len(spans), max(1, int(len(spans) * max_tokens / max(tokens, 1))))
    return [spans[(i + 1) * len(spans) // count - 1] for i in range(count)]


def _read_again(span: _Span, source: SampleSource) -> ReadSums:
    sums = ReadSums()
    for first, count in split_range(span.begin, span.end):
        sums += sum_samples(first, source.batch(first, count).T)
    return sums


def find_step_samples(lines: Sequence[dict[str, Any]], step: int, global_batch: int) -> tuple[int, int]:
    """Return (first sample's number, number of samples) of a step, finished or the next one.

    A step that is not in the ledger follows the last step before it that is, at `global_batch` samples per step.
    """
    earlier = [line for line in lines if line["step"] <= step]
    if not earlier:
        return (step - 1) * global_batch, global_batch
    last = max(earlier, key=lambda line: line["step"])
    if last["step"] == step:
        return last["first"], last["count"]
    return last["first"] + last["count"] + (step - last["step"] - 1) * global_batch, global_batch
