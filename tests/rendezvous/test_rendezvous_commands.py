"""Commands of users: a training run over Redis through a server restart, and the bench of starts."""

from __future__ import annotations

import json
import subprocess
import time

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from megascale.errors import MegascaleError
from tests.forked import PACED, Forked
from tests.rendezvous.conftest import needs_redis


@needs_redis
def test_a_training_run_over_redis_through_a_server_restart(tiny, tmp_path, redis_server):
    """The url is all that changes; the run goes to its end and leaves nothing in the server."""
    server = redis_server("--requirepass", "s3cret")
    arguments = ["train", tiny, "--train.steps=30", "--parallel.tensor=2", "--checkpoint.interval=0"]
    url = f"--rendezvous.url=redis://:s3cret@127.0.0.1:{server.port}"
    metrics = tmp_path / "runs" / "redis" / "metrics.jsonl"
    run = Forked(arguments + [url, "--train.name=redis"], before=PACED, output=tmp_path / "out.txt")
    try:
        deadline = time.monotonic() + 120
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            assert run.poll() is None, (tmp_path / "out.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        at_restart = len(metrics.read_text().splitlines())
        server.restart()
        assert run.wait(120) == 0, (tmp_path / "out.txt").read_text()
    finally:
        run.kill()
    assert at_restart < 30, "the run was over before the restart"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 31))
    for file in (tmp_path / "runs").rglob("*"):
        assert not file.is_file() or b"s3cret" not in file.read_bytes(), file
    assert "s3cret" not in (tmp_path / "out.txt").read_text()
    cli = ["redis-cli", "-p", str(server.port), "-a", "s3cret", "--no-auth-warning", "KEYS", "*"]
    assert subprocess.run(cli, capture_output=True, text=True, check=True).stdout.strip() == ""


@needs_redis
def test_the_bench_of_starts(tmp_path):
    arguments = "init --ranks 64,128 --store tcp,tcp-legacy,redis --calls 3 --repeat 1 --out"
    done = CliRunner().invoke(app, arguments.split() + [str(tmp_path / "init.json")])
    assert done.exception is None, done.output
    record = json.loads((tmp_path / "init.json").read_text())
    assert (tmp_path / "init.png").stat().st_size > 10_000
    rows = {(r["ranks"], r["store"], r["protocol"]): r for r in record["results"]}
    assert len(rows) == 10  # the old server runs the old protocol only
    for (ranks, _, protocol), row in rows.items():
        assert 0 < row["connect"] <= row["seconds"]
        old = protocol == "per-group-barrier"
        # Per 64 ranks: 64 data groups or none of their own, 1 model, 8 tensor, 8 pipeline in three loops.
        assert row["calls"] == (64 + ranks // 64 * (1 + 8 + 3 * 8) if old else 0)
        assert row["extrapolated"] is old
        assert row["server_cpu"] >= 0
    assert "extrapolated" in done.output


def test_the_papers_number_of_calls():
    from benchmarks.rendezvous.init import megatron_groups
    from megascale.core.grid import Grid

    names = megatron_groups(Grid(tensor=8, data=32, pipeline=8))
    assert len(names) == len(set(names)) == 1120
    assert len(megatron_groups(Grid(tensor=8, data=192, pipeline=8))) == 6400


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ("--store etcd", "choose among"),
        ("--ranks many", "is not a list of numbers"),
        ("--ranks 100", "cannot be laid out"),
        ("--ranks 64 --store redis --redis-server absent-server", "not installed"),
    ],
)
def test_bad_words(arguments, output):
    result = CliRunner().invoke(app, ["init"] + arguments.split())
    assert isinstance(result.exception, MegascaleError)
    assert output in str(result.exception)
