"""Checkpoints of a run as its configuration asks for them: at once or in the background, from memory or storage."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megascale.checkpoint.background import pending_saves, service, service_protocol
from megascale.checkpoint.background.load_from_memory import find_held, load_held
from megascale.checkpoint.background.snapshot import Snapshots
from megascale.checkpoint.background.staging import SaveOutcome
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.step_folders import Commit
from megascale.checkpoint.loader import Accept, LoadReport, load, say
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.saver import save_to
from megascale.checkpoint.storage.opening import open_storage
from megascale.config import CheckpointConfig
from megascale.errors import DataError, TrainingError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)


class Checkpointer:
    """What a training loop needs; every method but `poll` and `due` is collective over the group.

    The loop: `load` once; each step forward and backward, `before_update`, the optimizer's update, then `save` where
    `due` says so; `finish` at the end. Outcomes of saves come from `save`, `poll` and `finish`, in order.

    Args:
        config: the [checkpoint] section.
        run: the run folder.
        shards: this process's boxes, views on live memory.
        group: the processes of the run; None: the default group, or this process alone.
        domain: this host's fault domain (rack, switch), for replicas; default: each host its own.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run: Path,
        shards: Sequence[TensorShard],
        *,
        group: ProcessGroup | None = None,
        domain: str = "",
    ) -> None:
        self.config, self.run, self.shards, self.domain = config, run, shards, domain
        self.group, self.peers = group, Peers(group)
        self.folder: Path | str = config.location or run / "checkpoints"
        self.loaded_from: Literal["nothing", "memory", "a peer's memory", "storage"] = "nothing"
        self._above = 0
        self._unsaved = False  # what was loaded is nowhere but in memory
        self._snapshots: Snapshots | None = None
        self._ready: list[SaveOutcome] = []
        self._passed_over: list[Commit] = []

    def save_target(self, step: int, last: bool = False) -> Literal["storage", "memory"] | None:
        """What the state after `step` is saved to; `last`: training ends here."""
        c = self.config
        if last or self._unsaved or (c.interval and step % c.interval == 0):
            return "storage"
        return "memory" if c.memory_interval and step % c.memory_interval == 0 else None

    def load(
        self,
        step: int | None = None,
        *,
        shards: Sequence[TensorShard] | None = None,
        initial: Sequence[TensorShard] | None = None,
        report: LoadReport | None = None,
        accept: Accept | None = None,
    ) -> dict[str, Any] | None:
        """Fill the shards (or only `shards`) from the newest state there is (or that of `step`) and return what was
        saved with it; None if there is none. Own memory comes before a peer's, that before storage, if it is as new.

        `initial`: what to fill instead from a checkpoint of step 0; `accept`: see `loader.Accept`. With all shards, no
        tensor of the saved model may be without a place. Raises DataError as `loader.load` does.
        """
        complete = shards is None
        shards = self.shards if shards is None else shards
        report = report if report is not None else LoadReport()
        held_damage = None
        storage = open_storage(self.folder)
        newest = None
        if self.peers.rank == 0:
            pending_saves.finish_pending(storage)
            commits = [c for c in folders.survey(storage)[0] if step in (None, c.step)]
            newest = (max((c.sequence for c in commits), default=0), folders.identity(storage))
        sequence, identity = self.peers.broadcast(newest, tuple[int, str | None] | None)
        if self.config.background and identity:
            state = self._load_held(sequence, identity, step, shards, report, accept, complete)
            if isinstance(state, dict):
                return state
            held_damage = state
        # A first save that died half-way leaves nothing to load and nothing lost: as if there were none.
        there = self.peers.broadcast(any(folders.survey(storage)) if self.peers.rank == 0 else None, bool | None)
        if not there and step is None:
            if held_damage:  # it may lie in the weights by now
                raise DataError(
                    f"{held_damage} and there is no checkpoint in {storage.url!r} to go back to; start over from step "
                    "0 with --checkpoint.resume=false"
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
        self._passed_over = report.passed_over
        self.loaded_from = "storage"
        return state

    def confirm_load(self) -> None:
        """The run goes on from what was loaded: checkpoints that were found damaged count as such from now on.

        If nothing was loaded, snapshots of a run before it in memory never are.
        """
        if self.peers.rank == 0:
            storage = open_storage(self.folder)
            if self.loaded_from == "nothing":
                folders.renew_identity(storage)
            for commit in self._passed_over:
                with contextlib.suppress(OSError):  # a disk that fails is told of by the next save
                    folders.mark_damaged(storage, commit)
        self._passed_over = []

    def _load_held(
        self,
        sequence: int,
        identity: str,
        step: int | None,
        shards: Sequence[TensorShard],
        report: LoadReport,
        accept: Accept | None,
        complete: bool,
    ) -> dict[str, Any] | str | None:
        """The state loaded from memory, None if there is none as new as storage's, or how it is damaged."""
        sock = None
        try:
            with contextlib.suppress(OSError, TrainingError):  # a host without a service has nothing in memory
                sock = service.connect_checkpoint_service(
                    service_protocol.private_folder(self.run), self.config.linger, self._log_file
                )
            held = find_held(sock, self.peers, identity)
            if held is None or held.sequence < sequence or step not in (None, held.step):
                return None
            result = load_held(sock, held, shards, self.peers, report, accept=accept, complete=complete)
        finally:
            if sock is not None:
                sock.close()
        if isinstance(result, str):
            damage = f"the state of step {held.step} in memory is damaged ({result})"
            if self.peers.rank == 0:
                say(f"{damage}; loading from storage instead")
            return damage
        self.loaded_from = "a peer's memory" if held.copies else "memory"
        self._above = held.sequence
        self._unsaved = held.sequence > sequence
        return result

    @property
    def _log_file(self) -> Path:
        return self.run / "logs" / "checkpoint-service.log"

    def save(self, step: int, state: dict[str, Any], *, persist: bool = True, wait: bool = False) -> bool:
        """Save the state after `step`; False if it was skipped because the last save is still under way.

        Args:
            state: what else to keep, as JSON; the first process's counts.
            persist: write it to storage; False: keep it in memory only (background).
            wait: rather wait than skip; for the last save of a run.

        Raises TrainingError at once if saving in the foreground fails; in the background the outcome says so.
        """
        if not self.config.background:
            begun = time.monotonic()
            size = save_to(open_storage(self.folder), step, self.shards, state, self.config.keep, self.peers)
            took = time.monotonic() - begun
            self._ready.append(SaveOutcome(step, self.peers.rank == 0, bytes=size, stall=took, seconds=took))
            return True
        begun = self._background().start(step, state, persist=persist, wait=wait)
        self._unsaved = self._unsaved and not (begun and persist)
        return begun

    @property
    def snapshots(self) -> Snapshots | None:
        """The background's side of it, once there is one."""
        return self._snapshots

    def _background(self) -> Snapshots:
        if self._snapshots is None:
            c = self.config
            self._snapshots = Snapshots(
                self.folder,
                self.shards,
                run=self.run,
                keep=c.keep,
                peers=self.peers,
                above=self._above,
                slots=c.slots or (2 if c.memory_interval else 1),
                replicas=c.replicas,
                address=c.replica_address,
                domain=self.domain,
                linger=c.linger,
            )
            log.info("staging memory: %s bytes on this process", f"{self._snapshots.memory:,}")
        return self._snapshots

    def prepare(self) -> None:
        """Start the service and allocate its memory now, so that the first save need not; after `load`, if at all."""
        if self.config.background:
            self._background()

    def before_update(self, step: int | None = None) -> None:
        """Let a copy under way finish before the state changes: call it before each optimizer update.

        step: which the update makes. Where its state is to be saved too, the last snapshot must be at its peer first:
        a lost host costs at most the steps between two of them.
        """
        if self._snapshots is not None:
            self._snapshots.before_update(kept=step is not None and self.save_target(step) is not None)

    def poll(self) -> list[SaveOutcome]:
        """Saves that have come to an end since the last call."""
        ready, self._ready = self._ready, []
        return ready + (self._snapshots.poll() if self._snapshots is not None else [])

    def finish(self, run_ended: bool = True) -> list[SaveOutcome]:
        """Wait until everything begun is saved; as `poll`. `over`: the run is, so the service need not wait on."""
        if self._snapshots is not None:
            self._ready += self._snapshots.finish(goodbye=run_ended)
            self._snapshots = None
        return self.poll()
