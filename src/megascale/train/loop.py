"""The training loop of one rank: resume, steps, metrics, evaluation, checkpoints, and a clean end whatever happens."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch

from megascale import checkpoint
from megascale.config import Config
from megascale.core import calls
from megascale.core.events import Event
from megascale.core.flops import CONVENTION, device_peak, mfu
from megascale.core.layout import lay_out
from megascale.data.feed import open_feed
from megascale.errors import MegascaleError, TrainingError
from megascale.observe.metrics import JsonLines, Sink, TensorBoard, Terminal, Wandb
from megascale.ops import dispatch
from megascale.optim.schedule import learning_rate
from megascale.rendezvous.groups import lost_peer, shutdown
from megascale.rendezvous.start import initialise
from megascale.train.clock import StepClock
from megascale.train.engine import Engine, StepResult
from megascale.train.evaluate import Evaluation, evaluate_file
from megascale.train.faults import Faults
from megascale.train.garbage import Garbage
from megascale.train.processes import Place, memory_gib
from megascale.train.run_folder import RunFolder, append
from megascale.train.telling import Telling
from megascale.train.weights import WeightWatch


@dataclass(frozen=True)
class Result:
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
    """A run on this rank. `config` must be resolved (see train/api.py)."""

    def __init__(self, config: Config, place: Place) -> None:
        self.config, self.place = config, place
        self.folder = RunFolder(config.run_folder)
        self.leader = place.rank == 0
        self.layout = lay_out(config, place.world)
        self.grid = self.layout.grid
        self.groups = None
        if place.world > 1:
            self.groups = initialise(
                config, rank=place.rank, world=place.world, local_rank=place.local_rank, device=place.device
            )
        store = self.groups.store if self.groups is not None else None
        self.feed = open_feed(self.layout, place.rank, place.local_rank, place.local_world, place.device, store)
        self.engine = Engine(self.layout, self.groups, place.device)
        shards = [checkpoint.Shard(*parts) for parts in self.engine.optimizer.logical()]
        self.checkpointer = checkpoint.Checkpointer(config.checkpoint, self.folder.path, shards)
        self.step = 0
        self.consumed = 0
        self.tokens_per_sample = config.model.sequence_length
        name = torch.cuda.get_device_name() if place.device.type == "cuda" else ""
        self.peak = config.observe.peak_tflops or device_peak(name)
        self.sinks: list[Sink] = []
        self._unread: tuple[dict[str, Any], StepResult] | None = None
        self._stopping = False  # agreed by all ranks
        self._told = False
        every = config.resilience.checksum_interval
        self.weights = WeightWatch(self.engine, place.rank, every) if every else None
        self.faults = Faults(self.folder.faults, self) if config.resilience.faults else None
        self.clock = StepClock(place.device)
        self.garbage = Garbage(config.train.gc_interval)
        self._loss: float | None = None

    # the run ----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Train to train.steps (or an interruption); always leaves a checkpoint of the last whole step."""
        train = self.config.train
        self.folder.create()
        place = self.place
        self.telling = Telling(self.folder.status, self.folder.flight, place.rank, place.world, self.groups)
        self.status = self.telling.status
        if self.leader:
            self.config.write(self.folder.config)
        self._resume()
        self._open_sinks()
        try:
            with Interrupts() as interrupts:
                # A state that came from memory is in storage only once it is saved there.
                last_saved = self.step if self.checkpointer.loaded_from in ("nothing", "storage") else -1
                stop = min(train.steps, self.step + (train.stop_after or train.steps))
                if self.step < stop:
                    self.feed.start(self.consumed)
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
                self._heed(self.checkpointer.finish(over=self.config.checkpoint.at_end), strict=True)
                if self._stopping:
                    self._event(Event.INTERRUPTED, step=self.step)
                    self._say(f"interrupted; step {self.step} is saved, the same command goes on from there")
                    raise KeyboardInterrupt
            finished = self.step >= train.steps
            evaluation = self._evaluate(None) if finished else None
            self._event(Event.RUN_FINISHED, step=self.step, finished=finished)
            self.status.update("done", self.step)
            return Result(self.step, finished, self._loss, evaluation)
        except MegascaleError as error:
            self._failed(error)
            raise
        except RuntimeError as error:
            why = lost_peer(error)
            if why is None:
                raise
            lost = TrainingError(
                f"rank {self.place.rank} lost contact with another rank in step {self.step + 1} ({why}): a rank ended, "
                f"hung for rendezvous.group_timeout={self.config.rendezvous.group_timeout:g} seconds, or its network "
                f"broke. The log of the rank that stopped first tells why ({self.folder.logs}); {self._kept()}. "
                "Start the same command again to go on"
            )
            self._failed(lost)
            raise lost from error
        finally:
            self.garbage.close()
            self.feed.close()
            for sink in self.sinks:
                sink.close()
            self.telling.close()
            if self.groups is not None:
                failure = sys.exc_info()[0]
                if failure is None or failure is KeyboardInterrupt:
                    self.engine.settle()
                shutdown(self.groups, failed=failure is not None and failure is not KeyboardInterrupt)

    def _failed(self, error: MegascaleError) -> None:
        self.status.update("failed", self.step, message=str(error))
        self._event(Event.RUN_FAILED, step=self.step, message=str(error))

    def _kept(self) -> str:
        last = checkpoint.latest(self.checkpointer.folder)
        return f"the checkpoint of step {last} is kept" if last is not None else "no checkpoint had been saved yet"

    # one step ---------------------------------------------------------------------------------------------------

    def _train_step(self, wants_stop: bool) -> None:
        train = self.config.train
        step, first = self.step + 1, self.consumed
        self.telling.step_begins(step)
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
        self.telling.step_ended()
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
        self._heed(self.checkpointer.poll())
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
        for event, details in self.feed.news(seconds):
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
        """Save the state; in the background this begins it and `_heed` tells what became of it. False if skipped."""
        self._flush()
        self.status.update("save", self.step)
        state = {"step": self.step, "samples": self.consumed, "config": self.config.model_dump(exclude_none=True)}
        try:
            begun = self.checkpointer.save(self.step, state, persist=persist, wait=last)
        except TrainingError as error:
            self._event(Event.CHECKPOINT_FAILED, step=self.step, message=str(error))
            raise
        if not begun and persist:
            self._event(Event.CHECKPOINT_SKIPPED, step=self.step, message="the save before it is still being written")
        self._heed(self.checkpointer.poll())
        if not self.config.checkpoint.background:
            self.clock.pause()
        return begun

    def _heed(self, outcomes: Sequence[checkpoint.Outcome], strict: bool = False) -> None:
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
        state = None
        if self.config.checkpoint.resume:
            self.status.update("load", 0)
            # Before the first step the optimizer's moments are zero: an imported model comes without them.
            weights = [s for s in self.checkpointer.shards if s.name.startswith("model.")]
            state = self.checkpointer.load(initial=weights)
        if state is not None:
            self.engine.loaded()
            self.step, self.consumed = state["step"], state["samples"]
        if not self.leader:
            return
        if state is not None:
            source = self.checkpointer.loaded_from
            self._event(
                Event.RESUMED, world=self.place.world, step=self.step, samples=self.consumed, loaded_from=source
            )
        elif self.config.checkpoint.resume is False and self.folder.metrics.exists():
            self._event(Event.RUN_STARTED, world=self.place.world, note="checkpoint.resume=false: starting over")
        else:
            self._event(Event.RUN_STARTED, world=self.place.world, flops_convention=CONVENTION)
        self.folder.rewind(self.step)

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

    # telling ----------------------------------------------------------------------------------------------------

    def _open_sinks(self) -> None:
        if not self.leader:
            return
        train, observe = self.config.train, self.config.observe
        self.terminal = Terminal(train.steps, train.log_interval, observe.progress)
        self.sinks = [JsonLines(self.folder.metrics), self.terminal]
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
