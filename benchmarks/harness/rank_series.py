"""Several measurements one after another in the same ranks, so that imports, CUDA contexts and NCCL start once.

The process that starts the ranks serves a store, which outlives them. Before an item, rank 0 publishes a port for the
item's own rendezvous. After the item, each rank publishes its result or its error. If a rank fails, the other ranks
abort their groups and go on with the next item. If a rank cannot go on, all ranks end, and the starting process starts
them again for the remaining items.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from megascale.bench.step_monitor import StepMonitor
from megascale.checkpoint import object_collectives
from megascale.core import strict_json
from megascale.core.addresses import STORE_LISTENER_VARIABLE
from megascale.errors import MegascaleError, TrainingError
from megascale.rendezvous.stores import open_listener

SERIES_VARIABLE = "MEGASCALE_BENCH_SERIES"  # port of the store and number of the launch, "PORT:LAUNCH"
HOST = "127.0.0.1"
EXIT_LOST = 75  # exit code of ranks that cannot go on with the next item
GRACE_SECONDS = 45.0  # from a failure or the time limit until ranks that are still in the item end
POLL_SECONDS = 0.2
LIBRARY_GIB = 1.5  # growth of the memory that CUDA's libraries keep in a process
MAX_LEFTOVER_GIB = 2.0  # with more memory that an item did not free, the next item gets new processes
_STORE_SECONDS = 60.0  # limit of a call to the store, which is on this host
_ERROR_CHARACTERS = 400
_DESCRIBED_CALLS = 3


class SeriesServer:
    """The store of a series, in the process that starts the ranks.

    Attributes:
        launch: number of the present launch of ranks.
    """

    def __init__(self) -> None:
        listener = open_listener(HOST, 0)
        self._port = listener.getsockname()[1]
        self._store = TCPStore(
            HOST,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_SECONDS),
            master_listen_fd=listener.detach(),
        )
        self.launch = -1

    def begin_launch(self, items: Sequence[int]) -> None:
        """Publish the items of the next launch, and let ranks that are started now join it."""
        self.launch += 1
        os.environ[SERIES_VARIABLE] = f"{self._port}:{self.launch}"
        self._store.set(f"{self.launch}/items", strict_json.dumps(list(items)))

    def has_begun(self, item: int) -> bool:
        """Return whether a rank of the present launch has begun an item."""
        return self._store.check([f"{self.launch}/{item}/begun"])

    def read_failure(self, item: int) -> str:
        """Return the first failure of an item in the present launch, "" if no rank reported one."""
        key = f"{self.launch}/{item}/failed"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def read_partial(self, item: int) -> dict[str, Any] | None:
        """Return the figures of an item that the time limit ended in the present launch; None if there are none."""
        return read_partial(PrefixStore(f"{self.launch}/{item}", self._store))


def read_partial(store: Store) -> dict[str, Any] | None:
    """Return the figures that a rank published in the store of an item; None if there are none."""
    if not store.check(["partial"]):
        return None
    partial: dict[str, Any] = strict_json.loads(store.get("partial").decode())
    return partial


@dataclass
class ItemOutcome:
    """Result of an item.

    Attributes:
        result: what `measure` returned on the rank that returned a result.
        partial: figures of the steps before the time limit ended the item; None without a timed step, and if the item
            was complete or failed for another reason.
        error: the first failure, "" if no rank failed.
        end_error: why a rank could not leave its groups after the result, "" if all ranks did.
        peak_gib: peak of the device's memory in tensors and exchanges, by rank, without what earlier items left.
            None on a CPU.
        leftover_gib: device memory that the item did not free, the largest of all ranks; None on a CPU.
    """

    result: dict[str, Any] | None = None
    partial: dict[str, Any] | None = None
    error: str = ""
    end_error: str = ""
    peak_gib: list[float | None] = field(default_factory=list)
    leftover_gib: float | None = None


class RankSeries:
    """The items of a launch in one rank.

    Attributes:
        items: numbers of the items, in order.
        is_lost: whether the process must end, because an item left its device or its groups in an unknown state.
    """

    def __init__(self, rank: int, world: int) -> None:
        port, _, self._launch = os.environ[SERIES_VARIABLE].partition(":")
        self.rank = rank
        self.world = world
        self._port = int(port)
        self._store = self._connect()
        # Rank 0's listener for one rendezvous: here each item has a rendezvous of its own.
        descriptor = os.environ.pop(STORE_LISTENER_VARIABLE, "")
        if descriptor:
            os.close(int(descriptor))
        self.is_lost = False
        self.items: list[int] = strict_json.loads(self._store.get(f"{self._launch}/items").decode())

    def _connect(self) -> Store:
        return TCPStore(HOST, self._port, is_master=False, timeout=timedelta(seconds=_STORE_SECONDS))

    def name_suffix(self, item: int) -> str:
        """Return a suffix for the names of an item's groups, which no other item has."""
        return f"#{self._launch}.{item}"

    def decide(self, item: int, choice: bool) -> bool:
        """Return the choice of rank 0. Collective."""
        key = f"{self._launch}/{item}/decision"
        if self.rank == 0:
            self._store.set(key, str(int(choice)))
        # Rank 0 may still write the row of the item before.
        self._store.wait([key], timedelta(seconds=_STORE_SECONDS))
        return self._store.get(key) == b"1"

    def run(self, item: int, seconds: float, measure: Callable[[Item], dict[str, Any] | None]) -> ItemOutcome:
        """Measure an item on all ranks and return its outcome, the same on every rank. Collective.

        If the item leaves a rank in an unknown state, `is_lost` is true on all ranks. A process that hangs ends with
        EXIT_LOST.

        Args:
            seconds: time after which the item fails.
            measure: returns the result on one rank and None on others. It registers its groups with `Item.on_end`.
        """
        used_before_gib = read_used_gib()
        allocated_before_gib = read_allocated_gib() or 0.0
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        prefix = f"{self._launch}/{item}"
        self._store.set(f"{prefix}/begun", "1")
        current = Item(prefix, self._connect, rank=self.rank, seconds=seconds)
        result = None
        error_text = ""
        try:
            result = measure(current)
        except Exception as error:
            error_text = describe_error(error)
            current.report_failure(error_text)
            with contextlib.suppress(DistError):
                current.publish_partial()
            if not isinstance(error, MegascaleError):
                traceback.print_exception(error)
            current.abort()
            # The frames of the failed call hold the model and its CUDA graphs.
            traceback.clear_frames(error.__traceback__)
        gc.collect()
        peak_gib = read_peak_gib()
        if peak_gib is not None:
            peak_gib += current.exchange_gib - allocated_before_gib
        steps = self._exchange(prefix, "steps", {"error": error_text, "result": result, "peak_gib": peak_gib})
        failed = any(state["error"] for state in steps)
        if failed:
            current.abort()
        leave_error = current.leave(failed)
        leftover_gib = read_leftover_gib(used_before_gib)
        states = self._exchange(prefix, "left", {"error": leave_error, "leftover_gib": leftover_gib})
        current.close()
        outcome = ItemOutcome(
            result=next((state["result"] for state in steps if state["result"] is not None), None),
            partial=current.read_partial(),
            error=current.read_failure(),
            peak_gib=[state["peak_gib"] for state in steps],
        )
        leftovers = [state["leftover_gib"] for state in states if state["leftover_gib"] is not None]
        if leftovers:
            outcome.leftover_gib = max(leftovers)
            self.is_lost = outcome.leftover_gib > MAX_LEFTOVER_GIB
        lost = [f"rank {rank}: {state['error']}" for rank, state in enumerate(states) if state["error"]]
        if lost:
            if outcome.result is None or outcome.error:
                outcome.error = outcome.error or lost[0]
            else:
                outcome.end_error = lost[0]
            self.is_lost = True
        return outcome

    def _exchange(self, prefix: str, phase: str, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the states of all ranks. The item's watch ends the process if a rank does not come."""
        self._store.set(f"{prefix}/{phase}/{self.rank}", strict_json.dumps(state))
        keys = [f"{prefix}/{phase}/{rank}" for rank in range(self.world)]
        while not self._store.check(keys):
            time.sleep(POLL_SECONDS / 4)
        return [strict_json.loads(self._store.get(key).decode()) for key in keys]


class Item:
    """One item in one rank, and a thread that watches for failures of other ranks and for the time limit."""

    def __init__(self, prefix: str, connect: Callable[[], Store], *, rank: int, seconds: float) -> None:
        self.rank = rank
        self._prefix = prefix
        self._connect = connect
        self._store = PrefixStore(prefix, connect())
        self._watch_store = PrefixStore(prefix, connect())  # a connection serves one thread
        self._seconds = seconds
        self._lock = threading.Lock()
        self._must_abort = False
        self._abort: Callable[[], None] | None = None
        self._leave: Callable[[bool], None] | None = None
        self._monitor: StepMonitor | None = None
        self._has_published = False
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench series", daemon=True)
        self._thread.start()

    def open_store(self) -> Store:
        """Return a store for a rendezvous that does not use MASTER_ADDR and MASTER_PORT."""
        return PrefixStore(f"{self._prefix}/rendezvous", self._connect())

    def set_address(self) -> None:
        """Set MASTER_ADDR and MASTER_PORT for a rendezvous of this item, on a socket that rank 0 listens on."""
        if self.rank == 0:
            listener = open_listener(HOST, 0)
            port = str(listener.getsockname()[1])
            os.environ[STORE_LISTENER_VARIABLE] = str(listener.detach())
            self._store.set("port", port)
        else:
            port = self._store.get("port").decode()
        os.environ["MASTER_ADDR"] = HOST
        os.environ["MASTER_PORT"] = port

    def on_end(self, *, abort: Callable[[], None], leave: Callable[[bool], None]) -> None:
        """Register how the item's groups end.

        Args:
            abort: ends calls that wait for other ranks. Any thread may call it, also repeatedly.
            leave: leaves the groups after the item; its argument is whether a rank failed.
        """
        with self._lock:
            self._abort = abort
            self._leave = leave
            must_abort = self._must_abort
        if must_abort:
            abort()

    def abort(self) -> None:
        """Abort the item's groups, now or as soon as they are registered."""
        with self._lock:
            self._must_abort = True
            abort = self._abort
        if abort is not None:
            abort()

    def leave(self, failed: bool) -> str:
        """Leave the groups and free the device's memory; return why that failed, or ""."""
        leave = self._leave
        # The functions may refer to the groups.
        self._abort = None
        self._leave = None
        self._monitor = None
        listener = os.environ.pop(STORE_LISTENER_VARIABLE, "")
        if listener:  # no rendezvous has used the address
            os.close(int(listener))
        try:
            if leave is not None:
                leave(failed)
            del leave
            object_collectives.forget_groups()
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        except Exception as error:
            return describe_error(error)
        return ""

    def watch_steps(self, monitor: StepMonitor) -> None:
        """Print the lines of the monitor also between steps, and publish its figures at the time limit."""
        self._monitor = monitor

    @property
    def exchange_gib(self) -> float:
        """This rank's memory for exchanges between GPUs, which torch's statistics do not count."""
        if self._monitor is None:
            return 0.0
        return self._monitor.exchange_bytes / 2**30

    def check(self) -> None:
        """Raise TrainingError if the item must end, for ranks without a group that an abort would end."""
        if self._must_abort:
            raise TrainingError("the measurement ends: its time limit is over, or another rank has failed")

    def publish_partial(self) -> None:
        """Publish the figures of the steps so far, if the time limit ended the item and this rank has figures.

        Figures that cannot be computed are printed as an error only, because the abort must follow.
        """
        with self._lock:
            if self._has_published or self._monitor is None or not self._watch_store.check(["limit"]):
                return
            self._has_published = True
            make_result = self._monitor.make_result
            text = ""
            if make_result is not None:
                try:
                    figures = make_result()
                    if figures is not None:
                        text = strict_json.dumps(figures)
                except Exception:
                    traceback.print_exc()
            if text:
                self._watch_store.set("partial", text)

    def read_partial(self) -> dict[str, Any] | None:
        """Return the figures that a rank published at the time limit; None if there are none."""
        return read_partial(self._store)

    def report_failure(self, text: str) -> None:
        """Publish a failure of this rank, unless another rank has published one."""
        with contextlib.suppress(DistError):
            self._watch_store.compare_set("failed", "", f"rank {self.rank}: {text}")

    def read_failure(self) -> str:
        """Return the first failure, "" if there is none."""
        return self._store.get("failed").decode() if self._store.check(["failed"]) else ""

    def close(self) -> None:
        """End the watch."""
        self._has_ended.set()
        self._thread.join()

    def _watch(self) -> None:
        deadline = time.monotonic() + self._seconds
        exit_time = float("inf")
        while not self._has_ended.wait(POLL_SECONDS):
            if time.monotonic() > exit_time:
                os._exit(EXIT_LOST)  # the main thread hangs, so that no exception can end it
            if exit_time < float("inf"):
                continue
            monitor = self._monitor
            if monitor is not None:
                monitor.report_if_due()
            try:
                has_failed = self._watch_store.check(["failed"])
                if not has_failed and time.monotonic() > deadline:
                    self._watch_store.set("limit", "1")
                    text = f"took longer than {self._seconds:.0f} s"
                    if monitor is not None:
                        text += f" ({monitor.describe()})"
                    self.report_failure(text)
                    has_failed = True
                if has_failed:
                    # An aborted step would count as complete, so the figures precede the abort.
                    self.publish_partial()
            except DistError:
                os._exit(EXIT_LOST)  # the process that starts the ranks has ended
            if has_failed:
                exit_time = time.monotonic() + GRACE_SECONDS
                self.abort()


def describe_error(error: BaseException) -> str:
    """Return type and message of an error in one line, and for errors of other packages the innermost calls."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_ERROR_CHARACTERS]
    if isinstance(error, MegascaleError):
        return text
    frames = traceback.extract_tb(error.__traceback__)[-_DESCRIBED_CALLS:]
    calls = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames)]
    return f"{text} ({', '.join(calls)})"


def read_peak_gib() -> float | None:
    """Return the peak of the device's allocated memory since the item began, None on a CPU."""
    if not torch.cuda.is_initialized():
        return None
    return float(torch.cuda.max_memory_allocated() / 2**30)


def read_allocated_gib() -> float | None:
    """Return the memory that tensors of this process occupy on the device, None on a CPU."""
    if not torch.cuda.is_initialized():
        return None
    return float(torch.cuda.memory_allocated() / 2**30)


def read_used_gib() -> float | None:
    """Return the memory of the device that is in use; None on a CPU, and before the process uses the device."""
    if not torch.cuda.is_initialized():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return float((total_bytes - free_bytes) / 2**30)


def read_leftover_gib(used_before_gib: float | None) -> float | None:
    """Return the device memory that an item did not free, None on a CPU.

    Symmetric memory and communicators are not in the allocator's figures, so the growth of the memory in use counts
    too, less what libraries may keep.
    """
    if not torch.cuda.is_initialized():
        return None
    leftover = read_allocated_gib() or 0.0
    used = read_used_gib()
    if used is not None and used_before_gib is not None:
        leftover = max(leftover, used - used_before_gib - LIBRARY_GIB)
    return leftover
