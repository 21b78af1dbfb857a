"""Slots of chunks under ZeRO-3: a step gathers each chunk once per round where the slots allow it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megascale.core.schedule import build_interleaved_1f1b
from megascale.core.unit_slots import (
    CHUNK_SLOTS,
    assign_chunk_slots,
    has_chunk_slots,
    list_chunk_gathers,
    list_chunk_uses,
    select_persistent_blocks,
)


def test_persistent_blocks_are_spread_evenly_over_the_chunks_of_a_stage():
    assert select_persistent_blocks([5], 2) == [[False, False, True, False, True]]
    assert select_persistent_blocks([2, 0, 3], 0) == [[False] * 2, [], [False] * 3]
    assert select_persistent_blocks([2, 0, 3], 9) == [[True] * 2, [], [True] * 3]
    assert select_persistent_blocks([0], 3) == [[]]
    [is_persistent] = select_persistent_blocks([40], 14)
    assert sum(is_persistent) == 14
    positions = [i for i, value in enumerate(is_persistent) if value]
    assert {second - first for first, second in pairwise(positions)} == {2, 3}


def test_a_chunk_is_gathered_when_its_slot_has_another():
    assert list_chunk_gathers([0, 0, 1, 2, 2, 0], [0, 1, 2]) == [0, 1, 2]
    assert list_chunk_gathers([0, 0, 1, 1, 0], [0, 0]) == [0, 1, 0]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("virtual", [4, 5, 8])
@pytest.mark.parametrize("rounds", [1, 3])
def test_gathers_of_interleaved_1f1b(stages, virtual, rounds):
    """Uses are 2 x chunks x micro-batches; gathers grow with rounds, and no choice in turn is better."""
    size = 8
    schedule = build_interleaved_1f1b(stages, virtual, rounds * size, micro_batch_group_size=size)
    assert has_chunk_slots(virtual)
    for stage in range(stages):
        uses = list_chunk_uses(schedule, stage)
        assert len(uses) == 2 * virtual * rounds * size
        slots = assign_chunk_slots(schedule, stage)
        assert set(slots) <= set(range(CHUNK_SLOTS))
        count = len(list_chunk_gathers(uses, slots))
        assert count <= len(list_chunk_gathers(uses, [chunk % CHUNK_SLOTS for chunk in range(virtual)]))
        assert count <= 2 * virtual * rounds * 2
