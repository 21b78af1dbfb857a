"""The end of the export to a collector that is away or fails: seconds at most, and no error of the driver."""

from __future__ import annotations

import asyncio
import socket
import time
from types import SimpleNamespace

import pytest

from megascale.core import strict_json
from megascale.observe.prometheus import Family

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install -e '.[otel]'")

from megascale.resilience.driver.api.metrics import TelemetryExport

RECOVERY = (
    {"time": 100.0, "event": "process_exit"},
    {"time": 101.0, "event": "attempt_started", "attempt": 2},
    {"time": 4e9, "event": "first_step", "attempt": 2},
)


def make_export(run, port, collect_families, lines):
    """Return an export of the run folder to a local port, whose lines of the driver's log go to `lines`."""
    limits = SimpleNamespace(otlp=f"http://127.0.0.1:{port}", otlp_interval=15.0)
    driver = SimpleNamespace(limits=limits, run_folder=run, log_line=lambda source, line: lines.append(line))
    metrics = SimpleNamespace(labels={"run": "demo"}, collect_families=collect_families)
    return TelemetryExport(driver, metrics)


async def collect_families():
    return [Family("megascale_mfu_ratio", "gauge", "MFU.").add(0.5)]


async def fail():
    raise RuntimeError("no families")


def test_collector_that_hangs_costs_the_end_of_a_job_seconds(tmp_path):
    (tmp_path / "events.jsonl").write_text("".join(strict_json.dumps(event) + "\n" for event in RECOVERY))
    lines = []

    async def end(server):
        export = make_export(tmp_path, server.getsockname()[1], collect_families, lines)
        sending = asyncio.create_task(export.keep_sending())
        connection, _ = await asyncio.to_thread(server.accept)
        begin = time.monotonic()
        await export.close()
        seconds = time.monotonic() - begin
        sending.cancel()
        connection.close()
        return seconds

    with socket.create_server(("127.0.0.1", 0)) as server:
        # Four requests of five seconds each before the time limits of the end.
        assert asyncio.run(end(server)) < 12
    assert "did not accept the end of the job" in lines[-1]


def test_failure_of_the_last_export_leaves_the_exit_code_alone(tmp_path, caplog):
    export = make_export(tmp_path, 1, fail, [])
    asyncio.run(export.close())
    assert "no families" in caplog.text
