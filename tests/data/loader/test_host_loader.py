"""The host's loader: every reader gets just what the sample order says, whatever is killed, hung, lost or full."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale import config as configuration
from megascale.config import Config
from megascale.core.batch import SampleFields
from megascale.core.layout import lay_out
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.dataset.sample_fields import Samples
from megascale.data.dataset.samples import hash_sample_ids
from megascale.data.loader import host_loader, ring
from megascale.data.loader.feed import HostFeed
from megascale.data.loader.host_loader import LoaderReader
from megascale.data.loader.host_plan import HostPlan, plan_host
from megascale.data.loader.loader_service import LoaderService
from megascale.data.loader.ring import Ring, RingShape
from megascale.errors import DataError, FitError, TrainingError
from megascale.services.connection_server import ConnectionServer
from tests.data.sample_sources import plan_host_of

LENGTH = 8


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokens") / "train"
    with IndexedWriter(path, "uint16") as writer:
        writer.add(np.arange(5000) % 60)
    return str(path)


def configured(prefix: str, runs: Path, tensor: int = 1, pipeline: int = 1, **keys: Any) -> Config:
    """A small configuration; keys such as vocab_size=4 or global_batch=8 go to their sections."""
    tree: dict[str, Any] = {
        "model": {"layers": 4, "heads": 8, "hidden": 32, "sequence_length": LENGTH, "vocab_size": 64},
        "data": {"train": [prefix], "loader": "host"},
        "train": {"runs": str(runs), "micro_batch": 2, "global_batch": 8, "seed": 3},
        "parallel": {"tensor": tensor, "pipeline": pipeline},
    }
    for name, value in keys.items():
        section = next(s for s in ("model", "data", "train") if name in type(getattr(Config(), s)).model_fields)
        tree[section][name] = value
    return configuration.from_tree(tree)


class Host:
    """A loader's folder and its readers; all are ended with the test."""

    def __init__(self, config: Config, world: int, base: int = 0, hang: float = 60.0) -> None:
        self.plan = plan_host_of(config, world, 0, world)
        self.folder = host_loader.prepare_folder(self.plan)
        self.base, self.hang = base, hang
        self.readers: dict[int, LoaderReader] = {}

    def read(self, rank: int) -> np.ndarray:
        """The next micro-batch of a rank, [columns, rows]."""
        if rank not in self.readers:
            self.readers[rank] = LoaderReader(self.folder, rank, self.base, self.hang)
        reader = self.readers[rank]
        tokens = reader.read().samples.tokens.T.astype(np.int64)
        reader.release()
        return tokens

    def pid(self) -> int:
        """Of the loader, which is started if it is not there."""
        host_loader.connect_loader(self.folder).close()
        pid = host_loader.find_owner(self.folder)
        assert pid is not None
        return pid

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()
        host_loader.kill_loader(self.folder)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    built: list[Host] = []
    yield built
    for host in built:
        host.close()


def expected(plan: HostPlan, rank: int, base: int, number: int) -> np.ndarray:
    """What rank must get as its micro-batch `number`, from the definition."""
    stream, _ = plan.shape.find_reader(rank)
    first = plan.find_first_sample(base, stream, number)
    return plan.open_source().read_tokens(first, plan.shape.columns)


@pytest.mark.parametrize(
    ("world", "tensor", "pipeline", "base"), [(1, 1, 1, 0), (2, 2, 1, 16), (2, 1, 1, 0), (8, 2, 2, 24), (3, 1, 3, 8)]
)
def test_each_rank_reads_its_samples(
    prefix: str, tmp_path: Path, hosts: list[Host], world: int, tensor: int, pipeline: int, base: int
) -> None:
    host = Host(configured(prefix, tmp_path, tensor, pipeline), world, base)
    hosts.append(host)
    reading = [rank for rank in range(world) if host.plan.reads_tokens(rank)]
    assert (reading == [0, 2]) == (pipeline == 3)  # the middle stage needs no tokens
    assert not np.array_equal(expected(host.plan, 0, base, 0), expected(host.plan, 0, base, 1))
    for number in range(3 * host.plan.shares[0][1] + 1):
        for rank in reading:
            assert np.array_equal(host.read(rank), expected(host.plan, rank, base, number))
    streams = {host.plan.shape.find_reader(rank)[0] for rank in reading}
    assert len(streams) == len(host.plan.streams) == world // tensor // pipeline  # one copy, however many readers


@pytest.mark.parametrize(("tensor", "pipeline", "data"), [(1, 2, 4), (2, 2, 2), (1, 3, 4), (2, 1, 4)])
def test_a_plan_names_the_readers_of_each_stream(
    tensor: int, pipeline: int, data: int, prefix: str, tmp_path: Path
) -> None:
    """On any run of ranks, also one from the end of a stage to the beginning of the next."""
    world = tensor * pipeline * data
    config = configured(prefix, tmp_path, tensor, pipeline)
    grid = lay_out(config, world).grid
    for first, count in itertools.product(range(world), range(1, world + 1)):
        if first + count > world:
            continue
        plan = plan_host_of(config, world, first, count)
        at = {rank: grid.coordinate(rank) for rank in range(first, first + count)}
        reading = {rank: c.data for rank, c in at.items() if c.pipeline in (0, pipeline - 1)}
        assert plan.streams == tuple(sorted(set(reading.values())))
        for stream, readers in zip(plan.streams, plan.shape.readers, strict=True):
            assert readers == tuple(rank for rank, number in reading.items() if number == stream)


@pytest.mark.parametrize(("world", "microbatches"), [(3, 4), (3, 5), (4, 7), (2, 3)])
def test_uneven_shares_read_each_sample_of_a_step_once(
    world: int, microbatches: int, prefix: str, tmp_path: Path, hosts: list[Host]
) -> None:
    consent = {
        "resilience": {"continue_replicas": True},
        "checkpoint": {"background": True, "memory_interval": 1, "replicas": True},
    }
    tree = configured(prefix, tmp_path).model_dump(exclude_none=True) | consent
    width = tree["train"]["micro_batch"]
    tree["train"]["global_batch"] = microbatches * width
    config = configuration.from_tree(tree)
    base = 3 * microbatches * width
    host = Host(config, world, base)
    hosts.append(host)
    plan = HostPlan.from_json(host.plan.to_json())
    counts = [count for _, count in plan.shares]
    assert (sum(counts), max(counts) - min(counts)) == (microbatches, min(1, microbatches % world))
    for step in range(2):
        numbers = []
        for stream, count in enumerate(counts):
            for i in range(count):
                first = plan.find_first_sample(base, stream, step * count + i)
                numbers += range(first, first + width)
                assert np.array_equal(host.read(stream), expected(plan, stream, base, step * count + i))
        assert sorted(numbers) == list(
            range(base + step * microbatches * width, base + (step + 1) * microbatches * width)
        )


def test_auto_chooses_it_where_it_pays(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')

    def is_separate(entry: str, loader: str, tensor: int = 1, gpus: bool = False, ranks: int = 2) -> bool:
        config = configured(entry, tmp_path, tensor, train=[entry], loader=loader)
        return plan_host_of(config, ranks, 0, ranks).needs_loader(gpus)

    assert not is_separate(prefix, "auto")
    assert is_separate(prefix, "auto", tensor=2)
    assert is_separate(prefix, "auto", gpus=True, ranks=1)
    assert is_separate(str(tmp_path / "a.jsonl"), "auto")
    assert is_separate(prefix, "host")
    assert not is_separate(prefix, "local", tensor=2, gpus=True)
    middle = plan_host_of(configured(prefix, tmp_path, pipeline=3), 3, 1, 1)
    assert not middle.needs_loader(gpus=True)  # a host of middle stages reads nothing


def test_rank_0_is_told_the_ids_of_whole_steps(prefix: str, tmp_path: Path, hosts: list[Host]) -> None:
    host = Host(configured(prefix, tmp_path), 2, base=8)
    hosts.append(host)
    reader = host.readers[0] = LoaderReader(host.folder, 0, 8)
    LoaderReader(host.folder, 1, 8).close()  # its stream is its own: rank 0 does not wait for it
    source = host.plan.open_source()
    for number in range(6):
        used = reader.read()
        step = number // host.plan.shares[0][1]
        assert used.ids == hash_sample_ids(source.find_sample_ids(8 + 8 * step, 8))
        assert used.epochs == source.count_epochs(16 + 8 * step)
        reader.release()


def test_nothing_unread_is_overwritten(prefix: str, tmp_path: Path, hosts: list[Host]) -> None:
    """One reader runs ahead of the other by the whole ring and no further."""
    host = Host(configured(prefix, tmp_path, tensor=2, ring_steps=1), 2)
    hosts.append(host)
    slow = host.readers[1] = LoaderReader(host.folder, 1, 0)
    depth = host.plan.shape.depth
    for number in range(depth):
        assert np.array_equal(host.read(0), expected(host.plan, 0, 0, number))
    assert not host.readers[0]._is_ready(depth)
    first = slow.read()
    assert np.array_equal(first.samples.tokens.T, expected(host.plan, 1, 0, 0))
    slow.release()
    assert np.array_equal(host.read(0), expected(host.plan, 0, 0, depth))
    for number in range(1, depth + 1):
        assert np.array_equal(host.read(1), expected(host.plan, 1, 0, number))


@given(kills=st.lists(st.integers(1, 30), min_size=1, max_size=4, unique=True), lose=st.booleans())
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_killed_loader_goes_on_where_it_was(prefix: str, tmp_path: Path, kills: list[int], lose: bool) -> None:
    """Killed at any micro-batch, with or without its segment: every reader still gets each micro-batch once."""
    host = Host(configured(prefix, tmp_path, tensor=2), 4)
    try:
        # What was in the ring lasts for a while after a late kill: read until somebody has met the next loader.
        for number in itertools.count():
            if number in kills:
                os.kill(host.pid(), signal.SIGKILL)
                if lose:
                    Path((host.folder / "segment").read_text()).unlink(missing_ok=True)
            for rank in range(4):
                assert np.array_equal(host.read(rank), expected(host.plan, rank, 0, number)), (rank, number)
            if number >= 31 and {reader.generation for reader in host.readers.values()} != {1}:
                break
    finally:
        host.close()


def test_restarts_count_as_generations(prefix: str, tmp_path: Path, hosts: list[Host]) -> None:
    host = Host(configured(prefix, tmp_path), 1)
    hosts.append(host)
    host.read(0)
    assert host.readers[0].generation == 1
    before = host.readers[0]._watcher
    os.kill(host.pid(), signal.SIGKILL)
    while host.readers[0].generation == 1:  # ends, or the test's timeout does
        host.read(0)
    assert host.readers[0].generation == 2
    assert before.is_alive()


def test_stopped_loader_is_replaced(prefix: str, tmp_path: Path, hosts: list[Host]) -> None:
    host = Host(configured(prefix, tmp_path), 1, hang=0.5)
    hosts.append(host)
    host.read(0)
    os.kill(host.pid(), signal.SIGSTOP)
    for number in range(1, 3 * host.plan.shape.depth):
        assert np.array_equal(host.read(0), expected(host.plan, 0, 0, number))
    assert host.readers[0].generation == 2


DIE = """
import sys, os, signal
from pathlib import Path
from megascale.data.loader.host_loader import LoaderReader
reader = LoaderReader(Path(sys.argv[1]), 1, 0)
reader.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_worker_killed_while_copying(prefix: str, tmp_path: Path, hosts: list[Host]) -> None:
    """It holds its slot for ever; no reader waits for the dead one."""
    host = Host(configured(prefix, tmp_path, tensor=2), 2)
    hosts.append(host)
    host.read(0)
    dead = subprocess.run([sys.executable, "-c", DIE, str(host.folder)], check=False)
    assert dead.returncode == -signal.SIGKILL
    for number in range(1, 3 * host.plan.shape.depth):
        assert np.array_equal(host.read(0), expected(host.plan, 0, 0, number))


def test_two_jobs_on_one_host(prefix: str, tmp_path: Path, hosts: list[Host]) -> None:
    single = Host(configured(prefix, tmp_path / "a"), 1)
    two = Host(configured(prefix, tmp_path / "b", seed=4), 1)
    hosts += [single, two]
    for number in range(12):
        for host in (single, two):
            assert np.array_equal(host.read(0), expected(host.plan, 0, 0, number))
    assert single.pid() != two.pid()
    assert not np.array_equal(expected(single.plan, 0, 0, 0), expected(two.plan, 0, 0, 0))


def test_ends_with_its_readers_and_leaves_nothing(prefix: str, tmp_path: Path) -> None:
    started = host_loader.start_loader(lay_out(configured(prefix, tmp_path, tensor=2), 2), first_rank=0, ranks=2)
    assert started is not None
    assert list(started.environment) == ["MEGASCALE_LOADER"]
    segment = Path((started.folder / "segment").read_text())
    readers = [LoaderReader(started.folder, rank, 0) for rank in range(2)]
    for reader in readers:
        reader.read()
    assert segment.exists()
    for reader in readers:
        reader.close()
    assert started.process.wait(20) == 0
    assert not segment.exists()
    assert not started.folder.exists()
    started.stop()


def test_a_loader_waits_for_its_first_reader_as_long_as_its_starter_lives(prefix: str, tmp_path: Path) -> None:
    """Readers join after the state is loaded, which may take longer than any limit."""
    folder = host_loader.prepare_folder(plan_host_of(configured(prefix, tmp_path, tensor=2), 2, 0, 2))
    loader = LoaderService(folder, parent=os.getppid())
    with socket.socket(socket.AF_UNIX) as listener:
        loader.server = ConnectionServer(listener, authenticate=mock.Mock(), serve_client=loader.serve_reader)
        loader.server.last_activity -= 7 * 24 * 3600.0
        assert not loader._is_done()
        loader.parent = -1  # as after the starter's end
        assert loader._is_done()
        loader.close()
    assert not folder.exists()


def test_a_feed_whose_data_check_fails_stops_the_loader_that_it_has_started(prefix: str, tmp_path: Path) -> None:
    layout = lay_out(configured(prefix, tmp_path, tensor=2), 2)
    started = host_loader.start_loader(layout, first_rank=0, ranks=2)
    assert started is not None

    def refuse(consumed: int) -> list[str]:
        raise DataError("data.train has changed")

    feed = HostFeed(plan_host(layout, 0, 2), started.folder, 0, torch.device("cpu"), refuse, started)
    with pytest.raises(DataError, match="has changed"):
        feed.start(0)
    feed.close()
    assert started.process.returncode is not None
    assert not started.folder.exists()


START = """
import os, signal, sys
from pathlib import Path
from megascale.config import load
from megascale.core.batch import SampleFields
from megascale.core.layout import lay_out
from megascale.data.loader import host_loader
layout = lay_out(load(sys.argv[1]), 2)
print(host_loader.start_loader(layout, first_rank=0, ranks=2).folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ends_with_a_starter_that_dies_first(prefix: str, tmp_path: Path) -> None:
    """Killed before its loader has come up and before any rank was started: nothing stays."""
    (tmp_path / "plan.toml").write_text(configured(prefix, tmp_path, tensor=2).to_toml())
    report = subprocess.run([sys.executable, "-c", START, tmp_path / "plan.toml"], stdout=subprocess.PIPE, check=False)
    assert report.returncode == -signal.SIGKILL
    folder = Path(report.stdout.decode().strip())
    while folder.exists():  # or the test's timeout
        time.sleep(0.05)


def test_ranks_that_disagree_are_told(prefix: str, tmp_path: Path, hosts: list[Host]) -> None:
    host = Host(configured(prefix, tmp_path, tensor=2), 2)
    hosts.append(host)
    host.read(0)
    with pytest.raises(TrainingError, match="have loaded different checkpoints"):
        LoaderReader(host.folder, 1, 8)


def test_errors_of_the_loader_reach_the_ranks(prefix: str, tmp_path: Path, hosts: list[Host]) -> None:
    foreign = Host(configured(prefix, tmp_path, vocab_size=50), 1)
    hosts.append(foreign)
    with pytest.raises(DataError, match="another tokenizer"):
        [foreign.read(0) for _ in range(99)]
    removed = Host(configured(str(tmp_path / "nothing"), tmp_path), 1)
    hosts.append(removed)
    with pytest.raises(DataError, match=r"nothing.idx does not exist|nothing"):
        removed.read(0)


def test_a_file_cut_off_under_the_loader_is_named(tmp_path: Path, hosts: list[Host]) -> None:
    """Touching what is no longer there kills the loader; its successor says why."""
    with IndexedWriter(tmp_path / "train", "uint16") as writer:
        writer.add(np.arange(50_000) % 60)
    host = Host(configured(str(tmp_path / "train"), tmp_path / "runs", tensor=2), 2)
    hosts.append(host)
    for rank in (0, 1):
        assert np.array_equal(host.read(rank), expected(host.plan, rank, 0, 0))
    os.truncate(tmp_path / "train.bin", 4096)
    with pytest.raises(DataError, match=r"train\.bin"):
        [host.read(number % 2) for number in range(999)]
    with pytest.raises(DataError, match=r"train\.bin"):
        [host.read(1) for _ in range(host.plan.shape.depth + 1)]


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A real tmpfs of 128 KiB."""
    mount = tmp_path / "shm"
    mount.mkdir()
    built = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(mount)], capture_output=True)
    if built.returncode:
        pytest.skip("mounting a tmpfs needs root and CAP_SYS_ADMIN")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_full_mount_is_refused(prefix: str, tmp_path: Path, small_mount: Path) -> None:
    """Too small from the start, or filled by somebody else before the loader has its memory."""
    large = plan_host_of(configured(prefix, tmp_path, ring_steps=1000), 1, 0, 1)
    with pytest.raises(FitError, match=r"131,072 free of 131,072.*shm-size"):
        host_loader.prepare_folder(large, small_mount)
    folder = host_loader.prepare_folder(plan_host_of(configured(prefix, tmp_path), 1, 0, 1), small_mount)
    (small_mount / "other").write_bytes(bytes(120 << 10))
    with pytest.raises(FitError, match=r"8,192 free of 131,072.*remove other files from it"):
        LoaderReader(folder, 0, 0)
    (small_mount / "other").unlink()
    reader = LoaderReader(folder, 0, 0)
    assert reader.read().first == 0
    reader.close()
    host_loader.kill_loader(folder)


def test_small_mount_is_refused(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(FitError, match=r"shm-size.*data\.loader=local"):
        ring.check_room(1 << 60)
    with pytest.raises(FitError, match="mount a tmpfs"):
        ring.check_room(1, tmp_path / "nothing")
    path = ring.MOUNT / f"{ring.get_segment_prefix()}test-{os.getpid()}"
    with pytest.raises(FitError, match="free of"):
        ring.create_segment(path, RingShape(((0,),), 1 << 20, 1 << 13, 1 << 6), 1, "too large")
    assert not path.exists()
    plan = plan_host_of(
        configured(prefix, tmp_path, ring_steps=10_000, micro_batch=1 << 14, global_batch=1 << 22), 1, 0, 1
    )
    with pytest.raises(FitError, match=r"data\.ring_steps"):
        host_loader.prepare_folder(plan)


def test_stale_segments_are_reaped_and_living_ones_kept() -> None:
    shape = RingShape(((0,),), 4, 9, 2)
    names = [
        ring.MOUNT / f"{ring.get_segment_prefix()}test-{os.getpid()}-{kind}" for kind in ("dead", "alive", "empty")
    ]
    ring.create_segment(names[0], shape, 1, "runs/dead")[0].close()
    alive, present = ring.create_segment(names[1], shape, 1, "runs/alive")
    assert not present
    names[2].touch()
    try:
        report = [sentence for sentence in ring.remove_dead_segments() if str(os.getpid()) in sentence]
        assert len(report) == 2
        assert "runs/dead" in report[0]
        assert [name.exists() for name in names] == [False, True, False]
        repeated, present = ring.create_segment(names[1], shape, 1, "runs/alive")
        assert present
        assert int(repeated.header["generation"]) == 2
        repeated.close()
        second, present = ring.create_segment(names[1], shape, 2, "runs/other")
        assert not present  # of another plan: nothing in it counts
        second.close()
    finally:
        alive.close()
        for name in names:
            name.unlink(missing_ok=True)


def make_samples(shape: RingShape, number: int) -> Samples:
    """Samples of a ring of `shape` whose values depend on their number, row and column."""
    arrays = {}
    for name, (dtype, rows) in shape.arrays.items():
        arrays[name] = (number + np.arange(rows * shape.columns).reshape(rows, shape.columns) / 8).astype(dtype)
    return Samples(**arrays)


@given(
    order=st.lists(st.sampled_from(["put", "a", "b"]), max_size=60),
    depth=st.integers(1, 5),
    rows=st.integers(1, 5),
    columns=st.integers(1, 3),
    fields=st.builds(SampleFields, st.booleans(), st.booleans(), st.integers(0, 2)),
)
@settings(max_examples=80, deadline=None)
def test_ring_in_any_order(order: list[str], depth: int, rows: int, columns: int, fields: SampleFields) -> None:
    """What is ready is what was put; `put` waits for both readers; neither sees what it has not reached."""
    shape = RingShape(((0, 1),), depth, rows, columns, fields)
    handle = os.memfd_create("ring")
    os.ftruncate(handle, shape.size)
    built, done = Ring(handle, shape), {"a": 0, "b": 0}
    for subject in order:
        put = built.count_produced(0)
        if subject == "put":
            if put - min(done.values()) < depth:
                built.put(0, make_samples(shape, put), first=7 * put, ids=put, epochs=put / 2, weight_sum=put / 4)
        elif built.is_ready(0, done[subject]):
            batch, number = built.view_micro_batch(0, done[subject]), done[subject]
            for name, values in asdict(make_samples(shape, number)).items():
                assert np.array_equal(getattr(batch.samples, name), values), name
            assert (batch.first, batch.ids) == (7 * number, number)
            assert (batch.epochs, batch.weight_sum) == (number / 2, number / 4)
            done[subject] += 1
            built.release(0, "ab".index(subject), done[subject])
        else:
            assert done[subject] == put
    built.close()


@given(number=st.integers(1, 9), depth=st.integers(1, 3), ahead=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_loader_killed_anywhere_in_writing(number: int, depth: int, ahead: bool) -> None:
    """Stopped before each line of `put`: readers never see half a micro-batch, and its successor goes on."""

    class Killed(Exception):
        pass

    def rows(n: int) -> Samples:
        return Samples(np.full((5, 2), n))

    for stop in range(1, 40):
        shape = RingShape(((0,),), depth, 5, 2)
        handle = os.memfd_create("ring")
        os.ftruncate(handle, shape.size)
        dying = Ring(handle, shape)
        for n in range(number):
            dying.put(0, rows(n), 7 * n, n, 0.0)
            dying.release(0, 0, max(0, n + 1 - (depth - 1)))  # all but the newest depth - 1 are done with
        lines = 0

        def trace(frame: Any, event: str, arg: Any, stop: int = stop) -> Any:
            nonlocal lines
            if frame.f_code is not Ring.put.__code__:
                return None
            lines += event == "line"
            if lines == stop:
                raise Killed
            return trace

        tracing = sys.gettrace()
        sys.settrace(trace)
        try:
            dying.put(0, rows(number), 7 * number, number, 0.0)
            killed = False
        except Killed:
            killed = True
        finally:
            sys.settrace(tracing)
        ring = Ring(handle, shape)  # the next loader's, and the readers'
        if ring.is_ready(0, number):
            assert (ring.view_micro_batch(0, number).samples.tokens == number).all()
            assert (ring.view_micro_batch(0, number).first, ring.view_micro_batch(0, number).ids) == (
                7 * number,
                number,
            )
            if ahead:
                ring.release(0, 0, number + 1)
        for n in range(ring.count_released(0, 0), number):
            assert ring.is_ready(0, n)
            assert (ring.view_micro_batch(0, n).samples.tokens == n).all()
        if ring.count_produced(0) == number:
            ring.put(0, rows(number), 7 * number, number, 0.0)
        assert ring.count_produced(0) == number + 1
        assert ring.is_ready(0, number)
        assert (ring.view_micro_batch(0, number).samples.tokens == number).all()
        dying.memory, ring.memory = None, None  # type: ignore[assignment]
        os.close(handle)
        if not killed:
            assert lines > 8
            return
    raise AssertionError("put never came to its end")


def test_readers_wait_without_polling(prefix: str, tmp_path: Path, hosts: list[Host]) -> None:
    """A reader that waits costs no processor time and is woken by the loader, which no one takes for hung meanwhile."""
    host = Host(configured(prefix, tmp_path, tensor=2), 2, hang=0.1)
    hosts.append(host)
    for rank in (0, 1):
        host.readers[rank] = LoaderReader(host.folder, rank, 0, host.hang)
    for _ in range(host.plan.shape.depth):
        host.read(0)
    used: list[float] = []

    def waiting() -> None:
        before = time.thread_time()
        host.readers[0].read()
        used.append(time.thread_time() - before)

    thread = threading.Thread(target=waiting)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    host.read(1)  # frees a slot: the loader fills it and rings
    thread.join(20)
    assert not thread.is_alive()
    assert used[0] < 0.1
    assert host.readers[0].wait_seconds > 0.4
    assert host.readers[0].generation == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes files of another user")
def test_what_others_put_into_shared_memory_under_our_names_stops_nothing(
    prefix: str, tmp_path: Path, hosts: list[Host]
) -> None:
    """A file, a link, a pipe and a folder under names like ours, and one in place of a segment that was lost."""
    names = [
        ring.MOUNT / f"{ring.get_segment_prefix()}test-{os.getpid()}-{kind}"
        for kind in ("file", "link", "pipe", "folder", "open")
    ]
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    try:
        names[0].write_bytes(b"another user's")
        names[1].symlink_to(victim)
        os.mkfifo(names[2])
        names[3].mkdir()
        names[4].touch(0o666)
        names[4].chmod(0o666)
        for name in names[:4]:
            os.chown(name, 4321, -1, follow_symlinks=False)
        host = Host(configured(prefix, tmp_path), 1)
        hosts.append(host)
        segment = host.folder / "segment"
        planted = Path(segment.read_text())
        planted.write_bytes(b"")
        os.chown(planted, 4321, -1)
        names.append(planted)
        assert np.array_equal(host.read(0), expected(host.plan, 0, 0, 0))
        assert segment.read_text() != str(planted)
        assert names[0].read_bytes() == b"another user's"
        assert planted.read_bytes() == b""
        assert victim.read_bytes() == b"mine"
    finally:
        names[3].rmdir()
        for name in names[:3] + names[4:]:
            name.unlink(missing_ok=True)
