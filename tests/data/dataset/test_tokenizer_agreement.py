"""Token files of another tokenizer, and token ids that the vocabulary does not have: refused by name, on every path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale import api
from megascale.config import from_tree
from megascale.data.dataset.description import describe_token_file
from megascale.data.dataset.held_out import HeldOut
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.dataset.tokenizer_agreement import RECORD, read_identity
from megascale.data.prepare.builder import build
from megascale.data.tokenizer.tokenizer import load_tokenizer
from megascale.errors import ConfigError, DataError
from tests.conftest import lines
from tests.data.sample_sources import check_tokenizers_of, open_samples
from tests.exact.processes import Start, run_ranks

NAMES_BOTH = r"b/tokenizer\.json \(280 entries, .*a/tokenizer\.json \(290 entries, .*data build --tokenizer .*/a/token"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets `a` and `b` of one text by two tokenizers, `c` by a's, and a run `runs/one` trained on a."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "in").mkdir()
    for i in range(60):
        (folder / "in" / f"{i}.txt").write_text(f"{i} " + "word and another one\n" * (i % 9))
    for name, size in (("a", 290), ("b", 280)):
        build(folder / name, inputs=[folder / "in"], vocab_size=size, progress=False)
    build(folder / "c", inputs=[folder / "in"], tokenizer=folder / "a" / "tokenizer.json", progress=False)
    api.train(from_tree(tree(folder, "one")))
    return folder


def tree(built: Path, name: str, valid: str | None = None, **data: object) -> dict:
    model = {"layers": 1, "hidden": 16, "heads": 2, "sequence_length": 8}
    train = {"runs": str(built / "runs"), "name": name, "steps": 1, "micro_batch": 1, "global_batch": 2, "threads": 1}
    data = {"train": [str(built / "a" / "train")], "valid": valid or str(built / "a" / "valid"), **data}
    return {"model": model, "data": data, "train": {**train, "device": "cpu"}, "observe": {"tensorboard": False}}


def test_a_file_of_another_tokenizer_is_not_evaluated(prepared: Path) -> None:
    run = prepared / "runs" / "one"
    with pytest.raises(DataError, match=r"--file=.*b/valid.*" + NAMES_BOTH) as error:
        api.evaluate(run, str(prepared / "b" / "valid"), device="cpu")
    assert error.value.exit_code == 4
    assert api.evaluate(run, str(prepared / "c" / "valid"), device="cpu") == api.evaluate(run, device="cpu")


def test_held_out_data_of_another_tokenizer_is_refused_before_the_first_step(prepared: Path) -> None:
    with pytest.raises(DataError, match=r"data\.valid=.*b/valid.*" + NAMES_BOTH):
        api.train(from_tree(tree(prepared, "two", valid=str(prepared / "b" / "valid"))))
    assert not (prepared / "runs" / "two" / "metrics.jsonl").exists()
    with pytest.raises(DataError, match=r"nothing\.idx"):
        api.train(from_tree(tree(prepared, "two", valid=str(prepared / "a" / "nothing"))))


def test_of_a_blend_every_file_counts(prepared: Path, tmp_path: Path) -> None:
    """Also where nothing is known of the first, and where text is tokenised on the fly."""
    bare = str(tmp_path / "bare")
    with IndexedWriter(bare, np.uint16) as writer:
        writer.add(np.arange(100))
    b = str(prepared / "b" / "valid")
    for train in ([bare, str(prepared / "a" / "train")], [str(prepared / "a" / "train"), bare]):
        with pytest.raises(DataError, match=NAMES_BOTH):
            check_tokenizers_of(from_tree(tree(prepared, "x", valid=b, train=train)))
    text = {"train": [str(prepared / "in")], "tokenizer": str(prepared / "a" / "tokenizer.json")}
    with pytest.raises(DataError, match=NAMES_BOTH):
        check_tokenizers_of(from_tree(tree(prepared, "x", valid=b, **text)))
    check_tokenizers_of(from_tree(tree(prepared, "x", **text)))
    check_tokenizers_of(from_tree(tree(prepared, "x", valid=bare)))  # nothing is known of it; its ids decide


def test_a_tokenizer_next_to_a_file_without_manifest_counts(prepared: Path, tmp_path: Path) -> None:
    for part in ("valid.bin", "valid.idx", "tokenizer.json"):
        shutil.copy(prepared / "b" / part, tmp_path)
    with pytest.raises(DataError, match="of another tokenizer"):
        api.evaluate(prepared / "runs" / "one", str(tmp_path / "valid"), device="cpu")
    (tmp_path / "tokenizer.json").write_text("of another kind")
    assert api.evaluate(prepared / "runs" / "one", str(tmp_path / "valid"), device="cpu").tokens


def test_a_larger_vocabulary_is_refused_where_the_runs_tokenizer_is_unknown(prepared: Path, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "bare", np.uint16) as writer:
        writer.add(np.arange(100))
    settings = tree(prepared, "x", train=[str(tmp_path / "bare")])
    settings["model"]["vocab_size"] = 285
    with pytest.raises(DataError, match=r"a/tokenizer\.json \(290 entries.*model\.vocab_size=285"):
        check_tokenizers_of(from_tree(settings))


def test_a_run_goes_on_with_its_own_tokenizer_when_another_takes_its_place(prepared: Path, tmp_path: Path) -> None:
    """The copy in the run folder counts; where that is exchanged too, no text is made of another's ids."""
    local = tmp_path / "tokenizer.json"
    load_tokenizer(prepared / "a" / "tokenizer.json").save(local)
    settings = tree(prepared, "three", tokenizer=str(local))
    settings["train"]["runs"] = str(tmp_path)
    api.train(from_tree(settings))
    run = tmp_path / "three"
    text = "".join(api.generate(run, "word", tokens=3, device="cpu"))
    assert text
    shutil.copy(prepared / "b" / "tokenizer.json", local)
    assert "".join(api.generate(run, "word", tokens=3, device="cpu")) == text
    assert api.evaluate(run, device="cpu").tokens
    assert api.export_model(run, tmp_path / "one", family="gpt2").tokenizer
    assert load_tokenizer(tmp_path / "one" / "tokenizer.json").sha256 == read_identity(run).sha256
    shutil.copy(prepared / "b" / "tokenizer.json", run / "tokenizer.json")
    lost = r"three/tokenizer\.json is not the tokenizer that .*three was trained with"
    with pytest.raises(DataError, match=lost):
        list(api.generate(run, "word", device="cpu"))
    with pytest.raises(DataError, match=lost + ".*--no-tokenizer"):
        api.export_model(run, tmp_path / "two", family="gpt2")
    assert not api.export_model(run, tmp_path / "two", family="gpt2", tokenizer=False).tokenizer
    assert api.evaluate(run, device="cpu").tokens
    local.unlink()
    with pytest.raises(DataError, match="of another tokenizer"):
        api.evaluate(run, str(prepared / "b" / "valid"), device="cpu")


def test_a_tokenizer_replaced_next_to_its_data_set_is_refused(prepared: Path, tmp_path: Path) -> None:
    """The check runs before training and in every reader: the manifest has a hash of the tokens' tokenizer."""
    shutil.copytree(prepared / "a", tmp_path / "a")
    local = tmp_path / "a" / "tokenizer.json"
    settings = tree(prepared, "x", train=[str(tmp_path / "a" / "train")])
    settings["train"]["runs"] = str(tmp_path)
    api.train(from_tree(settings))
    run = tmp_path / "x"
    shutil.copy(prepared / "b" / "tokenizer.json", local)
    refused = (
        rf"{local} is not the tokenizer that {tmp_path}/a was built with \(sha256 .*290 entries.*Restore the files"
    )
    settings["train"]["name"] = "y"
    config = from_tree(settings)
    for use in (
        lambda: api.resolve(config),
        lambda: api.train(config),
        lambda: check_tokenizers_of(config),
        lambda: describe_token_file(tmp_path / "a" / "train"),
    ):
        with pytest.raises(DataError, match=refused):
            use()
    assert not (tmp_path / "y" / "metrics.jsonl").exists()
    # A run that was trained before keeps a copy of its own.
    assert list(api.generate(run, "word", tokens=2, device="cpu"))
    assert api.evaluate(run, device="cpu").loss > 0
    assert api.export_model(run, tmp_path / "out", family="gpt2").tokenizer
    settings["data"]["tokenizer"] = str(prepared / "a" / "tokenizer.json")
    check_tokenizers_of(from_tree(settings))  # another one is named, so the file beside the tokens counts for nothing
    # The build makes good what it finds damaged.
    build(tmp_path / "a", inputs=[prepared / "in"], vocab_size=290, progress=False)
    assert load_tokenizer(local).sha256 == load_tokenizer(prepared / "a" / "tokenizer.json").sha256


def test_a_tokenizer_that_was_only_formatted_anew_is_the_same(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared / "a", tmp_path / "a")
    local = tmp_path / "a" / "tokenizer.json"
    config = from_tree(tree(prepared, "x", train=[str(tmp_path / "a" / "train")]))
    local.write_text(json.dumps(json.loads(local.read_text())))
    check_tokenizers_of(config)
    local.write_text("{}")
    with pytest.raises(DataError, match=r"is not a tokenizer\.json that can be read"):
        check_tokenizers_of(config)
    local.unlink()
    check_tokenizers_of(config)  # a missing one is no other one


def test_another_end_of_a_document_is_another_tokenizer(prepared: Path, tmp_path: Path) -> None:
    """The end is named by a file of its own, which may change while the tokenizer's does not."""
    shutil.copytree(prepared / "a", tmp_path / "a")
    config = from_tree(tree(prepared, "x", train=[str(tmp_path / "a" / "train")]))
    check_tokenizers_of(config)
    (tmp_path / "a" / "tokenizer_config.json").write_text('{"eos_token": "word"}')
    with pytest.raises(DataError, match=r"end of a document in its tokenizer_config\.json, was changed"):
        check_tokenizers_of(config)


def test_a_run_of_an_older_version_is_read(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared / "runs" / "one", tmp_path / "old")
    assert read_identity(tmp_path / "old") is not None
    (tmp_path / "old" / RECORD).unlink()
    assert api.evaluate(tmp_path / "old", device="cpu").tokens
    with pytest.raises(DataError, match=NAMES_BOTH):
        api.evaluate(tmp_path / "old", str(prepared / "b" / "valid"), device="cpu")


# token ids ----------------------------------------------------------------------------------------------------------


def write(path: Path, tokens: list[int]) -> str:
    with IndexedWriter(path, np.int32) as writer:
        writer.add(np.array(tokens))
    return str(path)


@given(
    tokens=st.lists(st.integers(0, 9), min_size=10, max_size=60),
    at=st.integers(0, 59),
    bad=st.one_of(st.integers(-200, -1), st.integers(10, 1 << 30), st.just(-100)),
    length=st.integers(2, 9),
    stride=st.integers(1, 9),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_foreign_id_is_named_with_its_place(
    tmp_path: Path, tokens: list[int], at: int, bad: int, length: int, stride: int
) -> None:
    at %= len(tokens)
    tokens[at] = bad
    path = write(tmp_path / "t", tokens)
    named = f"t holds token id {bad} and model.vocab_size=10 \\(token {at} of the file"
    stored = HeldOut(path, length, 10, min(stride, length))
    with pytest.raises(DataError, match="data.valid: .*" + named):
        stored.read_window_range(0, stored.windows)
    source = open_samples(
        from_tree({"model": {"sequence_length": length, "vocab_size": 10}, "data": {"train": [path]}})
    )
    if at <= source.windows * length:  # the rest of the file is in no sample
        with pytest.raises(DataError, match="data.train: .*" + named):
            source.read_tokens(0, source.windows)


@pytest.mark.parametrize("bad", [-1, -100, 64])
def test_held_out_data_with_a_foreign_id_ends_the_evaluation(tiny: Path, tmp_path: Path, bad: int) -> None:
    """-100 is what marks places that do not count: it would go by unseen."""
    valid = write(tmp_path / "bad", [1, 2, 3, bad] + list(range(40)))
    settings = api.load_config(tiny, ["--train.steps=1"])
    api.train(settings)
    named = rf"bad holds token id {bad} and model\.vocab_size=64 \(token 3 "
    with pytest.raises(DataError, match="--file: .*" + named):
        api.evaluate(tmp_path / "runs" / "tiny", valid, device="cpu")
    with pytest.raises(DataError, match=r"data\.valid: .*" + named):
        api.train(api.load_config(tiny, ["--train.steps=2", f"--data.valid={valid}"]))
    assert max(r["step"] for r in lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")) == 1  # before the next step


@pytest.mark.parametrize("key", ["train", "valid"])
def test_tensor_parallel_ranks_refuse_a_foreign_id(tiny: Path, tmp_path: Path, key: str) -> None:
    """Cut over ranks, an id of no rank would be looked up as zeros."""
    file = write(tmp_path / "bad", [-3] + list(range(1, 60)))
    value = f'["{file}"]' if key == "train" else file
    arguments = ["--parallel.tensor=2", "--train.steps=4", f"--data.{key}={value}"]
    ranks = run_ranks(tiny, arguments, [Start(0, 2), Start(1, 2)])
    assert all(rank.code for rank in ranks), ranks
    report = f"data.{key}: {file} holds token id -3 and model.vocab_size=64 (token 0 of"
    assert any(report in rank.said for rank in ranks), ranks


def test_a_prompt_with_a_foreign_id_is_refused() -> None:
    from megascale.model.transformer import Chunk
    from megascale.train.generation import generate_tokens

    chunk = Chunk(from_tree({"model": {"vocab_size": 8, "layers": 1}}).model, range(1), is_first=True, is_last=True)
    for bad in (-1, 8):
        with pytest.raises(ConfigError, match=f"token {bad} and"):
            next(generate_tokens(chunk, [1, bad], 1))
