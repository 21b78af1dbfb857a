"""Layer inputs in host memory, from the forward of a micro-batch until its backward recomputes the layers.

Copies to and from the host run on streams of their own, overlapped with the GEMMs of the layers. Backward needs the
inputs in reverse order, and each input is fetched one layer ahead. The last input of a chunk stays on the device,
because the backward of the chunk begins with this layer.

At most `DEVICE_INPUTS` inputs are on the device because they are being copied. The host submits work far ahead of the
device, so it cannot wait until copies have ended. Instead, a tensor is released when the compute stream has been made
to wait for its copy. The memory was allocated on the compute stream, so the allocator may give it to later work of this
stream at once, which runs after the wait. `record_stream` would hold the memory until the host notices the end of the
copy.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.core.memory import OFFLOADED_DEVICE_INPUTS as DEVICE_INPUTS
from megascale.errors import TrainingError
from megascale.parallel.host_copies import InlineCopies, PageLockError, page_lock


class InputCopies:
    """Copies layer inputs of one device to host memory and back. All micro-batches reuse the host memory.

    Args:
        copies: streams of the copies; default: those of the device.
    """

    def __init__(self, device: torch.device, copies: InlineCopies | None = None) -> None:
        self._device = device
        self._copies = InlineCopies.for_device(device) if copies is None else copies
        # (event, input) of each store whose end the compute stream has not been made to wait for.
        self._pending_stores: deque[tuple[Any, Tensor]] = deque()
        self._free_memory: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}  # host memory by shape and type

    def store(self, x: Tensor) -> Tensor:
        """Start to copy `x` to the host, and return the host memory."""
        self._release(DEVICE_INPUTS - 1)
        x = x.detach().contiguous()
        stored = self._take_host_memory(x)
        self._pending_stores.append((self._copies.store([stored], [x]), x))
        return stored

    def fetch(self, stored: Tensor) -> tuple[Any, Tensor]:
        """Start to copy an input back to the device. Return the event at the end of the copy, and the input.

        Compute work that was submitted before may still use the new input's memory, so the copy waits for this work.
        """
        self._release(0)
        x = self._copies.allocate(stored, self._device)
        return self._copies.fetch([x], [stored], self._copies.record()), x

    def finish_fetch(self, event: Any, stored: Tensor) -> None:
        """Let later compute work wait for a fetch, and let later stores reuse the host memory.

        A store waits for the compute work that was submitted before it, and therefore for the fetch.
        """
        self._copies.wait(event)
        self.release_host_memory(stored)

    def release_host_memory(self, stored: Tensor) -> None:
        """Let later stores reuse host memory. They run after an earlier store into the same memory."""
        self._free_memory[stored.shape, stored.dtype].append(stored)

    def _release(self, limit: int) -> None:
        """Release the inputs of the oldest stores until at most `limit` are on the device."""
        while len(self._pending_stores) > limit:
            event, _ = self._pending_stores.popleft()
            self._copies.wait(event)

    def _take_host_memory(self, x: Tensor) -> Tensor:
        """Return free host memory of the shape and type of `x`, allocated if there is none."""
        free = self._free_memory.setdefault((x.shape, x.dtype), [])
        if free:
            return free.pop()
        memory = torch.zeros(x.shape, dtype=x.dtype)
        try:
            page_lock(memory, self._device)
        except PageLockError as error:
            raise TrainingError(
                f"parallel.offload_activations=true: {error}; raise the limit (ulimit -l), free host memory, or set "
                "--parallel.offload_activations=false"
            ) from error
        return memory


class _Fetch(NamedTuple):
    """A copy of an input back to the device.

    Attributes:
        event: the end of the copy.
        stored: host memory of the input.
        x: the input on the device, complete after the event.
    """

    event: Any
    stored: Tensor
    x: Tensor


class InputStack:
    """Inputs of the layers of one micro-batch in one chunk, in the order of the layers.

    A stack that is dropped before its backward has ended, with a failed step, returns its memory.

    Args:
        copies: copies of the device, which all stacks share.
    """

    def __init__(self, copies: InputCopies) -> None:
        self._copies = copies
        self._stored: list[Tensor | None] = []  # host memory, None once fetched
        self._fetches: dict[int, _Fetch] = {}  # inputs that were not taken yet, by index

    def __del__(self) -> None:
        for fetch in self._fetches.values():
            self._copies.finish_fetch(fetch.event, fetch.stored)
        for host_memory in self._stored:
            if host_memory is not None:
                self._copies.release_host_memory(host_memory)

    def store(self, x: Tensor) -> int:
        """Start to copy `x` to the host, and return its index in the stack."""
        self._stored.append(self._copies.store(x))
        return len(self._stored) - 1

    def take(self, index: int) -> Tensor:
        """Return an input on the device, and start to fetch the previous one.

        Raises TrainingError if the input was taken before.
        """
        self.prefetch(index)
        if index not in self._fetches:
            raise TrainingError(f"the input of layer {index} of a micro-batch is needed twice; it was released")
        fetch = self._fetches.pop(index)
        self._copies.finish_fetch(fetch.event, fetch.stored)
        self.prefetch(index - 1)
        return fetch.x

    def prefetch(self, index: int) -> None:
        """Start to copy an input back to the device. Do nothing if the copy has started, or for a negative index."""
        if index < 0:
            return
        stored, self._stored[index] = self._stored[index], None
        if stored is not None:
            event, x = self._copies.fetch(stored)
            self._fetches[index] = _Fetch(event, stored, x)

    def prefetch_last(self) -> None:
        """Start to copy the last stored input back. Call it when the backward of the layer after it begins."""
        self.prefetch(len(self._stored) - 1)


class OffloadedInput:
    """The input of one layer: the original tensor in forward, and a fetched copy for the recomputation in backward."""

    def __init__(self, x: Tensor, stack: InputStack) -> None:
        self._x: Tensor | None = x
        self._stack = stack
        self._index = 0
        self._needs_gradient = x.requires_grad

    def read(self) -> Tensor:
        """Return the input and start to store it. The second call, in backward, returns the fetched copy."""
        if self._x is None:
            return self._stack.take(self._index).requires_grad_(self._needs_gradient)
        x, self._x = self._x, None
        self._index = self._stack.store(x)
        return x


class LastInput:
    """The input of a chunk's last layer, which stays on the device."""

    def __init__(self, x: Tensor, stack: InputStack) -> None:
        self._x = x
        self._stack = stack
        self._was_read = False

    def read(self) -> Tensor:
        """Return the input. The second call, in backward, also starts to fetch the input of the previous layer."""
        if self._was_read:
            self._stack.prefetch_last()
        self._was_read = True
        return self._x
