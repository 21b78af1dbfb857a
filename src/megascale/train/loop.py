"""The training loop of one rank: `Trainer.run` is a start of a run, `Trainer._train_step` is a step.

Where the parts are, in this package unless a path says otherwise:

    data                 step_data.py, data/loader/feed.py
    model                engine_parts.py, stage_model.py
    forward, backward    engine.py (`Engine.step`), chunk_forward.py
    optimizer            engine.py (`Engine._update`), optim/optimizer.py
    evaluation           evaluation_policy.py, evaluation.py
    checkpoints          checkpoint_policy.py, state_loading.py, resume.py, checkpoint/checkpointer.py
    metrics              step_records.py, skipped_steps.py, reporter.py
    start                attempt.py, start_summary.py, first_steps.py
    recovery             parking.py, state_retention.py, engine_rejoin.py, next_groups.py
    stop                 stop_requests.py, ending.py
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from megascale import checkpoint
from megascale.core.batch import check_fields
from megascale.core.events import Event
from megascale.core.exit_record import ExitKind, attach_record
from megascale.core.layout import Layout
from megascale.core.spans import SpanKind
from megascale.core.status import StartReport
from megascale.core.stopwatch import Stopwatch
from megascale.data.dataset.formats import find_sample_fields
from megascale.data.loader.feed import open_feed
from megascale.errors import ConfigError, DataError, TrainingError
from megascale.ops.compile_count import count_compilations
from megascale.optim.learning_rate import compute_learning_rate
from megascale.train import attention_choice, replay_response
from megascale.train.attempt import Attempt
from megascale.train.callbacks import Callbacks, RunView
from megascale.train.checkpoint_policy import CheckpointPolicy
from megascale.train.ending import Ending, Interrupts
from megascale.train.evaluation import Evaluation
from megascale.train.evaluation_policy import EvaluationPolicy
from megascale.train.first_steps import FirstSteps
from megascale.train.host_pauses import GarbageCollector, HostPauses
from megascale.train.injected_faults import FaultInjector
from megascale.train.module_checks import check_gradients
from megascale.train.next_groups import NextGroups
from megascale.train.parking import LeaveAttempt, Parking
from megascale.train.part_checks import check_parts
from megascale.train.rank_info import RankInfo
from megascale.train.rank_timers import RankTimers, StepClock
from megascale.train.replay_check import ReplayCheck
from megascale.train.replay_conditions import start_replays
from megascale.train.reporter import Reporter
from megascale.train.resume import ResumeGuard
from megascale.train.run_folder import RunFolder
from megascale.train.skipped_steps import SkippedSteps
from megascale.train.snapshot_reserve import order_slots
from megascale.train.start_summary import StartSummary, measure_documents
from megascale.train.state_loading import StateLoader
from megascale.train.state_retention import StateRetention
from megascale.train.step_data import StepData
from megascale.train.step_records import PendingStep, StepNumbers, StepRecords
from megascale.train.step_result import StepResult
from megascale.train.stop_requests import StopRequests
from megascale.train.telemetry import Telemetry, start_rank_log
from megascale.train.weights import WeightWatch

log = logging.getLogger("megascale.train")

# Tries of a rank that leaves the attempt to begin a copy of the state, and the pause after each try.
_MAX_SAVE_TRIES = 100
_SAVE_TRY_SECONDS = 0.05


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
        config = layout.config
        self.config = config
        self.layout = layout
        self.rank_info = rank_info
        self.parking = parking
        self.is_leader = rank_info.rank == 0
        self.step = 0
        self.consumed_samples = 0
        self.trained_tokens = 0
        self.folder = RunFolder(config.run_folder)
        self.reporter = Reporter(self.folder, self.is_leader)
        self.ending = Ending(config, rank_info, self.folder, parking)
        self.attempt = Attempt(config, rank_info, self.folder, self.ending, parking)
        self.retention = StateRetention(layout, rank_info, self.folder, self.attempt, parking)
        self.requests = StopRequests(rank_info.world, parking)
        self.clock = StepClock(rank_info.device)
        count_compilations()
        self._start = StartReport(time.time_ns())
        if parking is not None:
            self._start = replace(
                self._start,
                is_reused=parking.is_reused,
                left_ns=parking.left_ns,
                kept_step=parking.find_kept_step(),
            )
            parking.left_ns = 0
        self._stopwatch = Stopwatch()  # of the start, from the groups on
        self._data_notes: list[str] = []
        self._resumes_evaluation = False  # whether the loaded state awaits an evaluation
        self._pending_step: PendingStep | None = None
        self._loss: float | None = None

    # the run ----------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """Train to train.steps, or until an interruption.

        Save a checkpoint of the last complete step unless checkpoint.at_end=false. Resources are released in reverse
        order of their opening, after a failure too.
        """
        with contextlib.ExitStack() as resources, self.ending:
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
            info = self.rank_info
            self.callbacks = Callbacks(RunView(self.config, self.folder.path, info.rank, info.world, self.engine))
            resources.callback(self.callbacks.close)
            self.evaluations = EvaluationPolicy(
                self.engine, self.config, self.reporter, self.status, self.callbacks.report_evaluation
            )
            self._train(resources)
            return self._finish()

    def _train(self, resources: contextlib.ExitStack) -> None:
        """Run the steps of this start, with evaluations and checkpoints between them."""
        with Interrupts() as interrupts:
            last_step = self._begin_training(resources)
            while self.step < last_step and not self.requests.is_stopping:
                must_stop = interrupts.requested or self.callbacks.run.wants_stop
                self._train_step(self.requests.choose(must_stop))
                self.callbacks.end_step(self.step)
                self.next_groups.tend(self.step)
                if self.evaluations.is_due(self.step):
                    self._evaluate()
                if self.step < last_step:
                    self._save_if_due()
            self._end_training(last_step)

    def _finish(self) -> TrainResult:
        """Evaluate a finished run, and report the end."""
        finished = self.step >= self.config.train.steps
        evaluation = self._evaluate(is_last=True) if finished else None
        self.reporter.write_last_event(Event.RUN_FINISHED, step=self.step, finished=finished)
        self.status.update("done", self.step)
        return TrainResult(self.step, finished, self._loss, evaluation)

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
        self.data.begin_step(self.consumed_samples)
        result = self.engine.step(
            self.data.read_micro_batch,
            step,
            rate,
            stop_request,
            before_update=self._before_update,
            has_next_step=step < train.steps,
            count_casts=cast_interval > 0 and step % cast_interval == 0,
            take_read_checksum=self.feed.checksum.take_sums,
            sum_weights=self.data.sum_weights,
        )
        self.clock.stop()
        self.first_steps.log_second_step(step, queue_start)
        if step == self.first_steps.number:
            check_gradients(self.engine.chunks, self.engine.data_parallel)
        self.pauses.record(recorder)
        recorder.end_step()
        self.telemetry.end_step()
        self.ending.in_step = False
        # The previous step has ended long ago, and the GPU computes the present one while the results are read.
        self._read_pending_step()
        self.first_steps.report_choices()
        self._count_queued_step(step, rate, result)
        self.checkpoint_policy.poll()
        # A CPU has finished the step already. The end of a start's first step is reported, so its results are read now.
        if self.rank_info.device.type == "cpu" or step == self.first_steps.number:
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

    def _before_update(self) -> None:
        """Wait for a save that still reads the state, before the step's update changes it."""
        self.first_steps.note_gradients()
        self.checkpointer.before_update(self.step + 1)

    def _count_queued_step(self, step: int, rate: float, result: StepResult) -> None:
        """Count a step whose operations are queued, and keep its results until `_read_pending_step`."""
        first_sample = self.consumed_samples
        self.step = step
        self.ending.step = step
        self.consumed_samples += self.config.train.global_batch
        self.trained_tokens += self.engine.tokens_per_step
        self._pending_step = self.records.begin(
            step, rate, result, first_sample=first_sample, tokens=self.trained_tokens
        )

    def _read_pending_step(self) -> None:
        """Read the last step's results from the device, record them, and follow the ranks' requests to stop.

        Raises TrainingError for an infinite or NaN loss, and after too many skipped steps; DataError if these were
        skipped because their loss weights sum to 0.
        """
        pending = self._pending_step
        if pending is None:
            return
        self._pending_step = None
        numbers = StepNumbers.read(pending.result)
        has_weights = numbers.has_weights
        self._check_peers(pending)
        self.first_steps.end()
        self.requests.follow(float(pending.result.stop_sum))
        if self.weight_watch is not None:
            self.status.checksum = self.weight_watch.read_checksum() or self.status.checksum
        seconds = self.clock.read()
        self.skipped_steps.add(numbers.grad_norm, has_weights=has_weights)
        self.records.complete(pending, numbers, seconds=seconds, skipped_count=self.skipped_steps.count)
        # An error up to here leaves the step out of the ledger, the metrics and the counts. Ranks that keep their state
        # go on after a step only if the leader has counted it, so a counted step has both lines.
        self.records.write(pending, numbers)
        # Ranks that keep their state may leave in the evaluation after the step, so the next attempt repeats it.
        self.evaluations.is_awaited = self.evaluations.is_due(pending.step)
        for event, details in self.feed.find_loader_events(seconds):
            self.reporter.write_event(event, step=pending.step, **details)
        self.skipped_steps.check(pending.step, numbers.loss, numbers.grad_norm, has_weights=has_weights)
        if has_weights:
            self._loss = numbers.loss

    def _check_peers(self, pending: PendingStep) -> None:
        """Raise TrainingError if a rank leaves the attempt or has died in this step, whose results are undefined."""
        self.engine.check_peers()
        if self.parking is None:
            return
        self.parking.check()  # results after an abort are undefined
        hold_sum = float(pending.result.hold_sum)
        if hold_sum > 0:  # a rank has held back its update
            lost = TrainingError(
                f"step {pending.step} changed nothing, because {hold_sum:g} of {self.rank_info.world} ranks leave the "
                "attempt; the next attempt repeats it"
            )
            raise attach_record(lost, ExitKind.LOST_PEER, step=pending.step)
        self.parking.note_step()

    def _collect_garbage(self, step: int) -> None:
        """Collect garbage now, on all ranks after the same step, as a planned pause."""
        recorder = self.engine.runtime.recorder
        recorder.begin_action(SpanKind.GARBAGE)
        self.pauses.is_planned = True
        self.garbage_collector.collect(step)
        self.pauses.is_planned = False
        recorder.end_action()

    # evaluations and checkpoints --------------------------------------------------------------------------------

    def _evaluate(self, *, is_last: bool = False, is_repeated: bool = False) -> Evaluation | None:
        """Evaluate the held-out file after the last step, as `EvaluationPolicy.evaluate` says."""
        self._read_pending_step()
        evaluation = self.evaluations.evaluate(self.step, self.trained_tokens, is_last=is_last, is_repeated=is_repeated)
        self.clock.pause()
        return evaluation

    def _save_if_due(self) -> None:
        """Save the state after a step that is not the last, to storage or to memory, if a save is due."""
        target = self.checkpointer.choose_save_target(self.step)
        if target is None:
            return
        self._read_pending_step()  # shows whether all ranks leave after this step
        if target == "memory" and self.requests.needs_no_copy(self.checkpointer.peers):
            log.info("step %d is not copied to memory before the join", self.step)
            return  # the ranks keep their state, or `_leave_after_step` saves it
        self._save(persist=target == "storage")

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
            **self.records.totals,
            **self.resume_guard.checkpoint_metadata,
            "attention": self.engine.attention_choices,
        }
        if self.evaluations.is_awaited:
            state["awaits_evaluation"] = True
        if self.replay_check is not None:
            state["replayed"] = self.replay_check.checked_step
        return state

    # the start: groups, parts, state ----------------------------------------------------------------------------

    def _join_job(self, resources: contextlib.ExitStack) -> None:
        """Take the run's locks, meet the other ranks, and begin the rank's log.

        Raises MegascaleError on every rank if rank 0 or this rank refuses the start.
        """
        self.attempt.join(resources)
        self._start = replace(self._start, groups_ns=time.time_ns())
        self._stopwatch = Stopwatch()
        self.folder.attempt = self.attempt.number
        start_rank_log(self.rank_info, self.attempt.number)
        joining = "" if self.parking is None else self.parking.take_joining_text()
        if joining:
            log.info("process %d %s", os.getpid(), joining)
        self.ending.owns_folder = True

    def _build(self, resources: contextlib.ExitStack) -> None:
        """Make the feed, the engine and the checkpointer, and the checks that are configured."""
        config, info = self.config, self.rank_info
        early_slots: checkpoint.EarlySlots | None = None
        if self.parking is None or self.parking.retained is None:
            early_slots = order_slots(config, info)
        if early_slots is not None:
            resources.callback(early_slots.close)
        store = None
        if self.attempt.groups is not None:
            store = self.attempt.groups.store
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
        self.engine = self.retention.make_engine(earlier_choices, self.feed.fields)
        if self.parking is not None:
            self.engine.runtime.check_orders = self.parking.check
        self.data = StepData(self.feed, self.engine.runtime)
        self._stopwatch.end_phase("engine")
        self.checkpointer = self.retention.make_checkpointer(self.engine, early_slots)
        if self.parking is not None:
            resources.callback(self._retain_state)
        self.checkpoint_policy = CheckpointPolicy(config.checkpoint, self.checkpointer, self.reporter)
        self.resume_guard = ResumeGuard(config, self.folder, self.checkpointer.peers)
        self._make_checks()

    def _make_checks(self) -> None:
        """Make the checks of weights and replays that are configured, and the injector of faults."""
        info, settings = self.rank_info, self.config.resilience
        self.skipped_steps = SkippedSteps(self.config, self.reporter, self.checkpoint_policy)
        self.weight_watch: WeightWatch | None = None
        if settings.checksum_interval:
            self.weight_watch = WeightWatch(self.engine, info.rank, settings.checksum_interval)
        self.replay_check: ReplayCheck | None = None
        if settings.replay_interval != 0:
            self.replay_check = start_replays(self.engine, info.rank, self.folder, self.reporter)
        self.fault_injector: FaultInjector | None = None
        if settings.faults:
            self.fault_injector = FaultInjector(self.folder.faults, info, self.engine, self.feed)

    def _open_observers(self, resources: contextlib.ExitStack) -> None:
        """Open the rank's status file, its record of calls, its timers, its counters of pauses and its records."""
        info, runtime = self.rank_info, self.engine.runtime
        self.folder.create()
        self.telemetry = Telemetry(
            self.folder.status,
            self.folder.flight,
            info.rank,
            info.world,
            groups=self.attempt.groups,
            runtime=runtime,
            attempt=self.attempt.number,
        )
        resources.callback(self.telemetry.close)
        self.timers = RankTimers(self.config, info, runtime, self.layout.grid, self.attempt.number)
        resources.callback(self._close_timers)
        self.pauses = HostPauses(info.device)
        resources.callback(self.pauses.close)
        # The flight record notes the operations that are still running, so they must end before it is closed.
        resources.callback(self.attempt.synchronize)
        self.status = self.telemetry.status
        self.status.start = self._start
        self.ending.status = self.status
        self.next_groups = NextGroups(
            self.attempt, info, self.engine, self.parking, clock=self.clock, requests=self.requests
        )
        self.first_steps = FirstSteps(self.engine, self.reporter, self.status)
        self.records = StepRecords(
            self.layout,
            info,
            self.feed,
            reporter=self.reporter,
            timers=self.timers,
            status=self.status,
            count_exchange_bytes=self.engine.count_exchange_bytes,
        )

    def _close_timers(self) -> None:
        """Stop recording times. Other ranks do not wait for a span service that starts on this host."""
        self.timers.close(awaits_service=not self.ending.is_parking)

    def _load_state(self) -> None:
        """Load the state that the run goes on from, and its counts. Nothing in the run folder changes yet."""
        if self.config.checkpoint.resume:
            self.status.update("load", 0)
        self.loader = StateLoader(self.config, self.engine, self.checkpointer, self.resume_guard)
        state = self.loader.load(self.retention)
        if state is not None:
            self._restore_counts(state)
        self.loader.check_remaining_steps(self.step)

    def _restore_counts(self, state: dict[str, Any]) -> None:
        """Continue the counts of steps, samples and tokens from a saved state."""
        self.step = state["step"]
        self.ending.step = self.step
        self.consumed_samples = state.get("samples", 0)  # an imported checkpoint does not have this key
        self.trained_tokens = state.get("tokens", 0)
        self._resumes_evaluation = bool(state.get("awaits_evaluation"))
        if self.replay_check is not None:
            self.replay_check.checked_step = state.get("replayed", self.step)
        self.records.restore_totals(state, self.consumed_samples, is_new_data=self.resume_guard.data_changed)

    def _begin_training(self, resources: contextlib.ExitStack) -> int:
        """Prepare the first step of this start, and return the number of its last one."""
        train = self.config.train
        self.checkpoint_policy.begin(self.step)
        self.engine.set_start_step(self.step)
        self.retention.has_state = True
        self.records.count(self.step, self.consumed_samples, self.trained_tokens)
        self.evaluations.is_awaited = self._resumes_evaluation
        self.callbacks.begin_run(self.step)
        last_step = min(train.steps, self.step + (train.stop_after or train.steps))
        resources.callback(self.reporter.close)
        summary = self._accept_start(reads_data=self.step < last_step)
        self._stopwatch.end_phase("claim")
        if self.step < last_step:
            self.checkpointer.prepare()
        self._stopwatch.end_phase("staging memory")
        if self.evaluations.is_awaited and self.step < last_step:
            # Before the report that the state is ready, since the record of a recovery counts what follows as the
            # first step.
            self._evaluate(is_repeated=True)
            self._stopwatch.end_phase("repeated evaluation")
        summary.log_seconds(self._stopwatch, self.engine)
        self.status.start = replace(
            self._start,
            state_ns=time.time_ns(),
            step=self.step,
            source=self.checkpointer.loaded_from,
            is_standing=self.checkpointer.is_standing,
        )
        first_step = self.step + 1
        self.next_groups.begin(first_step)
        self.first_steps.begin(first_step)
        return last_step

    def _accept_start(self, *, reads_data: bool) -> StartSummary:
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
        summary = StartSummary(
            self.config,
            self.folder,
            self.reporter,
            checkpointer=self.checkpointer,
            resume_guard=self.resume_guard,
            loader=self.loader,
            retention=self.retention,
        )
        if not self.is_leader:
            return summary
        attention_choice.write_choices(self.folder.path, self.engine.attention_choices)
        if self.config.data.document_mask:
            document_notes, self.records.flops = measure_documents(self.config, self.feed.open_source())
            self._data_notes += document_notes
        replay_response.confirm_start(self.folder)
        summary.write_event(self.rank_info.world, step=self.step, samples=self.consumed_samples)
        self.folder.drop_steps_after(self.step)
        self.reporter.open(self.config, self.step)
        summary.print_lines(self.step, self.attempt.groups, self._data_notes)
        return summary

    # the end of the steps ---------------------------------------------------------------------------------------

    def _end_training(self, last_step: int) -> None:
        """Leave the attempt if the ranks do so, save the last state if it is due, and report an interruption.

        Raises KeyboardInterrupt if the run was interrupted, LeaveAttempt if this process goes on in another attempt.
        """
        self._read_pending_step()
        if self.requests.is_leaving and self.step < last_step:
            self._leave_after_step()
        if self.checkpoint_policy.is_due_at_end(self.step):
            self._save(persist=True, wait=True)
        self.checkpoint_policy.finish(self.step)
        if self.requests.is_stopping:
            self._report_interruption()
            raise KeyboardInterrupt

    def _leave_after_step(self) -> NoReturn:
        """Make sure that the next attempt has the state of this step, then raise LeaveAttempt.

        If a rank cannot keep its state, all copy it to memory, unless a save of this step has begun. A save is skipped
        while an earlier one is still being written, so it is repeated. All ranks repeat it equally often.
        """
        assert self.parking is not None
        self.parking.left_ns = time.time_ns()
        self.retention.keeps_state = self.retention.can_keep(self.engine, self.checkpointer)
        for _ in range(_MAX_SAVE_TRIES):
            if self.retention.keeps_state or self.checkpoint_policy.has_begun(self.step):
                break
            self._save(persist=False)
            time.sleep(_SAVE_TRY_SECONDS)
        raise LeaveAttempt(f"the rank leaves the attempt after step {self.step}")

    def _retain_state(self) -> None:
        """Retain the engine, its state and the staging memory for the next attempt, if this process stays."""
        if self.ending.is_parking:
            self.retention.retain(self.engine, self.checkpointer, step=self.step, describe_state=self._describe_state)

    def _report_interruption(self) -> None:
        """Report which checkpoint the next start resumes from."""
        if not self.is_leader:
            self.ending.is_reported = True
            return
        saved = self.checkpoint_policy.latest()
        self.reporter.write_last_event(Event.INTERRUPTED, step=self.step, saved=saved)
        self.ending.is_reported = True
        self.reporter.log_line(self.checkpoint_policy.describe_interruption(self.step, saved))
