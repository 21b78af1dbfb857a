"""Other ways to move the data of an exchange, for `python -m benchmarks exchange --variant`.

Pulls differ in the order of the copies. With pushes, each rank writes into the memory of its peers, so that a call
signals after its copies instead of before them. A kernel copies with some of the SMs instead of the copy engines.
Another kernel sums the parts of a scatter in the memory of the peers, without copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megascale.ops.dispatch import jit, tl
from megascale.ops.peer_sum import sum_over_peers
from megascale.parallel.copy_plan import IN_ORDER, PUSHED, TOGETHER, TWO_QUEUES, CopyPlan
from megascale.parallel.exchange import Exchange, WriteParts
from megascale.parallel.exchange_streams import PeerCopy

COPY_BLOCK = 4096  # words of eight bytes that a program copies from each peer at a time
STAGED_BLOCK = 1024  # the same, with several blocks in flight
STAGES = 5  # number of blocks in flight and in use
COPY_PEERS = 3  # peers of the copy kernel


@dataclass(frozen=True)
class Variant:
    """A way to move the data of the calls.

    Attributes:
        plan: order of the copies; None: the exchange chooses.
        pushes: write into the peers' memory.
        programs: programs of the copy kernel; 0: copy engines.
        is_staged: let the copy kernel load the next blocks into shared memory meanwhile.
        operations: names of the operations to measure.
    """

    plan: CopyPlan | None = None
    pushes: bool = False
    programs: int = 0
    is_staged: bool = False
    operations: tuple[str, ...] = ("gather", "scatter", "all-to-all")


SERIAL = CopyPlan(waits_first=True)
EACH_AFTER_ITS_FLAG = CopyPlan(queues=0)


def sum_by_kernel(programs: int) -> Variant:
    """Return the variant of a scatter whose kernel reads the peers' parts and sums them."""
    return Variant(CopyPlan(waits_first=True, sum_programs=programs), operations=("scatter",))


# In the order of the table. Rank r copies from r + 1 first, so that ranks in step read different GPUs.
VARIANTS: dict[str, Variant] = {
    "auto": Variant(),
    "together": Variant(EACH_AFTER_ITS_FLAG),
    "together-flags-first": Variant(TOGETHER),
    "two": Variant(TWO_QUEUES),
    "in-order": Variant(IN_ORDER),
    "serial": Variant(SERIAL),
    "pieces-2mb": Variant(CopyPlan(waits_first=True, piece_bytes=2_000_000)),
    "pieces-4mb": Variant(CopyPlan(waits_first=True, piece_bytes=4_000_000)),
    "two-pieces-2mb": Variant(CopyPlan(queues=2, waits_first=True, piece_bytes=2_000_000)),
    "push-together": Variant(EACH_AFTER_ITS_FLAG, pushes=True),
    "push-two": Variant(PUSHED, pushes=True),
    "push-serial": Variant(SERIAL, pushes=True),
    "push-pieces-2mb": Variant(CopyPlan(piece_bytes=2_000_000), pushes=True),
    "kernel-8": Variant(SERIAL, programs=8),
    "kernel-16": Variant(SERIAL, programs=16),
    "staged-kernel-8": Variant(SERIAL, programs=8, is_staged=True),
    "staged-kernel-16": Variant(SERIAL, programs=16, is_staged=True),
    "sum-kernel-8": sum_by_kernel(8),
    "sum-kernel-16": sum_by_kernel(16),
    "sum-kernel-24": sum_by_kernel(24),
    "sum-kernel-flags": Variant(
        CopyPlan(waits_first=True, sum_programs=16, awaits_in_kernel=True), operations=("scatter",)
    ),
}


class VariantExchange(Exchange):
    """An exchange whose calls move their data by `variant`.

    Results of pushed gathers and all-to-alls are lent, see `Exchange.gather`.
    """

    variant = Variant()

    def select(self, variant: Variant) -> None:
        """Use `variant` in later calls. All ranks select the same."""
        self.variant = variant
        self.copy_plan = variant.plan

    def gather(self, x: torch.Tensor, lend: bool = False) -> Callable[[], torch.Tensor]:
        return super().gather(x, lend=lend or self.variant.pushes)

    def all_to_all(self, write: WriteParts, shape: Sequence[int], like: torch.Tensor) -> Callable[[], torch.Tensor]:
        if not self.variant.pushes:
            return super().all_to_all(write, shape, like)
        slots = self._next_slots(shape, like.dtype)
        parts = like.new_empty((self.size, *shape))
        for peer in self.next_peers:
            self._run_work(write, parts[peer], peer)
        end = self._push_parts(parts.unbind(), slots)
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
        end = self._push_parts(parts.unbind(), slots, without_own_row=True)

        def wait() -> torch.Tensor:
            self._await(end)
            out = like.new_empty(tuple(shape))
            rows = slots[self.rank][: self.size - 1].flatten(1)
            local_part = parts[self.rank].flatten()
            self._streams.compute(lambda: sum_over_peers(local_part, rows, self.rank, out.view(-1)))
            return out

        return wait

    def _push_parts(
        self, parts: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], without_own_row: bool = False
    ) -> object:
        """Write a part into each peer's slot, and return the event after which all peers' parts have arrived.

        Args:
            without_own_row: whether a slot has a row for each other rank only.
        """
        self.check()
        self._copy_waits_for_main()
        copies = []
        for peer in self.next_peers:
            row = self.rank
            if without_own_row and self.rank > peer:
                row -= 1
            copies.append(PeerCopy(peer, slots[peer][row], parts[peer]))
        self._push(copies)
        self._make_empty_call()
        return self._streams.record_event("copy")

    def _copy_from_peers(self, copies: Sequence[PeerCopy], number: int, plan: CopyPlan) -> Any:
        if not self.variant.programs:
            return super()._copy_from_peers(copies, number, plan)
        streams = self._streams
        for copy in copies:
            streams.wait_for(copy.peer, number)
        streams.stream_wait("side", streams.record_event("copy"))
        streams.compute(lambda: copy_by_kernel(copies, self.variant.programs, self.variant.is_staged), "side")
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
    STAGES: tl.constexpr,
):
    """Copy `count` words from each of up to three peers, one block of each in turn."""
    for start in tl.range(tl.program_id(0) * BLOCK, count, PROGRAMS * BLOCK, num_stages=STAGES):
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


def copy_by_kernel(copies: Sequence[PeerCopy], programs: int, is_staged: bool = False) -> None:
    """Copy parts of up to `COPY_PEERS` peers by one kernel of `programs` programs; on a CPU, one after another.

    Args:
        is_staged: load the next blocks into shared memory meanwhile.

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
    options = {"BLOCK": COPY_BLOCK, "STAGES": 1, "num_warps": 16}
    if is_staged:
        options = {"BLOCK": STAGED_BLOCK, "STAGES": STAGES, "num_warps": 8}
    _copy_kernel[(programs,)](*to, *source, to[0].numel(), PEERS=len(copies), PROGRAMS=programs, **options)
