"""Storage side of the checkpoint service: writing snapshots from memory, committing, pruning. Needs no torch.

A service has one `SaveWriter`, whose methods several threads may call at the same time. Each host records the files
that it has written (`pending_saves`). The service of the first process commits a save once the records of all hosts
exist.
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

START_TIMEOUT = 30.0  # seconds that the service waits for its first trainer
# Seconds between two looks for the records of other services. The pause grows from the first to the second value.
_MIN_POLL = 0.02
_MAX_POLL = 1.0
_MAX_SWEEP_POLL = 10.0  # largest pause between two removals of files that other services still write
_WRITE_BYTES = 64 << 20  # bytes per write while a snapshot is being staged


class ServiceLifetime:
    """Decision when the service ends: not while it works, and not while trainers may still return.

    Args:
        linger: seconds that the service waits for trainers to return. If negative, the service does not wait.

    Attributes:
        has_run_ended: whether the trainers have reported the end of the run.
    """

    server: ConnectionServer

    def __init__(self, linger: float) -> None:
        self.has_run_ended = False
        self._linger = linger
        self._work_count = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Keep the service alive within the `with` block."""
        with self._lock:
            self._work_count += 1
        try:
            yield
        finally:
            with self._lock:
                self._work_count -= 1
            self.server.record_activity()

    def is_deserted(self) -> bool:
        """Return whether no trainer has been connected for longer than the service waits."""
        wait_seconds = self._linger
        # The first trainer may need longer to connect than a short `linger`.
        if self._linger >= 0 and not self.server.has_had_clients:
            wait_seconds = max(self._linger, START_TIMEOUT)
        return self.server.is_idle(wait_seconds)

    def is_done(self) -> bool:
        """Return whether the service can end: no work, and the run has ended or trainers are away."""
        with self._lock:
            is_unused = not self.server.client_count and not self._work_count
            return is_unused and (self.has_run_ended or self.is_deserted())


@dataclass
class HostSave:
    """Files of one save that this host writes.

    Attributes:
        written_files: complete files by rank.
        ended_ranks: ranks whose file is complete or has failed.
    """

    local_ranks: set[int]
    written_files: dict[int, WrittenFile] = field(default_factory=dict)
    ended_ranks: set[int] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        """Return whether the files of all ranks of this host are complete or have failed."""
        return self.ended_ranks >= self.local_ranks


class SaveWriter:
    """Writer of snapshots to storage, which also commits them.

    Attributes:
        plans: index, and index in torch's format, by name of the plan.
    """

    def __init__(self, lifetime: ServiceLifetime) -> None:
        self.plans: dict[str, tuple[bytes, bytes]] = {}
        self._lifetime = lifetime
        self._host_saves: dict[str, HostSave] = {}  # saves under way by generation
        self._results: dict[str, SaveResult] = {}  # results of ended saves by generation
        self._changed = threading.Condition()
        self._prune_lock = threading.Lock()

    def wait_for_pruning(self) -> None:
        """Wait until the checkpoints that a commit made superfluous are removed."""
        with self._prune_lock:
            pass

    def wait_for_result(self, generation: str, is_connected: Callable[[], bool]) -> SaveResult:
        """Wait until a save is committed or given up, and return its result.

        Raises:
            EOFError: the client is no longer connected.
        """
        with self._changed:
            while not self._changed.wait_for(lambda: generation in self._results, timeout=1.0):
                if not is_connected():
                    raise EOFError
        return self._results[generation]

    def write_file(self, message: StageSnapshot, slot: Slot, progress: Progress) -> None:
        """Write one rank's file while its snapshot is being completed. Return when the file is complete and durable."""
        size = message.size
        storage = open_storage(message.storage)
        if message.leader:
            self._begin_save(storage, message)
        if not size:
            return
        name = f"{message.generation}-{data_file_name(message.rank)}"
        writer = storage.create(f"{folders.step_name(message.step)}/{name}")
        try:
            written_bytes = 0
            while written_bytes < size:
                ready_bytes = progress.wait(min(written_bytes + _WRITE_BYTES, size))
                # Data that starts on a page boundary is written without a copy, so all but the last write end on one.
                if ready_bytes == size:
                    stop = ready_bytes
                else:
                    stop = ready_bytes - ready_bytes % _WRITE_BYTES
                writer.write(slot.memory.view[written_bytes:stop])
                written_bytes = stop
            writer.finish()
        except BaseException:
            writer.abort()
            raise

    def finish_file(self, message: StageSnapshot, slot: Slot, crc: int | None, error: OSError | None) -> None:
        """Record that a rank's file is complete or has failed. The leader then commits the save or gives it up.

        Args:
            crc: CRC-32 of the file, or None if its snapshot was not completed.
            error: error of writing the file, or None.

        Raises:
            TrainingError: the file is not complete; the message has the reason.
        """
        storage = open_storage(message.storage)
        written_file = None
        if error is None and crc is not None:
            written_file = WrittenFile(message.size, crc, slot.crcs)
        save = self._record_end(message, written_file)
        try:
            if written_file is None:
                raise error or OSError("its state could not be completed")
            if save.is_over:
                pending_saves.add_part(storage, message.step, message.generation, save.written_files)
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
        """Check owner and free space of the storage, and write what another process would need to commit the save."""
        with self._prune_lock:  # wait for removals under way, whose space will be free
            free_bytes = storage.free()
        if free_bytes is not None and free_bytes < message.required_bytes:
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

    def _record_end(self, message: StageSnapshot, written_file: WrittenFile | None) -> HostSave:
        """Record that a rank's file is complete or has failed, and return a copy of this host's record of the save."""
        with self._changed:
            save = self._host_saves.setdefault(message.generation, HostSave(set(message.local_ranks)))
            save.ended_ranks.add(message.rank)
            if written_file is not None:
                save.written_files[message.rank] = written_file
            return HostSave(save.local_ranks, dict(save.written_files), set(save.ended_ranks))

    def _forget_save(self, message: StageSnapshot, save: HostSave) -> None:
        """Forget a save if this host writes no more files of it."""
        if save.is_over:
            with self._changed:
                self._host_saves.pop(message.generation, None)

    def _report_failure(self, storage: Storage, message: StageSnapshot, save: HostSave, error: TrainingError) -> None:
        """Write a failure record for the first process's service. Repeat until the disk has space for the record."""
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
                        ended=save.ended_ranks,
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
        """Commit once the records of all hosts exist. Give up if a host failed or a later save was committed."""
        step = message.step
        generation = message.generation
        pause = _MIN_POLL
        with self._lifetime.work():
            while True:
                try:
                    with self._prune_lock:  # pruning may just be removing an older commit of this step
                        committed = pending_saves.try_commit(storage, step, generation)
                except Exception as error:  # on any error the trainer must get a result
                    reason, fault = self._explain_failure(error, storage, message)
                    return self._give_up(storage, message, reason, fault)
                if committed is not None:
                    commit, keep = committed
                    return self._finish_commit(storage, message, commit, keep)
                if self._is_overtaken(generation):
                    return self._give_up(storage, message, "a later save was committed first")
                if self._lifetime.is_deserted():
                    # The files stay. The next start commits them if the records of the other hosts exist by then.
                    return self._set_result(message, SaveResult(False, reason="other hosts' parts did not come"))
                time.sleep(pause)
                pause = min(pause * 1.5, _MAX_POLL)

    def _is_overtaken(self, generation: str) -> bool:
        """Return whether a later save was committed. Generations sort by the number of their save."""
        return any(
            result.committed and result_generation > generation
            for result_generation, result in list(self._results.items())
        )

    def _finish_commit(self, storage: Storage, message: StageSnapshot, commit: Commit, keep: int) -> None:
        """Publish the result, then remove older checkpoints, for which the trainer need not wait."""
        with self._prune_lock:
            self._set_result(message, SaveResult(True, bytes=commit.size))
            try:
                folders.prune(storage, keep)
            except Exception as error:
                log.warning("older checkpoints could not be removed: %s", str(error) or repr(error))

    def _explain_failure(self, error: Exception, storage: Storage, message: StageSnapshot) -> tuple[str, ExitRecord]:
        """Return the reason and the record of a failed commit. Log the traceback if the failure is unexpected."""
        if isinstance(error, SaveFailed):
            return str(error), find_exit_record(error)
        if isinstance(error, OSError):
            explained = explain_save_error(error, storage, message.required_bytes)
            return str(explained), find_exit_record(explained)
        if not isinstance(error, ValueError):
            log.exception("the commit of step %d failed", message.step)
        return f"the commit failed: {str(error) or repr(error)}", find_exit_record(error)

    def _give_up(self, storage: Storage, message: StageSnapshot, reason: str, fault: ExitRecord = NO_RECORD) -> None:
        """Remove the files of a save that will not be committed, and publish its result."""
        writing_ranks = set(range(message.ranks)) - set(message.local_ranks)
        with contextlib.suppress(OSError, ValueError):
            writing_ranks -= pending_saves.read_ended_ranks(storage, message.step, message.generation)
        try:
            folders.withdraw_save(storage, message.step, message.generation)
        except Exception as error:
            log.warning("the files of step %d could not be removed: %s", message.step, str(error) or repr(error))
        _start_thread(self._sweep, storage, message, writing_ranks)
        self._set_result(message, SaveResult(False, reason=reason[:2000], record=fault))

    def _set_result(self, message: StageSnapshot, result: SaveResult) -> None:
        """Publish the result of a save to `wait_for_result`."""
        with self._changed:
            self._results[message.generation] = result
            self._changed.notify_all()

    def _sweep(self, storage: Storage, message: StageSnapshot, writing_ranks: set[int]) -> None:
        """Remove the files of a withdrawn save that ranks still write, until all ranks have ended.

        Otherwise the incomplete save would occupy the disk until the next commit, which may then lack the space.

        Args:
            writing_ranks: ranks of other hosts that have not ended. `_host_saves` has the ranks of this host.
        """
        step = message.step
        generation = message.generation
        pause = _MIN_POLL
        with self._lifetime.work():
            while True:
                # Read this before the removal, so that a file which is completed during it is removed in the next pass.
                is_writing_locally = generation in self._host_saves
                with contextlib.suppress(OSError, ValueError):
                    writing_ranks -= pending_saves.read_ended_ranks(storage, step, generation)
                    folders.withdraw_save(storage, step, generation, is_repeated=True)
                # After a later commit, pruning removes the files.
                is_over = not (writing_ranks or is_writing_locally)
                if is_over or self._lifetime.is_deserted() or self._is_overtaken(generation):
                    return
                time.sleep(pause)
                pause = min(pause * 1.5, _MAX_SWEEP_POLL)


class FileWriting:
    """Thread that writes a rank's file while its snapshot is being staged. It waits for `progress`."""

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
        """Wait until the file is complete or has failed, and record the result (see `SaveWriter.finish_file`).

        Args:
            crc: CRC-32 of the file, or None if its snapshot was not completed.

        Raises:
            TrainingError: the file is not complete; the message has the reason.
        """
        self.progress.fail()  # no effect if the snapshot is complete
        self._thread.join()
        self._writer.finish_file(self._message, self._slot, crc, self._error)


def _start_thread(function: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=function, args=args, daemon=True).start()
