"""Parts of the chaos site `kubernetes` that need no cluster: trainers seen by the witness, images, a device plugin."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.kubernetes.node import Image, write_images
from tests.chaos.kubernetes.witness import Witness

_TRAINER = """
import sys
from pathlib import Path
from megascale.core.status import StatusFile
file = StatusFile(Path(sys.argv[1]), int(sys.argv[2]))
for line in sys.stdin:
    file.update("train", int(line))
    print("written", flush=True)
"""


class _Trainer:
    """A process that writes a rank's status as a trainer does, and has in its command line what theirs have."""

    def __init__(self, folder: Path, rank: int) -> None:
        arguments = [sys.executable, "-c", _TRAINER, str(folder), str(rank), "fork_server"]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.step(0)

    def step(self, number: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "written\n"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def trainers(tmp_path) -> Iterator[list[_Trainer]]:
    result: list[_Trainer] = []
    yield result
    for each in result:
        each.end()


def test_two_trainers_of_a_rank_at_a_time_are_seen(tmp_path, trainers):
    witness = Witness("job")
    for node in ("a", "b"):  # each node has a folder of its own
        trainers.append(_Trainer(tmp_path / node / "job" / "status", 1))
        witness.look()
    trainers[0].step(7)
    witness.look()
    assert [(each.rank, each.step) for each in witness.trainers()] == [(1, 7), (1, 0)]
    assert len(witness.doubles()) == 1


def test_one_after_the_other_and_other_ranks_and_runs_are_none(tmp_path, trainers):
    witness = Witness("job")
    for run, rank in (("job", 0), ("job", 1), ("other", 1)):
        trainers.append(_Trainer(tmp_path / run / "status", rank))
    witness.look()
    trainers[1].end()
    witness.look()
    trainers.append(_Trainer(tmp_path / "later" / "job" / "status", 1))
    witness.look()
    assert [each.rank for each in witness.trainers()] == [0, 1, 1]
    assert witness.doubles() == []


def test_an_archive_of_images_is_as_docker_writes_it(tmp_path):
    images = [Image("local/a:1", {"a": b"text"}, entry=["/a"]), Image("local/b:1", {}, ["tmp"], {"bin": "usr/bin"})]
    write_images(tmp_path / "images.tar", images)
    with tarfile.open(tmp_path / "images.tar") as tar:
        names = tar.getnames()
        manifest = json.load(tar.extractfile("manifest.json"))
        blob = tar.extractfile(manifest[1]["Layers"][0])
        assert [each["RepoTags"] for each in manifest] == [["local/a:1"], ["local/b:1"]]
        assert {each["Config"] for each in manifest} <= set(names)
        with tarfile.open(fileobj=blob) as layer:
            assert layer.getmember("tmp").mode == 0o1777
            assert layer.getmember("bin").linkname == "usr/bin"


def test_a_device_plugin_speaks_the_kubelets_protocol():
    pytest.importorskip("google.protobuf")
    from tests.chaos.kubernetes.gpus import messages

    kinds = messages()
    report = kinds["ListAndWatchResponse"](devices=[kinds["Device"](ID="GPU-0", health="Unhealthy")])
    # A repeated message (field 1) of two strings (fields 1 and 2).
    assert report.SerializeToString() == b"\x0a\x12\x0a\x05GPU-0\x12\x09Unhealthy"
    requested = kinds["AllocateRequest"].FromString(b"\x0a\x07\x0a\x05GPU-3")
    assert list(requested.container_requests[0].devicesIDs) == ["GPU-3"]
