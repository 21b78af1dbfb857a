"""optimizer.offload: state in host memory gives the bits of state on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from megascale import config as configuration
from megascale.config import from_tree
from megascale.core.memory import count_offloaded_state_bytes
from megascale.errors import ConfigError, FitError
from megascale.model.transformer import Chunk
from megascale.optim import offload
from megascale.optim.offload import OffloadedAdamW
from megascale.optim.optimizer import ShardedOptimizer
from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.host_copies import InlineCopies
from megascale.parallel.parameters import initialise

MODEL = {"hidden": 16, "heads": 4, "layers": 2, "sequence_length": 8, "vocab_size": 21}


def make_optimizer(dtype: torch.dtype, offloads: bool) -> tuple[ShardedOptimizer, ParamAndGradBuffer]:
    config = from_tree({"model": MODEL, "optimizer": {"offload": offloads, "clip": 0.5}})
    module = Chunk(config.model, range(2), is_first=True, is_last=True, dtype=dtype)
    buffer = ParamAndGradBuffer(module, torch.device("cpu"), bucket_elements=1000)
    initialise(module, 1)
    return ShardedOptimizer(config.optimizer, [buffer]), buffer


class LateCopies(InlineCopies):
    """Copies that happen as late as a device may make them: a fetch when it is awaited, a store when all must end
    or when another copy waits for it."""

    def __init__(self) -> None:
        self._open: list[Callable[[], None]] = []

    def fetch(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], after: Any) -> Any:
        def run() -> None:
            if after is not None:
                after()
            InlineCopies.fetch(self, targets, sources, None)

        return self._once(run)

    def store(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Any:
        for target in targets:
            target.fill_(float("nan"))  # nothing may read it before the store
        # The slot may be overwritten from now on by a fetch that does not wait.
        return self._once(lambda: super(LateCopies, self).store(targets, sources))

    def wait(self, event: Any) -> None:
        event()

    def synchronize(self) -> None:
        for run in list(self._open):
            run()

    def _once(self, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if run in self._open:
                self._open.remove(run)
                work()

        self._open.append(run)
        return run


def train(
    dtype: torch.dtype, offloads: bool, copies: InlineCopies | None = None
) -> tuple[list[torch.Tensor], list[int]]:
    """Return norms, weights in use and state of three steps, one of them skipped, and the order of updated shards."""
    optimizer, buffer = make_optimizer(dtype, offloads)
    assert isinstance(optimizer.rule, OffloadedAdamW) == offloads
    if copies is not None:
        optimizer.rule._copies = copies
    order: list[int] = []
    numbers = {id(shard): number for number, shard in enumerate(buffer.shards)}
    results = []
    for step in range(1, 4):
        buffer.grads.copy_(torch.randn(buffer.grads.shape, generator=torch.Generator().manual_seed(step)))
        if step == 2:
            buffer.grads[0] = float("inf")
        order.clear()
        norm, _ = optimizer.step(1e-2, step, on_shard_updated=lambda shard: order.append(numbers[id(shard)]))
        results += [norm, buffer.params.clone()]
    results += [row[-1].clone() for row in optimizer.logical_tensors()]
    return results, order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [100, 2**25], ids=["many pieces", "a piece per part"])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_state_in_host_memory_gives_the_same_bits(dtype, elements, late, monkeypatch):
    monkeypatch.setattr(offload, "OFFLOAD_ELEMENTS", elements)
    expected, order = train(dtype, offloads=False)
    results, offloaded_order = train(dtype, offloads=True, copies=LateCopies() if late else None)
    assert order == offloaded_order
    assert len(expected) == len(results)
    for a, b in zip(expected, results, strict=True):
        assert torch.equal(a, b) or (a.isinf() & b.isinf()).all()


def test_a_slot_that_is_fetched_before_it_is_stored_is_found(monkeypatch):
    """The comparison can fail."""
    monkeypatch.setattr(offload, "OFFLOAD_ELEMENTS", 100)
    expected, _ = train(torch.bfloat16, offloads=False)
    fetch = LateCopies.fetch
    with mock.patch.object(
        LateCopies, "fetch", lambda self, targets, sources, after: fetch(self, targets, sources, None)
    ):
        results, _ = train(torch.bfloat16, offloads=True, copies=LateCopies())
    assert not all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))


def test_master_weights_are_not_the_weights_in_use():
    optimizer, buffer = make_optimizer(torch.float32, offloads=True)
    addresses = range(buffer.params.data_ptr(), buffer.params.data_ptr() + buffer.params.nbytes)
    for state in optimizer.states:
        assert state.master.data_ptr() not in addresses
        assert torch.equal(state.master, state.shard.params)
    host_bytes = sum(state.master.nbytes + sum(t.nbytes for t in state.state_tensors()) for state in optimizer.states)
    elements = sum(state.master.numel() for state in optimizer.states)
    assert host_bytes == count_offloaded_state_bytes(elements, 1, "float32")


def test_a_host_without_the_memory_is_refused():
    with pytest.raises(FitError, match=r"optimizer\.offload=true needs 3725290\.3 GiB of host memory per rank"):
        offload.HostMemory(10**15, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_other_optimizers_are_refused(name):
    with pytest.raises(ConfigError, match=f"optimizer.offload=true with optimizer.name={name}.*--optimizer.name=adamw"):
        configuration.load(None, ["model.preset=gpt2-124m", f"optimizer.name={name}", "optimizer.offload=true"])
