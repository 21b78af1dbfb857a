"""Where the training loop gets its micro-batches: of the host's loader, or read by the rank itself."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megascale.core.events import Event
from megascale.core.layout import Layout
from megascale.data.dataset import fingerprint
from megascale.data.dataset.read_checksum import ReadChecksum
from megascale.data.dataset.samples import SampleSource, hash_ids
from megascale.data.loader import data_watch, host_loader
from megascale.data.loader.host_layout import HostPlan, index_folder, plan_host
from megascale.data.loader.host_loader import LoaderReader
from megascale.data.loader.ring import MEASURES

# Tokens and targets, int64 [sequence, micro_batch] on the device.
Batch = tuple[torch.Tensor, torch.Tensor]


class LocalFeed:
    """This rank reads for itself when it is asked: nothing is read ahead.

    Attributes:
        read: checksum of the samples that were handed to the engine.
    """

    def __init__(self, layout: Layout, rank: int, local_rank: int, device: torch.device) -> None:
        self._rank, self._local_rank = rank, local_rank
        self.source = SampleSource(layout.config, index_folder(layout.config))
        self.device, self.config = device, layout.config
        self.checksum = ReadChecksum()
        train = layout.config.train
        self._share = train.global_batch // layout.grid.data
        self._offset = layout.grid.coordinate(rank).data * self._share
        self._seconds = 0.0

    def start(self, first: int) -> list[str]:
        """Check the data of a run that goes on at sample `first`, and return notes on it.

        Raises DataError if files are not what they were.
        """
        return fingerprint.check_run_data(self.config, first, self._rank == 0) if self._local_rank == 0 else []

    def batches(self, first: int) -> Callable[[int], Batch]:
        """Micro-batch i of this rank's share of the step that begins at sample `first`."""
        size = self.config.train.micro_batch

        def batch(i: int) -> Batch:
            started = time.perf_counter()
            number = first + self._offset + i * size
            rows = self.source.batch(number, size)
            columns = torch.from_numpy(rows).t().contiguous().to(self.device, non_blocking=True)
            self.checksum.add(number, rows.T)
            self._seconds += time.perf_counter() - started
            return columns[:-1], columns[1:]

        return batch

    def ids(self, first: int) -> str:
        """Hash of the sample ids of the whole step that begins at sample `first`."""
        return f"{hash_ids(self.source.ids(first, self.config.train.global_batch)):016x}"

    def epochs(self, consumed: int) -> float:
        """Passes over the data after so many samples."""
        return self.source.epochs(consumed)

    def measures(self) -> dict[str, float]:
        """Since the last call: seconds that the step waited, bytes read."""
        told = {"loader_wait_seconds": self._seconds, "loader_bytes_read": int(self.source.meter.bytes_read)}
        self._seconds = 0.0
        self.source.meter.bytes_read = 0
        return told

    def loader_events(self, seconds: float) -> list[tuple[Event, dict[str, Any]]]:
        """What the run should tell of; `seconds` took the last step."""
        return []

    def close(self) -> None:
        """Let go of the files."""
        self.source.close()


class HostFeed:
    """Micro-batches out of the host's ring, copied to the device without waiting for the copy.

    A slot is given back when its copy is done, which on a GPU is looked at when the next one is wanted.

    Attributes:
        read: checksum of the samples that were handed to the engine.
    """

    def __init__(self, plan: HostPlan, folder: Path, rank: int, local_rank: int, device: torch.device) -> None:
        self.plan, self.folder, self.rank, self.device = plan, folder, rank, device
        self._local_rank = local_rank
        self._made = local_rank == 0 and host_loader.VARIABLE not in os.environ
        self.reader: LoaderReader | None = None
        self.read = ReadChecksum()
        self._pinned: Any = None
        self._flying: deque[torch.cuda.Event] = deque()
        self._ids, self._epochs = 0, 0.0
        self._waited = 0.0
        self._before = dict.fromkeys(MEASURES, 0.0)
        self._watch = data_watch.DataWatch()

    def start(self, first: int) -> list[str]:
        """Join the loader, which begins to read for a run that goes on at sample `first`, and return notes on the data.

        Raises DataError as the loader does.
        """
        self._made = False
        notes = fingerprint.check_run_data(self.plan.config, first, self.rank == 0) if self._local_rank == 0 else []
        if self.plan.reads_tokens(self.rank):
            self.reader = LoaderReader(self.folder, self.rank, first)
            self._pin()
        return notes

    def _pin(self) -> None:
        """Make the ring's memory known to the GPU's driver, so that copies from it run by themselves."""
        assert self.reader is not None
        if self.device.type != "cuda" or self._pinned is self.reader.ring:
            return
        self._unpin()  # of a segment that was lost
        ring = self.reader.ring
        code = torch.cuda.cudart().cudaHostRegister(ring.address, ring.shape.size, 0)
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister of the loader's ring failed with {code}")
        self._pinned = ring

    def _unpin(self) -> None:
        for event in self._flying:
            event.synchronize()
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.address)
            self._pinned = None

    def batches(self, first: int) -> Callable[[int], Batch]:
        """Micro-batch i of this rank's share of the step that begins at sample `first`; each once, in order."""
        return lambda i: self._batch()

    def _batch(self) -> Batch:
        reader = self.reader
        assert reader is not None, "a rank between the first and the last stage reads no tokens"
        while self._flying and self._flying[0].query():
            self._land(reader)
        while len(self._flying) >= self.plan.shape.depth - 1:
            self._flying[0].synchronize()
            self._land(reader)
        taken = reader.read()
        self._ids, self._epochs = taken.ids, taken.epochs
        if self.device.type == "cpu":
            columns = torch.from_numpy(taken.tokens).long()
            self.read.add(taken.first, taken.tokens)
            reader.let_go()
        else:
            self._pin()
            columns = torch.from_numpy(taken.tokens).to(self.device, non_blocking=True).long()
            done = torch.cuda.Event()
            done.record()
            self._flying.append(done)
            self.read.add(taken.first, taken.tokens)  # under the copy, which must be done before the slot is let go
        return columns[:-1], columns[1:]

    def _land(self, reader: LoaderReader) -> None:
        self._flying.popleft()
        reader.let_go()

    def ids(self, first: int) -> str:
        """Hash of the sample ids of the whole step that was read last, as the loader drew them."""
        return f"{self._ids:016x}"

    def epochs(self, consumed: int) -> float:
        """Passes over the data after the step that was read last."""
        return self._epochs

    def measures(self) -> dict[str, float]:
        """Since the last call: seconds that this rank waited, bytes that the host read; and how full the ring is."""
        if self.reader is None:
            return {}
        now = self.reader.ring.measures()
        told = {
            "loader_wait_seconds": self.reader.wait_seconds - self._waited,
            "loader_ring_fill": round(self.reader.fill, 3),
            "loader_bytes_read": int(max(0.0, now["bytes_read"] - self._before["bytes_read"])),
        }
        self._watch.note(told["loader_wait_seconds"], now)
        self._waited, self._before = self.reader.wait_seconds, now
        return told

    def loader_events(self, seconds: float) -> list[tuple[Event, dict[str, Any]]]:
        """A loader that was restarted, or is too slow and why; `seconds` took the last step."""
        if self.reader is None:
            return []
        return self._watch.loader_events(seconds, self.reader.generation)

    def close(self) -> None:
        """Leave the loader."""
        if self.reader is not None:
            self._unpin()
            self.reader.close()
            self.reader = None
        elif self._made:
            host_loader.kill_loader(self.folder)  # nothing was read: nobody else removes it


Feed = LocalFeed | HostFeed


def open_feed(
    layout: Layout, rank: int, local_rank: int, local_world: int, device: torch.device, store: Any = None
) -> Feed:
    """The feed of this rank under data.loader; nothing is read before its `start`.

    Args:
        store: the job's, through which local rank 0 tells the others where the loader is, if nobody started one
            before the ranks.
    """
    plan = plan_host(layout.config, layout.grid.world_size, rank - local_rank, local_world)
    if not plan.needs_loader(gpus=device.type == "cuda"):
        return LocalFeed(layout, rank, local_rank, device)
    place = os.environ.get(host_loader.VARIABLE)
    if place is None:
        key = f"loader/{rank - local_rank}"
        if local_rank == 0:
            place = str(host_loader.prepare_folder(plan))
            if store is not None:
                store.set(key, place)
        else:
            place = store.get(key).decode()
    return HostFeed(plan, Path(place), rank, local_rank, device)
