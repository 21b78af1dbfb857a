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
from megascale.core.exit_record import record_of
from megascale.errors import TrainingError

log = logging.getLogger("megascale.checkpoint.background.service")

_POLL = 0.02  # seconds between looks for other services' parts, growing to _POLL_MAX
_POLL_MAX = 1.0
_SWEEP_MAX = 10.0  # seconds between looks for what others still write of a save that was given up
_RUN = 64 << 20  # bytes that are written at once while a snapshot is completed


@dataclass
class Saving:
    """A save under way on this host: of its processes `local`, those that have written and those that have ended."""

    local: set[int]
    written: dict[int, Written] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        """Whether all of them have ended."""
        return self.ended >= self.local


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
        storage = open_storage(message.storage)
        failed = error is not None or crc is None
        written = None if failed or crc is None else Written(message.size, crc, slot.crcs)
        saving = self._end(message, written)
        try:
            if written is None:
                raise error or OSError("its state could not be completed")
            if saving.is_over:
                pending_saves.add_part(storage, message.step, message.generation, saving.written)
        except OSError as error:
            failure = explain(error, storage, message.needed)
            why = str(failure)
            if message.leader:
                self._forget(message, saving)
                self._finish(storage, message, Outcome(False, why=why[:2000], record=record_of(failure)), withdraw=True)
            else:
                self._spawn(self._tell_failure, storage, message, saving, failure)
            raise failure from None
        self._forget(message, saving)
        if message.leader:
            self._spawn(self._commit, storage, message)

    def _begin(self, storage: Storage, message: Staged) -> None:
        with self._pruning:  # what is being removed counts as free
            free = storage.free()
        if free is not None and free < message.needed:
            raise OSError(errno.ENOSPC, "No space left on device")
        state = json.loads(message.state)
        folders.check_owner(storage, state)
        plan, metadata = self.plans[message.plan]
        pending_saves.begin_save(
            storage,
            message.step,
            message.generation,
            message.ranks,
            message.keep,
            state,
            plan,
            metadata,
        )

    def _end(self, message: Staged, written: Written | None) -> Saving:
        """Note that a process's file is written, or will not be; return what is known of its host's since."""
        with self._changed:
            saving = self._saving.setdefault(message.generation, Saving(set(message.local)))
            saving.ended.add(message.rank)
            if written is not None:
                saving.written[message.rank] = written
            return Saving(saving.local, dict(saving.written), set(saving.ended))

    def _forget(self, message: Staged, saving: Saving) -> None:
        """Forget a save of which this host writes nothing more, its records included."""
        if saving.is_over:
            with self._changed:
                self._saving.pop(message.generation, None)

    def _spawn(self, function: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=function, args=args, daemon=True).start()

    def _tell_failure(self, storage: Storage, message: Staged, saving: Saving, failure: TrainingError) -> None:
        """Tell the first process's service that this part will not come, as soon as the disk has room for the word."""
        pause = _POLL
        with self._work():
            while True:
                try:
                    pending_saves.add_failure(
                        storage,
                        message.step,
                        message.generation,
                        message.rank,
                        str(failure),
                        ended=saving.ended,
                        fault=record_of(failure),
                    )
                    break
                except OSError:
                    if self._given_up():
                        break
                    time.sleep(pause)
                    pause = min(pause * 1.5, _POLL_MAX)
            self._forget(message, saving)

    def _commit(self, storage: Storage, message: Staged) -> None:
        """Commit once all services' parts are there; give up when one failed or a later save has overtaken it."""
        step, generation = message.step, message.generation
        pause = _POLL
        with self._work():
            while True:
                try:
                    with self._pruning:  # an older commit of this step may just be on its way out
                        found = pending_saves.try_commit(storage, step, generation)
                    if found is not None:
                        return self._committed(storage, message, *found)
                except Exception as error:  # whoever waits for the outcome must be told one
                    why = self._explain_failure(error, storage, message)
                    fault = explain(error, storage, message.needed) if isinstance(error, OSError) else error
                    result = Outcome(False, why=why[:2000], record=record_of(fault))
                    return self._finish(storage, message, result, withdraw=True)
                if self._is_overtaken(generation):
                    result = Outcome(False, why="a later save was committed first")
                    return self._finish(storage, message, result, withdraw=True)
                if self._given_up():
                    # What is there stays: the next start commits it if the rest has come by then.
                    result = Outcome(False, why="other hosts' parts did not come")
                    return self._finish(storage, message, result, withdraw=False)
                time.sleep(pause)
                pause = min(pause * 1.5, _POLL_MAX)

    def _is_overtaken(self, generation: str) -> bool:
        """Return whether a later save was committed."""
        return max((g for g, r in list(self._results.items()) if r.committed), default="") > generation

    def _committed(self, storage: Storage, message: Staged, commit: Commit, keep: int) -> None:
        """Say so, then remove older checkpoints: that takes a while, and nobody need wait for it."""
        with self._pruning:
            result = Outcome(True, bytes=commit.size)
            self._finish(storage, message, result, withdraw=False)
            try:
                folders.prune(storage, keep)
            except Exception as error:
                log.warning("older checkpoints could not be removed: %s", error or repr(error))

    def _explain_failure(self, error: Exception, storage: Storage, message: Staged) -> str:
        """Return why a commit failed, for the ranks; log the traceback of a failure that is not expected."""
        if isinstance(error, Failed):
            return str(error)
        if isinstance(error, OSError):
            return str(explain(error, storage, message.needed))
        if not isinstance(error, ValueError):
            log.exception("the commit of step %d failed", message.step)
        return f"the commit failed: {error or repr(error)}"

    def _finish(self, storage: Storage, message: Staged, result: Outcome, withdraw: bool) -> None:
        if withdraw:
            writing = set(range(message.ranks)) - set(message.local)
            with contextlib.suppress(OSError, ValueError):
                writing -= pending_saves.ended_ranks(storage, message.step, message.generation)
            try:
                folders.withdraw(storage, message.step, message.generation)
            except Exception as error:
                log.warning("the files of step %d could not be removed: %s", message.step, error or repr(error))
            self._spawn(self._sweep, storage, message, writing)
        with self._changed:
            self._results[message.generation] = result
            self._changed.notify_all()

    def _sweep(self, storage: Storage, message: Staged, writing: set[int]) -> None:
        """Remove what others still write of a save that was withdrawn, until all have ended.

        Else a half of it would fill the disk until the next commit, for which there may be no room then.

        Args:
            writing: processes of other hosts that have not ended; those of this host are in `_saving`.
        """
        step, generation = message.step, message.generation
        pause = _POLL
        with self._work():
            while True:
                has_local = generation in self._saving  # what ends from here on is removed by the next pass
                with contextlib.suppress(OSError, ValueError):
                    writing -= pending_saves.ended_ranks(storage, step, generation)
                    folders.withdraw(storage, step, generation, late=True)
                # What is older than a commit goes with the next pruning.
                if not (writing or has_local) or self._given_up() or self._is_overtaken(generation):
                    return
                time.sleep(pause)
                pause = min(pause * 1.5, _SWEEP_MAX)


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
