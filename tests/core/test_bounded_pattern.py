"""Expressions of users: bounded time on any line, and the results of Python's `re` otherwise."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.bounded_pattern import MAX_CHARACTERS, BoundedPattern
from megascale.errors import ConfigError
from megascale.resilience.agent.file_tails import LogFilter

EXPRESSIONS = [r"step (?P<step>\d+)", r"^it=(?P<step>[0-9,]+)\b.*?loss=(?P<loss>\S+)", r"(?i)Step:?\s*(?P<step>\d+)$"]
PIECES = st.sampled_from(["step ", "Step: ", "it=", "1,2", "7", " loss=", "0.5", "\n", "x" * 300, "é"])


@given(st.sampled_from(EXPRESSIONS), st.lists(PIECES, max_size=30).map("".join))
def test_a_search_gives_what_re_gives(expression, line):
    match = BoundedPattern("foreign.patterns", expression).search(line)
    expected = re.compile(expression).search(line[:MAX_CHARACTERS])
    assert (match and match.groupdict()) == (expected and expected.groupdict())


def test_a_fast_expression_stays_on_for_any_number_of_lines():
    pattern = BoundedPattern("foreign.patterns", EXPRESSIONS[0])
    for _ in range(20_000):
        assert pattern.search("[rank0] a line of the usual length, step 7") is not None
    assert not pattern.problem


def test_an_invalid_expression_is_refused():
    with pytest.raises(ConfigError, match=r"foreign.patterns has '\(', which is not a regular expression"):
        BoundedPattern("foreign.patterns", "(")


def test_a_filter_of_logs_goes_on_without_a_slow_expression(tmp_path):
    log = tmp_path / "rank-0.log"
    log.touch()
    log_filter = LogFilter([r"((x+x+)+)\1y", "out of memory"])
    log_filter.follow({0: (log, 0)})
    log.write_text(("x" * 2000 + "\n") * 100 + "out of memory\n")
    start = time.thread_time()
    log_filter.read_new_lines(None)
    assert time.thread_time() - start < 5.0
    assert [match.pattern for match in log_filter.take()] == ["out of memory"]
