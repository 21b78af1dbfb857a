"""Layer inputs in host memory, from the forward of a micro-batch until its backward recomputes the layers.

Copies to and from the host run on a stream of their own, under the GEMMs of the layers. Backward needs the inputs in
reverse order: taking one starts the copy of the one before it. The last input stays on the device, because backward
begins with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale.errors import TrainingError


class InputStack:
    """Inputs of the layers of one micro-batch in one chunk, in the order of the layers.

    Args:
        streams: see `CopyStreams`; shared by all stacks of a device.
    """

    def __init__(self, streams: CopyStreams) -> None:
        self._streams = streams
        self._stored: list[Any] = []  # copies in host memory, None once fetched
        self._fetched: dict[int, Any] = {}

    def store(self, x: Tensor) -> int:
        """Start to copy `x` to the host, and return its number."""
        self._stored.append(self._streams.copy_to_host(x))
        return len(self._stored) - 1

    def take(self, number: int) -> Tensor:
        """Return an input on the device, and start to fetch the one before it. Raises TrainingError if it was taken."""
        self._fetch(number)
        if number not in self._fetched:
            raise TrainingError(f"the input of layer {number} of a micro-batch is needed twice; it was released")
        if number > 0:
            self._fetch(number - 1)
        return self._streams.finish_fetch(self._fetched.pop(number))

    def _fetch(self, number: int) -> None:
        """Start to copy an input back, unless it has been started."""
        stored, self._stored[number] = self._stored[number], None
        if stored is not None:
            self._fetched[number] = self._streams.copy_to_device(stored)


class CopyStreams:
    """Copies between a device and its host. On a CPU they are copies in memory, for tests."""

    @staticmethod
    def of(device: torch.device) -> CopyStreams:
        """Return the streams of a device."""
        if device.type == "cuda":
            return CudaCopyStreams(device)
        return CopyStreams()

    def copy_to_host(self, x: Tensor) -> Any:
        """Start to copy `x`, whose memory is free for later work once the copy has ended; return the copy."""
        return x.detach().clone()

    def copy_to_device(self, stored: Any) -> Any:
        """Start to copy back what `copy_to_host` returned."""
        return stored.clone()

    def finish_fetch(self, fetched: Any) -> Tensor:
        """Let the current stream wait for what `copy_to_device` returned."""
        tensor: Tensor = fetched
        return tensor


class CudaCopyStreams(CopyStreams):
    """One CUDA stream per direction, so that both directions of the link are used at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host = torch.cuda.Stream(device)
        self._to_device = torch.cuda.Stream(device)

    def copy_to_host(self, x: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        x = x.detach()
        stored = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_host):
            stored.copy_(x, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        x.record_stream(self._to_host)
        return stored, copied

    def copy_to_device(self, stored: tuple[Tensor, torch.cuda.Event]) -> tuple[Tensor, torch.cuda.Event]:
        host, copied = stored
        with torch.cuda.stream(self._to_device):
            self._to_device.wait_event(copied)
            x = host.to(self._device, non_blocking=True)
            fetched = torch.cuda.Event()
            fetched.record()
        return x, fetched

    def finish_fetch(self, fetched: tuple[Tensor, torch.cuda.Event]) -> Tensor:
        x, event = fetched
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        x.record_stream(current)
        return x


class OffloadedInput:
    """The input of one layer: the tensor itself for the forward, and a fetched copy for the recomputation."""

    def __init__(self, x: Tensor, stack: InputStack) -> None:
        self._x: Tensor | None = x
        self._stack = stack
        self._number = 0
        self._needs_gradient = x.requires_grad

    def read(self) -> Tensor:
        """Return the input; the second call, in backward, returns the fetched copy."""
        if self._x is None:
            return self._stack.take(self._number).requires_grad_(self._needs_gradient)
        x, self._x = self._x, None
        self._number = self._stack.store(x)
        return x
