"""The meeting at the start: who differs, is missing or comes twice is named on every rank, at once where possible."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.errors import ConfigError, TrainingError
from megascale.rendezvous.agree import agree, format_ranks

FACTS = {"torch": "2.13", "model.layers": "4", "lr.peak": "0.1"}


def meet(worlds: dict[int, int], facts: dict[int, dict[str, str]], timeout: float, stores) -> dict[int, object]:
    """Let ranks (rank -> its idea of the world's size) meet; what each got: None or the error."""
    result: dict[int, object] = {}

    def connect(rank: int) -> None:
        try:
            agree(stores(rank), rank, worlds[rank], facts.get(rank, FACTS), timeout)
            result[rank] = None
        except Exception as error:
            result[rank] = error

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(result) == len(worlds), "a rank hangs"
    return result


@pytest.fixture(params=["tcp", "redis"])
def stores(request):
    """A store for each rank of a job that is one of both kinds."""
    if request.param == "tcp":
        limit = timedelta(seconds=60)
        server = dist.TCPStore("127.0.0.1", 0, None, True, timeout=limit, wait_for_workers=False)
        port = server.port
        yield (
            lambda rank: (
                server if rank == 0 else dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
            )
        )
        return
    server = request.getfixturevalue("redis_server")()
    opened = request.getfixturevalue("opened")
    first = opened(server, seconds=20)
    yield lambda rank: first if rank == 0 else opened(server, owner=False, seconds=20)


def test_all_alike(stores):
    assert meet(dict.fromkeys(range(8), 8), {}, 10, stores) == dict.fromkeys(range(8))


def test_one_rank_with_another_setting_is_named_on_every_rank(stores):
    began = time.monotonic()
    odd = FACTS | {"lr.peak": "0.2"}
    result = meet(dict.fromkeys(range(5), 5), {3: odd}, 10, stores)
    for error in result.values():
        assert isinstance(error, ConfigError)
        assert "lr.peak is 0.2 on rank 3 but 0.1 on ranks 0-2, 4" in str(error)
    assert time.monotonic() - began < 8


def test_rank_zero_is_the_odd_one_and_the_first_differing_key_is_named(stores):
    odd = {"torch": "2.11", "model.layers": "8", "lr.peak": "0.1"}
    result = meet(dict.fromkeys(range(4), 4), {0: odd}, 10, stores)
    for error in result.values():
        assert "torch is 2.11 on rank 0 but 2.13 on ranks 1-3" in str(error)
        assert "layers" not in str(error)


def test_several_kinds_and_a_key_that_one_does_not_know(stores):
    new = FACTS | {"lr.new": "1"}
    result = meet(dict.fromkeys(range(6), 6), {1: new, 2: new, 5: FACTS | {"torch": "3"}}, 10, stores)
    for error in result.values():
        assert "lr.new is 1 on ranks 1-2 but not set on ranks 0, 3-4" in str(error)
        assert "torch is 3 on rank 5 but 2.13 on ranks 0, 3-4" in str(error)


def test_a_missing_rank_is_named_within_the_time_out(stores):
    began = time.monotonic()
    result = meet({0: 6, 1: 6, 3: 6}, {}, 1, stores)
    for error in result.values():
        assert isinstance(error, TrainingError)
        assert "ranks 2, 4-5 of 6 did not come within rendezvous.timeout=1 seconds (3 did)" in str(error)
    assert time.monotonic() - began < 10


def test_without_rank_zero_the_others_name_it(stores):
    stores(0)
    result = meet({1: 3, 2: 3}, {}, 0.5, stores)
    for error in result.values():
        assert isinstance(error, TrainingError)
        assert "rank 0 of 3 did not come" in str(error)


@pytest.mark.parametrize("worlds", [{0: 4, 1: 4, 2: 2, 3: 4}, {0: 2, 1: 4, 2: 4, 3: 4}, {0: 4, 1: 4, 2: 4, 3: 3}])
def test_another_world_size_is_named_at_once(stores, worlds):
    began = time.monotonic()
    result = meet(worlds, {}, 20, stores)
    for error in result.values():
        assert isinstance(error, ConfigError)
    assert any("WORLD_SIZE is" in str(e) or "outside a world" in str(e) for e in result.values())
    assert time.monotonic() - began < 10


def test_a_world_size_that_explains_missing_ranks(stores):
    result = meet({0: 8, 1: 2}, {}, 1, stores)
    for error in result.values():
        assert isinstance(error, ConfigError)
        assert "WORLD_SIZE is 2 on rank 1 but 8 on rank 0" in str(error)


def test_two_processes_with_one_rank(stores):
    store = stores(0)
    result: list[BaseException] = []

    def connect(rank: int, mine) -> None:
        try:
            agree(mine, rank, 3, FACTS, 20)
        except Exception as error:
            result.append(error)

    local = [store, stores(1), stores(1)]
    threads = [threading.Thread(target=connect, args=(rank, s)) for rank, s in zip((0, 1, 1), local, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert len(result) == 3
    for error in result:
        assert isinstance(error, ConfigError)
        assert "two processes claim rank 1" in str(error)


@given(st.dictionaries(st.integers(0, 5), st.sampled_from(["a", "b", "c"]), max_size=6))
@settings(max_examples=20, deadline=None)
def test_any_mix_of_settings_fails_everywhere_or_nowhere(odd):
    store = dist.HashStore()
    facts = {rank: FACTS | {"lr.peak": value} for rank, value in odd.items()}
    result = meet(dict.fromkeys(range(6), 6), facts, 10, lambda rank: store)
    alike = len({facts.get(rank, FACTS)["lr.peak"] for rank in range(6)}) == 1
    assert all((error is None) == alike for error in result.values())


def test_ranges():
    assert format_ranks([3, 1, 2, 7, 9, 10]) == "1-3, 7, 9-10"
    assert format_ranks(range(0, 60, 2), limit=3) == "0, 2, 4 and 27 more ranges"
    assert format_ranks([]) == ""
