"""Check of a run's ledger, which proves that the run trained each sample once. No torch.

Rank 0 appends a line per step to `samples/ledger.jsonl`. A line has the step, the number of its first sample, the
number of its samples, a hash of their ids (epoch, file, window), and running totals of the checksums of all samples
that ranks have read (read_checksum.py). A resumed run drops the lines of steps that it repeats. The totals continue
from the checkpoint, so a line that a crash has lost leaves no gap in the proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megascale.config.base import MAX_GLOBAL_BATCH
from megascale.data.dataset.formats import is_text
from megascale.data.dataset.read_checksum import ReadSums, ReadTotals, split_range, sum_numbers, sum_samples
from megascale.data.dataset.samples import SampleSource, hash_sample_ids
from megascale.errors import DataError

# Most tokens that a check reads again by default. Text must be tokenised again, which takes longer.
_MAX_TOKENS = 1 << 26
_MAX_TEXT_TOKENS = 1 << 20


@dataclass
class LedgerReport:
    """Results of checking a ledger.

    Attributes:
        steps, samples: number of steps and samples in the ledger.
        distinct_ids: number of different sample ids since the last accepted change of the data.
        epochs: passes over the data.
        steps_with_totals: number of steps whose lines have totals of the samples that ranks read.
        compared_steps: number of steps whose tokens were read again and compared with the totals.
        missing: a sentence per sequence of steps without lines, as after a crash.
        unaccounted_samples: number of samples of steps without lines that no totals cover.
        steps_before_change: number of steps before the last accepted change, whose samples cannot be read again.
        lost_steps: number of saved steps after the last line, which the ledger does not cover.
        faults: a sentence per fault; empty if every sample from 0 on was trained once, in the order of the seed.
    """

    steps: int = 0
    samples: int = 0
    distinct_ids: int = 0
    epochs: float = 0.0
    steps_with_totals: int = 0
    compared_steps: int = 0
    unaccounted_samples: int = 0
    steps_before_change: int = 0
    lost_steps: int = 0
    missing: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Span:
    """Consecutive samples between two lines with totals.

    Attributes:
        step: step of the later line.
        begin, end: samples begin .. end - 1.
        sums: checksums of the samples that ranks read, the difference of the two totals.
        totals_start: first sample of the running totals.
    """

    step: int
    begin: int
    end: int
    sums: ReadSums
    totals_start: int

    def __str__(self) -> str:
        return f"samples {self.begin} to {self.end - 1} (up to step {self.step})"


def check_ledger(
    lines: Sequence[dict[str, Any]],
    source: SampleSource | None,
    max_faults: int = 10,
    full: bool = False,
    saved_step: int = 0,
) -> LedgerReport:
    """Return the report on a ledger's lines.

    Args:
        source: samples of the run, to compare ids and tokens; None compares only numbers of samples.
        max_faults: largest number of faults reported.
        full: read the tokens of all steps. By default at most _MAX_TOKENS tokens are read, or _MAX_TEXT_TOKENS if the
            data has text, in steps spread evenly over the run.
        saved_step: step of the run's last saved checkpoint, up to which the ledger must have lines.

    Raises DataError for a line without a valid step, first sample or number of samples.
    """
    report = LedgerReport()
    _check_fields(lines)
    spans = _find_spans(lines)
    _check_order(lines, {span.step: span.begin for span in spans}, report)
    totals = [ReadTotals.from_record(line.get("read")) for line in lines]
    known_totals = [total for total in totals if total is not None]
    # An accepted change of the data restarts the totals. Samples before the last change cannot be read again.
    totals_start = known_totals[-1].first if known_totals else 0
    comparable = []
    for line, total in zip(lines, totals, strict=True):
        if total is None or total.first == totals_start:
            comparable.append(line)
    report.steps_before_change = len(lines) - len(comparable)
    report.steps_with_totals = len(known_totals)
    if source is not None:
        _check_ids(comparable, source, report)
    for span in spans:
        if sum_numbers(span.begin, span.end) != span.sums.numbers:
            report.faults.append(f"{span}: ranks read samples with other numbers, or some samples twice")
    if source is not None:
        selected = [span for span in spans if span.totals_start == totals_start]
        if not full:
            has_text = any(map(is_text, source.data.train))
            max_tokens = _MAX_TEXT_TOKENS if has_text else _MAX_TOKENS
            selected = _select_evenly(selected, source.sequence_length, max_tokens)
        report.compared_steps = len(selected)
        for span in selected:
            if _sum_span(span, source).tokens != span.sums.tokens:
                report.faults.append(f"{span}: the tokens that ranks read differ from the files' tokens")
    _check_end(lines, saved_step, report)
    if len(report.faults) > max_faults:
        report.faults[max_faults:] = [f"and {len(report.faults) - max_faults} more"]
    return report


def _check_fields(lines: Sequence[dict[str, Any]]) -> None:
    """Raise DataError for a line without a valid step, first sample or number of samples."""
    for number, line in enumerate(lines, 1):
        values = [line.get(name) for name in ("step", "first", "count")]
        is_valid = all(type(value) is int and value >= 0 for value in values)
        if not is_valid or line["count"] > MAX_GLOBAL_BATCH:
            raise DataError(
                f"line {number} of the ledger (samples/ledger.jsonl) does not name the samples of a step; the file was "
                "edited or the disk is damaged. Restore it from a copy, or move it away to resume without its history"
            )


def _check_end(lines: Sequence[dict[str, Any]], saved_step: int, report: LedgerReport) -> None:
    """Report steps that were saved after the last line."""
    last_step = lines[-1]["step"] if lines else 0
    if saved_step <= last_step:
        return
    report.lost_steps = saved_step - last_step
    steps = f"step {saved_step} has" if report.lost_steps == 1 else f"steps {last_step + 1} to {saved_step} have"
    report.missing.append(f"{steps} no line, but a checkpoint of step {saved_step} was saved")


def _check_order(lines: Sequence[dict[str, Any]], covered_from: Mapping[int, int], report: LedgerReport) -> None:
    """Compare each line's step and first sample with those that must follow the previous line.

    Args:
        covered_from: first sample that the totals in a step's line add to the previous totals, by step.
        report: receives counts, missing lines and faults.
    """
    step = next_sample = 0
    for line in lines:
        first = line["first"]
        if line["step"] > step + 1 and first > next_sample:
            last = line["step"] - 1
            if last == step + 1:
                missing = f"step {last} has"
            else:
                missing = f"steps {step + 1} to {last} have"
            if covered_from.get(line["step"], first) <= next_sample:
                state = "were read, as the totals after them say"
            else:
                state = "are not covered by any totals"
                report.unaccounted_samples += first - next_sample
            report.missing.append(f"{missing} no line; samples {next_sample} to {first - 1} {state}")
        else:
            if line["step"] != step + 1:
                report.faults.append(f"step {line['step']} follows step {step}")
            if first != next_sample:
                verb = "repeats" if first < next_sample else "skips"
                report.faults.append(
                    f"step {line['step']} begins at sample {first}, but sample {next_sample} is next: the step {verb} "
                    "some"
                )
        step = line["step"]
        next_sample = first + line["count"]
        report.steps += 1
        report.samples += line["count"]


def _check_ids(lines: Sequence[dict[str, Any]], source: SampleSource, report: LedgerReport) -> None:
    """Compare the hash of the sample ids in each line with the ids that the seed gives, and find repeated ids."""
    ids: list[np.ndarray] = []
    end = 0
    for line in lines:
        step_ids = source.find_sample_ids(line["first"], line["count"])
        if f"{hash_sample_ids(step_ids):016x}" != line.get("ids"):
            report.faults.append(f"step {line['step']} trained other samples than the seed and the files give")
        ids.append(step_ids)
        end = line["first"] + line["count"]
    if not ids:
        return
    unique, counts = np.unique(np.concatenate(ids), axis=0, return_counts=True)
    report.distinct_ids = len(unique)
    report.epochs = source.count_epochs(end)
    for i in np.flatnonzero(counts > 1):
        epoch, file, window = unique[i].tolist()
        report.faults.append(f"sample {(epoch, file, window)} was trained {counts[i]} times")


def _find_spans(lines: Sequence[dict[str, Any]]) -> list[_Span]:
    """Return the spans of samples between consecutive lines with totals. A missing line makes a span longer."""
    spans = []
    totals = ReadTotals()  # of the previous line
    end = 0  # first sample after the previous line
    for line in lines:
        first = line["first"]
        stop = first + line["count"]
        line_totals = ReadTotals.from_record(line.get("read"))
        if line_totals is None:  # totals that begin later cannot cover this line
            totals = ReadTotals(first=stop)
            end = stop
            continue
        if line_totals.first != totals.first:  # the totals were reset, as after an accepted change of the data
            totals = ReadTotals(first=line_totals.first)
            end = line_totals.first
        # If lines are out of order, which _check_order reports, the totals do not belong to this line alone.
        if end <= first:
            spans.append(_Span(line["step"], end, stop, line_totals.sums - totals.sums, line_totals.first))
        totals = line_totals
        end = stop
    return spans


def _select_evenly(spans: list[_Span], sequence_length: int, max_tokens: int) -> list[_Span]:
    """Return spans spread evenly over the run, of at most `max_tokens` tokens in all, but at least one span."""
    if not spans:
        return []
    tokens = sum(span.end - span.begin for span in spans) * (sequence_length + 1)
    count = min(len(spans), max(1, int(len(spans) * max_tokens / max(tokens, 1))))
    return [spans[(i + 1) * len(spans) // count - 1] for i in range(count)]


def _sum_span(span: _Span, source: SampleSource) -> ReadSums:
    sums = ReadSums()
    for first, count in split_range(span.begin, span.end):
        sums += sum_samples(first, source.read_tokens(first, count).T)
    return sums


def find_step_samples(lines: Sequence[dict[str, Any]], step: int, global_batch: int) -> tuple[int, int]:
    """Return the number of a step's first sample, and the number of its samples.

    For a step without a line, both are computed from the last line before it, with `global_batch` samples per step.
    """
    _check_fields(lines)
    earlier = [line for line in lines if line["step"] <= step]
    if not earlier:
        return (step - 1) * global_batch, global_batch
    last = max(earlier, key=lambda line: line["step"])
    if last["step"] == step:
        return last["first"], last["count"]
    return last["first"] + last["count"] + (step - last["step"] - 1) * global_batch, global_batch
