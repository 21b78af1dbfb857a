"""`train --model.from=FOLDER` starts with a Hugging Face folder's weights; bad folders are refused before anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascale import api
from megascale.errors import ConfigError, DataError
from tests.conftest import lines
from tests.model.huggingface import small
from tests.train.test_imported_weights import OPTIONS

VOCAB = 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models of four families in several files each, far from random ones at the first step."""
    root = tmp_path_factory.mktemp("folders")
    for family in ("llama", "gpt_neox", "gpt2", "mixtral"):
        theirs = small(family, vocab_size=VOCAB)
        with torch.no_grad():
            theirs.get_output_embeddings().weight *= 5
        theirs.save_pretrained(root / family, max_shard_size="10KB")
        assert len(list((root / family).glob("*.safetensors"))) > 2
    return root


@pytest.fixture
def folder(folders: Path, tmp_path: Path) -> Path:
    """Return a copy of the Llama, to damage."""
    shutil.copytree(folders / "llama", tmp_path / "llama")
    return tmp_path / "llama"


def first_loss(folder: Path, tokens: Path, runs: Path, *arguments: str) -> float:
    """Train for a step from a folder, and return the loss."""
    length = [] if folder.name == "gpt2" else ["--model.sequence_length=16"]
    overrides = [f"--model.from={folder}", f"--data.train={tokens}/train", f"--train.runs={runs}"] + length + OPTIONS
    loss = api.train(api.load_config(None, overrides + list(arguments))).loss
    assert loss is not None
    return loss


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "mixtral"])
def test_a_start_from_a_folder_equals_a_start_from_its_import(family, folders, tokens, tmp_path, megascale):
    """GPT-NeoX and GPT-2 store several matrices in one, interleaved or transposed. Mixtral stores each expert alone."""
    arguments = ["--train.steps=2", "--train.precision=float64"]
    api.import_model(folders / family, tmp_path / "runs" / "a", sequence_length=None if family == "gpt2" else 16)
    config = api.load_config(tmp_path / "runs/a/config.toml", [f"--data.train={tokens}/train"] + OPTIONS + arguments)
    api.train(config)
    first_loss(folders / family, tokens, tmp_path / "runs", "--train.name=b", *arguments)
    length = [] if family == "gpt2" else ["--model.sequence_length=16"]
    done = megascale(
        "train", f"--model.from={folders / family}", f"--data.train={tokens}/train", f"--train.runs={tmp_path}/runs",
        "--train.name=c", "--parallel.data=2", "--parallel.zero=2", *length, *OPTIONS, *arguments,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "starts with the weights of the Hugging Face folder" in done.stdout
    losses = {}
    for name in ("a", "b", "c"):
        metrics = lines(tmp_path / "runs" / name / "metrics.jsonl")
        losses[name] = [line["loss"] for line in metrics if "loss" in line]
    assert losses["a"][0] > 5  # random weights give about ln 64 = 4.16
    assert losses["b"] == losses["a"]
    assert losses["c"] == pytest.approx(losses["a"], rel=1e-12)


def test_a_run_from_a_folder_resumes_without_it_and_is_exported(folder, tokens, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.3, "eos_token_id": [3, 5]}')
    first_loss(folder, tokens, Path("runs"), "--train.name=b")
    run = tmp_path / "runs" / "b"
    saved = api.load_config(run / "config.toml")
    assert (saved.model.hidden, saved.model.kv_heads, saved.model.sequence_length) == (24, 2, 16)
    assert json.loads((run / "generation_config.json").read_text())["eos_token_id"] == [3, 5]
    shutil.rmtree(folder)
    api.train(api.load_config(run / "config.toml", [f"--data.train={tokens}/train"] + OPTIONS + ["--train.steps=2"]))
    overrides = [f"--model.from={folder}", f"--data.train={tokens}/train", "--train.runs=runs", "--train.name=b"]
    api.train(api.load_config(None, overrides + OPTIONS + ["--train.steps=3"]))
    steps = [line["step"] for line in lines(run / "metrics.jsonl") if "loss" in line]
    assert steps == [1, 2, 3]
    assert api.export_model(run, tmp_path / "out", tokenizer=False).family == "llama"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.layers=3"], r"model\.layers=3 \(2 there\)"),
        (["--model.preset=gpt2-124m"], "both describe the model"),
        (["--checkpoint.imported=elsewhere"], "name two models"),
        (["--model.from=3"], "must name the folder"),
        (["--checkpoint.start_from=runs/x", "--checkpoint.start_state=fresh"], "name two models"),
        (["--train.lora.rank=2"], "megascale convert import"),
    ],
)
def test_a_model_that_is_given_twice_is_refused(arguments, message, folder, tokens, tmp_path):
    with pytest.raises(ConfigError, match=message):
        first_loss(folder, tokens, tmp_path / "runs", *arguments)
    assert not (tmp_path / "runs" / "default" / "config.toml").exists()


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def find_shard(folder: Path) -> Path:
    """Return one of several files of weights."""
    return sorted(folder.glob("*.safetensors"))[1]


def remove_shard(folder: Path) -> None:
    find_shard(folder).unlink()


def cut_shard(folder: Path) -> None:
    file = find_shard(folder)
    file.write_bytes(file.read_bytes()[:-8])


def reshape_tensor(folder: Path) -> None:
    tensors = load_file(find_shard(folder))
    name = min(tensors)
    tensors[name] = torch.zeros(3, 5)
    save_file(tensors, find_shard(folder))


def contradict_heads(folder: Path) -> None:
    edit_config(folder, num_attention_heads=4, num_key_value_heads=3)


def enlarge_vocabulary(folder: Path) -> None:
    from megascale.data.tokenizer.tokenizer import train_tokenizer

    train_tokenizer(["some text of words"], 300).save(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_shard, r"model-00002-of-\d+\.safetensors cannot be read \(the file does not exist\)"),
        (cut_shard, r"model-00002-of-\d+\.safetensors cannot be read"),
        (reshape_tensor, r"is \[3, 5\], but config\.json gives"),
        (contradict_heads, "num_key_value_heads|kv_heads"),
        (enlarge_vocabulary, rf"the tokenizer has \d+ tokens, but vocab_size={VOCAB}"),
    ],
)
def test_a_bad_folder_is_named_before_anything_is_written(
    damage: Callable[[Path], None], message: str, folder, tokens, tmp_path
):
    damage(folder)
    with pytest.raises(DataError, match=message):
        api.import_model(folder, tmp_path / "runs" / "a")
    assert not (tmp_path / "runs").exists()
    with pytest.raises((ConfigError, DataError), match=message):
        first_loss(folder, tokens, tmp_path / "runs", "--train.name=b")
    assert not (tmp_path / "runs" / "b" / "config.toml").exists()
    assert not list((tmp_path / "runs").glob("*/checkpoints/step-*"))


def test_a_tokenizer_in_another_form_is_not_passed_over(folder, tokens, tmp_path):
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist; Use the tokenizer\.json of the same model"):
        first_loss(folder, tokens, tmp_path / "runs")
    assert not (tmp_path / "runs" / "default").exists()


def test_weights_of_a_folder_are_not_held_in_memory(folder, monkeypatch):
    """A logical tensor is read when it is asked for, and no file stays mapped."""
    from megascale.model.huggingface.import_model import read_folder

    imported = read_folder(folder)
    tensor = imported.tensors["layers.1.mlp.out.weight"]
    rows = imported.tensors.read_rows("layers.1.mlp.out.weight", 3, 7)
    assert torch.equal(rows, tensor[3:7])
    assert str(folder) not in Path("/proc/self/maps").read_text()
