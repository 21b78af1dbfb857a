"""Lines of a run's steps: they fit the terminal, and what is left is judged by warm steps."""

from __future__ import annotations

import io
import sys

import pytest

from megascale.config import load
from megascale.observe import metrics
from megascale.observe.metrics import Terminal

RECORD = {
    "loss": 2.81671, "learning_rate": 0.00123, "grad_norm": 1.1312, "tokens_per_second": 123456.0, "memory_gib": 135.62
}  # fmt: skip


def lines(capsys, records, steps=1150, interval=1):
    terminal = Terminal(steps, interval, live=False)
    for record in records:
        terminal.write(record)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("more", [{}, {"mfu": 0.4123}, {"mfu": 0.4, "skipped_steps": 3}])
@pytest.mark.parametrize("steps", [1150, 500_000])
def test_lines_fit_80_columns(capsys, monkeypatch, more, steps):
    monkeypatch.delenv("COLUMNS", raising=False)
    result = lines(capsys, [{"step": steps - 9 + i, **RECORD, **more} for i in range(9)], steps)
    assert max(map(len, result)) <= 80
    assert "loss 2.817" in result[-1]
    assert "123.5k tok/s" in result[-1]


def test_nothing_is_left_out_where_there_is_room(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    result = lines(capsys, [{"step": i, **RECORD, "mfu": 0.4123} for i in range(1, 6)])
    assert result[-1].startswith("step 5/1150  loss 2.817  lr 1.2e-3  norm 1.13  123.5k tok/s  MFU 41%  136 GiB  ")


def test_the_least_important_value_goes_first_and_only_if_it_must(capsys, monkeypatch):
    record = {"step": 1, **RECORD, "mfu": 0.4123}
    monkeypatch.setenv("COLUMNS", "120")
    (full,) = lines(capsys, [record])
    assert full.endswith("  136 GiB")
    monkeypatch.setenv("COLUMNS", str(len(full)))
    assert lines(capsys, [record]) == [full]
    monkeypatch.setenv("COLUMNS", str(len(full) - 1))
    assert lines(capsys, [record]) == [full.removesuffix("  136 GiB")]


def test_the_time_left_is_that_of_warm_steps(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    times = iter([100.0, 101.0, 102.0, 103.0, 104.0])  # of steps 3 to 7; the first two are not asked
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(times))
    result = lines(capsys, [{"step": i, **RECORD} for i in range(1, 8)], steps=67)
    assert all("left" not in line for line in result[:3])
    assert [line.split("  ")[-1] for line in result[3:]] == ["1m03s left", "1m02s left", "1m01s left", "1m00s left"]


class Screen(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def test_the_bar_is_taken_away_and_the_cursor_comes_back(monkeypatch):
    """A terminal whose cursor stays hidden after the run is of no use."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    terminal = Terminal(100, 50, live=True)
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert hidden in screen.getvalue()
    terminal.write({"step": 1, **RECORD})
    terminal.print_line("a line [above] the bar")
    assert shown not in screen.getvalue()
    terminal.close()
    output = screen.getvalue()
    assert output.endswith(shown)
    assert "a line [above] the bar" in output
    assert "step 1/100" in output


def test_plain_lines_come_every_interval_and_at_both_ends(capsys):
    result = lines(capsys, [{"step": i, **RECORD} for i in range(5, 12)], steps=11, interval=4)
    assert [line.split()[1] for line in result] == ["5/11", "8/11", "11/11"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"valid_loss": 1.23456}, "step 3: held-out loss 1.2346"),
        ({"valid_loss": 1.0, "valid_tokens": 5, "valid_whole_tokens": 5}, "step 3: held-out loss 1.0000"),
        (
            {"valid_loss": 1.0, "valid_tokens": 5, "valid_whole_tokens": 9, "valid_whole_loss": 2.0},
            "step 3: held-out loss 1.0000, of the whole file 2.0000",
        ),
        ({"valid_loss": 1.0, "valid_bits_per_byte": 0.98765}, "step 3: held-out loss 1.0000  bits per byte 0.988"),
    ],
)
def test_an_evaluation_is_a_line(capsys, record, expected):
    assert lines(capsys, [{"step": 3, **record}], interval=100) == [expected]


@pytest.mark.parametrize(
    ("remaining", "expected"), [(59, "0m59s"), (3599, "59m59s"), (3600, "1h00m"), (36061, "10h01m")]
)
def test_a_long_time_left_is_in_hours(capsys, monkeypatch, remaining, expected):
    monkeypatch.setenv("COLUMNS", "120")
    times = iter([100.0, 101.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(times))
    result = lines(capsys, [{"step": i, **RECORD} for i in range(1, 5)], steps=4 + remaining)
    assert result[-1].endswith(f"  {expected} left")


def test_without_its_package_tensorboard_is_left_out(monkeypatch, tmp_path):
    request = metrics.SinkRequest(tmp_path, load(), 0)
    (board,) = metrics.open_sinks(request)
    board.close()
    monkeypatch.setattr(metrics, "has_tensorboard", lambda: False)
    assert list(metrics.open_sinks(request)) == []
