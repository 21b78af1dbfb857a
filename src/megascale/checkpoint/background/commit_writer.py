"""From a snapshot in memory to a commit in storage: files, part records, the commit, what is superfluous. No torch.

The half of the checkpoint service that knows storage. One `Writer` a service; all its methods may be called by several
threads at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megascale.checkpoint.background import pending_saves
from megascale.checkpoint.background.pending_saves import Failed, Written
from megascale.checkpoint.background.service_protocol import Outcome, Staged
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.staged_file import Progress, Slot
from megascale.checkpoint.format.step_folders import Commit, step_name
from megascale.checkpoint.format.write_plan import data_file
from megascale.checkpoint.storage.base import Storage
from megascale.checkpoint.storage.opening import open_storage
from megascale.checkpoint.storage.save_errors import explain
from megascale.errors import TrainingError

log = logging.getLogger("megascale.checkpoint.background.service")

_POLL = 0.02  # seconds between looks for other services' parts, growing to _POLL_MAX
_POLL_MAX = 1.0
_RUN = 64 << 20  # bytes that are written at once while a snapshot is completed


@dataclass
class Saving:
    """A save under way on this host."""

    step: int
    local: set[int]
    written: dict[int, Written] = field(default_factory=dict)


class Writer:
    """Saves under way on this host and what became of those before.

    Args:
        work: a context that keeps the service alive.
        given_up: whether nobody is left who could bring what a commit still lacks.
    """

    def __init__(
        self, work: Callable[[], contextlib.AbstractContextManager[None]], given_up: Callable[[], bool]
    ) -> None:
        self._work, self._given_up = work, given_up
        self.plans: dict[str, tuple[bytes, bytes]] = {}
        self._saving: dict[str, Saving] = {}
        self._results: dict[str, Outcome] = {}
        self._changed = threading.Condition()
        self._pruning = threading.Lock()

    def start(self, message: Staged, slot: Slot) -> Writing:
        """Begin to write a process's file, as far as its snapshot is complete."""
        return Writing(self, message, slot)

    def pruned(self) -> contextlib.AbstractContextManager[Any]:
        """Entered when the checkpoints that a commit made superfluous are gone."""
        return self._pruning

    def wait(self, generation: str, alive: Callable[[], bool]) -> Outcome:
        """What became of a save, once it is committed or given up; EOFError if the one who asks has gone."""
        with self._changed:
            while not self._changed.wait_for(lambda: generation in self._results, timeout=1.0):
                if not alive():
                    raise EOFError
        return self._results[generation]

    def write(self, message: Staged, slot: Slot, progress: Progress) -> None:
        """Write one process's file as far as the snapshot is complete, until it is complete and durable."""
        rank, step, generation, size = message.rank, message.step, message.generation, message.size
        storage = open_storage(message.storage)
        if message.leader:
            self._begin(storage, message)
        if size:
            sink = storage.create(f"{step_name(step)}/{generation}-{data_file(rank)}")
            try:
                at = 0
                while at < size:
                    ready = progress.wait(min(at + _RUN, size))
                    # Whole runs: what begins on a page goes to the disk from where it lies.
                    stop = ready if ready == size else ready - ready % _RUN
                    sink.write(slot.memory.view[at:stop])
                    at = stop
                sink.finish()
            except BaseException:
                sink.abort()
                raise

    def close(self, message: Staged, slot: Slot, crc: int | None, error: OSError | None) -> None:
        """What follows when a process's file is written, or was not (then without a checksum or with an error)."""
        rank, step, generation = message.rank, message.step, message.generation
        storage = open_storage(message.storage)
        try:
            if error is not None or crc is None:
                raise error or OSError("its state could not be completed")
            self._part(storage, message, Written(message.size, crc, slot.crcs))
        except OSError as error:
            why = str(explain(error, storage, message.needed))
            with contextlib.suppress(OSError):
                pending_saves.add_failure(storage, step, generation, rank, why)
            if message.leader:
                self._finish(storage, step, generation, Outcome(False, why=why[:2000]), withdraw=True)
            raise TrainingError(why) from None
        if message.leader:
            self._watch(storage, step, generation)

    def _begin(self, storage: Storage, message: Staged) -> None:
        with self._pruning:  # what is being removed counts as free
            free = storage.free()
        if free is not None and free < message.needed:
            raise OSError(errno.ENOSPC, "No space left on device")
        state = json.loads(message.state)
        folders.check_owner(storage, state)
        plan, metadata = self.plans[message.plan]
        pending_saves.begin(
            storage,
            message.step,
            message.generation,
            message.ranks,
            message.keep,
            state,
            plan,
            metadata,
        )

    def _part(self, storage: Storage, message: Staged, written: Written) -> None:
        """Note that a process's file is written; the last of this host's processes writes the part record."""
        with self._changed:
            saving = self._saving.setdefault(message.generation, Saving(message.step, set(message.local)))
            saving.written[message.rank] = written
            last = saving.written.keys() >= saving.local
            if last:
                del self._saving[message.generation]
        if last:
            pending_saves.add_part(storage, message.step, message.generation, saving.written)

    def _watch(self, storage: Storage, step: int, generation: str) -> None:
        threading.Thread(target=self._commit, args=(storage, step, generation), daemon=True).start()

    def _commit(self, storage: Storage, step: int, generation: str) -> None:
        """Commit once all services' parts are there; give up when one failed or a later save has overtaken it."""
        pause = _POLL
        with self._work():
            while True:
                try:
                    with self._pruning:  # an older commit of this step may just be on its way out
                        found = pending_saves.try_commit(storage, step, generation)
                    if found is not None:
                        return self._committed(storage, step, generation, *found)
                except Exception as error:  # whoever waits for the outcome must be told one
                    if not isinstance(error, Failed | OSError | ValueError):
                        log.exception("the commit of step %d failed", step)
                    why = str(error) if isinstance(error, Failed) else f"the commit failed: {error or repr(error)}"
                    return self._finish(storage, step, generation, Outcome(False, why=why[:2000]), withdraw=True)
                if max((g for g, r in list(self._results.items()) if r.committed), default="") > generation:
                    result = Outcome(False, why="a later save was committed first")
                    return self._finish(storage, step, generation, result, withdraw=True)
                if self._given_up():
                    # What is there stays: the next start commits it if the rest has come by then.
                    result = Outcome(False, why="other hosts' parts did not come")
                    return self._finish(storage, step, generation, result, withdraw=False)
                time.sleep(pause)
                pause = min(pause * 1.5, _POLL_MAX)

    def _committed(self, storage: Storage, step: int, generation: str, commit: Commit, keep: int) -> None:
        """Say so, then remove older checkpoints: that takes a while, and nobody need wait for it."""
        with self._pruning:
            result = Outcome(True, bytes=commit.size)
            self._finish(storage, step, generation, result, withdraw=False)
            try:
                folders.prune(storage, keep)
            except Exception as error:
                log.warning("older checkpoints could not be removed: %s", error or repr(error))

    def _finish(self, storage: Storage, step: int, generation: str, result: Outcome, withdraw: bool) -> None:
        if withdraw:
            try:
                folders.withdraw(storage, step, generation)
            except Exception as error:
                log.warning("what was written of step %d could not be removed: %s", step, error or repr(error))
        with self._changed:
            self._results[generation] = result
            self._changed.notify_all()


class Writing:
    """A file that is written while its snapshot is completed: `progress` says how far it is."""

    def __init__(self, writer: Writer, message: Staged, slot: Slot) -> None:
        self.progress = Progress()
        self._writer, self._message, self._slot = writer, message, slot
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._writer.write(self._message, self._slot, self.progress)
        except OSError as error:
            self._error = error
        except Exception as error:
            log.exception("writing failed")
            self._error = OSError(repr(error))

    def finish(self, crc: int | None) -> None:
        """Wait for the file, then note it, or (also where there is no checksum of its snapshot) that there is none.

        Raises TrainingError with the reason if there is none.
        """
        self.progress.fail()
        self._thread.join()
        self._writer.close(self._message, self._slot, crc, self._error)
