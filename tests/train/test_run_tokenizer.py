"""A run makes and exports text without its data set, and from any folder: it keeps its tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megascale import api
from megascale.config import from_tree
from megascale.data.prepare.builder import build
from megascale.data.tokenizer.tokenizer import load_tokenizer
from megascale.errors import DataError


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data sets `ds` and `other` of two tokenizers, made of the text in `in`."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "in").mkdir()
    for i in range(60):
        (folder / "in" / f"{i}.txt").write_text(f"{i} " + "word and another one\n" * (i % 9))
    for name, size in (("ds", 290), ("other", 280)):
        build(folder / name, inputs=[folder / "in"], vocab_size=size, progress=False)
    return folder


@pytest.fixture
def work(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with the data sets in it, which is the working directory."""
    shutil.copytree(built, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def train(**sections: dict[str, object]) -> None:
    """Train a step of a run `runs/a` on `ds`, all paths relative."""
    tree: dict[str, dict[str, object]] = {
        "model": {"layers": 1, "hidden": 16, "heads": 2, "sequence_length": 8, "positions": "rotary"},
        "data": {"train": ["ds/train"], "valid": "ds/valid"},
        "train": {"name": "a", "steps": 1, "micro_batch": 1, "global_batch": 2, "threads": 1, "device": "cpu"},
        "observe": {"tensorboard": False, "spans": 0},
    }
    api.train(from_tree({name: tree.get(name, {}) | sections.get(name, {}) for name in tree.keys() | sections.keys()}))


def text_of(run: str | Path) -> str:
    return "".join(api.generate(run, "word", tokens=5, temperature=0, device="cpu"))


def test_a_run_needs_no_data_set_to_make_and_export_text(work):
    train()
    text, sha256 = text_of("runs/a"), load_tokenizer("ds/tokenizer.json").sha256
    shutil.rmtree("ds")
    assert text_of("runs/a") == text
    assert not api.export_model("runs/a", "out").notes
    assert load_tokenizer("out/tokenizer.json").sha256 == sha256
    assert json.loads(Path("out/config.json").read_text())["eos_token_id"] == 0


def test_a_run_is_read_from_any_folder(work, monkeypatch):
    train(checkpoint={"location": "elsewhere/a"})
    text, loss = text_of("runs/a"), api.evaluate("runs/a", device="cpu").loss
    for folder, run in ((work.parent, "work/runs/a"), (work / "runs", "a"), (work / "ds", work / "runs" / "a")):
        monkeypatch.chdir(folder)
        assert text_of(run) == text
        assert api.evaluate(run, device="cpu").loss == loss
        assert api.export_model(run, work.parent / "out").tokenizer
        shutil.rmtree(work.parent / "out")
    # The same names lead elsewhere from here: they are not the run's.
    monkeypatch.chdir(work.parent)
    shutil.copytree("work/other", "ds")
    Path("work/runs/a/tokenizer.json").unlink()
    assert text_of("work/runs/a") == text
    assert api.evaluate("work/runs/a", device="cpu").loss == loss


def test_the_files_next_to_the_tokenizer_are_kept(work):
    arguments = json.loads(Path("ds/tokenizer.json").read_text())
    arguments["added_tokens"].append(
        dict(arguments["added_tokens"][0], id=arguments["model"]["vocab"]["an"], content="an")
    )
    Path("mine").mkdir()
    Path("mine/words.json").write_text(json.dumps(arguments))
    Path("mine/tokenizer_config.json").write_text(json.dumps({"eos_token": "an", "clean": False}))
    Path("mine/chat_template.jinja").write_text("{{ messages }}")
    Path("mine/generation_config.json").write_text('{"top_p": 0.5}')
    train(data={"train": ["in"], "valid": None, "tokenizer": "mine/words.json"})
    text = text_of("runs/a")
    shutil.rmtree("mine")
    assert text_of("runs/a") == text
    assert load_tokenizer("runs/a/tokenizer.json").end_of_document == arguments["model"]["vocab"]["an"]
    api.export_model("runs/a", "out")
    assert Path("out/chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads(Path("out/generation_config.json").read_text()) == {"top_p": 0.5}
    # The run is begun anew with another tokenizer, beside which nothing lies.
    train(checkpoint={"resume": False})
    assert load_tokenizer("runs/a/tokenizer.json").sha256 == load_tokenizer("ds/tokenizer.json").sha256
    assert not [name for name in ("tokenizer_config.json", "chat_template.jinja") if (Path("runs/a") / name).exists()]
    assert not Path("runs/a/generation_config.json").exists()


def test_a_tiktoken_encoding_is_kept(work):
    pytest.importorskip("tiktoken")
    import base64

    ranks = "\n".join(f"{base64.b64encode(bytes([b])).decode()} {b}" for b in range(256))
    Path("mine.tiktoken").write_text(ranks)
    Path("mine.json").write_text('{"pattern": "[a-z]+|[^a-z]", "special_tokens": {"<|endoftext|>": 256}}')
    train(data={"train": ["in"], "valid": None, "tokenizer": "mine.tiktoken"})
    text = text_of("runs/a")
    for file in ("mine.tiktoken", "mine.json"):
        Path(file).unlink()
    assert text_of("runs/a") == text
    assert api.export_model("runs/a", "out").tokenizer


def test_a_tokenizer_that_is_lost_is_not_left_out_in_silence(work):
    """An older version trained the run and stored no tokenizer."""
    train()
    for file in ("runs/a/tokenizer.json", "ds/tokenizer.json"):
        Path(file).unlink()
    with pytest.raises(DataError, match=r"ds/tokenizer\.json does not exist.*--no-tokenizer"):
        api.export_model("runs/a", "out")
    assert not api.export_model("runs/a", "out", tokenizer=False).tokenizer
    with pytest.raises(DataError, match=r"ds/tokenizer\.json does not exist"):
        text_of("runs/a")


def test_a_copy_that_is_damaged_is_not_needed_while_the_data_set_is_there(work):
    train()
    text = text_of("runs/a")
    Path("runs/a/tokenizer.json").write_text("{")
    assert text_of("runs/a") == text
    train(train={"steps": 2})  # and is made again at the next start
    assert load_tokenizer("runs/a/tokenizer.json").vocab_size == 290
