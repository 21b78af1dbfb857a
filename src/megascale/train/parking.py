"""Parking: a rank that outlives a failed attempt stays in its process and waits for the next attempt.

An agent starts its ranks with a pipe of orders (`core/process_orders.py`). If a peer dies, or if the agent orders it, a
rank leaves its groups, closes what it has opened, writes the status "parked" and waits. The order to resume brings the
environment of the next attempt. Imports, the device's context, compiled kernels and, where possible, the engine with
weights and optimizer state are still there. On any doubt the process ends, and a new one takes its place.

The agent starts the process that replaces a dead rank at once, while the driver still judges the fault. It loads what
a start needs and waits for the same order.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megascale.checkpoint import object_collectives
from megascale.core.exit_record import ExitKind, ExitRecord, attach_record, find_exit_record
from megascale.core.process_orders import EARLY_VARIABLE, ORDERS_VARIABLE, PREPARED_VARIABLE, Resume, read_orders
from megascale.core.status import PARKED, StatusFile
from megascale.errors import TrainingError
from megascale.optim.update_hold import UpdateHold
from megascale.rendezvous import groups as rank_groups
from megascale.rendezvous.groups import Groups
from megascale.train.rank_info import RankInfo
from megascale.train.run_folder import RunFolder
from megascale.train.warm_up import warm_up

if TYPE_CHECKING:
    from megascale.checkpoint.background.staging import StagingSlot
    from megascale.optim.optimizer import ShardedOptimizer
    from megascale.train.engine import Engine

log = logging.getLogger("megascale.train")


class LeaveAttempt(TrainingError):
    """The agent has ordered this rank to leave the attempt."""


@dataclass
class RetainedState:
    """State of a parked rank for the next attempt.

    Attributes:
        slots: staging memory for snapshots, mapped and page-locked.
        engine: model, optimizer and their state on the device; None if they must be made anew.
        step: the step whose state they have, -1 if an update was under way and the state must be loaded.
        rank: the rank that the engine was made for.
    """

    slots: Sequence[StagingSlot]
    engine: Engine | None = None
    step: int = -1
    rank: int = -1


class Parking:
    """Lets this process outlive an attempt.

    Args:
        orders: descriptor of the pipe from which orders come.

    Attributes:
        is_ordered: whether the agent has ordered this rank to leave the present attempt at once.
        wants_leave: whether the agent has ordered this rank to leave it after a step.
        data: data-parallel size of the present attempt, 0 for that of the configuration.
        is_reused: whether this process has run an earlier attempt.
        doubt: why this process cannot stay, "" if it can.
        hold: keeps queued updates from changing the state once the groups are aborted; None before the first engine.
        retained: what the next attempt may use.
        error: the error with which the present attempt has ended, once `accept` has accepted it.
    """

    def __init__(self, orders: int) -> None:
        self.is_ordered = False
        self.wants_leave = False
        self.data = 0
        self.is_reused = False
        self.doubt = ""
        self.hold: UpdateHold | None = None
        self.retained: RetainedState | None = None
        self.error: BaseException | None = None
        self._has_stepped = False
        self._accepted = 0.0  # when `error` was accepted
        self._attempt = _read_attempt(os.environ)
        self._groups: Groups | None = None
        self._lock = threading.Lock()
        self._resumes: queue.SimpleQueue[Resume] = queue.SimpleQueue()
        threading.Thread(target=self._read_orders, args=(orders,), name="megascale-orders", daemon=True).start()

    def _read_orders(self, orders: int) -> None:
        for order in read_orders(orders):
            if isinstance(order, Resume):
                # An order to leave the new attempt may follow before the main thread has joined it.
                self._attempt = _read_attempt(order.environment)
                self.is_ordered = False
                self.wants_leave = False
                self._resumes.put(order)
            elif order.attempt != self._attempt:
                continue
            elif order.after_step:
                self.wants_leave = True
            else:
                self.is_ordered = True
                self._abort()

    def _abort(self) -> None:
        """End the calls that wait for a peer. The main thread then comes to an error, and the state stays whole."""
        with self._lock:
            if self.hold is not None:
                self.hold.request()
            if self._groups is not None:
                try:
                    rank_groups.abort(self._groups)
                except Exception as error:
                    self.doubt = f"an error while aborting its groups: {error!r}"

    # during an attempt ----------------------------------------------------------------------------------------------

    def guard(self, groups: Groups) -> None:
        """Abort these groups when the order to leave comes. Raises LeaveAttempt if it has come already."""
        with self._lock:
            self._groups = groups
        self.check()

    def hold_updates(self, optimizer: ShardedOptimizer) -> None:
        """Let this optimizer's updates change nothing once the groups are aborted."""
        if self.hold is None:
            self.hold = UpdateHold(optimizer.states[0].shard.grads.device)
        optimizer.hold = self.hold

    def check(self) -> None:
        """Raise LeaveAttempt if the agent has ordered this rank to leave."""
        if self.is_ordered:
            raise LeaveAttempt("the agent ordered this rank to leave the attempt")

    def note_step(self) -> None:
        """Note that a step of this attempt is complete."""
        self._has_stepped = True

    def note_doubt(self, doubt: str) -> None:
        """Let the process end with the present attempt."""
        self.doubt = self.doubt or doubt

    def accept(self, error: BaseException) -> bool:
        """Return whether the process stays although this error ends its attempt."""
        is_caused_by_peer = find_exit_record(error).kind is ExitKind.LOST_PEER
        if not is_caused_by_peer and not self.is_ordered and not isinstance(error, LeaveAttempt):
            return False
        if not isinstance(error, Exception):
            return False
        if not is_caused_by_peer and not isinstance(error, LeaveAttempt) and not _is_of_groups(error):
            self.note_doubt(f"an unexpected error while it left: {type(error).__name__}: {error}"[:200])
        if self.is_reused and not self._has_stepped:
            self.note_doubt("its last start in this process came to no step")
        if self.doubt:
            return False
        self.error = error
        self._accepted = time.monotonic()
        self._abort()  # the main thread may be the first to learn of the fault
        return True

    def confirm(self, error: BaseException, folder: RunFolder, rank: int, step: int) -> None:
        """Raise the accepted error after all if leaving the attempt failed, which ended it with another error."""
        if error is self.error:
            return
        accepted, self.error = self.error, None
        assert accepted is not None
        self.note_doubt(f"an error while it left: {type(error).__name__}: {error}"[:200])
        status = StatusFile(folder.status, rank)
        record = ExitRecord(ExitKind.LOST_PEER, step=step + 1)
        status.update("failed", step, message=str(accepted), exit_record=record, doubt=self.doubt)
        status.close()
        raise attach_record(TrainingError(str(accepted)), ExitKind.LOST_PEER, step=step + 1) from error

    # between attempts -----------------------------------------------------------------------------------------------

    def prepare(self, folder: RunFolder, rank_info: RankInfo) -> None:
        """Prepare the device of a process that joins in a later attempt, and wait for that."""
        os.environ.pop(PREPARED_VARIABLE)
        warm_up(rank_info.local_rank, use_gpu=rank_info.device.type == "cuda")
        folder.create()
        status = StatusFile(folder.status, rank_info.rank)
        status.update(PARKED, 0)
        status.close()
        self._await_order(folder, rank_info.rank)

    def wait(self, folder: RunFolder, rank: int, step: int) -> None:
        """Wait for the next attempt, and set the environment for it."""
        with self._lock:
            self._groups = None
        message = str(self.error)
        record = ExitRecord(ExitKind.LOST_PEER, step=step + 1)
        self.error = None
        object_collectives.forget_groups()
        if self.retained is not None and self.retained.engine is not None:
            log.info("its engine stays, with the state of step %d (-1: an update broke off)", self.retained.step)
        closed = time.monotonic()
        gc.collect()  # frees what the failed attempt held, above all its groups
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        status = StatusFile(folder.status, rank)
        status.update(PARKED, step, message=message, exit_record=record)
        status.close()
        log.info(
            "process %d has left attempt %d in %.2f s (%.2f s to free memory) and waits for the next one",
            os.getpid(),
            self._attempt,
            time.monotonic() - self._accepted,
            time.monotonic() - closed,
        )
        self._await_order(folder, rank)
        self.is_reused = True

    def _await_order(self, folder: RunFolder, rank: int) -> None:
        """Wait for the order to resume, and prepare this process for the next attempt."""
        self._join_attempt()
        new_rank = int(os.environ.get("RANK", rank))
        if new_rank != rank:
            _write_to_log_of(folder, new_rank)
        if self.hold is not None:
            self.hold.release()
        self._has_stepped = False

    def wait_if_early(self, use_gpu: bool) -> None:
        """Load the parts of a start and wait for the order of an attempt, in a process that was started early.

        Args:
            use_gpu: make the context of this rank's GPU, if there is one.
        """
        if not os.environ.pop(EARLY_VARIABLE, ""):
            return
        began = time.monotonic()
        warm_up(int(os.environ["LOCAL_RANK"]), use_gpu)
        ready = time.monotonic()
        self._join_attempt()
        log.info(
            "process %d was ready in %.2f s and waited %.2f s", os.getpid(), ready - began, time.monotonic() - ready
        )

    def _join_attempt(self) -> None:
        """Wait for the order to begin the next attempt, and set the environment for it."""
        resume = self._resumes.get()
        os.environ.update(resume.environment)
        self.data = resume.data


def _is_of_groups(error: BaseException) -> bool:
    """Return whether torch raised an error because the groups were aborted."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "torch/distributed" in trace.tb_frame.f_code.co_filename


def _write_to_log_of(folder: RunFolder, rank: int) -> None:
    """Let this process write to the log of another rank from now on."""
    with open(folder.logs / f"rank-{rank}.log", "ab") as log_file:
        for descriptor in (1, 2):
            os.dup2(log_file.fileno(), descriptor)


def is_prepared() -> bool:
    """Return whether this process waits for its first attempt."""
    return PREPARED_VARIABLE in os.environ


def open_parking() -> Parking | None:
    """Return the parking of a rank whose agent keeps processes, else None."""
    orders = os.environ.get(ORDERS_VARIABLE, "")
    return Parking(int(orders)) if orders.isdecimal() else None


def _read_attempt(environment: Mapping[str, str]) -> int:
    attempt = environment.get("MEGASCALE_ATTEMPT", "")
    return int(attempt) if attempt.isdecimal() else 0
