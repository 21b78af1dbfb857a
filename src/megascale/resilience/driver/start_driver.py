"""Starts the driver of a run in the foreground, or takes over from an earlier one: the work of `megascale launch`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import tomli_w

from megascale.config import Config, ResilienceConfig, load
from megascale.config.registry import load_plugins
from megascale.core import run_lock
from megascale.core.addresses import is_loopback
from megascale.core.bounded_pattern import BoundedPattern
from megascale.core.events import Event
from megascale.core.gpus import visible_gpu_names
from megascale.core.python_process import disable_bytecode_cache
from megascale.core.secrets import PASSWORD_VARIABLE
from megascale.errors import ConfigError, TrainingError
from megascale.resilience.agent.node_health import count_gpus
from megascale.resilience.cluster.base import Cluster, ClusterRequest
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.driver.driver import Driver
from megascale.resilience.driver.launch_checks import JobSize, check_nodes, compute_size, copy_job_files, read_job_files
from megascale.resilience.driver.recovery import hot_update
from megascale.resilience.driver.recovery.missing_replicas import check_continued_sizes
from megascale.resilience.driver.serve_driver import serve
from megascale.resilience.driver.state.audit_log import LostEvents, count_drivers, restore_lost_events
from megascale.resilience.driver.state.job_state import ENDED, JobState, Phase
from megascale.resilience.driver.state.journal import Journal, JournalFenced
from megascale.resilience.driver.state.journal_disk import is_full_disk_error, make_full_disk_error
from megascale.resilience.driver.state.journal_reader import JOURNAL_FILE, JournalReader
from megascale.resilience.protocol import contact

LogLine = Callable[[str, str], None]  # (source, text)

# Settings of the driver's machine, which a driver on another machine takes from its own command line.
_MACHINE_SETTINGS = (
    "hosts",
    "ssh",
    "listen",
    "advertise",
    "port",
    "api_port",
    "driver_metrics",
    "targets",
    "otlp",
    "tls_certificate",
    "tls_key",
)


def prepare(config: Config) -> tuple[Config, JobSize]:
    """Return the configuration as the trainers will read it, and the job's size.

    Raises:
        ConfigError: the cluster is unknown, or train.device=cuda on this machine without a GPU.
        FitError: layout, nodes and GPUs do not fit together.
    """
    cluster = _find_cluster_class(config)
    # (GPUs per node, address at which other machines reach this one), or None if all nodes are on this machine.
    remote_defaults = cluster.describe_remote_machines(config)
    if remote_defaults is not None:
        gpus, address = remote_defaults
    else:
        gpus, address = count_gpus(), ""
    if config.train.device == "cuda" and remote_defaults is None and not gpus:
        raise ConfigError("train.device=cuda but this machine has no GPU; use --train.device=cpu or auto")
    if cluster.agent_lease is not None and config.resilience.agent_lease is None:
        # One heartbeat may be lost without ending the ranks.
        lease = max(cluster.agent_lease, 2 * config.resilience.interval)
        config = _with_values(config, "resilience", agent_lease=lease)
    _check_patterns(config)
    if config.foreign.command:
        config = _prepare_foreign(config, gpus, shared=remote_defaults is None)
    size = compute_size(config, gpus, shared=remote_defaults is None)
    check_continued_sizes(config, size.ranks_per_node)
    if remote_defaults is not None:
        config = _listen_to_network(config, address)
    elif not size.devices and config.train.threads is None:
        # Nodes on one machine share its cores.
        config = _with_values(config, "train", threads=max(1, (os.cpu_count() or 1) // size.world))
    return _with_values(config, "parallel", data=size.data, gpus_per_host=size.ranks_per_node), size


def _check_patterns(config: Config) -> None:
    """Raise ConfigError for an expression that the agents' search in bounded time does not accept."""
    for pattern in config.foreign.patterns:
        BoundedPattern("foreign.patterns", pattern)
    for pattern in set(config.resilience.log_patterns) - set(ResilienceConfig().log_patterns):
        BoundedPattern("resilience.log_patterns", pattern)


def _prepare_foreign(config: Config, gpus: int, *, shared: bool) -> Config:
    """Return the configuration for another trainer's command: its ranks are one data-parallel group for the driver.

    gpus: GPUs per node, or with `shared` the GPUs of this machine, which all nodes share.
    """
    if config.resilience.standby_processes:
        raise ConfigError(
            "resilience.standby_processes=true prepares processes of this package's trainer, and a command of another "
            "one is given; set --resilience.standby_processes=false"
        )
    gpus_per_node = gpus
    if shared:
        gpus_per_node = gpus // (config.resilience.nodes + config.resilience.spares)
    per_node = config.foreign.per_node or gpus_per_node or 1
    config = _with_values(config, "parallel", tensor=1, pipeline=1, context=1, data=per_node * config.resilience.nodes)
    # min_data equals data, so the world keeps its size: only this package's trainer can resume with another one.
    config = _with_values(config, "resilience", preload=False, min_data=per_node * config.resilience.nodes)
    # Agents have another working directory than this process. An empty folder means this process's directory.
    folder = os.path.abspath(config.foreign.folder)
    return _with_values(config, "foreign", per_node=per_node, folder=folder)


def _find_cluster_class(config: Config) -> type[Cluster]:
    """Return the class of the configured cluster. Raise ConfigError if it is unknown."""
    load_plugins()  # They register further clusters.
    return CLUSTERS[config.resilience.cluster]


def uses_other_machines(config: Config) -> bool:
    """Return True if the job's nodes are other machines than this one."""
    return _find_cluster_class(config).describe_remote_machines(config) is not None


def _with_values(config: Config, section: str, **values: object) -> Config:
    """Return the configuration with changed values of one section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _listen_to_network(config: Config, address: str) -> Config:
    """Replace loopback defaults where other machines must reach this one and each other.

    address: address at which other machines reach this one, "" if it is unknown.
    """
    if address and is_loopback(config.resilience.listen):
        config = _with_values(config, "resilience", listen=address)
    if config.checkpoint.replicas and is_loopback(config.checkpoint.replica_address):
        config = _with_values(config, "checkpoint", replica_address="auto")
    return config


def drive(config: Config, size: JobSize, log_line: LogLine) -> int:
    """Run the driver until the job has ended; return the job's exit code.

    A job whose driver died continues where it is, with the settings it was started with. A job that has ended starts
    again from its newest checkpoint.

    Raises:
        ConfigError: another driver runs the job, or a process trains without a driver.
    """
    run = config.run_folder.absolute()
    disable_bytecode_cache()
    try:
        lock = run_lock.acquire_driver_lock(run, "megascale launch")
        try:
            return _drive(run, config, size, _ignore_errors(log_line), lock.warning)
        finally:
            lock.drop()
    except (OSError, sqlite3.Error) as error:
        if is_full_disk_error(error, run if run.exists() else run.parent):
            raise make_full_disk_error(run) from None
        if isinstance(error, sqlite3.Error):
            raise TrainingError(
                f"the driver's journal {run / JOURNAL_FILE} cannot be used ({error}): another process holds it, or its "
                "file system lacks what SQLite needs; agents let training continue for resilience.orphan seconds. Run "
                "the same command again, with train.runs on a local disk if it happens again"
            ) from None
        raise


def _ignore_errors(log_line: LogLine) -> LogLine:
    """Return `log_line` without its errors: a closed terminal or a log file on a full disk must not stop the driver."""

    def log_if_possible(source: str, text: str) -> None:
        with contextlib.suppress(OSError):
            log_line(source, text)

    return log_if_possible


def _name_devices(devices: list[list[int]]) -> tuple[tuple[str, ...], ...]:
    """Return the names of each node's GPUs for the indices of `JobSize.devices`."""
    if not devices:
        return ()
    names = visible_gpu_names(count_gpus())
    return tuple(tuple(names[index] for index in node_devices) for node_devices in devices)


def _drive(run: Path, config: Config, size: JobSize, log_line: LogLine, warning: str) -> int:
    """Take the journal, determine the job's state and settings, and run the driver; return the exit code."""
    run.mkdir(parents=True, exist_ok=True)
    if warning:
        log_line("driver", warning)
    contact.make_token(run)
    config = _hand_down_password(config)
    journal, is_damaged = _take_journal(run, config)
    lost_events = restore_lost_events(journal, run)
    request = ClusterRequest(run, config, _name_devices(size.devices), log_line)
    cluster = CLUSTERS[config.resilience.cluster](request)
    start = _choose_start(
        journal,
        cluster,
        config=config,
        size=size,
        lost_events=lost_events,
        is_damaged=is_damaged,
        has_settings=hot_update.settings_file(run).exists(),
    )
    if start.is_launch:
        _store_launch(run, config, cluster, log_line)
    config = _load_job_settings(run, config, log_line)
    files = read_job_files(config, copies_in=run)
    cluster.prefer(files.nodes)
    driver = Driver(
        run,
        config,
        cluster,
        overrides=[],
        journal=journal,
        state=start.state,
        log_line=log_line,
        is_journal_doubtful=start.is_journal_doubtful,
        job_files=files,
    )
    _report_journal(driver, journal, lost_events)
    try:
        return asyncio.run(serve(driver))
    except JournalFenced as error:
        log_line("driver", f"this driver does not touch the job any more: {error}")
        code = cluster.wait_for_job_end()
        if code is not None:
            return code
        raise ConfigError(f"this driver ends without touching the job: {error}") from None
    finally:
        if journal.is_behind:
            log_line("driver", f"{make_full_disk_error(run)}. The last events are not in the journal")
        journal.close()


@dataclass(frozen=True)
class _DriverStart:
    """How a driver begins its work.

    Attributes:
        is_launch: no process of the job runs, so the job gets the settings of this command.
        is_journal_doubtful: the journal may be older than the running trainers.
    """

    state: JobState
    is_launch: bool
    is_journal_doubtful: bool


def _choose_start(
    journal: Journal,
    cluster: Cluster,
    *,
    config: Config,
    size: JobSize,
    lost_events: LostEvents,
    is_damaged: bool,
    has_settings: bool,
) -> _DriverStart:
    """Return the state with which the driver starts, from the journal and from the events that it has lost.

    Args:
        is_damaged: the journal's file was damaged, so a new file was begun.
        has_settings: the run folder has the settings of an earlier launch.
    """
    stored_state = journal.job()
    stored_attempt = stored_state.attempt if stored_state is not None else 0
    # A driver whose journal has lost events must not stop trainers before the agents have reported.
    is_behind = is_damaged or lost_events.count > 0 or stored_state is None
    has_agents = any(info.has_agent for info in cluster.nodes()) or cluster.has_unlisted_agents
    attempt = max(stored_attempt, lost_events.attempt)
    new_state = JobState(
        config.train.name,
        attempt=attempt,
        ranks_per_node=size.ranks_per_node,
        data=size.data,
        nodes=journal.nodes(),
    )
    if is_behind and has_settings and has_agents:
        # Until the agents have reported, nothing is placed. A job that a person paused stays paused.
        phase = Phase.PAUSED if lost_events.is_paused else Phase.WAITING
        state = replace(stored_state or new_state, attempt=attempt, goal=Phase.STARTING, phase=phase)
        return _DriverStart(state, is_launch=False, is_journal_doubtful=True)
    if stored_state is None or stored_state.phase in ENDED or not stored_state.attempt:
        return _DriverStart(new_state, is_launch=True, is_journal_doubtful=False)
    return _DriverStart(replace(stored_state, attempt=attempt), is_launch=False, is_journal_doubtful=False)


def _load_job_settings(run: Path, launched_config: Config, log_line: LogLine) -> Config:
    """Return the job's settings in the run folder. They differ from `launched_config` if the job was running already.

    A running job keeps its settings, except those of the machine on which its driver is now.
    """
    settings = hot_update.settings_file(run)
    config = load(settings)
    if uses_other_machines(launched_config):
        machine_settings = {key: getattr(launched_config.resilience, key) for key in _MACHINE_SETTINGS}
        config = _with_values(config, "resilience", **machine_settings)
    if launched_config != config:
        log_line(
            "driver", f"the running job keeps the settings it was started with ({settings}); stop it to change them"
        )
    return config


def _store_launch(run: Path, config: Config, cluster: Cluster, log_line: LogLine) -> None:
    """Check the nodes of a launch, report changed settings, and store settings and files in the run folder."""
    check_nodes(config, read_job_files(config), cluster)
    differences = hot_update.describe_changes_since_launch(run, config)
    if differences:
        log_line("driver", differences)
    copy_job_files(config, run)
    config.write(hot_update.settings_file(run))
    if config.foreign.command:
        _write_foreign_config(config, run)


def _write_foreign_config(config: Config, run: Path) -> None:
    """Write RUN/config.toml for another trainer's command; the other sections describe this package's trainer only."""
    tree = config.model_dump(exclude_none=True, include={"resilience", "foreign"})
    tree["train"] = {"name": config.train.name, "runs": config.train.runs}
    (run / "config.toml").write_text(tomli_w.dumps(tree), encoding="utf-8")


def _take_journal(run: Path, config: Config) -> tuple[Journal, bool]:
    """Become the driver of a run; return (journal, True if a damaged file was set aside)."""
    known_epoch = count_drivers(run)
    with contextlib.suppress(Exception):  # The contact file may be missing or damaged.
        known_epoch = max(known_epoch, contact.read_contact(run).epoch)
    # The cluster may report that an earlier driver has lost its right to the job.
    ended_epoch = int(os.environ.pop(contact.ENDED_EPOCH, "0"))
    return Journal.take(run, config.resilience.lease, known_epoch=known_epoch, ended_epoch=ended_epoch)


def _report_journal(driver: Driver, journal: Journal, lost_events: LostEvents) -> None:
    """Record a damaged, outdated or slow journal, and the repair."""
    restored = f"{lost_events.count} of its events were restored from events.jsonl"
    if lost_events.evicted:
        restored += f"; {', '.join(lost_events.evicted)} stay evicted"
    if journal.damaged_copy is not None:
        copy = journal.damaged_copy.name
        text = f"the journal was damaged ({journal.damage}); it was set aside as {copy} and begun anew"
        driver.record_event(Event.JOURNAL_DAMAGED, evidence=(text, restored))
    elif lost_events.count:
        text = "the journal was behind: a removed, cut or damaged file had reset it to an older state"
        driver.record_event(Event.JOURNAL_BEHIND, evidence=(text, restored))
    if journal.network_filesystem:
        text = (
            f"the run folder lies on a network file system ({journal.network_filesystem}), where SQLite's write-ahead "
            "log does not work: the journal does without it and waits for the disk at each write"
        )
        driver.record_event(Event.JOURNAL_WITHOUT_WAL, evidence=(text,))


def _hand_down_password(config: Config) -> Config:
    """Pass the Redis server's password to agents and trainers in the environment, which other users cannot read."""
    if config.rendezvous.password is None:
        return config
    os.environ[PASSWORD_VARIABLE] = config.rendezvous.password.get_secret_value()
    return _with_values(config, "rendezvous", password=None)


def is_running(config: Config) -> bool:
    """Return True if the run's journal has a job that has not ended, which a driver would take over."""
    run = config.run_folder.absolute()
    if not (run / JOURNAL_FILE).exists():
        return False
    try:
        reader = JournalReader(run)
        try:
            return reader.job is not None and reader.job.phase not in ENDED
        finally:
            reader.close()
    except Exception:  # The journal is damaged, which `drive` handles; agents of the job may be at work.
        return True
