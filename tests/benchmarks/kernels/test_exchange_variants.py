"""Variants of the exchange give equal bits in every order of the device's queues, and end when a peer dies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kernels.exchange import main
from benchmarks.kernels.exchange_tables import fit_line
from benchmarks.kernels.exchange_variants import VARIANTS, VariantExchange, copy_by_kernel
from megascale.errors import ConfigError
from megascale.parallel import exchange as module
from megascale.parallel.exchange import Exchange
from megascale.parallel.exchange_buffers import count_buffer_bytes, count_lent_bytes
from megascale.parallel.exchange_streams import PeerCopy
from tests.parallel.test_exchange import (
    PARTS,
    SHAPE,
    Device,
    DeviceSum,
    end_waits_of_survivor,
    play_parts,
)

NAMES = st.sampled_from(sorted(VARIANTS))
ORDERS = st.lists(st.integers(0, 1), min_size=2, max_size=6)
PART_BYTES = 8 * SHAPE[0] * SHAPE[1]


def make_variants(size: int, name: str) -> tuple[list[Device], list[Exchange]]:
    """Return ranks with an exchange of a variant."""
    memory = [torch.zeros(count_buffer_bytes(size, PART_BYTES), dtype=torch.uint8) for _ in range(size)]
    lent_memory = [torch.zeros(count_lent_bytes(size, PART_BYTES), dtype=torch.uint8) for _ in range(size)]
    flags: dict[tuple[int, ...], int] = {}
    devices = [Device(rank, flags) for rank in range(size)]
    exchanges: list[Exchange] = []
    for rank, device in enumerate(devices):
        exchange = VariantExchange(rank, size, memory, PART_BYTES, device, lent_memory=lent_memory)
        exchange.select(VARIANTS[name])
        exchange.peer_sum = DeviceSum(device, size)  # type: ignore[assignment]
        exchanges.append(exchange)
    return devices, exchanges


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 4), PARTS, ORDERS, st.integers(0, 1 << 40), NAMES)
def test_every_variant_is_right_in_every_order_of_queues(
    size: int, parts: list[tuple[list[str], bool]], order: list[int], seed: int, name: str
) -> None:
    for result, expected_values in play_parts(size, parts, order, 0, seed, make=make_variants, name=name):
        torch.testing.assert_close(result, expected_values)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_variant_gives_the_same_bits(name: str) -> None:
    program = ["gather", "scatter", "all to all", "scatter", "gather"]
    parts = [(program, True), (program, False)]
    results = [play_parts(4, parts, [0, 1, 0], 0, seed=3, make=make_variants, name=other) for other in ("auto", name)]
    for (result, _), (other_result, _) in zip(*results, strict=True):
        assert torch.equal(result, other_result)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 4), PARTS, ORDERS, st.integers(0, 1 << 40), NAMES)
def test_waits_of_every_variant_end_after_the_death_of_the_peers(
    size: int, parts: list[tuple[list[str], bool]], order: list[int], seed: int, name: str
) -> None:
    end_waits_of_survivor(*make_variants(size, name), parts, order, seed)


@pytest.mark.parametrize("op", ["gather", "scatter", "all to all"])
def test_pushes_need_two_slots(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """With one slot, a push overwrites a result that its owner still reads."""
    monkeypatch.setattr(module, "LENT_SLOTS", 1)
    right = 0
    for seed in range(60):
        pairs = play_parts(3, [([op] * 6, True)], [0], 0, seed, make=make_variants, name="push-together")
        right += all(torch.allclose(*pair) for pair in pairs)
    assert right < 60


def test_the_copy_kernel_refuses_what_it_cannot_copy() -> None:
    copies = [PeerCopy(peer, torch.zeros(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32)) for peer in range(2)]
    with pytest.raises(ValueError, match="whole words of eight bytes"):
        copy_by_kernel(copies, programs=8)


def test_a_line_has_its_fixed_time_and_its_slope() -> None:
    assert fit_line([(10.0, 45.0), (20.0, 70.0), (40.0, 120.0)]) == pytest.approx((20.0, 2.5))


def test_an_unknown_variant_is_an_error() -> None:

    with pytest.raises(ConfigError, match="--variant=fast is unknown; known are: all, auto"):
        main(gpus=0, deaths=False, variant=["fast"])
