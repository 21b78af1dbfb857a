"""The export of a job's metrics and recoveries to an OpenTelemetry collector (`resilience.otlp`)."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from megascale.observe.open_telemetry import Telemetry

if TYPE_CHECKING:
    from megascale.resilience.driver.api.metrics import JobMetrics
    from megascale.resilience.driver.driver import Driver


log = logging.getLogger("megascale.driver")


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
        """Send the end of the job and close the connections. A collector that is away costs seconds and no error."""
        self._telemetry.close()
        try:
            async with self._lock:
                families = await self._job_metrics.collect_families()
                is_complete = await asyncio.to_thread(self._telemetry.send_last, families, time.time())
        except Exception as error:  # the driver's exit code says how the job ended
            log.error("the end of the job could not be exported: %r", error)
            return
        if not is_complete:
            endpoint = self._driver.limits.otlp
            self._driver.log_line("driver", f"resilience.otlp={endpoint} did not take the end of the job")
