"""The training loop of one rank: resume, steps, metrics, evaluation, checkpoints, and a clean end whatever happens."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from megascale import checkpoint
from megascale.checkpoint import setting_changes
from megascale.checkpoint.object_collectives import Peers
from megascale.config import Config
from megascale.core.events import Event
from megascale.core.exit_record import ExitKind, attach_record
from megascale.core.flops import CONVENTION, device_peak, mfu
from megascale.core.layout import lay_out
from megascale.core.spans import SpanKind
from megascale.data.dataset.read_checksum import ReadTotals, sums_of_step
from megascale.data.loader.feed import open_feed
from megascale.errors import ConfigError, DataError, MegascaleError, TrainingError, kind_of, make_error
from megascale.optim.learning_rate import learning_rate
from megascale.rendezvous.groups import Groups, shutdown
from megascale.rendezvous.start_job import initialise
from megascale.train import attention_choice, rank_log, resume
from megascale.train.callbacks import Callbacks, RunView
from megascale.train.checkpoint_policy import CheckpointPolicy
from megascale.train.claim import take_run_locks
from megascale.train.clock import StepClock
from megascale.train.ending import Ending, Interrupts
from megascale.train.engine import Engine, StepResult
from megascale.train.evaluation import Evaluation, evaluate_file
from megascale.train.garbage_collection import Garbage
from megascale.train.host_pauses import HostPauses
from megascale.train.imported_weights import load_imported
from megascale.train.injected_faults import FaultInjector
from megascale.train.rank_info import RankInfo, memory_gib
from megascale.train.rank_timers import RankTimers
from megascale.train.reporter import Reporter
from megascale.train.resume import Origin
from megascale.train.run_folder import RunFolder
from megascale.train.telemetry import Telemetry
from megascale.train.weights import WeightWatch


@dataclass(frozen=True)
class TrainResult:
    """How a start of a run ended.

    Attributes:
        step: optimizer steps done in all.
        finished: whether train.steps is reached.
        loss: of the last step, None if this start did none.
        evaluation: of the held-out file at the end, None without one.
    """

    step: int
    finished: bool
    loss: float | None
    evaluation: Evaluation | None


@dataclass(frozen=True)
class _UnreadStep:
    """A step whose numbers are still on the device.

    Attributes:
        record: what its metrics have beside them.
        first: its first sample.
        ids: hash of the ids of its samples (on rank 0).
    """

    record: dict[str, Any]
    result: StepResult
    first: int
    ids: str


class Trainer:
    """A run on this rank. `config` must be resolved (see api.resolve); nothing is held before `run`."""

    def __init__(self, config: Config, place: RankInfo) -> None:
        self.config, self.place = config, place
        self.folder = RunFolder(config.run_folder)
        self.leader = place.rank == 0
        self.layout = lay_out(config, place.world)
        self.grid = self.layout.grid
        self.step = 0
        self.consumed = 0
        self.tokens = 0  # trained in all; the length of samples may have changed at an earlier resume
        self.tokens_per_sample = config.model.sequence_length
        name = torch.cuda.get_device_name() if place.device.type == "cuda" else ""
        self.peak = config.observe.peak_tflops or device_peak(name)
        self.groups: Groups | None = None
        self.reporter = Reporter(self.folder, self.leader)
        self.ending = Ending(config, place, self.folder)
        self._unread: _UnreadStep | None = None
        self._read = ReadTotals()  # of all steps whose numbers were read
        self._load: dict[str, float] = {}  # what loading took, and this rank's bytes
        self._data_notes: list[str] = []
        self._skipped = 0  # steps of this process whose gradient was not finite
        self._skipped_in_a_row = 0
        self._stopping = False  # agreed by all ranks
        self._told_active = False
        self._told_graphs = False
        self.attempt = self.folder.attempt()  # rank 0's counts
        self.clock = StepClock(place.device)
        self._loss: float | None = None

    # the run ----------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """Train to train.steps (or an interruption); leaves a checkpoint of the last whole step unless
        checkpoint.at_end=false. What is held from the first lock on is let go of in reverse order, however it ends."""
        with contextlib.ExitStack() as life, self.ending:
            self.garbage = Garbage(self.config.train.gc_interval)
            life.callback(self.garbage.close)
            self._meet(life)
            self._build(life)
            return self._run(life)

    def _meet(self, life: contextlib.ExitStack) -> None:
        """The run's lock, the other ranks, and whether the run is theirs: told to all, or the others would wait."""
        refusal: MegascaleError | None = None
        if self.leader:
            try:
                for lock in take_run_locks(self.config):
                    life.callback(lock.release)
            except MegascaleError as error:
                refusal = error
            self.ending.owns_folder = refusal is None
        if self.place.world > 1:
            at = self.place
            self.groups = initialise(
                self.config, rank=at.rank, world=at.world, local_rank=at.local_rank, device=at.device
            )
            life.callback(self._leave)
            mine = (self.attempt, self.config.train.precision, refusal and (kind_of(refusal), str(refusal)))
            self.attempt, precision, told = Peers().broadcast(mine, tuple[int, str, tuple[str, str] | None])
            refusal = refusal or (make_error(*told) if told else self._other_precision(precision))
        if refusal is not None:
            self.ending.is_reported = True  # whoever trains there has the word
            raise refusal
        self.folder.started = self.attempt
        rank_log.begin(self.place, self.attempt)
        self.ending.owns_folder = True

    def _other_precision(self, first: str) -> MegascaleError | None:
        """An error where this rank would compute in another type than rank 0: the default follows the device."""
        mine = self.config.train.precision
        if mine == first:
            return None
        return ConfigError(
            f"train.precision is {mine} on rank {self.place.rank} and {first} on rank 0, whose devices differ; set "
            f"--train.precision={first if self.place.device.type == 'cuda' else 'float32'}"
        )

    def _build(self, life: contextlib.ExitStack) -> None:
        config, place = self.config, self.place
        store = self.groups.store if self.groups is not None else None
        self.feed = open_feed(self.layout, place.rank, place.local_rank, place.local_world, place.device, store)
        life.callback(self.feed.close)
        kept: attention_choice.Choices = {}
        if self.leader:
            place_of_state = config.checkpoint.location or self.folder.checkpoints
            kept = attention_choice.read(self.folder.path, place_of_state, config.checkpoint.resume)
        self.engine = Engine(self.layout, self.groups, place.device, kept=kept)
        shards = [checkpoint.TensorShard(*parts) for parts in self.engine.optimizer.logical()]
        self.checkpointer = checkpoint.Checkpointer(config.checkpoint, self.folder.path, shards)
        self.saves = CheckpointPolicy(config.checkpoint, self.checkpointer, self.reporter)
        self.origin = Origin(config, self.folder, self.checkpointer.peers)
        every = config.resilience.checksum_interval
        self.weights = WeightWatch(self.engine, place.rank, every) if every else None
        self.faults = FaultInjector(self.folder.faults, self) if config.resilience.faults else None

    def _run(self, life: contextlib.ExitStack) -> TrainResult:
        train, place = self.config.train, self.place
        self.folder.create()
        self.telemetry = Telemetry(
            self.folder.status, self.folder.flight, place.rank, place.world, self.groups, self.engine.runtime
        )
        life.callback(self.telemetry.close)
        self.timers = RankTimers(self.config, place, self.engine.runtime, self.grid, self.attempt)
        life.callback(self.timers.close)
        self.pauses = HostPauses(place.device)
        life.callback(self.pauses.close)
        life.callback(self._synchronize)  # what is under way is noted in the flight record, as long as that is open
        self.status = self.ending.status = self.telemetry.status
        self._resume()
        self.callbacks = Callbacks(RunView(self.config, self.folder.path, place.rank, place.world, self.engine))
        life.callback(self.callbacks.close)
        with Interrupts() as interrupts:
            self.saves.begin(self.step)
            self.callbacks.run_begins(self.step)
            stop = min(train.steps, self.step + (train.stop_after or train.steps))
            life.callback(self.reporter.close)
            self._begin(feed=self.step < stop)
            if self.step < stop:
                self.checkpointer.prepare()
            while self.step < stop and not self._stopping:
                self._train_step(interrupts.requested or self.callbacks.run.wants_stop)
                self.callbacks.step_ends(self.step)
                if train.eval_interval and self.step % train.eval_interval == 0 and self.step < train.steps:
                    self._evaluate()
                if self.step < stop and (persist := self.saves.due(self.step)) is not None:
                    self._save(persist)
            self._flush()
            if self.saves.due_at_end(self.step):
                self._save(last=True)
            self.saves.finish(self.step)
            if self._stopping:
                self._interrupted()
        finished = self.step >= train.steps
        evaluation = self._evaluate(last=True) if finished else None
        self.reporter.event(Event.RUN_FINISHED, step=self.step, finished=finished)
        self.status.update("done", self.step)
        return TrainResult(self.step, finished, self._loss, evaluation)

    def _interrupted(self) -> None:
        """Say what is kept, and end."""
        if not self.leader:
            self.ending.is_reported = True
            raise KeyboardInterrupt
        saved = self.saves.latest()
        if saved == self.step:
            text = f"interrupted; step {self.step} is saved, the same command goes on from there"
        else:
            why = " (checkpoint.at_end=false)" if not self.config.checkpoint.at_end else ""
            begin = f"goes on from step {saved}, the last that is" if saved is not None else "begins anew"
            text = f"interrupted; step {self.step} is not saved{why}: the same command {begin}"
        self.reporter.event(Event.INTERRUPTED, step=self.step, saved=saved)
        self.ending.is_reported = True
        self.reporter.say(text)
        raise KeyboardInterrupt

    def _synchronize(self) -> None:
        if not self.ending.peers_lost and hasattr(self, "engine"):
            self.engine.synchronize()

    def _leave(self) -> None:
        assert self.groups is not None
        self._synchronize()
        shutdown(self.groups, failed=self.ending.peers_lost)

    # one step ---------------------------------------------------------------------------------------------------

    def _train_step(self, wants_stop: bool) -> None:
        train = self.config.train
        step, first = self.step + 1, self.consumed
        recorder = self.engine.runtime.recorder
        self.telemetry.step_begins(step)
        recorder.step_begins(step)
        self.pauses.step_begins()
        self.ending.in_step = True
        if self.faults is not None:
            self.faults.step(step)
        rate = learning_rate(self.config.lr, step, train.steps)
        self.clock.start()
        self.engine.start_gather()
        result = self.engine.step(
            self._batches(first),
            step,
            rate,
            wants_stop,
            before_update=lambda: self.checkpointer.before_update(step),
            more=step < train.steps,
            count_casts=bool(counts := self.config.observe.float8_interval) and step % counts == 0,
            take_read=self.feed.checksum.take,
        )
        self.clock.stop()
        self.pauses.record(recorder)
        recorder.step_ended()
        self.telemetry.step_ended()
        self.ending.in_step = False
        # The step before this one is read now, when its numbers have long arrived: a GPU never idles for it.
        self._flush()
        if not self._told_active:
            # After the first step it is known which overlaps and kernels run.
            self._told_active = True
            self.reporter.active(self.engine.active | self.engine.runtime.kernels.active())
        if (graphs := self.engine.graphs) is not None and graphs.failure and not self._told_graphs:
            self._told_graphs = True
            self.reporter.say(f"CUDA graphs are off from here on: {graphs.failure}; --kernels.graphs=off does not try")
        if self.garbage.due(step):
            recorder.begin_action(SpanKind.GARBAGE)
            self.pauses.planned = True
            self.garbage.collect(step)
            self.pauses.planned = False
            recorder.end_action()
        self.step = self.ending.step = step
        self.consumed = first + train.global_batch
        self.tokens += train.global_batch * self.tokens_per_sample
        record = {
            "step": step,
            "time": time.time(),
            "learning_rate": rate,
            "tokens": self.tokens,
            "epoch": round(self.feed.epochs(self.consumed), 4),
            **self.feed.measures(),
        }
        self._unread = _UnreadStep(record, result, first, self.feed.ids(first) if self.leader else "")
        self.saves.poll()
        if self.place.device.type == "cpu":
            self._flush()  # nothing runs ahead on a CPU

    def _batches(self, first: int) -> Any:
        """Micro-batch i of this rank's data-parallel share of the samples from `first` on; says when it reads."""
        read = self.feed.batches(first)

        def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            calls, recorder = self.engine.runtime.calls, self.engine.runtime.recorder
            calls.reads()
            since = recorder.mark()
            found = read(i)
            recorder.record_wait(since, SpanKind.DATA_WAIT)
            calls.has_read()
            return found

        return batch

    def _flush(self) -> None:
        """Read the last step's numbers, record them, and stop the run if they are no numbers."""
        if self._unread is None:
            return
        unread, self._unread = self._unread, None
        record, result, count = unread.record, unread.result, self.config.train.global_batch
        self._read.sums += sums_of_step(result.read.tolist(), count)
        self.reporter.samples(record["step"], unread.first, count, unread.ids, self._read.to_record())
        loss, norm = float(result.loss), float(result.grad_norm)
        self._stopping = self._stopping or bool(result.stop > 0)
        if self.weights is not None:
            self.status.checksum = self.weights.read() or self.status.checksum
        seconds = self.clock.read()
        record |= self.timers.read(record["step"], self.status)
        rate = self.config.train.global_batch * self.tokens_per_sample / seconds
        record |= {"loss": loss, "grad_norm": norm, "seconds": seconds, "tokens_per_second": rate}
        self._skipped += not math.isfinite(norm)
        self._skipped_in_a_row = 0 if math.isfinite(norm) else self._skipped_in_a_row + 1
        if self._skipped:
            record["skipped_steps"] = self._skipped
        clipped, flushed, looked_at = result.casts.tolist()
        if looked_at:
            record |= {"float8_clipped": clipped / looked_at, "float8_flushed": flushed / looked_at}
        record["memory_gib"] = memory_gib(self.place.device)
        if self.peak:
            record["mfu"] = mfu(self.config.model, rate, self.place.world, self.peak)
        self.reporter.record(record)
        for event, details in self.feed.loader_events(seconds):
            self.reporter.event(event, step=record["step"], **details)
        if loss != loss or loss in (float("inf"), float("-inf")):
            self.reporter.event(Event.NONFINITE_LOSS, step=record["step"], loss=str(loss))
            nonfinite = TrainingError(
                f"the loss of step {record['step']} is {loss} and training stopped; {self.saves.kept()}. "
                f"Lower --lr.peak (now {self.config.lr.peak:g}), lengthen --lr.warmup_steps (now "
                f"{self.config.lr.warmup_steps}) or look at that step's data (samples/ledger.jsonl), then run again"
            )
            raise attach_record(nonfinite, ExitKind.NONFINITE_LOSS, step=record["step"])
        self._loss = loss
        if self._skipped_in_a_row:
            self._report_skipped_step(record["step"], norm)

    def _report_skipped_step(self, step: int, norm: float) -> None:
        """Report the first of several skipped steps. Raise TrainingError after train.max_skipped_steps in a row."""
        count, limit = self._skipped_in_a_row, self.config.train.max_skipped_steps
        if count == 1:
            self.reporter.event(Event.NONFINITE_GRADIENT, step=step, grad_norm=str(norm))
            self.reporter.say(f"step {step} is skipped: its gradient norm is {norm}")
        none_applied = step == self.config.train.steps == self._skipped
        if limit and (count >= limit or none_applied):
            nonfinite = TrainingError(
                f"the gradients of {count} steps in a row, up to step {step}, are not finite (norm {norm}), so these "
                f"steps changed nothing and training stopped; {self.saves.kept()}. Lower --lr.peak (now "
                f"{self.config.lr.peak:g}) or --model.init_std (now {self.config.model.init_std:g}), check "
                f"--train.precision ({self.config.train.precision}) and the data of these steps "
                f"(samples/ledger.jsonl), then run again. --train.max_skipped_steps (now {limit}) sets how many in a "
                "row are allowed, 0: any number"
            )
            raise attach_record(nonfinite, ExitKind.NONFINITE_GRADIENT, step=step)

    # checkpoints and evaluation ---------------------------------------------------------------------------------

    def _save(self, persist: bool = True, last: bool = False) -> None:
        self._flush()
        self.status.update("save", self.step)
        state = {
            "step": self.step,
            "samples": self.consumed,
            "tokens": self.tokens,
            "read": self._read.to_record(),
            **self.origin.about,
            "attention": self.engine.attention,
        }
        recorder = self.engine.runtime.recorder
        recorder.begin_action(SpanKind.CHECKPOINT_SAVE)
        self.saves.save(self.step, state, persist, last)
        recorder.end_action()
        if not self.config.checkpoint.background:
            self.clock.pause()

    def _resume(self) -> None:
        """Load the newest state if this run may go on from it; nothing of the run changes yet."""
        if not self.config.checkpoint.resume:
            self.origin.check_anew()
            self._begin_imported()
            return
        self.status.update("load", 0)
        # Before the first step the optimizer's moments are zero: an imported model comes without them.
        weights = self._weights()
        begun, report = time.monotonic(), checkpoint.LoadReport()
        with self.engine.loading_weights():
            state = self.checkpointer.load(initial=weights, accept=self.origin.check, report=report)
        took = round(time.monotonic() - begun, 3)
        if report.zeroed:
            names = ", ".join(sorted(report.zeroed))
            self.origin.notes.append(f"{names} of optimizer.name={self.config.optimizer.name} begins at zero")
        self._load = {"load_seconds": took, "read_bytes": report.read_bytes, "sent_bytes": report.sent_bytes}
        if state is None:
            self.origin.check_nothing()
            self._begin_imported()
            return
        self.step = self.ending.step = state["step"]
        self.consumed = state.get("samples", 0)
        self.tokens = resume.trained_tokens(state, self.tokens_per_sample)
        # Where samples have other tokens than before, the totals begin anew. Rank 0 knows, and writes them.
        known = None if self.origin.has_other_samples else ReadTotals.from_record(state.get("read"))
        self._read = known or ReadTotals(first=self.consumed)

    def _weights(self) -> list[checkpoint.TensorShard]:
        return [shard for shard in self.checkpointer.shards if shard.name.startswith("model.")]

    def _begin_imported(self) -> None:
        """Load the weights of the imported model that this run begins with, if it has one."""
        folder = self.config.checkpoint.imported
        if folder is not None:
            with self.engine.loading_weights():
                load_imported(folder, self._weights(), self.origin)

    def _begin(self, feed: bool) -> None:
        """Let the data be judged too, by all ranks; then the start is accepted, and what it changes is written."""
        problem = None
        if feed:
            try:
                self._data_notes = self.feed.start(self.consumed)
            except DataError as error:
                problem = str(error)
        if problem := next(filter(None, self.checkpointer.peers.all_gather(problem, str | None)), None):
            raise DataError(problem)
        self.origin.accept()
        self.checkpointer.confirm_load()
        if not self.leader:
            return
        attention_choice.write(self.folder.path, self.engine.attention)
        if self.checkpointer.loaded_from != "nothing":
            source = self.checkpointer.loaded_from
            changed = {c.key: [c.saved, c.present] for c in self.origin.changes}
            more = self._load | ({"changed": changed} if changed else {})
            self.reporter.event(
                Event.RESUMED, world=self.place.world, step=self.step, samples=self.consumed, loaded_from=source, **more
            )
        elif self.config.checkpoint.resume is False and self.folder.metrics.exists():
            self.reporter.event(
                Event.RUN_STARTED, world=self.place.world, note="checkpoint.resume=false: starting over"
            )
        else:
            self.reporter.event(Event.RUN_STARTED, world=self.place.world, flops_convention=CONVENTION)
        self.folder.rewind(self.step)
        self.reporter.open(self.config, self.step)
        if self.groups is not None:
            self.reporter.say(self.groups.report())
        if self.step:
            where = "" if self.checkpointer.loaded_from == "storage" else f" from {self.checkpointer.loaded_from}"
            took = self._load["load_seconds"]
            size = f": {self._load['read_bytes'] / 1e9:.1f} GB by rank 0 in {took:.1f} s" if took >= 1.0 else ""
            self.reporter.say(f"resuming {self.folder.path} after step {self.step}{where}{size}")
        for note in (*self.origin.notes, *self._data_notes):
            self.reporter.say(note)
        if self.origin.changes:
            self.reporter.say(setting_changes.format_changes(self.origin.changes, self.step))

    def _evaluate(self, last: bool = False) -> Evaluation | None:
        """Evaluate the held-out file and record the loss of the same train.eval_samples of it each time.

        The last evaluation also reads the whole file, whose loss has a name of its own in the metrics. Returns the
        evaluation of the most samples, None without a held-out file.
        """
        prefix = self.config.data.valid
        if prefix is None:
            return None
        self._flush()
        self.status.update("evaluate", self.step)
        recorder = self.engine.runtime.recorder
        recorder.begin_action(SpanKind.EVALUATE)
        found = evaluate_file(self.engine, self.config, prefix, self.config.train.eval_samples)
        record = {
            "step": self.step,
            "time": time.time(),
            "tokens": self.tokens,
            "valid_loss": found.loss,
            "valid_tokens": found.tokens,
        }
        if last:
            if not found.complete:
                self.callbacks.evaluated(found)
                found = evaluate_file(self.engine, self.config, prefix)
            record |= {"valid_whole_loss": found.loss, "valid_whole_tokens": found.tokens}
        recorder.end_action()
        if found.bits_per_byte is not None:
            record["valid_bits_per_byte"] = found.bits_per_byte
        self.reporter.record(record)
        self.reporter.event(
            Event.EVALUATED,
            step=self.step,
            loss=found.loss,
            tokens=found.tokens,
            bits_per_byte=found.bits_per_byte,
        )
        self.callbacks.evaluated(found)
        self.clock.pause()
        return found
