"""Parking: a rank's process survives a failed attempt and waits for the next attempt.

An agent starts its ranks with a pipe of orders (`core/process_orders.py`). If a peer dies, or if the agent gives the
order to leave, a rank leaves its groups, closes the files and threads of its attempt, writes the status "parked" and
waits for the order to resume. This order contains the environment of the next attempt. The parked process keeps its
imports, the device's context, compiled kernels and, where possible, the engine with weights and optimizer state. If the
state of the process is in doubt, the process ends, and a new one takes its place.

The agent starts the process that replaces a dead rank at once, while the driver still judges the fault. The new process
prepares its start and waits for the same order to resume.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import torch

from megascale.checkpoint import object_collectives, prepare_slots
from megascale.checkpoint.live_state import LiveState
from megascale.config import Config
from megascale.core.exit_record import ExitKind, ExitRecord, attach_record, find_exit_record
from megascale.core.group_names import make_attempt_suffix
from megascale.core.process_orders import (
    EARLY_VARIABLE,
    ORDERS_VARIABLE,
    PREPARED_VARIABLE,
    PrepareGroups,
    Resume,
    read_orders,
)
from megascale.core.status import PARKED, StatusFile
from megascale.core.stopwatch import Stopwatch
from megascale.errors import TrainingError
from megascale.optim.update_hold import UpdateHold
from megascale.parallel import peer_watch
from megascale.rendezvous import groups as rank_groups
from megascale.rendezvous.group_sockets import cut_connections, list_new_sockets, list_sockets
from megascale.rendezvous.groups import Groups
from megascale.rendezvous.prepared_groups import EarlierGroups, GroupPreparation, GroupTarget
from megascale.train.device_reserve import UNCACHED_BYTES, DeviceReserve, describe_reserve, reserve_memory
from megascale.train.host_pauses import exclude_imports
from megascale.train.predecessors import await_predecessors
from megascale.train.rank_info import RankInfo
from megascale.train.run_folder import RunFolder
from megascale.train.snapshot_reserve import estimate_slot_sizes
from megascale.train.warm_up import warm_up

if TYPE_CHECKING:
    from megascale.checkpoint.background.staging import StagingSlot
    from megascale.train.engine import Engine

log = logging.getLogger("megascale.train")
_CUT_SECONDS = 0.02  # between two searches for connections of a start that must end


class LeaveAttempt(TrainingError):
    """The agent has ordered this rank to leave the attempt."""


@dataclass
class RetainedState:
    """State of a parked rank for the next attempt.

    Attributes:
        slots: staging memory for snapshots, mapped and page-locked.
        live: weights and optimizer state. Their step is -1 if an update was interrupted and the state must be loaded.
        engine: model and optimizer that have this state; None if they must be made anew.
        rank: the rank that the engine was made for.
    """

    slots: Sequence[StagingSlot]
    live: LiveState = field(default_factory=LiveState)
    engine: Engine | None = None
    rank: int = -1


class Parking:
    """Executes the agent's orders to leave an attempt and to begin the next one in the same process.

    A thread of its own reads the orders.

    Args:
        descriptor: read end of the pipe of orders.

    Attributes:
        must_leave_now: whether the agent has ordered this rank to leave the present attempt at once.
        must_leave_after_step: whether the agent has ordered this rank to leave the present attempt after a step.
        joins_at_once: whether that order says that prepared nodes join at once, so that the state needs no copy.
        data_size: data-parallel size of the present attempt; 0: the configured one.
        is_reused: whether this process has run an earlier attempt.
        doubt: why this process cannot stay for the next attempt, "" if it can.
        update_hold: prevents queued updates from changing the state after the groups are aborted; None before the first
            engine.
        retained: state that the next attempt may use.
        error: the error that ended the present attempt and after which the process stays; None otherwise.
        left_ns: time (`time.time_ns`) at which this rank had completed the step after which it was ordered to leave the
            attempt before the present one; otherwise 0.
        leaving: measures the parts of leaving an attempt; None before the process decides to stay.
        warm_up_parts: seconds of the preparation of a process that waited for its first attempt, as text; "" otherwise.
        preparation: groups of the next attempt, which a thread makes while ranks train; None without an order.
        keeps_groups: whether this rank leaves the present attempt's groups without an abort.
        earlier_groups: groups of the attempt before the present one, which are not aborted yet; otherwise None.
        reserve: memory of the GPU for the first attempt of a process that waited for it; None before and afterwards.
    """

    def __init__(self, descriptor: int) -> None:
        self.must_leave_now = False
        self.must_leave_after_step = False
        self.joins_at_once = False
        self.data_size = 0
        self.is_reused = False
        self.doubt = ""
        self.update_hold: UpdateHold | None = None
        self.retained: RetainedState | None = None
        self.error: BaseException | None = None
        self.left_ns = 0
        self.leaving: Stopwatch | None = None
        self.warm_up_parts = ""
        self._joining: Stopwatch | None = None  # from the order to begin the present attempt; None before an order
        self.preparation: GroupPreparation | None = None
        self.keeps_groups = False
        self.earlier_groups: EarlierGroups | None = None
        self.reserve: DeviceReserve | None = None
        self._groups_order: PrepareGroups | None = None  # order that `start_preparation` will carry out
        self._awaits_first_attempt = False  # whether the process waits for its first attempt
        self._order_time = 0.0  # `time.monotonic()` at an order to leave the present attempt at once; otherwise 0
        self._has_stepped = False  # whether a step of the present attempt is complete
        self._failure_time = 0.0  # `time.monotonic()` when `error` was set
        self._attempt = _read_attempt(os.environ)
        self._groups: Groups | None = None  # of the present attempt
        self._start_sockets: dict[int, str] | None = None  # sockets before the start that is under way; else None
        self._has_taken_state = False  # whether the present attempt has changed what the earlier one has retained
        self._lock = threading.Lock()
        self._resumes: queue.SimpleQueue[Resume | PrepareGroups] = queue.SimpleQueue()
        threading.Thread(target=self._read_orders, args=(descriptor,), name="megascale-orders", daemon=True).start()

    def _read_orders(self, descriptor: int) -> None:
        """Execute orders until the pipe ends. Orders to leave an earlier attempt are ignored."""
        for order in read_orders(descriptor):
            if isinstance(order, Resume):
                # Set these now: an order to leave the new attempt may come before the main thread has joined it.
                self._attempt = _read_attempt(order.environment)
                self.must_leave_now = False
                self.must_leave_after_step = False
                self.joins_at_once = False
                self._order_time = 0.0
                self._joining = Stopwatch()
                self._resumes.put(order)
                self._drop_unfinished_groups()  # a process that waits for its first attempt may still make them
            elif isinstance(order, PrepareGroups):
                self._note_groups_order(order)
            elif order.attempt != self._attempt:
                continue
            elif order.after_step:
                # The main thread reads this attribute only after the other.
                self.joins_at_once = order.joins_at_once
                self.must_leave_after_step = True
                self._drop_unfinished_groups()
            else:
                self._order_time = self._order_time or time.monotonic()
                self.must_leave_now = True
                self._abort()

    def _note_groups_order(self, order: PrepareGroups) -> None:
        """Drop the groups of an earlier preparation, and note the order to make others."""
        with self._lock:
            if self._awaits_first_attempt:
                self._attempt = order.attempt  # the process may have waited for several attempts
            elif order.attempt != self._attempt:
                return
            self._drop_groups("the driver has ordered other groups or none")
            if not order.world:
                return
            if self._awaits_first_attempt:
                self._resumes.put(order)
            else:
                self._groups_order = order

    def _drop_groups(self, reason: str) -> None:
        """Drop the groups of the next attempt, complete or not."""
        self._groups_order = None
        if self.preparation is not None:
            self.preparation.abandon(reason)

    def _drop_unfinished_groups(self) -> None:
        """Drop the groups of the next attempt unless they are complete, since this rank leaves after its step."""
        with self._lock:
            if self.preparation is None or not self.preparation.is_warm:
                self._drop_groups("the next attempt begins before they are complete")

    def _abort(self, keeps_groups: bool = False) -> None:
        """Abort the groups and release waits of exchanges, so that the main thread waits for no peer.

        Updates are held before the abort, so that wrong gradients do not change weights or optimizer state.

        Args:
            keeps_groups: abort no groups, since all ranks have completed the step.
        """
        with self._lock:
            if self.update_hold is not None:
                self.update_hold.request()
            peer_watch.release_all("this rank leaves the attempt")
            if keeps_groups:
                return
            self._drop_groups("the rank leaves the attempt")
            if self.earlier_groups is not None:
                self.earlier_groups.start_abort()
            if self._groups is not None:
                try:
                    rank_groups.abort(self._groups)
                except Exception as error:
                    self.doubt = f"an error while aborting its groups: {error!r}"
            elif self._start_sockets is not None:
                threading.Thread(target=self._cut_start, name="megascale-cut-start", daemon=True).start()

    def _cut_start(self) -> None:
        """Cut the connections of the start under way until it has ended. It may open further ones meanwhile."""
        while True:
            with self._lock:
                if self._start_sockets is None:
                    return
                cut_connections(list_new_sockets(self._start_sockets))
            time.sleep(_CUT_SECONDS)

    # during an attempt ----------------------------------------------------------------------------------------------

    def watch_start(self) -> None:
        """Let an order to leave at once end the start that begins now. Raises LeaveAttempt if it has come already."""
        self._end_joining_phase("start")
        with self._lock:
            self._start_sockets = list_sockets()
        self.check()

    def leave_start(self, device: torch.device) -> None:
        """Leave the groups of a start that failed. Raises LeaveAttempt if it failed because of an order to leave."""
        with self._lock:
            self._start_sockets = None
            self._drop_groups("the start of the attempt failed")
        rank_groups.abandon(device)
        self._release_preparation()
        self.check()

    def watch_groups(self, groups: Groups) -> None:
        """Let an order to leave at once abort these groups. Raises LeaveAttempt if the order has come already."""
        self._end_joining_phase("groups")
        with self._lock:
            self._start_sockets = None
            self._groups = groups
            if groups.preparation is not None:
                self.preparation = None  # its connections belong to `groups`
        self._release_preparation()
        self.check()

    def _release_preparation(self) -> None:
        """Wait until communicators of a preparation that no attempt uses are aborted, and forget the preparation."""
        preparation = self.preparation
        if preparation is not None and preparation.failure:
            preparation.finish_abort()
            self.preparation = None

    def start_preparation(self, config: Config, info: RankInfo, groups: Groups) -> None:
        """Begin to make the groups of the next attempt if the driver has ordered them.

        Args:
            config: the resolved configuration of the present attempt.
            groups: groups of the present attempt.
        """
        if self._groups_order is None:
            return
        self._release_preparation()
        with self._lock:
            order = self._groups_order
            if order is None:
                return
            self._groups_order = None
            self.preparation = _make_preparation(order, config, info.device)
            self.preparation.server_store = groups.root_store
            self.preparation.start()

    def abort_earlier_groups(self) -> None:
        """Abort the groups of the attempt before the present one. The device must be idle. No effect without any."""
        earlier_groups = self.earlier_groups
        if earlier_groups is None:
            return
        gc.collect()  # an abort waits until no captured graph holds the communicator
        earlier_groups.start_abort()
        earlier_groups.finish_abort()
        self.earlier_groups = None

    def release_reserve(self) -> None:
        """Free the memory that is reserved for activations, because the engine has allocated the state."""
        if self.reserve is not None:
            self.reserve.release_activations()
            self.reserve = None

    def find_kept_step(self) -> int:
        """Return the step of the state that the earlier attempt has retained, 0 without one."""
        if self.retained is None:
            return 0
        return max(0, self.retained.live.step)

    def take_retained(self) -> RetainedState | None:
        """Return the state that the earlier attempt has retained, if any. The present one may change it from now on."""
        retained = self.retained
        self.retained = None
        self._has_taken_state = True
        return retained

    def hold_updates(self, engine: Engine) -> None:
        """Let this engine's updates change nothing after the groups are aborted or waits for a peer have ended."""
        if self.update_hold is None:
            self.update_hold = UpdateHold(engine.device)
        engine.hold_updates(self.update_hold)

    def check(self) -> None:
        """Raise LeaveAttempt if the agent has ordered this rank to leave at once."""
        if self.must_leave_now:
            raise LeaveAttempt("the agent ordered this rank to leave the attempt")

    def note_step(self) -> None:
        """Record that a step of this attempt is complete."""
        self._has_stepped = True

    def add_doubt(self, doubt: str) -> None:
        """Store why the process must end with its present attempt. Only the first reason is kept."""
        if not self.doubt:
            self.doubt = doubt

    def decide_stay(self, error: BaseException) -> bool:
        """Decide whether the process stays after the error that ends its attempt, and return the decision.

        The process stays if a peer has failed or the agent has ordered it to leave, and if nothing puts its state in
        doubt. Then set `error` and abort the groups.
        """
        is_expected = find_exit_record(error).kind is ExitKind.LOST_PEER or isinstance(error, LeaveAttempt)
        if not is_expected and not self.must_leave_now:
            return False
        if not isinstance(error, Exception):  # such as SystemExit
            return False
        # After an order to leave at once, the groups are aborted, and calls on them fail.
        if not is_expected and not _is_from_distributed(error):
            self.add_doubt(f"an unexpected error while it left: {type(error).__name__}: {error}"[:200])
        if self.is_reused and self._has_taken_state and not self._has_stepped:
            self.add_doubt("its last start in this process completed no step")
        if self.doubt:
            return False
        self.error = error
        self._failure_time = time.monotonic()
        self.leaving = Stopwatch()
        has_completed_step = isinstance(error, LeaveAttempt) and not self.must_leave_now
        self.keeps_groups = has_completed_step and self.preparation is not None and self.preparation.is_warm
        self._abort(self.keeps_groups)  # without an order, the groups are not aborted yet
        return True

    def leave_groups(self, groups: Groups) -> None:
        """Leave the groups of the present attempt without an abort, which follows in the next attempt."""
        self.abort_earlier_groups()
        self.earlier_groups = rank_groups.leave(groups)

    def end_leaving_phase(self, phase: str) -> None:
        """Measure a part of leaving the attempt, which ends now. No effect before the process decides to stay."""
        if self.leaving is not None:
            self.leaving.end_phase(phase)

    def _end_joining_phase(self, phase: str) -> None:
        """Measure a part of joining the attempt, which ends now. No effect without an order to begin it."""
        if self._joining is not None:
            self._joining.end_phase(phase)

    def take_joining_text(self) -> str:
        """Return the seconds from the order to begin the present attempt until the groups; "" without an order.

        Later calls for the same attempt return "".

        The part "order read" contains the rest of a preparation that was not complete, "start" what this process does
        before it looks for the other ranks, and "groups" the wait for them.
        """
        if self._joining is None:
            return ""
        total = sum(self._joining.timings.values())
        text = f"met the other ranks {total:.2f} s after the order ({self._joining.describe()})"
        if self.warm_up_parts:
            text += f"; {self.warm_up_parts}"
        self._joining = None
        self.warm_up_parts = ""
        return text

    def _take_leaving_text(self) -> str:
        """Return the seconds of leaving the attempt and of its parts. Later calls have no parts."""
        seconds = time.monotonic() - self._failure_time
        text = f"{seconds:.2f} s"
        if self._order_time and self._order_time < self._failure_time:
            text += f", {self._failure_time - self._order_time:.2f} s after the order"
        if self.leaving is not None:
            text += f" ({self.leaving.describe()})"
        self.leaving = None
        return text

    def check_left(self, error: Exception, folder: RunFolder, rank: int, step: int) -> None:
        """Check that this rank has left the attempt with the error that `decide_stay` accepted.

        A different error means that leaving the attempt failed. Then write the status "failed" and raise
        TrainingError, which ends the process.
        """
        if error is self.error:
            return
        message = str(self.error)
        self.error = None
        self._end_process(message, error, folder, rank, step)

    def _end_process(self, message: str, error: Exception, folder: RunFolder, rank: int, step: int) -> NoReturn:
        """Write the status "failed" and raise TrainingError, because of an error while this rank left the attempt.

        Args:
            message: of the error that ended the attempt.
        """
        self.add_doubt(f"an error while it left: {type(error).__name__}: {error}"[:200])
        status = StatusFile(folder.status, rank)
        record = ExitRecord(ExitKind.LOST_PEER, step=step + 1)
        status.update("failed", step, message=message, exit_record=record, doubt=self.doubt)
        status.close()
        raise attach_record(TrainingError(message), ExitKind.LOST_PEER, step=step + 1) from error

    # between attempts -----------------------------------------------------------------------------------------------

    def wait_for_first_attempt(self, config: Config, rank_info: RankInfo) -> None:
        """Prepare device and staging memory of a process that joins in a later attempt, and wait for that attempt.

        Args:
            config: the resolved configuration.
        """
        os.environ.pop(PREPARED_VARIABLE)
        await_predecessors(lambda: None)  # warm-up and staging memory need memory that killed processes still have
        stopwatch = Stopwatch()
        parts = warm_up(config, rank_info.local_rank, use_gpu=rank_info.device.type == "cuda")
        exclude_imports()
        stopwatch.end_phase("warm-up")
        self.reserve = reserve_memory(config, rank_info.world, rank_info.device)
        stopwatch.end_phase("memory of the GPU")
        folder = RunFolder(config.run_folder)
        folder.create()
        necessary_bytes, sufficient_bytes = estimate_slot_sizes(config, rank_info.world)
        slots = prepare_slots(
            config.checkpoint,
            config.run_folder,
            rank=rank_info.rank,
            size=necessary_bytes,
            reserved=sufficient_bytes,
            device=rank_info.device,
        )
        if slots:
            self.retained = RetainedState(slots)
        stopwatch.end_phase("staging memory")
        status = StatusFile(folder.status, rank_info.rank, waiting_node=os.environ["MEGASCALE_NODE"])
        self._awaits_first_attempt = True
        status.update(PARKED, 0)
        order = self._resumes.get()
        while isinstance(order, PrepareGroups):
            self._prepare_while_waiting(order, config, rank_info.device)
            if self._resumes.empty():
                status.update(PARKED, 0)  # the agent learns from it that the preparation has ended
            order = self._resumes.get()
        self._awaits_first_attempt = False
        status.close()
        stopwatch.end_phase("wait")
        reserve = describe_reserve(self.reserve)
        self.warm_up_parts = f"prepared on a waiting node: {stopwatch.describe()}; {reserve}; of the warm-up: {parts}"
        self._begin_attempt(order, folder, rank_info.rank)
        status.path.unlink(missing_ok=True)

    def _prepare_while_waiting(self, order: PrepareGroups, config: Config, device: torch.device) -> None:
        """Make the groups of the first attempt of this process, and wait until they are complete or dropped.

        A later order has precedence.
        """
        self._release_preparation()
        with self._lock:
            if not self._resumes.empty():
                return
            preparation = _make_preparation(order, config, device)
            preparation.is_joining = True
            self.preparation = preparation
            preparation.start()
        preparation.wait()
        if preparation.is_warm:
            log.info("groups of the first attempt are complete (%s)", preparation.describe())

    def wait_for_next_attempt(self, folder: RunFolder, rank: int, step: int) -> None:
        """Wait for the next attempt, and set the environment for it.

        Raises TrainingError, which ends the process, if its device has failed.
        """
        with self._lock:
            self._groups = None
        message = str(self.error)
        record = ExitRecord(ExitKind.LOST_PEER, step=step + 1)
        self.error = None  # its trace holds objects of the failed attempt
        object_collectives.forget_groups()
        has_engine = self.retained is not None and self.retained.engine is not None
        if self.retained is not None and has_engine:
            log.info("the engine stays, with the state of step %d (-1: incomplete update)", self.retained.live.step)
        self.end_leaving_phase("close")
        try:
            if not self.keeps_groups:
                self.abort_earlier_groups()
            self._release_preparation()
            _free_memory(keeps_cache=has_engine, keeps_garbage=self.keeps_groups and has_engine)
        except (RuntimeError, TrainingError) as error:
            self._end_process(message, error, folder, rank, step)
        self.end_leaving_phase("memory")
        status = StatusFile(folder.status, rank)
        status.update(PARKED, step, message=message, exit_record=record)
        status.close()
        log.info(
            "process %d has left attempt %d in %s and waits for the next one",
            os.getpid(),
            self._attempt,
            self._take_leaving_text(),
        )
        self._begin_attempt(self._await_resume(), folder, rank)
        self.is_reused = True

    def _begin_attempt(self, resume: Resume, folder: RunFolder, rank: int) -> None:
        """Prepare this process for the next attempt. `rank` is its rank in the attempt before."""
        self._set_environment(resume)
        new_rank = int(os.environ.get("RANK", rank))
        if new_rank != rank:
            _redirect_to_log(folder, new_rank)
        if self.update_hold is not None:
            self.update_hold.release()
        self._has_stepped = False
        self._has_taken_state = False
        self.keeps_groups = False

    def wait_if_early(self, config: Config) -> None:
        """Warm up and wait for the order of an attempt, if this process was started before its attempt was ordered.

        Args:
            config: the resolved configuration.
        """
        if not os.environ.pop(EARLY_VARIABLE, ""):
            return
        stopwatch = Stopwatch()
        parts = warm_up(config, int(os.environ["LOCAL_RANK"]), use_gpu=config.train.device != "cpu")
        exclude_imports()
        stopwatch.end_phase("warm-up")
        resume = self._await_resume()
        stopwatch.end_phase("wait")
        self.warm_up_parts = f"prepared before its attempt: {stopwatch.describe()}; of the warm-up: {parts}"
        self._set_environment(resume)

    def _await_resume(self) -> Resume:
        """Wait for the order to begin the next attempt, and return it."""
        order = self._resumes.get()
        while not isinstance(order, Resume):
            order = self._resumes.get()
        return order

    def _set_environment(self, resume: Resume) -> None:
        """Set the environment and the size of the next attempt."""
        self._end_joining_phase("order read")
        os.environ.update(resume.environment)
        self.data_size = resume.data


def with_data_size(config: Config, data: int) -> Config:
    """Return a configuration with another data-parallel size, or the same one for a size of 0."""
    if not data:
        return config
    parallel = config.parallel.model_copy(update={"data": data})
    return config.model_copy(update={"parallel": parallel})


def _make_preparation(order: PrepareGroups, config: Config, device: torch.device) -> GroupPreparation:
    """Return the preparation that an order describes."""
    target = GroupTarget(
        config=with_data_size(config, order.data),
        rank=order.rank,
        world=order.world,
        device=device,
        name_suffix=make_attempt_suffix(order.attempt + 1),
    )
    return GroupPreparation(target, order.master, order.number)


def _free_memory(keeps_cache: bool, keeps_garbage: bool = False) -> None:
    """Stop the watches of the failed attempt's exchanges, and free its objects and its memory on the device.

    Args:
        keeps_cache: keep the memory that torch's allocator has cached, if the device has enough besides. The first step
            of an engine that stays needs blocks of the same sizes.
        keeps_garbage: leave the collection of garbage to the next attempt, in which the groups are aborted.

    Raises RuntimeError if the device has failed.
    """
    peer_watch.stop_all(_synchronize_device)
    if not keeps_garbage:
        gc.collect()  # frees objects of the failed attempt, above all its groups
    if not torch.cuda.is_initialized():
        return
    if keeps_cache:
        free, _ = torch.cuda.mem_get_info()
        if free >= UNCACHED_BYTES:
            return
    torch.cuda.empty_cache()


def _synchronize_device() -> None:
    """Wait until this rank's GPU is idle, if it has one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _is_from_distributed(error: BaseException) -> bool:
    """Return whether torch.distributed raised an error, as it does in calls on aborted groups."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and "torch/distributed" in innermost.tb_frame.f_code.co_filename


def _redirect_to_log(folder: RunFolder, rank: int) -> None:
    """Redirect stdout and stderr of this process to the log of `rank`."""
    with open(folder.logs / f"rank-{rank}.log", "ab") as log_file:
        for descriptor in (1, 2):  # stdout, stderr
            os.dup2(log_file.fileno(), descriptor)


def is_waiting_for_first_attempt() -> bool:
    """Return whether this process was started to join in a later attempt."""
    return PREPARED_VARIABLE in os.environ


def open_parking() -> Parking | None:
    """Return the parking of a rank that an agent has started with a pipe of orders, else None."""
    descriptor = os.environ.get(ORDERS_VARIABLE, "")
    if not descriptor.isdecimal():
        return None
    exclude_imports()
    return Parking(int(descriptor))


def _read_attempt(environment: Mapping[str, str]) -> int:
    """Return the number of the attempt that an environment is for, 0 if it names none."""
    attempt = environment.get("MEGASCALE_ATTEMPT", "")
    return int(attempt) if attempt.isdecimal() else 0
