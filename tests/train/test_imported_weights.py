"""A start from an imported model's settings starts with the imported weights, or is refused: never with random ones."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from megascale import api, checkpoint
from megascale.errors import DataError
from tests.conftest import lines
from tests.model.huggingface import small

OPTIONS = [
    "--train.steps=1", "--train.global_batch=4", "--train.micro_batch=2", "--train.device=cpu", "--train.threads=1",
    "--observe.tensorboard=false", "--observe.spans=0", "--train.precision=float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def sound(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Return a folder with a model `theirs`, and its loss at the first step of training, far from a random model's."""
    folder = tmp_path_factory.mktemp("imported")
    theirs = small("llama", vocab_size=64)
    with torch.no_grad():
        theirs.lm_head.weight *= 5
    theirs.save_pretrained(folder / "theirs")
    api.import_model(folder / "theirs", folder / "runs" / "a", sequence_length=16)
    shutil.copytree(folder / "runs", folder / "trained")
    return folder, train(folder / "trained" / "a", tokens, f"--train.runs={folder}/trained")


@pytest.fixture
def work(sound: tuple[Path, float], tmp_path: Path) -> Path:
    """Return a run folder `a` of the import, which nobody has trained."""
    api.import_model(sound[0] / "theirs", tmp_path / "runs" / "a", sequence_length=16)
    return tmp_path / "runs" / "a"


def train(run: Path, tokens: Path, *arguments: str) -> float:
    """Train as the run's config.toml says, with changes, and return the loss of the last step."""
    config = api.load_config(run / "config.toml", [f"--data.train={tokens}/train"] + OPTIONS + list(arguments))
    loss = api.train(config).loss
    assert loss is not None
    return loss


@pytest.mark.parametrize(
    ("arguments", "run"),
    [
        ([], "runs/a"),
        (["--train.name=b"], "runs/b"),
        (["--train.runs={folder}/others"], "others/a"),
        (["--checkpoint.location={folder}/far"], "runs/a"),
        (["--checkpoint.resume=false"], "runs/a"),
        (["--train.name=b", "--checkpoint.resume=false", "--checkpoint.location={folder}/far"], "runs/b"),
    ],
)
def test_a_start_without_a_state_of_its_own_begins_with_the_imported_weights(
    work, sound, tokens, tmp_path, arguments, run
):
    assert sound[1] > 5  # random weights give about ln 64 = 4.16
    loss = train(work, tokens, *[word.format(folder=tmp_path) for word in arguments])
    assert loss == pytest.approx(sound[1], abs=1e-6)
    # And it goes on from its own state afterwards.
    train(tmp_path / run, tokens, "--train.steps=2")
    assert [line["step"] for line in lines(tmp_path / run / "metrics.jsonl") if "loss" in line] == [1, 2]


def test_ranks_begin_with_the_imported_weights(work, sound, tokens, megascale):
    arguments = ["--train.name=b", "--parallel.data=2", "--parallel.zero=3"] + OPTIONS
    done = megascale("train", work / "config.toml", f"--data.train={tokens}/train", *arguments)
    assert done.returncode == 0, done.stderr
    assert "starts with the imported weights" in done.stdout
    [loss] = [line["loss"] for line in lines(work.parent / "b" / "metrics.jsonl") if "loss" in line]
    assert loss == pytest.approx(sound[1], abs=1e-5)


def test_imported_weights_that_are_gone_are_never_replaced_by_random_ones(work, tokens, tmp_path):
    train(work, tokens, "--train.steps=3", "--checkpoint.interval=1", "--checkpoint.keep=1")
    assert checkpoint.steps(work / "checkpoints") == [3]
    removed = rf"checkpoint\.imported={re.escape(str(work))}/checkpoints.*Import the model again"
    for arguments in (["--train.name=b"], ["--checkpoint.resume=false"]):
        with pytest.raises(DataError, match=removed):
            train(work, tokens, *arguments)
    assert not (work.parent / "b" / "config.toml").exists()
    assert checkpoint.steps(work / "checkpoints") == [3]


@pytest.mark.parametrize("removed", ["checkpoints", "checkpoints/step-0/COMMIT"])
def test_a_run_whose_imported_weights_were_removed_is_refused(work, tokens, removed):
    shutil.rmtree(work / removed) if (work / removed).is_dir() else (work / removed).unlink()
    with pytest.raises(DataError, match=r"checkpoint\.imported=.*step-0.*Import the model again"):
        train(work, tokens)


def test_another_model_than_the_imported_one_is_refused(work, tokens):
    with pytest.raises(DataError, match=r"model\.layers was 2 and is 1.*remove checkpoint\.imported"):
        train(work, tokens, "--train.name=b", "--model.layers=1")
