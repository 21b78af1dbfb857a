"""Staging memory of a process that has no checkpointer yet.

Clearing, mapping and page-locking tens of gigabytes takes seconds. A process that waits for its first attempt does all
three, since all ranks would wait for it in the pause of a join. A process that makes its engine only orders the memory,
which the service clears meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megascale.checkpoint.background import service, service_protocol
from megascale.checkpoint.background.service_protocol import Allocate, AwaitPages
from megascale.checkpoint.background.staging import CHECK_SECONDS, ServiceConnections, StagingSlot
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.config import CheckpointConfig
from megascale.core.host_memory import count_slots
from megascale.errors import TrainingError
from megascale.services.conversation import Conversation, close_descriptors

log = logging.getLogger(__name__)
# Seconds after which the process goes on with slots that are not prepared. The service may still send the last snapshot
# of an ended process from this memory.
_PREPARE_SECONDS = 20.0
_REPLY_SECONDS = 30.0  # within which the service answers a request; otherwise the checkpointer orders the memory


class EarlySlots:
    """Slots for this process's first checkpointer, which a thread orders. The service clears them in the background.

    Arguments are those of `prepare_slots`.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run: Path,
        *,
        rank: int,
        size: int,
        reserved: int,
        spare: int,
        device: torch.device,
    ) -> None:
        self._slots: list[StagingSlot] = []
        self._is_closed = False
        self._lock = threading.Lock()  # guards both
        self._connections = _connect_to_service(config, run)

        def order_slots() -> None:
            slots = _prepare(
                self._connections,
                config,
                rank=rank,
                size=size,
                reserved=reserved,
                spare=spare,
                device=device,
                is_complete=False,
            )
            with self._lock:
                if not self._is_closed:
                    self._slots = slots
                    return
            _close_slots(slots)

        self._thread = threading.Thread(target=order_slots, name="megascale-early-slots", daemon=True)
        self._thread.start()

    def take(self, check: Callable[[], None] = lambda: None) -> list[StagingSlot]:
        """Return the slots, which belong to the caller from now on. Later calls return none.

        Args:
            check: called several times per second while the order is not complete. It raises an error if the thread
                must not wait any longer.
        """
        while self._thread.is_alive():
            check()
            self._thread.join(CHECK_SECONDS)
        with self._lock:
            slots = self._slots
            self._slots = []
        return slots

    def close(self) -> None:
        """Release slots that were not taken. An order that is not complete ends, and its thread releases the slots."""
        with self._lock:
            self._is_closed = True
            slots = self._slots
            self._slots = []
        if self._thread.is_alive():
            self._connections.end("the process no longer needs the staging memory that it ordered")
        _close_slots(slots)


def prepare_slots(
    config: CheckpointConfig,
    run: Path,
    *,
    rank: int,
    size: int,
    reserved: int,
    device: torch.device,
    spare: int = 0,
    is_complete: bool = True,
) -> list[StagingSlot]:
    """Return mapped and page-locked slots for this process's first checkpointer. Errors are only logged.

    Args:
        config: section `checkpoint` of the configuration.
        run: run folder, which identifies the service of this host.
        rank: number that no other process of this host has. The process may have another one in its attempt.
        size: estimate of the bytes that a slot needs. The service may return memory of an ended process that has them.
        reserved: bytes of new slots. If the snapshots need more than a slot has, the checkpointer replaces the slots.
        spare: bytes of the host's memory that must stay free besides `reserved`. Otherwise new slots have `size` bytes.
        is_complete: whether to wait until the slots are mapped and page-locked. Otherwise only order them.
    """
    return _prepare(
        _connect_to_service(config, run),
        config,
        rank=rank,
        size=size,
        reserved=reserved,
        spare=spare,
        device=device,
        is_complete=is_complete,
    )


def _connect_to_service(config: CheckpointConfig, run: Path) -> ServiceConnections:
    """Return connections to the service of this host, none of which is open yet."""
    log_file = run / "logs" / "checkpoint-service.log"

    def connect() -> Conversation:
        return service.connect_checkpoint_service(service_protocol.private_folder(run), config.linger, log_file)

    return ServiceConnections(connect)


def _prepare(
    connections: ServiceConnections,
    config: CheckpointConfig,
    *,
    rank: int,
    size: int,
    reserved: int,
    spare: int,
    device: torch.device,
    is_complete: bool,
) -> list[StagingSlot]:
    """Return slots as `prepare_slots`, through one of `connections`, whose end ends the wait for the service."""
    if not config.background:
        return []
    slots: list[StagingSlot] = []
    try:
        connection = connections.open()
        connection.timeout = _REPLY_SECONDS
        try:
            request = Allocate(
                rank,
                size,
                count_slots(config),
                reserved=reserved,
                spare=spare,
                optional=not is_complete,
            )
            _order_slots(slots, connection, request, device)
            if is_complete:
                _complete_slots(slots, connection, rank)
        except BaseException:
            connection.close()
            raise
    except (OSError, TrainingError) as error:
        level = logging.INFO if connections.end_reason else logging.WARNING
        log.log(level, "staging memory was not prepared: %s", connections.end_reason or error)
        _close_slots(slots)
        return []
    for slot in slots:
        slot.detach(connection)
    if not slots:
        connection.close()
    return slots


def _close_slots(slots: Sequence[StagingSlot]) -> None:
    for slot in slots:
        slot.close()


def _order_slots(slots: list[StagingSlot], connection: Conversation, request: Allocate, device: torch.device) -> None:
    """Add the slots that the service allocates to `slots`.

    The request has no index, so that the service keeps the index of an ended process with the same rank.
    """
    index = CheckpointIndex.make_empty()
    connection.request(request, index.to_bytes())
    try:
        for descriptor in connection.files:
            slots.append(StagingSlot(descriptor, index, [], device))
    finally:
        close_descriptors(connection.files)


def _complete_slots(slots: list[StagingSlot], connection: Conversation, rank: int) -> None:
    """Map and page-lock slots once the service has cleared them, within _PREPARE_SECONDS."""
    stop = threading.Event()
    timer = threading.Timer(_PREPARE_SECONDS, stop.set)
    timer.daemon = True
    timer.start()
    try:
        for number, slot in enumerate(slots):
            slot.prepare(connection, AwaitPages(rank, number), stop)
            if not stop.is_set():
                slot.page_lock()
    finally:
        timer.cancel()
