"""The ports of a driver: it serves agents, the API and metrics, and exports metrics, until the job has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from typing import TYPE_CHECKING

from megascale.core.events import Event
from megascale.core.failure import keep_running
from megascale.core.terminal import termination_signals
from megascale.errors import ConfigError, DataError
from megascale.resilience.driver.driver import Driver
from megascale.resilience.driver.state.job_state import ENDED
from megascale.resilience.protocol import contact

if TYPE_CHECKING:
    from megascale.resilience.driver.api.metrics import JobMetrics, Scrapes, ScrapeTargets, TelemetryExport
    from megascale.services.limited_listener import LimitedListener

log = logging.getLogger("megascale.driver")


async def serve(driver: Driver) -> int:
    """Serve agents, the API and the metrics, and run the driver; return the job's exit code."""
    from megascale.resilience.driver.api import http_api
    from megascale.resilience.driver.api.access import create_agents_tls, describe_open_addresses
    from megascale.resilience.driver.api.metrics import JobMetrics

    cluster = driver.nodes.cluster
    limits = driver.limits
    loop = asyncio.get_running_loop()
    for signal_number in termination_signals():
        # A cluster that hands the job over to another driver ends this one by SIGTERM. SIGINT is from a person.
        if signal_number != signal.SIGINT and cluster.hands_over:
            loop.add_signal_handler(signal_number, driver.hand_over)
        else:
            loop.add_signal_handler(signal_number, driver.operations.interrupt)
    port = limits.port
    if not port and cluster.has_unlisted_agents:
        # Agents that the cluster does not know cannot learn a new address. They reconnect to the last driver's port.
        with contextlib.suppress(DataError):
            port = contact.read_contact(driver.run_folder).agents[1]
    tls = create_agents_tls(limits.listen, limits.tls_certificate, limits.tls_key)
    try:
        await driver.open(tls, port)
    except OSError as error:
        raise make_listen_error("port", limits.listen, port, error) from None
    job_metrics = JobMetrics(driver)
    metrics_page = await _serve_metrics(driver, job_metrics)
    try:
        url, close_api = await http_api.serve(driver, limits.listen, limits.api_port, job_metrics)
    except OSError as error:
        raise make_listen_error("api_port", limits.listen, limits.api_port, error) from None
    targets = _write_targets(driver)
    export = _start_export(driver, job_metrics)
    driver.announce(url)
    warnings = describe_open_addresses(limits, driver.announcement.address, url)
    if warnings:
        driver.record_event(Event.ADDRESS_OPEN, evidence=warnings)
    try:
        code = await driver.run()
        await await_last_scrape(driver, job_metrics.scrapes)
        return code
    finally:
        if targets is not None:
            targets.remove_if_ended()
        if export is not None:
            await export.close()
        if metrics_page is not None:
            await metrics_page.close()
        await close_api()


def _write_targets(driver: Driver) -> ScrapeTargets | None:
    """Write the file for Prometheus' discovery and keep it current, None if `resilience.targets` is empty."""
    from megascale.resilience.driver.api.metrics import ScrapeTargets

    if not driver.limits.targets:
        return None
    targets = ScrapeTargets(driver)
    try:
        targets.write()
    except OSError as error:
        raise ConfigError(
            f"resilience.targets={driver.limits.targets} cannot be written: {error.strerror or error}; name an "
            "existing folder that this user may write"
        ) from None
    driver.tasks.spawn(keep_running(targets.keep_current, f"writing to {driver.limits.targets}", log))
    return targets


def _start_export(driver: Driver, job_metrics: JobMetrics) -> TelemetryExport | None:
    """Start the export to `resilience.otlp`, None if it is empty."""
    if not driver.limits.otlp:
        return None
    from megascale.resilience.driver.api.metrics import TelemetryExport

    export = TelemetryExport(driver, job_metrics)
    driver.tasks.spawn(keep_running(export.keep_sending, f"the export to {driver.limits.otlp}", log))
    return export


async def _serve_metrics(driver: Driver, job_metrics: JobMetrics) -> LimitedListener | None:
    """Serve the pages without a token at `resilience.driver_metrics`, None if it is empty."""
    from megascale.resilience.driver.api.metrics import judge_health
    from megascale.resilience.metrics_page import MetricsPage

    address = driver.limits.driver_metrics
    if not address:
        return None
    page = MetricsPage(job_metrics.read_families, lambda: judge_health(driver), job_metrics.labels)
    try:
        return await page.serve(address)
    except OSError as error:
        raise ConfigError(
            f"the driver cannot serve metrics at resilience.driver_metrics={address}: {error.strerror or error}; use "
            "another port and an address of this host"
        ) from None


async def await_last_scrape(driver: Driver, scrapes: Scrapes) -> None:
    """Wait until a Prometheus that reads the metrics has read the job's end; a signal ends the wait."""
    seconds = scrapes.compute_wait(driver.job.phase_entered, time.monotonic())
    if driver.job.phase not in ENDED or seconds <= 0:
        return
    driver.log_line("driver", f"waits up to {seconds:.0f} s until Prometheus has read the job's end")
    loop = asyncio.get_running_loop()
    scrape_wait = loop.create_task(scrapes.wait(seconds))
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, scrape_wait.cancel)
    await asyncio.wait({scrape_wait})


def make_listen_error(key: str, host: str, port: int, error: OSError) -> ConfigError:
    """Return the error for an address that cannot be used. `key` is the setting of the port."""
    # The resolver's error numbers, for a name without an address, are below zero.
    number = error.errno or 0
    reason = error.strerror or str(error)
    if number > 0:
        reason = os.strerror(number)
    return ConfigError(
        f"the driver cannot listen on resilience.listen={host} with resilience.{key}={port}: {reason}; use another "
        "port, 0 for any free one, and an address of this host"
    )
