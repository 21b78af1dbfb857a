"""Offloaded inputs of layers: order of copies and number of inputs on a device that runs its queues in any order."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.core.memory import OFFLOADED_DEVICE_INPUTS
from megascale.errors import TrainingError
from megascale.parallel.host_copies import InlineCopies
from megascale.parallel.offload import InputCopies, InputStack, LastInput, OffloadedInput

SHAPE = (4, 2)
CPU = torch.device("cpu")


class Event:
    """The end of the work that a queue had when the event was recorded."""

    def __init__(self) -> None:
        self.has_ended = False


class Device(InlineCopies):
    """A device with a compute queue and a queue for each direction of copies, which advance in a random order.

    Memory that loses its tensor is given to other compute work at once, as by PyTorch's allocator: that work writes
    NaN. Memory that is allocated was given back by earlier compute work, which writes NaN before.

    Args:
        seed: of the order.
        drops_waits: let compute work wait for no copy, which the checks must find.
    """

    def __init__(self, seed: int, drops_waits: bool = False) -> None:
        self._random = random.Random(seed)
        self._queues: dict[str, list[Callable[[], bool]]] = {"compute": [], "store": [], "fetch": []}
        self._drops_waits = drops_waits
        self.on_device = 0
        self.largest_on_device = 0
        self.host_buffers: set[int] = set()
        self.wrong: list[int] = []

    def record(self) -> Event:
        return self._record("compute")

    def store(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Event:
        [target], [source] = targets, sources
        self.host_buffers.add(target.data_ptr())
        self._count(source)
        self._await("store", self.record())
        self._copy("store", target, source)
        return self._record("store")

    def fetch(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Any) -> Event:
        [target], [source] = targets, sources
        self._await("fetch", after)
        self._copy("fetch", target, source)
        return self._record("fetch")

    def wait(self, event: Event) -> None:
        if not self._drops_waits:
            self._await("compute", event)

    def allocate(self, like: Tensor, device: torch.device) -> Tensor:
        tensor = torch.zeros(like.shape, dtype=like.dtype)
        self._poison(tensor.detach())
        self._count(tensor)
        return tensor

    def produce(self, value: int) -> Tensor:
        """Return a tensor that compute work fills with a value."""
        tensor = torch.zeros(SHAPE)
        memory = tensor.detach()
        self._submit("compute", lambda: memory.fill_(value))
        return tensor

    def check(self, tensor: Tensor, value: int) -> None:
        """Let compute work read a tensor."""
        memory = tensor.detach()

        def read() -> None:
            if not memory.eq(value).all():
                self.wrong.append(value)

        self._submit("compute", read)

    def advance(self, steps: int | None = None) -> None:
        """Run `steps` entries of random queues, or all."""
        while steps is None or steps > 0:
            ready = [queue for queue in self._queues.values() if queue]
            if not ready:
                return
            queue = self._random.choice(ready)
            if queue[0]():
                queue.pop(0)
            if steps is not None:
                steps -= 1

    def _submit(self, queue: str, work: Callable[[], Any]) -> None:
        def run() -> bool:
            work()
            return True

        self._queues[queue].append(run)
        self.advance(self._random.randrange(3))

    def _copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        target, source = target.detach(), source.detach()
        self._submit(queue, lambda: target.copy_(source))

    def _record(self, queue: str) -> Event:
        event = Event()
        self._submit(queue, lambda: setattr(event, "has_ended", True))
        return event

    def _await(self, queue: str, event: Event) -> None:
        self._queues[queue].append(lambda: event.has_ended)

    def _poison(self, memory: Tensor) -> None:
        self._submit("compute", lambda: memory.fill_(float("nan")))

    def _count(self, tensor: Tensor) -> None:
        """Count a tensor on the device until it is deleted; its memory then goes to other compute work."""
        self.on_device += 1
        self.largest_on_device = max(self.largest_on_device, self.on_device)
        weakref.finalize(tensor, self._release, tensor.detach())

    def _release(self, memory: Tensor) -> None:
        self.on_device -= 1
        self._poison(memory)


Reader = OffloadedInput | LastInput


def run_forward(device: Device, copies: InputCopies, layers: int, first_value: int) -> list[Reader]:
    """Run the layers of a micro-batch forward, and return what reads their inputs in backward."""
    stack = InputStack(copies)
    readers: list[Reader] = []
    for layer in range(layers):
        x = device.produce(first_value + layer)
        kind = OffloadedInput if layer + 1 < layers else LastInput
        readers.append(kind(x, stack))
        device.check(readers[-1].read(), first_value + layer)
    return readers


def run_backward(device: Device, readers: list[Reader], first_value: int) -> None:
    while readers:
        reader = readers.pop()
        device.check(reader.read(), first_value + len(readers))


def run_micro_batches(device: Device, layers: int, in_flight: int, microbatches: int) -> None:
    """Run micro-batches of which `in_flight` are between forward and backward."""
    copies = InputCopies(CPU, device)
    waiting: list[tuple[list[Reader], int]] = []
    for i in range(microbatches):
        first_value = 100 * (i + 1)
        waiting.append((run_forward(device, copies, layers, first_value), first_value))
        if len(waiting) == in_flight:
            run_backward(device, *waiting.pop(0))
    while waiting:
        run_backward(device, *waiting.pop(0))
    device.advance()


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("layers", [1, 2, 3, 7])
def test_inputs_survive_any_order_of_copies_and_two_are_on_the_device(layers: int, in_flight: int) -> None:
    for seed in range(20):
        device = Device(seed)
        run_micro_batches(device, layers, in_flight, microbatches=4)
        assert not device.wrong
        assert device.largest_on_device <= OFFLOADED_DEVICE_INPUTS
        assert device.largest_on_device >= min(layers - 1, OFFLOADED_DEVICE_INPUTS)
        assert device.on_device == 0
        assert len(device.host_buffers) == (layers - 1) * in_flight


@pytest.mark.parametrize("layers_back", [0, 1, 3])
def test_a_dropped_micro_batch_returns_its_memory(layers_back: int) -> None:
    """After a failed step, its copies may still be under way while the next step reuses the memory."""
    for seed in range(20):
        device = Device(seed)
        copies = InputCopies(CPU, device)
        for first_value in (100, 200, 300):
            readers = run_forward(device, copies, 6, first_value)
            for number in range(6 - layers_back, 6)[::-1]:
                device.check(readers.pop().read(), first_value + number)
            del readers
        readers = run_forward(device, copies, 6, 400)
        run_backward(device, readers, 400)
        device.advance()
        assert not device.wrong
        assert len(device.host_buffers) == 5
        assert device.largest_on_device <= OFFLOADED_DEVICE_INPUTS


def test_a_missing_wait_is_found() -> None:
    devices = [Device(seed, drops_waits=True) for seed in range(20)]
    for device in devices:
        run_micro_batches(device, 7, 2, microbatches=4)
    assert any(device.wrong for device in devices)


def test_an_input_is_fetched_one_layer_ahead() -> None:
    device = Device(0)
    readers = run_forward(device, InputCopies(CPU, device), 4, 100)
    device.advance()
    readers.pop().read()
    device.advance()
    assert device.on_device == 1  # the input of the third layer, before its backward begins
    third = readers.pop().read()
    device.advance()
    assert device.on_device == 2
    device.check(third, 102)
    device.advance()
    assert not device.wrong


def test_an_input_is_taken_once() -> None:
    device = Device(0)
    stack = InputStack(InputCopies(CPU, device))
    number = stack.store(device.produce(1))
    stack.take(number)
    with pytest.raises(TrainingError, match="needed twice"):
        stack.take(number)
