"""The export of a job's metrics and recoveries to an OpenTelemetry collector (`resilience.otlp`)."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from megascale.observe.open_telemetry import Telemetry

if TYPE_CHECKING:
    from megascale.resilience.driver.api.metrics import JobMetrics
    from megascale.resilience.driver.driver import Driver


class TelemetryExport:
    """Sends to the collector every `resilience.otlp_interval` seconds, and once more at the end of the driver."""

    def __init__(self, driver: Driver, job_metrics: JobMetrics) -> None:
        self._driver = driver
        self._job_metrics = job_metrics
        self._interval = driver.limits.otlp_interval
        self._telemetry = Telemetry(driver.limits.otlp, driver.run_folder, job_metrics.labels, begin=time.time())
        self._lock = asyncio.Lock()
        self._is_reported = False

    async def keep_sending(self) -> None:
        """Send again and again; never returns."""
        while True:
            await self._send()
            await asyncio.sleep(self._interval)

    async def _send(self) -> None:
        async with self._lock:
            families = await self._job_metrics.collect_families()
            # A collector that does not answer must delay no heartbeat.
            is_complete = await asyncio.to_thread(self._telemetry.send, families, time.time())
        if not is_complete and not self._is_reported:
            endpoint = self._driver.limits.otlp
            self._driver.log_line("driver", f"resilience.otlp={endpoint} takes no metrics; it is tried again")
        self._is_reported = not is_complete

    async def close(self) -> None:
        """Send the end of the job and close the connections."""
        await self._send()
        await asyncio.to_thread(self._telemetry.close)
