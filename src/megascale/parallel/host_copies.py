"""Copies between a device and host memory on streams of their own, and page-locked host memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.errors import TrainingError


class InlineCopies:
    """Copies on a CPU, which have ended when the method returns. Base class of `CudaCopies`.

    Events are None. `fetch` copies from the host to the device, and `store` copies from the device to the host.
    """

    @staticmethod
    def for_device(device: torch.device) -> InlineCopies:
        return CudaCopies(device) if device.type == "cuda" else InlineCopies()

    def record(self) -> Any:
        """Return an event at the end of the compute work that was submitted so far."""

    def fetch(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Any) -> Any:
        """Copy from the host after the event `after`. Return the event at the end of the copy."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def store(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        """Copy to the host after the compute work submitted so far. Return the event at the end of the copy."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def wait(self, event: Any) -> None:
        """Let later compute work wait for the event of a copy."""

    def synchronize(self) -> None:
        """Wait on the host until all stores have ended."""

    def allocate(self, like: Tensor, device: torch.device) -> Tensor:
        """Return device memory of the shape and type of `like`, allocated on the compute stream."""
        return torch.empty(like.shape, dtype=like.dtype, device=device)


class CudaCopies(InlineCopies):
    """Copies on two streams, one for each direction of the bus, so that both directions are used at once."""

    def __init__(self, device: torch.device) -> None:
        self._fetches = torch.cuda.Stream(device)
        self._stores = torch.cuda.Stream(device)

    def record(self) -> torch.cuda.Event:
        return torch.cuda.current_stream().record_event()

    def fetch(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Any) -> torch.cuda.Event:
        if after is not None:
            self._fetches.wait_event(after)
        with torch.cuda.stream(self._fetches):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return self._fetches.record_event()

    def store(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.cuda.Event:
        self._stores.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stores):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return self._stores.record_event()

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream().wait_event(event)

    def synchronize(self) -> None:
        self._stores.synchronize()


class PageLockError(TrainingError):
    """Host memory cannot be page-locked."""


def page_lock(memory: Tensor, device: torch.device) -> None:
    """Page-lock host memory if the device is a GPU. The lock ends when the last tensor that uses the memory is gone.

    This saves memory: torch's allocator of page-locked memory rounds sizes up to powers of two. Raises PageLockError.
    """
    if device.type != "cuda" or not memory.numel():
        return
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if code != runtime.cudaError.success:
        raise PageLockError(f"cudaHostRegister of {memory.nbytes / 2**30:.1f} GiB failed with {code}")
    # Attach the unlocking to the storage, because views of the memory may outlive the tensor.
    unlock = weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, memory.data_ptr())
    unlock.atexit = False  # the kernel unlocks faster at the end of the process
