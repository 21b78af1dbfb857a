"""Slow machines in recorded runs: replayed jobs with a fault, read from a copy of their spans and nothing else."""

from __future__ import annotations

import dataclasses
import shutil

import duckdb
import numpy as np
import pytest

from benchmarks.observe.replayed_job import Faults, replayed
from benchmarks.observe.replayed_runs import keep
from benchmarks.observe.synthetic_spans import Job
from megascale.core import strict_json
from megascale.errors import ConfigError, DataError
from megascale.observe.analysis.rank_times import CATEGORIES, RankTimes, choose_window, read_rank_times
from megascale.observe.analysis.stragglers import find_stragglers
from megascale.observe.store.tables import SpanTables

JOB = Job(tensor=4, stages=2, virtual=2, data=4, microbatches=8)
SLOW, LINK = 6, 26  # stage 0, tensor 2, data 1; stage 1, tensor 2, data 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A copy of the spans of a run with a slow GPU and a slow link."""
    folder = tmp_path_factory.mktemp("run")
    keep(folder / "made", JOB, replayed(JOB, 60, 3, Faults({SLOW: 1.08}, {LINK: 8.0})))
    shutil.copytree(folder / "made" / "spans", folder / "copy" / "spans")
    shutil.rmtree(folder / "made")
    return folder / "copy"


def test_parts_add_up_to_the_step(run):
    with SpanTables(run) as tables:
        assert choose_window(tables) == (1, 3, 60)  # a minute of them, without two that warm up
        assert choose_window(tables, last=20) == (1, 41, 60)
        assert choose_window(tables, "7-9") == (1, 7, 9)
        with pytest.raises(ConfigError, match=r"--steps=90: roll-ups exist for steps 1 to 60 only"):
            choose_window(tables, "90")
        times = read_rank_times(tables, 1, 11, 60)
        with pytest.raises(DataError, match="steps 70 to 80"):
            read_rank_times(tables, 1, 70, 80)
    full = times.busy + sum(times.waits.values())
    assert np.abs(full - times.seconds).max() < 1e-6
    assert times.coordinates[SLOW].tolist() == [2, 0, 1]
    assert len(set(times.peer_groups.tolist())) == 2


def test_a_slow_gpu_and_a_slow_link_are_told_apart(run):
    with SpanTables(run) as tables:
        result = find_stragglers(read_rank_times(tables, 1, 11, 60), tables)
    assert [(item.slow_rank.rank, item.cause, item.slow_rank.state) for item in result.persistent] == [
        (SLOW, "GPU", "persistent")
    ]
    assert result.persistent[0].slow_rank.excess == pytest.approx(0.08, abs=0.015)
    assert result.persistent[0].position == "stage 0, tensor 2, data 1"
    assert [link.ranks for link in result.links] == [(LINK,)]
    assert result.links[0].seconds > result.links[0].limit > 0


def test_ranks_that_are_missing_are_named_and_the_rest_is_judged(run, tmp_path, megascale):
    """A host's folder is gone, a rank's rows are, and a rank tells no more from step 31 on."""
    shutil.copytree(run / "spans", tmp_path / "spans")
    out = tmp_path / "spans" / "host=0"
    for file in out.glob("rollups-*.parquet"):
        remaining = "rank NOT IN (8, 9, 17) AND NOT (rank = 20 AND step > 30)"
        duckdb.sql(f"COPY (SELECT * FROM read_parquet('{file}') WHERE {remaining}) TO '{out}/new' (FORMAT parquet)")
        (out / "new").rename(file)
    lines = (out / "ranks.jsonl").read_text().splitlines()
    (out / "ranks.jsonl").write_text("\n".join(item for item in lines if strict_json.loads(item)["rank"] not in (8, 9)))
    with SpanTables(tmp_path) as tables:
        result = find_stragglers(read_rank_times(tables, 1, 11, 60), tables)
    assert result.times.missing_ranks == [8, 9, 17]
    assert result.times.silent_ranks == {20: 30}
    assert [(entry.slow_rank.rank, entry.cause, entry.slow_rank.state) for entry in result.persistent] == [
        (SLOW, "GPU", "persistent")
    ]
    assert [link.ranks for link in result.links] == [(LINK,)]
    report = megascale("stragglers", tmp_path).stdout
    assert "3 ranks (8, 9, 17) have no records in these steps: not compared" in report
    assert "rank 20 has no records after step 30, though other ranks have" in report


def test_the_command_tells_draws_and_prints_json(run, megascale, tmp_path):
    report = megascale("stragglers", run, "--plot", tmp_path / "slow.png").stdout
    assert "rank 6 (stage 0, tensor 2, data 1 on bench)" in " ".join(report.split())
    assert (tmp_path / "slow.png").stat().st_size > 10_000
    result = strict_json.loads(megascale("stragglers", run, "--json", "--steps", "11-60").stdout)
    assert [item["rank"] for item in result["slow_ranks"] if item["state"] == "persistent"] == [SLOW]
    assert [entry["ranks"] for entry in result["slow_links"]] == [[LINK]]
    assert set(result["slower"]) == {str(rank) for rank in range(JOB.world)}
    wrong = megascale("stragglers", run, "--plot", "slow.txt")
    assert (wrong.returncode, "slow.txt" in wrong.stderr) == (2, True)
    wrong = megascale("stragglers", run, "--steps", "1-9", "--last", "5")
    assert (wrong.returncode, "give only one of them" in wrong.stderr) == (2, True)
    assert megascale("stragglers", tmp_path).returncode == 4


def make_times(ranks: int, device: str = "GPU", hosts: int = 2) -> RankTimes:
    """Ranks of one stage with 100 ms of work a step, and a little of everything."""
    random = np.random.default_rng(5)
    shape = (ranks, 50)
    noisy = np.exp(0.01 * random.standard_normal(shape))
    times = dict(zip(CATEGORIES, np.tile(0.001 * noisy, (len(CATEGORIES), 1, 1)), strict=True)) | {
        "compute": 0.1 * noisy,
        "queued": np.zeros(shape),
    }
    waits = {axis: np.zeros(shape) for axis in ("tensor", "pipeline", "data", "world")}
    more = {"count": np.ones(shape), "forward": 0.03 * noisy, "backward": 0.07 * noisy, "compute_total": 0.1 * noisy}
    more |= {"host": 0.05 * noisy, "first": np.full(shape, 1.0), "last": np.full(shape, 2.0)}
    location = np.stack([np.zeros(ranks, int), np.zeros(ranks, int), np.arange(ranks)], 1)
    host = np.arange(ranks) // (ranks // hosts)
    return RankTimes(
        np.arange(ranks),
        np.arange(1, 51),
        1,
        location,
        host,
        [device] * ranks,
        ["h"] * ranks,
        0.2 * noisy,
        times,
        waits,
        more,
    )


@pytest.mark.parametrize(
    ("part", "device", "cause"),
    [
        ("compute", "GPU", "GPU"),
        ("compute", "cpu", "processor"),
        ("update", "GPU", "GPU"),
        ("outside", "GPU", "host: launch"),
        ("samples", "GPU", "host: loader"),
        ("garbage", "GPU", "host: garbage"),
        ("queued", "cpu", "host: processes"),
    ],
)
def test_the_cause_is_what_takes_longer(part, device, cause):
    times = make_times(8, device)
    times.categories[part][3] += 0.015
    (single,) = find_stragglers(times).ranks
    assert (single.slow_rank.rank, single.cause) == (3, cause)
    assert single.shares[part] > 0.9
    assert single.delay_seconds == pytest.approx(0.015, rel=0.15)


def test_a_gpu_that_waits_for_its_host_is_the_host_s():
    times = make_times(8)
    for values in (times.categories["compute"], times.details["compute_total"]):
        values[3] *= 1.2
    times.details["host"][3] = times.details["compute_total"][3]
    (single,) = find_stragglers(times).ranks
    assert single.cause == "host: launch"
    assert "the GPU waits for its host" in single.evidence[-1]


def test_most_ranks_of_a_host_are_the_host_s():
    times = make_times(16, hosts=4)
    times.categories["compute"][4:7] *= 1.15
    result = find_stragglers(times).persistent
    assert {(item.slow_rank.rank, item.cause) for item in result} == {(rank, "GPU, whole host") for rank in (4, 5, 6)}
    assert "3 of the 4 ranks of host 1" in result[0].evidence[-1]


def test_no_work_is_compared_with_other_work():
    times = make_times(4)
    times.categories["compute"][3] *= 2
    times.details["count"][3] = 2
    result = find_stragglers(dataclasses.replace(times))
    assert (result.ranks, result.judgement.uncompared) == ((), 1)
