"""Other storage than a local disk: memory and S3 through fsspec (S3 against a real moto server, where there is one)."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from megascale.checkpoint import Checkpointer, TensorShard, inspect, latest, load, save, steps
from megascale.checkpoint.format import step_folders
from megascale.checkpoint.format.step_folders import claim_folder, read_owner
from megascale.checkpoint.format.verify import verify
from megascale.checkpoint.storage.base import Storage
from megascale.checkpoint.storage.local_disk import _BLOCK_BYTES, Disk, LocalStorage
from megascale.checkpoint.storage.object_store import FsspecStorage
from megascale.checkpoint.storage.opening import open_storage
from megascale.config import CheckpointConfig
from megascale.errors import DataError, TrainingError
from tests.checkpoint.conftest import assert_same, blank, full_shards, logical_state, run_group
from tests.forked import Forked


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket on a moto server. Where the server's program is: MOTO_SERVER or the path; it is best kept in a virtual
    environment of its own, since its dependencies take long to resolve beside s3fs."""
    pytest.importorskip("s3fs")
    program = os.environ.get("MOTO_SERVER") or shutil.which("moto_server")
    if not program or not Path(program).exists():
        pytest.skip("no moto_server here: install moto[server] anywhere and set MOTO_SERVER to its moto_server program")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = open(tmp_path_factory.mktemp("moto") / "log", "wb")  # noqa: SIM115 - lives as long as the server
    server = subprocess.Popen([program, "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    keep = {key: os.environ.get(key) for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL")}
    os.environ.update({"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_ENDPOINT_URL": url})
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(url, timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, "moto_server ended"
                assert time.monotonic() < deadline, "moto_server does not answer"
                time.sleep(0.05)
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
    finally:
        server.kill()
        server.wait()
        for key, value in keep.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@pytest.fixture(params=["local", "file", "memory", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new folder on each kind of storage."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    return {"local": str(tmp_path), "file": f"file://{tmp_path}", "memory": f"memory://{tmp_path.name}"}[request.param]


def test_storage_keeps_its_promises(location: str) -> None:
    storage: Storage = open_storage(location)
    assert storage.list() == []
    assert storage.size("a/b") is None
    with pytest.raises(FileNotFoundError):
        storage.read("a/b")
    storage.write("a/b", b"0123456789")
    storage.write("a/b", b"abcdefghij")
    assert bytes(storage.read("a/b")) == b"abcdefghij"
    assert bytes(storage.read("a/b", 2, 3)) == b"cde"
    assert bytes(storage.read("a/b", 8, 10)) == b"ij"
    assert storage.size("a/b") == 10
    sink = storage.create("a/large")
    body = os.urandom(20 << 20) + b"tail"
    for at in range(0, len(body), 3_000_001):
        sink.write(body[at : at + 3_000_001])
    sink.finish()
    assert bytes(storage.read("a/large")) == body
    abandoned = storage.create("a/abandoned")
    abandoned.write(b"x" * 100)
    abandoned.abort()
    assert storage.list("a") == ["b", "large"]
    assert not storage.create_exclusively("a/b", b"another")
    assert bytes(storage.read("a/b")) == b"abcdefghij"
    assert storage.create_exclusively("new/c", b"first")
    assert not storage.create_exclusively("new/c", b"second")
    assert bytes(storage.read("new/c")) == b"first"
    assert storage.list("new") == ["c"]
    storage.remove("new")
    assert storage.list("a") == ["b", "large"]
    assert not storage.is_link("a")
    storage.remove("a/b")
    storage.remove("a/never")
    assert storage.list("a") == ["large"]
    storage.write("a/c", b"1")
    storage.clear("a", ["large", "never"])
    assert storage.list("a") == ["c"]
    storage.write("a/d", b"1")
    storage.clear("a", ["c", "d"])
    assert storage.list() == []
    storage.clear("a", ["c"])
    storage.write("a/b/c", b"1")
    storage.remove("a")
    assert storage.list() == []


def test_checkpoints_on_any_storage(location: str) -> None:
    for step in (1, 2, 3):
        save(location, step, full_shards(logical_state(step)), {"step": step}, keep=2)
    assert (steps(location), latest(location)) == ([2, 3], 3)
    assert inspect(location).committed
    got = blank(logical_state())
    assert load(location, full_shards(got)) == {"step": 3}
    assert_same(got, logical_state(3))
    storage = open_storage(location)
    assert verify(storage, 3).problems == []
    file = next(name for name in storage.list("step-3") if name.endswith(".distcp"))
    storage.write(f"step-3/{file}", bytes(storage.read(f"step-3/{file}"))[:-1000])
    with pytest.warns(UserWarning, match=r"step-3.*damaged"):
        assert load(location, full_shards(got)) == {"step": 2}
    storage.remove("step-2/COMMIT")
    with pytest.raises(DataError, match="No other"):
        load(location, full_shards(got))


def _save_and_load(rank: int, size: int, location: str) -> int:
    tensors = {"w": torch.arange(1000.0).reshape(100, 10)}
    rows = slice(100 * rank // size, 100 * (rank + 1) // size)
    save(location, 1, [TensorShard("w", (100, 10), (rows.start, 0), tensors["w"][rows])], {"step": 1}, keep=1)
    got = torch.zeros(100, 10)
    load(location, [TensorShard("w", (100, 10), (0, 0), got)])
    assert torch.equal(got, tensors["w"])
    return rank


def test_several_processes_on_s3(s3: str, tmp_path: Path) -> None:
    assert run_group(3, _save_and_load, f"{s3}/{tmp_path.name}") == [0, 1, 2]


def test_the_service_writes_to_s3(s3: str, tmp_path: Path) -> None:
    config = CheckpointConfig(background=True, linger=1.0, location=f"{s3}/{tmp_path.name}")
    checkpointer = Checkpointer(config, tmp_path / "run", full_shards(logical_state(4)))
    assert checkpointer.load() is None
    checkpointer.save(4, {"step": 4})
    assert [(o.committed, o.reason) for o in checkpointer.finish()] == [(True, "")]
    got = blank(logical_state())
    assert load(config.location, full_shards(got)) == {"step": 4}
    assert_same(got, logical_state(4))


def test_of_two_runs_that_start_at_the_same_moment_one_gets_the_location(location: str) -> None:
    """Both have seen that it belongs to none."""
    storage = open_storage(location)
    assert read_owner(storage) == ""
    assert claim_folder(storage, "first", previous="")
    assert not claim_folder(storage, "second", previous="")
    assert read_owner(storage) == "first"
    assert claim_folder(storage, "first", previous="first")
    # Taken over on purpose, by the one of two that comes first.
    assert claim_folder(storage, "third", previous="first")
    assert not claim_folder(storage, "fourth", previous="first")
    assert read_owner(storage) == "third"


class LastWins(FsspecStorage):
    """A storage that lets everyone create an object who looked before it was there."""

    def create_exclusively(self, path: str, data: bytes) -> bool:
        self.write(path, data)
        return True


def test_where_storage_does_not_keep_two_apart_each_reads_whose_it_is(tmp_path: Path) -> None:
    storage = LastWins(f"memory://{tmp_path.name}")
    storage.write("RUN", b"")  # what both have seen
    claims = {name: claim_folder(storage, name, previous="") for name in ("first", "second")}
    assert claims == {"first": True, "second": False}
    with mock.patch(f"{step_folders.__name__}.read_owner", side_effect=["", "second"]):
        assert not claim_folder(storage, "first", previous="")


@pytest.mark.parametrize("background", [False, True])
def test_a_run_whose_location_was_given_to_another_saves_no_more(tmp_path: Path, background: bool) -> None:
    location = tmp_path / "shared"
    config = CheckpointConfig(background=background, linger=1.0, location=str(location), keep=1)
    tensors = full_shards(logical_state(1))
    first = Checkpointer(config, tmp_path / "first", tensors)
    first.save(1, {"run": {"id": "first"}}, wait=True)
    assert [(o.committed, o.reason) for o in first.finish(run_ended=False)] == [(True, "")]
    storage = open_storage(location)
    storage.write("RUN", b"second")
    save(location, 2, tensors, {"run": {"id": "second"}}, keep=2)
    files = {name: storage.list(name) for name in storage.list() if name.startswith("step-")}
    pattern = r"was given to another run \(identity second, this run's is first\)"
    if background:
        first.save(3, {"run": {"id": "first"}}, wait=True)
        (outcome,) = first.finish()
        assert re.search(pattern, outcome.reason)
    else:
        with pytest.raises(TrainingError, match=pattern):
            first.save(3, {"run": {"id": "first"}})
    assert {name: storage.list(name) for name in storage.list() if name.startswith("step-")} == files


# Python that has a start wait, once it is judged, until the other is judged too.
OVERLAP = """
import os, time
from pathlib import Path
from megascale.train.resume import ResumeGuard

claim_run = ResumeGuard.claim_run

def claim_together(guard):
    folder = Path({folder!r})
    (folder / f"judged-{{os.getpid()}}").touch()
    while len(list(folder.glob("judged-*"))) < 2:
        time.sleep(0.01)
    claim_run(guard)

ResumeGuard.claim_run = claim_together
"""


@pytest.mark.parametrize("arguments", [[], ["--checkpoint.resume=false"]])
def test_two_trainings_that_start_at_the_same_moment_on_one_url(s3: str, tiny: Path, tmp_path: Path, arguments) -> None:
    location = f"{s3}/{tmp_path.name}"
    command = [
        "train",
        tiny,
        "--train.steps=2",
        f"--checkpoint.location={location}",
        "--train.eval_samples=1",
        *arguments,
    ]
    before = OVERLAP.format(folder=str(tmp_path))
    started = {name: Forked(command + [f"--train.name={name}"], before=before) for name in ("one", "two")}
    outputs = {name: process.communicate(timeout=200)[0] for name, process in started.items()}
    codes = {name: process.wait() for name, process in started.items()}
    assert sorted(codes.values()) == [0, 4], outputs
    (refused,) = [name for name, code in codes.items() if code]
    assert "belongs to a different run (started at the same moment)" in " ".join(outputs[refused].split())
    assert not (tmp_path / "runs" / refused / "config.toml").exists()
    assert steps(location) == [2]
    assert inspect(location).state["run"]["name"] != refused


def test_paths_with_spaces_and_urls(tmp_path: Path) -> None:
    storage = open_storage(f"file://{tmp_path}/a b")
    assert isinstance(storage, LocalStorage)
    assert isinstance(open_storage(f"local://{tmp_path}"), LocalStorage)
    storage.write("c d/e", b"1")
    assert (tmp_path / "a b" / "c d" / "e").read_bytes() == b"1"


def test_a_url_that_cannot_be_opened_is_named(tiny, megascale) -> None:
    done = megascale("train", tiny, "--checkpoint.location=nonsense://here")
    assert done.returncode == 2
    assert "nonsense://here cannot be opened (Protocol not known: nonsense); give a folder" in done.stderr


def test_a_write_that_fails_in_any_way_is_told_and_not_waited_for(tmp_path: Path) -> None:
    """Blocks are handed to a thread: one that ended without a word would keep its block, and the next would wait."""

    class Failing(Disk):
        def write(self, handle: int, view: memoryview, at: int) -> int:
            raise ValueError("of no kind that was expected")

    sink = LocalStorage(tmp_path, Failing()).create("step-1/a")
    with pytest.raises(OSError, match="of no kind that was expected"):
        sink.write(bytes(8 * _BLOCK_BYTES + 1))
    sink.abort()
