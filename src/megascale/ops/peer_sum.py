"""Sum of gradients over ranks in a fixed order, so that the bits are equal on every rank and in every run.

`PeerSum` awaits the parts of the peers within its kernel. Each rank writes the number of the call into the memory of
each peer, and every program of the kernel waits until all peers have done so. A peer writes it after its parts of the
call, and after its kernel of the previous call, so it no longer reads those parts. A peer that has died writes nothing.
The waiting rank's watch then writes RELEASED into that rank's flags, which ends the wait (parallel/peer_watch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.peer_max import WORD_BYTES

BLOCK = 2048  # elements per program
MAX_RANKS = 8  # of `sum_parts`
PARTS_BLOCK_BYTES = 32768  # bytes of a block of all parts in `sum_parts`
PARTS_STAGES = 5  # a program of `sum_parts` loads the next four blocks into shared memory meanwhile


@jit
def _sum_over_peers_kernel(
    local_ptr,
    received_ptr,
    out_ptr,
    count,
    stride,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    WIDEN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum BLOCK elements over RANKS ranks, into out_ptr. `stride` is the length of a row of received summands.

    WIDEN: add in float32, because the summands have 16 bits.
    """
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    if WIDEN:
        dtype: tl.constexpr = tl.float32
    else:
        dtype: tl.constexpr = local_ptr.dtype.element_ty  # type: ignore[no-redef]
    local = tl.load(local_ptr + element, mask=inside, other=0.0).to(dtype)
    total = tl.zeros((BLOCK,), dtype)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += local
        else:
            row = rank if rank < RANK else rank - 1
            total += tl.load(received_ptr + row * stride + element, mask=inside, other=0.0).to(dtype)
    if ACCUMULATE:
        total += tl.load(out_ptr + element, mask=inside, other=0.0).to(dtype)
    tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_over_peers(local: Tensor, received: Tensor, rank: int, out: Tensor, accumulate: bool = False) -> None:
    """Write the sum of all ranks' summands, added in the order of ranks, to `out`, or add it with `accumulate`.

    Args:
        local: this rank's summand [count], contiguous.
        received: summands of the other ranks in the order of ranks [ranks - 1, at least count], with contiguous rows.
            They may have a narrower type. Sums are computed in the type of `local`, and at least in float32.
        out: [count], contiguous, of a type that is not narrower than that of `local`; may be `local`.
    """
    ranks = len(received) + 1
    if use_fused("sum over peers", local):
        _sum_over_peers_kernel[(cdiv(len(local), BLOCK),)](
            local,
            received,
            out,
            len(local),
            received.stride(0),
            RANK=rank,
            RANKS=ranks,
            WIDEN=local.dtype.itemsize < 4,
            ACCUMULATE=accumulate,
            BLOCK=BLOCK,
        )
        return
    rows = list(received[:, : len(local)])
    rows.insert(rank, local)
    total = rows[0].to(torch.promote_types(local.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        total += row
    if accumulate:
        out += total
    else:
        out.copy_(total)


@jit
def _await_parts(calls_ptr, flags_ptr, peers_ptr, rank, RANKS: tl.constexpr):
    """Signal the peers that this rank's parts are written, and wait for the signals of all peers.

    The arguments are those of `_sum_parts_kernel`.
    """
    program = tl.program_id(0)
    call = tl.load(calls_ptr + program) + 1
    tl.debug_barrier()  # all threads have read the number before it changes
    tl.store(calls_ptr + program, call)
    if program == 0:
        for peer in tl.static_range(RANKS):
            if peer != rank:
                peer_flags = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64))
                tl.atomic_xchg(peer_flags + rank, call, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        if peer != rank:
            # An atomic addition of 0 reads the flag that a peer may write meanwhile.
            received = tl.atomic_add(flags_ptr + peer, 0, sem="acquire", scope="sys")
            while (received < call) & (received != -1):  # RELEASED
                received = tl.atomic_add(flags_ptr + peer, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@jit
def _sum_parts_kernel(
    part_0,
    part_1,
    part_2,
    part_3,
    part_4,
    part_5,
    part_6,
    part_7,
    out_ptr,
    calls_ptr,
    flags_ptr,
    peers_ptr,
    count,
    rank,
    AWAIT: tl.constexpr,
    RANKS: tl.constexpr,
    WIDEN: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum `count` elements over RANKS parts. Loads of STAGES - 1 blocks are in flight.

    AWAIT: signal the peers, and wait for their signals first.
    calls_ptr: number of calls that each program has made [PROGRAMS].
    flags_ptr: this rank's flags [RANKS], written by peers. peers_ptr: addresses of the flags of all ranks.
    WIDEN: add in float32, because the summands have 16 bits.
    """
    if WIDEN:
        dtype: tl.constexpr = tl.float32
    else:
        dtype: tl.constexpr = out_ptr.dtype.element_ty  # type: ignore[no-redef]
    if AWAIT:
        _await_parts(calls_ptr, flags_ptr, peers_ptr, rank, RANKS)
    for start in tl.range(tl.program_id(0) * BLOCK, count, PROGRAMS * BLOCK, num_stages=STAGES):
        element = start + tl.arange(0, BLOCK)
        inside = element < count
        addend_0 = tl.load(part_0 + element, mask=inside, other=0.0)
        addend_1 = tl.load(part_1 + element, mask=inside, other=0.0)
        if RANKS > 2:
            addend_2 = tl.load(part_2 + element, mask=inside, other=0.0)
        if RANKS > 3:
            addend_3 = tl.load(part_3 + element, mask=inside, other=0.0)
        if RANKS > 4:
            addend_4 = tl.load(part_4 + element, mask=inside, other=0.0)
        if RANKS > 5:
            addend_5 = tl.load(part_5 + element, mask=inside, other=0.0)
        if RANKS > 6:
            addend_6 = tl.load(part_6 + element, mask=inside, other=0.0)
        if RANKS > 7:
            addend_7 = tl.load(part_7 + element, mask=inside, other=0.0)
        total = tl.zeros((BLOCK,), dtype)
        total += addend_0.to(dtype)
        total += addend_1.to(dtype)
        if RANKS > 2:
            total += addend_2.to(dtype)
        if RANKS > 3:
            total += addend_3.to(dtype)
        if RANKS > 4:
            total += addend_4.to(dtype)
        if RANKS > 5:
            total += addend_5.to(dtype)
        if RANKS > 6:
            total += addend_6.to(dtype)
        if RANKS > 7:
            total += addend_7.to(dtype)
        tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=inside)


@cache
def can_sum_parts(device: torch.device) -> bool:
    """Return whether a program of `sum_parts` has enough shared memory on the device."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    limit: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in the stub only
    return limit >= PARTS_STAGES * PARTS_BLOCK_BYTES


def sum_parts(parts: Sequence[Tensor], out: Tensor, programs: int) -> None:
    """Write the sum of parts, added in their order, to `out` with the bits of `sum_over_peers`.

    The parts may lie in the memory of other GPUs. Asynchronous loads into shared memory hide the links' latency without
    registers. Plain loads do not, because the assembler delays most of them until the first additions.

    Args:
        parts: two to `MAX_RANKS` summands [count], contiguous, of one type.
        out: [count], contiguous, of the parts' type.
        programs: number of programs. Each program takes one SM.

    Raises ValueError for another number of parts.
    """
    if not 2 <= len(parts) <= MAX_RANKS:
        raise ValueError(f"sum_parts takes 2 to {MAX_RANKS} parts, not {len(parts)}")
    if use_fused("sum of peers' parts", out):
        _launch_sum_parts(parts, out, programs, calls=out, flags=out, peers=out, rank=0, awaits=False)
        return
    total = parts[0].to(torch.promote_types(out.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)


def _launch_sum_parts(
    parts: Sequence[Tensor],
    out: Tensor,
    programs: int,
    calls: Tensor,
    flags: Tensor,
    peers: Tensor,
    rank: int,
    awaits: bool,
) -> None:
    padded = [*parts, *[parts[0]] * (MAX_RANKS - len(parts))]
    block_bytes = PARTS_BLOCK_BYTES // next_power_of_2(len(parts))  # of a part
    _sum_parts_kernel[(programs,)](
        *padded,
        out,
        calls,
        flags,
        peers,
        len(out),
        rank,
        AWAIT=awaits,
        RANKS=len(parts),
        WIDEN=out.dtype.itemsize < 4,
        PROGRAMS=programs,
        STAGES=PARTS_STAGES,
        BLOCK=block_bytes // out.dtype.itemsize,
        num_warps=8,
    )


class PeerSum:
    """Sum over the ranks of a group. All ranks must make the same calls in the same order, each on one stream.

    Args:
        rank: rank in the group.
        memory: flags of each rank as this process accesses them, int64 [ranks], zero before the first call.
        programs: number of programs of the kernel, the same on all ranks. Each program takes one SM.
    """

    def __init__(self, rank: int, memory: Sequence[Tensor], programs: int = 16) -> None:
        self._rank = rank
        self._memory = list(memory)
        self._programs = programs
        device = memory[rank].device
        self._calls = torch.zeros(programs, dtype=torch.int64, device=device)
        self._peers = torch.tensor([flags.data_ptr() for flags in memory], dtype=torch.int64, device=device)

    @staticmethod
    def count_memory_bytes(size: int) -> int:
        """Return the bytes of one rank's memory."""
        return size * WORD_BYTES

    def __call__(self, parts: Sequence[Tensor], out: Tensor, submit: Callable[[Callable[[], Any]], None]) -> None:
        """Write the sum of all ranks' parts to `out`, as `sum_parts` does, when the peers have written theirs.

        Args:
            parts: a summand of each rank, of float32 or 16 bits.
            submit: runs a function on the stream of the call.
        """
        submit(
            lambda: _launch_sum_parts(
                parts,
                out,
                self._programs,
                calls=self._calls,
                flags=self._memory[self._rank],
                peers=self._peers,
                rank=self._rank,
                awaits=True,
            )
        )
