"""The loader under a real training: kills change nothing, the ledger proves it, slowness is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.data import loader as bench
from megascale.api import load_config, train
from megascale.cli.main import app
from megascale.core.events import Event
from megascale.data.dataset.ledger import check
from megascale.data.dataset.samples import SampleSource, hash_ids
from megascale.data.loader.data_watch import DataWatch, cause
from megascale.data.loader.ring import MEASURES
from megascale.errors import DataError
from tests.chaos.data.loader import run_chaos
from tests.conftest import lines
from tests.data.loader.test_host_loader import configured
from tests.exact.processes import Start, run_ranks


def test_kills_leave_ledger_and_losses_as_they_were(tmp_path: Path) -> None:
    told = run_chaos(tmp_path, kills=3, seed=3, console=Console(quiet=True), steps=24)
    assert told["faults"] == []
    assert told["equal"]
    assert sum(told["kills"].values()) >= 3


def cli(*words: object) -> Result:
    """The command line in this process."""
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def test_training_through_the_loader(tiny: Path, tmp_path: Path) -> None:
    """Ranks share one copy; gone on as one rank with another batch size, all is as one rank has it."""
    words = ["--checkpoint.interval=0", "--train.log_interval=100"]
    train(load_config(tiny, [*words, "--train.name=alone", "--train.steps=3"]))
    words.append("--train.name=shared")
    first = run_ranks(tiny, [*words, "--parallel.tensor=2", "--train.stop_after=3"], [Start(0, 2), Start(1, 2)])
    assert [rank.code for rank in first] == [0, 0], first
    train(load_config(tiny, [*words, "--train.global_batch=8", "--data.loader=host"]))
    runs = tmp_path / "runs"
    ledgers = [lines(runs / name / "samples" / "ledger.jsonl") for name in ("alone", "shared")]
    assert ledgers[0] == ledgers[1][:3]
    assert [(line["first"], line["count"]) for line in ledgers[1][3:]] == [(12 + 8 * i, 8) for i in range(5)]
    steps = [line for line in lines(runs / "shared" / "metrics.jsonl") if "loss" in line]
    assert all({"loader_wait_seconds", "loader_ring_fill", "loader_bytes_read"} <= step.keys() for step in steps)
    assert sum(step["loader_bytes_read"] for step in steps) >= (3 * 4 + 5 * 8) * 17 * 2  # uint16 windows of 17
    assert (runs / "shared" / "logs" / "loader-0.log").read_text().count("generation 1 owns") == 2
    proof = cli("data", "ledger", runs / "shared")
    assert proof.exit_code == 0, proof.output
    assert "8 steps, 52 samples" in proof.output
    assert "each sample was trained once" in proof.output
    file = runs / "shared" / "samples" / "ledger.jsonl"
    text = file.read_text().splitlines()
    file.write_text("\n".join(text[:4] + text[5:]) + "\n")
    with pytest.raises(DataError, match="skips"):
        cli("data", "ledger", runs / "shared", "--json")
    assert DataError.exit_code == 4


def test_a_changed_file_is_refused_at_the_next_start(tiny: Path, tokens: Path, tmp_path: Path, megascale) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.bin", "train.idx"):
        (data / name).write_bytes((tokens / name).read_bytes())
    words = (f"--data.train=['{data}/train']", "--train.name=changed")
    train(load_config(tiny, [*words, "--train.stop_after=2"]))
    raw = bytearray((data / "train.bin").read_bytes())
    raw[100] ^= 1
    (data / "train.bin").write_bytes(raw)
    refused = megascale("train", tiny, *words, "--parallel.tensor=2")
    assert refused.returncode == 4
    assert "train.bin was changed" in refused.stderr


def test_ledger_faults_are_told(tmp_path: Path, tokens: Path) -> None:
    source = SampleSource(configured(str(tokens / "train"), tmp_path))

    def line(step: int, first: int) -> dict:
        return {"step": step, "first": first, "count": 4, "ids": f"{hash_ids(source.ids(first, 4)):016x}"}

    good = [line(step, 4 * step - 4) for step in range(1, 6)]
    found = check(good, source)
    assert (found.steps, found.samples, found.distinct, found.faults) == (5, 20, 20, [])
    assert "repeats" in check([*good, line(6, 16)], source).faults[0]
    assert "(0, 0," in check([*good, line(6, 16)], source).faults[1]
    assert "skips" in check([*good, line(6, 24)], None).faults[0]
    assert "follows step" in check([*good[:2], *good[3:]], None).faults[0]
    assert "other samples" in check([good[0] | {"ids": "0" * 16}], source).faults[0]


@pytest.mark.parametrize(
    ("counter", "why"),
    [
        ({"read_seconds": 3.0, "encode_seconds": 1.0}, "disk"),
        ({"unpack_seconds": 3.0, "read_seconds": 1.0}, "decompression"),
        ({"encode_seconds": 3.0, "encode_cpu_seconds": 2.9}, "CPU"),
        ({"encode_seconds": 3.0, "encode_cpu_seconds": 1.0}, "other processes on the CPU"),
    ],
)
def test_a_slow_loader_is_named_with_its_cause(counter: dict[str, float], why: str) -> None:
    nothing = dict.fromkeys(MEASURES, 0.0)
    assert cause(nothing, nothing | counter) == why
    watch, told = DataWatch(), []
    for step in range(1, 40):
        watch.note(0.5 if step == 1 or step > 20 else 0.0001, {k: v * step for k, v in (nothing | counter).items()})
        told += [(step, *event) for event in watch.loader_events(1.0, 1)]
    assert [(event, details["cause"]) for _, event, details in told] == [(Event.LOADER_SLOW, why)]
    assert 20 < told[0][0] < 30  # not for the first step, which waits for the loader to come up
    watch.note(0.0, nothing)
    assert (Event.LOADER_RESTARTED, {"generation": 2}) in watch.loader_events(1.0, 2)


def test_bench_compares_equal_work(tmp_path: Path) -> None:
    """Both sides read the same tokens, the loader once where the baseline reads twice."""
    told = bench.measure(tmp_path, ["jsonl"], ranks=2, batches=20, steps=12)
    sides = told["bound"]["jsonl"]
    assert sides["baseline"]["crc"] == sides["host"]["crc"]
    assert sides["baseline"]["bytes_read"] > 1.5 * sides["host"]["bytes_read"]
    host = told["waits"]["jsonl"]["host"]
    assert set(host) == {"mean", "empty", "median", "p99", "first_step_seconds"}
    assert 0 <= host["empty"] <= host["mean"]
