"""Slots whose part of this rank is the rank's shard itself, with memory of the host that is mapped twice."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.core.copy_choice import SHARD_SWITCH
from megascale.core.mapped_layout import (
    MIN_MAPPED_BYTES,
    MIN_SHARD_PAGES,
    PlannedUnit,
    UnitPages,
    count_block_bytes,
    count_mapped_bytes,
    divide_slot,
    find_shard_offset,
    round_up,
)
from megascale.errors import ConfigError
from megascale.parallel import device_pages, symmetric
from megascale.parallel.collectives import Axis
from megascale.parallel.mapped_slots import MappedSlots, map_slots, select_mapped_buckets
from megascale.parallel.slot_units import SlotUnit
from tests.parallel.host_pages import HostPages

PAGE = 4096
CPU = torch.device("cpu")


class Buffer:
    """The parts of a chunk's buffer that slots read: one bucket per unit, in bytes of uint8."""

    def __init__(self, bucket_bytes: list[int], ranks: int) -> None:
        self.params = torch.empty(0, dtype=torch.uint8)
        spans = []
        start = 0
        for nbytes in bucket_bytes:
            spans.append(type("Span", (), {"start": start, "stop": start + nbytes}))
            start += nbytes
        units = tuple(range(len(spans)))
        self.layout: Any = type("Layout", (), {"buckets": spans, "units": units})
        self.shards: list[Any] = []
        for nbytes in bucket_bytes:
            self.shards.append(type("Shard", (), {"params": torch.empty(nbytes // ranks, dtype=torch.uint8)}))


def make_slots(
    bucket_bytes: list[int], rank: int, ranks: int, lead_bytes: int = 0, slot_count: int = 2
) -> tuple[MappedSlots, HostPages, Buffer]:
    """Make slots of units with one bucket each, which use `slot_count` slots in turn."""
    axis = Axis(None, ranks, rank)
    buffer: Any = Buffer(bucket_bytes, ranks)
    units = []
    for index, span in enumerate(buffer.layout.buckets):
        start = index % slot_count * max(bucket_bytes)
        units.append(SlotUnit(0, index, (span.start, span.stop), start=start, is_persistent=False))
    buckets = frozenset((0, index) for index in range(len(bucket_bytes)))
    pages = HostPages(axis, lead_bytes)
    slots = MappedSlots(axis, pages, [buffer], units, buckets)
    slots.connect()
    return slots, pages, buffer


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(2, 4),
    shard_units=st.lists(st.integers(MIN_SHARD_PAGES * PAGE // 128, 12 * PAGE // 128), min_size=1, max_size=4),
    lead_bytes=st.sampled_from([0, 128, PAGE]),
    data=st.data(),
)
def test_a_unit_holds_this_rank_s_shard_whatever_other_units_receive(
    ranks: int, shard_units: list[int], lead_bytes: int, data: st.DataObject
) -> None:
    """Units of a slot share the parts of peers only."""
    rank = data.draw(st.integers(0, ranks - 1))
    bucket_bytes = [128 * count * ranks for count in shard_units]
    slots, _, _ = make_slots(bucket_bytes, rank, ranks, lead_bytes=lead_bytes)
    for index in range(len(bucket_bytes)):
        slots.shards[0, index].fill_(index + 1)
    for index, memory in enumerate(slots.unit_memory):
        parts = memory.view(ranks, -1)
        for peer in range(ranks):
            if peer != rank:
                parts[peer].fill_(100 + index)
        assert (parts[rank] == index + 1).all()
        for peer in range(ranks):
            assert peer == rank or (parts[peer] == 100 + index).all()
    for index in range(len(bucket_bytes)):
        assert (slots.shards[0, index] == index + 1).all()
        # Peers read the same memory at other addresses.
        assert torch.equal(slots.peer_shards[0, index][rank], slots.shards[0, index])
        assert slots.peer_shards[0, index][rank].data_ptr() != slots.shards[0, index].data_ptr()


def test_equal_units_share_memory_for_the_parts_of_peers_only() -> None:
    shard_bytes = 8 * PAGE
    slots, pages, _ = make_slots([4 * shard_bytes] * 6, 1, 4)
    blocks = 6 * (shard_bytes + PAGE)  # a block ends with a page of its own
    assert slots.nbytes == blocks + 2 * (3 * shard_bytes - PAGE)
    assert len(pages.open_files) == 6 + 2 * 2


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(2, 4),
    shard_units=st.lists(st.integers(MIN_SHARD_PAGES * PAGE // 128, 12 * PAGE // 128), min_size=1, max_size=5),
    lead_bytes=st.sampled_from([0, 128]),
    slot_count=st.integers(1, 3),
)
def test_the_planned_memory_is_that_of_the_fullest_rank(
    ranks: int, shard_units: list[int], lead_bytes: int, slot_count: int
) -> None:
    bucket_bytes = [128 * count * ranks for count in shard_units]
    totals = []
    for rank in range(ranks):
        slots, _, _ = make_slots(bucket_bytes, rank, ranks, lead_bytes=lead_bytes, slot_count=slot_count)
        totals.append(slots.nbytes)
    units = tuple(PlannedUnit(index % slot_count, (nbytes,)) for index, nbytes in enumerate(bucket_bytes))
    planned = count_mapped_bytes(
        units, ranks, page_bytes=PAGE, lead_bytes=lead_bytes, trail_bytes=PAGE, min_bytes=MIN_SHARD_PAGES * PAGE
    )
    assert planned == max(totals)


def test_units_with_small_shards_only_are_not_mapped() -> None:
    small = PlannedUnit(0, (2 * MIN_MAPPED_BYTES - 256,))
    assert count_mapped_bytes((small, small), 2) is None
    large = PlannedUnit(1, (4 * MIN_MAPPED_BYTES,))
    large_bytes = count_mapped_bytes((large,), 2)
    small_bytes = 2 * (MIN_MAPPED_BYTES - 128) + 2 * MIN_MAPPED_BYTES  # two shards, and a slot in complete pages
    assert large_bytes is not None
    assert count_mapped_bytes((small, small, large), 2) == large_bytes + small_bytes


def test_memory_is_freed_with_the_last_tensor() -> None:
    slots, pages, _ = make_slots([48 * PAGE] * 3, 0, 2)
    memory = slots.unit_memory[0]
    del slots
    gc.collect()
    memory.fill_(1)
    assert pages.mapped
    del memory
    gc.collect()
    assert not pages.mapped
    assert not pages.ranges
    assert not pages.open_files


def test_a_failed_mapping_frees_memory_and_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[HostPages] = []

    def make(axis: Axis, device: torch.device) -> HostPages:
        pages = HostPages(axis)
        made.append(pages)
        return pages

    def refuse(self: HostPages, address: int, nbytes: int) -> None:
        raise RuntimeError("cuMemSetAccess(0x10) failed with error 801, CUDA_ERROR_NOT_SUPPORTED\nmore")

    monkeypatch.setattr(device_pages, "make_pages", make)
    monkeypatch.setattr(HostPages, "allow_access", refuse)
    monkeypatch.setattr(symmetric, "_gather_text", lambda text, axis, device: ["", text])
    buffer: Any = Buffer([48 * PAGE], 2)
    unit = SlotUnit(0, 0, (0, 48 * PAGE), start=0, is_persistent=False)
    reason = map_slots(Axis(None, 2, 0), [buffer], [unit], buckets=frozenset({(0, 0)}), device=CPU)
    assert reason == (
        "rank 1 of the group: RuntimeError: cuMemSetAccess(0x10) failed with error 801, CUDA_ERROR_NOT_SUPPORTED"
    )
    gc.collect()
    assert not made[0].mapped
    assert not made[0].ranges
    assert not made[0].open_files


def test_the_variable_switches_mapping_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARD_SWITCH, "0")
    monkeypatch.setattr(symmetric, "_gather_text", lambda text, axis, device: [text] * axis.size)
    reason = map_slots(Axis(None, 2, 0), [], [], buckets=frozenset({(0, 0)}), device=CPU)
    assert reason == "rank 0 of the group: RuntimeError: MEGASCALE_MAPPED_SHARDS=0"


def test_small_shards_and_float8_gathers_are_copied() -> None:
    device = torch.device("cuda")
    large: Any = Buffer([2 * MIN_MAPPED_BYTES, 2 * MIN_MAPPED_BYTES - 256], 2)
    assert select_mapped_buckets([large], False, device) == (frozenset({(0, 0)}), "")
    small: Any = Buffer([256], 2)
    assert select_mapped_buckets([small], False, device) == (frozenset(), "all shards have fewer than 16 MiB")
    for gathers_in_float8, other_device in ((True, device), (False, CPU)):
        buckets, reason = select_mapped_buckets([large], gathers_in_float8, other_device)
        assert not buckets
        assert reason


def test_another_value_of_the_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARD_SWITCH, "off")
    with pytest.raises(ConfigError, match="MEGASCALE_MAPPED_SHARDS=off is neither 0 nor 1; set it to 0, or unset it"):
        map_slots(Axis(None, 2, 0), [], [], buckets=frozenset({(0, 0)}), device=CPU)


@pytest.mark.parametrize("lead_bytes", [0, 128, 9 * 128])
def test_a_shard_has_its_position_in_a_page_of_the_unit(lead_bytes: int) -> None:
    for start in (0, 128, PAGE, 7 * PAGE + 256):
        offset = find_shard_offset(start, lead_bytes, PAGE)
        assert lead_bytes <= offset < lead_bytes + PAGE
        assert (start - offset) % PAGE == 0


def test_aligned_shards_need_no_padding() -> None:
    """As the blocks of GPT 13B and Llama 8B on four ranks."""
    assert count_block_bytes(0, 75 * PAGE, 4, lead_bytes=0, page_bytes=PAGE) == 75 * PAGE
    assert count_block_bytes(0, 75 * PAGE + 128, 4, lead_bytes=0, page_bytes=PAGE) == 75 * PAGE + 128 + 3 * 128


def test_a_slot_is_divided_where_a_unit_changes_from_shard_to_slot() -> None:
    first = UnitPages(10 * PAGE, PAGE, ((2 * PAGE, 5 * PAGE),))
    second = UnitPages(8 * PAGE - 1, PAGE, ((-PAGE, 3 * PAGE),))
    assert (second.first, second.stop) == (-PAGE, 8 * PAGE)
    assert divide_slot([first]) == [(0, 2 * PAGE), (5 * PAGE, 10 * PAGE)]
    pieces = [(0, 2), (3, 5), (5, 8), (8, 10)]
    assert divide_slot([first, second]) == [(start * PAGE, stop * PAGE) for start, stop in pieces]


def test_overlapping_blocks_are_refused() -> None:
    unit = UnitPages(10 * PAGE, PAGE, ((0, 3 * PAGE), (2 * PAGE, 5 * PAGE)))
    with pytest.raises(ValueError, match="the memory of two shards overlaps"):
        unit.list_slot_ranges()
    assert round_up(10 * PAGE - 1, PAGE) == 10 * PAGE
