"""Token files that do not hold what was built are refused: by a sample at each start, by all bytes on request."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megascale import api
from megascale.cli.main import app
from megascale.config import Config, from_tree
from megascale.data.dataset.description import describe_token_file
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.prepare.builder import build
from megascale.errors import DataError
from tests.data.sample_sources import check_run

DAMAGED = r"{name}\.bin does not hold the tokens that were built.*build it again"


def build_text(out: Path, source: Path) -> None:
    build(out, inputs=[source], vocab_size=300, held_out=0.4, progress=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text `in.jsonl` and the data set `ds` of it, whose token files are read in part by a sample."""
    folder = tmp_path_factory.mktemp("built")
    draw = np.random.default_rng(0)
    texts = (bytes(draw.integers(97, 123, 4000, np.uint8)).decode() for _ in range(200))
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_text(folder / "ds", folder / "in.jsonl")
    return folder


@pytest.fixture
def data(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built / "ds", tmp_path / "ds"))


def configured(data: Path, runs: Path) -> Config:
    tree = {"data": {"train": [str(data / "train")], "valid": str(data / "valid")}, "train": {"runs": str(runs)}}
    return from_tree({**tree, "model": {"sequence_length": 8, "vocab_size": 300}})


def damage(path: Path, kind: str) -> None:
    contents = bytearray(path.read_bytes())
    size = len(contents)
    if kind == "all but both ends":
        contents[4096:-4096] = bytes(size - 8192)
    elif kind == "a tenth in the middle":
        contents[size // 2 : size // 2 + size // 10] = bytes(size // 10)
    elif kind == "all between evenly spread places":
        retained = [(size - 4096) * i // 15 for i in range(16)]
        zeroed = bytearray(size)
        for start in retained:
            zeroed[start : start + 4096] = contents[start : start + 4096]
        contents = zeroed
    else:
        contents[:] = contents[::-1]
    path.write_bytes(contents)


@pytest.mark.parametrize("name", ["train", "valid"])
@pytest.mark.parametrize(
    "kind", ["all but both ends", "a tenth in the middle", "all between evenly spread places", "reversed"]
)
def test_a_damaged_file_is_refused_at_the_first_start(data: Path, tmp_path: Path, name: str, kind: str) -> None:
    config = configured(data, tmp_path / "runs")
    check_run(config, 0, leader=False)
    assert describe_token_file(data / name).compared == "sample"
    damage(data / f"{name}.bin", kind)
    with pytest.raises(DataError, match=rf"data\.{name}: .*" + DAMAGED.format(name=name)):
        check_run(config, 0, leader=False)
    with pytest.raises(DataError, match=DAMAGED.format(name=name)):
        describe_token_file(data / name)


def test_training_and_evaluation_refuse_it(data: Path, tmp_path: Path) -> None:
    model = {"layers": 1, "hidden": 16, "heads": 2, "sequence_length": 8}
    train = {"runs": str(tmp_path), "name": "a", "steps": 1, "micro_batch": 1, "global_batch": 1, "threads": 1}
    tree = {"model": model, "data": {"train": [str(data / "train")]}, "train": {**train, "device": "cpu"}}
    tree["observe"] = {"tensorboard": False}
    api.train(from_tree(tree))
    damage(data / "valid.bin", "all but both ends")
    with pytest.raises(DataError, match="--file: .*" + DAMAGED.format(name="valid")):
        api.evaluate(tmp_path / "a", str(data / "valid"), device="cpu")
    damage(data / "train.bin", "all but both ends")
    tree["train"]["name"] = "b"
    with pytest.raises(DataError, match=r"data\.train: .*" + DAMAGED.format(name="train")):
        api.train(from_tree(tree))
    assert not (tmp_path / "b" / "metrics.jsonl").exists()


def test_all_of_a_file_is_compared_on_request(data: Path) -> None:
    """One byte may lie between the places of a sample; it does not escape `--full`."""
    run = CliRunner()
    full = run.invoke(app, ["data", "inspect", str(data), "--full"])
    assert full.exit_code == 0, full.output
    assert full.output.count("all tokens are as the build wrote them") == 2
    path = data / "train.bin"
    contents = path.read_bytes()
    for location in range(len(contents) // 2, len(contents)):
        path.write_bytes(contents[:location] + bytes([contents[location] ^ 1]) + contents[location + 1 :])
        try:
            assert describe_token_file(data / "train").compared == "sample"
            break
        except DataError:
            continue
    shown = run.invoke(app, ["data", "inspect", str(data / "train")])
    assert "a sample of the tokens is as the build wrote it (--full reads all)" in shown.output
    refused = run.invoke(app, ["data", "inspect", str(data / "train"), "--full"])
    assert isinstance(refused.exception, DataError)


def test_a_build_that_is_asked_for_again_replaces_what_is_damaged(built: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(built / "ds", tmp_path / "ds"))
    damage(data / "train.bin", "all but both ends")
    build_text(data, built / "in.jsonl")
    assert describe_token_file(data / "train", full=True).compared == "all"


def test_files_without_a_checksum_are_said_to_be_so(data: Path, tmp_path: Path) -> None:
    """Files of an older version, and of other programs; the longest run of one id gives a zeroed part away."""
    record = json.loads((data / "dataset.json").read_text())
    for part in record["parts"].values():
        del part["bin_sha256"], part["bin_fingerprint"]
    (data / "dataset.json").write_text(json.dumps(record))
    damage(data / "train.bin", "all but both ends")
    check_run(configured(data, tmp_path / "runs"), 0, leader=False)
    facts = describe_token_file(data / "train", full=True)
    assert facts.compared == "none"
    assert facts.longest_run is not None
    length, first, token = facts.longest_run
    assert length >= facts.tokens - 8192 / 2
    assert token == 0
    assert 0 < first <= 2048
    shown = CliRunner().invoke(app, ["data", "inspect", str(data / "train"), "--full"])
    assert "no checksum was recorded" in shown.output
    assert "the longest run of one id" in shown.output


@pytest.mark.parametrize("read", [1, 2, 3, 7, 100])
def test_the_longest_run_is_found_across_what_is_read_at_a_time(tmp_path: Path, read: int, monkeypatch) -> None:
    monkeypatch.setattr("megascale.data.dataset.description._READ_TOKENS", read)
    with IndexedWriter(tmp_path / "a", "uint16") as writer:
        writer.add([1, 2, 2, 3, 3, 3, 3, 3, 4, 4, 1])
    assert describe_token_file(tmp_path / "a", full=True).longest_run == (5, 3, 3)
