"""Saving and loading of a run's checkpoints as configured: in the foreground or background, in memory or storage."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from megascale.checkpoint.background import pending_saves, service, service_protocol
from megascale.checkpoint.background.load_from_memory import (
    MemorySave,
    find_memory_save,
    list_memory_saves,
    load_memory_save,
)
from megascale.checkpoint.background.snapshot import Snapshots
from megascale.checkpoint.background.staging import SaveOutcome, StagingSlot
from megascale.checkpoint.chunk_source import LoadReport
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.commit import Commit
from megascale.checkpoint.live_state import LivePlan, LiveState, load_live, plan_live_load
from megascale.checkpoint.loader import AcceptState, load, warn
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.saver import save_to_storage
from megascale.checkpoint.storage.base import Storage
from megascale.checkpoint.storage.opening import open_storage
from megascale.config import CheckpointConfig
from megascale.errors import DataError, TrainingError
from megascale.services.conversation import Conversation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)
# A thread that computes in Python keeps the interpreter's lock for this long while others wait for it.
_TURN_SECONDS = 0.0002


class StoredState(NamedTuple):
    """Newest commit of a checkpoints folder.

    Attributes:
        sequence: number of the newest commit, 0 if there is none.
        identity: identity of the folder, "" if it has none.
        step: step of the newest commit, 0 if there is none.
    """

    sequence: int
    identity: str
    step: int = 0


class Checkpointer:
    """Checkpoints for a training loop. Every method except `poll`, `choose_save_target` and `leave` is collective.

    The loop calls `load` once. In each step it calls `before_update` between the backward pass and the optimizer's
    update, and then `save` if `choose_save_target` returns a target. At the end it calls `finish`. `poll` and `finish`
    return the outcomes of saves in order.

    Args:
        config: section `checkpoint` of the configuration.
        shards: shards of this process, views of live memory.
        group: processes of the run. Default: the default group, or this process alone.
        domain: fault domain of this host (rack, switch), for replicas. By default each host is a domain by itself.
        reused_slots: staging memory that `leave` of this process's previous checkpointer has returned.
        reserve: size of new staging memory, relative to the present shards (see `Snapshots`).
        check: called while a method waits for the service. It raises an error if the process must leave the attempt.
        side_group: a second group of the same processes. With it, a load from running processes prepares the staging
            memory in a thread during the exchange of shards. Set on all processes or on none.

    Attributes:
        loaded_from: source of the loaded state: "nothing", "memory", "a peer's memory", "running ranks" (also "running
            ranks and memory"), or "storage".
        is_standing: whether this process's shards already had the loaded state, so that nothing was copied into them.
        snapshots: saves in the background, or None before `prepare` and the first save.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run: Path,
        shards: Sequence[TensorShard],
        *,
        group: ProcessGroup | None = None,
        domain: str = "",
        reused_slots: Sequence[StagingSlot] = (),
        reserve: float = 1.0,
        check: Callable[[], None] = lambda: None,
        side_group: ProcessGroup | None = None,
    ) -> None:
        self._check = check
        self._side_group = side_group
        self._staging_thread: threading.Thread | None = None  # prepares the staging memory during a load
        self._staging_error: BaseException | None = None  # of this thread
        self._reserve = reserve
        self._reused_slots = reused_slots
        self.config = config
        self.run = run
        self.shards = shards
        self.domain = domain
        self.group = group
        self.peers = Peers(group)
        self.folder: Path | str = config.location or run / "checkpoints"
        self.loaded_from = "nothing"
        self.snapshots: Snapshots | None = None
        self.is_standing = False
        self._base_generation = ""  # generation of the save in memory from which the run started, or an empty text
        self._last_sequence = 0  # number of the newest save that an earlier attempt of this process's peers began
        self._saves_first_step = False  # whether the loaded state is not in storage
        self._foreground_outcomes: list[SaveOutcome] = []
        self._skipped_commits: list[Commit] = []

    def choose_save_target(self, step: int, last: bool = False) -> Literal["storage", "memory"] | None:
        """Return where to save the state after `step`, or None if it is not to be saved.

        Args:
            last: whether training ends with this step.
        """
        interval = self.config.interval
        memory_interval = self.config.memory_interval
        if last or (interval and step % interval == 0):
            return "storage"
        # A job that saves neither at an interval nor at its end keeps its state out of storage after a load too. The
        # check of a start reserves no disk for it.
        if self._saves_first_step and (interval or self.config.at_end):
            return "storage"
        if memory_interval and step % memory_interval == 0:
            return "memory"
        return None

    def load(
        self,
        step: int | None = None,
        *,
        shards: Sequence[TensorShard] | None = None,
        initial: Sequence[TensorShard] | None = None,
        report: LoadReport | None = None,
        accept: AcceptState | None = None,
        live: LiveState | None = None,
        stored: StoredState | None = None,
    ) -> dict[str, Any] | None:
        """Fill the shards from the newest checkpoint. If sources are equally new, memory is preferred to storage.

        Args:
            step: step of the checkpoint to load. Default: the newest checkpoint.
            shards: shards to fill. By default all shards are filled, and every tensor of the saved model must be in the
                shards of some process.
            initial: the weights among the shards; see `loader.load`.
            report: filled with this process's costs and findings.
            accept: see `loader.AcceptState`.
            live: state that this process has kept of an earlier attempt, if the processes may outlive attempts; else
                None, then on all processes. Kept state is preferred to copies in memory and storage unless these are
                newer.
            stored: result of `find_stored_state` in this start, which is then not repeated; None on all processes or on
                none.

        Returns:
            The saved state besides tensors, or None if there is no checkpoint.

        Raises:
            DataError: as `loader.load`.
        """
        covers_model = shards is None
        shards = self.shards if shards is None else shards
        report = report or LoadReport()
        storage = open_storage(self.folder)
        if stored is None:
            part_start = time.monotonic()
            stored = self.peers.compute_once(lambda: _find_newest(storage, step), StoredState)
            report.measure("commits", part_start)
        result = self._load_from_memory(
            stored,
            step=step,
            shards=shards,
            report=report,
            accept=accept,
            covers_model=covers_model,
            live=live,
        )
        if isinstance(result, dict):
            return result
        damage = result
        # If the first save of a run died half-way, the folder counts as one without a checkpoint.
        has_commits = self.peers.compute_once(lambda: _has_commits(storage), bool)
        if not has_commits and step is None:
            if damage:  # damaged chunks may have been copied into the weights
                raise DataError(
                    f"{damage} and there is no checkpoint in {storage.url!r} to go back to; start over from step 0 "
                    "with --checkpoint.resume=false"
                )
            return None
        state = load(
            self.folder,
            shards,
            step=step,
            group=self.group,
            report=report,
            initial=initial,
            accept=accept,
            covers_model=covers_model,
        )
        self._skipped_commits = report.skipped_commits
        self.loaded_from = "storage"
        return state

    def _load_from_memory(
        self,
        stored: StoredState,
        *,
        step: int | None,
        shards: Sequence[TensorShard],
        report: LoadReport,
        accept: AcceptState | None,
        covers_model: bool,
        live: LiveState | None,
    ) -> dict[str, Any] | str | None:
        """Load from running processes or from memory what is at least as new as the newest commit in storage.

        Args:
            stored: newest commit in storage.

        Returns:
            The saved state, None without such a state, or text that describes the damage of the save in memory.
        """
        connection = None
        saves: list[MemorySave] = []
        part_start = time.monotonic()
        try:
            if self.config.background and stored.identity:
                connection = _connect_service(self.config, self.run)
                saves = list_memory_saves(connection, self.peers, stored.identity)
            save = next((save for save in saves if save.is_complete), None)
            plan = None
            part_start = report.measure("saves", part_start)  # the wait for the slowest process is part of it
            if live is not None and step is None:
                plan = plan_live_load(live, saves, stored.sequence, shards, self.peers)
                report.measure("plan", part_start)
            if plan is not None and live is not None:
                self.is_standing = live.is_in_place and live.step == plan.step and bool(plan.elements)
                if self.is_standing:
                    shards = []
                self._last_sequence = plan.last_sequence
                begin = partial(self._begin_staging, save)
                with _short_thread_turns():
                    result = load_live(
                        plan,
                        live,
                        connection,
                        shards,
                        self.peers,
                        report,
                        accept=accept,
                        begin=begin,
                        slots=self._reused_slots,
                    )
            elif save is None or save.sequence < stored.sequence or step not in (None, save.step):
                return None
            else:
                with _short_thread_turns():
                    result = load_memory_save(
                        connection,
                        save,
                        shards,
                        self.peers,
                        report,
                        accept=accept,
                        covers_model=covers_model,
                        slots=self._reused_slots,
                    )
        finally:
            if connection is not None:
                connection.close()
        if isinstance(result, str):
            self.is_standing = False
            damaged = save if plan is None else plan.save
            assert damaged is not None
            damage = f"the state of step {damaged.step} in memory is damaged ({result})"
            if self.peers.rank == 0:
                warn(f"{damage}; loading from storage instead")
            return damage
        self._note_memory_load(plan, save, stored)
        return result

    def _note_memory_load(self, plan: LivePlan | None, save: MemorySave | None, stored: StoredState) -> None:
        """Store where the state came from, and what later saves must know of it.

        Args:
            save: newest complete save in memory.
            stored: newest commit in storage.
        """
        if save is not None:
            self._base_generation = save.generation
        source = save if plan is None else plan.save
        memory = ""
        if source is not None:
            memory = "a peer's memory" if source.replicas else "memory"
        if plan is None:
            self.loaded_from = memory
        elif source is not None:
            self.loaded_from = f"running ranks and {memory}"
        else:
            self.loaded_from = "running ranks"
        base_sequence = folders.get_sequence(self._base_generation)
        is_newer = plan is not None or base_sequence > stored.sequence
        loaded = save if plan is None else plan
        assert loaded is not None
        self._saves_first_step = is_newer and not self._may_wait_for_interval(loaded.step, stored.step)

    def _may_wait_for_interval(self, loaded_step: int, stored_step: int) -> bool:
        """Return whether a state that was loaded from memory may go to storage at the next interval only.

        With checkpoint.memory_wait the steps after a save to storage wait until it is written. A recovery then saves
        at once only if the last due save is missing.
        """
        interval = self.config.interval
        if not self.config.memory_wait or not interval:
            return False
        # A later step in storage belongs to steps that the run has taken back.
        return loaded_step // interval * interval <= stored_step <= loaded_step

    def confirm_load(self) -> None:
        """Record that the run continues from the loaded state, and mark the commits that were found damaged.

        If nothing was loaded, snapshots of a previous run in memory become invalid.
        """
        if self.peers.rank == 0:
            storage = open_storage(self.folder)
            if self.loaded_from == "nothing":
                folders.renew_identity(storage)
            for commit in self._skipped_commits:
                with contextlib.suppress(OSError):  # the next save will report the failing disk
                    folders.mark_damaged(storage, commit)
        self._skipped_commits = []

    def save(self, step: int, state: dict[str, Any], *, persist: bool = True, wait: bool = False) -> bool:
        """Save the state after `step`.

        Args:
            state: state besides tensors that JSON can represent. The state of the first process is saved.
            persist: whether to write the save to storage. Otherwise it stays in memory (in the background only).
            wait: whether to wait for earlier saves instead of skipping this one. Used for the last save of a run.

        Returns:
            False if the save was skipped because earlier saves are still under way.

        Raises:
            TrainingError: saving in the foreground failed. In the background the outcome reports a failure.
        """
        if not self.config.background:
            start_time = time.monotonic()
            storage = open_storage(self.folder)
            size = save_to_storage(storage, step, self.shards, state, self.config.keep, self.peers)
            seconds = time.monotonic() - start_time
            outcome = SaveOutcome(step, committed=self.peers.rank == 0, bytes=size, stall=seconds, seconds=seconds)
            self._foreground_outcomes.append(outcome)
            self._saves_first_step = False
            return True
        has_begun = self._open_snapshots().start(step, state, persist=persist, wait=wait)
        if has_begun and persist:
            self._saves_first_step = False
        return has_begun

    def _open_snapshots(self) -> Snapshots:
        """Return the saves in the background, whose service and memory are ready. Collective until they are."""
        self._end_staging()
        if self._staging_error is not None:
            error = self._staging_error
            self._staging_error = None
            raise error
        if self.snapshots is None:
            self._make_snapshots(self.peers)
        assert self.snapshots is not None
        return self.snapshots

    def _make_snapshots(self, peers: Peers) -> None:
        """Set `snapshots`, connected to the service and with its memory. Collective over `peers`."""
        snapshots = Snapshots(
            self.config,
            self.folder,
            self.shards,
            run=self.run,
            peers=peers,
            base_generation=self._base_generation,
            last_sequence=self._last_sequence,
            domain=self.domain,
            reused_slots=self._reused_slots,
            reserve=self._reserve,
            check=self._check,
        )
        try:
            snapshots.open()
        except BaseException:
            self._reused_slots = snapshots.leave(awaits_snapshots=False)
            raise
        self.snapshots = snapshots
        self._reused_slots = ()
        log.info(
            "staging memory: %s bytes on this process, %d of %d slots as before",
            f"{snapshots.memory:,}",
            snapshots.kept_slot_count,
            snapshots.slot_count,
        )

    def _begin_staging(self, save: MemorySave | None) -> None:
        """Prepare the staging memory in a thread, if there is a second group for its collectives.

        Args:
            save: newest complete save in memory.
        """
        if save is not None:
            self._base_generation = save.generation
        if self.config.background and self._side_group is not None:
            self._staging_thread = threading.Thread(
                target=self._prepare_in_thread, args=(Peers(self._side_group),), name="megascale-staging", daemon=True
            )
            self._staging_thread.start()

    def _prepare_in_thread(self, peers: Peers) -> None:
        """Prepare the staging memory in a thread. `_open_snapshots` raises the error."""
        try:
            device = next((shard.tensor.device for shard in self.shards if shard.tensor.is_cuda), None)
            if device is not None:
                torch.cuda.set_device(device)  # each thread has a current device
            self._make_snapshots(peers)
        except BaseException as error:
            self._staging_error = error

    def _end_staging(self) -> None:
        """Wait for the thread that prepares the staging memory, if there is one."""
        if self._staging_thread is not None:
            self._staging_thread.join()
            self._staging_thread = None

    def prepare(self) -> None:
        """Start the service and allocate its memory before the first save. The call is optional and follows `load`."""
        if self.config.background:
            self._open_snapshots()

    @property
    def staging_parts(self) -> str:
        """Seconds of preparing saves in the background by part, as text; "" before."""
        if self.snapshots is None:
            return ""
        return self.snapshots.stopwatch.describe()

    def before_update(self, step: int | None = None) -> None:
        """Wait for a copy under way. The training loop calls this method before each optimizer update.

        Args:
            step: step that the update completes. If its state is to be saved too, this method first waits until the
                last snapshot is at its peer. A lost host then costs at most the steps between two saves.
        """
        if self.snapshots is not None:
            is_saved = step is not None and self.choose_save_target(step) is not None
            self.snapshots.before_update(wait_for_replica=is_saved)

    def poll(self) -> list[SaveOutcome]:
        """Return the outcomes of the saves that have ended since the last call."""
        outcomes = self._foreground_outcomes
        self._foreground_outcomes = []
        if self.snapshots is not None:
            outcomes += self.snapshots.poll()
        return outcomes

    def keep_state(self, attempt: int) -> LiveState:
        """Return what this process keeps of an attempt that it leaves, without a step. Call it before `leave`."""
        self._end_staging()
        live = LiveState(
            attempt,
            self.peers.rank,
            shards=self.shards,
            is_in_place=True,
            base_generation=self._base_generation,
            last_sequence=max(folders.get_sequence(self._base_generation), self._last_sequence),
        )
        if self.snapshots is None:
            return live
        last = max(live.last_sequence, self.snapshots.sequence)
        return replace(live, generation=self.snapshots.generation, last_sequence=last)

    def leave(self, awaits_snapshots: bool = True) -> Sequence[StagingSlot]:
        """Leave saves under way to this host's service, because the process leaves an attempt. Not collective.

        Args:
            awaits_snapshots: whether to wait until the last snapshots are complete in this host's memory, where the
                next attempt finds them.

        Returns:
            The staging memory, for the next checkpointer of this process.
        """
        self._end_staging()
        if self.snapshots is None:
            return self._reused_slots
        slots = self.snapshots.leave(awaits_snapshots)
        self.snapshots = None
        return slots

    def finish(self, run_ended: bool = True) -> list[SaveOutcome]:
        """Wait until all saves have ended, and return their outcomes as `poll` does.

        Args:
            run_ended: whether the run has ended, so that the service need not wait for trainers.
        """
        self._end_staging()
        if self.snapshots is not None:
            self._foreground_outcomes += self.snapshots.finish(run_ended=run_ended)
            self.snapshots = None
        return self.poll()


@contextlib.contextmanager
def _short_thread_turns() -> Iterator[None]:
    """Let threads exchange the interpreter's lock often, because a load hands rounds from thread to thread.

    A thread that comes back from a copy otherwise waits for up to 5 ms whenever another thread computes. The exchange
    of shards then lasts at least as long as the concurrent preparation of the staging memory.
    """
    earlier_interval = sys.getswitchinterval()
    sys.setswitchinterval(min(_TURN_SECONDS, earlier_interval))
    try:
        yield
    finally:
        sys.setswitchinterval(earlier_interval)


def find_stored_state(config: CheckpointConfig, run: Path, peers: Peers) -> StoredState:
    """Return the newest commit of a run, the same on all processes. Collective."""
    storage = open_storage(config.location or run / "checkpoints")
    stored: StoredState = peers.compute_once(lambda: _find_newest(storage, None), StoredState)
    return stored


def has_saved_state(config: CheckpointConfig, run: Path, peers: Peers, stored: StoredState) -> bool:
    """Return whether `Checkpointer.load` will find a checkpoint, the same on all processes. Collective.

    Args:
        stored: result of `find_stored_state`.
    """
    storage = open_storage(config.location or run / "checkpoints")
    if stored.sequence or peers.compute_once(lambda: _has_commits(storage), bool):
        return True
    identity = stored.identity
    if not config.background or not identity:
        return False
    connection = _connect_service(config, run)
    try:
        return find_memory_save(connection, peers, identity) is not None
    finally:
        if connection is not None:
            connection.close()


def start_service(config: CheckpointConfig, run: Path) -> None:
    """Start this host's checkpoint service, if configured, while the ranks still meet."""
    if not config.background:
        return
    log_file = run / "logs" / "checkpoint-service.log"
    with contextlib.suppress(TrainingError):  # `Checkpointer.prepare` reports the error
        service.start_checkpoint_service(service_protocol.private_folder(run), config.linger, log_file)


def end_unused_service(config: CheckpointConfig, run: Path) -> None:
    """Let this host's checkpoint service end if it has no snapshot, because the start was refused."""
    if config.background:
        service.end_unused_service(service_protocol.private_folder(run))


def _connect_service(config: CheckpointConfig, run: Path) -> Conversation | None:
    """Return a conversation with this host's service, or None if it does not start and so has no snapshots."""
    with contextlib.suppress(OSError, TrainingError):
        log_file = run / "logs" / "checkpoint-service.log"
        return service.connect_checkpoint_service(service_protocol.private_folder(run), config.linger, log_file)
    return None


def _has_commits(storage: Storage) -> bool:
    """Return whether the folder has a readable commit or an unreadable COMMIT."""
    commits, unreadable = folders.list_commits(storage)
    return bool(commits or unreadable)


def _find_newest(storage: Storage, step: int | None) -> StoredState:
    """Commit complete saves whose committer died. Then return the newest commit (of `step`, if given)."""
    pending_saves.finish_pending(storage)
    commits, _ = folders.list_commits(storage)
    positions = [(commit.sequence, commit.step) for commit in commits if step in (None, commit.step)]
    sequence, newest_step = max(positions, default=(0, 0))
    return StoredState(sequence, folders.read_identity(storage), newest_step)
