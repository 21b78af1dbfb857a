"""JSON that others read: valid for all numbers, and the same numbers when read again."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from megascale.core import strict_json
from megascale.core.events import Event
from megascale.observe.metrics import JsonLines
from megascale.observe.plots import Curves, read_metrics
from megascale.resilience.agent.file_tails import MetricsTail
from megascale.resilience.driver.state.audit_log import AuditLog
from megascale.resilience.driver.state.journal import Journal
from megascale.train.run_folder import RunFolder

numbers = st.floats(allow_nan=True, allow_infinity=True)
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def read_strictly(text: str):
    """Read JSON as a reader other than Python's: a bare NaN is an error."""

    def refuse(name: str):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@given(trees)
def test_any_numbers_make_valid_json_and_come_back(tree):
    text = strict_json.dumps(tree)
    read_strictly(text)
    assert repr(strict_json.loads(text)) == repr(tree)
    assert repr(strict_json.loads(text.encode())) == repr(tree)


def test_metrics_and_events_of_a_loss_that_is_no_number_are_json_that_the_readers_here_take(tmp_path):
    run = RunFolder(tmp_path)
    run.create()
    sink = JsonLines(run.metrics)
    values = [1.0, math.nan, math.inf, -math.inf]
    for step, loss in enumerate(values, 1):
        record = {"step": step, "loss": loss, "grad_norm": loss, "seconds": 1.0, "learning_rate": 1e-3, "tokens": step}
        sink.write(record)
    sink.close()
    with open(run.metrics, "a") as out:  # as older versions wrote it
        out.write('{"step": 5, "loss": NaN, "grad_norm": Infinity, "seconds": 1.0, "learning_rate": 1, "tokens": 5}\n')
    run.append_event(Event.EVALUATED, loss=math.nan)
    journal, _ = Journal.take(tmp_path, 5.0)
    AuditLog(tmp_path, journal, lambda source, text: None).record("loss_spike", attempt=1, loss=math.inf)
    journal.close()
    for line in run.metrics.read_text().splitlines()[:-1] + run.events.read_text().splitlines():
        read_strictly(line)
    losses = values + [math.nan]
    assert repr([m.loss for m in MetricsTail(tmp_path).read_new_steps().steps]) == repr(losses)
    assert [math.isnan(v) for v in Curves.from_records("x", read_metrics(tmp_path), "tokens").loss] == [False] + [
        True
    ] * 4
    run.drop_steps_after(5)  # what an older version wrote becomes valid with the next resume
    assert [read_strictly(line)["loss"] for line in run.metrics.read_text().splitlines()][1:] == [
        "NaN",
        "Infinity",
        "-Infinity",
        "NaN",
    ]
