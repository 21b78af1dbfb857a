"""Checkpoints of a run as its configuration requires: in the foreground or background, from memory or storage."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megascale.checkpoint.background import pending_saves, service, service_protocol
from megascale.checkpoint.background.load_from_memory import find_memory_save, load_memory_save
from megascale.checkpoint.background.snapshot import Snapshots
from megascale.checkpoint.background.staging import SaveOutcome, StagingSlot
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.commit import Commit
from megascale.checkpoint.loader import AcceptState, LoadReport, load, warn
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


class Checkpointer:
    """Saves and loads for a training loop; every method but `poll` and `save_target` is collective over the group.

    The loop calls `load` once. Each step it calls `before_update` between the backward pass and the optimizer's update,
    then `save` where `save_target` says so. It calls `finish` at the end. Outcomes of saves come from `poll` and
    `finish`, in order.

    Args:
        config: the [checkpoint] section.
        run: the run folder.
        shards: this process's boxes, views on live memory.
        group: the processes of the run; None: the default group, or this process alone.
        domain: this host's fault domain (rack, switch), for replicas; "": each host is its own.
        reused_slots: staging memory that `leave` of this process's last checkpointer has returned.

    Attributes:
        loaded_from: source of the loaded state.
        is_standing: this process's shards had that state already, and nothing was loaded into them.
        snapshots: the saves in the background, None before `prepare` or the first save.
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
    ) -> None:
        self._reused_slots = reused_slots
        self.config = config
        self.run = run
        self.shards = shards
        self.domain = domain
        self.group = group
        self.peers = Peers(group)
        self.folder: Path | str = config.location or run / "checkpoints"
        self.loaded_from: Literal["nothing", "memory", "a peer's memory", "storage"] = "nothing"
        self.snapshots: Snapshots | None = None
        self.is_standing = False
        self._base_sequence = 0  # number of the save that was loaded from memory
        self._is_only_in_memory = False  # the loaded state is not in storage
        self._foreground_outcomes: list[SaveOutcome] = []
        self._skipped_commits: list[Commit] = []

    def save_target(self, step: int, last: bool = False) -> Literal["storage", "memory"] | None:
        """Return the target to which the state after `step` is to be saved, if any; `last`: training ends here."""
        interval = self.config.interval
        memory_interval = self.config.memory_interval
        if last or self._is_only_in_memory or (interval and step % interval == 0):
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
        standing_step: int | None = None,
    ) -> dict[str, Any] | None:
        """Fill the shards from the newest state (or that of `step`) and return the saved state, None if there is none.

        Memory of this host is preferred to a peer's, and that to storage, if it is as new.

        Args:
            shards: fill these only; None: fill all, and require a shard for every tensor of the saved model.
            initial: the shards to fill instead from a checkpoint of step 0.
            report: filled with this process's cost and findings.
            accept: see `loader.AcceptState`.
            standing_step: the step whose state the shards have already, -1 if none: they stay as they are if that
                state is the newest in memory. None on all processes, or on none.

        Raises DataError as `loader.load` does.
        """
        complete = shards is None
        shards = self.shards if shards is None else shards
        report = report or LoadReport()
        storage = open_storage(self.folder)
        sequence, identity = self.peers.compute_once(lambda: _find_newest(storage, step), tuple[int, str])
        damage = None
        if self.config.background and identity:
            state = self._load_from_memory(sequence, identity, step, shards, report, accept, complete, standing_step)
            if isinstance(state, dict):
                return state
            damage = state
        # A first save that died half-way leaves nothing to load, as if there were no checkpoint.
        has_commits = self.peers.compute_once(lambda: any(folders.list_commits(storage)), bool)
        if not has_commits and step is None:
            if damage:  # parts of it may have been copied into the weights
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
            complete=complete,
        )
        self._skipped_commits = report.skipped_commits
        self.loaded_from = "storage"
        return state

    def _load_from_memory(
        self,
        sequence: int,
        identity: str,
        step: int | None,
        shards: Sequence[TensorShard],
        report: LoadReport,
        accept: AcceptState | None,
        complete: bool,
        standing_step: int | None,
    ) -> dict[str, Any] | str | None:
        """Return the state loaded from memory, None if none is as new as storage's, or how it is damaged.

        Args:
            sequence: number of the newest commit in storage.
            identity: identity of the checkpoints folder.
        """
        connection = _connect_service(self.config, self.run)
        try:
            save = find_memory_save(connection, self.peers, identity)
            if save is None or save.sequence < sequence or step not in (None, save.step):
                return None
            if standing_step is not None:
                self.is_standing = standing_step == save.step
                if self.is_standing:
                    shards = []
                if any(self.peers.all_gather(self.is_standing, bool)):
                    complete = False  # the tensors that stay are of this model
            result = load_memory_save(connection, save, shards, self.peers, report, accept=accept, complete=complete)
        finally:
            if connection is not None:
                connection.close()
        if isinstance(result, str):
            self.is_standing = False
            damage = f"the state of step {save.step} in memory is damaged ({result})"
            if self.peers.rank == 0:
                warn(f"{damage}; loading from storage instead")
            return damage
        if save.replicas:
            self.loaded_from = "a peer's memory"
        else:
            self.loaded_from = "memory"
        self._base_sequence = save.sequence
        self._is_only_in_memory = save.sequence > sequence
        return result

    def confirm_load(self) -> None:
        """Record that the run continues from the loaded state: commits that were found damaged are marked.

        If nothing was loaded, a previous run's snapshots in memory can no longer be loaded.
        """
        if self.peers.rank == 0:
            storage = open_storage(self.folder)
            if self.loaded_from == "nothing":
                folders.renew_identity(storage)
            for commit in self._skipped_commits:
                with contextlib.suppress(OSError):  # the next save reports a failing disk
                    folders.mark_damaged(storage, commit)
        self._skipped_commits = []

    def save(self, step: int, state: dict[str, Any], *, persist: bool = True, wait: bool = False) -> bool:
        """Save the state after `step`; return False if it was skipped because the last save is still under way.

        Args:
            state: further state as JSON; the first process's counts.
            persist: write it to storage; False: keep it in memory only (background).
            wait: wait instead of skipping; for the last save of a run.

        Raises TrainingError if saving in the foreground fails; in the background the outcome reports it.
        """
        if not self.config.background:
            begun = time.monotonic()
            storage = open_storage(self.folder)
            size = save_to_storage(storage, step, self.shards, state, self.config.keep, self.peers)
            seconds = time.monotonic() - begun
            outcome = SaveOutcome(step, self.peers.rank == 0, bytes=size, stall=seconds, seconds=seconds)
            self._foreground_outcomes.append(outcome)
            return True
        has_begun = self._open_snapshots().start(step, state, persist=persist, wait=wait)
        if has_begun and persist:
            self._is_only_in_memory = False
        return has_begun

    def _open_snapshots(self) -> Snapshots:
        if self.snapshots is None:
            self.snapshots = Snapshots(
                self.config,
                self.folder,
                self.shards,
                run=self.run,
                peers=self.peers,
                base_sequence=self._base_sequence,
                domain=self.domain,
                reused_slots=self._reused_slots,
            )
            self._reused_slots = ()
            log.info("staging memory: %s bytes on this process", f"{self.snapshots.memory:,}")
        return self.snapshots

    def prepare(self) -> None:
        """Start the service and allocate its memory before the first save; call it after `load`, if at all."""
        if self.config.background:
            self._open_snapshots()

    def before_update(self, step: int | None = None) -> None:
        """Let a copy under way finish before the state changes; call it before each optimizer update.

        Args:
            step: the step that the update completes. If its state is to be saved too, the last snapshot must be at its
                peer first: a lost host then costs at most the steps between two saves.
        """
        if self.snapshots is not None:
            is_saved = step is not None and self.save_target(step) is not None
            self.snapshots.before_update(wait_for_replica=is_saved)

    def poll(self) -> list[SaveOutcome]:
        """Return the saves that have ended since the last call."""
        outcomes = self._foreground_outcomes
        self._foreground_outcomes = []
        if self.snapshots is not None:
            outcomes += self.snapshots.poll()
        return outcomes

    def leave(self) -> Sequence[StagingSlot]:
        """Let saves under way end and close all but the staging memory, because the process leaves a failed attempt.

        Not collective. The snapshots stay in the memory of this host's service. Return the staging memory for the next
        checkpointer.
        """
        if self.snapshots is None:
            return self._reused_slots
        slots = self.snapshots.leave()
        self.snapshots = None
        return slots

    def finish(self, run_ended: bool = True) -> list[SaveOutcome]:
        """Wait until every save has ended and return as `poll` does.

        Args:
            run_ended: the run has ended, so the service need not wait for trainers.
        """
        if self.snapshots is not None:
            self._foreground_outcomes += self.snapshots.finish(goodbye=run_ended)
            self.snapshots = None
        return self.poll()


def has_saved_state(config: CheckpointConfig, run: Path, peers: Peers) -> bool:
    """Return whether `Checkpointer.load` will find a state of this run, the same on all processes; collective."""
    storage = open_storage(config.location or run / "checkpoints")
    _, identity = peers.compute_once(lambda: _find_newest(storage, None), tuple[int, str])
    if peers.compute_once(lambda: any(folders.list_commits(storage)), bool):
        return True
    if not config.background or not identity:
        return False
    connection = _connect_service(config, run)
    try:
        return find_memory_save(connection, peers, identity) is not None
    finally:
        if connection is not None:
            connection.close()


def start_service(config: CheckpointConfig, run: Path) -> None:
    """Start this host's checkpoint service, if it is to have one, while the ranks still meet."""
    if not config.background:
        return
    log_file = run / "logs" / "checkpoint-service.log"
    with contextlib.suppress(TrainingError):  # `Checkpointer.prepare` reports it
        service.start_checkpoint_service(service_protocol.private_folder(run), config.linger, log_file)


def _connect_service(config: CheckpointConfig, run: Path) -> Conversation | None:
    """Return a conversation with this host's service, None if it does not start: then the host has no snapshots."""
    with contextlib.suppress(OSError, TrainingError):
        log_file = run / "logs" / "checkpoint-service.log"
        return service.connect_checkpoint_service(service_protocol.private_folder(run), config.linger, log_file)
    return None


def _find_newest(storage: Storage, step: int | None) -> tuple[int, str]:
    """Return the number of the newest commit (of `step`), 0 if there is none, and the folder's identity.

    Saves whose committer died are committed first.
    """
    pending_saves.finish_pending(storage)
    commits = [c for c in folders.list_commits(storage)[0] if step in (None, c.step)]
    return max((c.sequence for c in commits), default=0), folders.read_identity(storage)
