"""The training loop of one rank: resume, steps, metrics, evaluation, checkpoints, and a clean end in every case."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NoReturn

import torch

from megascale import checkpoint
from megascale.checkpoint import setting_changes
from megascale.checkpoint.background.staging import StagingSlot
from megascale.checkpoint.live_state import LiveState
from megascale.checkpoint.object_collectives import Peers
from megascale.core.batch import Batch, check_fields
from megascale.core.events import Event
from megascale.core.exit_record import ExitKind, attach_record
from megascale.core.flops import CONVENTION, DOCUMENT_CONVENTION, FlopCount, device_peak_tflops, document_flops, mfu
from megascale.core.group_names import make_attempt_suffix
from megascale.core.layout import Layout
from megascale.core.process_orders import MISSING_VARIABLE
from megascale.core.replay_interval import compute_interval
from megascale.core.spans import SpanKind
from megascale.core.status import StartReport
from megascale.core.stopwatch import Stopwatch
from megascale.data.dataset.formats import find_sample_fields
from megascale.data.dataset.read_checksum import ReadTotals, sum_step
from megascale.data.loader.feed import open_feed
from megascale.errors import (
    ConfigError,
    DataError,
    FitError,
    MegascaleError,
    TrainingError,
    error_class_name,
    make_error,
)
from megascale.ops.compile_count import count_compilations
from megascale.optim.learning_rate import compute_learning_rate
from megascale.parallel.chunk_graphs import EAGER_STEPS
from megascale.parallel.launch_times import CHOICE_NAME
from megascale.rendezvous.groups import Groups, shutdown
from megascale.rendezvous.prepared_groups import FIRST_CALLS_SECONDS
from megascale.rendezvous.start_job import initialise
from megascale.train import attention_choice, replay_response
from megascale.train.callbacks import Callbacks, RunView
from megascale.train.check_cost import CheckCost
from megascale.train.checkpoint_policy import CheckpointPolicy
from megascale.train.claim import take_run_locks
from megascale.train.device_reserve import UNCACHED_BYTES, cache_activations, count_cached_bytes
from megascale.train.ending import Ending, Interrupts
from megascale.train.engine import Engine
from megascale.train.evaluation import Evaluation, evaluate_file
from megascale.train.host_pauses import GarbageCollector, HostPauses
from megascale.train.injected_faults import FaultInjector
from megascale.train.module_checks import check_gradients
from megascale.train.parking import LeaveAttempt, Parking, RetainedState
from megascale.train.part_checks import check_parts
from megascale.train.predecessors import await_predecessors
from megascale.train.rank_info import RankInfo, count_device_allocations, find_device_kind, memory_gib
from megascale.train.rank_timers import RankTimers, StepClock
from megascale.train.replay_check import ReplayCheck, ReplayEvidence
from megascale.train.replay_conditions import exclude_costly_graphs, find_reason_against_replays, share_exclusion
from megascale.train.reporter import Reporter
from megascale.train.resume import ResumeGuard
from megascale.train.run_folder import RunFolder
from megascale.train.snapshot_reserve import compute_snapshot_reserve, order_slots
from megascale.train.step_result import StepResult
from megascale.train.telemetry import Telemetry, start_rank_log
from megascale.train.weights import WeightWatch

log = logging.getLogger("megascale.train")

# A rank adds a stop request to the step's sum over ranks: 1 after an interruption, and much less if the rank only
# leaves the attempt. The requests to leave of all ranks together stay below 1.
_STOP_REQUEST = 1.0
_LEAVE_REQUEST = 2.0**-20
# A rank whose groups of the next attempt are connected adds this. All ranks together stay below a request to leave.
_WARM_REQUEST = 2.0**-40
# Before a rank leaves the attempt, it tries at most this many times to begin a copy of the state, with this pause after
# each try.
_MAX_SAVE_TRIES = 100
_SAVE_TRY_SECONDS = 0.05
_CAPTURE_STEPS = EAGER_STEPS + 3  # the first steps of an attempt, within which CUDA graphs are captured
_SPARE_DEVICE_BYTES = 2 << 30  # of a GPU, beside the kept state and a new engine: communicators and transfers


@dataclass(frozen=True)
class TrainResult:
    """The end of one start of a run.

    Attributes:
        step: optimizer steps done by all starts of the run.
        finished: whether train.steps is reached.
        loss: loss of the last step; None if this start ran no step.
        evaluation: evaluation of the held-out file at the end; None without such a file.
    """

    step: int
    finished: bool
    loss: float | None
    evaluation: Evaluation | None


@dataclass(frozen=True)
class _PendingStep:
    """A step whose results are still on the device.

    Attributes:
        record: the step's metrics that are known without reading the device.
        first_sample: number of the step's first sample.
        sample_ids: hash of the ids of the step's samples; empty on all ranks but rank 0.
    """

    record: dict[str, Any]
    result: StepResult
    first_sample: int
    sample_ids: str


class Trainer:
    """Trains a run on this rank. Nothing is opened, locked or allocated before `run`.

    Args:
        layout: the resolved configuration (see api.resolve) laid out over the world.
        rank_info: this process's rank and device.
        parking: lets the process outlive this start (train/parking.py); None if the process ends with the start.

    Attributes:
        step: optimizer steps done.
        consumed_samples: samples trained up to `step`.
        trained_tokens: tokens trained up to `step`. Not always `step` times the tokens of a step: the length of samples
            may have changed at an earlier resume.
    """

    def __init__(self, layout: Layout, rank_info: RankInfo, parking: Parking | None = None) -> None:
        config, device = layout.config, rank_info.device
        self.config = config
        self.layout = layout
        self.rank_info = rank_info
        self.parking = parking
        self.is_leader = rank_info.rank == 0
        self.step = 0
        self.consumed_samples = 0
        self.trained_tokens = 0
        self.peak_flops = config.observe.peak_tflops or device_peak_tflops(find_device_kind(device))
        self._flops: FlopCount | None = None  # per token, under data.document_mask
        self.groups: Groups | None = None
        self.folder = RunFolder(config.run_folder)
        self.attempt = self.folder.find_next_attempt()  # all ranks take rank 0's number
        # The driver sets MISSING_VARIABLE in the environment of ranks that train while replicas have no host.
        self._missing_share = float(os.environ.get(MISSING_VARIABLE) or 0.0)  # fraction of replicas without a host
        count_compilations()
        self._start = StartReport(time.time_ns())
        if parking is not None:
            self._start = replace(self._start, is_reused=parking.is_reused, left_ns=parking.left_ns)
            parking.left_ns = 0
        self.reporter = Reporter(self.folder, self.is_leader)
        self.ending = Ending(config, rank_info, self.folder, parking)
        self.clock = StepClock(device)
        self._reused_slots: Sequence[StagingSlot] = ()
        self._has_rejoined = False  # true if the engine has outlived an attempt
        self._needs_state = False  # true if the engine has no initial weights, so that a state must be loaded
        self._live: LiveState | None = None  # state that this process has kept; None if it ends with its attempt
        self._stored: checkpoint.StoredState | None = None  # newest commit, if it was read before the load
        self._has_state = False  # true once the state of a step is complete in the engine
        self._keeps_state = False  # true if ranks leave with their state in memory and no copy; the same on all ranks
        self._pending_step: _PendingStep | None = None
        self._read_totals = ReadTotals()  # totals over the samples of all steps whose results were read
        self._awaits_evaluation = False  # whether the evaluation after the last counted step is due and not complete
        self._resumes_evaluation = False  # whether the loaded state awaits an evaluation
        self._counts: dict[str, Any] = {}  # totals up to the last step whose results were read
        self._stopwatch = Stopwatch()  # of the start, from the groups on
        self._load_measures: dict[str, float] = {}
        self._load_parts = ""  # parts of the load and their seconds
        self._data_notes: list[str] = []
        self._unconfirmed_note = ""
        self._skipped_count = 0  # steps of this process with an infinite or NaN gradient, or without loss weights
        self._consecutive_skip_count = 0
        self._is_stopping = False  # the same on all ranks
        self._first_step = 0  # of this start
        self._capture_end_step = 0  # graphs are captured before this step, during which no communicators are made
        self._must_warm_groups = False  # true if the next attempt's groups are connected on all ranks; the same on them
        self._is_leaving = False  # true if ranks stop in order to begin a new attempt; the same on all ranks
        self._has_reported_active = False
        self._first_step_start: float | None = None  # `time.monotonic()`; None once its results were read
        self._first_step_gradients = 0.0  # seconds from its start until the host had queued its gradients
        self._first_step_queued = 0.0  # seconds from its start until the host had queued it
        self._first_step_allocations = 0  # of device memory in this process, before the first step
        self._has_reported_graphs = False
        self._has_reported_choice = False
        self._loss: float | None = None

    # the run ----------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """Train to train.steps, or until an interruption.

        Save a checkpoint of the last complete step unless checkpoint.at_end=false. Resources are released in reverse
        order of their opening, after a failure too.
        """
        with contextlib.ExitStack() as resources, self.ending:
            resources.push(self._end_unused_service)
            self.garbage_collector = GarbageCollector(
                self.config.train.gc_interval, excludes_objects=self.parking is None
            )
            resources.callback(self.garbage_collector.close)
            self._join_job(resources)
            self._build(resources)
            self._open_observers(resources)
            self._stopwatch.end_phase("observers")
            self._load_state()
            self._stopwatch.end_phase("load")
            self.callbacks = Callbacks(self._make_run_view())
            resources.callback(self.callbacks.close)
            self._train(resources)
            return self._finish()

    def _end_unused_service(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the checkpoint service end at once after a refused start, if it has no snapshot."""
        if self.ending.owns_folder and isinstance(error, ConfigError | DataError | FitError):
            checkpoint.end_unused_service(self.config.checkpoint, self.folder.path)

    def _join_job(self, resources: contextlib.ExitStack) -> None:
        """Take the run's locks on rank 0 and meet the other ranks.

        Raises MegascaleError on every rank if rank 0 or this rank refuses the start.
        """
        refusal: MegascaleError | None = None
        if self.is_leader:
            self._await_predecessors()  # the kernel releases the run's lock when it has freed the holder's memory
            try:
                for lock in take_run_locks(self.config):
                    resources.callback(lock.release)
            except MegascaleError as error:
                refusal = error
            self.ending.owns_folder = refusal is None
        if self.rank_info.world > 1:
            refusal = self._meet_ranks(resources, refusal)
        if refusal is not None:
            self.ending.is_reported = True  # the training that holds the lock must not see this start's end
            raise refusal
        self._start = replace(self._start, groups_ns=time.time_ns())
        self._stopwatch = Stopwatch()
        self.folder.attempt = self.attempt
        start_rank_log(self.rank_info, self.attempt)
        joining = "" if self.parking is None else self.parking.describe_joining()
        if joining:
            log.info("process %d %s", os.getpid(), joining)
        self.ending.owns_folder = True

    def _meet_ranks(self, resources: contextlib.ExitStack, refusal: MegascaleError | None) -> MegascaleError | None:
        """Initialise the groups and take rank 0's attempt number.

        Return why this rank or rank 0 refuses the start, None if both accept it.
        """
        info = self.rank_info
        if self.attempt > 1 and info.local_rank == 0:
            # A node that replaces a lost one receives its state through a checkpoint service, which does not run yet.
            checkpoint.start_service(self.config.checkpoint, self.folder.path)
        self.groups = self._make_groups()
        resources.callback(self._leave_groups)
        if self.parking is not None:
            self.parking.watch_groups(self.groups)
        if refusal is not None:
            packed_refusal = (error_class_name(refusal), str(refusal))
        else:
            packed_refusal = None
        # Rank 0's values replace those of all other ranks.
        values = (self.attempt, self.config.train.precision, packed_refusal)
        self.attempt, leader_precision, leader_refusal = Peers().broadcast(
            values, tuple[int, str, tuple[str, str] | None]
        )
        if refusal is not None:
            return refusal
        if leader_refusal is not None:
            return make_error(*leader_refusal)
        return self._compare_precision(leader_precision)

    def _make_groups(self) -> Groups:
        """Meet the other ranks. Raises LeaveAttempt if the agent orders this rank to leave meanwhile."""
        info, parking = self.rank_info, self.parking
        try:
            if parking is not None:
                parking.watch_start()
            return initialise(
                self.config,
                rank=info.rank,
                world=info.world,
                local_rank=info.local_rank,
                device=info.device,
                check=None if parking is None else parking.check,
                name_suffix="" if parking is None else make_attempt_suffix(self.attempt),
                exchanges_state=parking is not None and self.attempt > 1,
                preparation=None if parking is None else parking.preparation,
            )
        except Exception:
            if parking is not None:
                parking.leave_start(info.device)
            raise

    def _compare_precision(self, leader_precision: str) -> MegascaleError | None:
        """Return an error if this rank's precision differs from rank 0's.

        They may differ without a setting, since the default depends on the rank's device.
        """
        precision, info = self.config.train.precision, self.rank_info
        if precision == leader_precision:
            return None
        if info.device.type == "cuda":
            advised_precision = leader_precision
        else:
            advised_precision = "float32"
        return ConfigError(
            f"train.precision is {precision} on rank {info.rank} and {leader_precision} on rank 0, whose devices "
            f"differ; set --train.precision={advised_precision}"
        )

    def _build(self, resources: contextlib.ExitStack) -> None:
        """Make the feed, the engine and the checkpointer, and the checks that are configured."""
        config, info = self.config, self.rank_info
        early_slots: checkpoint.EarlySlots | None = None
        if self.parking is None or self.parking.retained is None:
            early_slots = order_slots(config, info)
        if early_slots is not None:
            resources.callback(early_slots.close)
        if self.groups is not None:
            store = self.groups.store
        else:
            store = None
        self.feed = open_feed(self.layout, info.rank, info.local_rank, info.local_world, info.device, store)
        resources.callback(self.feed.close)
        earlier_choices: attention_choice.Choices = {}
        if self.is_leader:
            checkpoints = config.checkpoint.location or self.folder.checkpoints
            earlier_choices = attention_choice.read_choices(self.folder.path, checkpoints, config.checkpoint.resume)
        if config.data.valid is not None:
            check_fields(find_sample_fields(config.data.valid), config.model, "data.valid", config.data.valid)
        self._stopwatch.end_phase("feed")
        check_parts(config, info.device)
        self._make_engine(earlier_choices)
        self._stopwatch.end_phase("engine")
        shards = [checkpoint.TensorShard(*fields) for fields in self.engine.logical_tensors()]
        check = self.parking.check if self.parking is not None else lambda: None
        if early_slots is not None:
            self._reused_slots = early_slots.take(check)
        self.checkpointer = checkpoint.Checkpointer(
            config.checkpoint,
            self.folder.path,
            shards,
            reused_slots=self._reused_slots,
            reserve=compute_snapshot_reserve(config),
            check=check,
            side_group=self.groups.side if self.groups is not None else None,
        )
        self._reused_slots = ()
        if self.parking is not None:
            resources.callback(self._retain_state)
        self.checkpoint_policy = CheckpointPolicy(config.checkpoint, self.checkpointer, self.reporter)
        self.resume_guard = ResumeGuard(config, self.folder, self.checkpointer.peers)
        self.weight_watch: WeightWatch | None = None
        if config.resilience.checksum_interval:
            self.weight_watch = WeightWatch(self.engine, info.rank, config.resilience.checksum_interval)
        self.replay_check: ReplayCheck | None = None
        if config.resilience.replay_interval != 0:
            self._start_replays()
        self.fault_injector: FaultInjector | None = None
        if config.resilience.faults:
            self.fault_injector = FaultInjector(self.folder.faults, info, self.engine, self.feed)

    def _start_replays(self) -> None:
        """Let replicas replay each other's micro-batches at intervals, if they can."""
        info, settings, peers = self.rank_info, self.config.resilience, Peers()
        device_kind = find_device_kind(info.device)
        interval = settings.replay_interval
        cost: CheckCost | None = None
        if interval == "auto":
            reason = find_reason_against_replays(self.engine, device_kind, peers)
            if reason is not None:
                share_exclusion(self.engine, peers)
                if reason:
                    self.engine.active["replay"] = f"off (resilience.replay_interval=auto: {reason})"
                return
            exclude_costly_graphs(self.engine)
            interval = compute_interval(self.layout.microbatches)
            cost = CheckCost(info.device, self.engine.world_axis)
        response = replay_response.ReplayResponse(settings, self.folder, self.reporter, info.rank, peers)

        def respond(evidence: ReplayEvidence) -> None:
            if settings.replay_action != "alert":
                # The next attempt must load a confirmed state.
                self.engine.runtime.state_obstacle = "a replay gave other bits than this training"
            response.act(evidence)

        self.replay_check = ReplayCheck(
            self.engine,
            info.rank,
            replay_response.describe_device(info.device),
            device_kind,
            interval=interval,
            on_mismatch=respond,
            cost=cost,
            report=self.reporter.log_line,
        )
        self.engine.replay_check = self.replay_check

    def _make_engine(self, earlier_choices: attention_choice.Choices) -> None:
        """Take the engine that this process has retained, or make a new one. Note which state this process has kept."""
        self._await_predecessors()
        # Without a state to load, the run starts at step 0, for which only a new engine draws the initial weights.
        can_rejoin = self.parking is not None and self.attempt > 1 and self._can_load()
        retained = None
        if self.parking is not None:
            self._live = LiveState()
            retained = self.parking.take_retained()
        if retained is not None:
            self._reused_slots = retained.slots
            self._live = retained.live
            engine = retained.engine
            retained.engine = None
            is_same = retained.rank == self.rank_info.rank and engine is not None and engine.layout == self.layout
            if can_rejoin and is_same and engine is not None and self.groups is not None:
                self.engine = engine
                self.engine.rejoin(self.groups, earlier_choices)
                self._has_rejoined = True
                self._needs_state = True
                return
            # The retained buffers do not fit the parameters that this rank has now. Its shards of the state stay until
            # the ranks that need them have received them.
            self._live = replace(retained.live, is_in_place=False)
            del engine
            if self.parking is not None and self.parking.is_reused:
                gc.collect()  # frees the memory of the earlier engine
            if not self._has_memory_for(self._live):
                log.info("the kept state does not fit beside a new engine, so the state is loaded from memory")
                self._live = retained.live = LiveState()
                self._return_cached_memory()
        self.engine = Engine(
            self.layout,
            self.groups,
            self.rank_info.device,
            earlier_choices,
            fields=self.feed.fields,
            draws_weights=not can_rejoin,
        )
        self._needs_state = can_rejoin
        if self.parking is not None:
            self.parking.hold_updates(self.engine)
            self.parking.release_reserve()

    def _await_predecessors(self) -> None:
        """Wait until killed processes have freed the memory that this process needs, if the agent has named any."""
        if self.parking is not None:
            await_predecessors(self.parking.check)

    def _return_cached_memory(self) -> None:
        """Return the memory that no tensor uses to the device."""
        gc.collect()
        if self.rank_info.device.type == "cuda":
            torch.cuda.empty_cache()

    def _has_memory_for(self, live: LiveState) -> bool:
        """Return whether a new engine fits into the device's memory next to the kept state.

        Memory that torch's allocator has cached stays there if the device has enough besides, since each allocation of
        the new engine and of its first step would otherwise wait for the driver.
        """
        device = self.rank_info.device
        if device.type != "cuda":
            return True
        memory, _ = self.layout.stage_memory(self.layout.grid.coordinate(self.rank_info.rank).pipeline)
        needed = memory.weights + memory.weight_copies + memory.gradients + memory.optimizer + _SPARE_DEVICE_BYTES
        free, _ = torch.cuda.mem_get_info(device)
        if free >= UNCACHED_BYTES and needed <= free + count_cached_bytes(device):
            return True
        self._return_cached_memory()
        if not live.shards:
            return True
        free, _ = torch.cuda.mem_get_info(device)
        return needed <= free + count_cached_bytes(device)

    def _can_load(self) -> bool:
        """Return whether `_load_state` will find a state of this run; the same on all ranks. Collective."""
        section = self.config.checkpoint
        if not section.resume:
            return False
        self._skip_unconfirmed_states()
        self._stored = checkpoint.find_stored_state(section, self.folder.path, Peers())
        return checkpoint.has_saved_state(section, self.folder.path, Peers(), self._stored)

    def _skip_unconfirmed_states(self) -> None:
        """Let the load skip the states that no replay has confirmed. Rank 0 marks them."""
        if self.is_leader:
            location = self.config.checkpoint.location or self.folder.checkpoints
            self._unconfirmed_note = replay_response.skip_unconfirmed_states(self.folder, location)

    def _retain_state(self) -> None:
        """Retain the engine, its state and the staging memory for the next attempt, if this process stays."""
        if not self.ending.is_parking:
            return
        assert self.parking is not None
        self.parking.end_leaving_phase("observers")
        obstacle = self.engine.find_state_obstacle()
        if obstacle:
            log.info("this process stays for the next attempt, which loads the state: %s", obstacle)
            self.parking.retained = RetainedState(self.checkpointer.leave())
            return
        live = self.checkpointer.keep_state(self.attempt)
        try:
            self.engine.close(failed=True)
            self.engine.leave_groups(has_abort=not self.parking.keeps_groups, end_phase=self.parking.end_leaving_phase)
            live = replace(live, step=self._find_kept_step())
            self.parking.end_leaving_phase("step")
        finally:
            # Without its own state, the next attempt needs this rank's last snapshot.
            slots = self.checkpointer.leave(awaits_snapshots=live.step < 0)
            self.parking.end_leaving_phase("snapshots")
        if live.step < 0:
            live = LiveState()
        if self.is_leader and live.step == self._counts.get("step"):
            live = replace(live, state=self._describe_state())
        obstacle = self.engine.find_rejoin_obstacle()
        if obstacle:
            log.info("this process stays for the next attempt, which makes a new engine: %s", obstacle)
            self.parking.retained = RetainedState(slots, replace(live, is_in_place=False))
            return
        self.parking.retained = RetainedState(slots, live, self.engine, self.rank_info.rank)

    def _find_kept_step(self) -> int:
        """Return the step whose state the engine has after it has left its groups, -1 if the state is incomplete."""
        if not self._has_state:
            return -1
        if self._keeps_state:
            return self.step  # the ranks left together, after a complete step
        return self.engine.find_complete_step()

    def _can_keep_state(self) -> bool:
        """Return whether all ranks can keep their state in memory until the next attempt. Collective."""
        assert self.parking is not None
        can_keep = not self.parking.doubt and not self.engine.find_state_obstacle()
        device = self.rank_info.device
        if can_keep and device.type == "cuda":
            kept_bytes = sum(shard.tensor.nbytes for shard in self.checkpointer.shards)
            needed = kept_bytes + torch.cuda.memory_allocated(device) + _SPARE_DEVICE_BYTES
            can_keep = needed <= torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return self.checkpointer.peers.all_true(can_keep)

    def _open_observers(self, resources: contextlib.ExitStack) -> None:
        """Open the rank's status file, its record of calls, its timers and its counters of pauses."""
        info = self.rank_info
        self.folder.create()
        self.telemetry = Telemetry(
            self.folder.status,
            self.folder.flight,
            info.rank,
            info.world,
            groups=self.groups,
            runtime=self.engine.runtime,
            attempt=self.attempt,
        )
        resources.callback(self.telemetry.close)
        self.timers = RankTimers(self.config, info, self.engine.runtime, self.layout.grid, self.attempt)
        resources.callback(self._close_timers)
        self.pauses = HostPauses(info.device)
        resources.callback(self.pauses.close)
        # The flight record notes the operations that are still running, so they must end before it is closed.
        resources.callback(self._synchronize)
        self.status = self.telemetry.status
        self.status.start = self._start
        self.ending.status = self.telemetry.status

    def _close_timers(self) -> None:
        """Stop recording times. Other ranks do not wait for a span service that starts on this host."""
        self.timers.close(awaits_service=not self.ending.is_parking)

    def _make_run_view(self) -> RunView:
        info = self.rank_info
        return RunView(self.config, self.folder.path, info.rank, info.world, self.engine)

    def _train(self, resources: contextlib.ExitStack) -> None:
        """Run the steps of this start, with evaluations and checkpoints between them."""
        train = self.config.train
        with Interrupts() as interrupts:
            self.checkpoint_policy.begin(self.step)
            self.engine.set_start_step(self.step)
            self._has_state = True
            self._count_step(self.step, self.consumed_samples, self.trained_tokens)
            self._awaits_evaluation = self._resumes_evaluation
            self.callbacks.begin_run(self.step)
            last_step = min(train.steps, self.step + (train.stop_after or train.steps))
            resources.callback(self.reporter.close)
            self._accept_start(reads_data=self.step < last_step)
            self._stopwatch.end_phase("claim")
            if self.step < last_step:
                self.checkpointer.prepare()
            self._stopwatch.end_phase("staging memory")
            self._log_start_seconds()
            self.status.start = replace(
                self._start,
                state_ns=time.time_ns(),
                step=self.step,
                source=self.checkpointer.loaded_from,
                is_standing=self.checkpointer.is_standing,
            )
            if self._awaits_evaluation and self.step < last_step:
                self._evaluate(is_repeated=True)
            self._first_step = self.step + 1
            self._first_step_start = time.monotonic()
            self._first_step_allocations = count_device_allocations(self.rank_info.device)
            if self.engine.graphs is not None:
                self._capture_end_step = self.step + _CAPTURE_STEPS
            while self.step < last_step and not self._is_stopping:
                self._train_step(self._choose_stop_request(interrupts))
                self.callbacks.end_step(self.step)
                self._tend_groups()
                if self._is_evaluation_due(self.step):
                    self._evaluate()
                if self.step < last_step:
                    self._save_if_due()
            self._read_pending_step()
            if self._is_leaving and self.step < last_step:
                self._leave_after_step()
            if self.checkpoint_policy.is_due_at_end(self.step):
                self._save(persist=True, wait=True)
            self.checkpoint_policy.finish(self.step)
            if self._is_stopping:
                self._report_interruption()
                raise KeyboardInterrupt

    def _choose_stop_request(self, interrupts: Interrupts) -> float:
        """Return the stop request that this rank adds to the next step's sum, 0 to go on."""
        if interrupts.requested or self.callbacks.run.wants_stop:
            return _STOP_REQUEST
        if self.parking is None:
            return 0.0
        if self.parking.must_leave_after_step:
            return _LEAVE_REQUEST
        preparation = self.parking.preparation
        if preparation is not None and preparation.is_connected:
            return _WARM_REQUEST
        return 0.0

    def _tend_groups(self) -> None:
        """Abort the groups of the attempt before, and make and warm up those of the next attempt, if it is due.

        Communicators of another attempt are aborted and used for the first time only here, while the device is idle and
        nothing is launched (`rendezvous/prepared_groups.py`).
        """
        parking, device = self.parking, self.rank_info.device
        if parking is None or self.groups is None:
            return
        if parking.earlier_groups is not None and self.step > self._first_step:
            begin = time.monotonic()
            self._await_device()
            parking.abort_earlier_groups()
            log.info("aborted the groups of the attempt before in %.2f s", time.monotonic() - begin)
            self.clock.pause()
        if self.step >= self._capture_end_step and parking.earlier_groups is None:
            parking.start_preparation(self.config, self.rank_info, self.groups)
        preparation = parking.preparation
        if not self._must_warm_groups or preparation is None or not preparation.is_connected:
            return
        self._must_warm_groups = False
        begin = time.monotonic()
        self._await_device()
        if preparation.warm_up(FIRST_CALLS_SECONDS):
            seconds = time.monotonic() - begin
            memory = ""
            if self.engine.graphs is not None and self.engine.graphs.count_captures() > 0:
                cache_activations(preparation.target.config, preparation.target.world, device)
            if device.type == "cuda":
                memory = f"; {torch.cuda.mem_get_info(device)[0] / 2**30:.2f} GiB of the GPU are free"
            log.info(
                "warmed up the groups of the next attempt in %.2f s (%s)%s", seconds, preparation.describe(), memory
            )
        self.clock.pause()

    def _await_device(self) -> None:
        """Wait until this rank's GPU is idle, if it has one."""
        if self.rank_info.device.type == "cuda":
            torch.cuda.synchronize(self.rank_info.device)

    def _leave_after_step(self) -> NoReturn:
        """Make sure that the next attempt has the state of this step, then raise LeaveAttempt.

        If a rank cannot keep its state, all copy it to memory, unless a save of this step has begun. A save is skipped
        while an earlier one is still being written, so it is repeated. All ranks repeat it equally often.
        """
        assert self.parking is not None
        self.parking.left_ns = time.time_ns()
        self._keeps_state = self._can_keep_state()
        for _ in range(_MAX_SAVE_TRIES):
            if self._keeps_state or self.checkpoint_policy.has_begun(self.step):
                break
            self._save(persist=False)
            time.sleep(_SAVE_TRY_SECONDS)
        raise LeaveAttempt(f"the rank leaves the attempt after step {self.step}")

    def _finish(self) -> TrainResult:
        """Evaluate a finished run, and report the end."""
        finished = self.step >= self.config.train.steps
        evaluation = None
        if finished:
            evaluation = self._evaluate(is_last=True)
        self.reporter.write_last_event(Event.RUN_FINISHED, step=self.step, finished=finished)
        self.status.update("done", self.step)
        return TrainResult(self.step, finished, self._loss, evaluation)

    def _report_interruption(self) -> None:
        """Report which checkpoint the next start resumes from."""
        if not self.is_leader:
            self.ending.is_reported = True
            return
        saved = self.checkpoint_policy.latest()
        if saved == self.step:
            text = f"interrupted; step {self.step} is saved, and the same command resumes from it"
        else:
            text = f"interrupted; step {self.step} is not saved"
            if not self.config.checkpoint.at_end:
                text += " (checkpoint.at_end=false)"
            if saved is None:
                resumption = "starts from step 0"
            else:
                resumption = f"resumes from step {saved}, the last saved one"
            text += f": the same command {resumption}"
        self.reporter.write_last_event(Event.INTERRUPTED, step=self.step, saved=saved)
        self.ending.is_reported = True
        self.reporter.log_line(text)

    def _synchronize(self) -> None:
        """Wait for the gathers that have begun, unless they can no longer end."""
        if not self.ending.has_lost_peers and hasattr(self, "engine"):
            self.engine.synchronize()

    def _leave_groups(self) -> None:
        """Shut the groups down, after the engine's use of them."""
        assert self.groups is not None
        self._synchronize()
        failed = self.ending.has_lost_peers
        if self.parking is not None:
            self.parking.end_leaving_phase("feed")
        if hasattr(self, "engine"):
            self.engine.close(failed)
        if self.parking is not None and self.parking.keeps_groups:
            self.parking.leave_groups(self.groups)
        shutdown(self.groups, failed=failed)
        if self.parking is not None:
            self.parking.end_leaving_phase("groups")

    # the start: state, data, first lines ------------------------------------------------------------------------

    def _load_state(self) -> None:
        """Load the newest state if this run may resume from it. Nothing in the run folder changes yet."""
        if not self.config.checkpoint.resume:
            self.resume_guard.check_restart()
            self._live = None
            self._load_initial_state()
            return
        self.status.update("load", 0)
        if self._stored is None:
            self._skip_unconfirmed_states()
        load_start = time.monotonic()
        report = checkpoint.LoadReport()
        with self.engine.loading_weights():
            # An imported model has weights only. Its optimizer state stays zero, as before a first step.
            state = self.checkpointer.load(
                initial=self._list_weight_shards(),
                accept=self.resume_guard.check_state,
                report=report,
                live=self._live,
                stored=self._stored,
            )
        # Other ranks have received the shards of an earlier engine, whose memory is freed here.
        self._live = None
        self._load_measures = {
            "load_seconds": round(time.monotonic() - load_start, 3),
            "read_bytes": report.read_bytes,
            "sent_bytes": report.sent_bytes,
        }
        self._load_parts = report.describe_seconds()
        if report.zeroed_states:
            names = ", ".join(sorted(report.zeroed_states))
            self.resume_guard.notes.append(f"{names} of optimizer.name={self.config.optimizer.name} starts at zero")
        if state is None:
            if self._needs_state:
                raise TrainingError(
                    "the saved state of the run was lost after this start had seen it and before the load"
                )
            self.resume_guard.check_first_start()
            self._load_initial_state()
            return
        self._load_base()
        self._restore_counts(state)

    def _restore_counts(self, state: dict[str, Any]) -> None:
        """Continue the counts of steps, samples and tokens from a saved state."""
        self.step = state["step"]
        self.ending.step = self.step
        self.consumed_samples = state.get("samples", 0)  # an imported checkpoint does not have this key
        self.trained_tokens = state.get("tokens", 0)
        self._resumes_evaluation = bool(state.get("awaits_evaluation"))
        if self.replay_check is not None:
            self.replay_check.checked_step = state.get("replayed", self.step)
        read_totals = ReadTotals.from_record(state.get("read"))
        if read_totals is None or self.resume_guard.data_changed:
            # The samples are different now, so the totals start again. Only rank 0 has `data_changed`, and only rank 0
            # writes the ledger.
            read_totals = ReadTotals(first=self.consumed_samples)
        self._read_totals = read_totals

    def _list_weight_shards(self) -> list[checkpoint.TensorShard]:
        return [shard for shard in self.checkpointer.shards if shard.name.startswith("model.")]

    def _load_base(self) -> None:
        """Load the model that adapters are trained on; checkpoints of the run hold the adapters only."""
        if self.config.train.lora is None:
            return
        shards = []
        for piece, view in self.engine.list_base_pieces():
            shards.append(checkpoint.TensorShard(f"model.{piece.name}", piece.shape, piece.box.offsets, view))
        with self.engine.loading_weights():
            self.resume_guard.load_base(shards)

    def _load_initial_state(self) -> None:
        """Load what checkpoint.start_from or checkpoint.imported names, for a run that has no checkpoint yet."""
        section = self.config.checkpoint
        folder = section.imported
        if self.config.train.lora is not None:
            self._load_base()
        elif section.start_state == "continued":
            with self.engine.loading_weights():
                state = self.resume_guard.load_continued(self.checkpointer.shards)
            self._restore_counts(state)
            if self.step >= self.config.train.steps:
                raise ConfigError(
                    f"train.steps={self.config.train.steps} is reached: checkpoint.start_from={section.start_from} is "
                    f"at step {self.step}, and checkpoint.start_state=continued goes on from there; set more "
                    "--train.steps"
                )
        elif section.start_from is not None:
            with self.engine.loading_weights():
                self.resume_guard.load_base(self._list_weight_shards())
        elif folder is not None:
            with self.engine.loading_weights():
                self.resume_guard.load_imported(folder, self._list_weight_shards())

    def _accept_start(self, reads_data: bool) -> None:
        """Check the data on all ranks. If all accept the start, write it into the run folder and report it."""
        local_problem = None
        if reads_data:
            try:
                self._data_notes = self.feed.start(self.consumed_samples)
            except (ConfigError, DataError) as error:
                local_problem = str(error)
        self._stopwatch.end_phase("data")
        for problem in self.checkpointer.peers.all_gather(local_problem, str | None):
            if problem:
                raise DataError(problem)
        self._stopwatch.end_phase("others' load and data")
        self.resume_guard.claim_run()
        self.checkpointer.confirm_load()
        if not self.is_leader:
            return
        attention_choice.write_choices(self.folder.path, self.engine.attention_choices)
        if self.config.data.document_mask:
            self._measure_documents()
        replay_response.confirm_start(self.folder)
        self._write_start_event()
        self.folder.drop_steps_after(self.step)
        self.reporter.open(self.config, self.step)
        self._log_start()

    def _measure_documents(self) -> None:
        """Note how full the packed samples are, and count FLOPs per token with attention within documents only."""
        source = self.feed.open_source()
        document_counts: dict[int, float] = {}  # weighted number of documents by length
        padding = 0.0
        weights = self.config.data.weights or [1.0] * len(source.files)
        for file, weight, report in zip(self.config.data.train, weights, source.report_packing(), strict=True):
            packing = self.config.data.packing
            document_limit = source.fields.max_documents - 1  # the padding of a sample counts as its last document
            self._data_notes.append(
                f"{file}: packing {packing}, at most {document_limit} documents per sample: {report}"
            )
            # Without data.weights every sample of every file counts once. A weight is for all samples of its file.
            sample_weight = weight if self.config.data.weights is None else weight / report.samples
            padding += sample_weight * report.padding
            for length, count in zip(report.lengths.tolist(), report.counts.tolist(), strict=True):
                document_counts[length] = document_counts.get(length, 0.0) + sample_weight * count
        self._flops = document_flops(self.config.model, document_counts, padding)

    def _write_start_event(self) -> None:
        """Write the event of a resumed run, or of a run that starts at step 0."""
        world, source = self.rank_info.world, self.checkpointer.loaded_from
        if source != "nothing":
            details: dict[str, Any] = {"step": self.step, "samples": self.consumed_samples, "loaded_from": source}
            details |= self._load_measures
            if self.resume_guard.changes:
                details["changed"] = {
                    change.key: [change.saved, change.present] for change in self.resume_guard.changes
                }
            self.reporter.write_event(Event.RESUMED, world=world, **details)
        elif self.config.checkpoint.resume is False and self.folder.metrics.exists():
            note = "checkpoint.resume=false: starting over"
            self.reporter.write_event(Event.RUN_STARTED, world=world, note=note)
        else:
            convention = DOCUMENT_CONVENTION if self.config.data.document_mask else CONVENTION
            self.reporter.write_event(Event.RUN_STARTED, world=world, flops_convention=convention)

    def _log_start_seconds(self) -> None:
        """Log the seconds from the moment that this rank met the others until it can train."""
        total = sum(self._stopwatch.timings.values())
        text = f"ready to train {total:.2f} s after the groups: {self._stopwatch.describe()}"
        if self._load_parts:
            text += f"; of the load: {self._load_parts}"
        if self.checkpointer.staging_parts:
            text += f"; of the staging memory: {self.checkpointer.staging_parts}"
        if self._has_rejoined:
            text += "; the engine of the attempt before"
        else:
            parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.engine.build_seconds.items())
            text += f"; a new engine: {parts}"
        log.info("%s", text)

    def _log_start(self) -> None:
        """Print the start-up lines: groups, resumed step, notes and changed settings."""
        log_line = self.reporter.log_line
        if self.config.resilience.continue_replicas and MISSING_VARIABLE not in os.environ:
            log_line("resilience.continue_replicas=true needs a driver, and there is none: use `megascale launch`")
        if self.groups is not None:
            log_line(self.groups.report())
        if self.step and self.checkpointer.loaded_from != "nothing":
            source = self.checkpointer.loaded_from
            line = f"resuming {self.folder.path} after step {self.step}"
            if source != "storage":
                line += f" from {source}"
            seconds = self._load_measures["load_seconds"]
            if seconds >= 1.0:
                line += f": {self._load_measures['read_bytes'] / 1e9:.1f} GB by rank 0 in {seconds:.1f} s"
            log_line(line)
        if self._unconfirmed_note:
            log_line(self._unconfirmed_note)
        for note in self.resume_guard.notes + self._data_notes:
            log_line(note)
        if self.resume_guard.changes:
            log_line(setting_changes.format_changes(self.resume_guard.changes, self.step))

    # one step ---------------------------------------------------------------------------------------------------

    def _train_step(self, stop_request: float) -> None:
        """Queue the next step on the device, then read the results of the previous step."""
        train, recorder = self.config.train, self.engine.runtime.recorder
        step = self.step + 1
        self._begin_step(step)
        rate = compute_learning_rate(self.config.lr, step, train.steps)
        cast_interval = self.config.observe.float8_interval
        queue_start = time.monotonic()
        self.clock.start()
        self.engine.start_gather()
        self._read_batch = self.feed.make_batch_reader(self.consumed_samples)
        result = self.engine.step(
            self._read_micro_batch,
            step,
            rate,
            stop_request,
            before_update=self._before_update,
            has_next_step=step < train.steps,
            count_casts=cast_interval > 0 and step % cast_interval == 0,
            take_read_checksum=self.feed.checksum.take_sums,
            sum_weights=self._sum_weights,
        )
        self.clock.stop()
        if step == self._first_step + 1:
            log.info("second step queued in %.2f s", time.monotonic() - queue_start)
        if step == self._first_step:
            check_gradients(self.engine.chunks, self.engine.data_parallel)
        self.pauses.record(recorder)
        recorder.end_step()
        self.telemetry.end_step()
        self.ending.in_step = False
        # The previous step has ended long ago, and the GPU computes the present one while the results are read.
        self._read_pending_step()
        if not self._has_reported_active:
            self._report_active()
        self._report_graph_choice()
        if self.engine.graphs is not None and self.engine.graphs.failure:
            self._report_failed_graphs(self.engine.graphs.failure)
        self._keep_pending_step(step, rate, result)
        self.checkpoint_policy.poll()
        is_first_step = self._first_step_start is not None
        # A CPU has finished the step already. The end of a start's first step is reported, so its results are read now.
        if self.rank_info.device.type == "cpu" or is_first_step:
            self._read_pending_step()
        # The first collection is the longest, and follows the end of a recovery's pause.
        if self.garbage_collector.is_due(step):
            self._collect_garbage(step)

    def _begin_step(self, step: int) -> None:
        """Announce the step to telemetry, inject due faults, and leave the attempt if this rank must."""
        self.telemetry.begin_step(step)
        self.engine.runtime.recorder.begin_step(step)
        self.pauses.begin_step()
        self.ending.in_step = True
        if self.fault_injector is not None:
            self.fault_injector.inject_due(step)
        if self.parking is not None:
            if self.fault_injector is not None and self.fault_injector.has_changed_process:
                self.parking.add_doubt("a fault was injected into this process")
            self.parking.check()

    def _read_micro_batch(self, i: int) -> Batch[torch.Tensor]:
        """Return micro-batch `i` of this data-parallel rank's samples of the step, and record the wait for it."""
        calls, recorder = self.engine.runtime.calls, self.engine.runtime.recorder
        calls.begin_data_wait()
        mark = recorder.mark()
        micro_batch = self._read_batch(i)
        recorder.record_wait(mark, SpanKind.DATA_WAIT)
        calls.end_data_wait()
        return micro_batch

    def _sum_weights(self) -> float:
        """Return the sum of the loss weights of this rank's samples of the step, and record the wait for it."""
        calls, recorder = self.engine.runtime.calls, self.engine.runtime.recorder
        calls.begin_data_wait()
        mark = recorder.mark()
        weight_sum = self.feed.sum_weights(self.consumed_samples)
        recorder.record_wait(mark, SpanKind.DATA_WAIT)
        calls.end_data_wait()
        return weight_sum

    def _before_update(self) -> None:
        """Wait for a save that still reads the state, before the step's update changes it."""
        if self._first_step_start is not None:
            self._first_step_gradients = time.monotonic() - self._first_step_start
        self.checkpointer.before_update(self.step + 1)

    def _report_active(self) -> None:
        """Report which overlaps and kernels run, which is known after the first step."""
        self._has_reported_active = True
        if self._first_step_start is not None:
            self._first_step_queued = time.monotonic() - self._first_step_start
        log.info("compilations in this process: %s", count_compilations().describe())
        self.reporter.report_active(self.engine.active | self.engine.runtime.kernels.list_choices())

    def _report_graph_choice(self) -> None:
        """Report once whether measured launches made the ranks capture graphs."""
        choice = self.engine.graph_choice
        if choice is None or choice.decision is None or self._has_reported_choice:
            return
        self._has_reported_choice = True
        choices = self.engine.active | self.engine.runtime.kernels.list_choices()
        self.reporter.report_late_choice(CHOICE_NAME, choices)

    def _report_failed_graphs(self, reason: str) -> None:
        """Report once that a capture failed."""
        if not self._has_reported_graphs:
            self._has_reported_graphs = True
            line = f"CUDA graphs are off from here on: {reason}; --kernels.graphs=off skips the attempt"
            self.reporter.log_line(line)

    def _collect_garbage(self, step: int) -> None:
        """Collect garbage now, on all ranks after the same step, as a planned pause."""
        recorder = self.engine.runtime.recorder
        recorder.begin_action(SpanKind.GARBAGE)
        self.pauses.is_planned = True
        self.garbage_collector.collect(step)
        self.pauses.is_planned = False
        recorder.end_action()

    def _keep_pending_step(self, step: int, rate: float, result: StepResult) -> None:
        """Count a step whose operations are queued, and keep its results until `_read_pending_step`."""
        first_sample = self.consumed_samples
        self.step = step
        self.ending.step = step
        self.consumed_samples += self.config.train.global_batch
        self.trained_tokens += self.engine.tokens_per_step
        record = {
            "step": step,
            "time": time.time(),
            "learning_rate": rate,
            "tokens": self.trained_tokens,
            "epoch": round(self.feed.count_epochs(self.consumed_samples), 4),
            **self.feed.take_measures(),
        }
        if self._missing_share:
            record["missing_share"] = self._missing_share
        if self.is_leader:
            sample_ids = self.feed.hash_step_ids(first_sample)
        else:
            sample_ids = ""
        self._pending_step = _PendingStep(record, result, first_sample, sample_ids)

    def _read_pending_step(self) -> None:
        """Read the last step's results from the device and record them.

        Raises TrainingError for an infinite or NaN loss, and after too many skipped steps; DataError if these were
        skipped because their loss weights sum to 0.
        """
        pending = self._pending_step
        if pending is None:
            return
        self._pending_step = None
        record, result = pending.record, pending.result
        step = record["step"]
        read_checksum = result.read_checksum.tolist()
        loss, grad_norm = float(result.loss), float(result.grad_norm)
        self.engine.check_peers()
        if self.parking is not None:
            self.parking.check()  # results after an abort are undefined
            self._check_hold(step, result)
            self.parking.note_step()
        if self._first_step_start is not None:
            seconds = time.monotonic() - self._first_step_start
            allocations = count_device_allocations(self.rank_info.device) - self._first_step_allocations
            log.info(
                "first step complete after %.2f s, queued after %.2f s, its gradients after %.2f s, %d allocations of "
                "device memory",
                seconds,
                self._first_step_queued,
                self._first_step_gradients,
                allocations,
            )
            self._first_step_start = None
            assert self.status.start is not None
            self.status.start = replace(self.status.start, stepped_ns=time.time_ns())
        has_weights = True
        if result.weight_sum is not None:
            record["loss_weight"] = float(result.weight_sum)
            has_weights = record["loss_weight"] > 0
            if not has_weights:
                loss = math.nan  # there is no target to take the mean over
        stop_sum = float(result.stop_sum)
        if stop_sum >= _LEAVE_REQUEST:
            self._is_stopping = True
            self._is_leaving = stop_sum < _STOP_REQUEST
        self._must_warm_groups = stop_sum == self.rank_info.world * _WARM_REQUEST
        if self.weight_watch is not None:
            self.status.checksum = self.weight_watch.read_checksum() or self.status.checksum
        seconds = self.clock.read()
        record |= self.timers.read(step, self.status)
        record |= {
            "loss": loss,
            "grad_norm": grad_norm,
            "seconds": seconds,
            "tokens_per_second": self.engine.tokens_per_step / seconds,
        }
        if math.isfinite(grad_norm) and has_weights:
            self._consecutive_skip_count = 0
        else:
            self._consecutive_skip_count += 1
            self._skipped_count += 1
        if self._skipped_count:
            record["skipped_steps"] = self._skipped_count
        self._add_optional_metrics(record, result)
        # An error up to here leaves the step out of the ledger, the metrics and the counts. Ranks that keep their state
        # go on after a step only if the leader has counted it, so a counted step has both lines.
        self._write_read_samples(step, pending, read_checksum)
        self.reporter.write_metrics(record)
        self._count_step(step, pending.first_sample + self.config.train.global_batch, record["tokens"])
        for event, details in self.feed.find_loader_events(seconds):
            self.reporter.write_event(event, step=step, **details)
        if not has_weights:
            self._check_weightless_steps(step)
            return
        if not math.isfinite(loss):
            self._raise_nonfinite_loss(step, loss)
        self._loss = loss
        if self._consecutive_skip_count:
            self._check_skipped_steps(step, grad_norm)

    def _check_hold(self, step: int, result: StepResult) -> None:
        """Raise TrainingError if a rank held back the update of this step: the step has then changed nothing."""
        hold_sum = float(result.hold_sum)
        if hold_sum > 0:
            lost = TrainingError(
                f"step {step} changed nothing, because {hold_sum:g} of {self.rank_info.world} ranks leave the attempt; "
                "the next attempt repeats it"
            )
            raise attach_record(lost, ExitKind.LOST_PEER, step=step)

    def _write_read_samples(self, step: int, pending: _PendingStep, read_checksum: list[float]) -> None:
        """Add the step's samples to the totals of the run, and write them into the ledger of samples."""
        global_batch = self.config.train.global_batch
        self._read_totals.sums += sum_step(read_checksum, global_batch)
        read_record = self._read_totals.to_record()
        self.reporter.write_samples(step, pending.first_sample, global_batch, pending.sample_ids, read_record)

    def _add_optional_metrics(self, record: dict[str, Any], result: StepResult) -> None:
        """Add to a step's metrics the casts to float8, routing, memory, and the share of the GPUs' peak (MFU)."""
        clipped_count, flushed_count, cast_count = result.cast_counts.tolist()
        if cast_count:
            record |= {"float8_clipped": clipped_count / cast_count, "float8_flushed": flushed_count / cast_count}
        if result.expert_counts is not None:
            record |= result.expert_counts.summarise()
            if record["step"] % self.config.train.log_interval == 0:
                record["expert_counts"] = result.expert_counts.counts.long().tolist()
        record["memory_gib"] = memory_gib(self.rank_info.device)
        if self.peak_flops:
            record["mfu"] = mfu(
                self.config.model,
                record["tokens_per_second"],
                self.rank_info.world,
                self.peak_flops,
                self._flops,
                has_adapters=self.config.train.lora is not None,
            )

    def _raise_nonfinite_loss(self, step: int, loss: float) -> NoReturn:
        """Report an infinite or NaN loss, and raise TrainingError."""
        lr = self.config.lr
        self.reporter.write_event(Event.NONFINITE_LOSS, step=step, loss=str(loss))
        nonfinite = TrainingError(
            f"the loss of step {step} is {loss} and training stopped; {self.checkpoint_policy.describe_latest()}. "
            f"Lower --lr.peak (now {lr.peak:g}), lengthen --lr.warmup_steps (now {lr.warmup_steps}) or inspect "
            "that step's data (samples/ledger.jsonl), then run again"
        )
        raise attach_record(nonfinite, ExitKind.NONFINITE_LOSS, step=step)

    def _check_weightless_steps(self, step: int) -> None:
        """Report the first of consecutive steps without loss weights. Raise DataError after train.max_skipped_steps."""
        if self._consecutive_skip_count == 1:
            self.reporter.write_event(Event.STEP_WITHOUT_WEIGHTS, step=step)
            self.reporter.log_line(f"step {step} is skipped: the loss weights of its targets sum to 0")
        if self._has_skipped_too_many(step):
            raise DataError(
                f"{self._consecutive_skip_count} steps in a row, up to step {step}, were skipped; the loss weights of "
                f"the last one's targets sum to 0. {self.checkpoint_policy.describe_latest()}. Check the loss weights "
                f"of data.train={self.config.data.train}, raise --train.global_batch (now "
                f"{self.config.train.global_batch}), or raise --train.max_skipped_steps (now "
                f"{self.config.train.max_skipped_steps}; 0 allows any number)"
            )

    def _has_skipped_too_many(self, step: int) -> bool:
        """Return whether training must end: too many consecutive steps were skipped, or all steps of the run.

        With train.max_skipped_steps=0 it never must.
        """
        limit, last_step = self.config.train.max_skipped_steps, self.config.train.steps
        has_skipped_all = step == last_step and self._skipped_count == last_step
        return limit > 0 and (self._consecutive_skip_count >= limit or has_skipped_all)

    def _check_skipped_steps(self, step: int, grad_norm: float) -> None:
        """Report the first of consecutive skipped steps. Raise TrainingError after train.max_skipped_steps in a row."""
        count, limit = self._consecutive_skip_count, self.config.train.max_skipped_steps
        if count == 1:
            self.reporter.write_event(Event.NONFINITE_GRADIENT, step=step, grad_norm=str(grad_norm))
            self.reporter.log_line(f"step {step} is skipped: its gradient norm is {grad_norm}")
        if self._has_skipped_too_many(step):
            nonfinite = TrainingError(
                f"the gradients of {count} steps in a row, up to step {step}, are not finite (norm {grad_norm}), "
                f"so these steps changed nothing and training stopped; {self.checkpoint_policy.describe_latest()}. "
                f"Lower --lr.peak (now {self.config.lr.peak:g}) or --model.init_std (now "
                f"{self.config.model.init_std:g}), check --train.precision ({self.config.train.precision}) and the "
                f"data of these steps (samples/ledger.jsonl), then run again. --train.max_skipped_steps (now {limit}) "
                "sets how many in a row are allowed; 0 allows any number"
            )
            raise attach_record(nonfinite, ExitKind.NONFINITE_GRADIENT, step=step)

    # checkpoints and evaluation ---------------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        """Save the state after a step that is not the last, to storage or to memory, if a save is due."""
        target = self.checkpointer.choose_save_target(self.step)
        if target is None:
            return
        self._read_pending_step()  # shows whether all ranks leave after this step
        if self._is_leaving and target == "memory" and self._joins_at_once():
            log.info("step %d is not copied to memory before the join", self.step)
            return  # the ranks keep their state, or `_leave_after_step` saves it
        self._save(persist=target == "storage")

    def _joins_at_once(self) -> bool:
        """Return whether all ranks have the groups of the next attempt, so that it follows at once. Collective.

        A job that waits for nodes leaves in the same way. Its processes may end meanwhile with the state.
        """
        preparation = None
        if self.parking is not None:
            preparation = self.parking.preparation
        return self.checkpointer.peers.all_true(preparation is not None and preparation.is_warm)

    def _save(self, *, persist: bool, wait: bool = False) -> None:
        """Save the state.

        Args:
            persist: save to storage, not only to memory.
            wait: return only when the save is written.
        """
        self._read_pending_step()
        self.status.update("save", self.step)
        state = self._describe_state()
        recorder = self.engine.runtime.recorder
        recorder.begin_action(SpanKind.CHECKPOINT_SAVE)
        self.checkpoint_policy.save(self.step, state, persist=persist, wait=wait)
        recorder.end_action()
        if not self.config.checkpoint.background:
            self.clock.pause()

    def _describe_state(self) -> dict[str, Any]:
        """Return the state of the last step whose results were read, besides tensors. Only rank 0's is complete."""
        state = {
            **self._counts,
            **self.resume_guard.checkpoint_metadata,
            "attention": self.engine.attention_choices,
        }
        if self._awaits_evaluation:
            state["awaits_evaluation"] = True
        if self.replay_check is not None:
            state["replayed"] = self.replay_check.checked_step
        return state

    def _is_evaluation_due(self, step: int) -> bool:
        """Return whether the held-out file is evaluated after a step that is not the run's last one."""
        train = self.config.train
        if self.config.data.valid is None or not train.eval_interval:
            return False
        return 0 < step < train.steps and step % train.eval_interval == 0

    def _count_step(self, step: int, samples: int, tokens: int) -> None:
        """Store the totals up to a step whose results were read.

        Ranks that keep their state may leave in the evaluation after the step, so the next attempt repeats it.
        """
        self._awaits_evaluation = self._is_evaluation_due(step)
        self._counts = {"step": step, "samples": samples, "tokens": tokens, "read": self._read_totals.to_record()}

    def _evaluate(self, is_last: bool = False, is_repeated: bool = False) -> Evaluation | None:
        """Evaluate train.eval_samples windows of the held-out file, the same ones each time, and record the loss.

        If `is_last`, evaluate the complete file too; its loss has the key valid_whole_loss in the metrics. Return the
        evaluation with the most windows; None without a held-out file.

        Args:
            is_repeated: whether the evaluation precedes the first step of this start. The status then stays "load",
                since agent and driver conclude from "evaluate" that the start has completed a step.
        """
        prefix = self.config.data.valid
        if prefix is None:
            return None
        self._read_pending_step()
        if not is_repeated:
            self.status.update("evaluate", self.step)
        recorder = self.engine.runtime.recorder
        recorder.begin_action(SpanKind.EVALUATE)
        evaluation = evaluate_file(self.engine, self.config, prefix, self.config.train.eval_samples)
        record = {
            "step": self.step,
            "time": time.time(),
            "tokens": self.trained_tokens,
            "valid_loss": evaluation.loss,
            "valid_tokens": evaluation.tokens,
        }
        if is_last:
            if not evaluation.complete:
                self.callbacks.report_evaluation(evaluation)
                evaluation = evaluate_file(self.engine, self.config, prefix)
            record |= {"valid_whole_loss": evaluation.loss, "valid_whole_tokens": evaluation.tokens}
        recorder.end_action()
        self.engine.check_peers()
        if evaluation.bits_per_byte is not None:
            record["valid_bits_per_byte"] = evaluation.bits_per_byte
        self.reporter.write_metrics(record)
        self._awaits_evaluation = False
        self.reporter.write_event(
            Event.EVALUATED,
            step=self.step,
            loss=evaluation.loss,
            tokens=evaluation.tokens,
            bits_per_byte=evaluation.bits_per_byte,
        )
        self.callbacks.report_evaluation(evaluation)
        self.clock.pause()
        return replace(evaluation, step=self.step)
