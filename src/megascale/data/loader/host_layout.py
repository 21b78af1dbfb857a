"""What the loader of one host has to make: which streams, for which ranks, of what size. No torch."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megascale import config as configuration
from megascale.config import Config
from megascale.core.layout import lay_out
from megascale.data.dataset.formats import is_text
from megascale.data.loader.ring import RingShape


@dataclass(frozen=True)
class HostPlan:
    """One host's share of the samples.

    Attributes:
        config: resolved.
        streams: data-parallel coordinate of each stream.
        shape: of the ring.
        microbatches: of a data-parallel rank in a step.
        data_ranks: data-parallel ranks in all.
        leader: whether rank 0 is here, which writes the ledger and so is told the ids of whole steps.
    """

    config: Config
    streams: tuple[int, ...]
    shape: RingShape
    microbatches: int
    data_ranks: int
    leader: bool

    @property
    def shared(self) -> bool:
        """Whether any stream has more than one reader."""
        return any(len(ranks) > 1 for ranks in self.shape.readers)

    def needs_loader(self, gpus: bool) -> bool:
        """Whether this host has a loader of its own under data.loader; `gpus`: its ranks train on them.

        A GPU waits while its rank reads, so there `auto` reads ahead even where nothing is shared.
        """
        wish, entries = self.config.data.loader, self.config.data.train
        if wish == "local" or not entries or not self.streams:
            return False
        if wish == "auto" and sys.platform != "linux":
            return False  # it needs eventfd and a mount for shared memory
        return wish == "host" or gpus or self.shared or any(map(is_text, entries))

    def reads_tokens(self, rank: int) -> bool:
        """Whether a rank needs tokens: those between the first and the last pipeline stage do not."""
        return any(rank in ranks for ranks in self.shape.readers)

    def first_sample(self, base: int, stream: int, number: int) -> int:
        """The first sample of micro-batch `number` of a stream, when the run goes on after `base` samples."""
        train = self.config.train
        step, i = divmod(number, self.microbatches)
        share = train.global_batch // self.data_ranks
        return base + step * train.global_batch + self.streams[stream] * share + i * train.micro_batch

    def to_json(self) -> str:
        """For the loader's process."""
        config = self.config.model_dump(mode="json", exclude_none=True)
        return json.dumps(asdict(self) | {"config": config, "shape": asdict(self.shape)})

    @staticmethod
    def from_json(text: str) -> HostPlan:
        """The opposite of to_json."""
        tree: dict[str, Any] = json.loads(text)
        shape = tree["shape"] | {"readers": tuple(tuple(ranks) for ranks in tree["shape"]["readers"])}
        return HostPlan(
            **tree
            | {
                "config": configuration.from_tree(tree["config"]),
                "streams": tuple(tree["streams"]),
                "shape": RingShape(**shape),
            }
        )

    @property
    def hash(self) -> int:
        """Of everything in it: 63 bits."""
        return int.from_bytes(hashlib.blake2b(self.to_json().encode(), digest_size=8).digest(), "big") >> 1


def plan_host(config: Config, world: int, first_rank: int, ranks: int) -> HostPlan:
    """The plan of the host that runs `ranks` ranks from `first_rank` on. FitError if `config` does not fit `world`."""
    layout = lay_out(config, world)
    grid = layout.grid
    streams: dict[int, list[int]] = {}
    for rank in range(first_rank, first_rank + ranks):
        at = grid.coordinate(rank)
        if at.pipeline in (0, grid.pipeline - 1):
            streams.setdefault(at.data, []).append(rank)
    depth = max(4, config.data.ring_steps * layout.microbatches)
    shape = RingShape(
        tuple(tuple(streams[data]) for data in sorted(streams)),
        depth,
        config.model.sequence_length + 1,
        config.train.micro_batch,
    )
    return HostPlan(config, tuple(sorted(streams)), shape, layout.microbatches, grid.data, first_rank == 0)


def index_folder(config: Config) -> Path:
    """Where runs of one folder share what they know of text tokenised on the fly."""
    return Path(config.train.runs) / ".index"
