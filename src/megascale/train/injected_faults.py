"""Faults that a rank injects into itself, as `megascale faults inject` requests; requires `resilience.faults=true`.

A fault is a file in the run folder's `faults/`, which each rank reads once per step. The addressed rank renames the
file, so that the fault is injected only once, even after a restart. A persistent fault (a slow node) keeps its file:
every rank that starts on its node injects the fault again.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megascale.core.schedule import ActionKind
from megascale.core.untrusted_files import read_small_text
from megascale.data.loader.feed import Feed
from megascale.ops.segments import TILE
from megascale.parallel.collectives import Axis, Pending, all_reduce
from megascale.parallel.pipeline import P2PStream
from megascale.train.engine import Engine
from megascale.train.rank_info import RankInfo

_LEAKED_OBJECTS_PER_STEP = 20_000

# The method of `FaultInjector` that injects a kind has the kind's name, with underscores.
KINDS = (
    "exception",
    "segfault",
    "out-of-memory",
    "nan-gradient",
    "flip-weight",
    "flip-update",
    "slow-rank",
    "slow-compute",
    "leak-objects",
    "half-checkpoint",
    "mismatch",
    "missing-send",
    "dead-reader",
    "spin",
)

# Faults that end with the attempt, since they are in this object only. All others may change the engine or the process.
_ENDING_WITH_ATTEMPT = ("slow-rank", "leak-objects")


class FaultInjector:
    """Reads faults that are addressed to this rank or its node, and injects them into the engine or the feed.

    Attributes:
        has_changed_process: whether an injected fault may affect a later attempt in this process.
    """

    def __init__(self, folder: Path, rank_info: RankInfo, engine: Engine, feed: Feed) -> None:
        self.folder = folder
        self.rank = rank_info.rank
        self.node = os.environ.get("MEGASCALE_NODE", "")
        self.device = rank_info.device
        self.engine = engine
        self.feed = feed
        self._delay_seconds = 0.0  # sleep at the start of each step
        self._leaked: list[Any] | None = None  # objects of the fault leak-objects; None without it
        self.has_changed_process = False

    def inject_due(self, step: int) -> None:
        """Inject the faults that are due at the start of `step`."""
        if self.folder.is_dir():
            for file in sorted(self.folder.glob("*.json")):
                self._inject_file(file, step)
        if self._delay_seconds:
            time.sleep(self._delay_seconds)
        if self._leaked is not None:
            self._leaked.append([[number] for number in range(_LEAKED_OBJECTS_PER_STEP)])

    def _inject_file(self, file: Path, step: int) -> None:
        """Inject the fault of a file if this rank is addressed and the fault is due."""
        try:
            fault = json.loads(read_small_text(file))
            kind = str(fault["kind"])
            first_step = int(fault.get("step") or 0)
            is_addressed = self._is_addressed(fault)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return  # half-written, damaged, or renamed by another rank
        if not is_addressed or step < first_step or kind not in KINDS:
            return
        if not fault.get("persistent"):
            file.rename(file.with_suffix(".injected"))
        self.has_changed_process |= kind not in _ENDING_WITH_ATTEMPT
        inject: Callable[[dict[str, Any]], None] = getattr(self, "_" + kind.replace("-", "_"))
        inject(fault)

    def _is_addressed(self, fault: dict[str, Any]) -> bool:
        """Return whether the fault is for this rank, or for all ranks of this node."""
        if fault.get("node"):
            return bool(fault["node"] == self.node)
        return int(fault["rank"]) == self.rank

    # the faults -------------------------------------------------------------------------------------------------

    def _exception(self, fault: dict[str, Any]) -> None:
        """Raise an error with fault["text"], or end the process with fault["code"]."""
        if fault.get("code"):
            os._exit(int(fault["code"]))  # no message, no event
        if fault.get("text"):
            raise RuntimeError(str(fault["text"]))
        raise KeyError("injected: the user's code looked up a key that its dictionary does not hold")

    def _segfault(self, fault: dict[str, Any]) -> None:
        ctypes.string_at(0)

    def _out_of_memory(self, fault: dict[str, Any]) -> None:
        torch.empty(1 << 60, dtype=torch.uint8, device=self.device)

    def _run_before_update(self, action: Callable[[], Any]) -> None:
        """Run `action` once before this step's update, ahead of all other hooks."""
        hooks = self.engine.before_update_hooks

        def run_once(step: int) -> None:
            hooks.remove(run_once)
            action()

        hooks.insert(0, run_once)

    def _nan_gradient(self, fault: dict[str, Any]) -> None:
        """Set an element of this step's gradients to NaN."""
        grads = self.engine.buffers[0].shards[0].grads
        assert grads is not None
        self._run_before_update(lambda: grads[:1].fill_(float("nan")))

    def _flip_weight(self, fault: dict[str, Any]) -> None:
        """Flip the highest mantissa bit of one weight: of the master weights at rest, or of the copy in use."""
        if fault.get("copy"):
            self._run_before_update(lambda: _flip_bit(next(self.engine.data_parallel.list_weights_in_use())))
        else:
            _flip_bit(self.engine.optimizer.states[0].master)

    def _flip_update(self, fault: dict[str, Any]) -> None:
        """Flip the highest mantissa bit of one master weight in each tile when the next update has written it."""
        rule = self.engine.optimizer.rule
        update = rule.update

        def update_wrongly(*arguments: Any) -> None:
            rule.__dict__.pop("update")  # later updates call the class's method again
            update(*arguments)
            for state in self.engine.optimizer.states:
                for first in range(0, state.master.numel(), TILE):
                    _flip_bit(state.master[first:])

        rule.update = update_wrongly  # type: ignore[assignment,method-assign]

    def _slow_rank(self, fault: dict[str, Any]) -> None:
        """Sleep fault["seconds"] at the start of each step."""
        self._delay_seconds = float(fault.get("seconds") or 0.5)

    def _leak_objects(self, fault: dict[str, Any]) -> None:
        """Let every step leave objects that each garbage collection visits."""
        self._leaked = []

    def _slow_compute(self, fault: dict[str, Any]) -> None:
        """Add GEMMs that take fault["seconds"] per step, equally divided over the forwards."""
        is_cuda = self.device.type == "cuda"
        forward_count = sum(kind == ActionKind.FORWARD for kind, _, _ in self.engine.pipeline.actions)
        seconds = float(fault.get("seconds") or 0.5) / max(1, forward_count)  # per forward
        size = 2048 if is_cuda else 64
        matrix = torch.full((size, size), 1.0 / size, device=self.device)
        product = torch.empty_like(matrix)
        gemm_count = 0  # GEMMs per forward on a GPU; 0 on a CPU, which computes until the time has passed
        if is_cuda:
            # The host does not see when a GEMM ends. So measure some, and launch as many as take the requested time.
            measured_count = 50
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for event in (begin, end):  # the GEMMs before `begin` warm up
                for _ in range(measured_count):
                    torch.mm(matrix, matrix, out=product)
                event.record()
            end.synchronize()
            gemm_seconds = begin.elapsed_time(end) / 1e3 / measured_count  # elapsed_time is in milliseconds
            gemm_count = round(seconds / gemm_seconds)

        def compute(*arguments: Any) -> None:
            deadline = time.thread_time() + seconds  # time of the thread: on a busy machine the fault takes longer
            with torch.no_grad():
                for _ in range(gemm_count):
                    torch.mm(matrix, matrix, out=product)
                while not gemm_count and time.thread_time() < deadline:
                    torch.mm(matrix, matrix, out=product)

        for chunk in self.engine.chunks:
            chunk.register_forward_hook(compute)
        if self.engine.graphs is not None:
            self.engine.graphs.clear()  # graphs captured earlier lack these GEMMs

    def _half_checkpoint(self, fault: dict[str, Any]) -> None:
        """Kill this process in the middle of the next save, at the first fsync of a file.

        Rank 0 also calls fsync for the event log, but only after the save.
        """

        def die(descriptor: int) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = die  # type: ignore[assignment]

    # hangs ------------------------------------------------------------------------------------------------------

    def _mismatch(self, fault: dict[str, Any]) -> None:
        """Start a collective that the other ranks of the group do not start, after the step's backward."""
        axis = self._find_axis(str(fault["group"]))
        self._run_before_update(lambda: all_reduce(torch.zeros(7, device=self.device), axis).wait())

    def _find_axis(self, name: str) -> Axis:
        """Return the axis of the group with this name."""
        axes = self.engine.buffers[0].axes
        axes_by_name = {
            "world": self.engine.world_axis,
            **axes.model,
            "data_gather": axes.data,
            "data_reduce": axes.reduce,
        }
        return axes_by_name[name]

    def _missing_send(self, fault: dict[str, Any]) -> None:
        """Skip send number fault["number"] of this stage, counted from 0 (the default) from now on."""
        pipeline = self.engine.pipeline
        skipped_index = int(fault.get("number") or 0)
        send_count = sum(action.kind.is_send for action in pipeline.actions)
        if skipped_index >= send_count:
            raise ValueError(f"a step of this stage has {send_count} sends, so send {skipped_index} cannot be skipped")
        send = pipeline._send
        indices = itertools.count()

        def skip_send(stream: P2PStream, tensor: torch.Tensor) -> Pending:
            if next(indices) == skipped_index:
                return Pending(tensor)
            return send(stream, tensor)

        pipeline._send = skip_send  # type: ignore[method-assign]

    def _dead_reader(self, fault: dict[str, Any]) -> None:
        """Let reads of samples wait for a child process that is stopped or killed (fault["kill"])."""
        make_batch_reader = self.feed.make_batch_reader
        data_pipe, _open_end = os.pipe()
        ready_pipe, child_end = os.pipe()
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with its rank
            os.write(child_end, b".")
            signal.pause()
            os._exit(0)
        os.read(ready_pipe, 1)  # a child stopped before its prctl would outlive its rank
        os.kill(child, signal.SIGKILL if fault.get("kill") else signal.SIGSTOP)

        def read_stuck(first: int) -> Any:
            read = make_batch_reader(first)

            def read_batch(i: int) -> Any:
                self.engine.runtime.calls.begin_data_wait(child)
                os.read(data_pipe, 1)  # blocks for ever: the pipe's other end stays open here without a writer
                return read(i)

            return read_batch

        self.feed.make_batch_reader = read_stuck  # type: ignore[method-assign]

    def _spin(self, fault: dict[str, Any]) -> None:
        """Never return to training; the main thread stays in Python code."""
        while True:
            threading.Event().wait(0.01)


def _flip_bit(flat: torch.Tensor) -> None:
    """Flip the highest mantissa bit of the first element."""
    # By type: an integer type of the same size, and the position of the bit.
    formats = {torch.bfloat16: (torch.int16, 6), torch.float32: (torch.int32, 22), torch.float64: (torch.int64, 51)}
    integer_type, bit = formats[flat.dtype]
    flat[:1].view(integer_type).bitwise_xor_(1 << bit)
