"""The maximum of one number over GPUs of a host that access each other's memory: one small kernel, no copy, no flag.

Every rank writes its number and the number of the call, as one word of eight bytes, to each peer. It reads the peers'
words in its own memory until they carry that call's number. Each peer has two words, used in turn: it writes call
n + 2 after it has read this rank's word of call n + 1, which this rank writes after it has read call n. The call is
counted in device memory, so that a CUDA graph can replay it.

A peer that has died writes nothing. Another stream of this rank then writes RELEASED into its own words, which ends
the kernel with NaN (parallel/peer_watch.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.ops.dispatch import jit, tl

WORD = 8  # bytes
RELEASED = -1  # a word that ends a wait; as float32 its lower half without the sign is NaN


@jit
def _peer_max_kernel(value_ptr, call_ptr, own_ptr, peers_ptr, rank, SIZE: tl.constexpr):
    call = (tl.load(call_ptr) + 1) & 0x3FFFFFFF
    tl.store(call_ptr, call)
    largest = tl.load(value_ptr)
    turn = (call % 2) * SIZE
    word = (call.to(tl.int64) << 32) | largest.to(tl.int64)
    for peer in tl.static_range(SIZE):
        if peer != rank:
            peer_words = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(peer_words + turn + rank, word, sem="relaxed", scope="sys")
    for peer in tl.static_range(SIZE):
        if peer != rank:
            received = tl.atomic_add(own_ptr + turn + peer, 0, sem="relaxed", scope="sys")
            while ((received >> 32) != call) & (received != -1):  # RELEASED
                received = tl.atomic_add(own_ptr + turn + peer, 0, sem="relaxed", scope="sys")
            largest = tl.maximum(largest, (received & 0x7FFFFFFF).to(tl.int32))
    tl.store(value_ptr, largest)


class PeerMax:
    """One rank's end of the exchange. All ranks call it equally often, in the same order, each on one stream.

    Args:
        rank: rank in the group.
        memory: memory of each rank as seen from here, 2 x size words of eight bytes, int64, zero at first.
    """

    def __init__(self, rank: int, memory: Sequence[Tensor]) -> None:
        self._rank = rank
        self._memory = list(memory)
        device = memory[rank].device
        self._call = torch.zeros(1, dtype=torch.int32, device=device)
        self._peers = torch.tensor([buffer.data_ptr() for buffer in memory], dtype=torch.int64, device=device)

    @staticmethod
    def bytes_needed(size: int) -> int:
        """Return the bytes of one rank's memory."""
        return 2 * size * WORD

    def __call__(self, x: Tensor) -> Tensor:
        """Replace x, one float32 that is not negative, by the maximum over ranks; NaN if one rank has NaN."""
        if x.numel() != 1 or x.dtype != torch.float32:
            raise ValueError(f"PeerMax takes one float32 number, not {list(x.shape)} of {x.dtype}")
        # The integer view, because float32 maxima would lose NaN.
        _peer_max_kernel[(1,)](
            x.view(torch.int32),
            self._call,
            self._memory[self._rank],
            self._peers,
            self._rank,
            SIZE=len(self._memory),
            num_warps=1,
        )
        return x
