"""Whole ways through the command line: a Hugging Face folder becomes a run and trains, a run becomes a folder."""

from __future__ import annotations

import errno
import json
import os
from itertools import cycle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale import api, checkpoint
from megascale.cli.main import main
from megascale.data.dataset.indexed import IndexedDataset
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tokenizer import load_tokenizer, train_tokenizer
from megascale.errors import ConfigError, DataError, MegascaleError
from megascale.model.huggingface.import_model import read_folder
from megascale.train.generation import Sampling, decode_stream, generate_tokens, sample_token
from megascale.train.restore import restore_engine, restore_model
from tests.conftest import lines
from tests.model.huggingface import CLOSE, CONFIGS, chunk_of, difference, load, small, transformers


def their_greedy(theirs, tokens: list[int], count: int, **options: object) -> list[int]:
    built = theirs.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False, **options)
    return built[0, len(tokens) :].tolist()


def test_an_imported_model_is_a_run_that_trains_evaluates_and_goes_out_again(tiny, tokens, megascale, tmp_path):
    theirs = small("llama", vocab_size=64, rope_parameters={"rope_type": "default", "rope_theta": 777.0})
    theirs.save_pretrained(tmp_path / "theirs")
    built = megascale("convert", "import", tmp_path / "theirs", "--out", "runs/mine", "--sequence-length", 16)
    assert built.returncode == 0, built.stderr
    assert "llama" in built.stdout
    run = tmp_path / "runs" / "mine"
    held_out = ["--file", tokens / "valid", "--json"]
    result = megascale("evaluate", "runs/mine", *held_out)
    assert result.returncode == 0, result.stderr
    loss = json.loads(result.stdout)["loss"]
    stream = torch.from_numpy(IndexedDataset(str(tokens / "valid")).stream[:].astype("int64"))
    windows = torch.cat([stream[-1:], stream])
    total = 0.0
    with torch.no_grad():
        for i in range(0, len(stream), 16):
            targets = stream[i : i + 16]
            logits = theirs(windows[None, i : i + len(targets)]).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    assert loss == pytest.approx(total / len(stream), abs=1e-5)
    options = [f"--data.train={tokens}/train", f"--data.valid={tokens}/valid", "--train.steps=4", "--lr.peak=1e-3"]
    options += ["--train.global_batch=4", "--train.micro_batch=2", "--observe.tensorboard=false"]
    trained = megascale("train", "runs/mine/config.toml", *options)
    assert trained.returncode == 0, trained.stderr
    metrics = [r["loss"] for r in lines(run / "metrics.jsonl") if "loss" in r]
    assert len(metrics) == 4
    assert metrics[0] == pytest.approx(loss, rel=0.2)  # it began with the imported weights
    assert checkpoint.steps(run / "checkpoints")[-1] == 4
    assert lines(run / "events.jsonl")[0]["event"] == "imported"
    out = megascale("convert", "export", "runs/mine", "--out", "out", "--json")
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)["family"] == "llama"
    model, _ = restore_model(run)
    repeated = load(tmp_path / "out")
    with torch.no_grad():
        expected = repeated(stream[None, :16]).logits[0]
        assert (model.compute_logits(model(stream[:16, None]))[:, 0] - expected).abs().max() < CLOSE
    old, new = theirs.state_dict(), repeated.state_dict()
    assert not torch.equal(old["lm_head.weight"], new["lm_head.weight"])  # it learnt
    assert repeated.config.rope_parameters["rope_theta"] == 777.0


def test_a_checkpoint_trained_in_3d_generates_the_same_text_in_transformers(tiny, megascale, tmp_path):
    """Eight processes, TP2 PP2 DP2, ZeRO-2: exported, loaded by transformers, continued greedily."""
    settings = ["--parallel.tensor=2", "--parallel.pipeline=2", "--parallel.data=2", "--parallel.zero=2"]
    settings += ["--model.block=parallel", "--model.positions=rotary", "--lr.peak=2e-2", "--train.steps=20"]
    settings += ["--model.sequence_length=32", "--train.micro_batch=1", "--model.tied_embeddings=false"]
    settings += ["--checkpoint.interval=0"]
    trained = megascale("train", tiny, *settings)
    assert trained.returncode == 0, trained.stderr
    out = megascale("convert", "export", "runs/tiny", "--out", "out", "--json")
    assert out.returncode == 0, out.stderr
    model, _ = restore_model(tmp_path / "runs" / "tiny")
    prompt = [3, 4, 5, 7]
    local = list(generate_tokens(model, prompt, 24, Sampling(temperature=0)))
    assert local == their_greedy(load(tmp_path / "out"), prompt, 24)
    assert len(set(local)) > 2  # it says something


def test_import_keeps_every_weight_and_the_engine_gives_the_same_logits(tmp_path):
    theirs = small("gpt_neox").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    api.import_model(tmp_path / "theirs", tmp_path / "runs" / "a")
    stored = checkpoint.inspect(tmp_path / "runs" / "a" / "checkpoints")
    assert {t.dtype for t in stored.tensors} == {"bfloat16"}
    model, _ = restore_model(tmp_path / "runs" / "a")
    assert difference(model, theirs.float()) < CLOSE
    engine, _ = restore_engine(tmp_path / "runs" / "a", device="cpu")
    for p, q in zip(model.parameters(), engine.chunks[0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_export_in_another_type_and_in_several_files(tmp_path):
    theirs = small("gpt2")
    theirs.save_pretrained(tmp_path / "theirs")
    api.import_model(tmp_path / "theirs", tmp_path / "runs" / "a")
    report = []
    api.export_model(
        tmp_path / "runs" / "a",
        tmp_path / "out",
        dtype="bfloat16",
        file_bytes=9000,
        progress=lambda done, total: report.append((done, total)),
    )
    repeated = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert repeated.dtype == torch.bfloat16
    for p, q in zip(theirs.parameters(), repeated.parameters(), strict=True):
        assert torch.equal(p.to(torch.bfloat16), q)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert report[-1][0] == report[-1][1] == index["metadata"]["total_size"]
    assert all(p.stat().st_size < 9000 + 4000 for p in (tmp_path / "out").glob("*.safetensors"))


def test_an_export_that_fails_leaves_nothing(tmp_path):
    small("gpt2").save_pretrained(tmp_path / "theirs")
    api.import_model(tmp_path / "theirs", tmp_path / "runs" / "a")

    def full(done: int, total: int) -> None:
        if done > total / 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    for present in ([], ["out"]):
        for name in present:
            (tmp_path / name).mkdir()
        with pytest.raises(MegascaleError, match=r"--out=.*out cannot be written: .*No space"):
            api.export_model(tmp_path / "runs" / "a", tmp_path / "out", file_bytes=9000, progress=full)
        assert sorted(p.name for p in tmp_path.iterdir()) == (present + ["runs", "theirs"])
    assert not list((tmp_path / "out").iterdir())


def test_an_export_whose_checkpoint_training_removes_takes_the_next(tokens, tmp_path):
    small("llama", vocab_size=64).save_pretrained(tmp_path / "theirs")
    run = tmp_path / "runs" / "a"
    api.import_model(tmp_path / "theirs", run, sequence_length=16)
    arguments = [f"--data.train={tokens}/train", "--checkpoint.keep=1", "--train.device=cpu", "--train.threads=1"]
    arguments += ["--train.global_batch=4", "--train.micro_batch=2", "--observe.tensorboard=false", "--lr.peak=1e-2"]

    def train(done: int, total: int) -> None:
        if checkpoint.steps(run / "checkpoints") != [4]:
            api.train(api.load_config(run / "config.toml", arguments + ["--train.steps=4"]))

    api.export_model(run, tmp_path / "out", file_bytes=9000, progress=train)
    model, _ = restore_model(run, step=4)
    theirs = load(tmp_path / "out")
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert (model.compute_logits(model(ids.t()))[:, 0] - theirs(ids).logits[0]).abs().max() < CLOSE
    with pytest.raises(DataError, match=r"no checkpoint .*step-0'; committed steps: \[4\]"):
        api.export_model(run, tmp_path / "one", step=0)


def test_an_export_fills_an_empty_folder(tmp_path, monkeypatch):
    """Such as the working directory or a mount point, which stay the folders that they are."""
    small("gpt2").save_pretrained(tmp_path / "theirs")
    run = tmp_path / "runs" / "a"
    api.import_model(tmp_path / "theirs", run)
    local, mounted = tmp_path / "here", tmp_path / "mounted"
    local.mkdir()
    (mounted / "lost+found").mkdir(parents=True)
    (tmp_path / "link").symlink_to(mounted)
    before = [folder.stat().st_ino for folder in (local, mounted)]
    monkeypatch.chdir(local)
    api.export_model(run, Path("."))
    api.export_model(run, tmp_path / "link", file_bytes=9000)
    api.export_model(run, Path("deep/down"))
    assert [folder.stat().st_ino for folder in (local, mounted)] == before
    for folder in (local, mounted, local / "deep" / "down"):
        load(folder)
        assert not [file for file in folder.iterdir() if file.name.startswith(".")]
    with pytest.raises(ConfigError, match="not an empty folder"):
        api.export_model(run, Path("."))
    with pytest.raises(ConfigError, match="cannot be"):
        api.export_model(run, local / "config.json" / "x")


def test_an_import_fills_the_working_directory_and_is_called_as_it(tmp_path, monkeypatch):
    small("gpt2").save_pretrained(tmp_path / "theirs")
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    built = api.import_model(tmp_path / "theirs", Path("."))
    assert built.path == tmp_path / "mine"
    assert api.load_config("config.toml").run_folder == tmp_path / "mine"
    with pytest.raises(ConfigError, match=r"--out=.*config\.toml.* cannot be created"):
        api.import_model(tmp_path / "theirs", tmp_path / "mine" / "config.toml" / "x")


def test_what_is_there_is_not_written_over(tmp_path):
    small("gpt2").save_pretrained(tmp_path / "theirs")
    api.import_model(tmp_path / "theirs", tmp_path / "runs" / "a")
    with pytest.raises(ConfigError, match="is a run already"):
        api.import_model(tmp_path / "theirs", tmp_path / "runs" / "a")
    with pytest.raises(ConfigError, match="not an empty folder"):
        api.export_model(tmp_path / "runs" / "a", tmp_path / "theirs")
    with pytest.raises(ConfigError, match="learned positions"):
        api.import_model(tmp_path / "theirs", tmp_path / "runs" / "b", sequence_length=8)
    assert not (tmp_path / "runs" / "b").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["import", "nowhere", "--out", "runs/x"], 4, "nowhere/config.json"),
        (["import", "theirs", "--out", "runs/.x"], 2, "train.name"),
        (["export", "nowhere", "--out", "x"], 4, "not a run folder"),
        (["export", "runs/a", "--out", "x", "--family", "llama"], 2, "model.norm='layernorm'"),
        (["export", "runs/a", "--out", "x", "--dtype", "int8"], 2, "--dtype=int8"),
        (["export", "runs/a", "--out", "x", "--step", "7"], 4, "step-7"),
    ],
)
def test_wrong_input_is_one_paragraph(monkeypatch, capsys, tmp_path, arguments, code, part):
    monkeypatch.chdir(tmp_path)
    small("gpt2").save_pretrained(tmp_path / "theirs")
    api.import_model(tmp_path / "theirs", tmp_path / "runs" / "a")
    monkeypatch.setattr("sys.argv", ["megascale", "convert"] + list(arguments))
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert part in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists() or not any((tmp_path / "x").iterdir())


# generation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "penalty"), zip(CONFIGS, cycle([1.0, 1.7]), strict=False))
def test_greedy_generation_is_transformers_token_by_token(family, penalty, tmp_path):
    """Rotary models go on past the length they were made for, windows and all."""
    theirs = small(family, seed=5)
    theirs.save_pretrained(tmp_path)
    result = read_folder(tmp_path)
    prompt, count = [3, 14, 15, 92, 65, 35, 8], 24 if result.model.positions == "learned" else 45
    if family == "gptj":
        count = 24  # its table of angles ends with n_positions
    sampling = Sampling(temperature=0, repetition_penalty=penalty)
    local = list(generate_tokens(chunk_of(result.model, result.tensors), prompt, count, sampling))
    assert local == their_greedy(theirs, prompt, count, repetition_penalty=penalty)
    assert len(set(local)) > (1 if penalty == 1 else 9)


def test_learned_positions_end_the_text(tmp_path):
    small("gpt2").save_pretrained(tmp_path)
    result = read_folder(tmp_path)
    chunk = chunk_of(result.model, result.tensors)
    assert len(list(generate_tokens(chunk, [1, 2, 3], 100, Sampling(temperature=0)))) == 30
    with pytest.raises(ConfigError, match="sequence_length=32"):
        next(generate_tokens(chunk, [1] * 32, 1))
    with pytest.raises(ConfigError, match="vocab_size=101"):
        next(generate_tokens(chunk, [101], 1))


def test_sampling_draws_what_it_says():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).log_softmax(0)

    def drawn(**options: float) -> list[float]:
        generator = torch.Generator().manual_seed(0)
        counts = torch.bincount(
            torch.tensor([sample_token(logits, Sampling(**options), generator) for _ in range(2000)]), minlength=4
        )
        return (counts / 2000).tolist()

    assert drawn(temperature=0) == [1, 0, 0, 0]
    assert drawn(temperature=1, top_k=0) == pytest.approx(logits.exp().tolist(), abs=0.04)
    assert drawn(temperature=2, top_k=0) == pytest.approx((logits / 2).softmax(0).tolist(), abs=0.04)
    assert drawn(temperature=1, top_k=2) == pytest.approx(logits[:2].softmax(0).tolist() + [0, 0], abs=0.04)
    # 0.64 alone is below 0.7, so the second is in; 0.0 still leaves the likeliest.
    assert drawn(temperature=1, top_k=0, top_p=0.7) == pytest.approx(logits[:2].softmax(0).tolist() + [0, 0], abs=0.04)
    assert drawn(temperature=1, top_k=0, top_p=0.0) == [1, 0, 0, 0]


class Letters(Tokenizer):
    """Byte by byte: characters of several bytes come in pieces."""

    def to_json(self) -> str:
        return ""

    def decode(self, ids) -> str:
        return bytes(ids).decode(errors="replace")

    def _encode(self, texts):
        return [list(text.encode()) for text in texts]


@given(st.text(alphabet="ab é中", max_size=20), st.lists(st.text(alphabet="ab é", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_the_first_stop_and_is_never_taken_back(text, stops):
    pieces = list(decode_stream(Letters(), text.encode(), stops))
    # Texts are looked at as they grow, so of overlapping stops the one that is complete first ends the text.
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    observed = text[: min(ends)] if ends else text
    assert "".join(pieces) == min(
        (observed[: observed.find(stop)] for stop in stops if stop in observed), key=len, default=text
    )
    assert all(pieces)


# tokenizers --------------------------------------------------------------------------------------------------------

TEXT = "def queue(self):\n    return self.items[0]  # the first: naïve, 中文\n"


@pytest.fixture
def named(tmp_path):
    """A saved Llama of 320 tokens with a trained tokenizer of 300 beside it, and the tokenizer."""
    folder = tmp_path / "theirs"
    small("llama", vocab_size=320, eos_token_id=0, max_position_embeddings=64).save_pretrained(folder)
    tokenizer = train_tokenizer([TEXT * 3], 300)
    tokenizer.save(folder / "tokenizer.json")
    return folder, tokenizer


def test_a_tokenizer_comes_in_and_goes_out(named, tmp_path):
    folder, tokenizer = named
    built = api.import_model(folder, tmp_path / "runs" / "a")
    assert built.tokenizer
    assert not built.notes
    config = api.load_config(tmp_path / "runs" / "a" / "config.toml")
    assert load_tokenizer(config.data.tokenizer).encode(TEXT) == tokenizer.encode(TEXT)
    api.export_model(tmp_path / "runs" / "a", tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT)["input_ids"] == tokenizer.encode(TEXT)
    assert theirs.decode(theirs(TEXT)["input_ids"]) == TEXT
    assert theirs.eos_token_id == tokenizer.end_of_document == load(tmp_path / "out").config.eos_token_id
    assert theirs.model_max_length == 64


def test_a_vocabulary_and_merges_make_a_tokenizer(named, tmp_path):
    """GPT-2's older form."""
    folder, tokenizer = named
    record = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(record["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in record["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer.json").unlink()
    built = api.import_model(folder, tmp_path / "runs" / "a")
    assert built.tokenizer
    result = load_tokenizer(tmp_path / "runs" / "a" / "tokenizer.json")
    assert result.encode(TEXT) == tokenizer.encode(TEXT)
    assert result.end_of_document == tokenizer.end_of_document


def test_a_model_without_a_tokenizer_says_what_to_do(tmp_path):
    small("gpt2").save_pretrained(tmp_path / "theirs")
    built = api.import_model(tmp_path / "theirs", tmp_path / "runs" / "a")
    assert not built.tokenizer
    assert "tokenizer.json" in built.notes[-1]
    assert not api.export_model(tmp_path / "runs" / "a", tmp_path / "out").tokenizer


def test_an_end_that_only_the_models_settings_name_is_found(named, tmp_path):
    folder, _ = named
    text = (folder / "tokenizer.json").read_text().replace("<|endoftext|>", "<fin>")
    (folder / "tokenizer.json").write_text(text)
    api.import_model(folder, tmp_path / "runs" / "a")
    assert load_tokenizer(tmp_path / "runs" / "a" / "tokenizer.json").end_of_document == 0


def test_a_prompt_begins_as_the_tokenizers_template_begins(named):
    from tokenizers import Tokenizer as Library
    from tokenizers.processors import TemplateProcessing

    folder, tokenizer = named
    assert tokenizer.encode_prompt("def") == tokenizer.encode("def")
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    library.save(str(folder / "tokenizer.json"))
    repeated = load_tokenizer(folder / "tokenizer.json")
    assert repeated.encode_prompt("def") == [0] + list(tokenizer.encode("def"))
    assert repeated.encode("def") == tokenizer.encode("def")


@pytest.fixture
def chat(named):
    """A saved Llama that says token 1 whatever it reads, with the files of a model for conversations."""
    folder, _ = named
    theirs = small("llama", vocab_size=320, max_position_embeddings=64)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
        theirs.lm_head.weight[1] = 1.0
    theirs.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


def edit(file, **values: object) -> None:
    """Change values of a JSON file, which is made if it is not there."""
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | values))


@pytest.mark.parametrize(
    ("of_generation", "of_model", "noted"),
    [
        ({"eos_token_id": [0, 1], "bos_token_id": 2, "temperature": 0.6}, {"eos_token_id": [0, 1]}, False),
        ({}, {"eos_token_id": [0, 1], "bos_token_id": 2}, False),
        ({"eos_token_id": [0, 1]}, {"eos_token_id": 0}, False),
        ({"eos_token_id": 0}, {"eos_token_id": [0, 1], "pad_token_id": -1}, True),
        ({"eos_token_id": 1}, {}, False),
    ],
)
def test_every_end_of_a_text_comes_in_ends_it_and_goes_out(chat, tmp_path, of_generation, of_model, noted):
    if of_generation:
        edit(chat / "generation_config.json", **of_generation)
    edit(chat / "config.json", **of_model)
    built = api.import_model(chat, tmp_path / "runs" / "a")
    assert any("different eos_token_id" in note for note in built.notes) == noted
    assert "".join(api.generate(tmp_path / "runs" / "a", "def", tokens=4, temperature=0, device="cpu")) == ""
    api.export_model(tmp_path / "runs" / "a", tmp_path / "out")
    repeated = load(tmp_path / "out")
    expected = {0, 1} if of_model else {1}
    for settings in (repeated.config, repeated.generation_config):
        ends = settings.eos_token_id
        assert set(ends if isinstance(ends, list) else [ends]) == expected
    assert len(their_greedy(repeated, [5, 6], 4)) == 1
    assert repeated.config.bos_token_id == {**of_model, **of_generation}.get("bos_token_id")
    assert repeated.config.pad_token_id is None
    if "temperature" in of_generation:
        assert repeated.generation_config.temperature == 0.6


def test_templates_of_conversations_come_in_and_go_out(chat, tmp_path):
    api.import_model(chat, tmp_path / "runs" / "a")
    api.export_model(tmp_path / "runs" / "a", tmp_path / "out")
    for name in ("chat_template.jinja", "additional_chat_templates/tools.jinja", "special_tokens_map.json"):
        assert (tmp_path / "out" / name).read_text() == (chat / name).read_text()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[hi]"


def test_files_that_cannot_be_read_are_left_out_with_a_note_or_refused(chat, tmp_path):
    (chat / "generation_config.json").write_text("[1")
    (chat / "tokenizer_config.json").write_text("nothing")
    notes = " ".join(api.import_model(chat, tmp_path / "runs" / "a").notes)
    assert "generation_config.json" in notes
    assert "tokenizer_config.json is not a JSON object" in notes
    (chat / "chat_template.jinja").unlink()
    os.mkfifo(chat / "chat_template.jinja")
    with pytest.raises(DataError, match=r"chat_template\.jinja cannot be copied: .*pipe"):
        api.import_model(chat, tmp_path / "runs" / "b")


def test_a_tiktoken_encoding_goes_out(tmp_path, named):
    pytest.importorskip("tiktoken")
    from megascale.data.tokenizer.convert_tokenizer import export_tokenizer
    from megascale.data.tokenizer.tiktoken_file import PUBLISHED, TiktokenTokenizer

    ranks = {bytes([b]): b for b in range(256)}
    for word in (
        b" r",
        b"se",
        b"lf",
        b"self",
        b"  ",
        b"    ",
        b"de",
        b"def",
        b"ret",
        b"item",
        b"\xe4\xb8",
        b"\xe4\xb8\xad",
    ):
        ranks[word] = len(ranks)
    pattern = PUBLISHED["cl100k_base"][0]
    special = {"<|endoftext|>": len(ranks) + 1, "<|other|>": len(ranks) + 2}
    tokenizer = TiktokenTokenizer("mine", pattern, ranks, special, "<|endoftext|>")
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "out").mkdir()
    export_tokenizer(tokenizer, tmp_path / "tokenizer.json", tmp_path / "out", 64)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    for text in (TEXT, "self  items\n\n 123456 don't ITEM ", "中文 self中", ""):
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
        assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token_id == tokenizer.end_of_document


def test_generate_reads_a_file_and_ends_before_a_stop(named, megascale, tmp_path):
    folder, tokenizer = named
    api.import_model(folder, tmp_path / "runs" / "a")
    (tmp_path / "begun.txt").write_text(TEXT)
    common = ["generate", "runs/a", "--prompt-file", "begun.txt", "--temperature", "0", "--json", "--tokens", "20"]
    full = megascale(*common)
    assert full.returncode == 0, full.stderr
    assert json.loads(full.stdout)["step"] == 0
    text = json.loads(full.stdout)["text"]
    ids = tokenizer.encode(TEXT)
    assert text == tokenizer.decode(their_greedy(load_run(tmp_path), ids, 20, eos_token_id=0)).rstrip("\ufffd")
    middle = text[3:5]
    cut = megascale(*common, "--stop", middle)
    assert json.loads(cut.stdout)["text"] == text[: text.index(middle)]
    pair = megascale(*common, "--prompt", "x")
    assert pair.returncode == 2
    missing = megascale("generate", "runs/a", "--prompt-file", "nowhere.txt")
    assert missing.returncode == 4
    assert "nowhere.txt" in missing.stderr


def load_run(tmp_path):
    api.export_model(tmp_path / "runs" / "a", tmp_path / "exported")
    return load(tmp_path / "exported")
