"""Micro-batches for the training loop, from the host's loader or read by the rank itself."""

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
from megascale.data.dataset.samples import SampleSource, hash_ids
from megascale.data.loader import host_loader
from megascale.data.loader.host_loader import LoaderReader, StartedLoader
from megascale.data.loader.host_plan import HostPlan, plan_host
from megascale.data.loader.ring import MEASURES

SLOW_SHARE = 0.02  # share of the steps' time spent waiting for data above which an event reports it
_STEPS = 10  # steps that are judged together
_QUIET_STEPS = 100  # steps between two events of one cause
_REMEDIES = {
    "disk": "put the data on a faster disk, or as token files (`megascale data build`), which are smaller than text",
    "decompression": "store the data less compressed or as token files (`megascale data build`), or raise "
    "data.loader_threads",
    "CPU": "raise data.loader_threads if cores are free, or tokenise beforehand with `megascale data build`",
    "other processes on the CPU": "leave the loader a core: lower train.threads or stop other work on this host",
}


# Micro-batch number -> the micro-batch on the device; tokens, targets and positions are int64.
ReadBatch = Callable[[int], Batch[torch.Tensor]]

_FIELD_DTYPES = {
    "loss_weights": torch.float32,
    "positions": torch.int64,
    "document_boundaries": torch.int32,
}

CheckData = Callable[[int], list[str]]  # called with the samples consumed; returns notes on the data


def _check_data(config: Config, leader: bool, consumed: int) -> list[str]:
    """Check the data of a run that resumes after `consumed` samples, and return notes on it."""
    return check_run_data(
        config.run_folder,
        config.data,
        sequence_length=config.model.sequence_length,
        vocab_size=config.model.vocab_size,
        consumed=consumed,
        leader=leader,
        accept_changes="data.train" in config.checkpoint.accept_changes,
    )


def _copy_fields(samples: Samples, device: torch.device) -> dict[str, torch.Tensor]:
    """Return copies of the optional fields of samples on the device, by name."""
    copies: dict[str, torch.Tensor] = {}
    for name, dtype in _FIELD_DTYPES.items():
        array = getattr(samples, name)
        if array is not None:
            values = torch.from_numpy(array).to(device, non_blocking=True)
            copies[name] = values.to(dtype, copy=device.type == "cpu")  # the slot of `array` is written again
    return copies


class LocalFeed:
    """Reads samples in this rank on demand; nothing is read ahead.

    Attributes:
        fields: optional fields of the batches.
        checksum: of the samples that were passed to the engine.
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
        self._has_fields = self.fields != NO_FIELDS
        self.device = device
        self.checksum = ReadChecksum()
        self._check_data = check_data
        self._micro_batch = plan.shape.columns
        self._global_batch = plan.global_batch
        self._share = shares.count(data_coordinate) * self._micro_batch
        self._offset = shares.first(data_coordinate) * self._micro_batch
        self._seconds = 0.0

    def start(self, first: int) -> list[str]:
        """Check the data of a run that resumes at sample `first`, and return notes on it.

        Raises DataError if files have changed.
        """
        if self._check_data:
            return self._check_data(first)
        return []

    def open_source(self) -> SampleSource:
        """Return the samples that this feed reads."""
        return self.source

    def batches(self, first: int) -> ReadBatch:
        """Return a function of i: micro-batch i of this rank's share of the step that begins at sample `first`."""

        def read_batch(i: int) -> Batch[torch.Tensor]:
            started = time.perf_counter()
            number = first + self._offset + i * self._micro_batch
            samples = self.source.read(number, self._micro_batch)
            columns = torch.from_numpy(samples.tokens).contiguous().to(self.device, non_blocking=True)
            self.checksum.add(number, samples.tokens)
            optional = _copy_fields(samples, self.device) if self._has_fields else {}
            self._seconds += time.perf_counter() - started
            return Batch(columns[:-1], columns[1:], **optional)

        return read_batch

    def sum_weights(self, first: int) -> float:
        """Return the sum of the loss weights of this rank's share of the step that begins at sample `first`."""
        return self.source.sum_weights(first + self._offset, self._share)

    def ids(self, first: int) -> str:
        """Return the hash of the sample ids of the step that begins at sample `first`."""
        return f"{hash_ids(self.source.ids(first, self._global_batch)):016x}"

    def epochs(self, consumed: int) -> float:
        """Return the passes over the data after `consumed` samples."""
        return self.source.count_epochs(consumed)

    def measures(self) -> dict[str, float]:
        """Return the seconds of waiting and the bytes read since the last call."""
        measures = {"loader_wait_seconds": self._seconds, "loader_bytes_read": int(self.source.meter.bytes_read)}
        self._seconds = 0.0
        self.source.meter.bytes_read = 0
        return measures

    def loader_events(self, seconds: float) -> list[tuple[Event, dict[str, Any]]]:
        """Return the events of the last step, which took `seconds`: none."""
        return []

    def close(self) -> None:
        """Close the files."""
        self.source.close()


class HostFeed:
    """Takes micro-batches from the host's ring and copies them to the device without waiting for the copy.

    A slot is released when its copy is done. On a GPU this is checked when the next micro-batch is needed.

    Attributes:
        fields: optional fields of the batches.
        checksum: of the samples that were passed to the engine.
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
        self._has_fields = self.fields != NO_FIELDS
        self.folder = folder
        self.rank = rank
        self.device = device
        self.reader: LoaderReader | None = None
        self.checksum = ReadChecksum()
        self._check_data = check_data
        self._loader = loader
        self._pinned: Any = None
        self._copies: deque[torch.cuda.Event] = deque()
        self._ids = 0
        self._epochs = 0.0
        self._reported_wait = 0.0
        self._reported = dict.fromkeys(MEASURES, 0.0)
        self._watch = LoaderWatch()

    def start(self, first: int) -> list[str]:
        """Join the loader, which begins to read for a run that resumes at sample `first`; return notes on the data.

        Raises DataError if files have changed, and the loader's errors.
        """
        self._loader = None  # it ends with its last reader
        if self._check_data:
            notes = self._check_data(first)
        else:
            notes = []
        if self.plan.reads_tokens(self.rank):
            self.reader = LoaderReader(self.folder, self.rank, first)
            self._pin()
        return notes

    def _pin(self) -> None:
        """Register the ring's memory with the GPU's driver, so that copies from it are asynchronous."""
        assert self.reader is not None
        if self.device.type != "cuda" or self._pinned is self.reader.ring:
            return
        self._unpin()  # the memory of a segment that was lost
        ring = self.reader.ring
        code = torch.cuda.cudart().cudaHostRegister(ring.address, ring.shape.size, 0)
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister of the loader's ring failed with {code}")
        self._pinned = ring

    def _unpin(self) -> None:
        for event in self._copies:
            event.synchronize()
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.address)
            self._pinned = None

    def open_source(self) -> SampleSource:
        """Open the samples that the host's loader reads."""
        return self.plan.open_source()

    def batches(self, first: int) -> ReadBatch:
        """Return a function that returns this rank's micro-batches of the step in order, each once."""
        return self._next_batch

    def sum_weights(self, first: int) -> float:
        """Return the sum of the loss weights of this rank's share of the step that comes next."""
        assert self.reader is not None, "a rank between the first and the last stage reads no samples"
        self._make_room(self.reader)
        return self.reader.peek().weight_sum

    def _next_batch(self, i: int) -> Batch[torch.Tensor]:
        reader = self.reader
        assert reader is not None, "a rank between the first and the last stage reads no samples"
        self._make_room(reader)
        micro_batch = reader.read()
        samples = micro_batch.samples
        self._ids = micro_batch.ids
        self._epochs = micro_batch.epochs
        if self.device.type == "cpu":
            columns = torch.from_numpy(samples.tokens).long()
            optional = _copy_fields(samples, self.device) if self._has_fields else {}
            self.checksum.add(micro_batch.first, samples.tokens)
            reader.release()
        else:
            self._pin()
            columns = torch.from_numpy(samples.tokens).to(self.device, non_blocking=True).long()
            optional = _copy_fields(samples, self.device) if self._has_fields else {}
            copied = torch.cuda.Event()
            copied.record()
            self._copies.append(copied)
            self.checksum.add(micro_batch.first, samples.tokens)  # overlaps the copy; the slot is released after both
        return Batch(columns[:-1], columns[1:], **optional)

    def _make_room(self, reader: LoaderReader) -> None:
        """Release the slots whose copies are done, and at least as many that the loader can write the next one."""
        while self._copies and self._copies[0].query():
            self._release_copied(reader)
        while len(self._copies) >= self.plan.shape.depth - 1:
            self._copies[0].synchronize()
            self._release_copied(reader)

    def _release_copied(self, reader: LoaderReader) -> None:
        self._copies.popleft()
        reader.release()

    def ids(self, first: int) -> str:
        """Return the loader's hash of the sample ids of the step that was read last."""
        return f"{self._ids:016x}"

    def epochs(self, consumed: int) -> float:
        """Return the passes over the data after the step that was read last."""
        return self._epochs

    def measures(self) -> dict[str, float]:
        """Return this rank's seconds of waiting and the host's bytes read since the last call, and the ring's fill."""
        if self.reader is None:
            return {}
        counters = self.reader.ring.measures()
        measures = {
            "loader_wait_seconds": self.reader.wait_seconds - self._reported_wait,
            "loader_ring_fill": round(self.reader.fill, 3),
            "loader_bytes_read": int(max(0.0, counters["bytes_read"] - self._reported["bytes_read"])),
        }
        self._watch.note(measures["loader_wait_seconds"], counters)
        self._reported_wait = self.reader.wait_seconds
        self._reported = counters
        return measures

    def loader_events(self, seconds: float) -> list[tuple[Event, dict[str, Any]]]:
        """Return events of the last step, which took `seconds`: a restarted loader, or a slow one with its cause."""
        if self.reader is None:
            return []
        return self._watch.loader_events(seconds, self.reader.generation)

    def close(self) -> None:
        """Leave the loader."""
        if self.reader is not None:
            self._unpin()
            self.reader.close()
            self.reader = None
        elif self._loader is not None:
            self._loader.stop()  # no reader has joined, so no other process removes its folder


Feed = LocalFeed | HostFeed


def open_feed(
    layout: Layout, rank: int, local_rank: int, local_world: int, device: torch.device, store: Any = None
) -> Feed:
    """Open the feed of this rank under data.loader; nothing is read before its `start`.

    Args:
        store: the job's store, through which local rank 0 sends the loader's folder to the others if no launcher
            prepared one.
    """
    plan = plan_host(layout, rank - local_rank, local_world)
    # One process per host checks the files.
    if local_rank == 0:
        check_data = partial(_check_data, layout.config, rank == 0)
    else:
        check_data = None
    if not plan.needs_loader(gpus=device.type == "cuda"):
        return LocalFeed(plan, layout.shares, layout.grid.replica(rank), device, check_data)
    folder = os.environ.get(host_loader.VARIABLE)
    loader: StartedLoader | None = None
    if folder is None:
        key = f"loader/{rank - local_rank}"
        if local_rank == 0:
            # It starts while the engine is made and the state is loaded.
            loader = host_loader.start_planned_loader(plan)
            folder = str(loader.folder)
            if store is not None:
                store.set(key, folder)
        else:
            folder = store.get(key).decode()
    return HostFeed(plan, Path(folder), rank, device, check_data, loader)


class LoaderWatch:
    """Finds a slow loader, and the cause, in the waiting of steps and the loader's counters."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_STEPS)
        self._counters: deque[dict[str, float]] = deque(maxlen=_STEPS + 1)
        self._wait = 0.0
        self._generation: int | None = None
        self._reported_cause = ""
        self._reported_step = 0
        self._count = 0

    def note(self, wait_seconds: float, counters: dict[str, float]) -> None:
        """Note a step's seconds of waiting and the loader's counters after it."""
        self._wait = wait_seconds
        self._counters.append(counters)

    def loader_events(self, seconds: float, generation: int) -> list[tuple[Event, dict[str, Any]]]:
        """Return the events to record after a step of `seconds`."""
        events: list[tuple[Event, dict[str, Any]]] = []
        self._count += 1
        if self._count > 1:  # the first step of a start waits until the loader is up
            self._steps.append((self._wait, seconds))
        if self._generation is not None and generation != self._generation:
            events.append((Event.LOADER_RESTARTED, {"generation": generation}))
        self._generation = generation
        wait_seconds = sum(wait for wait, _ in self._steps)
        step_seconds = sum(step for _, step in self._steps)
        if len(self._steps) == _STEPS and wait_seconds > SLOW_SHARE * step_seconds:
            cause = find_cause(self._counters[0], self._counters[-1])
            if cause != self._reported_cause or self._count - self._reported_step >= _QUIET_STEPS:
                self._reported_cause = cause
                self._reported_step = self._count
                share = round(wait_seconds / step_seconds, 4)
                details = {"waiting": share, "cause": cause, "remedy": _REMEDIES[cause]}
                events.append((Event.LOADER_SLOW, details))
        return events


def find_cause(before: dict[str, float], after: dict[str, float]) -> str:
    """Return the activity that took most of the loader's time between two states of its counters."""
    spent = {name: after[name] - before[name] for name in after}
    activities = {
        "disk": spent["read_seconds"],
        "decompression": spent["unpack_seconds"],
        "CPU": spent["encode_seconds"],
    }
    cause = max(activities, key=lambda name: activities[name])
    if cause == "CPU" and spent["encode_cpu_seconds"] < 0.6 * spent["encode_seconds"]:
        return "other processes on the CPU"
    return cause
