"""A watch over the peers of an exchange: the processes on this host for whose flags a rank waits (exchange.py).

A process that has died sets no flag. A thread therefore sleeps until the kernel reports the end of a peer's process. A
peer that closes its own watch before it ends has ended as planned. After any other end this rank's waits are released,
and the rank's next check of its peers raises an error. The same happens if a peer hangs: if calls are in flight, and
none has begun or ended for the time-out of the group. A process whose waits cannot be released is ended with a message.

A rank that leaves a failed attempt releases its waits too (`release_all`), since its peers signal no more. If its
process stays for the next attempt, it stops the watches once its device is idle (`stop_all`).
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from megascale.core.exit_record import ExitKind, attach_record
from megascale.errors import TrainingError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CLOSED = 1  # value of a rank's byte in the shared page once the rank has closed its watch
_POLL_SECONDS = 1.0  # between two checks of the progress of calls, and of processes without a descriptor
_RELEASE_SECONDS = 0.001  # between two releases of waits; later calls wait again
_RAISE_SECONDS = 30.0  # from a failure until the process is ended if its main thread does not call `check`
_RELEASE_CHECK_SECONDS = 50 * _RELEASE_SECONDS  # between two checks that releases return
_BLOCKED_SECONDS = 5.0  # from the last release until the process is ended if a release does not return

_open_watches: set[PeerWatch] = set()  # the watches of this process that are not stopped


def release_all(reason: str) -> None:
    """Release the waits of all exchanges of this process until `stop_all`. Any thread may call this function.

    Args:
        reason: why this rank leaves its peers, for the error that `PeerWatch.check` raises.
    """
    for watch in tuple(_open_watches):
        watch.release_waits(reason)


def stop_all(synchronize: Callable[[], None]) -> None:
    """Stop all watches of this process after a failure. The process may then free the memory of its exchanges.

    Args:
        synchronize: waits until the device is idle. Waits are still released meanwhile.
    """
    watches = tuple(_open_watches)
    if watches:
        synchronize()
    for watch in watches:
        watch.stop()


class Member(NamedTuple):
    """A process of the group.

    Attributes:
        world_rank: rank in the world, for messages.
        namespace: PID namespace, as the link /proc/self/ns/pid names it.
        boot_id: identifies the host since its last start, "" if it is unknown, as in some sandboxes.
    """

    world_rank: int
    pid: int
    namespace: str
    boot_id: str = ""


def describe_process(world_rank: int) -> Member:
    """Return this process as a member of the groups of its rank."""
    namespace = os.readlink("/proc/self/ns/pid")
    return Member(world_rank, os.getpid(), namespace=namespace, boot_id=_read_boot_id())


def _read_boot_id() -> str:
    """Return the random id that the kernel makes at each boot, "" if it is unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def explain_separation(members: Sequence[Member]) -> str:
    """Return why the members cannot map each other's memory: several hosts or containers; "" if they can."""
    hosts = {member.boot_id for member in members}
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts"
    namespaces = {member.namespace for member in members}
    if len(namespaces) > 1:
        return f"its ranks are in {len(namespaces)} PID namespaces"
    return ""


def make_page(size: int) -> str:
    """Create the file that the watches of `size` ranks share, one zero byte per rank, and return its path.

    The caller removes the file when all ranks have opened it.
    """
    descriptor, path = tempfile.mkstemp(prefix="megascale-exchange-")
    os.truncate(descriptor, size)
    os.close(descriptor)
    return path


class PeerWatch:
    """One rank's watch over the other processes of a group.

    Raises OSError if the page cannot be opened, or if a process has ended or is in another PID namespace.

    Args:
        rank: this process's rank in the group, and so its index in `members`.
        page: file of `make_page`.
        release: ends all waits of this rank; a thread calls it repeatedly after a failure, until `stop`.
        count_calls: returns how many calls have begun.
        is_idle: returns whether no call is in flight; called only after a second without a new call.
        timeout: seconds after which calls without progress are a failure.

    Attributes:
        failure: why waits were released, "" if they were not.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        page: str,
        release: Callable[[], None],
        count_calls: Callable[[], int],
        is_idle: Callable[[], bool],
        timeout: float,
    ) -> None:
        self.failure = ""
        self._on_failure: Callable[[], None] = lambda: None
        self._lost_rank = -1  # world rank of the peer that has failed; -1 if unknown
        self._rank = rank
        self._members = list(members)
        self._release = release
        self._count_calls = count_calls
        self._is_idle = is_idle
        self._timeout = timeout
        self._is_known = False  # whether the main thread, or the thread that leaves the attempt, knows of the failure
        self._last_release = 0.0  # `time.monotonic()`
        self._is_closing = threading.Event()
        self._closing_lock = threading.Lock()  # held while the pipe is written, so that it is not closed meanwhile
        self._check_namespaces()
        with Path(page).open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), len(self._members))
        self._wake_reader, self._wake_writer = os.pipe()
        self._descriptors = self._open_processes()
        self._interval = min(_POLL_SECONDS, timeout / 4)  # so that a hang is noticed within 1.5 time-outs
        self._threads: list[threading.Thread] = []
        _open_watches.add(self)
        self._start_thread(self._run)
        self._start_thread(self._watch_progress)

    def check(self) -> None:
        """Raise TrainingError if waits were released: results are then undefined."""
        if not self.failure:
            return
        self._is_known = True
        lost = TrainingError(f"rank {self._members[self._rank].world_rank}: {self.failure}")
        raise attach_record(lost, ExitKind.LOST_PEER, rank=self._lost_rank)

    def release_waits(self, reason: str) -> None:
        """Release this rank's waits until `stop`, because of `reason` unless there is an earlier failure.

        The caller limits the time in which the process leaves, so the watch does not end the process meanwhile.
        """
        self._is_known = True
        with self._closing_lock:
            if self.failure or self._is_closing.is_set():
                return
            self._fail(reason)
            os.write(self._wake_writer, b"\0")

    def close(self, failed: bool = False) -> None:
        """Stop the watch. Unless `failed`, the peers regard the end of this rank as planned.

        If this rank has failed, the watch goes on and releases waits until `stop` or until the process ends: the end of
        a process waits for its CUDA streams.
        """
        if failed:
            self.release_waits("this rank has failed")
            return
        if not self.failure:
            self._page[self._rank] = _CLOSED
        self.stop()

    def stop(self) -> None:
        """Stop the watch and its threads. If waits were released, the device must be idle."""
        with self._closing_lock:
            if self._is_closing.is_set():
                return
            self._is_closing.set()
            os.write(self._wake_writer, b"\0")
        for thread in self._threads:  # `_run` may append the thread that releases waits meanwhile
            thread.join()
        for descriptor in (self._wake_reader, self._wake_writer, *self._descriptors):
            os.close(descriptor)
        _open_watches.discard(self)

    def _start_thread(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"peer watch {target.__name__.strip('_')}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _check_namespaces(self) -> None:
        """Raise OSError if a peer is in another PID namespace, in which process ids differ."""
        namespace = self._members[self._rank].namespace
        for member in self._members:
            if member.namespace != namespace:
                raise OSError(
                    f"rank {member.world_rank} is in another PID namespace, where its end would not be noticed"
                )

    def _open_processes(self) -> dict[int, int]:
        """Return the rank in the group of each peer by the descriptor of the peer's process.

        A peer for which the system gives no descriptor is missing. `_run` polls it in /proc.
        """
        descriptors: dict[int, int] = {}
        for rank, member in enumerate(self._members):
            if rank == self._rank:
                continue
            try:
                descriptors[os.pidfd_open(member.pid)] = rank
            except ProcessLookupError:
                raise OSError(f"rank {member.world_rank} has ended") from None
            except OSError:
                return descriptors  # without the remaining processes
        return descriptors

    def _run(self) -> None:
        """Wait for a failure or for `stop`. After a failure release waits until `stop`.

        This thread makes no call of CUDA, which would block: a host that launches into a full queue holds a lock of
        the driver.
        """
        poller = select.poll()
        poller.register(self._wake_reader, select.POLLIN)
        for descriptor in self._descriptors:
            poller.register(descriptor, select.POLLIN)
        polled_ranks = set(range(len(self._members))) - set(self._descriptors.values()) - {self._rank}
        while not self.failure and not self._is_closing.is_set():
            for descriptor, _ in poller.poll(1000 * self._interval):  # milliseconds
                if descriptor in self._descriptors:
                    poller.unregister(descriptor)
                    self._judge_end(self._descriptors[descriptor])
            for rank in tuple(polled_ranks):
                if has_ended(self._members[rank].pid):
                    polled_ranks.discard(rank)
                    self._judge_end(rank)
        if self.failure:
            self._watch_releases()

    def _watch_progress(self) -> None:
        """Set a failure if calls are in flight and none begins or ends for the time-out."""
        calls = self._count_calls()
        progress_time = time.monotonic()
        while not self.failure and not self._is_closing.wait(self._interval):
            previous_calls, calls = calls, self._count_calls()
            if calls != previous_calls or self._is_idle():
                progress_time = time.monotonic()
            elif time.monotonic() - progress_time > self._timeout:
                self._fail(f"the exchange has made no progress for {self._timeout:g} seconds: a peer hangs")
                os.write(self._wake_writer, b"\0")

    def _judge_end(self, rank: int) -> None:
        """Fail if a peer's process has ended without closing its watch."""
        if self._page[rank] == _CLOSED:
            return
        member = self._members[rank]
        self._lost_rank = member.world_rank
        self._fail(f"rank {member.world_rank} (process {member.pid}) has ended during the exchange with it")

    def call_on_failure(self, action: Callable[[], None]) -> None:
        """Call `action` before the first release of waits, or now if the watch has failed. Any thread may run it."""
        self._on_failure = action
        if self.failure:
            action()

    def _fail(self, reason: str) -> None:
        """Set the failure, unless there is an earlier one."""
        self.failure = self.failure or reason

    def _watch_releases(self) -> None:
        """Let a thread release waits until `stop`. End the process if a release blocks, or if `check` is not called.

        A release needs a lock of the driver. It blocks if the main thread launches into a full queue: that thread holds
        the lock, and the queue cannot drain before the release.
        """
        self._on_failure()
        failure_time = self._last_release = time.monotonic()
        self._start_thread(self._release_waits)
        while not self._is_closing.wait(_RELEASE_CHECK_SECONDS):
            current_time = time.monotonic()
            if current_time - self._last_release > _BLOCKED_SECONDS:
                self._end_process(f"a release of its waits has not returned for {_BLOCKED_SECONDS:g} seconds")
            if not self._is_known and current_time - failure_time > _RAISE_SECONDS:
                # The main thread waits for the dead peer in another way, such as in a collective.
                self._end_process(f"the host has made no check for {_RAISE_SECONDS:g} seconds")

    def _release_waits(self) -> None:
        while not self._is_closing.wait(_RELEASE_SECONDS):
            self._release()
            self._last_release = time.monotonic()

    def _end_process(self, reason: str) -> None:
        message = f"rank {self._members[self._rank].world_rank}: {self.failure}; ending: {reason}"
        print(message, file=sys.stderr, flush=True)
        os._exit(1)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not waited for it yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    _, _, fields = text.rpartition(")")  # the command's name, in parentheses, may contain blanks
    state = fields.split()[0]
    return state in ("Z", "X")  # zombie or dead
