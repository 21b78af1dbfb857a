"""Metrics and recoveries at a receiver that decodes OTLP: names, units, values, attributes, and spans' times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megascale.core import strict_json
from megascale.observe.prometheus import Family

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install -e '.[otel]'")

from megascale.observe.open_telemetry import RecoveryTracker, Telemetry
from tests.otlp_collector import Collector, read_attributes

LABELS = {"run": "demo", "job_name": "nightly"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    receiver = Collector()
    yield receiver
    receiver.close()


FAULT = (
    {"time": 90.0, "event": "attempt_started", "attempt": 1},
    {"time": 95.0, "event": "first_step", "attempt": 1},
    {"time": 98.0, "event": "throughput_drop", "action": "alert", "attempt": 1},
    {"time": 100.0, "event": "process_exit", "nodes": ["n2"], "evidence": ["rank 3 ended"], "attempt": 1},
    {"time": 101.0, "event": "out_of_memory", "nodes": ["n2"], "evidence": ["killed"], "attempt": 1},
    {"time": 101.5, "event": "recovery_action", "action": "spare", "attempt": 1},
    {"time": 103.0, "event": "attempt_started", "attempt": 2},
    {"time": 110.0, "event": "first_step", "attempt": 2},
)


def write_events(run, events):
    with open(run / "events.jsonl", "a") as out:
        for event in events:
            out.write(strict_json.dumps(event) + "\n")


def test_metrics_arrive_with_units_labels_and_kinds(collector, tmp_path):
    telemetry = Telemetry(collector.url, tmp_path, LABELS, begin=50.0)
    families = [
        Family("megascale_mfu_ratio", "gauge", "MFU.").add(0.5),
        Family("megascale_restarts_total", "counter", "Restarts.").add(2, cause="hang").add(1, cause="node_lost"),
        Family("megascale_empty", "gauge", "Without samples."),
    ]
    assert telemetry.send(families, 60.0)
    telemetry.close()
    metrics = collector.read_metrics()
    assert set(metrics) == {"megascale_mfu_ratio", "megascale_restarts"}
    (point,) = metrics["megascale_mfu_ratio"].gauge.data_points
    assert (point.as_double, point.time_unix_nano) == (0.5, 60_000_000_000)
    assert metrics["megascale_mfu_ratio"].unit == "1"
    total = metrics["megascale_restarts"].sum
    assert total.is_monotonic
    assert {point.start_time_unix_nano for point in total.data_points} == {50_000_000_000}
    counts = {read_attributes(point.attributes)["cause"]: point.as_double for point in total.data_points}
    assert counts == {"hang": 2.0, "node_lost": 1.0}
    assert read_attributes(point.attributes) == LABELS
    resource = read_attributes(collector.metrics[-1].resource_metrics[0].resource.attributes)
    assert resource["service.name"] == "megascale"
    assert resource["megascale.run"] == "demo"
    assert not collector.traces


def test_recovery_is_a_trace_from_the_fault_to_the_first_step(collector, tmp_path):
    telemetry = Telemetry(collector.url, tmp_path, LABELS, begin=50.0)
    write_events(tmp_path, FAULT[:-1])
    assert telemetry.send([], 105.0)
    assert not collector.traces
    write_events(tmp_path, FAULT[-1:])
    assert telemetry.send([], 111.0)
    spans = collector.read_spans()
    times = {name: (span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9) for name, span in spans.items()}
    assert times == {"recovery": (100, 110), "decide": (100, 101.5), "prepare": (101.5, 103), "start": (103, 110)}
    root = spans.pop("recovery")
    assert not root.parent_span_id
    assert {span.parent_span_id for span in spans.values()} == {root.span_id}
    assert {span.trace_id for span in spans.values()} == {root.trace_id}
    assert len({span.span_id for span in spans.values()}) == 3
    assert read_attributes(root.attributes) == {
        "megascale.cause": "out of memory",
        "megascale.action": "spare",
        "megascale.attempt": 2,
        "megascale.nodes": ["n2"],
        "megascale.evidence": ["rank 3 ended", "killed"],
    }
    assert telemetry.send([], 112.0)
    assert len(collector.traces) == 1
    telemetry.close()


def test_spans_wait_for_a_collector_that_refuses(collector, tmp_path):
    telemetry = Telemetry(collector.url, tmp_path, LABELS, begin=50.0, timeout=1.0)
    write_events(tmp_path, FAULT)
    collector.status = 400
    assert not telemetry.send([Family("megascale_step", "gauge", "Step.").add(1)], 111.0)
    collector.status = 200
    assert telemetry.send([Family("megascale_step", "gauge", "Step.").add(2)], 112.0)
    assert "recovery" in collector.read_spans()
    telemetry.close()


def test_recoveries_before_this_driver_are_not_sent_again(collector, tmp_path):
    write_events(tmp_path, FAULT)
    telemetry = Telemetry(collector.url, tmp_path, LABELS, begin=200.0)
    assert telemetry.send([], 201.0)
    assert not collector.traces
    telemetry.close()


def test_fault_without_a_new_attempt_is_no_recovery():
    tracker = RecoveryTracker()
    events = [FAULT[3], {"time": 105.0, "event": "job_failed"}, FAULT[0], FAULT[1], {"time": "x", "event": "hang"}]
    assert [tracker.add_event(event) for event in events] == [None] * 5


def test_a_damaged_attempt_of_an_event_stops_no_export(collector, tmp_path):
    damaged = [event | {"attempt": "?"} for event in FAULT]
    write_events(tmp_path, damaged)
    telemetry = Telemetry(collector.url, tmp_path, LABELS, begin=50.0)
    assert telemetry.send([], 120.0)
    telemetry.close()
    assert read_attributes(collector.read_spans()["recovery"].attributes)["megascale.attempt"] == 0
