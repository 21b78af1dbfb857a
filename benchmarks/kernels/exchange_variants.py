"""Other ways to move the data of an exchange, for `python -m benchmarks exchange --variant`.

Pulls differ in the order of the copies. With pushes, each rank writes into the memory of its peers, so that a call
signals after its copies instead of before them. A kernel copies with some of the SMs instead of the copy engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megascale.ops.dispatch import jit, tl
from megascale.ops.peer_sum import sum_over_peers
from megascale.parallel.copy_plan import IN_ORDER, SERIAL, TOGETHER, CopyPlan
from megascale.parallel.exchange import Exchange, PeerCopy, WriteParts

PUSH_SLOTS = 2  # used in turn
ALIGN_BYTES = 512
COPY_BLOCK = 4096  # words of eight bytes that a program copies from each peer at a time
COPY_PEERS = 3  # peers of the copy kernel


@dataclass(frozen=True)
class Variant:
    """A way to move the data of the calls.

    Attributes:
        plan: order of the copies; None: the exchange chooses.
        pushes: write into the peers' memory.
        programs: programs of the copy kernel; 0: copy engines.
    """

    plan: CopyPlan | None = None
    pushes: bool = False
    programs: int = 0


# In the order of the table. Rank r copies from r + 1 first, so that ranks in step read different GPUs.
VARIANTS: dict[str, Variant] = {
    "auto": Variant(),
    "together": Variant(TOGETHER),
    "together-flags-first": Variant(CopyPlan(queues=0, waits_first=True)),
    "two": Variant(CopyPlan(queues=2, waits_first=True)),
    "in-order": Variant(IN_ORDER),
    "serial": Variant(SERIAL),
    "pieces-2mb": Variant(CopyPlan(waits_first=True, piece_bytes=2_000_000)),
    "pieces-4mb": Variant(CopyPlan(waits_first=True, piece_bytes=4_000_000)),
    "two-pieces-2mb": Variant(CopyPlan(queues=2, waits_first=True, piece_bytes=2_000_000)),
    "push-together": Variant(TOGETHER, pushes=True),
    "push-two": Variant(CopyPlan(queues=2), pushes=True),
    "push-serial": Variant(SERIAL, pushes=True),
    "push-pieces-2mb": Variant(CopyPlan(piece_bytes=2_000_000), pushes=True),
    "kernel-8": Variant(SERIAL, programs=8),
    "kernel-16": Variant(SERIAL, programs=16),
}


class VariantExchange(Exchange):
    """An exchange whose calls move their data by `variant`.

    With pushes, `peer_memory` has `count_push_bytes`. Results of gathers and all-to-alls lie there, and are valid until
    the next call begins.
    """

    variant = Variant()
    _push_count = 0

    @staticmethod
    def count_push_bytes(size: int, shard_bytes: int) -> int:
        """Return the bytes of the peer memory of one rank for shards and parts of at most `shard_bytes`."""
        return PUSH_SLOTS * size * (-(-shard_bytes // ALIGN_BYTES) * ALIGN_BYTES)

    def select(self, variant: Variant) -> None:
        """Use `variant` in later calls. All ranks select the same."""
        self.variant = variant
        self.copy_plan = variant.plan

    def gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        if not self.variant.pushes:
            return super().gather(x)
        slots = self._next_slots(x.shape, x.dtype)
        end = self._push([x] * self.size, slots)
        self._streams.copy(slots[self.rank][self.rank], x, "main")

        def wait() -> torch.Tensor:
            self._await(end)
            return slots[self.rank].flatten(0, 1)

        return wait

    def all_to_all(self, write: WriteParts, shape: Sequence[int], like: torch.Tensor) -> Callable[[], torch.Tensor]:
        if not self.variant.pushes:
            return super().all_to_all(write, shape, like)
        slots = self._next_slots(shape, like.dtype)
        parts = like.new_empty((self.size, *shape))
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            self._run_work(write, parts[peer], peer)
        end = self._push(parts.unbind(), slots)
        self._run_work(write, slots[self.rank][self.rank], self.rank)

        def wait(sent: torch.Tensor = parts) -> torch.Tensor:  # the default keeps the parts alive
            self._await(end)
            return slots[self.rank].flatten(0, 1)

        return wait

    def scatter(self, write: WriteParts, shape: Sequence[int], like: torch.Tensor) -> Callable[[], torch.Tensor]:
        if not self.variant.pushes:
            return super().scatter(write, shape, like)
        slots = self._next_slots(shape, like.dtype)
        parts = like.new_empty((self.size, *shape))
        self._run_work(write, parts, None)
        end = self._push(parts.unbind(), slots, without_own_row=True)

        def wait() -> torch.Tensor:
            self._await(end)
            out = like.new_empty(tuple(shape))
            rows = slots[self.rank][: self.size - 1].flatten(1)
            local_part = parts[self.rank].flatten()
            self._streams.compute(lambda: sum_over_peers(local_part, rows, self.rank, out.view(-1)))
            return out

        return wait

    def _next_slots(self, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return every rank's memory for the parts that the next pushes write, [size, *shape]."""
        nbytes = self.size * torch.Size(shape).numel() * dtype.itemsize
        slot_bytes = len(self.peer_memory[0]) // PUSH_SLOTS
        start = self._push_count % PUSH_SLOTS * slot_bytes
        self._push_count += 1
        views = [memory[start : start + nbytes].view(dtype) for memory in self.peer_memory]
        return [view.view((self.size, *shape)) for view in views]

    def _push(
        self, parts: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], without_own_row: bool = False
    ) -> object:
        """Write a part into each peer's slot, and return the event after which all peers' parts have arrived.

        A slot needs no flag of its own. It was last used by the call before the previous one. Its owner has signalled
        the previous call after its main queue had read that result.

        Args:
            without_own_row: whether a slot has a row for each other rank only.
        """
        self.check()
        plan = self.variant.plan or IN_ORDER
        self._copy_waits_for_main()
        copies = []
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            row = self.rank
            if without_own_row and self.rank > peer:
                row -= 1
            copies.append(PeerCopy(peer, slots[peer][row], parts[peer]))
        queues = self._fork_copies(plan)
        self._copy_in_pieces(copies, queues, plan.piece_bytes or parts[0].nbytes)
        self._join_copies(queues)
        self._make_empty_call()
        return self._streams.record_event("copy")

    def _copy_from_peers(self, copies: Sequence[PeerCopy], number: int) -> Any:
        if not self.variant.programs:
            return super()._copy_from_peers(copies, number)
        streams = self._streams
        for copy in copies:
            streams.wait_for(copy.peer, number)
        streams.stream_wait("side", streams.record_event("copy"))
        streams.compute(lambda: copy_by_kernel(copies, self.variant.programs), "side")
        streams.stream_wait("copy", streams.record_event("side"))
        return None


@jit
def _copy_kernel(
    to_0,
    to_1,
    to_2,
    source_0,
    source_1,
    source_2,
    count,
    PEERS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy `count` words from each of up to three peers, one block of each in turn."""
    for start in range(tl.program_id(0) * BLOCK, count, PROGRAMS * BLOCK):
        word = start + tl.arange(0, BLOCK)
        inside = word < count
        words_0 = tl.load(source_0 + word, mask=inside)
        if PEERS > 1:
            words_1 = tl.load(source_1 + word, mask=inside)
        if PEERS > 2:
            words_2 = tl.load(source_2 + word, mask=inside)
        tl.store(to_0 + word, words_0, mask=inside)
        if PEERS > 1:
            tl.store(to_1 + word, words_1, mask=inside)
        if PEERS > 2:
            tl.store(to_2 + word, words_2, mask=inside)


def copy_by_kernel(copies: Sequence[PeerCopy], programs: int) -> None:
    """Copy parts of up to `COPY_PEERS` peers by one kernel of `programs` programs; on a CPU, one after another.

    Raises ValueError if a part's bytes are no multiple of eight, or if there are more peers.
    """
    if len(copies) > COPY_PEERS or copies[0].to.nbytes % 8:
        raise ValueError(f"the copy kernel takes {COPY_PEERS} peers and parts of whole words of eight bytes")
    if not copies[0].to.is_cuda:
        for copy in copies:
            copy.to.copy_(copy.source)
        return
    padded = [*copies, *[copies[0]] * (COPY_PEERS - len(copies))]
    to = [copy.to.flatten().view(torch.int64) for copy in padded]
    source = [copy.source.flatten().view(torch.int64) for copy in padded]
    _copy_kernel[(programs,)](
        *to, *source, to[0].numel(), PEERS=len(copies), PROGRAMS=programs, BLOCK=COPY_BLOCK, num_warps=16
    )
