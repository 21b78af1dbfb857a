"""Resumption: a start needs its own run, model, tokenizer and data. A refused start changes nothing."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale import checkpoint
from megascale.api import evaluate, export_model, generate, load_config, train
from megascale.checkpoint import setting_changes
from megascale.checkpoint.background import service_protocol
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.step_folders import COMMIT
from megascale.config import CHANGEABLE_KEYS, Config, from_tree
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.dataset.ledger import check_ledger
from megascale.data.tokenizer.tokenizer import train_tokenizer
from megascale.errors import ConfigError, DataError
from tests.chaos.soak.resumes import state_of
from tests.conftest import lines
from tests.data.sample_sources import open_samples

ROTARY = "--model.positions=rotary"


@pytest.fixture(scope="module")
def stopped(tokens, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one, `tiny`, that was stopped after step 5 of 8, and the data set beside it."""
    from tests.conftest import TINY

    folder = tmp_path_factory.mktemp("stopped")
    shutil.copytree(tokens, folder / "data")
    (folder / "tiny.toml").write_text(TINY.format(data=folder / "data", runs=folder / "runs"))
    train(load_config(folder / "tiny.toml", [ROTARY, "--train.stop_after=5"]))
    return folder


@pytest.fixture
def resume(stopped: Path, tmp_path: Path):
    """Starts a copy of that run once more with other settings; returns its folder."""
    shutil.copytree(stopped / "runs", tmp_path / "runs")

    def start(*options: str) -> Path:
        train(load_config(stopped / "tiny.toml", [ROTARY, f"--train.runs={tmp_path / 'runs'}"] + list(options)))
        return tmp_path / "runs" / "tiny"

    start.run = tmp_path / "runs" / "tiny"
    start.folder = stopped
    return start


def refused(repeated, *options: str, output: str, kind: type[Exception] = DataError) -> None:
    before = state_of(repeated.run)
    with pytest.raises(kind, match=output):
        repeated(*options)
    assert state_of(repeated.run) == before


def rewrite_state(run: Path, *drop: str, **more: object) -> None:
    """Change what the checkpoints of a run say besides tensors."""
    for file in run.glob(f"checkpoints/step-*/{COMMIT}"):
        record = json.loads(file.read_bytes().partition(b"\n")[0])
        record["state"] = {k: v for k, v in record["state"].items() if k not in drop} | more
        body = json.dumps(record, sort_keys=True).encode()
        file.write_bytes(body + b"\n" + f"{crc32(body):08x}\n".encode())


@pytest.mark.parametrize(
    ("setting", "saved"),
    [
        ("model.layers=1", "2"),
        ("model.tied_embeddings=false", "true"),
        ("model.heads=2", "4"),
        ("model.activation=gelu_tanh", "gelu"),
        ("model.window=8", "not set"),
        ("model.norm_eps=1e-6", "1e-05"),
        ("model.block=parallel", "serial"),
        ("model.rotary_base=500.0", "10000.0"),
        ("model.vocab_size=72", "64"),
    ],
)
def test_another_model_is_refused(resume, setting: str, saved: str) -> None:
    key = setting.partition("=")[0]
    refused(resume, f"--{setting}", output=rf"of another model: {key} was {saved} and is .*--train\.name")


@pytest.mark.parametrize(
    "setting",
    [
        "train.seed=1",
        "model.sequence_length=15",
        "model.dropout=0.1",
        "data.shuffle=false",
        "data.weights=[2.0]",
        "optimizer.name=lamb",
        "optimizer.beta2=0.99",
        "train.precision=float64",
    ],
)
def test_what_trains_otherwise_is_asked_for(resume, setting: str) -> None:
    key = setting.partition("=")[0]
    refused(resume, f"--{setting}", output=rf"{key} was .*--checkpoint\.accept_changes={key}")
    run = resume(f"--{setting}", f"--checkpoint.accept_changes={key}")
    (resumed,) = [r for r in lines(run / "events.jsonl") if r["event"] == "resumed"]
    assert resumed["step"] == 5
    assert key in resumed["changed"]
    # It was said for that start: the next takes the new setting for granted, and would not take the old.
    assert load_config(run / "config.toml").checkpoint.accept_changes == []
    refused(resume, "--train.steps=9", output=rf"{key} was ")


def test_other_settings_are_free_and_told(resume, capsys) -> None:
    run = resume("--train.global_batch=6", "--train.micro_batch=3", "--lr.peak=1e-3", "--train.steps=9")
    output = capsys.readouterr().out
    (report,) = [line for line in output.splitlines() if line.startswith("settings changed after step 5: ")]
    expected = {"lr.peak 0.01 -> 0.001", "train.steps 8 -> 9", "train.micro_batch 2 -> 3", "train.global_batch 4 -> 6"}
    assert expected <= set(report.removeprefix("settings changed after step 5: ").split("; "))
    ledger = lines(run / "samples" / "ledger.jsonl")
    assert [line["count"] for line in ledger] == [4] * 5 + [6] * 4
    assert check_ledger(ledger, open_samples(load_config(run / "config.toml"))).faults == []


@pytest.mark.parametrize("before", ["adamw", "lamb", "muon"])
def test_any_optimizer_goes_on_from_any_other_as_the_message_advises(tiny, tmp_path, capsys, before: str) -> None:
    run = tmp_path / "runs" / "tiny"
    train(load_config(tiny, [f"--optimizer.name={before}", "--train.steps=2"]))
    for after in {"adamw", "lamb", "muon"} - {before}:
        target = tmp_path / after
        shutil.copytree(run, target / "tiny")
        arguments = [f"--train.runs={target}", f"--optimizer.name={after}", "--train.steps=4"]
        with pytest.raises(DataError) as refusal:
            train(load_config(tiny, arguments))
        advised = str(refusal.value).split()[-1]
        assert advised == "--checkpoint.accept_changes=optimizer.name"
        capsys.readouterr()
        assert train(load_config(tiny, arguments + [advised])).finished
        output = capsys.readouterr().out
        assert (f"of optimizer.name={after} starts at zero" in output) == ("muon" in (before, after))


def test_another_optimizer_goes_on_from_memory(tiny, tmp_path, capsys) -> None:
    options = ["--checkpoint.background=true", "--checkpoint.memory_interval=1", "--checkpoint.interval=100"]
    train(load_config(tiny, options + ["--checkpoint.at_end=false", "--checkpoint.linger=20", "--train.stop_after=3"]))
    options += ["--optimizer.name=muon", "--checkpoint.accept_changes=optimizer.name", "--checkpoint.linger=1"]
    assert train(load_config(tiny, options)).finished
    assert "after step 2 from memory" in capsys.readouterr().out


def test_tokens_are_counted_over_other_lengths_of_samples(resume) -> None:
    accept = "--checkpoint.accept_changes=model.sequence_length"
    resume("--model.sequence_length=12", "--train.stop_after=1", accept)
    run = resume("--model.sequence_length=8", "--train.steps=8", accept)
    records = {r["step"]: r["tokens"] for r in lines(run / "metrics.jsonl")}
    lengths = [16] * 5 + [12] + [8] * 2
    assert records == {step: 4 * sum(lengths[:step]) for step in range(1, 9)}


def test_data_that_changed_is_refused_and_may_move(resume, tmp_path) -> None:
    with IndexedWriter(tmp_path / "train", np.uint16) as writer:
        writer.add_document([np.arange(2000) % 64])
    (resume.run / "samples" / "sources.json").unlink()  # the checkpoint remembers too
    refused(
        resume, f"--data.train={tmp_path}/train", output=r"data\.train=.* has changed since.*accept_changes=data\.train"
    )
    shutil.copytree(resume.folder / "data", tmp_path / "moved")
    run = resume(f"--data.train={tmp_path}/moved/train", "--train.stop_after=1")
    with pytest.raises(DataError, match=r"accept_changes=data\.train"):
        resume(f"--data.train={tmp_path}/train")
    resume(f"--data.train={tmp_path}/train", "--checkpoint.accept_changes=data.train")
    assert [r["step"] for r in lines(run / "samples" / "ledger.jsonl")] == list(range(1, 9))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    train_tokenizer(["some words and some more words " * 9], 262).save(folder / "one.json")
    train_tokenizer(["altogether different text, in other letters " * 9], 262).save(folder / "two.json")
    return folder


def test_another_tokenizer_is_refused_and_never_mixed_in(tiny, tokenizers, tmp_path) -> None:
    named = tmp_path / "mine.json"
    shutil.copy(tokenizers / "one.json", named)
    options = ["--train.steps=4", "--model.vocab_size=264", f"--data.tokenizer={named}"]
    train(load_config(tiny, options + ["--train.stop_after=2"]))
    run = tmp_path / "runs" / "tiny"
    before = state_of(run)
    with pytest.raises(DataError, match=r"a different tokenizer from data\.tokenizer=.*two\.json"):
        train(load_config(tiny, options + [f"--data.tokenizer={tokenizers}/two.json"]))
    assert state_of(run) == before
    steps: list[int | None] = []
    list(generate(run, "some", tokens=3, device="cpu", on_step=steps.append))
    assert steps == [2]
    # The same tokenizer may lie elsewhere.
    moved = tmp_path / "moved.json"
    shutil.copy(tokenizers / "one.json", moved)
    assert train(load_config(tiny, options + [f"--data.tokenizer={moved}"])).step == 4
    # Another in its place, and in that of the run's copy, is noticed before a word is made of it.
    for file in (moved, named, run / "tokenizer.json"):
        shutil.copy(tokenizers / "two.json", file)
    with pytest.raises(DataError, match=r"tokenizer\.json is not the tokenizer that .* was trained with"):
        list(generate(run, "some", device="cpu"))
    with pytest.raises(DataError, match=r"was trained with.*--no-tokenizer"):
        export_model(run, tmp_path / "out")


def test_a_shared_location_is_one_runs_only(tiny, tmp_path) -> None:
    location = f"--checkpoint.location={tmp_path / 'shared'}"
    train(load_config(tiny, ["--train.name=first", "--train.steps=4", location]))
    stored = state_of(tmp_path / "shared")
    for more in ([], ["--checkpoint.resume=false"]):
        with pytest.raises(DataError, match=r"different run \('first'\).*own checkpoint\.location.*accept_changes=run"):
            train(load_config(tiny, ["--train.name=second", location] + more))
        assert state_of(tmp_path / "shared") == stored
        assert not (tmp_path / "runs" / "second" / "config.toml").exists()
    # On purpose it may start from there; the place is then the second's, and the first is told.
    accept = "--checkpoint.accept_changes=run"
    assert train(load_config(tiny, ["--train.name=second", location, "--train.steps=6", accept])).step == 6
    assert [r["step"] for r in lines(tmp_path / "runs" / "second" / "samples" / "ledger.jsonl")] == [5, 6]
    assert train(load_config(tiny, ["--train.name=second", location, "--train.steps=7"])).step == 7
    with pytest.raises(DataError, match=r"a different run \('second'\)"):
        train(load_config(tiny, ["--train.name=first", location]))


def test_two_runs_that_begin_at_one_location(tiny, tmp_path) -> None:
    """Before either has saved there is no checkpoint to tell whose the place is."""
    options = ["--train.steps=2", "--checkpoint.at_end=false", "--checkpoint.interval=0"]
    options.append(f"--checkpoint.location={tmp_path / 'shared'}")
    train(load_config(tiny, options + ["--train.name=first"]))
    with pytest.raises(DataError, match="a different run"):
        train(load_config(tiny, options + ["--train.name=second"]))
    assert train(load_config(tiny, options + ["--train.name=first"])).step == 2


def test_a_run_begun_anew_is_another(resume) -> None:
    identity = (resume.run / "identity").read_text()
    run = resume("--checkpoint.resume=false", "--train.stop_after=1", "--checkpoint.at_end=false")
    assert (run / "identity").read_text() != identity
    refused(resume, output=r"a different run")


def test_a_run_folder_may_move(resume, tmp_path) -> None:
    shutil.move(tmp_path / "runs", tmp_path / "there")
    moved = tmp_path / "there" / "tiny"
    (moved / "identity").unlink()  # its checkpoints say it too
    identity = checkpoint.inspect(moved).state["run"]["id"]
    assert resume(f"--train.runs={tmp_path / 'there'}")
    assert (moved / "identity").read_text().strip() == identity


def test_a_checkpoint_of_tensors_alone_is_read_with_notes(resume, capsys) -> None:
    rewrite_state(resume.run, "run", "config", "data", "tokenizer")
    (resume.run / "identity").unlink()
    refused(resume, "--model.layers=1", output=r"model\.layers is likely 2 there and 1 here")
    run = resume()
    output = capsys.readouterr().out
    assert output.count("does not name its run") == output.count("holds no configuration") == 1
    assert lines(run / "samples" / "ledger.jsonl")[-1]["step"] == 8


def test_settings_that_this_version_does_not_know(resume, capsys) -> None:
    saved = checkpoint.inspect(resume.run).state["config"]
    saved["model"]["flavour"] = "sweet"
    saved["lr"]["min"] = 1.0  # no longer allowed: above peak
    rewrite_state(resume.run, config=saved | {"gone": {"key": 1}})
    refused(resume, "--model.heads=2", output=r"model\.heads was 4 and is 2")
    resume()
    output = capsys.readouterr().out
    assert "does not know and ignores: gone, model.flavour" in output
    assert "lr.min 1.0 -> 0.0" in output


def test_memory_is_judged_as_storage_is(tiny, tmp_path) -> None:
    options = ["--checkpoint.background=true", "--checkpoint.memory_interval=1", "--checkpoint.interval=100"]
    options += ["--checkpoint.at_end=false", "--checkpoint.linger=20"]
    train(load_config(tiny, options + ["--train.stop_after=3"]))
    run = tmp_path / "runs" / "tiny"
    before = state_of(run)
    with pytest.raises(DataError, match=r"'memory, step 2' is of another model: model\.tied_embeddings was true"):
        train(load_config(tiny, options + ["--model.tied_embeddings=false"]))
    assert state_of(run) == before
    train(load_config(tiny, options + ["--train.stop_after=1"]))
    train(load_config(tiny, options + ["--train.stop_after=1", "--checkpoint.resume=false"]))
    # What the run before left in memory is not gone on from by the one that was begun anew.
    train(load_config(tiny, ["--checkpoint.background=true", "--checkpoint.linger=1"]))
    result = [(r["event"], r.get("step", 0)) for r in lines(run / "events.jsonl")]
    starts = [(event, step) for event, step in result if event in ("run_started", "resumed")]
    assert starts == [("run_started", 0), ("resumed", 2), ("run_started", 0), ("run_started", 0)]


def test_a_refused_start_leaves_no_checkpoint_service(tiny, tmp_path) -> None:
    """A refused start in which a service has a snapshot leaves it; see the test above."""
    train(load_config(tiny, ["--train.steps=2"]))
    folder = service_protocol.private_folder(tmp_path / "runs" / "tiny")
    folder.rmdir()
    options = ["--checkpoint.background=true", "--checkpoint.linger=1000", "--model.tied_embeddings=false"]
    with pytest.raises(DataError, match="is of another model"):
        train(load_config(tiny, options))
    deadline = time.monotonic() + 60
    while folder.exists():  # the service's own while it lives
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_history_without_checkpoints_is_not_erased(resume) -> None:
    shutil.rmtree(resume.run / "checkpoints")
    refused(resume, output=r"committed the checkpoint of step 5.*--checkpoint\.resume=false")
    run = resume("--checkpoint.resume=false")
    assert [r["step"] for r in lines(run / "samples" / "ledger.jsonl")] == list(range(1, 9))


def test_a_start_refused_for_its_data_leaves_the_settings(resume, tmp_path, megascale) -> None:
    before = state_of(resume.run)
    file = tmp_path / "data.toml"
    shutil.copytree(resume.folder / "data", tmp_path / "data")
    (tmp_path / "data" / "train.bin").write_bytes((tmp_path / "data" / "train.bin").read_bytes()[::-1])
    text = (resume.folder / "tiny.toml").read_text().replace(str(resume.folder / "data"), str(tmp_path / "data"))
    file.write_text(text)
    result = megascale("train", file, ROTARY, f"--train.runs={tmp_path / 'runs'}", "--parallel.tensor=2")
    assert result.returncode == 4, result.stderr
    assert "data.train" in result.stderr
    assert state_of(resume.run) == before
    assert evaluate(resume.run, device="cpu").tokens


def test_evaluation_takes_the_checkpoints_model(resume) -> None:
    """Older versions wrote config.toml even where the start was refused."""
    right = evaluate(resume.run, device="cpu").loss
    file = resume.run / "config.toml"
    file.write_text(
        file.read_text().replace('activation = "gelu"', 'activation = "gelu_tanh"').replace("= 1e-05", "= 0.1")
    )
    assert load_config(file).model.activation == "gelu_tanh"
    assert evaluate(resume.run, device="cpu").loss == right


def flip(run: Path, step: int, parts: int = 7) -> None:
    """Change a byte in some parts of a checkpoint's largest data file, its length kept."""
    file = max((run / "checkpoints" / f"step-{step}").glob("*.distcp"), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    for at in range(len(data) // 3, len(data) * 4 // 3, len(data) // parts):
        data[at % len(data)] ^= 0xFF
    file.write_bytes(bytes(data))


@pytest.mark.filterwarnings("ignore:the checkpoint")
def test_what_was_gone_back_to_outlives_the_damaged(resume) -> None:
    flip(resume.run, 5)  # 4 and 5 are kept
    run = resume("--checkpoint.interval=0", "--train.steps=6")
    assert [r["step"] for r in lines(run / "events.jsonl") if r["event"] == "resumed"] == [4]
    assert checkpoint.steps(run / "checkpoints") == [4, 6]
    flip(run, 6)
    assert resume("--train.steps=6")
    assert [r["step"] for r in lines(run / "events.jsonl") if r["event"] == "resumed"] == [4, 4]


def test_prune_reads_what_it_keeps(resume, megascale) -> None:
    flip(resume.run, 5)
    result = megascale("checkpoint", "prune", resume.run, "--keep", "1")
    assert result.returncode == 0, result.stderr
    assert 4 in checkpoint.steps(resume.run / "checkpoints")
    with pytest.warns(UserWarning, match="Went back to the checkpoint of step 4"):
        resume()


def test_what_is_read_from_an_older_checkpoint_says_its_step(resume, megascale) -> None:
    """The newest checkpoint's weights are damaged, so results are those of step 4."""
    flip(resume.run, 5, parts=1000)
    evaluated = megascale("evaluate", resume.run, "--json", "--device=cpu")
    assert json.loads(evaluated.stdout)["step"] == 4, evaluated.stderr
    assert "Went back to the checkpoint of step 4" in evaluated.stderr
    text = megascale("evaluate", resume.run, "--device=cpu").stdout
    assert re.search(r"held-out loss .* tokens, step 4$", text, re.MULTILINE)
    calls: list[tuple[int, int]] = []
    with pytest.warns(UserWarning, match="Went back"):
        evaluate(resume.run, device="cpu", on_progress=lambda done, total: calls.append((done, total)))
    assert calls[0][0] == 0
    assert all(done < total for done, total in calls)


def test_damaged_settings_of_a_run_are_bad_data_with_a_remedy(resume, megascale) -> None:
    file = resume.run / "config.toml"
    written = file.read_text()
    file.write_text(written[: len(written) // 2] + "]]]\n")
    for command in (["evaluate"], ["generate"], ["data", "ledger"]):
        result = megascale(*command, resume.run)
        assert result.returncode == 4, result.stderr
        message = " ".join(result.stderr.split())
        assert "is not valid TOML" in message
        assert f"Copy '{file}' from a backup, or remove it and start the run again with the same command" in message
    inspected = megascale("checkpoint", "inspect", resume.run)
    assert inspected.returncode == 0, inspected.stderr
    assert "note: settings are not compared: " in inspected.stderr
    file.unlink()
    resume()
    assert megascale("evaluate", resume.run, "--device=cpu").returncode == 0


SETTINGS = [f"{s}.{k}" for s, f in Config.model_fields.items() for k in f.annotation.model_fields]  # type: ignore[union-attr]
VALUES = {
    "model": {"heads": 8, "activation": "swiglu", "tied_embeddings": False, "dropout": 0.5, "init_std": 1.0},
    "optimizer": {"name": "lamb", "beta1": 0.5, "trust_max": 3.0},
    "train": {"seed": 5, "steps": 7, "global_batch": 16, "name": "other"},
    "data": {"shuffle": False, "valid": "x", "loader": "local"},
    "lr": {"warmup_steps": 3},
}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sets(st.sampled_from([(s, k) for s, keys in VALUES.items() for k in keys])), st.booleans(), st.data())
def test_each_difference_is_found_and_judged(chosen: set[tuple[str, str]], begun: bool, data: st.DataObject) -> None:
    tree: dict[str, dict[str, object]] = {}
    for section, key in chosen:
        tree.setdefault(section, {})[key] = VALUES[section][key]
    saved, _ = setting_changes.read_saved_config(json.loads(json.dumps(from_tree({}).model_dump(exclude_none=True))))
    result = setting_changes.find_changes(saved, from_tree(tree), has_trained=begun)
    names = {f"{s}.{k}" for s, k in chosen}
    assert names <= {c.key for c in result}
    assert {c.key for c in result} - names <= {"lr.peak", "optimizer.trust_min", "optimizer.lamb_bias_correction"}
    model = {"model.heads", "model.activation", "model.tied_embeddings"} & names
    requested = {name for name in names if name in CHANGEABLE_KEYS} if begun else set()
    if "optimizer.name" in requested or ("optimizer.trust_max" in requested and "optimizer.name" not in names):
        requested.discard("optimizer.trust_max")
    assert {c.key for c in result if c.kind == "refused"} == model
    assert {c.key for c in result if c.kind == "asked"} == requested
    accepted: Sequence[str] = sorted(requested)
    assert (setting_changes.explain_changes("x", result, accepted) is None) == (not model)
    if requested and not model:
        remaining = data.draw(st.sampled_from(sorted(requested)))
        assert remaining in (
            setting_changes.explain_changes("x", result, [k for k in accepted if k != remaining]) or ""
        )


def test_only_what_may_be_accepted_can_be_named() -> None:
    assert set(CHANGEABLE_KEYS) - {"run"} <= set(SETTINGS)
    with pytest.raises(ConfigError, match=r"model\.layers.*train\.seed"):
        from_tree({"checkpoint": {"accept_changes": ["model.layers"]}})
