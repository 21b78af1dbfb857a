"""The loader under a real training: kills change nothing, the ledger proves it, slowness is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.data import loader as bench
from megascale.api import load_config, train
from megascale.cli.main import app
from megascale.core.events import Event
from megascale.data.dataset.ledger import check_ledger
from megascale.data.dataset.read_checksum import ReadChecksum, sum_numbers, sum_samples, sum_step
from megascale.data.dataset.samples import hash_sample_ids
from megascale.data.loader.feed import LoaderWatch, find_cause
from megascale.data.loader.ring import COUNTERS
from megascale.errors import DataError
from tests.chaos.data.loader import run_chaos
from tests.conftest import TINY, lines
from tests.data.loader.test_host_loader import configured
from tests.data.sample_sources import open_samples
from tests.exact.processes import Start, run_ranks


def test_kills_leave_ledger_and_losses_as_they_were(tmp_path: Path) -> None:
    report = run_chaos(tmp_path, kills=3, seed=3, console=Console(quiet=True), steps=24)
    assert report["faults"] == []
    assert report["equal"]
    assert sum(report["kills"].values()) >= 3


def cli(*arguments: object) -> Result:
    """The command line in this process."""
    return CliRunner().invoke(app, [str(word) for word in arguments], catch_exceptions=False)


def test_training_through_the_loader(tiny: Path, tmp_path: Path) -> None:
    """Ranks share one copy; gone on as one rank with another batch size, all is as one rank has it."""
    arguments = ["--checkpoint.interval=0", "--train.log_interval=100"]
    train(load_config(tiny, arguments + ["--train.name=alone", "--train.steps=3"]))
    arguments.append("--train.name=shared")
    first = run_ranks(tiny, arguments + ["--parallel.tensor=2", "--train.stop_after=3"], [Start(0, 2), Start(1, 2)])
    assert [rank.code for rank in first] == [0, 0], first
    train(load_config(tiny, arguments + ["--train.global_batch=8", "--data.loader=host"]))
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
    assert "tokens of 8 steps read again" in proof.output
    assert "each sample was trained once, as the seed and the files determine it" in proof.output


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps of four samples."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.toml").write_text(TINY.format(data=tokens, runs=folder / "runs"))
    train(load_config(folder / "tiny.toml", ["--train.steps=6", "--checkpoint.interval=6", "--train.eval_samples=1"]))
    return folder / "runs" / "tiny"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("lost", "output"),
    [
        ([0, 1], "steps 1 to 2 have no line; samples 0 to 7 were read"),
        ([3], "step 4 has no line; samples 12 to 15 were read"),
        ([1, 2, 4], "steps 2 to 3 have no line; samples 4 to 11 were read"),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["--no-draw"]])
def test_lines_that_a_crash_took_are_named_as_such(
    run: Path, lost: list[int], output: str, arguments: list[str]
) -> None:
    file = run / "samples" / "ledger.jsonl"
    text = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for number, line in enumerate(text) if number not in lost))
    proof = cli("data", "ledger", run, *arguments)
    assert proof.exit_code == 0
    assert output in proof.output
    assert "each sample was trained once" in proof.output


@pytest.mark.parametrize("cut", [1, 20, 1000, 10_000])
def test_a_run_goes_on_from_a_ledger_that_was_cut(run: Path, cut: int) -> None:
    file = run / "samples" / "ledger.jsonl"
    full = file.read_bytes()
    file.write_bytes(full[: max(0, len(full) - cut)])
    arguments = [f"--train.runs={run.parent}", "--train.name=run", "--train.steps=7", "--train.eval_samples=1"]
    train(load_config(run / "config.toml", arguments))
    proof = cli("data", "ledger", run)
    assert proof.exit_code == 0
    assert ("no line" in proof.output) == (cut > 1)
    assert "each sample was trained once" in proof.output


def test_after_a_change_of_the_data_that_was_accepted_the_totals_begin_anew(run: Path) -> None:
    arguments = [f"--train.runs={run.parent}", "--train.name=run", "--train.steps=8", "--train.eval_samples=1"]
    accepted = "--checkpoint.accept_changes=train.seed,optimizer.beta2"
    train(load_config(run / "config.toml", arguments + ["--train.seed=5", "--optimizer.beta2=0.9", accepted]))
    assert [line["read"]["since"] for line in lines(run / "samples" / "ledger.jsonl")] == [0] * 6 + [24] * 2
    proof = cli("data", "ledger", run)
    assert proof.exit_code == 0
    assert "6 steps were trained before a change of the data that was accepted" in proof.output
    assert "tokens of 2 steps read again" in proof.output
    # Another optimizer trains the same samples.
    train(load_config(run / "config.toml", arguments + ["--train.steps=9", "--optimizer.beta2=0.8", accepted]))
    assert lines(run / "samples" / "ledger.jsonl")[-1]["read"]["since"] == 24


def test_what_ranks_have_read_is_compared_and_not_what_was_due(run: Path) -> None:
    ledger = lines(run / "samples" / "ledger.jsonl")
    source = open_samples(load_config(run / "config.toml"))
    assert check_ledger(ledger, source).faults == []
    for field, fault in (
        ("numbers", "ranks read samples with other numbers"),
        ("tokens", "the tokens that ranks read"),
    ):
        # As if a sample of step 3 had come twice, in another one's place.
        changed = [dict(line) for line in ledger]
        for line in changed[2:]:
            second = (int(line["read"][field], 16) + 1) % 2**64
            line["read"] = line["read"] | {field: f"{second:016x}"}
        result = check_ledger(changed, source, full=True)
        assert [text[: text.index(":")] for text in result.faults] == ["samples 8 to 11 (up to step 3)"]
        assert fault in result.faults[0]
    older = [{name: value for name, value in line.items() if name != "read"} for line in ledger]
    assert (check_ledger(older, source).steps_with_totals, check_ledger(older, source).faults) == (0, [])
    assert check_ledger(older[:2] + older[3:], source).missing == [
        "step 3 has no line; samples 8 to 11 are not covered by any totals"
    ]
    assert check_ledger(older[:3] + ledger[3:], source).steps_with_totals == 3
    assert check_ledger(older[:2] + older[3:], source).unaccounted_samples == 4


# Python that gives both loaders of two data-parallel ranks with two micro-batches a fault: attributes of LocalFeed and
# of the plan from which the host's loader and its readers work.
WRONG_SHARES = {
    "the first share for all": ("_first_in_step = 0", "shares=((0, 2), (0, 2))"),
    "shares that overlap": ("_first_in_step //= 2", "shares=((0, 2), (1, 2))"),
    "samples between shares": ("_first_in_step *= 3", "shares=((0, 2), (6, 2))"),
}
FAULTY = """
from dataclasses import replace
from megascale.data.loader import feed

class Faulty(feed.LocalFeed):
    def __init__(self, *given):
        super().__init__(*given)
        self.{local}

right, feed.LocalFeed = feed.plan_host, Faulty
feed.plan_host = lambda *given: replace(right(*given), {host})
"""


@pytest.mark.parametrize("loader", ["local", "host"])
@pytest.mark.parametrize("fault", WRONG_SHARES)
def test_a_loader_that_gives_the_wrong_share_is_seen_in_the_ledger(tiny, tmp_path, loader, fault) -> None:
    """The ledger has the samples that were due all the same."""
    local, host = WRONG_SHARES[fault]
    arguments = ["--train.steps=2", "--train.micro_batch=1", "--parallel.data=2", f"--data.loader={loader}"]
    arguments += ["--checkpoint.at_end=false", "--checkpoint.interval=0", "--train.eval_samples=1"]
    before = FAULTY.format(local=local, host=host)
    ended = run_ranks(tiny, arguments, [Start(rank, 2, before=before) for rank in (0, 1)])
    assert [rank.code for rank in ended] == [0, 0], ended
    for more in ([], ["--no-draw"]):
        with pytest.raises(DataError, match=r"samples 0 to 3 .*did not train each sample once"):
            cli("data", "ledger", tmp_path / "runs" / "tiny", *more)


def test_the_checksum_of_a_world_is_that_of_its_samples(tokens: Path, tmp_path: Path) -> None:
    """Any rank may read each sample, in any order, and any number of ranks may read it."""
    source = open_samples(configured(str(tokens / "train"), tmp_path))
    rows = source.read_tokens(5, 8)
    expected = sum_samples(5, rows.T)
    assert expected.numbers == sum_numbers(5, 13)
    for shares in ([(9, 13), (5, 9)], [(6, 13), (5, 6)], [(5, 13)]):
        totals = np.zeros(5)
        for order in (list, reversed, sorted):  # three readers of each share
            for first, stop in shares:
                rank = ReadChecksum()
                for number in order(range(first, stop)):
                    rank.add(number, rows[number - 5 : number - 4].T.astype(np.int32))
                totals += rank.take_sums()
                assert rank.take_sums() == [0.0] * 5
        assert sum_step(totals.tolist(), 8) == expected
    # One reader of the three has read a sample twice and another never.
    wrong = ReadChecksum()
    wrong.add(5, rows[:1].T)
    right = ReadChecksum()
    right.add(6, rows[1:2].T)
    totals += np.array(wrong.take_sums()) - np.array(right.take_sums())
    assert sum_step(totals.tolist(), 8).numbers != expected.numbers
    assert sum_step(totals.tolist(), 8).tokens != expected.tokens


def test_a_changed_file_is_refused_at_the_next_start(tiny: Path, tokens: Path, tmp_path: Path, megascale) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.bin", "train.idx"):
        (data / name).write_bytes((tokens / name).read_bytes())
    arguments = (f"--data.train=['{data}/train']", "--train.name=changed")
    train(load_config(tiny, list(arguments) + ["--train.stop_after=2"]))
    raw = bytearray((data / "train.bin").read_bytes())
    raw[100] ^= 1
    (data / "train.bin").write_bytes(raw)
    refused = megascale("train", tiny, *arguments, "--parallel.tensor=2")
    assert refused.returncode == 4
    assert "train.bin was changed" in refused.stderr


def test_ledger_faults_are_told(tmp_path: Path, tokens: Path) -> None:
    source = open_samples(configured(str(tokens / "train"), tmp_path))

    def line(step: int, first: int) -> dict:
        return {
            "step": step,
            "first": first,
            "count": 4,
            "ids": f"{hash_sample_ids(source.find_sample_ids(first, 4)):016x}",
        }

    good = [line(step, 4 * step - 4) for step in range(1, 6)]
    result = check_ledger(good, source)
    assert (result.steps, result.samples, result.distinct_ids, result.faults) == (5, 20, 20, [])
    assert "repeats" in check_ledger(good + [line(6, 16)], source).faults[0]
    assert "(0, 0," in check_ledger(good + [line(6, 16)], source).faults[1]
    assert "skips" in check_ledger(good + [line(6, 24)], None).faults[0]
    assert "follows step" in check_ledger(good[:2] + [line(2, 8)], None).faults[0]
    assert "follows step" in check_ledger(good[:2] + [line(4, 8)], None).faults[0]
    assert "other samples" in check_ledger([good[0] | {"ids": "0" * 16}], source).faults[0]


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
    nothing = dict.fromkeys(COUNTERS, 0.0)
    assert find_cause(nothing, nothing | counter) == why
    watch, report = LoaderWatch(), []
    for step in range(1, 40):
        watch.add_measures(
            0.5 if step == 1 or step > 20 else 0.0001, {k: v * step for k, v in (nothing | counter).items()}
        )
        report += [(step,) + event for event in watch.find_loader_events(1.0, 1)]
    assert [(event, details["cause"]) for _, event, details in report] == [(Event.LOADER_SLOW, why)]
    assert 20 < report[0][0] < 30  # not for the first step, which waits for the loader to come up
    watch.add_measures(0.0, nothing)
    assert (Event.LOADER_RESTARTED, {"generation": 2}) in watch.find_loader_events(1.0, 2)


def test_bench_compares_equal_work(tmp_path: Path) -> None:
    """Both sides read the same tokens, the loader once where the baseline reads twice."""
    report = bench.measure(tmp_path, ["jsonl"], ranks=2, batches=20, steps=12)
    sides = report["bound"]["jsonl"]
    assert sides["baseline"]["crc"] == sides["host"]["crc"]
    assert sides["baseline"]["bytes_read"] > 1.5 * sides["host"]["bytes_read"]
    host = report["waits"]["jsonl"]["host"]
    assert set(host) == {"mean", "empty", "median", "p99", "first_step_seconds"}
    assert 0 <= host["empty"] <= host["mean"]
