"""The convergence bench: what it trains, and what it makes of the records."""

from __future__ import annotations

import json
import runpy
import time
from dataclasses import replace

import psutil
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.training import convergence as bench
from benchmarks.training import convergence_report as report
from benchmarks.training import plain
from megascale.errors import EXIT_INTERRUPTED, ConfigError
from tests.forked import BENCHMARKS, Forked


def outcome(variant: str, losses: list[float], seed: int = 0) -> report.ConvergenceOutcome:
    return report.ConvergenceOutcome(variant, seed, "", [100 * (i + 1) for i in range(len(losses))], losses, 10.0)


def test_tokens_to_a_loss_lie_between_evaluations():
    run = outcome("serial", [5.0, 4.0, 3.5, 3.0])
    assert report.tokens_to(run, 5.0) == 100
    assert report.tokens_to(run, 3.75) == pytest.approx(250)
    assert report.tokens_to(run, 2.0) is None


def test_lamb_trains_the_same_tokens_in_larger_batches(tmp_path):
    variants = {v.name: v for v in bench._variants(64, 4, [1e-3], [1e-2], 256)}
    assert variants["lamb"].batch == 256
    steps = {n: round(64 * 1024 * 400 / (v.batch * 1024)) for n, v in variants.items()}
    assert steps["lamb"] * variants["lamb"].batch == steps["serial"] * variants["serial"].batch
    assert "--model.window=256" in variants["window"].settings
    assert not any("window" in word for word in variants["parallel"].settings)


def test_a_tiny_comparison(tmp_path, tokens, benchmarks):
    """Two real variants on one core: trained, compared, drawn; called again it trains nothing anew."""
    command = ["convergence", "--data", tokens, "--preset", "tiny", "--tokens", "1024", "--batch", "4"]
    command += ["--variant", "serial", "--variant", "lamb", "--seeds", "1", "--times", "2"]
    command += ["--lamb-peak", "1e-2", "--lamb-peak", "3e-2", "--lamb-micro-batch", "8", "--at-once", "2"]
    command += [
        "--folder",
        str(tmp_path / "runs"),
        "--plot",
        str(tmp_path / "c.png"),
        "--out",
        str(tmp_path / "c.json"),
    ]
    command += [
        "--model.sequence_length=16",
        "--model.hidden=32",
        "--model.layers=1",
        "--model.heads=2",
        "--model.vocab_size=64",
    ]
    command += ["--train.device=cpu", "--train.micro_batch=4", "--train.threads=1"]
    for _ in range(2):
        done = benchmarks(*command)
        assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "c.json").read_text())
    runs = {run["variant"]: run for run in record["runs"]}
    assert set(runs) == {"serial", "lamb 0.01", "lamb 0.03"}
    assert {run["tokens"][-1] for run in runs.values()} == {1024}
    assert runs["lamb 0.01"]["held_out"] != runs["lamb 0.03"]["held_out"]
    settings = (tmp_path / "runs" / "lamb-0.01-0" / "config.toml").read_text()
    assert "micro_batch = 8" in settings
    assert runs["serial"]["held_out"][-1] < runs["serial"]["held_out"][0]
    assert (tmp_path / "c.png").stat().st_size > 10_000
    steps = [json.loads(x) for x in (tmp_path / "runs" / "serial-0.001-0" / "metrics.jsonl").read_text().splitlines()]
    assert len([s for s in steps if "loss" in s]) == 16

    # On another machine, beside what this one found: only what is new is trained, and compared seed by seed.
    command[command.index("lamb")] = "float8"
    command[command.index(str(tmp_path / "runs"))] = str(tmp_path / "elsewhere")
    done = benchmarks(*command, "--earlier", tmp_path / "c.json")
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path / "elsewhere").glob("*/")] == ["float8-0.001-0"]
    assert "(one pair)" in done.stdout
    arguments = list(map(str, command))
    repeated = CliRunner().invoke(app, arguments + ["--earlier", str(tmp_path / "c.json"), "--model.layers=2"])
    assert isinstance(repeated.exception, ConfigError)
    assert "seed 0, was run with" in str(repeated.exception)
    assert "--model.layers=2" in str(repeated.exception)
    record = json.loads((tmp_path / "c.json").read_text())
    assert [run["variant"] for run in record["runs"]] == ["serial", "lamb 0.01", "lamb 0.03", "float8"]
    float8 = record["runs"][-1]["held_out"][-1]
    plain = record["runs"][-1]["unquantised"]  # of the same weights
    assert float8 != plain == pytest.approx(float8, rel=0.01)
    assert "its weights without" in " ".join(done.stdout.split())
    assert float8 != runs["serial"]["held_out"][-1]
    assert float8 == pytest.approx(runs["serial"]["held_out"][-1], rel=0.01)


def test_differences_are_taken_seed_by_seed():
    runs = [outcome("serial", [losses], seed) for seed, losses in enumerate([4.0, 5.0, 6.0, 9.0])]
    runs += [outcome("float8", [losses], seed) for seed, losses in enumerate([4.1, 5.3, 6.2])]
    mean, error, count = report.paired(runs, "float8", "serial")
    assert (mean, error, count) == (pytest.approx(0.2), pytest.approx(0.1 / 3**0.5), 3)
    assert report.paired(runs[:5], "float8", "serial")[1] is None
    assert report.paired(runs[:4], "float8", "serial") is None
    assert report.paired(runs, "float8", "serial", unquantised=True) is None
    plain = [replace(run, unquantised=run.last - 0.05) if run.variant == "float8" else run for run in runs]
    assert report.paired(plain, "float8", "serial", unquantised=True)[0] == pytest.approx(0.15)


def test_what_is_no_record_of_earlier_runs_is_refused(tmp_path):
    for text in ("[]", '{"runs": [{"variant": "serial"}]}', "no JSON"):
        (tmp_path / "e.json").write_text(text)
        with pytest.raises(ConfigError, match="holds no metrics"):
            bench._read_earlier([tmp_path / "e.json"], {}, lambda variant, seed: "")


def test_runs_of_one_seed_on_different_data_are_refused_and_of_different_seeds_are_not():
    runs = [replace(outcome("serial", [4.0], seed), key=f"--lr.peak=1 data=a{seed}") for seed in (0, 1)]
    bench._refuse_mixed_data(runs, [(2, "--lr.peak=1 data=b"), (1, "--lr.peak=1 data=a1")])
    with pytest.raises(ConfigError, match=r"seed 1 has runs on different data \(data=a1, data=b\)"):
        bench._refuse_mixed_data(runs, [(1, "--lr.peak=1 data=b")])


def test_an_unknown_variant_is_named():
    done = CliRunner().invoke(app, ["convergence", "--variant", "cereal"])
    assert isinstance(done.exception, ConfigError)
    assert "cereal" in str(done.exception)


def test_a_bench_that_is_told_to_end_leaves_no_run_behind(tmp_path, tokens):
    shape = ["layers=1", "hidden=32", "heads=2", "sequence_length=16", "vocab_size=64"]
    command = ["convergence", "--data", str(tokens)]
    command += ["--preset", "tiny", "--tokens", "1e8", "--batch", "4", "--folder", str(tmp_path / "runs")]
    command += [f"--model.{word}" for word in shape] + [
        "--train.device=cpu",
        "--train.micro_batch=4",
        "--train.threads=1",
    ]
    bench_ = Forked(command, module=BENCHMARKS)
    while not any((tmp_path / "runs").glob("*/metrics.jsonl")):
        assert bench_.poll() is None
        time.sleep(0.05)
    runs = psutil.Process(bench_.pid).children(recursive=True)
    assert runs
    bench_.terminate()
    assert bench_.wait(60) == EXIT_INTERRUPTED
    assert not [run for run in runs if run.is_running() and run.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    "settings",
    [
        ["--model.block=serial", "--model.tied_embeddings=true", "--model.activation=gelu_tanh"],
        ["--model.block=parallel", "--model.tied_embeddings=false", "--model.window=5", "--lr.warmup_steps=3"],
    ],
)
def test_training_is_what_plain_pytorch_makes_of_it(tmp_path, tokens, megascale, settings):
    """Step by step: samples, first weights, gradients, clipping, schedule, AdamW; in float32, to rounding."""
    (tmp_path / "base.toml").touch()
    arguments = [str(tmp_path / "base.toml"), *settings, f"--train.runs={tmp_path}", f"--data.train={tokens}/train"]
    arguments += [f"--data.valid={tokens}/valid", "--train.steps=12", "--train.global_batch=4", "--train.micro_batch=2"]
    arguments += [
        "--model.sequence_length=16",
        "--model.hidden=32",
        "--model.layers=2",
        "--model.heads=2",
        "--lr.peak=1e-2",
    ]
    arguments += ["--train.device=cpu", "--train.precision=float32", "--train.threads=1", "--train.eval_interval=6"]
    arguments += [
        "--model.vocab_size=64",
        "--optimizer.clip=0.5",
        "--observe.progress=false",
        "--checkpoint.interval=0",
    ]
    result = {}
    ours = megascale("train", *arguments, "--train.name=ours")
    assert ours.returncode == 0, ours.stderr
    plain.main(arguments + ["--train.name=plain"])
    for name in ("ours", "plain"):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        result[name] = [json.loads(line) for line in lines]
    for key, count in (("loss", 12), ("grad_norm", 12), ("valid_loss", 2)):
        local, remote = ({r["step"]: r[key] for r in result[name] if key in r} for name in ("ours", "plain"))
        assert len(remote) == count
        assert local == pytest.approx(remote, rel=2e-5), key
    losses = [r["loss"] for r in result["plain"] if "loss" in r]
    assert losses[-1] < losses[0] - 0.05


def test_the_plain_model_names_what_it_does_not_have(tmp_path, monkeypatch, capsys):
    (tmp_path / "base.toml").touch()
    arguments = [
        str(tmp_path / "base.toml"),
        "--model.norm=rmsnorm",
        "--model.vocab_size=64",
        f"--train.runs={tmp_path}",
    ]
    monkeypatch.setattr("sys.argv", ["plain"] + arguments)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(plain.__file__, run_name="__main__")
    messages = capsys.readouterr().err
    assert ended.value.code == 2
    assert "model.norm='layernorm'" in messages
    assert "rmsnorm" in messages
