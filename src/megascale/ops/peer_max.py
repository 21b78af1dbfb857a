"""The largest of one number over the GPUs of a host that read each other's memory: one small kernel, no copy, no flag.

Every rank writes its number with the number of the call, one word of eight bytes, to each peer and reads the peers'
words here until they carry that number. Two words for each peer in turn: a peer writes call n + 2 after it has read
this rank's word of call n + 1, which this rank writes after it has read call n. The number of the call is counted in
the device's memory, so that a CUDA graph can replay it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.ops.dispatch import jit, tl

WORD = 8  # bytes


@jit
def _peer_max_kernel(most_ptr, call_ptr, own_ptr, peers_ptr, rank, SIZE: tl.constexpr):
    call = (tl.load(call_ptr) + 1) & 0x3FFFFFFF
    tl.store(call_ptr, call)
    most = tl.load(most_ptr)
    turn = (call % 2) * SIZE
    word = (call.to(tl.int64) << 32) | most.to(tl.int64)
    for peer in tl.static_range(SIZE):
        if peer != rank:
            words = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(words + turn + rank, word, sem="relaxed", scope="sys")
    for peer in tl.static_range(SIZE):
        if peer != rank:
            found = tl.atomic_add(own_ptr + turn + peer, 0, sem="relaxed", scope="sys")
            while (found >> 32) != call:
                found = tl.atomic_add(own_ptr + turn + peer, 0, sem="relaxed", scope="sys")
            most = tl.maximum(most, (found & 0x7FFFFFFF).to(tl.int32))
    tl.store(most_ptr, most)


class PeerMax:
    """One rank's end of it. All ranks call it equally often, in the same order, each on one stream.

    Args:
        rank: in the group.
        words: each rank's memory, 2 x size words of eight bytes, int64, zero at first; the others' as seen from here.
    """

    def __init__(self, rank: int, words: Sequence[Tensor]) -> None:
        self._rank, self._words = rank, list(words)
        device = words[rank].device
        self._call = torch.zeros(1, dtype=torch.int32, device=device)
        self._peers = torch.tensor([one.data_ptr() for one in words], dtype=torch.int64, device=device)

    @staticmethod
    def bytes_needed(size: int) -> int:
        """Of one rank's memory."""
        return 2 * size * WORD

    def __call__(self, x: Tensor) -> Tensor:
        """x, float32 of one element, not negative or NaN: becomes the largest of all ranks' x, NaN if one is."""
        if x.numel() != 1 or x.dtype != torch.float32:
            raise ValueError(f"one float32 is wanted, not {list(x.shape)} of {x.dtype}")
        own = self._words[self._rank]
        # The integer view: float32 maxima would lose NaN.
        _peer_max_kernel[(1,)](
            x.view(torch.int32), self._call, own, self._peers, self._rank, SIZE=len(self._words), num_warps=1
        )
        return x
