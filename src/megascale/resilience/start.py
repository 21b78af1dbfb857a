"""Starts or takes over the driver of a run, in the foreground: what `megascale launch` does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from math import lcm

from megascale.config import Config, load
from megascale.core.events import Event
from megascale.errors import ConfigError, FitError
from megascale.resilience import contact
from megascale.resilience.cluster.local import LocalCluster
from megascale.resilience.driver import Driver
from megascale.resilience.health import gpu_count
from megascale.resilience.journal import FILE, Fenced, Journal, Reader
from megascale.resilience.machine import ENDED, Job, Phase


@dataclass(frozen=True)
class Size:
    """Ranks of a job on its nodes, and how the machine's GPUs are shared out (none: CPU)."""

    world: int
    ranks_per_node: int
    data: int
    devices: list[list[int]]


def size(config: Config, gpus: int) -> Size:
    """How many ranks a local job has. Raises FitError if layout, nodes and GPUs do not go together."""
    parallel, nodes = config.parallel, config.resilience.nodes
    model = parallel.tensor * parallel.pipeline
    slots = nodes + config.resilience.spares
    use_gpus = gpus > 0 and config.train.device != "cpu"
    per_node = gpus // slots if use_gpus else 0
    if use_gpus and not per_node:
        raise FitError(f"{slots} nodes and spares share {gpus} GPUs: lower --nodes or --spares to {gpus} in all")
    if parallel.data is not None:
        world = model * parallel.data
    else:
        world = (nodes * per_node) // lcm(model, nodes) * lcm(model, nodes) if use_gpus else lcm(model, nodes)
    if not world or world % nodes:
        raise FitError(
            f"{world or model} ranks (parallel.tensor x pipeline x data) do not divide evenly over "
            f"resilience.nodes={nodes}; change --nodes or parallel.data"
        )
    if use_gpus and world // nodes > per_node:
        raise FitError(f"{world // nodes} ranks a node but {per_node} GPUs for each of {slots} nodes and spares")
    devices = [list(range(i * per_node, (i + 1) * per_node)) for i in range(slots)] if use_gpus else []
    return Size(world, world // nodes, world // model, devices)


def prepare(config: Config) -> tuple[Config, Size]:
    """The configuration as the trainers will read it, and the job's size."""
    gpus = gpu_count()
    found = size(config, gpus)
    if not found.devices and config.train.threads is None:
        # Nodes on one machine share its cores.
        threads = max(1, (os.cpu_count() or 1) // found.world)
        config = config.model_copy(update={"train": config.train.model_copy(update={"threads": threads})})
    parallel = config.parallel.model_copy(update={"data": found.data, "gpus_per_host": found.ranks_per_node})
    return config.model_copy(update={"parallel": parallel}), found


def drive(config: Config, found: Size, say: Callable[[str, str], None]) -> int:
    """Run the driver until the job has ended; returns its exit code.

    A job whose driver died goes on where it is, with the settings it was started with; one that has ended starts
    again from its newest checkpoint. Raises ConfigError if another driver runs it.
    """
    run = config.run_folder.absolute()
    run.mkdir(parents=True, exist_ok=True)
    contact.make_token(run)
    known = 0
    with contextlib.suppress(Exception):
        known = contact.read_contact(run).epoch
    journal, damaged = Journal.take(run, config.resilience.lease, known)
    job = journal.job()
    if job is None or job.phase in ENDED:
        _write_settings(config)
        attempt, best = (job.attempt, job.step) if job is not None else (0, 0)
        job = Job(config.train.name, Phase.WAITING, attempt, (), found.ranks_per_node, found.data, step=best, best=best)
    settings = contact.folder(run) / "job.toml"
    mine, config = config, load(settings)
    if mine != config:
        say("driver", f"the running job keeps the settings it was started with ({settings}); stop it to change them")
    journal.save_job(job)
    cluster = LocalCluster(run, found.devices)
    driver = Driver(run, config, cluster, ["train", str(settings)], journal, job, say)
    if damaged:
        driver.note(Event.JOURNAL_DAMAGED, evidence=("the journal was damaged; it was set aside and begun anew",))
    try:
        return asyncio.run(_serve(driver))
    except Fenced as error:
        raise ConfigError(f"this driver ends without touching the job: {error}") from None
    finally:
        journal.close()


def is_running(config: Config) -> bool:
    """Whether the run's journal tells of a job that has not ended, which a driver would take over as it is."""
    run = config.run_folder.absolute()
    if not (run / FILE).exists():
        return False
    try:
        reader = Reader(run)
        try:
            return reader.job is not None and reader.job.phase not in ENDED
        finally:
            reader.close()
    except Exception:  # damaged: `drive` deals with it, and agents of the job may be at work
        return True


def _write_settings(config: Config) -> None:
    path = contact.folder(config.run_folder.absolute()) / "job.toml"
    path.write_text(config.to_toml())


async def _serve(driver: Driver) -> int:
    from megascale.resilience import api

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, driver.interrupt)
    limits = driver.limits
    try:
        await driver.open()
        url, end = await api.serve(driver, limits.listen, limits.api_port)
    except OSError as error:
        raise ConfigError(
            f"the driver cannot listen on resilience.listen={limits.listen} with resilience.port={limits.port} and "
            f"resilience.api_port={limits.api_port}: {error}; choose ports that are free, or 0 for any"
        ) from None
    driver.announce(url)
    try:
        return await driver.run()
    finally:
        await end()
