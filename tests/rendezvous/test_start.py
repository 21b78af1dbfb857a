"""Starts of real processes with gloo: the groups are right, wrong starts are told on every rank, nothing is left."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megascale import config, torch_private
from megascale.core.failure import find_errno
from megascale.errors import ConfigError, FitError, TrainingError
from megascale.rendezvous import start_job
from megascale.rendezvous.group_plan import list_group_axes
from megascale.rendezvous.groups import shutdown
from megascale.rendezvous.start_job import collect_shared_settings, initialise
from megascale.rendezvous.stores import StoreRequest, is_loopback, open_store, read_job_and_attempt
from tests.rendezvous.conftest import free_port, needs_redis


def start(rank: int, world: int, overrides: list[str]):
    return initialise(config.load(None, overrides), rank=rank, world=world, local_rank=rank, device="cpu")


def use_groups(rank: int, world: int, overrides: list[str], pause: str = "") -> dict[str, object]:
    """Start, use every group, leave; returns what each gave."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    groups = start(rank, world, overrides)
    observed: dict[str, object] = {"seconds": time.perf_counter() - began, "report": groups.report()}
    for kind, group in groups.by_kind.items():
        total = torch.tensor([2.0**rank])
        dist.all_reduce(total, group=group)
        observed[kind] = [r for r in range(world) if int(total.item()) >> r & 1]
    for direction in ("forward", "backward"):
        sender, receiver = (
            next((channel for (use, _), channel in groups.p2p.items() if use == f"{end}_{direction}"), None)
            for end in ("send", "recv")
        )
        work = []
        if sender is not None:
            work.append(dist.isend(torch.tensor([float(rank)]), sender.peer, group=sender.group))
        if receiver is not None:
            received = torch.zeros(1)
            work.append(dist.irecv(received, receiver.peer, group=receiver.group))
        for handle in work:
            handle.wait()
        observed[direction] = (
            None if sender is None else sender.peer,
            None if receiver is None else int(received.item()),
        )
    if pause:
        for step in range(200):
            dist.all_reduce(torch.ones(1))
            if rank == 0 and step == 50:
                open(pause, "w").close()
            time.sleep(0.01)
    shutdown(groups)
    return observed


@pytest.mark.parametrize(("optimizer", "is_warm"), [("adamw", False), ("lamb", True)])
def test_a_group_that_no_update_uses_is_connected_by_its_first_call(ranks, optimizer, is_warm):
    ranks.start(use_groups, range(2), 2, [f"optimizer.name={optimizer}"])
    for observed in ranks.results(2).values():
        assert observed["stage"] == [0, 1]
        assert ("warm stage" in observed["report"]) == is_warm
        assert "warm data_reduce" in observed["report"]


def connect_concurrently(rank: int, world: int, exchanges_state: bool) -> dict[str, object]:
    """Start with connections at the same time, and return the start-up line, a sum and the recorded calls."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    settings = config.load(None, ["rendezvous.concurrent_connections=true", "parallel.tensor=2"])
    groups = initialise(
        settings, rank=rank, world=world, local_rank=rank, device="cpu", exchanges_state=exchanges_state
    )
    total = torch.tensor([2.0**rank])
    dist.all_reduce(total, group=groups.by_kind["data_reduce"])
    records = json.loads(torch_private.dump_flight_recorder())["entries"]
    observed = {
        "report": groups.report(),
        "sum": int(total.item()),
        "calls": [record["profiling_name"] for record in records],
    }
    shutdown(groups)
    return observed


@pytest.mark.parametrize("exchanges_state", [True, False])
def test_all_ranks_connect_for_the_exchange_of_state_while_groups_are_made(ranks, exchanges_state):
    ranks.start(connect_concurrently, range(4), 4, exchanges_state)
    for rank, observed in ranks.results(4).items():
        assert observed["sum"] == (0b0101 if rank % 2 == 0 else 0b1010)
        assert "connections" in observed["report"]
        assert "warm world" not in observed["report"]
        assert "warm data_reduce" in observed["report"]
        assert any("all_to_all" in name for name in observed["calls"]) == exchanges_state


def record_warm_calls(rank: int, world: int, overrides: list[str]) -> list[str]:
    """Start, and return the names of the calls that warmed up the groups."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    groups = start(rank, world, overrides)
    records = json.loads(torch_private.dump_flight_recorder())["entries"]
    shutdown(groups)
    return [record["profiling_name"] for record in records]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_groups_of_sharded_state_are_warmed_by_the_collectives_of_a_step(ranks, zero):
    ranks.start(record_warm_calls, range(2), 2, [f"parallel.zero={zero}", "parallel.data=2"])
    for calls in ranks.results(2).values():
        # gloo reduces and scatters by an all-reduce. The last call is the one of all ranks.
        assert calls == (["gloo:all_gather"] if zero else ["gloo:all_reduce"]) + ["gloo:all_reduce"] * 2


def connect_and_die(rank: int, world: int) -> None:
    """Start with connections at the same time. Rank 1 ends while it connects."""
    if rank == 1:
        start_job._connect_default_group = lambda *arguments: os._exit(9)
    start(rank, world, ["rendezvous.concurrent_connections=true"])


def test_a_rank_that_ends_while_it_connects_is_noticed(ranks):
    ranks.start(connect_and_die, range(2), 2)
    error = ranks.results(1)[0]
    assert isinstance(error, TrainingError)
    assert "lost contact" in str(error)


LAYOUTS = [(2, 2, 2), (1, 3, 2), (1, 4, 1), (2, 1, 1), (1, 8, 2), (1, 1, 1)]  # tensor, pipeline, virtual stages


@pytest.mark.parametrize(
    ("store", "tensor", "pipeline", "virtual"),
    [("env", *layout) for layout in LAYOUTS]
    # The store carries addresses only: with Redis all kinds of groups, and a world of six.
    + [pytest.param("redis", *layout, marks=needs_redis) for layout in LAYOUTS[:2]],
)
def test_groups_of_real_processes_are_the_grids(ranks, store, tensor, pipeline, virtual, request):
    world = 6 if pipeline == 3 else 8
    overrides = [f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}", f"parallel.virtual_stages={virtual}"]
    server = request.getfixturevalue("redis_server")() if store == "redis" else None
    if server is not None:
        overrides.append(f"rendezvous.url={server.url}")
    ranks.start(use_groups, range(world), world, overrides)
    result = ranks.results(world)
    from megascale.core.grid import Grid
    from megascale.rendezvous.group_plan import find_replica_axis

    grid = Grid.from_world_size(world, tensor=tensor, pipeline=pipeline)
    for rank, observed in result.items():
        assert isinstance(observed, dict), observed
        at = grid.coordinate(rank)
        for kind, axes in list_group_axes().items():
            members = grid.group(axes, rank)
            if kind == "replica" and find_replica_axis(grid) is not None:
                members = []  # the group of the axis has the same ranks
            assert observed.get(kind) == (members if len(members) > 1 else None), kind
        ends = [grid.rank(at.move(pipeline=stage)) for stage in (0, pipeline - 1)]
        tied = pipeline > 1 and at.pipeline in (0, pipeline - 1)
        assert observed.get("embedding") == (ends if tied else None)
        for direction, step in (("forward", 1), ("backward", -1)):
            to, received = at.pipeline + step, at.pipeline - step
            ring = virtual > 1 and pipeline > 1

            def peer(stage: int) -> int | None:
                inside = 0 <= stage < pipeline
                return grid.rank(at.move(pipeline=stage % pipeline)) if inside or ring else None  # noqa: B023

            assert observed[direction] == (peer(to), peer(received)), direction
    if server is not None:
        assert server.keys() == []


def test_ranks_with_different_settings_all_fail(ranks):
    ranks.start(start, [0, 1], 3, ["lr.peak=0.1"])
    ranks.start(start, [2], 3, ["lr.peak=0.2"])
    for error in ranks.results(3).values():
        assert isinstance(error, ConfigError)
        assert "lr.peak is 0.2 on rank 2 but 0.1 on ranks 0-1" in str(error)


# Seconds in which two ranks of a busy machine meet, so that only the third one is missing.
MEETING = "rendezvous.timeout=4"


def test_a_rank_that_never_comes_is_named(ranks):
    ranks.start(start, [0, 2], 3, [MEETING])
    for error in ranks.results(2).values():
        assert isinstance(error, TrainingError)
        assert "rank 1 of 3 did not come" in str(error)


def test_without_rank_zero_there_is_no_store(ranks):
    ranks.start(start, [1], 2, ["rendezvous.timeout=1"])
    error = ranks.results(1)[1]
    assert isinstance(error, TrainingError)
    assert "could not reach the store of rank 0" in str(error)


@needs_redis
def test_redis_missing_ranks_are_named_and_keys_vanish(ranks, redis_server):
    server = redis_server()
    ranks.start(start, [0, 2], 3, [MEETING, f"rendezvous.url={server.url}"])
    for error in ranks.results(2).values():
        assert "rank 1 of 3 did not come" in str(error)
    assert all(server.ask("PTTL", key) <= 60_000 for key in server.keys())  # noqa: SIM118


@needs_redis
def test_redis_without_rank_zero(ranks, redis_server):
    ranks.start(start, [1], 2, ["rendezvous.timeout=1", f"rendezvous.url={redis_server().url}"])
    error = ranks.results(1)[1]
    assert isinstance(error, TrainingError)
    assert "rank 0 did not open job" in str(error)


@needs_redis
def test_redis_that_is_not_there(ranks):
    port = free_port()
    ranks.start(start, [0, 1], 2, ["rendezvous.timeout=1", f"rendezvous.url=redis://:secret@127.0.0.1:{port}"])
    for error in ranks.results(2).values():
        assert isinstance(error, TrainingError)
        assert f"127.0.0.1:{port}" in str(error)
        assert "secret" not in str(error)


@needs_redis
def test_redis_with_another_password(ranks, redis_server, monkeypatch):
    server = redis_server("--requirepass", "s3cret")
    location = f"127.0.0.1:{server.port}"
    ranks.start(start, range(2), 2, [f"rendezvous.url=redis://:guess@{location}"])
    for error in ranks.results(2).values():
        assert isinstance(error, ConfigError)
        assert "refuses the user or password" in str(error)
        assert "guess" not in str(error)
    monkeypatch.setenv("MEGASCALE_REDIS_PASSWORD", "s3cret")
    ranks.start(use_groups, range(2), 2, [f"rendezvous.url=redis://{location}"])
    assert all(isinstance(observed, dict) for observed in ranks.results(2).values())


@needs_redis
@pytest.mark.parametrize("memory", [(), ("--appendonly", "yes")])
def test_redis_restarted_during_the_start(ranks, redis_server, memory):
    """The server dies while seven of eight ranks wait for the last, with and without its memory."""
    server = redis_server(*memory)
    overrides = ["parallel.tensor=2", "parallel.pipeline=2", f"rendezvous.url={server.url}"]
    ranks.start(use_groups, range(7), 8, overrides)
    deadline = time.monotonic() + 30
    while b"blocked_clients:7" not in server.ask("INFO", "clients"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.restart()
    ranks.start(use_groups, [7], 8, overrides)
    result = ranks.results(8)
    assert all(isinstance(observed, dict) for observed in result.values()), result
    assert server.keys() == []


@needs_redis
@pytest.mark.parametrize("memory", [(), ("--appendonly", "yes")])
def test_redis_restarted_during_training(ranks, redis_server, tmp_path, memory):
    server = redis_server(*memory)
    flag = tmp_path / "training"
    ranks.start(use_groups, range(4), 4, [f"rendezvous.url={server.url}"], str(flag))
    deadline = time.monotonic() + 60
    while not flag.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.restart()
    result = ranks.results(4)
    assert all(isinstance(observed, dict) for observed in result.values()), result
    assert server.keys() == []


@needs_redis
def test_a_server_that_is_gone_at_the_end_does_not_spoil_the_run(ranks, redis_server, tmp_path):
    server = redis_server()
    flag = tmp_path / "training"
    ranks.start(use_groups, range(2), 2, [f"rendezvous.url={server.url}"], str(flag))
    deadline = time.monotonic() + 60
    while not flag.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.kill()
    result = ranks.results(2)
    assert all(isinstance(observed, dict) for observed in result.values()), result


@needs_redis
def test_redis_killed_at_any_moment_of_the_start(ranks, redis_server):
    """Restarted again and again without memory, a start still comes to its end."""
    server = redis_server()
    stop = threading.Event()

    def problem() -> None:
        for pause in (0.02, 0.05, 0.08, 0.11, 0.15, 0.2):
            if stop.wait(pause):
                return
            server.restart()

    overrides = ["parallel.tensor=2", "parallel.pipeline=2", f"rendezvous.url={server.url}"]
    thread = threading.Thread(target=problem)
    thread.start()
    ranks.start(use_groups, range(4), 4, overrides)
    try:
        result = ranks.results(4)
    finally:
        stop.set()
        thread.join()
    assert all(isinstance(observed, dict) for observed in result.values()), result


def die(rank: int, world: int, overrides: list[str]) -> None:
    """Start; rank 1 then ends without a word, the others wait for it."""
    groups = start(rank, world, overrides)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        shutdown(groups, failed=True)


@needs_redis
def test_a_second_attempt_after_a_crash(ranks, redis_server, monkeypatch):
    """A job dies; the next attempt starts at once, and what the first left is removed by it."""
    server = redis_server()
    overrides = [f"rendezvous.url={server.url}"]
    monkeypatch.setenv("MEGASCALE_JOB", "job")
    ranks.start(die, range(3), 3, overrides)
    assert all(isinstance(error, RuntimeError) for error in ranks.results(2).values())
    assert server.keys() != []
    assert all(server.ask("PTTL", key) <= 60_000 for key in server.keys())  # noqa: SIM118
    monkeypatch.setenv("MEGASCALE_ATTEMPT", "1")
    ranks.start(use_groups, range(3), 3, overrides)
    assert all(isinstance(observed, dict) for observed in ranks.results(3).values())
    assert server.keys() == []


@needs_redis
def test_the_same_attempt_started_again_after_a_crash(ranks, redis_server):
    """The attempt was not increased; the second start still does not take the first one's keys for its own."""
    server = redis_server()
    overrides = [f"rendezvous.url={server.url}"]
    ranks.start(die, range(3), 3, overrides)
    ranks.results(2)
    ranks.start(use_groups, [1, 2], 3, overrides)  # before rank 0, so that old keys are all there is
    time.sleep(0.3)
    ranks.start(use_groups, [0], 3, overrides)
    assert all(isinstance(observed, dict) for observed in ranks.results(3).values())
    assert server.keys() == []


def test_one_process_needs_no_address(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    groups = start(0, 1, [])
    assert groups.p2p == {}
    assert groups.by_kind == {}
    shutdown(groups)
    with pytest.raises(ConfigError, match="WORLD_SIZE=2 is set, but MASTER_ADDR and MASTER_PORT are not"):
        start(0, 2, [])


def make_default_group() -> None:
    store = dist.HashStore()
    start_job._make_default_group(store, 0, 1, device=torch.device("cuda"), group_timeout=1.0, preparation=None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the calls must fail before they make a group")
@pytest.mark.parametrize("make_group", [make_default_group, lambda: start_job.warm_up_nccl(torch.device("cuda"))])
def test_torchs_warning_of_serial_transfers_is_off_unless_the_environment_asks_for_it(make_group, monkeypatch) -> None:
    name = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "5000")  # restored, like the next one
    for earlier, expected in (("true", "true"), (None, "false")):
        monkeypatch.setenv(name, str(earlier))
        if earlier is None:
            monkeypatch.delenv(name)
        with pytest.raises((AttributeError, RuntimeError, ValueError)):
            make_group()
        assert os.environ[name] == expected


def test_an_interface_that_this_host_lacks_is_named(ranks, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "missing0")
    ranks.start(start, range(2), 2, [])
    errors = [error for error in ranks.results(2).values() if isinstance(error, ConfigError)]
    assert errors
    assert "names the network interface 'missing0', which this host lacks; it has lo" in str(errors[0])


def test_a_further_address_of_an_interface_is_accepted(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo:1,lo")
    start_job._check_interfaces()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,missing0:1")
    with pytest.raises(ConfigError, match="'missing0:1'"):
        start_job._check_interfaces()


def test_addresses_that_are_wrong(ranks, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "many")
    with pytest.raises(ConfigError, match="MASTER_PORT='many'"):
        start(0, 2, [])
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    import socket

    with (
        socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))),
        pytest.raises(ConfigError, match="choose a free port"),
    ):
        start(0, 2, [])
    monkeypatch.setenv("USE_LIBUV", "0")
    with pytest.raises(ConfigError, match="unset USE_LIBUV"):
        start(0, 2, [])
    with pytest.raises(ConfigError, match="unknown scheme"):
        start(0, 2, ["rendezvous.url=etcd://somewhere"])


def test_a_layout_that_does_not_divide(ranks):
    ranks.start(start, range(3), 3, ["parallel.tensor=2"])
    assert all(isinstance(error, FitError) for error in ranks.results(3).values())


@needs_redis
def test_a_layout_that_does_not_divide_leaves_nothing_for_long(ranks, redis_server):
    server = redis_server()
    ranks.start(start, range(3), 3, ["parallel.tensor=2", f"rendezvous.url={server.url}"])
    assert all(isinstance(error, FitError) for error in ranks.results(3).values())
    assert all(server.ask("PTTL", key) <= 60_000 for key in server.keys())  # noqa: SIM118


def test_the_store_listens_on_loopback_only(ranks):
    ranks.start(_listening, [0], 2, ["rendezvous.timeout=1"])
    assert ranks.results(1)[0] == {"0100007F"}


def _listening(rank: int, world: int, overrides: list[str]) -> set[str]:
    """Addresses (as in /proc) that this process listens on while it waits for the others."""
    port = f"{int(os.environ['MASTER_PORT']):04X}"
    result: set[str] = set()

    def look() -> None:
        while not result:
            for file in ("/proc/net/tcp", "/proc/net/tcp6"):
                for line in Path(file).read_text().splitlines()[1:]:
                    local, state = line.split()[1], line.split()[3]
                    if local.endswith(f":{port}") and state == "0A":
                        result.add(local.split(":")[0])

    thread = threading.Thread(target=look)
    thread.start()
    with pytest.raises(TrainingError):
        start(rank, world, overrides)
    thread.join()
    return result


def test_a_port_that_the_launcher_holds_cannot_be_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as stored:
        port = stored.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ConfigError, match="choose a free port") as used:
            open_store(StoreRequest(config.load().rendezvous, "run", 0, 2, 10.0))
        assert find_errno(used.value) == errno.EADDRINUSE
        monkeypatch.setenv("MEGASCALE_STORE_LISTENER", str(os.dup(stored.fileno())))
        store = open_store(StoreRequest(config.load().rendezvous, "run", 0, 2, 10.0))
        store.set("a", b"b")
        assert store.get("a") == b"b"


def test_a_store_that_other_machines_reach_is_told(monkeypatch, caplog):
    for host, report in (("127.0.0.1", 0), ("0.0.0.0", 1)):
        monkeypatch.setenv("MASTER_ADDR", host)
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        open_store(StoreRequest(config.load().rendezvous, "run", 0, 1, 10.0))
        assert len(caplog.records) == report
    assert "MASTER_ADDR=0.0.0.0" in caplog.text
    assert "rendezvous.url=rediss://" in caplog.text


def test_torchs_own_words_for_a_taken_port_are_known():
    """Outside loopback torch opens the listener itself."""
    with socket.create_server(("0.0.0.0", 0)) as stored:
        used = dist.DistNetworkError
        with pytest.raises(used) as error:
            dist.TCPStore("127.0.0.1", stored.getsockname()[1], 2, is_master=True, wait_for_workers=False)
    assert "EADDRINUSE" in str(error.value) or "address already in use" in str(error.value).lower()


def test_passwords_stay_out_of_sight():
    loaded = config.load(None, ["rendezvous.url=redis://me:s3cr%3At@host:6379/2"])
    assert loaded.rendezvous.url == "redis://me@host:6379/2"
    assert loaded.rendezvous.password.get_secret_value() == "s3cr:t"
    shown = f"{loaded!r} {loaded} {loaded.to_toml()} {collect_shared_settings(loaded)} {loaded.model_dump()}"
    assert "s3cr" not in shown
    assert "password" not in loaded.to_toml()
    assert config.load(None, ["rendezvous.url=redis://:pw@host"]).rendezvous.url == "redis://host"


def test_job_names(monkeypatch):
    for name in ("MEGASCALE_JOB", "MEGASCALE_ATTEMPT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "h")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert read_job_and_attempt("big") == ("big-@h:1", 0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")  # differs between nodes
    assert read_job_and_attempt("big")[1] == 0
    monkeypatch.setenv("MEGASCALE_JOB", "j")
    monkeypatch.setenv("MEGASCALE_ATTEMPT", "7")
    assert read_job_and_attempt("big") == ("j", 7)
    monkeypatch.setenv("MEGASCALE_ATTEMPT", "last")
    with pytest.raises(ConfigError, match="MEGASCALE_ATTEMPT='last'"):
        read_job_and_attempt("big")
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "node7")] == [True] * 3 + [False] * 2


@needs_redis
def test_torchs_own_init_method(ranks, redis_server):
    server = redis_server()
    ranks.start(_by_url, range(3), 3, f"{server.url}/1?job=mine&attempt=2")
    assert ranks.results(3) == dict.fromkeys(range(3), 3.0)
    keys = [key for key in server.ask("INFO", "keyspace").decode().splitlines() if key.startswith("db")]
    assert [key[:3] for key in keys] == ["db1"]


def _by_url(rank: int, world: int, url: str) -> float:
    from megascale.plugins.redis.redis_store import register

    register()
    register()
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return total.item()
