"""Writing snapshots from memory to storage and committing them: files, part records, commit, pruning. No torch.

This is the part of the checkpoint service that knows storage. A service has one `SaveWriter`, whose methods may be
called by several threads at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megascale.checkpoint.background import pending_saves
from megascale.checkpoint.background.pending_saves import SaveFailed, WrittenFile
from megascale.checkpoint.background.service_protocol import SaveResult, StageSnapshot
from megascale.checkpoint.background.snapshot_memory import Progress, Slot
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.commit import Commit
from megascale.checkpoint.format.write_plan import data_file_name
from megascale.checkpoint.storage.base import Storage, explain_save_error
from megascale.checkpoint.storage.opening import open_storage
from megascale.core.exit_record import NO_RECORD, ExitRecord, find_exit_record
from megascale.errors import TrainingError
from megascale.services.connection_server import ConnectionServer

log = logging.getLogger("megascale.checkpoint.background.service")

START_TIMEOUT = 30.0  # seconds from the service's start to its first trainer
_MIN_POLL = 0.02  # seconds between two looks for other services' parts, growing to _MAX_POLL
_MAX_POLL = 1.0
_MAX_SWEEP_POLL = 10.0  # seconds between two removals of files that other services still write of a withdrawn save
_WRITE_BYTES = 64 << 20  # written at once while a snapshot is being staged


class ServiceLifetime:
    """Decides when the service ends: work keeps it alive, and so does the time in which trainers may return.

    Args:
        linger: seconds to wait for trainers.

    Attributes:
        reception: serves the trainers.
        goodbye: whether the trainers have reported the end of the run.
    """

    reception: ConnectionServer

    def __init__(self, linger: float) -> None:
        self.goodbye = False
        self._linger = linger
        self._working = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Keep the service alive in the body."""
        with self._lock:
            self._working += 1
        try:
            yield
        finally:
            with self._lock:
                self._working -= 1
            self.reception.record_activity()

    def is_deserted(self) -> bool:
        """Return whether no trainer has been connected for longer than the service waits for one."""
        # The first trainer may need a while, however short the service is to wait afterwards.
        has_started = self.reception.has_had_clients or self._linger < 0
        return self.reception.is_idle(self._linger if has_started else max(self._linger, START_TIMEOUT))

    def is_done(self) -> bool:
        """Return whether to end: no work is left, and trainers have said goodbye or been away for long enough."""
        with self._lock:
            is_unused = not self.reception.client_count and not self._working
            return is_unused and (self.goodbye or self.is_deserted())


@dataclass
class HostSave:
    """The part of one save that this host writes.

    Attributes:
        local: processes of this host.
        written: files of processes that have written theirs.
        ended: processes that have written their file or failed.
    """

    local: set[int]
    written: dict[int, WrittenFile] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        """Return whether all processes have ended."""
        return self.ended >= self.local


class SaveWriter:
    """Writes snapshots to storage and commits them.

    Attributes:
        plans: index and torch's form of it, by name of the plan.
    """

    def __init__(self, lifetime: ServiceLifetime) -> None:
        self.plans: dict[str, tuple[bytes, bytes]] = {}
        self._lifetime = lifetime
        self._saves: dict[str, HostSave] = {}  # under way, by generation
        self._results: dict[str, SaveResult] = {}  # by generation
        self._changed = threading.Condition()
        self._pruning = threading.Lock()

    def wait_for_pruning(self) -> None:
        """Wait until the checkpoints that a commit made superfluous are removed."""
        with self._pruning:
            pass

    def wait_for_result(self, generation: str, is_connected: Callable[[], bool]) -> SaveResult:
        """Return the result of a save once it is committed or given up.

        Raises EOFError if the client is no longer connected.
        """
        with self._changed:
            while not self._changed.wait_for(lambda: generation in self._results, timeout=1.0):
                if not is_connected():
                    raise EOFError
        return self._results[generation]

    def write_file(self, message: StageSnapshot, slot: Slot, progress: Progress) -> None:
        """Write one process's file as far as its snapshot is complete, until the file is complete and durable."""
        size = message.size
        storage = open_storage(message.storage)
        if message.leader:
            self._begin_save(storage, message)
        if not size:
            return
        name = f"{message.generation}-{data_file_name(message.rank)}"
        writer = storage.create(f"{folders.step_name(message.step)}/{name}")
        try:
            written = 0
            while written < size:
                ready = progress.wait(min(written + _WRITE_BYTES, size))
                # Data that begins on a page is written without a copy, so all but the last write end on one.
                if ready == size:
                    stop = ready
                else:
                    stop = ready - ready % _WRITE_BYTES
                writer.write(slot.memory.view[written:stop])
                written = stop
            writer.finish()
        except BaseException:
            writer.abort()
            raise

    def finish_file(self, message: StageSnapshot, slot: Slot, crc: int | None, error: OSError | None) -> None:
        """Record that a process's file is written, or failed, and commit the save or give it up.

        Args:
            crc: CRC-32 of the file, None if its snapshot never became complete.
            error: why the file could not be written.

        Raises TrainingError with the reason if there is no file.
        """
        storage = open_storage(message.storage)
        written = None
        if error is None and crc is not None:
            written = WrittenFile(message.size, crc, slot.crcs)
        save = self._record_end(message, written)
        try:
            if written is None:
                raise error or OSError("its state could not be completed")
            if save.is_over:
                pending_saves.add_part(storage, message.step, message.generation, save.written)
        except OSError as failure:
            explained = explain_save_error(failure, storage, message.required_bytes)
            if message.leader:
                self._forget_save(message, save)
                self._give_up(storage, message, str(explained), find_exit_record(explained))
            else:
                _start_thread(self._report_failure, storage, message, save, explained)
            raise explained from None
        self._forget_save(message, save)
        if message.leader:
            _start_thread(self._commit_when_complete, storage, message)

    def _begin_save(self, storage: Storage, message: StageSnapshot) -> None:
        with self._pruning:  # the space of checkpoints that are being removed counts as free
            free = storage.free()
        if free is not None and free < message.required_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        state = json.loads(message.state)
        folders.check_owner(storage, state)
        plan, metadata = self.plans[message.plan]
        pending_saves.begin_save(
            storage,
            message.step,
            message.generation,
            ranks=message.ranks,
            keep=message.keep,
            state=state,
            plan=plan,
            metadata=metadata,
        )

    def _record_end(self, message: StageSnapshot, written: WrittenFile | None) -> HostSave:
        """Record that a process's file is written, or failed; return a copy of the host's part of the save."""
        with self._changed:
            save = self._saves.setdefault(message.generation, HostSave(set(message.local_ranks)))
            save.ended.add(message.rank)
            if written is not None:
                save.written[message.rank] = written
            return HostSave(save.local, dict(save.written), set(save.ended))

    def _forget_save(self, message: StageSnapshot, save: HostSave) -> None:
        """Forget a save of which this host writes nothing more, its records included."""
        if save.is_over:
            with self._changed:
                self._saves.pop(message.generation, None)

    def _report_failure(self, storage: Storage, message: StageSnapshot, save: HostSave, error: TrainingError) -> None:
        """Write a failure record for the first process's service as soon as the disk has room for it."""
        pause = _MIN_POLL
        with self._lifetime.work():
            while True:
                try:
                    pending_saves.add_failure(
                        storage,
                        message.step,
                        message.generation,
                        message.rank,
                        str(error),
                        ended=save.ended,
                        fault=find_exit_record(error),
                    )
                    break
                except OSError:
                    if self._lifetime.is_deserted():
                        break
                    time.sleep(pause)
                    pause = min(pause * 1.5, _MAX_POLL)
            self._forget_save(message, save)

    def _commit_when_complete(self, storage: Storage, message: StageSnapshot) -> None:
        """Commit once all services' parts exist; give up when one failed or a later save was committed."""
        step = message.step
        generation = message.generation
        pause = _MIN_POLL
        with self._lifetime.work():
            while True:
                try:
                    with self._pruning:  # an older commit of this step may just be being removed
                        committed = pending_saves.try_commit(storage, step, generation)
                except Exception as error:  # the trainer waits for a result in any case
                    reason, fault = self._explain_failure(error, storage, message)
                    return self._give_up(storage, message, reason, fault)
                if committed is not None:
                    return self._finish_commit(storage, message, *committed)
                if self._is_overtaken(generation):
                    return self._give_up(storage, message, "a later save was committed first")
                if self._lifetime.is_deserted():
                    # The files stay: the next start commits them if the other parts exist by then.
                    return self._set_result(message, SaveResult(False, reason="other hosts' parts did not come"))
                time.sleep(pause)
                pause = min(pause * 1.5, _MAX_POLL)

    def _is_overtaken(self, generation: str) -> bool:
        """Return whether a later save was committed."""
        return max((g for g, r in list(self._results.items()) if r.committed), default="") > generation

    def _finish_commit(self, storage: Storage, message: StageSnapshot, commit: Commit, keep: int) -> None:
        """Publish the result, then remove older checkpoints: that takes a while, and the trainer need not wait."""
        with self._pruning:
            self._set_result(message, SaveResult(True, bytes=commit.size))
            try:
                folders.prune(storage, keep)
            except Exception as error:
                log.warning("older checkpoints could not be removed: %s", error or repr(error))

    def _explain_failure(self, error: Exception, storage: Storage, message: StageSnapshot) -> tuple[str, ExitRecord]:
        """Return why a commit failed, and the fault as a code; log the traceback of an unexpected failure."""
        if isinstance(error, SaveFailed):
            return str(error), find_exit_record(error)
        if isinstance(error, OSError):
            explained = explain_save_error(error, storage, message.required_bytes)
            return str(explained), find_exit_record(explained)
        if not isinstance(error, ValueError):
            log.exception("the commit of step %d failed", message.step)
        return f"the commit failed: {error or repr(error)}", find_exit_record(error)

    def _give_up(self, storage: Storage, message: StageSnapshot, reason: str, fault: ExitRecord = NO_RECORD) -> None:
        """Remove the files of a save that will not be committed, and publish the result."""
        writing = set(range(message.ranks)) - set(message.local_ranks)
        with contextlib.suppress(OSError, ValueError):
            writing -= pending_saves.ended_ranks(storage, message.step, message.generation)
        try:
            folders.withdraw(storage, message.step, message.generation)
        except Exception as error:
            log.warning("the files of step %d could not be removed: %s", message.step, error or repr(error))
        _start_thread(self._sweep, storage, message, writing)
        self._set_result(message, SaveResult(False, reason=reason[:2000], record=fault))

    def _set_result(self, message: StageSnapshot, result: SaveResult) -> None:
        with self._changed:
            self._results[message.generation] = result
            self._changed.notify_all()

    def _sweep(self, storage: Storage, message: StageSnapshot, writing: set[int]) -> None:
        """Remove the files that other processes still write of a withdrawn save, until all have ended.

        Otherwise an incomplete save would occupy the disk until the next commit, for which there may be no room then.

        Args:
            writing: processes of other hosts that have not ended; those of this host are in `_saves`.
        """
        step = message.step
        generation = message.generation
        pause = _MIN_POLL
        with self._lifetime.work():
            while True:
                has_local = generation in self._saves  # files completed from here on are removed in the next pass
                with contextlib.suppress(OSError, ValueError):
                    writing -= pending_saves.ended_ranks(storage, step, generation)
                    folders.withdraw(storage, step, generation, late=True)
                # After a later commit, pruning removes the files.
                is_over = not (writing or has_local)
                if is_over or self._lifetime.is_deserted() or self._is_overtaken(generation):
                    return
                time.sleep(pause)
                pause = min(pause * 1.5, _MAX_SWEEP_POLL)


class FileWriting:
    """A file that a thread writes while its snapshot is being staged, as far as `progress` says."""

    def __init__(self, writer: SaveWriter, message: StageSnapshot, slot: Slot) -> None:
        self.progress = Progress()
        self._writer = writer
        self._message = message
        self._slot = slot
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._writer.write_file(self._message, self._slot, self.progress)
        except OSError as error:
            self._error = error
        except Exception as error:
            log.exception("writing failed")
            self._error = OSError(repr(error))

    def finish(self, crc: int | None) -> None:
        """Wait for the file and record it, or that there is none.

        Args:
            crc: CRC-32 of the file, None if its snapshot never became complete.

        Raises TrainingError with the reason if there is no file.
        """
        self.progress.fail()
        self._thread.join()
        self._writer.finish_file(self._message, self._slot, crc, self._error)


def _start_thread(function: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=function, args=args, daemon=True).start()
