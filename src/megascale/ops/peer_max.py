"""The maximum of one value over the GPUs of a host that can access each other's memory, computed by one small kernel.

Each rank writes one word of eight bytes into the memory of each peer: the index of the call and the rank's value. It
then reads the peers' words in its own memory until all have the index of this call. The kernel counts calls in device
memory, so that CUDA graphs can replay it.

Each pair of ranks uses two words in turn, so call n + 2 overwrites the word of call n. Before that, the writer has read
its peer's word of call n + 1, and the peer has written this word after reading call n. No unread word is therefore
overwritten.

A peer that has died writes nothing. Another stream of the waiting rank then writes RELEASED into that rank's words,
which ends the kernel with NaN (parallel/peer_watch.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.ops.dispatch import jit, tl

WORD_BYTES = 8
RELEASED = -1  # A word that ends a wait. Its lower half without the sign bit is NaN as float32.


@jit
def _peer_max_kernel(value_ptr, call_ptr, words_ptr, peers_ptr, rank, SIZE: tl.constexpr):
    """Replace the bits of a value by the maximum over SIZE ranks.

    words_ptr: this rank's words [2, ranks], written by peers. peers_ptr: addresses of the words of all ranks.
    """
    # 30 bits, so that a word is never negative. The count starts again at 0.
    call = (tl.load(call_ptr) + 1) & 0x3FFFFFFF
    tl.store(call_ptr, call)
    max_bits = tl.load(value_ptr)
    first_word = (call % 2) * SIZE
    word = (call.to(tl.int64) << 32) | max_bits.to(tl.int64)
    for peer in tl.static_range(SIZE):
        if peer != rank:
            peer_words = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(peer_words + first_word + rank, word, sem="relaxed", scope="sys")
    for peer in tl.static_range(SIZE):
        if peer != rank:
            # An atomic addition of 0 reads the word that a peer may write meanwhile.
            received = tl.atomic_add(words_ptr + first_word + peer, 0, sem="relaxed", scope="sys")
            while ((received >> 32) != call) & (received != -1):  # RELEASED
                received = tl.atomic_add(words_ptr + first_word + peer, 0, sem="relaxed", scope="sys")
            max_bits = tl.maximum(max_bits, (received & 0x7FFFFFFF).to(tl.int32))
    tl.store(value_ptr, max_bits)


class PeerMax:
    """Maximum over the ranks of a group. All ranks must make the same calls in the same order, each on one stream.

    Args:
        memory: memory of each rank as this process accesses it, int64 [2 x ranks], zero before the first call.
    """

    def __init__(self, rank: int, memory: Sequence[Tensor]) -> None:
        self._rank = rank
        self._memory = list(memory)
        device = memory[rank].device
        self._call = torch.zeros(1, dtype=torch.int32, device=device)
        self._peers = torch.tensor([buffer.data_ptr() for buffer in memory], dtype=torch.int64, device=device)

    @staticmethod
    def count_memory_bytes(size: int) -> int:
        """Return the bytes of one rank's memory."""
        return 2 * size * WORD_BYTES

    def __call__(self, x: Tensor) -> Tensor:
        """Replace x, one float32 that is not negative, by the maximum over ranks, or NaN if one rank has NaN.

        Raises ValueError for a tensor of another size or type.
        """
        if x.numel() != 1 or x.dtype != torch.float32:
            raise ValueError(f"PeerMax takes one float32 number, not {list(x.shape)} of {x.dtype}")
        # Maxima of the bits as integers, because maxima of floats would lose NaN.
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
