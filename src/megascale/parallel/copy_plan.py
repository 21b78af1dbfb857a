"""Order of the copies of an exchange's call (exchange.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Operation = Literal["gather", "scatter", "all_to_all"]


@dataclass(frozen=True)
class CopyPlan:
    """Order of the copies of one call.

    Attributes:
        queues: number of copies at the same time; 0: one per peer.
        waits_first: await the flags of all peers before the first copy. Flags between two copies would be more nodes
            of a graph. An all-to-all then writes all parts before the first copy.
        piece_bytes: length of the pieces that are copied from the peers in turn; 0: whole parts.
        sum_programs: programs of the kernel that sums a scatter's parts in the peers' memory; 0: copy engines bring
            the parts before they are summed.
        awaits_in_kernel: let the kernel of `Exchange.peer_sum`, which has its own number of programs, await the peers.
            This is the same on all ranks.
    """

    queues: int = 1
    waits_first: bool = False
    piece_bytes: int = 0
    sum_programs: int = 0
    awaits_in_kernel: bool = False


IN_ORDER = CopyPlan()
TOGETHER = CopyPlan(queues=0, waits_first=True)
TWO_QUEUES = CopyPlan(queues=2, waits_first=True)
# Pushes signal after their copies, so no flag precedes a copy.
PUSHED = CopyPlan(queues=2)
SUM_KERNEL = CopyPlan(waits_first=True, sum_programs=8)

# Measured on four H200 (dev/log.md, 2026-11-27, tenth): GB/s of the whole tensor at 10, 20 and 40 MB in a graph of one
# call, then the same for eight calls.
#
#                        gather                        scatter                       all-to-all
#   NCCL                 188 261 315                   156 281 307                   153 242 306
#   one queue            140 213 298, 164 237 320      138 206 267, 155 223 294      165 241 320, 193 273 346
#   TWO_QUEUES           166 238 314, 193 264 336      177 246 300, 175 238 298      193 274 340, 191 268 334
#   TOGETHER             157 236 314, 187 266 342      120 163 201, 179 241 298      196 274 348, 220 294 364
#   PUSHED               224 304 363, 217 300 352      131 198 258, 155 216 255      212 295 362, 210 294 357
#
# On four H100 80 GB of the same day, with SUM_KERNEL:
#   NCCL                 167 247 304                   157 266 301                   114 238 306
#   TWO_QUEUES           155 227 309, 184 258 331      170 131 294, 173 229 290
#   TOGETHER                                                                         112 273 348, 213 299 366
#   SUM_KERNEL                                         191 262 319, 233 292 346
_CAPTURED_PLANS: dict[Operation, CopyPlan] = {
    "gather": TWO_QUEUES,
    "scatter": SUM_KERNEL,
    "all_to_all": TOGETHER,
}


def choose_plan(operation: Operation, is_captured: bool, ranks: int) -> CopyPlan:
    """Return the order of the copies of an operation between `ranks` ranks."""
    if not is_captured:
        # Outside of a graph, the events that order several queues would cost the host more than they save.
        return IN_ORDER
    if operation == "scatter" and ranks == 2:
        return TWO_QUEUES  # the only copy is as fast as the kernel, and takes no SMs from GEMMs
    return _CAPTURED_PLANS[operation]
