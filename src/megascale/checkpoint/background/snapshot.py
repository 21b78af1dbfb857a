"""The trainer's side of saving in the background: copy the state to host memory under the next step, then go on.

The weights do not change between one optimizer update and the next, so the copy runs beside forward and backward:
`start` begins it, `before_update` lets the update wait for what is left of it. Writing is the service's work.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from megascale.checkpoint.background import replica, replica_token, service, service_protocol
from megascale.checkpoint.background.last_snapshot import LastSnapshot
from megascale.checkpoint.background.pending_saves import BLANK
from megascale.checkpoint.background.replica_address import own_address, tell_open
from megascale.checkpoint.background.service_protocol import (
    Allocate,
    AwaitPages,
    Fill,
    Goodbye,
    Plan,
    Pruned,
    Register,
    Rows,
    Staged,
    Wait,
)
from megascale.checkpoint.background.staging import SaveOutcome, SnapshotCopy, Staging, next_slot, own_index
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.torch_index import torch_metadata
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.saver import agree, cut
from megascale.checkpoint.storage.base import PAGE
from megascale.checkpoint.storage.opening import open_storage
from megascale.core.exit_record import ExitKind, attach_record, record_of
from megascale.errors import FitError, MegascaleError, TrainingError
from megascale.services.conversation import Conversation

log = logging.getLogger(__name__)
_GRACE_PERIOD = 30.0  # seconds within which the service answers short questions; else it counts as gone
_GRACE_PERIOD_PER_GB = 3.0  # more of all processes' memory: a dead trainer's snapshot may be on its way to the disk
_AT_ONCE = 256 << 20  # bytes of a process that are waited for at the start; more come into place beside the first steps


class Snapshots:
    """Saves in the background for one set of shards. Construction and `start` are collective over the group.

    Args:
        folder: where checkpoints go, a path or an fsspec URL that all hosts see.
        shards: this process's boxes, views on the live memory that training changes in place.
        run: the run folder; names the service of this host.
        keep: committed checkpoints to leave.
        above: number that saves must come after (of a state loaded from memory).
        peers: the processes that save together.
        slots: snapshots in host memory; with one, a save that comes while the last is being written is skipped.
        replicas: copy each snapshot to a peer host's service.
        address: where this host's service takes copies.
        domain: fault domain of this host.
        linger: seconds the service waits for new trainers.

    Raises FitError if the host has not enough memory, TrainingError if the shards do not cover the tensors.
    """

    def __init__(
        self,
        folder: Path | str,
        shards: Sequence[TensorShard],
        *,
        run: Path,
        keep: int,
        peers: Peers,
        above: int = 0,
        slots: int = 1,
        replicas: bool = False,
        address: str = "127.0.0.1",
        domain: str = "",
        linger: float = 60.0,
    ) -> None:
        self.peers, self.keep, self.slots_wanted, self._above = peers, keep, slots, above
        self.storage = open_storage(folder)
        self._linger, self._place = linger, service_protocol.private_folder(run)
        self._log = run / "logs" / "checkpoint-service.log"
        self._outcomes: queue.SimpleQueue[SaveOutcome] = queue.SimpleQueue()
        self._current: SnapshotCopy | None = None
        self._replica_barrier = LastSnapshot()
        self._broken = False
        self.part, plan = agree(peers, shards)
        start = None
        if plan is not None:
            name = folders.identity(self.storage, create=True)
            start = (folders.new_generation(self.storage, above), name, plan.size)
        self.generation, self.identity, self.needed = peers.broadcast(start, tuple[str, str, int] | None)
        chunks = cut(shards)
        self._chunks = [chunks[i] for i in self.part.chunks.tolist()]
        self._index = own_index(shards, self.part, peers.rank)
        self._plan: tuple[bytes, bytes] | None = None
        if plan is not None:
            blank = plan.index.with_generation(BLANK, plan.index.columns["crc"])
            self._plan = (plan.index.to_bytes(), torch_metadata(blank))
        self._device = next((s.tensor.device for s in shards if s.tensor.is_cuda), torch.device("cpu"))
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._replicas, self._listen, self._domain = replicas, address, domain
        self._watches: queue.SimpleQueue[tuple[SnapshotCopy, str] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._slots: list[Staging] = []
        self._lacking: OSError | None = None  # what this process itself could not have, and not another
        self._lacking_rank = -1  # the first process without memory, the same on all
        if problem := self._open():
            raise self._refusal(problem) from self._lacking

    def _refusal(self, problem: str) -> MegascaleError:
        """Return the error for a start without the service, which records the rank that lacks memory."""
        if self._lacking_rank < 0:
            return TrainingError(problem)
        lacks_memory = self._lacking is not None and self._lacking.errno == errno.ENOMEM
        kind = ExitKind.HOST_MEMORY if lacks_memory else ExitKind.REFUSED
        return attach_record(FitError(problem), kind, rank=self._lacking_rank)

    @property
    def memory(self) -> int:
        """Bytes of host memory this process stages into, allocated once."""
        return max(self.part.size, PAGE) * self.slots_wanted

    def wait_for_memory(self) -> bool:
        """Wait until all memory is in place; whether it is page-locked, so that a device copies into it by itself."""
        locked = [slot.prepared.wait() and slot.page_lock() for slot in self._slots]
        return all(locked)

    def start(self, step: int, state: dict[str, Any], *, persist: bool = True, wait: bool = False) -> bool:
        """Begin a save of the shards as they are now; False if it was skipped because memory is still in use.

        The shards must not change before `before_update` has returned. Collective: all start or all skip.

        Args:
            persist: also write it to storage, waiting for memory that is not in place yet; else it stays in memory.
            wait: wait for memory to come free instead of skipping.
        """
        begun = time.monotonic()
        self.before_update()
        if not self.peers.all_true(not self._broken) and (problem := self._reopen()):
            self._broken = True
            self._outcomes.put(SaveOutcome(step, reason=problem, stall=time.monotonic() - begun))
            return False
        number = self._choose(wait, persist)
        if number is None:
            return False
        slot = self._slots[number]
        slot.page_lock()
        slot.whole = False
        try:
            self._sock.request(Fill(self.peers.rank, number))
        except OSError:
            self._broken = True  # found by the slot's thread too, which reports it
        self.generation = folders.next_generation(self.generation)
        message = Staged(
            rank=self.peers.rank,
            slot=number,
            step=step,
            generation=self.generation,
            identity=self.identity,
            state=json.dumps(state),
            ranks=self.peers.size,
            size=self.part.size,
            persist=persist,
            storage=self.storage.url,
            needed=self.needed,
            keep=self.keep,
            above=self._above,
            local=tuple(self._local),
            leader=self.peers.rank == 0,
            plan=self._plan_name,
            peer=self._peer,
            token=self._token,
        )
        copy = SnapshotCopy(SaveOutcome(step, bytes=self.needed), message, begun)
        slot.free.clear()
        slot.filled = self.generation
        self._replica_barrier.track(copy)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for target, source in slot.pairs:
                    target.copy_(source, non_blocking=True)
                copy.event = torch.cuda.Event(blocking=True)  # whoever waits for it leaves the core to others
                copy.event.record(self._stream)
        self._current = copy
        slot.work.put(copy)
        copy.outcome.stall += time.monotonic() - begun
        return True

    def _choose(self, wait: bool, persist: bool = False) -> int | None:
        """The slot of the next snapshot, the same on all; None if memory is in use. `wait`: until it is not."""
        for slot in self._slots:
            if wait or persist:  # what is to be written may not come again for many steps
                slot.prepared.wait()
            if wait and not slot.failed:
                slot.free.wait()
        slots, origin = self._slots, f"{self._above:08d}-"
        free, whole = [s.free.is_set() for s in slots], [s.whole for s in slots]
        flags = self.peers.each([*free, *whole, *(not (s.whole and s.filled.startswith(origin)) for s in slots)])
        count = len(slots)
        free, whole, other = flags[:count], flags[count : 2 * count], flags[2 * count :]
        return next_slot(free, whole, [s.filled for s in slots], [not flag for flag in other], self._above > 0)

    def before_update(self, kept: bool = False) -> None:
        """Let the copy under way finish before the shards change: call it before each optimizer update.

        On CUDA the current stream waits, not the host. kept: the host also waits until the last snapshot is complete in
        the peer's memory too; for a few seconds, since a peer that is gone must not hold up training.
        """
        if kept:
            self._replica_barrier.wait()
        copy, self._current = self._current, None
        if copy is None:
            return
        begun = time.monotonic()
        if copy.event is not None:
            first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            stream = torch.cuda.current_stream(self._device)
            first.record(stream)
            stream.wait_event(copy.event)
            second.record(stream)
            copy.waits = (first, second)
        else:
            copy.copied.wait()
        copy.outcome.stall += time.monotonic() - begun

    def poll(self) -> list[SaveOutcome]:
        """Saves that have come to an end since the last call."""
        found = []
        while not self._outcomes.empty():
            found.append(self._outcomes.get())
        return found

    def finish(self, goodbye: bool = True) -> list[SaveOutcome]:
        """Wait until all saves have come to an end; with `goodbye` the service may end. Returns as `poll`."""
        self.before_update()
        self._join()
        for slot in self._slots:
            slot.close()
        if goodbye and not self._broken:
            with contextlib.suppress(OSError):  # it has ended already
                self._sock.request(Goodbye())
        self._sock.close()
        return self.poll()

    def _open(self) -> str | None:
        """Get in touch with the service: memory, neighbours, the plan. Collective; what went wrong, the same on all."""
        me, problem, token = ("", "", 0, ""), None, ""
        if self._replicas:
            token, problem = replica_token.agree(self.peers, self.storage.url, self.identity)
            if problem:
                return problem
        try:
            self._sock = service.connect_checkpoint_service(self._place, self._linger, self._log)
            self._sock.timeout = _GRACE_PERIOD
            told = self._sock.request(Register(token, own_address(self._listen)))
            me = (told.service, own_address(self._listen), told.port, self._domain)
        except (OSError, TrainingError) as error:
            problem = f"the checkpoint service of a host cannot be reached: {error}"
        answers = self.peers.all_gather((problem, me), tuple[str | None, tuple[str, str, int, str]])
        if problem := next((p for p, _ in answers if p), None):
            return problem
        everyone = [other for _, other in answers]
        hosts = list(dict.fromkeys(name for name, *_ in everyone))
        if self._replicas and self.peers.rank == 0:
            tell_open([(address, port) for _, address, port, _ in everyone])
        self._local = [rank for rank, other in enumerate(everyone) if other[0] == me[0]]
        self._peer, self._token = None, token
        if self._replicas and len(hosts) > 1:
            by_host = {other[0]: other for other in everyone}
            partner = replica.partners([by_host[name][3] or name for name in hosts])[hosts.index(me[0])]
            _, address, port, _ = by_host[hosts[partner]]
            self._peer = (address, port)
        if problem := self._allocate():
            return problem
        self._closing.clear()
        self._broken = False
        self._threads = [self._spawn(self._look_after, number, slot) for number, slot in enumerate(self._slots)]
        if self.memory <= _AT_ONCE:
            self.wait_for_memory()
        self._watcher = self._spawn(self._watch) if self.peers.rank == 0 else None
        return None

    def _allocate(self) -> str | None:
        """Memory for this process's snapshots, and on the first process the plan's way to the service."""
        size = max(self.part.size, PAGE)
        self._plan_name = secrets.token_hex(4)
        problem = None
        try:
            if self._plan is not None:
                plan, metadata = self._plan
                self._sock.request(Plan(self._plan_name, len(plan)), plan + metadata)
            self._sock.timeout = _GRACE_PERIOD + _GRACE_PERIOD_PER_GB * self.memory * len(self._local) / 1e9
            answer = self._sock.request(Allocate(self.peers.rank, size, self.slots_wanted), self._index.to_bytes())
            self._sock.timeout = _GRACE_PERIOD
            self._slots = [
                Staging(handle, self.part.size, self._index, self._chunks, self._device, held)
                for handle, held in zip(self._sock.files, answer.held, strict=True)
            ]
        except OSError as error:
            self._lacking = error
            problem = (
                f"rank {self.peers.rank} on {socket.gethostname()}: staging memory for checkpoints could not be had "
                f"({error}): each process there needs checkpoint.slots x {size:,} bytes of host memory. Lower "
                f"checkpoint.slots={self.slots_wanted}, or set checkpoint.background=false"
            )
        problems = self.peers.all_gather(problem, str | None)
        self._lacking_rank = next((rank for rank, reason in enumerate(problems) if reason), -1)
        return problems[self._lacking_rank] if self._lacking_rank >= 0 else None

    def _reopen(self) -> str | None:
        """The service is gone on some host: begin anew on all."""
        self._join()
        for slot in self._slots:
            slot.close()
        self._slots = []
        self._sock.close()
        return self._open()

    def _join(self) -> None:
        """Let the threads end: first those of the slots, which hand saves on to the one that watches."""
        self._closing.set()
        for slot in self._slots:
            slot.work.put(None)
        for thread in self._threads:
            thread.join()
        if self._watcher is not None:
            self._watches.put(None)
            self._watcher.join()
        self._threads, self._watcher = [], None

    def _spawn(self, function: Any, *args: Any) -> threading.Thread:
        thread = threading.Thread(target=function, args=args, daemon=True)
        thread.start()
        return thread

    def _look_after(self, number: int, slot: Staging) -> None:
        """Prepare it; copy (on the CPU), then tell the service and wait until it has done with the slot."""
        sock: Conversation | None = None
        try:
            sock = service.connect_checkpoint_service(self._place, self._linger, self._log)
            slot.prepare(sock, AwaitPages(self.peers.rank, number), self._closing)
        except Exception as error:
            log.warning("staging memory for checkpoints could not be prepared: %s", error or repr(error))
            self._broken = slot.failed = True
        slot.is_prepared()
        while (copy := slot.work.get()) is not None:
            try:
                if sock is None:
                    sock = service.connect_checkpoint_service(self._place, self._linger, self._log)
                if copy.event is not None:
                    copy.event.synchronize()
                    sock.send(copy.message)
                else:
                    # The service may begin with what is there.
                    sock.send(msgspec.structs.replace(copy.message, follow=True))
                    for rows in slot.copy():
                        sock.send(Rows(rows))
                copy.copied.set()
                sock.receive_reply()
                slot.whole = True
                copy.replicated.set()
                copy.outcome.replica = sock.receive_reply().replica
            except Exception as error:  # the update of the next step waits for this copy
                copy.outcome.reason = str(error) or repr(error)
                copy.outcome.record = record_of(error)
                known = isinstance(error, OSError | TrainingError)
                if not known:
                    log.exception("the copy of step %d failed", copy.outcome.step)
                self._broken = self._broken or not known or isinstance(error, ConnectionError | TrainingError)
            copy.copied.set()
            copy.replicated.set()
            slot.free.set()
            if copy.message.persist and self.peers.rank == 0 and not copy.outcome.reason:
                self._watches.put((copy, copy.message.generation))
            else:
                self._report(copy)
        if sock is not None:
            sock.close()

    def _watch(self) -> None:
        """On the first process: learn what became of each save."""
        sock: Conversation | None = None
        while (item := self._watches.get()) is not None:
            copy, generation = item
            try:
                if sock is None:
                    sock = service.connect_checkpoint_service(self._place, self._linger, self._log)
                answer = sock.request(Wait(generation))
                copy.outcome.committed = answer.committed
                copy.outcome.bytes = answer.bytes or copy.outcome.bytes
                copy.outcome.reason = answer.why
                copy.outcome.record = answer.record
            except Exception as error:
                copy.outcome.reason = copy.outcome.reason or str(error) or repr(error)
            self._report(copy)
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.request(Pruned())
        if sock is not None:
            sock.close()

    def _report(self, copy: SnapshotCopy) -> None:
        if copy.waits is not None:
            try:
                copy.waits[1].synchronize()
                copy.outcome.stall += copy.waits[0].elapsed_time(copy.waits[1]) / 1e3
            except RuntimeError as error:  # the device has failed, and every later call of it does
                log.warning("how long step %d waited for its copy is unknown: %s", copy.outcome.step, error)
        copy.outcome.seconds = time.monotonic() - copy.started
        self._outcomes.put(copy.outcome)
