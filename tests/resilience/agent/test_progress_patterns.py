"""Progress lines of other trainers: every row of the table reads its example, and own patterns come first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.config import load
from megascale.errors import ConfigError
from megascale.resilience.agent.progress_patterns import SHIPPED, ProgressReader, Reading

EXPECTED = {
    "megascale.watch": Reading(20, loss=7.03125, grad_norm=1.25, tokens_per_second=7123.0),
    "torchtitan": Reading(20, loss=7.0312, grad_norm=1.2345, tokens_per_second=7123.0),
    "Megatron-LM": Reading(20, loss=10.41232, grad_norm=4.512, is_last_rank=True),
    "Hugging Face Trainer": Reading(20, total=100),
    "Lightning": Reading(320, loss=7.031),
    "nanochat": Reading(20, loss=7.03125, grad_norm=0.4123, tokens_per_second=373644.0),
}


@pytest.mark.parametrize("row", SHIPPED, ids=lambda row: row.trainer)
def test_every_row_reads_its_example(row):
    assert ProgressReader([]).read(row.example) == EXPECTED[row.trainer]
    assert ProgressReader([]).read(f"\x1b[31m{row.example}\x1b[0m\r") == EXPECTED[row.trainer]


def test_own_patterns_come_first_and_other_lines_are_no_progress():
    reader = ProgressReader([r"it (?P<step>\d+) L (?P<loss>\S+)"])
    assert reader.read("it 7 L 0.5") == Reading(7, loss=0.5)
    assert reader.read("it 7 L broken") is None
    assert reader.read("Saving checkpoint at step 7") is None


@pytest.mark.parametrize("name", ["Map", "Loading weights", "Validation DataLoader 0"])
def test_bars_of_other_work_are_no_steps(name):
    assert ProgressReader([]).read(f"{name}:  20%|##        | 20/100 [00:14<00:56,  1.42it/s]") is None


@pytest.mark.parametrize("digits", [17, 3000])
def test_a_number_that_no_heartbeat_carries_is_no_step(digits):
    assert ProgressReader([]).read(f"step: {'9' * digits} loss: 1.0") is None


@given(st.text())
def test_any_line_is_read_without_an_error(line):
    reading = ProgressReader([]).read(line)
    assert reading is None or reading.step >= 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--foreign.patterns=['step']", "without a group for the step"),
        ("--foreign.patterns=['(']", "not a regular expression"),
        ("--foreign.patterns=['(?P<step>1)/(?P<epoch_steps>2)']", "none for the epoch"),
        ("--foreign.per_node=2", "without a command"),
    ],
)
def test_wrong_settings_are_refused_with_the_remedy(override, message):
    with pytest.raises(ConfigError, match=message):
        load(None, [override])
