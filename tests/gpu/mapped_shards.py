"""Slots of ZeRO-3 with own shards mapped, next to slots with copies of them: bits, memory and time of a gather.

    PYTHONPATH=src:. torchrun --standalone --nproc-per-node 2 tests/gpu/mapped_shards.py

Prints a table and ends with 1 if a gathered matrix differs, eagerly or replayed, also after an update, or if memory is
not given back. The reason of a failed mapping names the driver's function and its error.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from megascale.parallel import symmetric
from megascale.parallel.collectives import Axis
from megascale.parallel.exchange import Exchange
from megascale.parallel.mapped_slots import MappedSlots, map_slots
from megascale.parallel.slot_units import SlotUnit
from tests.gpu.command_line import exit_with, make_parser, require_gpu

PAGE_BYTES = 2 << 20
REPEATS = 50


class Chunk:
    """The parts of a chunk's buffer that slots read: one bucket of bfloat16 per unit."""

    def __init__(self, bucket_elements: list[int], device: torch.device) -> None:
        self.params = torch.empty(0, dtype=torch.bfloat16, device=device)
        spans = []
        start = 0
        for count in bucket_elements:
            spans.append(type("Span", (), {"start": start, "stop": start + count}))
            start += count
        self.layout: Any = type("Layout", (), {"buckets": spans})


def gather(exchange: Exchange, slots: MappedSlots, unit: int, copies_own: bool) -> None:
    """Gather a unit into its slot, and wait."""
    out = slots.unit_memory[unit].view(exchange.size, -1)
    exchange.gather_from_peers(out, slots.peer_shards[0, unit], copies_own=copies_own)()


def expected_part(rank: int, unit: int, update: int) -> float:
    """Return the value of a rank's shard, exact in bfloat16."""
    return float(1 + rank + 8 * unit + 32 * update)


def count_differences(exchange: Exchange, slots: MappedSlots, unit: int, update: int) -> int:
    """Return the number of wrong elements of a gathered unit."""
    parts = slots.unit_memory[unit].view(exchange.size, -1)
    return sum(int((part != expected_part(rank, unit, update)).sum()) for rank, part in enumerate(parts))


def update_shards(exchange: Exchange, slots: MappedSlots, update: int) -> None:
    """Write all shards of this rank, as an optimizer does."""
    exchange.wait_for_peer_reads()
    for (_, unit), shard in slots.shards.items():
        shard.fill_(expected_part(exchange.rank, unit, update))


def time_gathers(exchange: Exchange, slots: MappedSlots, copies_own: bool) -> float:
    """Return the microseconds of a gather on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    gather(exchange, slots, 0, copies_own)
    start.record()
    for _ in range(REPEATS):
        gather(exchange, slots, 0, copies_own)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / REPEATS


def count_wrong_replays(exchange: Exchange, slots: MappedSlots) -> int:
    """Capture gathers of all units, and return the number of wrong units of replays after updates."""
    device = slots.unit_memory[0].device
    count = len(slots.unit_memory)
    failures = 0
    graph = torch.cuda.CUDAGraph()
    total = torch.zeros(count, device=device)
    with exchange.capture(), torch.cuda.graph(graph):
        for unit in range(count):
            gather(exchange, slots, unit, copies_own=False)
            total[unit] = slots.unit_memory[unit][:: 1 << 12].float().sum()
    for update in range(2, 5):
        update_shards(exchange, slots, update)
        exchange.before_replay()
        graph.replay()
        for unit in range(count):
            parts = slots.unit_memory[unit].view(exchange.size, -1)
            sums = [expected_part(rank, unit, update) for rank in range(exchange.size)]
            owners = torch.arange(0, parts.numel(), 1 << 12, device=device) // parts.shape[1]
            expected = torch.tensor(sums, device=device)[owners].sum()
            failures += bool(total[unit] != expected)
    return failures


def check(axis: Axis, device: torch.device, bucket_elements: list[int]) -> int:
    """Check and time the units of two slots. Return the number of failures."""
    exchange = symmetric.make_exchange(axis, 0, device)
    if isinstance(exchange, str):
        print(f"rank {axis.rank}: no exchange: {exchange}", flush=True)
        return 1
    chunk: Any = Chunk(bucket_elements, device)
    units = []
    for unit, span in enumerate(chunk.layout.buckets):
        units.append(SlotUnit(0, unit, (span.start, span.stop), start=unit % 2, is_persistent=False))
    torch.cuda.synchronize()
    free_before = torch.cuda.mem_get_info()[0]
    start = time.perf_counter()
    slots = map_slots(axis, [chunk], units, frozenset((0, unit) for unit in range(len(units))), device)
    if isinstance(slots, str):
        print(f"rank {axis.rank}: shards are not mapped: {slots}", flush=True)
        exchange.close()
        return 1
    seconds = time.perf_counter() - start
    used = free_before - torch.cuda.mem_get_info()[0]
    counted = slots.nbytes
    failures = 0
    for update in range(2):
        update_shards(exchange, slots, update)
        for unit in range(len(units)):
            gather(exchange, slots, unit, copies_own=False)
            failures += count_differences(exchange, slots, unit, update) > 0
    failures += count_wrong_replays(exchange, slots)
    torch.cuda.synchronize()
    dist.barrier()
    mapped_us = time_gathers(exchange, slots, copies_own=False)
    dist.barrier()
    copied_us = time_gathers(exchange, slots, copies_own=True)
    dist.barrier()
    del slots
    gc.collect()
    torch.cuda.synchronize()
    dist.barrier()  # a peer's mapping keeps this rank's memory
    kept = free_before - torch.cuda.mem_get_info()[0]
    failures += kept > 32 << 20
    print(
        f"rank {axis.rank}: {len(units)} units, shard {bucket_elements[0] * 2 / axis.size / PAGE_BYTES:.2f} pages: "
        f"failures {failures}, set-up {seconds:.2f} s, memory {used >> 20} MiB (counted {counted >> 20}, "
        f"kept after the end {kept >> 20}), gather {mapped_us:.0f} us mapped, {copied_us:.0f} us copied",
        flush=True,
    )
    exchange.close()
    return failures


def main() -> int:
    """Run the checks; 1 if one fails."""
    make_parser(__doc__).parse_args()
    require_gpu()
    if "LOCAL_RANK" not in os.environ:
        exit_with("WORLD_SIZE=1, and a gather needs two processes or more; run torchrun --nproc-per-node 2")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    axis = Axis(dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    if axis.rank == 0:
        print(f"{axis.size} x {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    aligned = 75 * PAGE_BYTES // 2 * axis.size  # the shard of a block of GPT 13B on four GPUs
    failures = check(axis, device, [aligned] * 4)
    failures += check(axis, device, [aligned + 64 * axis.size, aligned // 2 + 640 * axis.size, aligned // 4])
    counts = torch.tensor(failures, device=device)
    dist.all_reduce(counts)
    dist.destroy_process_group()
    return int(counts.item() > 0)


if __name__ == "__main__":
    sys.exit(main())
