"""The ledger's checker: a sound ledger has no fault, and each fault is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.config import from_tree
from megascale.data.dataset import ledger as ledger_module
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.dataset.ledger import check_ledger, find_step_samples
from megascale.data.dataset.read_checksum import ReadSums, ReadTotals, sum_samples
from megascale.data.dataset.samples import SampleSource, hash_sample_ids
from megascale.errors import DataError
from tests.data.sample_sources import open_samples

BATCH = 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SampleSource:
    """Ten windows of 8 tokens an epoch."""
    prefix = tmp_path_factory.mktemp("tokens") / "train"
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document([np.arange(81) % 16])
    return open_samples(
        from_tree({"model": {"sequence_length": 8, "vocab_size": 16}, "data": {"train": [str(prefix)]}})
    )


def ledger(source: SampleSource, steps: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "first": (step - 1) * BATCH,
            "count": BATCH,
            "ids": f"{hash_sample_ids(source.find_sample_ids((step - 1) * BATCH, BATCH)):016x}",
        }
        for step in range(1, steps + 1)
    ]


def test_a_sound_ledger(source: SampleSource) -> None:
    checked = check_ledger(ledger(source, 5), source)
    assert (checked.steps, checked.samples, checked.distinct_ids, checked.epochs) == (5, 20, 20, 2.0)
    assert checked.faults == []
    assert check_ledger([], source).faults == []
    plain = check_ledger(ledger(source, 5), None)
    assert (plain.steps, plain.samples, plain.distinct_ids, plain.faults) == (5, 20, 0, [])


def test_each_fault_is_said(source: SampleSource) -> None:
    lines = ledger(source, 4)
    cut = check_ledger([lines[0], lines[2]], None)
    assert cut.missing == ["step 2 has no line; samples 4 to 7 are not covered by any totals"]
    assert (cut.faults, cut.unaccounted_samples) == ([], 4)
    assert check_ledger([lines[0], lines[1] | {"first": 8}], None).faults == [
        "step 2 begins at sample 8, but sample 4 is next: the step skips some"
    ]
    assert check_ledger(lines[:2] + [lines[2] | {"first": 4}], None).faults == [
        "step 3 begins at sample 4, but sample 8 is next: the step repeats some"
    ]
    assert check_ledger([lines[0], lines[1] | {"ids": lines[0]["ids"]}], source).faults == [
        "step 2 trained other samples than the seed and the files give"
    ]
    repeated = check_ledger(lines[:2] + [lines[1] | {"step": 3}], source)
    assert repeated.faults[0] == "step 3 begins at sample 4, but sample 8 is next: the step repeats some"
    assert [fault.endswith(" was trained 2 times") for fault in repeated.faults[1:]] == [True] * BATCH
    assert (repeated.samples, repeated.distinct_ids) == (12, 8)


def add_totals(lines: list[dict[str, Any]], source: SampleSource, wrong_step: int = 0) -> list[dict[str, Any]]:
    """Return the lines with running totals of the samples read; those of `wrong_step` had another token."""
    totals = ReadTotals()
    result = []
    for line in lines:
        totals.sums += sum_samples(line["first"], source.read_tokens(line["first"], line["count"]).T)
        if line["step"] == wrong_step:
            totals.sums += ReadSums(tokens=1)
        result.append(line | {"read": totals.to_record()})
    return result


def test_all_tokens_are_read_again_only_if_asked(source: SampleSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six steps of 36 tokens: with room for 72 tokens, every third step is compared."""
    monkeypatch.setattr(ledger_module, "_MAX_TOKENS", 72)
    monkeypatch.setattr(ledger_module, "_MAX_TEXT_TOKENS", 36)
    fault = "samples {} to {} (up to step {}): the tokens that ranks read differ from the files' tokens"
    for wrong_step, is_seen in ((2, False), (3, True), (6, True)):
        lines = add_totals(ledger(source, 6), source, wrong_step)
        expected = [fault.format(4 * wrong_step - 4, 4 * wrong_step - 1, wrong_step)]
        sampled = check_ledger(lines, source)
        assert (sampled.steps_with_totals, sampled.compared_steps) == (6, 2)
        assert sampled.faults == (expected if is_seen else [])
        full = check_ledger(lines, source, full=True)
        assert (full.steps_with_totals, full.compared_steps, full.faults) == (6, 6, expected)
    # Text must be tokenised again, so that fewer steps are compared.
    monkeypatch.setattr(ledger_module, "is_text", lambda entry: True)
    assert check_ledger(add_totals(ledger(source, 6), source), source).compared_steps == 1


def test_of_many_faults_the_first_are_told() -> None:
    lines = [{"step": 2 * step, "first": 0, "count": 0, "ids": ""} for step in range(1, 7)]
    # A line of step 2 follows step 0, that of step 4 follows step 2, and so on.
    assert check_ledger(lines, None, max_faults=6).faults == [
        f"step {2 * n} follows step {2 * n - 2}" for n in range(1, 7)
    ]
    faults = check_ledger(lines, None, max_faults=4).faults
    assert faults[4:] == ["and 2 more"]


def test_the_samples_of_a_step() -> None:
    """Steps that the ledger lacks follow the last one before them, at the batch of today."""
    lines = [{"step": 1, "first": 0, "count": 4}, {"step": 2, "first": 4, "count": 8}]
    assert [find_step_samples(lines, step, 16) for step in (1, 2, 3, 5)] == [(0, 4), (4, 8), (12, 16), (44, 16)]
    assert find_step_samples([], 3, 16) == (32, 16)


def test_totals_prove_the_samples_of_lines_that_are_lost(source: SampleSource) -> None:
    """Lines that a crash has cut off leave one longer span, whose tokens are read again as a whole."""
    lines = add_totals(ledger(source, 6), source)
    for removed, text in (
        ({3}, "step 3 has no line; samples 8 to 11 were read, as the totals after them say"),
        ({2, 3, 4}, "steps 2 to 4 have no line; samples 4 to 15 were read, as the totals after them say"),
        ({1}, "step 1 has no line; samples 0 to 3 were read, as the totals after them say"),
    ):
        remaining = [line for line in lines if line["step"] not in removed]
        report = check_ledger(remaining, source, full=True)
        assert (report.missing, report.faults, report.unaccounted_samples) == ([text], [], 0)
        assert (report.steps, report.steps_with_totals, report.compared_steps) == (6 - len(removed),) * 3
        assert report.samples == BATCH * (6 - len(removed))
        # A wrong token of a lost step shows in the span that it is part of.
        damaged = add_totals(ledger(source, 6), source, wrong_step=max(removed))
        remaining = [line for line in damaged if line["step"] not in removed]
        (fault,) = check_ledger(remaining, source, full=True).faults
        first, last = BATCH * (min(removed) - 1), BATCH * (max(removed) + 1) - 1
        assert fault == (
            f"samples {first} to {last} (up to step {max(removed) + 1}): the tokens that ranks read differ "
            "from the files' tokens"
        )


def test_totals_after_a_line_without_them_prove_all_samples_from_their_first(source: SampleSource) -> None:
    """The line of a release that wrote no totals is covered by the next totals, which count from sample 0."""
    lines = ledger(source, 4)
    with_totals = add_totals(lines, source)
    mixed = [with_totals[0], lines[1], with_totals[2], with_totals[3]]
    report = check_ledger(mixed, source, full=True)
    assert (report.steps_with_totals, report.compared_steps, report.steps_before_change, report.faults) == (3, 3, 0, [])
    spans = ledger_module._find_spans(mixed)
    assert [(span.step, span.begin, span.end) for span in spans] == [(1, 0, 4), (3, 0, 12), (4, 12, 16)]


def test_lines_in_which_ranks_read_other_samples_are_told(source: SampleSource) -> None:
    lines = add_totals(ledger(source, 3), source)
    totals = ReadTotals.from_record(lines[1]["read"])
    assert totals is not None
    totals.sums += ReadSums(numbers=1)
    lines[1]["read"] = totals.to_record()
    faults = check_ledger(lines, None).faults
    text = "ranks read samples with other numbers, or some samples twice"
    assert faults == [f"samples 4 to 7 (up to step 2): {text}", f"samples 8 to 11 (up to step 3): {text}"]


def test_steps_before_an_accepted_change_of_the_data_are_not_drawn_again(source: SampleSource) -> None:
    """Totals count anew from the first sample of the other data."""
    earlier = [line | {"ids": "of other data"} for line in add_totals(ledger(source, 2), source)]
    later = ledger(source, 5)[2:]
    totals = ReadTotals(first=8)
    for line in later:
        totals.sums += sum_samples(line["first"], source.read_tokens(line["first"], BATCH).T)
        line["read"] = totals.to_record()
    report = check_ledger(earlier + later, source, full=True)
    assert (report.faults, report.missing, report.steps_before_change) == ([], [], 2)
    assert (report.steps, report.steps_with_totals, report.compared_steps, report.distinct_ids) == (5, 5, 3, 12)
    assert report.epochs == 2.0
    numbers_only = check_ledger(earlier + later, None)
    assert (numbers_only.steps_before_change, numbers_only.compared_steps, numbers_only.distinct_ids) == (2, 0, 0)


@pytest.mark.parametrize(
    ("steps", "faults"),
    [
        ([1, 3], ["step 3 follows step 1"]),
        ([2, 1], ["step 2 follows step 0", "step 1 follows step 2"]),
    ],
)
def test_steps_out_of_order_are_told(steps: list[int], faults: list[str]) -> None:
    lines = [{"step": step, "first": i * BATCH, "count": BATCH, "ids": ""} for i, step in enumerate(steps)]
    assert check_ledger(lines, None).faults == faults


@pytest.mark.parametrize(
    ("steps", "tokens", "expected"),
    [(6, 36, [6]), (6, 71, [6]), (6, 72, [3, 6]), (6, 108, [2, 4, 6]), (6, 1000, [1, 2, 3, 4, 5, 6]), (5, 72, [2, 5])],
)
def test_the_steps_that_are_read_again_are_spread_over_the_run(
    source: SampleSource, steps: int, tokens: int, expected: list[int]
) -> None:
    """At least one is read, and the last one always."""
    spans = ledger_module._find_spans(add_totals(ledger(source, steps), source))
    selected = ledger_module._select_evenly(spans, 8, tokens)
    assert [span.step for span in selected] == expected
    assert ledger_module._select_evenly([], 8, tokens) == []


def test_the_keys_of_json_output_are_stable(source: SampleSource, tmp_path: Path) -> None:
    """Other programs read these keys, whatever the fields of the report are called."""
    (tmp_path / "samples").mkdir()
    (tmp_path / "config.toml").write_text("[model]\n")
    records = "".join(json.dumps(line) + "\n" for line in ledger(source, 2))
    (tmp_path / "samples" / "ledger.jsonl").write_text(records)
    result = CliRunner().invoke(app, ["data", "ledger", str(tmp_path), "--no-draw", "--json"])
    keys = "steps samples distinct epochs recorded compared unknown steps_before_change lost_steps missing faults"
    assert list(json.loads(result.output)) == keys.split()


def write_run(folder: Path, records: list[dict[str, Any]], saved_step: int) -> None:
    (folder / "samples").mkdir()
    (folder / "config.toml").write_text("[model]\n")
    (folder / "samples" / "ledger.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    event = {"event": "checkpoint_saved", "step": saved_step}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")


def test_a_truncated_ledger_proves_its_own_steps_only(source: SampleSource, tmp_path: Path) -> None:
    write_run(tmp_path, ledger(source, 3), saved_step=6)
    result = CliRunner().invoke(app, ["data", "ledger", str(tmp_path), "--no-draw"])
    assert "steps 4 to 6 have no line, but a checkpoint of step 6 was saved" in result.output
    record = json.loads(CliRunner().invoke(app, ["data", "ledger", str(tmp_path), "--no-draw", "--json"]).output)
    assert (record["steps"], record["lost_steps"]) == (3, 3)
    assert check_ledger(ledger(source, 3), None, saved_step=3).lost_steps == 0


def test_an_empty_ledger_is_no_proof(tmp_path: Path) -> None:
    write_run(tmp_path, [], saved_step=6)
    result = CliRunner().invoke(app, ["data", "ledger", str(tmp_path), "--no-draw"])
    assert isinstance(result.exception, DataError)
    assert "has no steps" in str(result.exception)


@pytest.mark.parametrize("damage", [{"step": None}, {"first": "0"}, {"count": -1}, {"step": True}])
def test_a_line_without_samples_is_refused(source: SampleSource, damage: dict[str, Any]) -> None:
    lines = ledger(source, 3)
    lines[1] = lines[1] | damage
    with pytest.raises(DataError, match="line 2 of the ledger"):
        check_ledger(lines, source)
    with pytest.raises(DataError, match="line 2 of the ledger"):
        find_step_samples(lines, 3, BATCH)
    del lines[1]["first"]
    with pytest.raises(DataError, match="line 2 of the ledger"):
        check_ledger(lines, None)


def test_a_line_with_more_samples_than_a_step_can_have_is_refused() -> None:
    """A list of its samples would need terabytes."""
    for count in (10**12, -1, 2.0):
        with pytest.raises(DataError, match="line 1 of the ledger"):
            check_ledger([{"step": 1, "first": 0, "count": count}], None)
    report = check_ledger([{"step": 1, "first": 0, "count": 8}], None)
    assert not report.faults
