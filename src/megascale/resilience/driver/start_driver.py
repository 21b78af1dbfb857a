"""Starts or takes over the driver of a run, in the foreground: what `megascale launch` does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.config import Config, load
from megascale.config.plugins import load_plugins
from megascale.core import run_lock
from megascale.core.events import Event
from megascale.core.failure import keep_no_bytecode
from megascale.core.gpu_names import gpu_names
from megascale.core.ports import is_loopback
from megascale.core.secrets import PASSWORD_VARIABLE
from megascale.core.terminal import end_signals
from megascale.errors import ConfigError, DataError, FitError, TrainingError
from megascale.resilience.agent.node_health import gpu_count
from megascale.resilience.cluster.base import ClusterRequest
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.driver.driver import Driver
from megascale.resilience.driver.job_files import check_nodes, keep_job_files, read_job_files
from megascale.resilience.driver.recovery import hot_update
from megascale.resilience.driver.state import recall
from megascale.resilience.driver.state.job_state import ENDED, JobState, Phase
from megascale.resilience.driver.state.journal import FILE, JournalFenced, JournalReader
from megascale.resilience.driver.state.lasting_journal import LastingJournal, lacks_room, no_room
from megascale.resilience.protocol import contact

if TYPE_CHECKING:
    from megascale.resilience.driver.api.metrics import Scrapes

# Settings that belong to the driver's machine and not to the job.
_OF_THE_MACHINE = ("hosts", "ssh", "listen", "advertise", "port", "api_port", "tls_certificate", "tls_key")


@dataclass(frozen=True)
class Size:
    """Ranks of a job on its nodes, and how the GPUs that this process sees (numbered from 0) are shared out."""

    world: int
    ranks_per_node: int
    data: int
    devices: list[list[int]]


def compute_size(config: Config, gpus: int, shared: bool = True) -> Size:
    """How many ranks a job has. Raises FitError if layout, nodes and GPUs do not go together.

    gpus: of this machine, which all nodes share, or of each node where they are machines of their own (not `shared`).
    """
    parallel, nodes = config.parallel, config.resilience.nodes
    model = parallel.tensor * parallel.pipeline
    slots = nodes + config.resilience.spares
    use_gpus = gpus > 0 and config.train.device != "cpu"
    per_node = (gpus // slots if shared else gpus) if use_gpus else 0
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
    own = use_gpus and shared
    devices = [list(range(i * per_node, (i + 1) * per_node)) for i in range(slots)] if own else []
    return Size(world, world // nodes, world // model, devices)


def prepare(config: Config) -> tuple[Config, Size]:
    """The configuration as the trainers will read it, and the job's size. ConfigError for an unknown cluster, and for
    train.device=cuda on this machine if it has no GPU."""
    load_plugins()
    cluster = CLUSTERS[config.resilience.cluster]
    remote = cluster.on_other_machines(config)
    elsewhere = remote is not None
    gpus, address = (gpu_count(), "") if remote is None else remote
    if config.train.device == "cuda" and not elsewhere and not gpus:
        raise ConfigError("train.device=cuda but this machine has no GPU; use --train.device=cpu or auto")
    lease = cluster.agent_lease
    if lease is not None and config.resilience.agent_lease is None:
        limits = config.resilience.model_copy(update={"agent_lease": max(lease, 2 * config.resilience.interval)})
        config = config.model_copy(update={"resilience": limits})
    found = compute_size(config, gpus, shared=not elsewhere)
    if elsewhere:
        config = _for_other_machines(config, address)
    elif not found.devices and config.train.threads is None:
        # Nodes on one machine share its cores.
        threads = max(1, (os.cpu_count() or 1) // found.world)
        config = config.model_copy(update={"train": config.train.model_copy(update={"threads": threads})})
    parallel = config.parallel.model_copy(update={"data": found.data, "gpus_per_host": found.ranks_per_node})
    return config.model_copy(update={"parallel": parallel}), found


def uses_other_machines(config: Config) -> bool:
    """Whether the job's nodes are other machines than this one."""
    load_plugins()
    return CLUSTERS[config.resilience.cluster].on_other_machines(config) is not None


def _for_other_machines(config: Config, address: str) -> Config:
    """Where other machines must reach this one and each other and nobody has said how: by their networks' addresses."""
    limits, checkpoint = config.resilience, config.checkpoint
    if address and is_loopback(limits.listen):
        config = config.model_copy(update={"resilience": limits.model_copy(update={"listen": address})})
    if checkpoint.replicas and is_loopback(checkpoint.replica_address):
        config = config.model_copy(update={"checkpoint": checkpoint.model_copy(update={"replica_address": "auto"})})
    return config


def _on_this_machine(config: Config, mine: Config) -> Config:
    """A running job's settings, with those of the machine that its driver now is on as they were given there."""
    own = {key: getattr(mine.resilience, key) for key in _OF_THE_MACHINE}
    return config.model_copy(update={"resilience": config.resilience.model_copy(update=own)})


def drive(config: Config, found: Size, say: Callable[[str, str], None]) -> int:
    """Run the driver until the job has ended; returns its exit code.

    A job whose driver died goes on where it is, with the settings it was started with; one that has ended starts
    again from its newest checkpoint. Raises ConfigError if another driver runs it, or somebody trains without one.
    """
    run = config.run_folder.absolute()
    keep_no_bytecode()
    try:
        lock = run_lock.take_for_driver(run, "megascale launch")
        try:
            return _drive(run, config, found, _outliving_the_terminal(say), lock.warning)
        finally:
            lock.drop()
    except (OSError, sqlite3.Error) as error:
        if lacks_room(error, run if run.exists() else run.parent):
            raise no_room(run) from None
        if isinstance(error, sqlite3.Error):
            raise TrainingError(
                f"the driver's journal {run / FILE} cannot be used ({error}): another process holds it, or its file "
                "system does not do what SQLite needs; agents let training go on for resilience.orphan seconds. Run "
                "the same command again, with train.runs on a local disk if it comes again"
            ) from None
        raise


def _outliving_the_terminal(say: Callable[[str, str], None]) -> Callable[[str, str], None]:
    """`say`, where a terminal that is gone or a log file on a full disk stops nothing."""

    def suppressing(who: str, text: str) -> None:
        with contextlib.suppress(OSError):
            say(who, text)

    return suppressing


def _named(devices: list[list[int]]) -> tuple[tuple[str, ...], ...]:
    """The names of GPUs that are numbered among those that this process sees."""
    names = gpu_names(gpu_count()) if devices else []
    return tuple(tuple(names[i] for i in group) for group in devices)


def _drive(run: Path, config: Config, found: Size, say: Callable[[str, str], None], warning: str) -> int:
    run.mkdir(parents=True, exist_ok=True)
    if warning:
        say("driver", warning)
    contact.make_token(run)
    config = _hand_down_password(config)
    known = recall.least_epoch(run)
    with contextlib.suppress(Exception):
        known = max(known, contact.read_contact(run).epoch)
    journal, damaged = LastingJournal.take(run, config.resilience.lease, known, _ended_epoch())
    recalled = recall.restore(journal, run)
    job = journal.job()
    request = ClusterRequest(run, config, _named(found.devices), say)
    cluster = CLUSTERS[config.resilience.cluster](request)
    settings = contact.folder(run) / "job.toml"
    # A journal that has lost something must not have anything stopped: what runs is asked first.
    behind = damaged or recalled.events > 0 or job is None
    held = any(info.running for info in cluster.nodes()) or cluster.unseen
    unsure = behind and settings.exists() and held
    attempt = max(job.attempt if job is not None else 0, recalled.attempt)
    nodes = {row.name: row.record() for row in journal.nodes()}
    new = JobState(config.train.name, Phase.WAITING, attempt, (), found.ranks_per_node, found.data, nodes=nodes)
    if unsure:
        # Until the agents have said what runs: nothing is placed, or, if a person paused the job, nothing is to be.
        job = replace(new if job is None else job, attempt=attempt, goal=Phase.STARTING)
        job = replace(job, phase=Phase.PAUSED if recalled.paused else Phase.WAITING)
    elif job is None or job.phase in ENDED or not job.attempt:  # nothing of it runs
        check_nodes(config, read_job_files(config), cluster)
        if differs := hot_update.changed_since_last_launch(run, config):
            say("driver", differs)
        _write_settings(config)
        job = new
    else:
        job = replace(job, attempt=attempt)
    mine, config = config, load(settings)
    files = read_job_files(config, kept_in=run)
    cluster.prefer(files.nodes)
    if uses_other_machines(mine):
        config = _on_this_machine(config, mine)
    if mine != config:
        say("driver", f"the running job keeps the settings it was started with ({settings}); stop it to change them")
    driver = Driver(run, config, cluster, [], journal, job, say, unsure, files)
    _report_journal(driver, journal, recalled)
    try:
        return asyncio.run(_serve(driver))
    except JournalFenced as error:
        say("driver", f"this driver touches the job no more: {error}")
        code = cluster.outlast()
        if code is not None:
            return code
        raise ConfigError(f"this driver ends without touching the job: {error}") from None
    finally:
        if journal.behind:
            say("driver", f"{no_room(run)}. The last events are not in the journal")
        journal.close()


def _ended_epoch() -> int:
    """The newest epoch whose driver has no right to the job any more, by the word of whoever gives machines."""
    return int(os.environ.pop(contact.ENDED_EPOCH, "0"))


def _report_journal(driver: Driver, journal: LastingJournal, recalled: recall.Recalled) -> None:
    """Events about what is wrong with the journal, and what became of it."""
    back = f"{recalled.events} of its events were put back from events.jsonl"
    if recalled.evicted:
        back += f"; {', '.join(recalled.evicted)} stay evicted"
    if journal.aside is not None:
        text = f"the journal was damaged ({journal.damage}); it was set aside as {journal.aside.name} and begun anew"
        driver.note(Event.JOURNAL_DAMAGED, evidence=(text, back))
    elif recalled.events:
        text = "the journal was behind: a file that was removed, cut or damaged had brought it back to an older state"
        driver.note(Event.JOURNAL_BEHIND, evidence=(text, back))
    if journal.network:
        text = (
            f"the run folder lies on a network file system ({journal.network}), where SQLite's write-ahead log does "
            "not work: the journal does without it and waits for the disk at each write"
        )
        driver.note(Event.JOURNAL_WITHOUT_WAL, evidence=(text,))


def _hand_down_password(config: Config) -> Config:
    """A password of the Redis server goes to the agents and their trainers in the environment, which others cannot
    read, and into no file."""
    if config.rendezvous.password is None:
        return config
    os.environ[PASSWORD_VARIABLE] = config.rendezvous.password.get_secret_value()
    return config.model_copy(update={"rendezvous": config.rendezvous.model_copy(update={"password": None})})


def is_running(config: Config) -> bool:
    """Whether the run's journal has a job that has not ended, which a driver would take over as it is."""
    run = config.run_folder.absolute()
    if not (run / FILE).exists():
        return False
    try:
        reader = JournalReader(run)
        try:
            return reader.job is not None and reader.job.phase not in ENDED
        finally:
            reader.close()
    except Exception:  # damaged: `drive` deals with it, and agents of the job may be at work
        return True


def _write_settings(config: Config) -> None:
    run = config.run_folder.absolute()
    keep_job_files(config, run)
    config.write(contact.folder(run) / "job.toml")


def _cannot_listen(key: str, host: str, port: int, error: OSError) -> ConfigError:
    # A name that does not resolve has a number of the resolver's, below zero.
    number = error.errno or 0
    why = os.strerror(number) if number > 0 else error.strerror or str(error)
    return ConfigError(
        f"the driver cannot listen on resilience.listen={host} with resilience.{key}={port}: {why}; use another port, "
        "0 for any that is free, and an address of this host"
    )


async def _serve(driver: Driver) -> int:
    from megascale.resilience.driver.api import http_api
    from megascale.resilience.driver.api.metrics import Scrapes
    from megascale.resilience.driver.api.open_addresses import open_addresses
    from megascale.resilience.driver.api.tls import agents_tls

    loop = asyncio.get_running_loop()
    scrapes = Scrapes()
    for number in end_signals():
        handed = number != signal.SIGINT and driver.nodes.cluster.hands_over
        loop.add_signal_handler(number, driver.hand_over if handed else driver.operations.interrupt)
    limits = driver.limits
    port = limits.port
    if not port and driver.nodes.cluster.unseen:
        with contextlib.suppress(DataError):  # agents that nobody can tell another one come to the last driver's
            port = contact.read_contact(driver.run_folder).agents[1]
    try:
        await driver.open(agents_tls(limits.listen, limits.tls_certificate, limits.tls_key), port)
    except OSError as error:
        raise _cannot_listen("port", limits.listen, port, error) from None
    try:
        url, end = await http_api.serve(driver, limits.listen, limits.api_port, scrapes)
    except OSError as error:
        raise _cannot_listen("api_port", limits.listen, limits.api_port, error) from None
    driver.announce(url)
    if told := open_addresses(limits, driver.address, url):
        driver.note(Event.ADDRESS_OPEN, evidence=told)
    try:
        code = await driver.run()
        await _await_last_scrape(driver, scrapes)
        return code
    finally:
        await end()


async def _await_last_scrape(driver: Driver, scrapes: Scrapes) -> None:
    """Let a Prometheus that reads the metrics see that the job has ended; a signal ends the waiting."""
    seconds = scrapes.missing(driver.job.entered, time.monotonic())
    if driver.job.phase not in ENDED or seconds <= 0:
        return
    driver.say("driver", f"waits up to {seconds:.0f} s until Prometheus has read that the job has ended")
    loop = asyncio.get_running_loop()
    waiting = loop.create_task(scrapes.wait(seconds))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, waiting.cancel)
    await asyncio.wait({waiting})
