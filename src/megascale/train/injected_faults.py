"""Breaks this rank on purpose, as `megascale faults inject` asks: only where `resilience.faults` is true.

A fault is a file in the run folder's `faults/`, looked for once a step. Its rank takes it by renaming it, so that it
is injected once, also over restarts; a persistent one (a slow node) is taken again by whoever comes to its node.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from megascale.core.schedule import ActionKind
from megascale.core.untrusted_files import read_small_text
from megascale.data.loader.feed import Feed
from megascale.parallel.collectives import Axis, all_reduce
from megascale.train.engine import Engine
from megascale.train.rank_info import RankInfo

_LEAK = 20_000  # objects a step


class FaultyTrainer(Protocol):
    """What of a trainer (loop.py) the injector reaches into."""

    place: RankInfo
    engine: Engine
    feed: Feed


class FaultInjector:
    """Watches `folder` for faults meant for the trainer's rank."""

    def __init__(self, folder: Path, trainer: FaultyTrainer) -> None:
        self.folder, self.trainer = folder, trainer
        self.rank, self.node = trainer.place.rank, os.environ.get("MEGASCALE_NODE", "")
        self._slow = 0.0
        self._leaked: list[Any] | None = None

    def step(self, step: int) -> None:
        """Inject what is due at the start of `step`."""
        if self.folder.is_dir():
            for file in sorted(self.folder.glob("*.json")):
                self._consider(file, step)
        if self._slow:
            time.sleep(self._slow)
        if self._leaked is not None:
            self._leaked.append([[number] for number in range(_LEAK)])

    def _consider(self, file: Path, step: int) -> None:
        try:
            fault = json.loads(read_small_text(file))
            kind, meant, due = str(fault["kind"]), self._meant(fault), int(fault.get("step") or 0)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return  # half-written, damaged, or taken by another rank
        if not meant or step < due:
            return
        inject: Callable[[dict[str, Any]], None] | None = getattr(self, "_" + kind.replace("-", "_"), None)
        if inject is None or kind not in KINDS:
            return
        if not fault.get("persistent", fault.get("stays")):
            file.rename(file.with_suffix(".injected"))
        inject(fault)

    def _meant(self, fault: dict[str, Any]) -> bool:
        if fault.get("node"):
            return bool(fault["node"] == self.node)
        return int(fault["rank"]) == self.rank

    # the faults -------------------------------------------------------------------------------------------------

    def _exception(self, fault: dict[str, Any]) -> None:
        if fault.get("code"):
            os._exit(int(fault["code"]))  # without a word
        if fault.get("text"):
            raise RuntimeError(str(fault["text"]))
        raise KeyError("injected: the user's code asked a dictionary for what it does not hold")

    def _segfault(self, fault: dict[str, Any]) -> None:
        ctypes.string_at(0)

    def _out_of_memory(self, fault: dict[str, Any]) -> None:
        torch.empty(1 << 60, dtype=torch.uint8, device=self.trainer.place.device)

    def _before_update(self, act: Callable[[], None]) -> None:
        """Do `act` once, before this step's update and before anybody else looks."""
        looks = self.trainer.engine.before_update

        def once(step: int) -> None:
            looks.remove(once)
            act()

        looks.insert(0, once)

    def _nan_gradient(self, fault: dict[str, Any]) -> None:
        grads = self.trainer.engine.flats[0].shards[0].grads
        self._before_update(lambda: grads[:1].fill_(float("nan")))  # type: ignore[arg-type,return-value]

    def _flip_weight(self, fault: dict[str, Any]) -> None:
        """The highest mantissa bit of one weight: of the master weights at rest, or of the copy in use."""
        engine = self.trainer.engine
        if fault.get("copy"):
            self._before_update(lambda: _flip(next(engine.data_parallel.weights_in_use())))
        else:
            _flip(engine.optimizer.states[0].master)

    def _slow_rank(self, fault: dict[str, Any]) -> None:
        self._slow = float(fault.get("seconds") or 0.5)

    def _leak_objects(self, fault: dict[str, Any]) -> None:
        """Every step leaves objects behind that each collection of garbage looks through."""
        self._leaked = []

    def _slow_compute(self, fault: dict[str, Any]) -> None:
        """GEMMs of so many seconds a step more, in equal parts behind the forwards."""
        engine, device = self.trainer.engine, self.trainer.place.device
        forwards = sum(kind == ActionKind.FORWARD for kind, _, _ in engine.pipeline.actions)
        seconds = float(fault.get("seconds") or 0.5) / max(1, forwards)
        size = 2048 if device.type == "cuda" else 64
        a = torch.full((size, size), 1.0 / size, device=device)
        out = torch.empty_like(a)
        times = 0
        if device.type == "cuda":  # the host does not see when they end: so many as take that long
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for mark in (begin, end):
                for _once in range(50):
                    torch.mm(a, a, out=out)
                mark.record()
            end.synchronize()
            times = round(seconds / (begin.elapsed_time(end) / 50e3))

        def more(*_: Any) -> None:
            until = time.thread_time() + seconds  # of work: on a busy machine it takes longer
            with torch.no_grad():
                for _once in range(times):
                    torch.mm(a, a, out=out)
                while not times and time.thread_time() < until:
                    torch.mm(a, a, out=out)

        for chunk in engine.chunks:
            chunk.register_forward_hook(more)
        if engine.graphs is not None:
            engine.graphs.clear()  # what was captured before does not do it

    def _half_checkpoint(self, fault: dict[str, Any]) -> None:
        """Die in the middle of the next save: when the first file is to be made lasting."""

        def die(handle: int) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        # The event log is made lasting too, but only by rank 0 and after the save.
        os.fsync = die  # type: ignore[assignment]

    # hangs ------------------------------------------------------------------------------------------------------

    def _mismatch(self, fault: dict[str, Any]) -> None:
        """One collective more than the others of the group make, at the end of the step's backward."""

        axis = self._axis(str(fault["group"]))
        self._before_update(lambda: all_reduce(torch.zeros(7, device=self.trainer.place.device), axis).wait())  # type: ignore[arg-type,return-value]

    def _axis(self, name: str) -> Axis:
        engine = self.trainer.engine
        axes = engine.flats[0].axes
        return {"world": engine.world, "tensor": axes.tensor, "data_gather": axes.data, "data_reduce": axes.reduce}[
            name
        ]

    def _missing_send(self, fault: dict[str, Any]) -> None:
        """The schedule's next send of this stage is left out."""
        pipeline = self.trainer.engine.pipeline
        kinds = [ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD]
        actions = list(pipeline.actions)
        skipped = [i for i, a in enumerate(actions) if a.kind in kinds][int(fault.get("number") or 0)]
        send, wanted = pipeline._send, actions[skipped]
        seen = dict.fromkeys(kinds, 0)
        nth = [a for a in actions if a.kind == wanted.kind].index(wanted)

        def forget(kind: ActionKind, tensor: torch.Tensor) -> Any:
            seen[kind] += 1
            if kind == wanted.kind and seen[kind] == nth + 1:
                return tensor, _Sent()
            return send(kind, tensor)

        pipeline._send = forget  # type: ignore[method-assign]

    def _dead_reader(self, fault: dict[str, Any]) -> None:
        """Samples come through a child process, and it stops."""
        feed = self.trainer.feed
        batches = feed.batches
        inner, _outer = os.pipe()
        ready, say = os.pipe()
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its rank
            os.write(say, b".")
            signal.pause()
            os._exit(0)
        os.read(ready, 1)  # one that is stopped before it has asked for its end would outlive its rank
        os.kill(child, signal.SIGKILL if fault.get("kill") else signal.SIGSTOP)

        def stuck(first: int) -> Any:
            read = batches(first)

            def batch(i: int) -> Any:
                self.trainer.engine.runtime.calls.reads(child)
                os.read(inner, 1)  # nobody writes: the other end stays open here
                return read(i)

            return batch

        feed.batches = stuck  # type: ignore[method-assign]

    def _spin(self, fault: dict[str, Any]) -> None:
        """Compute for ever."""
        while True:
            threading.Event().wait(0.01)


def _flip(flat: torch.Tensor) -> None:
    """Flip the highest mantissa bit of the first element."""
    kinds = {torch.bfloat16: (torch.int16, 6), torch.float32: (torch.int32, 22), torch.float64: (torch.int64, 51)}
    kind, bit = kinds[flat.dtype]
    flat[:1].view(kind).bitwise_xor_(1 << bit)


class _Sent:
    def wait(self) -> None:
        return None


KINDS = (
    "exception",
    "segfault",
    "out-of-memory",
    "nan-gradient",
    "flip-weight",
    "slow-rank",
    "slow-compute",
    "leak-objects",
    "half-checkpoint",
    "mismatch",
    "missing-send",
    "dead-reader",
    "spin",
)

__all__ = ["KINDS", "FaultInjector"]
