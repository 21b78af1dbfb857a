"""Export of a run's metrics and recoveries to an OpenTelemetry collector, by OTLP over HTTP (the extra `otel`).

The metrics are the same as on the driver's page /metrics: families of samples (prometheus/__init__.py). Every recovery
is an OpenTelemetry trace. Its root span lasts from the first fault to the first step after it; child spans are the
decision, the preparation and the start of the trainers. These spans have nothing to do with the recorded spans of
steps. The exporters run without threads of their own, since the caller decides when to send.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from megascale import __version__
from megascale.core.events import Event, is_plausible_time
from megascale.core.strict_json import to_float
from megascale.observe.dashboard.effective_time import CAUSES, choose_cause
from megascale.observe.dashboard.metric_columns import RecordTail
from megascale.observe.prometheus import Family

log = logging.getLogger("megascale.otel")

_SCOPE = InstrumentationScope("megascale", __version__)
_MAX_UNSENT_SPANS = 1000
_MAX_EVIDENCE = 8  # sentences of evidence in a span
_MAX_ATTEMPTS = 1 << 31  # a larger attempt number comes from a damaged record
_LAST_TIMEOUT_SECONDS = 1.0  # time limit of each request at the end of the driver
# OpenTelemetry's units (UCUM), by the unit at the end of a metric's name.
_UNITS = {
    "bytes_per_second": "By/s",
    "tokens_per_second": "{token}/s",
    "seconds": "s",
    "celsius": "Cel",
    "watts": "W",
    "ratio": "1",
    "steps": "{step}",
}


@dataclass
class Recovery:
    """A recovery from one or several faults. Times are seconds since 1970; 0.0 before the event has happened.

    Attributes:
        causes, evidence, nodes: causes of all faults, sentences about them, and the affected nodes.
        decided: time of the driver's last decision; it may stay 0.0.
        started: time at which the successful attempt began.
        end: time of the first step of that attempt.
        action: last action of the driver, such as respawn or spare.
        attempt: number of the successful attempt.
    """

    begin: float
    causes: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    nodes: set[str] = field(default_factory=set)
    decided: float = 0.0
    started: float = 0.0
    end: float = 0.0
    action: str = ""
    attempt: int = 0


class RecoveryTracker:
    """Finds recoveries in a sequence of a run's events."""

    def __init__(self) -> None:
        self._current: Recovery | None = None

    def add_event(self, event: Mapping[str, Any]) -> Recovery | None:
        """Add the next event, and return the recovery that it completes, or None."""
        event_time = to_float(event.get("time"))
        if not is_plausible_time(event_time):
            return None
        kind = str(event.get("event"))
        if kind in CAUSES and event.get("action") != "alert":  # an alert has no consequence
            self._add_cause(kind, event_time, event)
        current = self._current
        if current is None:
            return None
        if kind == Event.RECOVERY_ACTION:
            current.decided = event_time
            current.action = str(event.get("action", ""))
        elif kind == Event.ATTEMPT_STARTED:
            current.started = event_time
            attempt = to_float(event.get("attempt"))
            current.attempt = int(attempt) if 0 <= attempt < _MAX_ATTEMPTS else 0
        elif kind == Event.FIRST_STEP and current.started:
            current.end = event_time
            self._current = None
            return current
        elif kind in (Event.JOB_DONE, Event.JOB_FAILED):
            self._current = None
        return None

    def _add_cause(self, kind: str, event_time: float, event: Mapping[str, Any]) -> None:
        """Add a fault to the present recovery, or begin a recovery with it."""
        if self._current is None:
            self._current = Recovery(event_time)
        self._current.causes.append(CAUSES[Event(kind)])
        evidence = event.get("evidence")
        if isinstance(evidence, list):
            self._current.evidence += [str(text)[:500] for text in evidence]
        nodes = event.get("nodes")
        if isinstance(nodes, list):
            self._current.nodes |= {str(name)[:100] for name in nodes}


class Telemetry:
    """Sends metrics and recoveries of one run.

    Args:
        endpoint: base URL of the collector, such as http://collector:4318. The exporters also read environment
            variables such as OTEL_EXPORTER_OTLP_HEADERS.
        labels: attributes of the resource, which identify the run.
        begin: begin of this driver, seconds since 1970. An earlier driver has sent the recoveries that ended before it.
        timeout: time limit of a request with its repetitions, in seconds.
    """

    def __init__(
        self, endpoint: str, run: Path, labels: Mapping[str, str], *, begin: float, timeout: float = 3.0
    ) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._open_exporters(timeout)
        attributes = {"service.name": "megascale", "service.version": __version__}
        self._resource = Resource(attributes | {f"megascale.{name}": value for name, value in labels.items()})
        self._labels = dict(labels)
        self._begin = begin
        self._tail = RecordTail(run / "events.jsonl")
        self._tracker = RecoveryTracker()
        self._unsent_spans: deque[ReadableSpan] = deque(maxlen=_MAX_UNSENT_SPANS)

    def send(self, families: Iterable[Family], current_time: float) -> bool:
        """Send the metrics and the recoveries since the last call; return whether the collector received both.

        Spans that the collector did not receive are sent again by the next call. Metrics are not.
        """
        self._read_recoveries()
        metrics = self._convert_families(families, round(current_time * 1e9))
        are_metrics_sent = self._metric_exporter.export(metrics) is MetricExportResult.SUCCESS
        if not self._unsent_spans:
            return are_metrics_sent
        if self._span_exporter.export(list(self._unsent_spans)) is not SpanExportResult.SUCCESS:
            return False
        self._unsent_spans.clear()
        return are_metrics_sent

    def send_last(self, families: Iterable[Family], current_time: float) -> bool:
        """Open the connections again after `close`, send like `send` with a short time limit, and close them."""
        self._open_exporters(_LAST_TIMEOUT_SECONDS)
        is_complete = self.send(families, current_time)
        self.close()
        return is_complete

    def close(self) -> None:
        """Close the connections. If another thread is in `send`, it does not repeat its request."""
        self._metric_exporter.shutdown()
        self._span_exporter.shutdown()

    def _open_exporters(self, timeout: float) -> None:
        self._metric_exporter = OTLPMetricExporter(f"{self._endpoint}/v1/metrics", timeout=timeout)
        self._span_exporter = OTLPSpanExporter(f"{self._endpoint}/v1/traces", timeout=timeout)

    def _read_recoveries(self) -> None:
        """Make spans of the recoveries in new events."""
        _, records = self._tail.read_new_records()
        for record in records:
            recovery = self._tracker.add_event(record)
            if recovery is not None and recovery.end >= self._begin:
                self._unsent_spans.extend(self._make_spans(recovery))

    def _convert_families(self, families: Iterable[Family], time_ns: int) -> MetricsData:
        metrics = [self._convert_family(family, time_ns) for family in families if family.samples]
        scope = ScopeMetrics(_SCOPE, metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _convert_family(self, family: Family, time_ns: int) -> Metric:
        start_ns = round(self._begin * 1e9)
        points = [
            NumberDataPoint(self._labels | dict(labels), start_ns, time_ns, value) for labels, value in family.samples
        ]
        data: Gauge | Sum = Gauge(points)
        if family.kind == "counter":
            data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        # A collector that serves Prometheus adds _total itself.
        return Metric(family.name.removesuffix("_total"), family.help, _UNITS.get(family.unit, ""), data)

    def _make_spans(self, recovery: Recovery) -> list[ReadableSpan]:
        # The identifiers follow from the run and the fault, so a recovery that is sent twice is one trace.
        digest = hashlib.sha256(f"{self._labels} {recovery.begin}".encode()).digest()
        trace = int.from_bytes(digest[:16], "big")
        root = self._make_context(trace, digest[16:24])
        attributes = {
            "megascale.cause": choose_cause(recovery.causes),
            "megascale.action": recovery.action,
            "megascale.attempt": recovery.attempt,
            "megascale.nodes": sorted(recovery.nodes),
            "megascale.evidence": recovery.evidence[:_MAX_EVIDENCE],
        }
        # The phases must follow each other, also without a recorded decision or with different clocks of hosts.
        decided = min(max(recovery.begin, recovery.decided or recovery.started), recovery.started)
        phases = [
            ("decide", recovery.begin, decided),
            ("prepare", decided, recovery.started),
            ("start", recovery.started, recovery.end),
        ]
        root_times = (recovery.begin, recovery.end)
        spans = [self._make_span("recovery", root, parent=None, times=root_times, attributes=attributes)]
        for index, (name, begin, end) in enumerate(phases):
            context = self._make_context(trace, hashlib.sha256(digest + bytes([index])).digest()[:8])
            spans.append(self._make_span(name, context, parent=root, times=(begin, end), attributes={}))
        return spans

    @staticmethod
    def _make_context(trace: int, span: bytes) -> SpanContext:
        """Return the identity of a span: the numbers of its trace and of the span itself."""
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(trace, int.from_bytes(span, "big"), is_remote=False, trace_flags=flags)

    def _make_span(
        self,
        name: str,
        context: SpanContext,
        *,
        parent: SpanContext | None,
        times: tuple[float, float],
        attributes: Mapping[str, Any],
    ) -> ReadableSpan:
        """Return a span; `times` are its begin and end in seconds since 1970."""
        return ReadableSpan(
            name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            kind=SpanKind.INTERNAL,
            start_time=round(times[0] * 1e9),
            end_time=round(max(times) * 1e9),
            instrumentation_scope=_SCOPE,
        )
