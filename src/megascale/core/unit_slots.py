"""Memory slots for gathered parameters under ZeRO-3: which chunks of a stage share a slot, and which blocks share none.

A stage with more chunks than slots gathers a chunk when the schedule comes to it and keeps it until another chunk of
the same slot is needed. In the steady state of interleaved 1F1B two chunks take turns, one forward and one backward.
They must not share a slot, or each micro-batch would gather both.

With fewer chunks, blocks use two slots in turn. With `parallel.zero3_keep_layers` some blocks have a slot of their own,
and are gathered once per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from megascale.core.schedule import COMPUTES, ActionKind, Schedule

CHUNK_SLOTS = 3
# Parts of a table whose gradients ZeRO-2's slots hold at a time: one is written while the previous ones are reduced.
TABLE_PARTS = 4

# Elements of the pieces that copies bring from all peers together: 32 MiB of float32, 90 us between two GPUs.
# The piece of one peer has at least MIN_STAGED_PIECE, 8 MiB, since each copy has a fixed time of a few us.
STAGED_PIECES = 1 << 23
MIN_STAGED_PIECE = 1 << 21
STAGED_ALIGN = 64  # elements by which pieces begin, so that kernels load vectors


def size_staging(slots: int, ranks: int) -> tuple[int, int, int]:
    """Return the shape of the staging memory of reductions by copies: (halves, peers, elements of a piece).

    Args:
        slots: elements of the gradient slots, which hold at least one bucket.
        ranks: ranks that share each bucket.
    """
    peers = ranks - 1
    piece = max(MIN_STAGED_PIECE, STAGED_PIECES // peers // STAGED_ALIGN * STAGED_ALIGN)
    shard = -(-slots // ranks)
    return 2, peers, min(piece, shard)


def has_chunk_slots(virtual_stages: int) -> bool:
    """Return whether ZeRO-3 gathers chunks as a whole: with more chunks per stage than slots."""
    return virtual_stages > CHUNK_SLOTS


def choose_table_part(table: int, block: int, bucket_elements: int | None) -> int | None:
    """Return the elements of a part of a table's gradient if ZeRO-2 divides tables by rows; None if it does not.

    A table that fits in the slots of blocks, or in TABLE_PARTS buckets, is not divided.

    Args:
        table: elements of the largest table of the stage.
        block: elements of the largest block of the stage.
        bucket_elements: parallel.bucket_elements; None: gradients are not reduced.
    """
    if bucket_elements is None:
        return None
    slots = max(2 * block, TABLE_PARTS * bucket_elements)
    if table <= slots:
        return None
    return slots // TABLE_PARTS


def select_persistent_blocks(block_counts: Sequence[int], persistent_count: int) -> list[list[bool]]:
    """Return for each block of each chunk of a stage whether it has a slot of its own.

    The persistent blocks are spread evenly, so that each gather of another block overlaps with the work of more blocks.

    Args:
        block_counts: number of blocks of each chunk.
        persistent_count: parallel.zero3_keep_layers; or all blocks if there are fewer.
    """
    total = sum(block_counts)
    persistent_count = min(persistent_count, total)
    is_persistent = [(i + 1) * persistent_count // total > i * persistent_count // total for i in range(total)]
    chunks = []
    start = 0
    for count in block_counts:
        chunks.append(is_persistent[start : start + count])
        start += count
    return chunks


def assign_block_slots(persistent: Sequence[Sequence[bool]]) -> list[list[int]]:
    """Return the index of the slot of each block of each chunk of a stage.

    Slots 0 and 1 are shared: a chunk's blocks use them in turn. Each persistent block has a slot of its own, from 2 on.

    Args:
        persistent: for each block with matrices of each chunk whether it has a slot of its own.
    """
    slots = []
    next_slot = 2
    for is_persistent in persistent:
        chunk_slots = []
        turn = 0  # index of the slot that the next block of the chunk shares
        for has_slot in is_persistent:
            if has_slot:
                chunk_slots.append(next_slot)
                next_slot += 1
            else:
                chunk_slots.append(turn)
                turn = 1 - turn
        slots.append(chunk_slots)
    return slots


# Cached because the search takes up to 0.1 s, and a plan needs the slots for its memory and for its traffic.
@lru_cache(maxsize=64)
def assign_chunk_slots(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Return the slot of each chunk of a stage, chosen by a local search so that a step gathers few times.

    The search starts with round-robin slots. It moves single chunks as long as a move saves gathers.
    """
    uses = list_chunk_uses(schedule, stage)
    slots = [chunk % CHUNK_SLOTS for chunk in range(schedule.virtual_stages)]
    fewest_gathers = len(list_chunk_gathers(uses, slots))
    is_improved = True
    while is_improved:
        is_improved = False
        for chunk in range(len(slots)):
            for slot in range(CHUNK_SLOTS):
                candidate_slots = [*slots[:chunk], slot, *slots[chunk + 1 :]]
                gather_count = len(list_chunk_gathers(uses, candidate_slots))
                if gather_count < fewest_gathers:
                    slots = candidate_slots
                    fewest_gathers = gather_count
                    is_improved = True
    return tuple(slots)


def list_chunk_uses(schedule: Schedule, stage: int) -> list[int]:
    """Return the chunk of each action of a stage that reads parameters, in order (BACKWARD_WEIGHT reads none)."""
    uses = []
    for kind, chunk, _ in schedule.tables[stage].tolist():
        if kind in COMPUTES and kind != ActionKind.BACKWARD_WEIGHT:
            uses.append(chunk)
    return uses


def list_chunk_gathers(uses: Sequence[int], slots: Sequence[int]) -> list[int]:
    """Return the chunks that a step gathers, in order, given the order of uses and the slot of each chunk."""
    chunk_by_slot: dict[int, int] = {}
    gathers = []
    for chunk in uses:
        if chunk_by_slot.get(slots[chunk]) != chunk:
            chunk_by_slot[slots[chunk]] = chunk
            gathers.append(chunk)
    return gathers


def find_gaps(start: int, stop: int, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of [start, stop) that no span covers, in order. The spans must lie within and not overlap."""
    gaps = []
    for span_start, span_stop in [*sorted(spans), (stop, stop)]:
        if span_start > start:
            gaps.append((start, span_start))
        start = span_stop
    return gaps
