"""The plan of a host's loader (streams, readers and sizes), and the messages between loader and readers. No torch."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megascale.config import DataConfig
from megascale.core.batch import SampleFields
from megascale.core.layout import Layout
from megascale.data.dataset.formats import is_text
from megascale.data.dataset.samples import SampleSource, find_fields
from megascale.data.loader.ring import RingShape
from megascale.services.conversation import ErrorReply
from megascale.services.messages import Count, Message, Schema

SERVICE = "loader"
_MESSAGE_LIMIT = 1 << 14


class Attach(Message, frozen=True):
    """First message of a reader, sent with its bell.

    Attributes:
        rank: rank of the reader.
        base: samples consumed before this start of the run.
        generation: number of loader processes that the reader has known.
    """

    rank: Count
    base: Count
    generation: Count


class Seated(Message, frozen=True):
    """Message of a reader after it has mapped the segment and written its position.

    Attributes:
        base: samples consumed before this start of the run.
    """

    base: Count


class Bye(Message, frozen=True):
    """Message of a reader that needs no further samples."""


class Attached(Message, frozen=True):
    """Answer of the loader to `Attach`, sent with the segment's file and the loader's bell.

    Attributes:
        generation: number of loader processes so far.
        pid: process id of the loader.
    """

    generation: Count
    pid: Count


FROM_READER = Schema(Attach, Seated, Bye, limit=_MESSAGE_LIMIT)
FROM_LOADER = Schema(Attached, ErrorReply, limit=_MESSAGE_LIMIT)


@dataclass(frozen=True)
class HostPlan:
    """Samples that the ranks of one host read.

    Attributes:
        data: the section [data].
        vocab_size, seed, global_batch: model.vocab_size, train.seed and train.global_batch.
        run: folder of the run.
        index: folder for the token counts of text that is tokenised on the fly.
        streams: data-parallel coordinate of each stream.
        shares: (first micro-batch, number of micro-batches) of each stream among the micro-batches of a step.
        shape: sizes of the ring.
        has_leader: whether rank 0 is on this host, which writes the ledger and needs the ids of whole steps.
    """

    data: DataConfig
    vocab_size: int | None
    seed: int
    global_batch: int
    run: str
    index: str
    streams: tuple[int, ...]
    shares: tuple[tuple[int, int], ...]
    shape: RingShape
    has_leader: bool

    @property
    def is_shared(self) -> bool:
        """Whether a stream has more than one reader."""
        return any(len(ranks) > 1 for ranks in self.shape.readers)

    def needs_loader(self, gpus: bool) -> bool:
        """Return whether this host needs a loader process as data.loader selects it.

        Args:
            gpus: whether the ranks train on GPUs. A GPU waits while its rank reads, so data.loader=auto then reads
                ahead even if no ranks share a stream.
        """
        setting, entries = self.data.loader, self.data.train
        if setting == "local" or not entries or not self.streams:
            return False
        if setting == "host":
            return True
        if sys.platform != "linux":
            return False  # the loader needs eventfd and a mount for shared memory
        return gpus or self.is_shared or any(map(is_text, entries))

    def reads_tokens(self, rank: int) -> bool:
        """Return whether a rank reads samples.

        Ranks between the first and the last pipeline stage read samples only if blocks need a field of the samples.
        """
        return any(rank in ranks for ranks in self.shape.readers)

    def find_first_sample(self, base: int, stream: int, number: int) -> int:
        """Return the number of the first sample of a stream's micro-batch.

        Args:
            base: samples consumed before this start of the run.
            number: number of the micro-batch in the stream, from 0 at this start.
        """
        first, count = self.shares[stream]
        step, microbatch = divmod(number, count)
        return base + step * self.global_batch + (first + microbatch) * self.shape.columns

    def open_source(self) -> SampleSource:
        """Open the training samples."""
        return SampleSource(
            self.data,
            self.shape.rows - 1,
            vocab_size=self.vocab_size,
            seed=self.seed,
            index=Path(self.index),
        )

    def to_json(self) -> str:
        """Return the plan as JSON for the loader process."""
        data = self.data.model_dump(mode="json", exclude_none=True)
        record = self.__dict__ | {"data": data, "shape": asdict(self.shape)}
        record["leader"] = record.pop("has_leader")
        return json.dumps(record)

    @staticmethod
    def from_json(text: str) -> HostPlan:
        """Return the plan of a text from `to_json`."""
        record: dict[str, Any] = json.loads(text)
        shape = record.pop("shape")
        readers = tuple(tuple(ranks) for ranks in shape.pop("readers"))
        fields = SampleFields(**shape.pop("fields"))
        return HostPlan(
            data=DataConfig(**record.pop("data")),
            streams=tuple(record.pop("streams")),
            shares=tuple((first, count) for first, count in record.pop("shares")),
            shape=RingShape(readers, **shape, fields=fields),
            has_leader=record.pop("leader"),
            **record,
        )

    @property
    def hash(self) -> int:
        """Hash of the complete plan, of 63 bits."""
        return int.from_bytes(hashlib.blake2b(self.to_json().encode(), digest_size=8).digest(), "big") >> 1


def plan_host(layout: Layout, first_rank: int, ranks: int) -> HostPlan:
    """Return the plan of the host that runs `ranks` ranks from `first_rank` on."""
    config, grid = layout.config, layout.grid
    fields = find_fields(config.data, config.model.sequence_length)
    readers_by_stream: dict[int, list[int]] = {}
    for rank in range(first_rank, first_rank + ranks):
        is_end_stage = grid.coordinate(rank).pipeline in layout.chunk_map.end_stages
        if is_end_stage or fields.concerns_blocks:
            readers_by_stream.setdefault(grid.replica(rank), []).append(rank)
    streams = tuple(sorted(readers_by_stream))
    shape = RingShape(
        tuple(tuple(readers_by_stream[stream]) for stream in streams),
        depth=max(4, config.data.ring_steps * layout.microbatches),
        rows=config.model.sequence_length + 1,
        columns=config.train.micro_batch,
        fields=fields,
    )
    return HostPlan(
        data=config.data,
        vocab_size=config.model.vocab_size,
        seed=config.train.seed,
        global_batch=config.train.global_batch,
        run=str(config.run_folder.absolute()),
        index=str(find_index_folder(config.train.runs)),
        streams=streams,
        shares=tuple((layout.shares.first(stream), layout.shares.count(stream)) for stream in streams),
        shape=shape,
        has_leader=first_rank == 0,
    )


def find_index_folder(runs: str | Path) -> Path:
    """Return the folder in which all runs of `runs` share the token counts of text tokenised on the fly."""
    return Path(runs) / ".index"
