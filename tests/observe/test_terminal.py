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


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(0.4, "0"), (999.4, "999"), (1000.0, "1.0k"), (12340.0, "12.3k"), (1e6, "1.00M"), (2.345e6, "2.35M")],
)
def test_rates_are_short(capsys, rate, expected):
    (line,) = lines(capsys, [{"step": 1, **RECORD, "tokens_per_second": rate}])
    assert f"  {expected} tok/s" in line


@pytest.mark.parametrize(("memory", "expected"), [(0.04, "0.0"), (9.94, "9.9"), (10.0, "10"), (135.6, "136")])
def test_little_memory_has_a_decimal(capsys, monkeypatch, memory, expected):
    monkeypatch.setenv("COLUMNS", "120")
    (line,) = lines(capsys, [{"step": 1, **RECORD, "memory_gib": memory}])
    assert line.endswith(f"  {expected} GiB")


def test_every_value_has_its_place(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    more = {"skipped_steps": 2, "float8_clipped": 0.00123, "float8_flushed": 0.02, "mfu": 0.414}
    (line,) = lines(capsys, [{"step": 1, **RECORD, **more}])
    assert line == (
        "step 1/1150  loss 2.817  lr 1.2e-3  norm 1.13  123.5k tok/s  2 steps skipped  "
        "float8 clipped 1e-03, flushed 2e-02  MFU 41%  136 GiB"
    )


def test_values_leave_a_narrow_line_by_their_weight(capsys, monkeypatch):
    """Memory first, then the learning rate and the norm; loss and rate stay however narrow the terminal is."""
    record = {"step": 1, **RECORD}
    full = "step 1/1150  loss 2.817  lr 1.2e-3  norm 1.13  123.5k tok/s  136 GiB"
    for missing in ("  136 GiB", "  lr 1.2e-3", "  norm 1.13"):
        monkeypatch.setenv("COLUMNS", str(len(full)))
        assert lines(capsys, [record]) == [full]
        monkeypatch.setenv("COLUMNS", str(len(full) - 1))
        full = full.replace(missing, "")
        assert lines(capsys, [record]) == [full]
    monkeypatch.setenv("COLUMNS", "20")
    assert lines(capsys, [record]) == [full]


def test_the_pace_is_that_of_the_last_hundred_steps(capsys, monkeypatch):
    """Step 3 took 1,000 s; from the 103rd step on it does not count any more."""
    monkeypatch.setenv("COLUMNS", "120")
    times = iter([0.0, *(1000.0 + i for i in range(200))])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(times))
    result = lines(capsys, [{"step": i, **RECORD} for i in range(1, 105)], steps=204)
    assert result[101].endswith("  18m51s left")  # 100 marks: 1,098 s for 99 steps, 102 steps to go
    assert result[102].endswith("  1m41s left")


def test_the_bar_shows_each_step(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stdout", Screen())
    terminal = Terminal(100, 50, live=True)
    for step in (7, 8):
        terminal.write({"step": step, **RECORD, "mfu": 0.4})
    assert terminal._bar is not None
    (task,) = terminal._bar.tasks
    assert (task.completed, task.total) == (8, 100)
    assert task.description == "step 8/100  loss 2.817  lr 1.2e-3  norm 1.13  123.5k tok/s  MFU 40%  136 GiB"
    terminal.close()
    # The bar and a blank take 21 columns.
    for columns, is_short in ((21 + len(task.description), False), (20 + len(task.description), True)):
        monkeypatch.setenv("COLUMNS", str(columns))
        terminal = Terminal(100, 50, live=True)
        terminal.write({"step": 8, **RECORD, "mfu": 0.4})
        assert terminal._bar is not None
        assert ("GiB" not in terminal._bar.tasks[0].description) == is_short
        terminal.close()


def test_without_a_terminal_lines_are_plain(monkeypatch, capsys):
    terminal = Terminal(100, 1, live=True)  # what pytest captures is no terminal
    assert terminal._bar is None
    terminal.print_line("a [line]")
    terminal.close()
    assert capsys.readouterr().out == "a [line]\n"
    monkeypatch.setattr(sys, "stdout", None)
    assert Terminal(100, 1, live=True)._bar is None


def test_a_lost_terminal_ends_nothing(monkeypatch):
    class Lost(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Lost())
    Terminal(100, 1, live=False).write({"step": 1, **RECORD})
