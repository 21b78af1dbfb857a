"""Progress lines of other trainers: every row of the table reads its example, and own patterns come first."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.config import load
from megascale.core.bounded_pattern import MAX_CHARACTERS
from megascale.errors import ConfigError
from megascale.resilience.agent.progress_patterns import BAR, SHIPPED, ProgressReader, Reading

EXPECTED = {
    "megascale.watch": Reading(20, loss=7.03125, grad_norm=1.25, tokens_per_second=7123.0),
    "torchtitan": Reading(20, loss=7.0312, grad_norm=1.2345, tokens_per_second=7123.0),
    "Megatron-LM": Reading(20, loss=10.41232, grad_norm=4.512, is_last_rank=True),
    "Megatron-Core": Reading(20, loss=4.6052),
    "Hugging Face Trainer": Reading(20, total=100),
    "Lightning": Reading(320, loss=7.031),
    "nanochat": Reading(20, loss=7.03125, grad_norm=0.4123, tokens_per_second=373644.0),
}


@pytest.mark.parametrize("row", SHIPPED, ids=lambda row: row.trainer)
def test_every_row_reads_its_example(row):
    assert ProgressReader([]).read(row.example) == EXPECTED[row.trainer]
    assert ProgressReader([]).read(f"\x1b[31m{row.example}\x1b[0m\r") == EXPECTED[row.trainer]


# Lines that the newest versions print, by their sources.
PRINTED = [
    # torchtitan 0.3.0, components/metrics.py, with the colours of a terminal
    (
        "[titan] 2026-11-27 08:00:00,123 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.13291  "
        "\x1b[38;2;180;60;0mgrad_norm:  1.4301  \x1b[38;2;54;234;195mmemory:  0.00GiB(0.00%)  \x1b[34mtps: 1,234  "
        "\x1b[36mtflops: 0.09  \x1b[35mmfu: N/A\x1b[39m",
        Reading(1, loss=8.13291, grad_norm=1.4301, tokens_per_second=1234.0),
    ),
    # the same at a validation, which is not a step of the training
    (
        "[titan] 2026-11-27 08:00:00,123 - root - INFO - \x1b[33mvalidate step: 20  \x1b[32mloss:  7.8120  "
        "\x1b[38;2;54;234;195mmemory:  0.00GiB(0.00%)  \x1b[34mtps: 2,345\x1b[39m",
        None,
    ),
    ("[titan] 2026-11-27 08:00:00,123 - root - INFO - Training starts at step 11", None),
    # the same on a pipeline stage without the loss
    (
        "[titan] 2026-11-27 08:00:00,123 - root - INFO - step: 20  loss: -1.00000  grad_norm:  1.4",
        Reading(20, grad_norm=1.4),
    ),
    # Megatron-LM, training/training.py: a step with experts, a skipped step without a loss, a validation
    (
        " [2026-11-27 08:00:00.123456] iteration       20/     100 | consumed samples:          320 | elapsed time per "
        "iteration (ms): 812.3 | throughput per GPU (TFLOP/s/GPU): 401.2 | learning rate: 1.000000E-04 | global batch "
        "size:    16 | lm loss: 1.041232E+01 | load_balancing_loss: 1.0E+00 | loss scale: 1.0 | grad norm: 4.512 | "
        "num zeros: 0 | params norm: 120.500 | number of skipped iterations:   0 | number of nan iterations:   0 |",
        Reading(20, loss=10.41232, grad_norm=4.512, is_last_rank=True),
    ),
    (
        " [2026-11-27 08:00:00] iteration       21/     100 | consumed samples:          336 | loss scale: 65536.0 | "
        "number of skipped iterations:   1 | number of nan iterations:   0 |",
        Reading(21, is_last_rank=True),
    ),
    # Python formats an infinite loss in capital letters, since Megatron-LM's format is {:.6E}.
    (
        " iteration       22/     100 | lm loss: INF | grad norm: 4.5 |",
        Reading(22, float("inf"), 4.5, is_last_rank=True),
    ),
    (" validation loss at iteration 20 on validation set | lm loss value: 9.1E+00 | lm loss PPL: 9.0E+03 | ", None),
    # Hugging Face Trainer 5: the bar at 0, a long run, and the line of its metrics
    ("  0%|          | 0/100 [00:00<?, ?it/s]", None),
    (" 20%|██        | 2000/10000 [27:13:04<108:52:16, 48.99s/it]", Reading(2000, total=10000)),
    ("{'loss': '7.031', 'grad_norm': '1.234', 'learning_rate': '4.5e-05', 'epoch': '0.2'}", None),
    # Lightning 2.6: the bar of an epoch, a dataset of unknown length, the bar of a validation
    (
        "Epoch 3:  20%|██        | 20/100 [00:14<00:56,  1.42it/s, v_num=0, train/loss_step=7.030, lr=0.001]",
        Reading(320, loss=7.03),
    ),
    ("Epoch 0: : 20it [00:14,  1.42it/s, v_num=0]", None),
    ("Validation DataLoader 0:  20%|██        | 20/100 [00:14<00:56,  1.42it/s]", None),
    # nanochat: scripts/base_train.py, and scripts/chat_sft.py, which has no total
    (
        "step 00020/21400 (0.09%) | loss: 7.031250 | lrm: 1.00 | dt: 1403.20ms | tok/sec: 373,644 | bf16_mfu: 48.12 | "
        "epoch: 1 pq: 0 rg: 12 | total time: 0.23m | eta: 498.4m",
        Reading(20, loss=7.03125, tokens_per_second=373644.0),
    ),
    (
        "step 00020 (1.25%) | loss: 1.031250 | lrm: 1.00 | dt: 403.20ms | tok/sec: 1,300,000 | mfu: 48.12 | epoch: 1 | "
        "total time: 0.23m",
        Reading(20, loss=1.03125, tokens_per_second=1300000.0),
    ),
    ("Step 00250 | Validation bpb: 1.012345", None),
]


@pytest.mark.parametrize(("line", "reading"), PRINTED)
def test_lines_of_the_newest_versions_are_read(line, reading):
    assert ProgressReader([]).read(line) == reading


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


@pytest.mark.parametrize(("text", "reading"), [("-5", None), ("1,005", Reading(1005)), ("1.5", None), ("", None)])
def test_steps_are_whole_numbers_from_0(text, reading):
    assert ProgressReader([r"at (?P<step>\S*)$"]).read(f"at {text}") == reading


ADVERSARIAL = [
    "1" * 9000,
    "Epoch 1:" * 900,
    "Epoch 1: 1/2 [" * 900,
    "step: 1 loss:" * 900,
    " " * 9000,
    "\x1b[1" * 60000,
]


def test_shipped_patterns_take_little_time_on_any_line():
    """The limit is ten times what they take."""
    reader = ProgressReader([])
    start = time.thread_time()
    for line in ADVERSARIAL:
        reader.read(line)
        BAR.search(line[:MAX_CHARACTERS])
    assert time.thread_time() - start < 0.3


def test_a_pattern_of_exponential_time_is_switched_off_and_the_shipped_ones_stay():
    reader = ProgressReader([r"(?P<step>(x+x+)+)\1y"])
    assert reader.read("step: 5 loss: 1.0") == Reading(5, loss=1.0)
    start = time.thread_time()
    for _ in range(200):
        assert reader.read("x" * 3000) is None
    assert time.thread_time() - start < 5.0
    assert "foreign.patterns has '(?P<step>(x+x+)+)" in reader.describe_problems()
    assert reader.read("step: 6 loss: 1.0") == Reading(6, loss=1.0)


@given(st.text())
def test_any_line_is_read_without_an_error(line):
    reading = ProgressReader([]).read(line)
    assert reading is None or reading.step >= 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--foreign.patterns=['step']", "without a group for the step"),
        ("--foreign.patterns=['(']", "not a regular expression"),
        ("--foreign.patterns=['(?P<step>[0-9]*)']", "matches an empty line"),
        ("--foreign.patterns=['(?P<step>1)/(?P<epoch_steps>2)']", "none for the epoch"),
        ("--foreign.per_node=2", "without a command"),
    ],
)
def test_wrong_settings_are_refused_with_the_remedy(override, message):
    with pytest.raises(ConfigError, match=message):
        load(None, [override])
