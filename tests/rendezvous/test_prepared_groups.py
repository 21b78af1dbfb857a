"""Ranks make the groups of the next attempt while they train, use them on all ranks or on none, and may drop them."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from megascale import config, torch_private
from megascale.core.group_names import make_attempt_suffix
from megascale.rendezvous.groups import Groups, leave, shutdown
from megascale.rendezvous.prepared_groups import GroupPreparation, GroupTarget
from megascale.rendezvous.start_job import initialise
from tests.rendezvous.conftest import free_port

LIMIT = 30.0  # seconds, far above what a loaded machine needs
PREPARED = ["resilience.continue_replicas=true", "checkpoint.background=true", "checkpoint.memory_interval=1"]
PREPARED += ["checkpoint.replicas=true", "rendezvous.prepared_groups=true"]
CPU = torch.device("cpu")


def start(rank: int, world: int, overrides: list[str], preparation: GroupPreparation | None = None) -> Groups:
    """Start an attempt; its number is 1 without prepared groups, else 2."""
    attempt = 1 if preparation is None else 2
    return initialise(
        config.load(None, PREPARED + overrides),
        rank=rank,
        world=world,
        local_rank=rank,
        device="cpu",
        name_suffix=make_attempt_suffix(attempt),
        preparation=preparation,
    )


def prepare(rank: int, world: int, overrides: list[str], *, store: dist.Store | None) -> GroupPreparation:
    """Begin to make the groups of attempt 2. A process without a store joins in that attempt."""
    target = GroupTarget(config.load(None, PREPARED + overrides), rank, world, CPU, make_attempt_suffix(2))
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    preparation = GroupPreparation(target, address, 7, is_joining=store is None, server_store=store)
    preparation.start()
    return preparation


def sum_ranks(rank: int, group: Any = None) -> float:
    """Return the sum of 2 to the power of each rank."""
    total = torch.tensor([2.0**rank])
    dist.all_reduce(total, group=group)
    return float(total)


def reach_boundary(rank: int, preparation: GroupPreparation, ready_world: int) -> None:
    """Train until the groups of `ready_world` ranks are connected, as the step's sum says it."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        ready = torch.tensor([float(preparation.is_connected)])
        dist.all_reduce(ready)
        if ready == ready_world:
            return
    raise AssertionError(f"rank {rank}: the groups were not connected within {LIMIT} s")


def train_and_join(rank: int, present_world: int, world: int, *, overrides: list[str], port: int) -> dict[str, Any]:
    """Train attempt 1 on `present_world` ranks, prepare attempt 2 meanwhile, and use its groups."""
    torch.set_num_threads(1)
    if rank < present_world:
        first = start(rank, present_world, [])
        preparation = prepare(rank, world, overrides, store=first.root_store)
        reach_boundary(rank, preparation, present_world)
        assert preparation.warm_up(LIMIT)
        assert sum_ranks(rank) == 2**present_world - 1  # attempt 1 goes on
        earlier_groups = leave(first)
        shutdown(first, failed=True)
    else:
        preparation = prepare(rank, world, overrides, store=None)
        preparation.wait()
        earlier_groups = None
    backends = dict(preparation.backends)
    os.environ["MASTER_PORT"] = str(port)
    second = start(rank, world, overrides, preparation)
    observed: dict[str, Any] = {"report": second.report(), "failure": preparation.failure, "kinds": {}}
    observed["world"] = sum_ranks(rank)
    used = [backends["world"]["cpu"] is dist.group.WORLD._get_backend(CPU)] if backends else []
    for kind, group in second.by_kind.items():
        observed["kinds"][kind] = sum_ranks(rank, group)
        if backends:
            used += [group._get_backend(CPU) is backend["cpu"] for name, backend in backends.items() if kind in name]
    observed["used"] = used
    if earlier_groups is not None:
        earlier_groups.start_abort()
        earlier_groups.finish_abort()
    observed["after abort"] = sum_ranks(rank)
    shutdown(second)
    return observed


def join(rank: int, present_world: int, world: int, overrides: list[str], port: int) -> dict[str, Any]:
    return train_and_join(rank, present_world, world, overrides=overrides, port=port)


@pytest.mark.parametrize("overrides", [["parallel.zero=1"], ["parallel.tensor=2"], ["parallel.pipeline=2"]])
def test_groups_that_were_made_while_others_train_are_those_of_the_next_attempt(ranks, overrides):
    ranks.start(join, range(4), 2, 4, overrides, free_port())
    for rank, observed in ranks.results(4).items():
        assert observed["failure"] == ""
        assert "the groups were made during the attempt before (meet" in observed["report"]
        assert "warm" not in observed["report"].partition(";")[0]
        assert observed["world"] == observed["after abort"] == 0b1111
        assert set(observed["used"]) == {True}, rank
        if "parallel.tensor=2" in overrides:
            assert observed["kinds"]["tensor"] == (0b0011 if rank < 2 else 0b1100)
            assert observed["kinds"]["data_reduce"] == (0b0101 if rank % 2 == 0 else 0b1010)


def join_except_one(rank: int, present_world: int, world: int, port: int) -> dict[str, Any]:
    """As `join`, but rank 1 drops its complete groups before the next attempt."""
    torch.set_num_threads(1)
    if rank < present_world:
        first = start(rank, present_world, [])
        preparation = prepare(rank, world, [], store=first.root_store)
        reach_boundary(rank, preparation, present_world)
        assert preparation.warm_up(LIMIT)
        leave(first)
        shutdown(first, failed=True)
    else:
        preparation = prepare(rank, world, [], store=None)
        preparation.wait()
    if rank == 1:
        preparation.abandon("the test drops it")
    os.environ["MASTER_PORT"] = str(port)
    second = start(rank, world, [], preparation)
    observed = {"report": second.report(), "failure": preparation.failure, "sum": sum_ranks(rank)}
    shutdown(second)
    return observed


def test_no_rank_uses_prepared_groups_if_one_has_dropped_them(ranks):
    ranks.start(join_except_one, range(3), 2, 3, free_port())
    for rank, observed in ranks.results(3).items():
        expected = "the test drops it" if rank == 1 else "2 of 3 ranks have prepared their groups"
        assert observed["failure"] == expected
        assert "made during the attempt before" not in observed["report"]
        assert "warm world" in observed["report"]
        assert observed["sum"] == 0b111


@pytest.mark.parametrize("overrides", [["parallel.tensor=2"], ["parallel.data=4", "overlap.data=false"]])
def test_groups_for_another_layout_do_not_match(overrides):
    target = GroupTarget(config.load(None, PREPARED), 1, 4, CPU, "@2")
    arguments = {"device": CPU, "name_suffix": "@2"}
    assert target.matches(config.load(None, PREPARED), 1, 4, **arguments)
    assert not target.matches(config.load(None, PREPARED + overrides), 1, 4, **arguments)
    assert not target.matches(config.load(None, PREPARED), 2, 4, **arguments)
    assert not target.matches(config.load(None, PREPARED), 1, 3, **arguments)
    assert not target.matches(config.load(None, PREPARED), 1, 4, device=CPU, name_suffix="@3")


def die(*arguments: Any, **options: Any) -> NoReturn:
    """End this process."""
    os._exit(9)


def prepare_with_a_death(rank: int, moment: str, port: int) -> dict[str, Any]:
    """Prepare groups of three ranks on two that train. Rank 2, which joins, dies at a moment of the preparation."""
    torch.set_num_threads(1)
    if rank == 2:
        if moment == "connections":
            torch_private.make_gloo_backend = die
        else:
            GroupPreparation._make_first_calls = die
        prepare(rank, 3, [], store=None).wait()
        raise AssertionError("this rank must die")
    first = start(rank, 2, [])
    preparation = prepare(rank, 3, [], store=first.root_store)
    is_warm = True
    if moment == "first calls":
        reach_boundary(rank, preparation, 2)
        is_warm = preparation.warm_up(LIMIT)
        has_ended_alone = preparation.has_ended
    else:
        # The preparation's own connection may wait for the dead rank.
        dist.PrefixStore("prepared/7", first.root_store).wait(["present"])
        has_ended_alone = False
    assert sum_ranks(rank) == 0b11  # attempt 1 goes on
    preparation.abandon("the driver withdraws it")
    after_drop = [sum_ranks(rank) for _ in range(3)]
    leave(first)
    shutdown(first, failed=True)
    os.environ["MASTER_PORT"] = str(port)
    second = start(rank, 2, [], preparation)
    observed = {"is warm": is_warm and preparation.is_warm, "after drop": after_drop, "sum": sum_ranks(rank)}
    observed |= {"failure": preparation.failure, "alone": has_ended_alone}
    shutdown(second)
    return observed


@pytest.mark.parametrize("moment", ["connections", "first calls"])
def test_ranks_train_on_if_a_rank_dies_while_groups_are_prepared(ranks, moment):
    ranks.start(prepare_with_a_death, range(3), moment, free_port())
    for observed in ranks.results(2).values():
        assert isinstance(observed, dict), observed
        assert observed["after drop"] == [0b11] * 3
        assert observed["sum"] == 0b11
        assert not observed["is warm"]
        if moment == "first calls":  # the broken connection ends it before the driver withdraws it
            assert observed["alone"]
            assert observed["failure"] != "the driver withdraws it"


def drop_on_one_rank(rank: int, present_world: int, world: int) -> str:
    """Begin a preparation of which a further rank would be the last. Rank 1 drops it, and the others notice."""
    if rank >= present_world:
        preparation = prepare(rank, world, [], store=None)
        preparation.wait()
        assert preparation._store is not None
        preparation._store.set("noticed", "1")
        return preparation.failure
    first = start(rank, present_world, [])
    preparation = prepare(rank, world, [], store=first.root_store)
    store = dist.PrefixStore("prepared/7", first.root_store)
    if rank == 1:
        store.wait(["present/count"])
        preparation.abandon("its GPU has too little memory")
    preparation.wait()
    assert sum_ranks(rank) == 2**present_world - 1
    store.wait(["noticed"])  # the store ends with rank 0
    shutdown(first)
    return preparation.failure


def test_all_ranks_drop_groups_that_one_has_dropped(ranks):
    ranks.start(drop_on_one_rank, range(3), 2, 4)  # rank 3 never comes
    failures = ranks.results(3)
    assert failures[1] == "its GPU has too little memory"
    assert failures[0] == failures[2] == "rank 1: its GPU has too little memory"


def drop_at_once(rank: int, world: int) -> dict[str, Any]:
    """Begin a preparation whose last rank never comes, and drop it."""
    first = start(rank, world, [])
    preparation = prepare(rank, world + 1, [], store=first.root_store)
    begin = time.monotonic()
    preparation.abandon("the job is paused")
    preparation.wait()
    for thread in threading.enumerate():
        if thread.name == "megascale-groups":
            thread.join(LIMIT)
    observed = {"seconds": time.monotonic() - begin, "sum": sum_ranks(rank), "failure": preparation.failure}
    observed["threads"] = [thread.name for thread in threading.enumerate()]
    shutdown(first)
    return observed


def test_a_dropped_preparation_ends_its_thread(ranks):
    ranks.start(drop_at_once, range(2), 2)
    for observed in ranks.results(2).values():
        assert observed["sum"] == 0b11
        assert observed["failure"] == "the job is paused"
        assert observed["seconds"] < LIMIT
        assert "megascale-groups" not in observed["threads"]


def call_another_server(rank: int, world: int, server_port: int) -> dict[str, Any]:
    """Open a connection of another thread while gloo's backends are made, and drop the complete backends."""
    torch.set_num_threads(1)
    first = start(rank, world, [])
    make_backend = torch_private.make_gloo_backend
    opened: list[socket.socket] = []

    def make_backend_beside_a_connection(*arguments: Any) -> Any:
        opened.append(socket.create_connection(("127.0.0.1", server_port)))
        return make_backend(*arguments)

    torch_private.make_gloo_backend = make_backend_beside_a_connection
    preparation = prepare(rank, world, [], store=first.root_store)
    reach_boundary(rank, preparation, world)
    observed: dict[str, Any] = {"noted": len(preparation.sockets), "error": ""}
    preparation.abandon("the job is paused")
    for connection in opened:
        connection.sendall(b"x")
    try:
        preparation.backends["world"]["cpu"].allreduce([torch.ones(1)]).wait()
    except RuntimeError as error:
        observed["error"] = str(error)
    observed["sum"] = sum_ranks(rank)
    shutdown(first)
    return observed


def test_connections_of_other_threads_survive_the_drop_of_a_preparation(ranks):
    with socket.create_server(("127.0.0.1", 0)) as server:
        ranks.start(call_another_server, range(2), 2, server.getsockname()[1])
        observed_by_rank = ranks.results(2)
        server.settimeout(LIMIT)
        for _ in observed_by_rank:
            connection, _ = server.accept()
            assert connection.recv(1) == b"x"
    for observed in observed_by_rank.values():
        assert observed["noted"] > 0
        assert observed["error"]
        assert observed["sum"] == 0b11


def join_after_a_silent_drop(rank: int, port: int) -> dict[str, Any]:
    """Join two ranks that announce the boundary, and make no first call."""
    torch.set_num_threads(1)
    if rank == 2:
        preparation = prepare(rank, 3, [], store=None)
        preparation.wait(0.5)
        for thread in threading.enumerate():
            if thread.name == "megascale-groups":
                thread.join(LIMIT)
        ended = "megascale-groups" not in [thread.name for thread in threading.enumerate()]
        observed = {"failure": preparation.failure, "warm": preparation.is_warm, "ended": ended}
        assert preparation._store is not None
        preparation._store.set("noticed", "1")
        return observed
    is_released = threading.Event()
    GroupPreparation._make_first_calls = lambda self: is_released.wait()
    first = start(rank, 2, [])
    preparation = prepare(rank, 3, [], store=first.root_store)
    reach_boundary(rank, preparation, 2)
    store = dist.PrefixStore("prepared/7", first.root_store)
    if rank == 0:
        store.set("boundary", "1")
    store.wait(["noticed"])
    is_released.set()
    observed = {"sum": sum_ranks(rank)}
    shutdown(first)
    return observed


def test_a_joining_rank_has_a_limit_for_its_first_calls(ranks):
    ranks.start(join_after_a_silent_drop, range(3), free_port())
    observed = ranks.results(3)
    assert observed[2]["failure"] == "the first calls took longer than 0.5 s"
    assert not observed[2]["warm"]
    assert observed[2]["ended"]
    assert observed[0]["sum"] == observed[1]["sum"] == 0b11
