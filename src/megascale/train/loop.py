"""The training loop of one rank: resume, steps, metrics, evaluation, checkpoints, and a clean end whatever happens."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch

from megascale import checkpoint
from megascale.checkpoint import setting_changes
from megascale.checkpoint.object_collectives import Peers
from megascale.config import Config
from megascale.core import calls
from megascale.core.events import Event
from megascale.core.flops import CONVENTION, device_peak, mfu
from megascale.core.layout import lay_out
from megascale.core.status import FAILED_IN_STEP
from megascale.data.loader.feed import open_feed
from megascale.errors import DataError, MegascaleError, TrainingError, kind_of, named
from megascale.observe.metrics import JsonLines, MetricSink, TensorBoard, Terminal, Wandb
from megascale.ops import dispatch
from megascale.optim.learning_rate import learning_rate
from megascale.rendezvous.groups import Groups, lost_peer, shutdown
from megascale.rendezvous.start_job import initialise
from megascale.train import attention_choice
from megascale.train.claim import claim, tell_status
from megascale.train.clock import StepClock
from megascale.train.engine import Engine, StepResult
from megascale.train.evaluation import Evaluation, evaluate_file
from megascale.train.garbage_collection import Garbage
from megascale.train.injected_faults import FaultInjector
from megascale.train.rank_info import RankInfo, memory_gib
from megascale.train.resume import Origin
from megascale.train.run_folder import RunFolder, append
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


class Interrupts:
    """Turns the first SIGINT or SIGTERM into a wish to stop after the step; the second SIGINT stops at once."""

    def __init__(self) -> None:
        self.wanted = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._old[number] = signal.signal(number, self._ask)
            except ValueError:  # not the main thread: the caller handles signals
                return self
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.wanted = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)


class Trainer:
    """A run on this rank. `config` must be resolved (see api.resolve)."""

    def __init__(self, config: Config, place: RankInfo) -> None:
        self.config, self.place = config, place
        self.folder = RunFolder(config.run_folder)
        self.leader = place.rank == 0
        self.layout = lay_out(config, place.world)
        self.grid = self.layout.grid
        self.step = 0
        self.consumed = 0
        self.tokens_per_sample = config.model.sequence_length
        name = torch.cuda.get_device_name() if place.device.type == "cuda" else ""
        self.peak = config.observe.peak_tflops or device_peak(name)
        self.groups: Groups | None = None
        self._closing = contextlib.ExitStack()
        self.sinks: list[MetricSink] = []
        self._lost = False  # the others may be: nothing waits for them
        self._mine = False  # the folder is this run's to write in
        self._begun = False  # this rank has its files there
        self._unread: tuple[dict[str, Any], StepResult] | None = None
        self._in_step = False  # between a step's first operation and its last
        self._stopping = False  # agreed by all ranks
        self._ended = False  # all ranks end together, and it is told why
        self._told = False
        self.clock = StepClock(place.device)
        self.garbage = Garbage(config.train.gc_interval)
        self._closing.callback(self.garbage.close)
        self._loss: float | None = None
        with self._reporting_failures():
            self._meet()
            self._build()

    def _meet(self) -> None:
        """The run's lock, the other ranks, and whether the run is theirs: told to all, or the others would wait."""
        refusal: MegascaleError | None = None
        if self.leader:
            try:
                for lock in claim(self.config):
                    self._closing.callback(lock.release)
            except MegascaleError as error:
                refusal = error
            self._mine = refusal is None
        if self.place.world > 1:
            at = self.place
            self.groups = initialise(
                self.config, rank=at.rank, world=at.world, local_rank=at.local_rank, device=at.device
            )
            self._closing.callback(self._leave)
            told = Peers().share(refusal and (kind_of(refusal), str(refusal)), tuple[str, str] | None)
            refusal = refusal or (named(*told) if told else None)
        if refusal is not None:
            self._ended = True  # whoever trains there has the word
            raise refusal
        self._mine = True

    def _build(self) -> None:
        config, place = self.config, self.place
        store = self.groups.store if self.groups is not None else None
        self.feed = open_feed(self.layout, place.rank, place.local_rank, place.local_world, place.device, store)
        self._closing.callback(self.feed.close)
        kept: attention_choice.Choices = {}
        if self.leader:
            place_of_state = config.checkpoint.location or self.folder.checkpoints
            kept = attention_choice.read(self.folder.path, place_of_state, config.checkpoint.resume)
        self.engine = Engine(self.layout, self.groups, place.device, kept=kept)
        shards = [checkpoint.TensorShard(*parts) for parts in self.engine.optimizer.logical()]
        self.checkpointer = checkpoint.Checkpointer(config.checkpoint, self.folder.path, shards)
        self.origin = Origin(config, self.folder, self.checkpointer.peers)
        every = config.resilience.checksum_interval
        self.weights = WeightWatch(self.engine, place.rank, every) if every else None
        self.faults = FaultInjector(self.folder.faults, self) if config.resilience.faults else None

    # the run ----------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """Train to train.steps (or an interruption); leaves a checkpoint of the last whole step unless
        checkpoint.at_end=false."""
        with self._reporting_failures():
            result = self._run()
        self._closing.close()
        return result

    def _run(self) -> TrainResult:
        train, place = self.config.train, self.place
        self.folder.create()
        self.telemetry = Telemetry(self.folder.status, self.folder.flight, place.rank, place.world, self.groups)
        self._closing.callback(self.telemetry.close)
        self.status, self._begun = self.telemetry.status, True
        self._resume()
        with Interrupts() as interrupts:
            # A state that came from memory is in storage only once it is saved there.
            last_saved = self.step if self.checkpointer.loaded_from in ("nothing", "storage") else -1
            stop = min(train.steps, self.step + (train.stop_after or train.steps))
            self._begin(feed=self.step < stop)
            if self.step < stop:
                self.checkpointer.prepare()
            while self.step < stop and not self._stopping:
                self._train_step(interrupts.wanted)
                if train.eval_interval and self.step % train.eval_interval == 0 and self.step < train.steps:
                    self._evaluate(train.eval_samples)
                due = self.checkpointer.due(self.step) if self.step < stop else None
                if due and self._save(persist=due == "storage") and due == "storage":
                    last_saved = self.step
            self._flush()
            if self.step > last_saved and self.config.checkpoint.at_end:
                self._save(last=True)
            self._handle_outcomes(self.checkpointer.finish(over=self.config.checkpoint.at_end), strict=True)
            if self._stopping:
                self._interrupted()
        finished = self.step >= train.steps
        evaluation = self._evaluate(None) if finished else None
        self._event(Event.RUN_FINISHED, step=self.step, finished=finished)
        self.status.update("done", self.step)
        return TrainResult(self.step, finished, self._loss, evaluation)

    def _interrupted(self) -> None:
        """Say what is kept, and end."""
        if not self.leader:
            self._ended = True
            raise KeyboardInterrupt
        saved = checkpoint.latest(self.checkpointer.folder)
        if saved == self.step:
            text = f"interrupted; step {self.step} is saved, the same command goes on from there"
        else:
            why = " (checkpoint.at_end=false)" if not self.config.checkpoint.at_end else ""
            begin = f"goes on from step {saved}, the last that is" if saved is not None else "begins anew"
            text = f"interrupted; step {self.step} is not saved{why}: the same command {begin}"
        self._event(Event.INTERRUPTED, step=self.step, saved=saved)
        self._ended = True
        self._say(text)
        raise KeyboardInterrupt

    # ends -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        """However this rank ends before its time: an event, a status, and groups that are closed."""
        try:
            yield
        except BaseException as error:
            told = self._explained(error)
            try:
                self._tell_end(told)
            finally:
                self._lost = not self._ended
                self._closing.close()
            if told is error:
                raise
            raise told from error

    def _explained(self, error: BaseException) -> BaseException:
        """What a person is told instead of a library's words."""
        why = lost_peer(error) if isinstance(error, RuntimeError) else None
        if why is None:
            return error
        where = "while starting" if not self._begun else f"in step {self.step + 1}"
        return TrainingError(
            f"rank {self.place.rank} lost contact with another rank {where} ({why}): a rank ended, "
            f"hung for rendezvous.group_timeout={self.config.rendezvous.group_timeout:g} seconds, or its network "
            f"broke. The log of the rank that stopped first tells why ({self.folder.logs}); {self._kept()}. "
            "Start the same command again to go on"
        )

    def _tell_end(self, error: BaseException) -> None:
        if self._ended:
            return
        if isinstance(error, KeyboardInterrupt):
            message, event = f"interrupted at once, in step {self.step + 1}, which is not saved", Event.INTERRUPTED
        else:
            message, event = str(error), Event.RUN_FAILED
            if not isinstance(error, MegascaleError):
                message = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # a full disk: what broke the run must still be raised
            if self._mine:
                self.folder.create()
            if self._begun:
                phase, at = (FAILED_IN_STEP, self.step + 1) if self._in_step else ("failed", self.step)
                self.status.update(phase, at, message=message)
            else:
                tell_status(self.folder, self.place.rank, self._mine, message)
            if self._mine:
                self._event(event, step=self.step, message=message[:2000])

    def _leave(self) -> None:
        assert self.groups is not None
        if not self._lost and hasattr(self, "engine"):
            self.engine.synchronize()
        shutdown(self.groups, failed=self._lost)

    def _kept(self) -> str:
        last = checkpoint.latest(self.config.checkpoint.location or self.folder.checkpoints)
        return f"the checkpoint of step {last} is kept" if last is not None else "no checkpoint had been saved yet"

    # one step ---------------------------------------------------------------------------------------------------

    def _train_step(self, wants_stop: bool) -> None:
        train = self.config.train
        step, first = self.step + 1, self.consumed
        self.telemetry.step_begins(step)
        self._in_step = True
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
            before_update=self.checkpointer.before_update,
            more=step < train.steps,
        )
        self.clock.stop()
        self.telemetry.step_ended()
        self._in_step = False
        # The step before this one is read now, when its numbers have long arrived: a GPU never idles for it.
        self._flush()
        if not self._told:
            self._tell_active()
        self.garbage.after(step)
        self.step, self.consumed = step, first + train.global_batch
        record = {
            "step": step,
            "time": time.time(),
            "learning_rate": rate,
            "tokens": self.consumed * self.tokens_per_sample,
            "epoch": round(self.feed.epochs(self.consumed), 4),
            **self.feed.measures(),
        }
        self._unread = (record, result)
        self._handle_outcomes(self.checkpointer.poll())
        if self.leader:
            ids = self.feed.ids(first)
            append(self.folder.samples, {"step": step, "first": first, "count": train.global_batch, "ids": ids})
        if self.place.device.type == "cpu":
            self._flush()  # nothing runs ahead on a CPU

    def _batches(self, first: int) -> Any:
        """Micro-batch i of this rank's data-parallel share of the samples from `first` on; says when it reads."""
        read = self.feed.batches(first)

        def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            calls.current.reads()
            found = read(i)
            calls.current.has_read()
            return found

        return batch

    def _flush(self) -> None:
        """Read the last step's numbers, record them, and stop the run if they are no numbers."""
        if self._unread is None:
            return
        (record, result), self._unread = self._unread, None
        loss, norm = float(result.loss), float(result.grad_norm)
        self._stopping = self._stopping or bool(result.stop > 0)
        if self.weights is not None:
            self.status.checksum = self.weights.read() or self.status.checksum
        seconds = self.clock.read()
        rate = self.config.train.global_batch * self.tokens_per_sample / seconds
        record |= {"loss": loss, "grad_norm": norm, "seconds": seconds, "tokens_per_second": rate}
        record["memory_gib"] = memory_gib(self.place.device)
        if self.peak:
            record["mfu"] = mfu(self.config.model, rate, self.place.world, self.peak)
        for sink in self.sinks:
            sink.write(record)
        for event, details in self.feed.loader_events(seconds):
            self._event(event, step=record["step"], **details)
        if loss != loss or loss in (float("inf"), float("-inf")):
            self._event(Event.NONFINITE_LOSS, step=record["step"], loss=str(loss))
            raise TrainingError(
                f"the loss of step {record['step']} is {loss} and training stopped; {self._kept()}. "
                f"Lower --lr.peak (now {self.config.lr.peak:g}), lengthen --lr.warmup_steps (now "
                f"{self.config.lr.warmup_steps}) or look at that step's data (samples/ledger.jsonl), then run again"
            )
        self._loss = loss

    # checkpoints and evaluation ---------------------------------------------------------------------------------

    def _save(self, persist: bool = True, last: bool = False) -> bool:
        """Save the state; in the background this begins it and `_handle_outcomes` tells what became of it. False if
        skipped."""
        self._flush()
        self.status.update("save", self.step)
        state = {"step": self.step, "samples": self.consumed, **self.origin.about, "attention": self.engine.attention}
        try:
            begun = self.checkpointer.save(self.step, state, persist=persist, wait=last)
        except TrainingError as error:
            self._event(Event.CHECKPOINT_FAILED, step=self.step, message=str(error))
            raise
        if not begun and persist:
            self._event(Event.CHECKPOINT_SKIPPED, step=self.step, message="the save before it is still being written")
        self._handle_outcomes(self.checkpointer.poll())
        if not self.config.checkpoint.background:
            self.clock.pause()
        return begun

    def _handle_outcomes(self, outcomes: Sequence[checkpoint.SaveOutcome], strict: bool = False) -> None:
        """Record what became of saves. A save in the background that failed is told and training goes on; `strict`:
        it was the last one, and training must not end as if its result were kept."""
        for outcome in outcomes:
            if outcome.committed:
                took = {"seconds": outcome.seconds, "stall": outcome.stall, "bytes": outcome.bytes}
                self._event(Event.CHECKPOINT_SAVED, step=outcome.step, path=f"step-{outcome.step}", **took)
            if outcome.why:
                self._event(Event.CHECKPOINT_FAILED, step=outcome.step, message=outcome.why)
                self._say(f"the checkpoint of step {outcome.step} failed: {outcome.why}; {self._kept()}")
            if outcome.replica:
                self._event(Event.REPLICA_FAILED, step=outcome.step, message=outcome.replica)
        failed = next((o for o in outcomes if o.why and o.step == self.step), None)
        if strict and failed is not None:
            raise TrainingError(
                f"the checkpoint of the last step, {failed.step}, failed: {failed.why}; {self._kept()}. "
                "Remove the cause and start the same command again"
            )

    def _resume(self) -> None:
        """Load the newest state if this run may go on from it; nothing of the run changes yet."""
        if not self.config.checkpoint.resume:
            self.origin.check_anew()
            return
        self.status.update("load", 0)
        # Before the first step the optimizer's moments are zero: an imported model comes without them.
        weights = [s for s in self.checkpointer.shards if s.name.startswith("model.")]
        state = self.checkpointer.load(initial=weights, accept=self.origin.check)
        if state is None:
            self.origin.check_nothing()
            return
        self.engine.loaded()
        self.step, self.consumed = state["step"], state.get("samples", 0)

    def _begin(self, feed: bool) -> None:
        """Let the data be judged too, by all ranks; then the start is accepted, and what it changes is written."""
        problem = None
        if feed:
            try:
                self.feed.start(self.consumed)
            except DataError as error:
                problem = str(error)
        if problem := next(filter(None, self.checkpointer.peers.exchange(problem, str | None)), None):
            raise DataError(problem)
        self.origin.accept()
        self.checkpointer.accept()
        if not self.leader:
            return
        attention_choice.write(self.folder.path, self.engine.attention)
        if self.checkpointer.loaded_from != "nothing":
            source = self.checkpointer.loaded_from
            changed = {c.key: [c.saved, c.present] for c in self.origin.changes}
            more = {"changed": changed} if changed else {}
            self._event(
                Event.RESUMED, world=self.place.world, step=self.step, samples=self.consumed, loaded_from=source, **more
            )
        elif self.config.checkpoint.resume is False and self.folder.metrics.exists():
            self._event(Event.RUN_STARTED, world=self.place.world, note="checkpoint.resume=false: starting over")
        else:
            self._event(Event.RUN_STARTED, world=self.place.world, flops_convention=CONVENTION)
        self.folder.rewind(self.step)
        self._open_sinks()
        for note in self.origin.notes:
            self._say(note)
        if self.origin.changes:
            self._say(setting_changes.line(self.origin.changes, self.step))

    def _evaluate(self, samples: int | None) -> Evaluation | None:
        if self.config.data.valid is None:
            return None
        self._flush()
        self.status.update("evaluate", self.step)
        found = evaluate_file(self.engine, self.config, self.config.data.valid, samples)
        record = {
            "step": self.step,
            "time": time.time(),
            "tokens": self.consumed * self.tokens_per_sample,
            "valid_loss": found.loss,
            "valid_tokens": found.tokens,
        }
        if found.bits_per_byte is not None:
            record["valid_bits_per_byte"] = found.bits_per_byte
        for sink in self.sinks:
            sink.write(record)
        self._event(Event.EVALUATED, step=self.step, loss=found.loss, bits_per_byte=found.bits_per_byte)
        self.clock.pause()
        return found

    def _close_sinks(self) -> None:
        for sink in self.sinks:
            sink.close()

    # telemetry ----------------------------------------------------------------------------------------------------

    def _open_sinks(self) -> None:
        train, observe = self.config.train, self.config.observe
        self.terminal = Terminal(train.steps, train.log_interval, observe.progress)
        self.sinks = [JsonLines(self.folder.metrics), self.terminal]
        self._closing.callback(self._close_sinks)
        if observe.tensorboard:
            self.sinks.append(TensorBoard(self.folder.path / "tensorboard", self.step))
        if observe.wandb is not None:
            self.sinks.append(Wandb(observe.wandb, self.folder.path, self.config.model_dump(exclude_none=True)))
        if self.groups is not None:
            self._say(self.groups.report())
        if self.step:
            source = self.checkpointer.loaded_from
            where = "" if source == "storage" else f" from {source}"
            self._say(f"resuming {self.folder.path} after step {self.step}{where}")

    def _tell_active(self) -> None:
        """After the first step it is known which overlaps and kernels run: say it, nothing is off in silence."""
        self._told = True
        active = self.engine.active | dispatch.active()
        self._event(Event.ACTIVE, **active)
        by_choice: dict[str, list[str]] = {}
        for what, choice in active.items():
            by_choice.setdefault(choice, []).append(what)
        for choice, names in by_choice.items():
            self._say(f"active: {', '.join(names)}: {choice}")

    def _say(self, text: str) -> None:
        if self.leader:
            self.terminal.say(text)

    def _event(self, event: Event, **details: Any) -> None:
        if self.leader:
            self.folder.event(event, **details)
