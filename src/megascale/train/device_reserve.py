"""Memory of a GPU that torch's allocator requests before a waiting process begins its first attempt.

A process that joins a running job makes its engine and its first step in the pause of all ranks. Without cached memory
the first step alone requests memory 125 times from the driver, about 0.5 s in all (dev/log.md, 27 November 2026). The
process waits before it joins, so it requests the memory then. The allocator keeps freed memory and cuts later
allocations from it.

The memory has two blocks. The first one is for weights, gradients and optimizer state, which stay until the engine
ends. The second one is for activations, and is freed after the engine has its memory. Activations then lie in memory of
their own, which the allocator can return to the driver before CUDA graphs are captured.
"""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import torch

from megascale.config import Config, resolve_precision
from megascale.core.communicator_memory import estimate_prepared_groups
from megascale.core.copy_choice import explain_collective_gathers, explain_collective_reductions
from megascale.core.layout import lay_out
from megascale.core.memory import MemoryEstimate
from megascale.train.rank_info import exclude_from_peak, has_bfloat16, reset_peak

log = logging.getLogger("megascale.train")
# Bytes of a GPU that stay free for communicators, libraries and exchanges, which allocate outside of torch's allocator.
UNCACHED_BYTES = 4 << 30
_STATE_MARGIN = 1.01  # flat buffers are padded, which the estimate does not contain
_BLOCK_BYTES = 2 << 20  # the allocator requests multiples of this size
_SMALL_TENSOR_BYTES = 1 << 20  # largest tensor in the allocator's segments for small tensors, of 2 MiB each
_SMALL_TENSORS = 64
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_UNDIVIDED_SETTING = "max_split_size_mb"  # with it the allocator does not cut large blocks


class ReservedBytes(NamedTuple):
    """Sizes of the blocks.

    Attributes:
        state: for weights, gradients and optimizer state.
        activations: for activations, logits and workspace.
    """

    state: int
    activations: int


def estimate_reserve(config: Config, world: int, free_bytes: int) -> ReservedBytes:
    """Return the sizes of the blocks for a rank of any pipeline stage. A block that does not fit has size 0.

    Memory that torch's allocator does not serve in eager steps has no part: buffers of CUDA graphs, of exchanges
    between GPUs and of communicators.

    Args:
        config: the resolved configuration of the attempt, with its own data-parallel size.
        world: number of ranks of the attempt.
        free_bytes: free memory of the GPU.
    """
    layout = lay_out(config, world)
    has_copies = not explain_collective_gathers(config, layout.grid)
    has_copies |= not explain_collective_reductions(config, layout.grid)
    estimates = [layout.stage_memory(stage)[0] for stage in range(layout.grid.pipeline)]
    available_bytes = free_bytes - UNCACHED_BYTES - estimate_prepared_groups(config, layout.grid)
    if has_copies:
        state = 0  # weights or gradients are in memory of the exchange
    else:
        state = min(_count_state_bytes(estimate) for estimate in estimates)
    if state > available_bytes:
        return ReservedBytes(0, 0)
    activations = min(_round_up(estimate.activations + estimate.logits + estimate.workspace) for estimate in estimates)
    if state + activations > available_bytes:
        activations = 0
    return ReservedBytes(state, activations)


def _count_state_bytes(estimate: MemoryEstimate) -> int:
    """Return the bytes of a rank's state in torch's allocator."""
    state = estimate.weights + estimate.weight_copies + estimate.gradients + estimate.optimizer
    return _round_up(int(state * _STATE_MARGIN))


def _count_activation_bytes(estimate: MemoryEstimate) -> int:
    """Return the bytes that a rank's eager step needs in addition to its state."""
    return _round_up(estimate.activations + estimate.logits + estimate.workspace)


def _round_up(size: int) -> int:
    """Return the next multiple of a block's granularity."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


class DeviceReserve:
    """Memory that torch's allocator has requested for a process that waits.

    Args:
        sizes: sizes of the blocks. The block for state is free at once.

    Attributes:
        sizes: sizes of the blocks that were allocated; 0 for others.
    """

    def __init__(self, sizes: ReservedBytes, device: torch.device) -> None:
        state = torch.empty(sizes.state, dtype=torch.uint8, device=device)
        self._activations: torch.Tensor | None = torch.empty(sizes.activations, dtype=torch.uint8, device=device)
        _cache_small_segments(device)
        del state
        self.sizes = sizes
        self._device = device

    def release_activations(self) -> None:
        """Free the block for activations, after the allocation of the state. Peaks of memory count from then on."""
        self._activations = None
        if self._device.type == "cuda":
            reset_peak(self._device)


def reserve_memory(config: Config, world: int, device: torch.device) -> DeviceReserve | None:
    """Let torch's allocator request the memory of a rank's first attempt. Errors are only logged.

    Args:
        config, world: as for `estimate_reserve`.

    Returns:
        The reserve, or None on a CPU, with an allocator that does not cut blocks, or without enough memory.
    """
    if device.type != "cuda" or not _divides_blocks():
        return None
    try:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        resolved = resolve_precision(config, has_bfloat16(device))
        sizes = estimate_reserve(resolved, world, free_bytes)
        if not any(sizes):
            return None
        return DeviceReserve(sizes, device)
    except Exception as error:  # the first attempt requests the memory itself
        log.warning("memory of the GPU was not reserved: %s", str(error) or repr(error))
    torch.cuda.empty_cache()  # after the handler: the trace of the error holds the first block
    return None


def cache_activations(config: Config, world: int, device: torch.device) -> bool:
    """Let torch's allocator request memory for eager steps, and return whether it did.

    A rank that replays CUDA graphs has returned this memory, and the first steps of its next attempt are eager.

    Args:
        config, world: as for `estimate_reserve`.
    """
    if device.type != "cuda" or not _divides_blocks():
        return False
    layout = lay_out(config, world)
    size = min(_count_activation_bytes(layout.stage_memory(stage)[0]) for stage in range(layout.grid.pipeline))
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if size + UNCACHED_BYTES > free_bytes:
        return False
    try:
        # The allocator keeps the memory of this tensor. No step has used it yet, so it is not part of the run's peak.
        with exclude_from_peak(device):
            torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # the next attempt requests the memory itself
        log.warning("memory for eager steps was not requested: %s", error)
        return False
    return True


def cache_first_step(config: Config, world: int, device: torch.device) -> bool:
    """Let torch's allocator request the memory of the first step of a new engine, and return whether it did.

    A process that replaces a lost rank waits for its state after it has allocated it.

    Args:
        config, world: as for `estimate_reserve`.
    """
    if not cache_activations(config, world, device):
        return False
    with exclude_from_peak(device):
        _cache_small_segments(device)
    return True


def _cache_small_segments(device: torch.device) -> None:
    """Let torch's allocator request segments for small tensors."""
    small_tensors = [torch.empty(_SMALL_TENSOR_BYTES, dtype=torch.uint8, device=device) for _ in range(_SMALL_TENSORS)]
    del small_tensors  # all exist at the same time, so that no two have the same memory


def describe_reserve(reserve: DeviceReserve | None) -> str:
    """Return the sizes of the blocks as text. A process that waits has no log yet."""
    if reserve is None:
        return "no memory of a GPU is reserved"
    sizes = reserve.sizes
    return f"reserved {sizes.state / 2**30:.1f} GiB for state and {sizes.activations / 2**30:.1f} GiB for activations"


def _divides_blocks() -> bool:
    """Return whether torch's own allocator is in use and cuts blocks of any size."""
    settings = ",".join(os.environ.get(variable, "") for variable in _ALLOCATOR_VARIABLES)
    return torch.cuda.memory.get_allocator_backend() == "native" and _UNDIVIDED_SETTING not in settings


def count_cached_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that torch's allocator keeps and no tensor uses."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
