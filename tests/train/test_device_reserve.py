"""Memory of a GPU that a waiting process requests before its first attempt."""

from __future__ import annotations

import weakref

import pytest
import torch

from megascale import config
from megascale.core.communicator_memory import estimate_prepared_groups
from megascale.core.layout import lay_out
from megascale.train import device_reserve, rank_info
from megascale.train.device_reserve import UNCACHED_BYTES, DeviceReserve, ReservedBytes, estimate_reserve
from megascale.train.engine import Engine

SIZES = ["model.layers=4", "model.hidden=256", "model.heads=4", "model.sequence_length=128", "model.vocab_size=1024"]
SETTINGS = SIZES + ["train.micro_batch=1", "train.global_batch=4", "train.precision=bfloat16"]
PREPARED = ["resilience.continue_replicas=true", "checkpoint.background=true", "checkpoint.memory_interval=1"]
PREPARED += ["checkpoint.replicas=true", "rendezvous.prepared_groups=true"]
PLENTY = 80 << 30


def resolve(settings: list[str], world: int) -> config.Config:
    """Return a configuration with a data-parallel size."""
    loaded = config.load(None, SETTINGS + settings)
    parallel = loaded.parallel.model_copy(update={"data": world // loaded.parallel.model_ranks})
    return loaded.model_copy(update={"parallel": parallel})


@pytest.mark.parametrize("settings", [[], ["parallel.zero=2"], ["parallel.zero=3"], ["optimizer.name=muon"]])
def test_the_block_for_state_holds_the_engine_of_one_rank(settings: list[str]) -> None:
    resolved = resolve(settings, world=1)
    engine = Engine(lay_out(resolved, 1), None, torch.device("cpu"))
    state_bytes = 0
    for buffer in engine.buffers:
        for tensor in (buffer.params, buffer.shard_params, buffer.shard_grads, buffer.grads):
            state_bytes += tensor.untyped_storage().nbytes()
    for shard_state in engine.optimizer.states:
        state_bytes += shard_state.master.nbytes
        for part in shard_state.parts:
            state_bytes += sum(tensor.nbytes for tensor in part.state.values())
    reserved = estimate_reserve(resolved, 1, PLENTY).state
    assert state_bytes <= reserved <= 1.1 * state_bytes + (4 << 20)


def test_a_rank_of_more_replicas_reserves_less_for_its_shards() -> None:
    sizes = [estimate_reserve(resolve([], world), world, PLENTY) for world in (1, 2, 4)]
    assert sizes[0].state > sizes[1].state > sizes[2].state
    assert sizes[0].activations == sizes[2].activations > 0


def test_communicators_and_libraries_keep_memory() -> None:
    resolved = resolve(PREPARED, world=4)
    sizes = estimate_reserve(resolved, 4, PLENTY)
    prepared_bytes = estimate_prepared_groups(resolved, lay_out(resolved, 4).grid)
    assert prepared_bytes > 0
    least = UNCACHED_BYTES + prepared_bytes + sizes.state
    assert estimate_reserve(resolved, 4, least + sizes.activations) == sizes
    assert estimate_reserve(resolved, 4, least + sizes.activations - 1) == ReservedBytes(sizes.state, 0)
    assert estimate_reserve(resolved, 4, least) == ReservedBytes(sizes.state, 0)
    assert estimate_reserve(resolved, 4, least - 1) == ReservedBytes(0, 0)


def test_a_stage_reserves_no_more_than_the_smallest_one() -> None:
    resolved = resolve(["parallel.pipeline=2"], world=2)
    layout = lay_out(resolved, 2)
    states = []
    for stage in range(2):
        memory, _ = layout.stage_memory(stage)
        states.append(memory.weights + memory.gradients + memory.optimizer)
    reserved = estimate_reserve(resolved, 2, PLENTY).state
    assert min(states) <= reserved <= 1.02 * min(states) + (2 << 20)


def test_state_in_memory_of_an_exchange_is_not_reserved() -> None:
    resolved = resolve(["parallel.zero=3", "overlap.gathers=copies"], world=4)
    assert estimate_reserve(resolved, 4, PLENTY) == ReservedBytes(
        0, estimate_reserve(resolve(["parallel.zero=3"], world=4), 4, PLENTY).activations
    )


def test_activations_stay_allocated_until_they_are_released() -> None:
    reserve = DeviceReserve(ReservedBytes(1 << 20, 3 << 20), torch.device("cpu"))
    assert reserve._activations is not None
    assert reserve._activations.nbytes == 3 << 20
    reserve.release_activations()
    assert reserve._activations is None


def test_a_process_without_a_gpu_reserves_nothing() -> None:
    assert device_reserve.reserve_memory(resolve([], 1), 1, torch.device("cpu")) is None


def test_the_first_block_is_returned_if_the_second_one_does_not_fit(monkeypatch) -> None:
    """The trace of the error holds the first block, so that the cache is emptied after the error's handler."""
    blocks: list[weakref.ref[torch.Tensor]] = []
    is_held: list[bool] = []

    def allocate(size: int, **_: object) -> torch.Tensor:
        if blocks:
            raise torch.OutOfMemoryError("no memory")
        block = torch.zeros(1)
        blocks.append(weakref.ref(block))
        return block

    monkeypatch.setattr(device_reserve, "_divides_blocks", lambda: True)
    monkeypatch.setattr(device_reserve, "has_bfloat16", lambda device: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (PLENTY, PLENTY))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: is_held.append(blocks[0]() is not None))
    monkeypatch.setattr(torch, "empty", allocate)
    assert device_reserve.reserve_memory(resolve([], 4), 4, torch.device("cuda", 0)) is None
    assert is_held == [False]


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_blocks_that_the_allocator_does_not_cut_are_not_reserved(variable, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert device_reserve._divides_blocks()
    monkeypatch.setenv(variable, "expandable_segments:True")
    assert device_reserve._divides_blocks()
    monkeypatch.setenv(variable, "max_split_size_mb:128,expandable_segments:True")
    assert not device_reserve._divides_blocks()


@pytest.mark.parametrize(("spare_bytes", "is_requested"), [(0, True), (-1, False)])
def test_a_rank_with_graphs_requests_memory_for_eager_steps(spare_bytes, is_requested, monkeypatch) -> None:
    resolved = resolve([], world=4)
    activations = estimate_reserve(resolved, 4, PLENTY).activations
    requests: list[int] = []
    monkeypatch.setattr(device_reserve, "_divides_blocks", lambda: True)
    free_bytes = UNCACHED_BYTES + activations + spare_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, PLENTY))
    monkeypatch.setattr(torch, "empty", lambda size, **_: requests.append(size))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    assert device_reserve.cache_activations(resolved, 4, torch.device("cuda", 0)) == is_requested
    assert requests == [activations] * is_requested


def test_a_new_engine_requests_memory_for_its_first_step(monkeypatch) -> None:
    resolved = resolve([], world=4)
    activations = estimate_reserve(resolved, 4, PLENTY).activations
    requests: list[int] = []
    resets: list[torch.device] = []
    monkeypatch.setattr(rank_info, "_earlier_peaks", {})
    monkeypatch.setattr(device_reserve, "_divides_blocks", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (PLENTY, PLENTY))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(torch, "empty", lambda size, **_: requests.append(size))
    device = torch.device("cuda", 0)
    assert device_reserve.cache_first_step(resolved, 4, device)
    assert requests[0] == activations
    assert requests[1:] == [device_reserve._SMALL_TENSOR_BYTES] * device_reserve._SMALL_TENSORS
    assert resets == [device, device]  # neither request counts as a peak of training
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (activations, PLENTY))
    assert not device_reserve.cache_first_step(resolved, 4, device)
    assert not device_reserve.cache_first_step(resolved, 4, torch.device("cpu"))
    assert len(resets) == 2


class CountedMemory:
    """Counts of an allocator, as those of torch.cuda."""

    def __init__(self) -> None:
        self.allocated = 0
        self.peak = 0

    def allocate(self, size: int, **_: object) -> None:
        """Allocate memory and free it again."""
        self.peak = max(self.peak, self.allocated + size)

    def reset_peak(self, device: torch.device) -> None:
        self.peak = self.allocated


def test_memory_that_is_cached_for_the_next_attempt_is_no_peak_of_the_run(monkeypatch) -> None:
    device = torch.device("cuda", 0)
    counts = CountedMemory()
    monkeypatch.setattr(rank_info, "_earlier_peaks", {})
    monkeypatch.setattr(device_reserve, "_divides_blocks", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (PLENTY, PLENTY))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: counts.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", counts.reset_peak)
    monkeypatch.setattr(torch, "empty", counts.allocate)
    counts.allocated = counts.peak = 1 << 20
    counts.allocate(1 << 20)  # of a step
    assert rank_info.memory_gib(device) == 2 / 1024
    for _ in range(2):
        assert device_reserve.cache_activations(resolve([], 4), 4, device)
        assert rank_info.memory_gib(device) == 2 / 1024
    counts.allocate(3 << 30)  # of a later step
    assert rank_info.memory_gib(device) == pytest.approx(3, abs=1e-3)
    assert device_reserve.cache_activations(resolve([], 4), 4, device)
    assert rank_info.memory_gib(device) == pytest.approx(3, abs=1e-3)
    rank_info.reset_peak(device)
    assert rank_info.memory_gib(device) == 1 / 1024


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_that_is_cached_on_a_gpu_is_no_peak_of_the_run() -> None:
    device = torch.device("cuda", 0)
    peak = rank_info.memory_gib(device)
    assert device_reserve.cache_activations(resolve([], 1), 1, device)
    assert torch.cuda.memory_reserved(device) > 0
    assert rank_info.memory_gib(device) == peak
