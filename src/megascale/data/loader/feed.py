"""Micro-batches for the training loop, from the loader process of the host or read by the rank itself."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megascale.config import Config
from megascale.core.batch import NO_FIELDS, Batch
from megascale.core.batch_shares import BatchShares
from megascale.core.events import Event
from megascale.core.layout import Layout
from megascale.data.dataset.data_checks import check_run_data
from megascale.data.dataset.read_checksum import ReadChecksum
from megascale.data.dataset.sample_fields import Samples
from megascale.data.dataset.samples import SampleSource, hash_sample_ids
from megascale.data.loader import host_loader
from megascale.data.loader.host_loader import LoaderReader, StartedLoader
from megascale.data.loader.host_plan import HostPlan, plan_host
from megascale.data.loader.ring import COUNTERS

SLOW_SHARE = 0.02  # part of the steps' time spent waiting for data above which an event reports a slow loader
_JUDGED_STEPS = 10  # steps over which waiting is averaged
_MIN_CORE_SHARE = 0.6  # of a core that an encoding thread gets if no other process uses the core
_QUIET_STEPS = 100  # fewest steps between two events with the same cause
# Remedies by the cause that `find_cause` returns.
_REMEDIES = {
    "disk": "put the data on a faster disk, or as token files (`megascale data build`), which are smaller than text",
    "decompression": "store the data less compressed or as token files (`megascale data build`), or raise "
    "data.loader_threads",
    "CPU": "raise data.loader_threads if cores are free, or tokenise in advance with `megascale data build`",
    "other processes on the CPU": "leave the loader a core: lower train.threads or stop other work on this host",
}


# Reads micro-batch i of the step, and returns it on the device. Tokens, targets and positions are int64.
ReadBatch = Callable[[int], Batch[torch.Tensor]]

_FIELD_DTYPES = {
    "loss_weights": torch.float32,
    "positions": torch.int64,
    "document_boundaries": torch.int32,
}

CheckData = Callable[[int], list[str]]  # function of the samples consumed that returns notes on the data


def _check_data_files(config: Config, is_leader: bool, consumed: int) -> list[str]:
    """Check the data of a run that resumes after `consumed` samples, and return notes on it.

    Args:
        is_leader: whether this process records the data of the run at its first start, with which later starts compare.
    """
    return check_run_data(
        config.run_folder,
        config.data,
        sequence_length=config.model.sequence_length,
        vocab_size=config.model.vocab_size,
        consumed=consumed,
        is_leader=is_leader,
        accept_changes="data.train" in config.checkpoint.accept_changes,
    )


def _copy_fields(samples: Samples, device: torch.device) -> dict[str, torch.Tensor]:
    """Return copies of the optional fields of samples on the device, by name."""
    copies: dict[str, torch.Tensor] = {}
    for name, dtype in _FIELD_DTYPES.items():
        array = getattr(samples, name)
        if array is not None:
            values = torch.from_numpy(array).to(device, non_blocking=True)
            # On a CPU, `values` shares the memory of a slot, which the loader overwrites.
            copies[name] = values.to(dtype, copy=device.type == "cpu")
    return copies


class LocalFeed:
    """Feed of a rank that reads its samples when they are needed, without reading ahead.

    Attributes:
        source: the training samples.
        fields: optional fields of the batches.
        checksum: checksum of the samples passed to the engine.
    """

    def __init__(
        self,
        plan: HostPlan,
        shares: BatchShares,
        data_coordinate: int,
        device: torch.device,
        check_data: CheckData | None = None,
    ) -> None:
        self.source = plan.open_source()
        self.fields = plan.shape.fields
        self._has_optional_fields = self.fields != NO_FIELDS
        self.device = device
        self.checksum = ReadChecksum()
        self._check_run_data = check_data
        self._micro_batch = plan.shape.columns
        self._global_batch = plan.global_batch
        self._samples_per_step = shares.count(data_coordinate) * self._micro_batch
        self._first_in_step = shares.first(data_coordinate) * self._micro_batch
        self._wait_seconds = 0.0

    def start(self, first: int) -> list[str]:
        """Check the data of a run that resumes at sample `first`, and return notes on it.

        Raises DataError if files have changed.
        """
        if self._check_run_data:
            return self._check_run_data(first)
        return []

    def open_source(self) -> SampleSource:
        """Return the samples that this feed reads."""
        return self.source

    def make_batch_reader(self, first: int) -> ReadBatch:
        """Return a function that reads micro-batch i of this rank in the step that begins at sample `first`."""

        def read_batch(i: int) -> Batch[torch.Tensor]:
            started = time.perf_counter()
            number = first + self._first_in_step + i * self._micro_batch
            samples = self.source.read_samples(number, self._micro_batch)
            columns = torch.from_numpy(samples.tokens).contiguous().to(self.device, non_blocking=True)
            self.checksum.add(number, samples.tokens)
            optional = _copy_fields(samples, self.device) if self._has_optional_fields else {}
            self._wait_seconds += time.perf_counter() - started
            return Batch(columns[:-1], columns[1:], **optional)

        return read_batch

    def sum_weights(self, first: int) -> float:
        """Return the sum of the loss weights of this rank's samples in the step that begins at sample `first`."""
        return self.source.sum_weights(first + self._first_in_step, self._samples_per_step)

    def hash_step_ids(self, first: int) -> str:
        """Return the hash of the sample ids of the step that begins at sample `first`."""
        return f"{hash_sample_ids(self.source.find_sample_ids(first, self._global_batch)):016x}"

    def count_epochs(self, consumed: int) -> float:
        """Return the passes over the data after `consumed` samples."""
        return self.source.count_epochs(consumed)

    def take_measures(self) -> dict[str, float]:
        """Return the seconds of waiting and the bytes read since the last call, by the metric's name."""
        measures = {"loader_wait_seconds": self._wait_seconds, "loader_bytes_read": int(self.source.meter.bytes_read)}
        self._wait_seconds = 0.0
        self.source.meter.bytes_read = 0
        return measures

    def find_loader_events(self, seconds: float) -> list[tuple[Event, dict[str, Any]]]:
        """Return the events of the last step, which took `seconds`: none."""
        return []

    def close(self) -> None:
        """Close the files."""
        self.source.close()


class HostFeed:
    """Feed of a rank that takes micro-batches from the ring of the host's loader.

    Copies to a GPU are asynchronous. A slot of the ring is released when its copy is done, which is checked when the
    next micro-batch is needed.

    Args:
        folder: folder of the loader.
        loader: the loader, if this rank has started it; None: a launcher or another rank has.

    Attributes:
        fields: optional fields of the batches.
        reader: connection to the loader; None before `start`, and on a rank that reads no samples.
        checksum: checksum of the samples passed to the engine.
    """

    def __init__(
        self,
        plan: HostPlan,
        folder: Path,
        rank: int,
        device: torch.device,
        check_data: CheckData | None = None,
        loader: StartedLoader | None = None,
    ) -> None:
        self.plan = plan
        self.fields = plan.shape.fields
        self._has_optional_fields = self.fields != NO_FIELDS
        self.folder = folder
        self.rank = rank
        self.device = device
        self.reader: LoaderReader | None = None
        self.checksum = ReadChecksum()
        self._check_run_data = check_data
        self._loader = loader
        self._pinned_ring: Any = None
        self._pending_copies: deque[torch.cuda.Event] = deque()
        self._ids_hash = 0
        self._epochs = 0.0
        self._reported_wait_seconds = 0.0
        self._reported_counters = dict.fromkeys(COUNTERS, 0.0)
        self._loader_watch = LoaderWatch()

    def start(self, first: int) -> list[str]:
        """Check the data, join the loader, and return notes on the data.

        The loader begins to read for a run that resumes at sample `first`.

        Raises DataError if files have changed, and errors of the loader.
        """
        # If the check or the loader fails, `close` stops the loader, since no reader may join it any more.
        if self._check_run_data:
            notes = self._check_run_data(first)
        else:
            notes = []
        if self.plan.reads_tokens(self.rank):
            self.reader = LoaderReader(self.folder, self.rank, first)
        self._loader = None  # from now on, the loader ends with its last reader
        if self.reader is not None:
            self._pin_ring()
        return notes

    def _pin_ring(self) -> None:
        """Register the ring's memory with the GPU's driver, so that copies from it are asynchronous."""
        assert self.reader is not None
        if self.device.type != "cuda" or self._pinned_ring is self.reader.ring:
            return
        self._unpin_ring()  # unregister a segment that was lost
        ring = self.reader.ring
        code = torch.cuda.cudart().cudaHostRegister(ring.address, ring.shape.size, 0)
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister of the loader's ring failed with {code}")
        self._pinned_ring = ring

    def _unpin_ring(self) -> None:
        for event in self._pending_copies:
            event.synchronize()
        if self._pinned_ring is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned_ring.address)
            self._pinned_ring = None

    def open_source(self) -> SampleSource:
        """Open the samples that the host's loader reads."""
        return self.plan.open_source()

    def make_batch_reader(self, first: int) -> ReadBatch:
        """Return a function that returns the next micro-batch of this rank at each call, whatever its argument."""
        return self._read_next_batch

    def sum_weights(self, first: int) -> float:
        """Return the sum of the loss weights of this rank's samples in the next step."""
        assert self.reader is not None, "a rank between the first and the last stage reads no samples"
        self._release_done_copies(self.reader)
        return self.reader.peek().weight_sum

    def _read_next_batch(self, i: int) -> Batch[torch.Tensor]:
        reader = self.reader
        assert reader is not None, "a rank between the first and the last stage reads no samples"
        self._release_done_copies(reader)
        micro_batch = reader.read()
        samples = micro_batch.samples
        self._ids_hash = micro_batch.ids
        self._epochs = micro_batch.epochs
        if self.device.type == "cpu":
            columns = torch.from_numpy(samples.tokens).long()
            optional = _copy_fields(samples, self.device) if self._has_optional_fields else {}
            self.checksum.add(micro_batch.first, samples.tokens)
            reader.release()
        else:
            self._pin_ring()
            columns = torch.from_numpy(samples.tokens).to(self.device, non_blocking=True).long()
            optional = _copy_fields(samples, self.device) if self._has_optional_fields else {}
            copy_done = torch.cuda.Event()
            copy_done.record()
            self._pending_copies.append(copy_done)
            # The checksum is computed during the copy. The slot is released after both.
            self.checksum.add(micro_batch.first, samples.tokens)
        return Batch(columns[:-1], columns[1:], **optional)

    def _release_done_copies(self, reader: LoaderReader) -> None:
        """Release the slots whose copies are done, and wait for more copies if the loader has no free slot."""
        while self._pending_copies and self._pending_copies[0].query():
            self._release_copied(reader)
        while len(self._pending_copies) >= self.plan.shape.depth - 1:
            self._pending_copies[0].synchronize()
            self._release_copied(reader)

    def _release_copied(self, reader: LoaderReader) -> None:
        self._pending_copies.popleft()
        reader.release()

    def hash_step_ids(self, first: int) -> str:
        """Return the loader's hash of the sample ids of the step that was read last."""
        return f"{self._ids_hash:016x}"

    def count_epochs(self, consumed: int) -> float:
        """Return the passes over the data after the step that was read last."""
        return self._epochs

    def take_measures(self) -> dict[str, float]:
        """Return this rank's waiting and the host's bytes read since the last call, and the fill of the ring."""
        if self.reader is None:
            return {}
        counters = self.reader.ring.read_counters()
        measures = {
            "loader_wait_seconds": self.reader.wait_seconds - self._reported_wait_seconds,
            "loader_ring_fill": round(self.reader.fill, 3),
            "loader_bytes_read": int(max(0.0, counters["bytes_read"] - self._reported_counters["bytes_read"])),
        }
        self._loader_watch.add_measures(measures["loader_wait_seconds"], counters)
        self._reported_wait_seconds = self.reader.wait_seconds
        self._reported_counters = counters
        return measures

    def find_loader_events(self, seconds: float) -> list[tuple[Event, dict[str, Any]]]:
        """Return the events of the last step, which took `seconds`: the loader was restarted, or is slow and why."""
        if self.reader is None:
            return []
        return self._loader_watch.find_loader_events(seconds, self.reader.generation)

    def close(self) -> None:
        """Leave the loader."""
        if self.reader is not None:
            self._unpin_ring()
            self.reader.close()
            self.reader = None
        elif self._loader is not None:
            self._loader.stop()  # no reader has joined, so no other process removes its folder


Feed = LocalFeed | HostFeed


def open_feed(
    layout: Layout, rank: int, local_rank: int, local_world: int, device: torch.device, store: Any = None
) -> Feed:
    """Open the feed of this rank as data.loader selects it. Nothing is read before its `start`.

    Args:
        local_rank: number of the rank on its host.
        local_world: number of ranks on the host.
        store: store of the job. If no launcher has prepared the loader's folder, local rank 0 sends the folder's path
            to the other ranks of the host through it.
    """
    plan = plan_host(layout, rank - local_rank, local_world)
    # One process per host checks the files.
    if local_rank == 0:
        check_data = partial(_check_data_files, layout.config, rank == 0)
    else:
        check_data = None
    if not plan.needs_loader(gpus=device.type == "cuda"):
        return LocalFeed(plan, layout.shares, layout.grid.replica(rank), device, check_data)
    folder = os.environ.get(host_loader.FOLDER_VARIABLE)
    loader: StartedLoader | None = None
    if folder is None:
        key = f"loader/{rank - local_rank}"
        if local_rank == 0:
            # The loader process starts while this rank builds the engine and loads its state.
            loader = host_loader.start_planned_loader(plan)
            folder = str(loader.folder)
            if store is not None:
                store.set(key, folder)
        else:
            folder = store.get(key).decode()
    return HostFeed(plan, Path(folder), rank, device, check_data, loader)


class LoaderWatch:
    """Detects a slow loader, and the cause, from the waiting of steps and the loader's counters."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_JUDGED_STEPS)  # (seconds of waiting, seconds)
        self._counters_history: deque[dict[str, float]] = deque(maxlen=_JUDGED_STEPS + 1)
        self._step_wait_seconds = 0.0
        self._generation: int | None = None
        self._reported_cause = ""
        self._reported_step = 0
        self._step_count = 0

    def add_measures(self, wait_seconds: float, counters: dict[str, float]) -> None:
        """Add a step's seconds of waiting, and the loader's counters after the step."""
        self._step_wait_seconds = wait_seconds
        self._counters_history.append(counters)

    def find_loader_events(self, seconds: float, generation: int) -> list[tuple[Event, dict[str, Any]]]:
        """Return the events to record after a step.

        Args:
            seconds: time of the step.
            generation: number of loader processes so far.
        """
        events: list[tuple[Event, dict[str, Any]]] = []
        self._step_count += 1
        if self._step_count > 1:  # in the first step of a start, the loader may still be starting
            self._steps.append((self._step_wait_seconds, seconds))
        if self._generation is not None and generation != self._generation:
            events.append((Event.LOADER_RESTARTED, {"generation": generation}))
        self._generation = generation
        wait_seconds = sum(wait for wait, _ in self._steps)
        step_seconds = sum(step for _, step in self._steps)
        if len(self._steps) == _JUDGED_STEPS and wait_seconds > SLOW_SHARE * step_seconds:
            cause = find_cause(self._counters_history[0], self._counters_history[-1])
            if cause != self._reported_cause or self._step_count - self._reported_step >= _QUIET_STEPS:
                self._reported_cause = cause
                self._reported_step = self._step_count
                share = round(wait_seconds / step_seconds, 4)
                details = {"waiting": share, "cause": cause, "remedy": _REMEDIES[cause]}
                events.append((Event.LOADER_SLOW, details))
        return events


def find_cause(before: dict[str, float], after: dict[str, float]) -> str:
    """Return the activity that took most of the loader's time between two readings of its counters."""
    differences = {name: after[name] - before[name] for name in after}
    activities = {
        "disk": differences["read_seconds"],
        "decompression": differences["unpack_seconds"],
        "CPU": differences["encode_seconds"],
    }
    cause = max(activities, key=lambda name: activities[name])
    # Encoding needs a whole core per thread. With less than this share of one, other processes take the core.
    if cause == "CPU" and differences["encode_cpu_seconds"] < _MIN_CORE_SHARE * differences["encode_seconds"]:
        return "other processes on the CPU"
    return cause
