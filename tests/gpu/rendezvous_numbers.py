"""Rendezvous of GPU memory between a process that has made some already and a process that has made none.

    PYTHONPATH=src:. torchrun --standalone --nproc-per-node 2 tests/gpu/rendezvous_numbers.py

Rank 0 meets itself several times, like a process that has survived an attempt. Afterwards the ranks align their numbers
and map each other's memory. Prints the seconds, and ends with 1 if a rank reads wrong values.

Ranks share the machine's GPUs if there are fewer, with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.parallel import rendezvous_numbers
from tests.gpu.command_line import exit_with, make_parser, require_gpu

ROUNDS = 3


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--ahead", type=int, default=20, help="rendezvous of rank 0 before each round")
    options = parser.parse_args()
    require_gpu()
    if "LOCAL_RANK" not in os.environ:
        exit_with("WORLD_SIZE=1, and ranks meet in groups of two or more; run torchrun --nproc-per-node 2")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")

    def all_gather(value: int) -> list[int]:
        rows = [torch.empty(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(rows, torch.tensor([value]))
        return [int(row) for row in rows]

    group = dist.group.WORLD
    assert group is not None
    failures = 0
    for round_index in range(ROUNDS):
        start_time = time.monotonic()
        next_number = 0
        for _ in range(options.ahead if rank == 0 else 0):
            next_number = rendezvous_numbers.meet_itself(device)
        ahead_time = time.monotonic()
        count = rendezvous_numbers.align_rendezvous(all_gather, device)
        aligned_time = time.monotonic()
        memory = torch_private.symmetric_memory.empty(1 << 20, dtype=torch.uint8, device=device)
        memory.fill_(1 + rank + 10 * round_index)
        torch.cuda.synchronize()
        handle = rendezvous_numbers.rendezvous(memory, group.group_name)
        dist.barrier()
        peer = (rank + 1) % world
        value = int(handle.get_buffer(peer, memory.shape, torch.uint8)[123])
        dist.barrier()
        failures += value != 1 + peer + 10 * round_index
        print(
            f"round {round_index} rank {rank}: next number {next_number} after {ahead_time - start_time:.3f} s; "
            f"aligned by {count} in {aligned_time - ahead_time:.3f} s; read {value} in "
            f"{time.monotonic() - aligned_time:.3f} s",
            flush=True,
        )
    dist.destroy_process_group()
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
