"""A job goes on without the replica of a lost node, and takes its replacement in at a step boundary."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.launched import SNAPSHOT_LINE, START_LINE, has_copies
from megascale.config import load
from megascale.core.recovery_record import RecoveryRecord
from megascale.core.status import name_status_file, read_status
from megascale.errors import ConfigError
from megascale.resilience.agent.attempt_orders import compute_missing_fraction, explain_change, read_data_size
from megascale.resilience.driver.launch_checks import JobSize
from megascale.resilience.driver.recovery.missing_replicas import check_continued_sizes, list_continued_sizes
from megascale.resilience.driver.state.job_state import JobState
from megascale.resilience.protocol.agent_messages import Start
from tests.chaos.local.continuing import describe_parts
from tests.conftest import TINY, lines
from tests.forked import Forked
from tests.resilience.test_launch import losses, weights

COPIES = ["--checkpoint.background=true", "--checkpoint.memory_interval=1", "--checkpoint.replicas=true"]
CONTINUED = ["--resilience.continue_replicas=true", "--checkpoint.memory_wait=true"] + COPIES
KEEP = "--resilience.keep_seconds=60"  # on a busy machine a rank takes its time
SETTINGS = ["--parallel.data=3", "--train.global_batch=4", "--train.micro_batch=1", "--train.precision=float64"]


@pytest.fixture(scope="module")
def undisturbed(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Train in one process without faults, once per settings. Return the run folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    file = folder / "tiny.toml"
    file.write_text(TINY.format(data=tokens, runs=folder / "runs"))

    @functools.cache
    def train_run(*settings: str) -> Path:
        name = f"run-{len(list(folder.glob('runs/*')))}"
        process = Forked(["train", file, *settings, f"--train.name={name}", "--parallel.data=1"], cwd=folder)
        try:
            output, _ = process.communicate(timeout=240)
            assert process.wait() == 0, output
        finally:
            process.kill()
        return folder / "runs" / name

    return train_run


@pytest.mark.parametrize("prepared_groups", [False, True])
def test_a_job_goes_on_without_a_node_and_takes_it_in_again(
    prepared_groups: bool, launch, megascale, undisturbed
) -> None:
    steps = SETTINGS + ["--train.steps=60", "--checkpoint.interval=60"]
    # 4 micro-batches are uneven for three replicas, and even for two.
    job = launch("broken", "--nodes=3", *steps, *CONTINUED, "--resilience.window=20", "--checkpoint.linger=40", KEEP,
                 f"--rendezvous.prepared_groups={str(prepared_groups).lower()}")  # fmt: skip
    job.until("first_step")
    job.until_step(6)
    job.kill_rank(1)
    missing = job.until("replicas_missing")
    assert "2 of 3 replicas" in missing.evidence[0]
    assert job.until("attempt_started").nodes == ("n0", "n2")
    record = RecoveryRecord.from_details(job.until("recovered").details)
    assert record is not None
    assert (record.cause, record.reused_ranks) == ("process_killed", (0, 1)), job.story()
    assert 0 <= record.lost_steps <= 1
    assert job.until("replicas_joining").nodes == ("n1",)
    assert job.until("attempt_started").nodes == ("n0", "n2", "n1")
    record = RecoveryRecord.from_details(job.until("recovered").details)
    assert record is not None
    assert (record.cause, record.lost_steps, record.reused_ranks) == ("replicas_joining", 0, (0, 1)), job.story()
    assert job.finish() == 0, job.story()
    # Only the first attempt allocates memory for snapshots: the larger shards after the loss, the former rank 2, and
    # the process that joins have memory already.
    logs = "".join(file.read_text() for file in (job.run / "logs").glob("rank-*.log"))
    assert logs.count("0 of 2 slots as before") == 3, logs
    assert logs.count("2 of 2 slots as before") == 2 + 3, logs
    assert logs.count("were made during the attempt before") == prepared_groups, logs
    assert logs.count("warmed up the groups of the next attempt") == 2 * prepared_groups, logs
    assert logs.count("aborted the groups of the attempt before") == 2 * prepared_groups, logs
    assert logs.count("is not copied to memory before the join") == 2, logs
    for rank in range(3):
        status = read_status(job.run / "status" / name_status_file(rank))
        assert status is not None
        assert status.start is not None
        assert status.start.left_ns < status.start.state_ns < status.start.stepped_ns < status.time_ns

    calm = undisturbed(*steps)
    run, expected_losses = dict(losses(job.run)), dict(losses(calm))
    assert sorted(run) == sorted(expected_losses) == list(range(1, 61))
    assert np.allclose([run[step] for step in run], [expected_losses[step] for step in run], rtol=1e-11, atol=0)
    expected = weights(calm)
    for name, tensor in weights(job.run).items():
        assert np.allclose(tensor, expected[name], rtol=1e-8, atol=1e-11), name
    shares = {round(record.get("missing_share", 0.0), 3) for record in lines(job.run / "metrics.jsonl")}
    assert shares == {0.0, 0.333}
    ledger = [record["first"] for record in lines(job.run / "samples" / "ledger.jsonl")]
    assert ledger == [4 * i for i in range(60)]
    checked = megascale("data", "ledger", job.run)
    assert checked.returncode == 0, checked.stderr + checked.stdout


@pytest.mark.parametrize("waits_for_nodes", [False, True])
def test_a_single_survivor_copies_its_state_only_if_the_job_waits_for_nodes(
    waits_for_nodes: bool, launch, undisturbed
) -> None:
    """Two replicas. The rank is killed as soon as both ranks have copies, which are therefore the source."""
    steps = ["--train.global_batch=4", "--train.micro_batch=1", "--train.precision=float64", "--train.steps=40"]
    steps.append("--checkpoint.interval=40")
    limit = "--resilience.max_missing_seconds=" + ("0.001" if waits_for_nodes else "600")
    job = launch("broken", "--nodes=2", *steps, *CONTINUED, "--resilience.window=20", "--checkpoint.linger=40", KEEP,
                 limit)  # fmt: skip
    job.until("first_step")
    job.wait(lambda: has_copies(job.run, 2), "copies of both ranks")
    job.kill_rank(1)
    assert "1 of 2 replicas" in job.until("replicas_missing").evidence[0]
    record = RecoveryRecord.from_details(job.until("recovered").details)
    assert record is not None
    assert record.lost_steps <= 1, job.story()
    assert "memory" in record.source, job.story()
    job.until("replicas_overdue" if waits_for_nodes else "replicas_joining")
    assert job.until("attempt_started").nodes == ("n0", "n1")
    assert job.finish() == 0, job.story()
    log = (job.run / "logs" / "rank-0.log").read_text()
    assert log.count("is not copied to memory before the join") == (not waits_for_nodes), log

    run, expected_losses = dict(losses(job.run)), dict(losses(undisturbed(*steps)))
    assert sorted(run) == sorted(expected_losses) == list(range(1, 41))
    assert np.allclose([run[step] for step in run], [expected_losses[step] for step in run], rtol=1e-11, atol=0)


def test_copies_count_once_each_rank_has_its_own_of_the_newest_start(tmp_path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    start, snapshot = f"{START_LINE}0.5 s after the groups\n", f"{SNAPSHOT_LINE}step 3\n"
    (logs / "rank-0.log").write_text(start + snapshot)
    assert not has_copies(tmp_path, 2)
    (logs / "rank-1.log").write_text(start + snapshot + start)
    assert (has_copies(tmp_path, 1), has_copies(tmp_path, 2)) == (True, False)
    (logs / "rank-1.log").write_text(start + snapshot + start + snapshot)
    assert has_copies(tmp_path, 2)


def test_training_without_a_driver_says_that_it_is_missing(megascale, tiny) -> None:
    result = megascale("train", tiny, "--train.steps=1", *CONTINUED)
    assert result.returncode == 0, result.stderr
    assert "resilience.continue_replicas=true needs a driver, and there is none" in result.stdout


def make_config(tiny, *words: str):
    return load(tiny, ["--resilience.nodes=4", "--train.global_batch=8", "--train.micro_batch=1", *CONTINUED, *words])


def test_sizes_without_some_nodes(tiny) -> None:
    config = make_config(tiny, "--resilience.max_missing_replicas=2")
    assert [list_continued_sizes(config, 1, nodes) for nodes in (4, 3, 2, 1)] == [
        [(4, 4), (3, 3), (2, 2)],
        [(3, 3), (2, 2)],
        [(2, 2)],
        [],
    ]
    # Two nodes hold a replica together: without one of them the other becomes a spare.
    config = make_config(tiny, "--parallel.tensor=2")
    assert list_continued_sizes(config, 1, 3) == [(1, 2)]
    config = make_config(tiny, "--parallel.pipeline=2")
    assert list_continued_sizes(config, 2, 3) == [(3, 3)]
    config = make_config(tiny, "--train.global_batch=4", "--train.micro_batch=2")
    assert list_continued_sizes(config, 1, 3) == []  # fewer micro-batches than replicas


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        (["--resilience.nodes=1"], 4, "has 4 on 1 nodes"),
        (["--parallel.tensor=4"], 1, "this job has 1 on 4 nodes"),
        ([], 2, r"without one of 4 nodes 2 of 8 replicas are missing; set --resilience.max_missing_replicas=2"),
        (["--resilience.nodes=2", "--parallel.tensor=2", "--parallel.pipeline=2"], 4, None),
    ],
)
def test_a_job_that_could_not_go_on_is_refused(tiny, words: list[str], ranks: int, message: str | None) -> None:
    config = make_config(tiny, *words)
    if message is None:
        check_continued_sizes(config, ranks)
        return
    with pytest.raises(ConfigError, match=message):
        check_continued_sizes(config, ranks)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpoint.replicas=false"], "copies in other hosts' memory"),
        (["--checkpoint.memory_interval=0", "--checkpoint.memory_wait=false"], "copies in other hosts' memory"),
        (["--resilience.replay_interval=5"], "replay_interval=5 compares replicas with equal"),
        (["--foreign.command=['python', 'train.py']"], "foreign.command names another trainer"),
        (
            ["--resilience.continue_replicas=false", "--rendezvous.prepared_groups=true"],
            "rendezvous.prepared_groups=true makes the groups .* set --resilience.continue_replicas=true",
        ),
        (
            ["--resilience.keep_seconds=0", "--rendezvous.prepared_groups=true"],
            "rendezvous.prepared_groups=true needs processes that stay .* set --resilience.keep_seconds=3",
        ),
        (
            ["--rendezvous.url=redis://host:1", "--rendezvous.prepared_groups=true"],
            "rendezvous.url=redis://host:1 names another one; set --rendezvous.url=env://",
        ),
    ],
)
def test_settings_that_exclude_it_are_refused_by_name(tiny, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(tiny, *words)


def test_captured_graphs_of_experts_are_refused(tiny) -> None:
    experts = ["--model.mlp=experts", "--model.mlp_bias=false", "--model.experts.number=4"]
    with pytest.raises(ConfigError, match="whose tokens experts do not count"):
        make_config(tiny, *experts, "--kernels.graphs=on")


def start(ranks: tuple[int, ...], world: int, data: int = 0, **changes: Any) -> Start:
    words = (f"--parallel.data={data}",) if data else ()
    settings = "[parallel]\ndata = 4\n"
    return Start(**({"settings": settings, "env": {}} | changes), epoch=1, attempt=1, job="a", ranks=ranks, world=world,
                 master=("h", 1), words=words)  # fmt: skip


def test_processes_stay_although_rank_and_size_change(tiny) -> None:
    assert explain_change(start((3,), 4), start((1,), 3, data=3)) == ""
    assert explain_change(start((3,), 4), start((2, 3), 4)) == "the number of ranks of its node changes"
    assert explain_change(start((3,), 4), start((1,), 3, data=3, env={"A": "1"})) == "the settings change"
    assert [read_data_size(start((0,), 4)), read_data_size(start((0,), 3, data=3))] == [4, 3]


def test_only_awaited_replicas_are_missing() -> None:
    """A job that has shrunk, without resilience.continue_replicas or after a wait in vain, is a smaller one."""
    degraded, shrunk = (JobState(name="a", missing_since=time).to_json() for time in (7.0, 0.0))
    assert compute_missing_fraction(start((0,), 3, data=3, state=degraded)) == 0.25
    assert compute_missing_fraction(start((0,), 3, data=3, state=shrunk)) == 0
    assert compute_missing_fraction(start((0,), 4, settings="", state=degraded)) == 0


def test_memory_is_checked_for_the_smallest_size(tiny, monkeypatch) -> None:
    from megascale.cli.launch import _check_missing_replicas
    from megascale.core import preflight

    worlds = []
    monkeypatch.setattr(preflight, "check_host", lambda layout, share, report: worlds.append((layout.grid.data, share)))
    config = make_config(tiny, "--resilience.max_missing_replicas=2")
    _check_missing_replicas(config, JobSize(4, 1, 4, []), print)
    [(data, share)] = worlds
    assert (data, share.ranks, share.nodes) == (2, 2, 2)


def test_the_campaign_divides_joins_by_the_slowest_rank():
    first = {"0": "0.30 s after the groups: engine 0.10, load 0.20; of the load: plan 0.01, read 0.02"}
    first["1"] = "0.30 s after the groups: engine 0.25, load 0.05; of the load: plan 0.03"
    second = {"0": "0.50 s after the groups: engine 0.30, load 0.20; of the load: plan 0.03, read 0.04"}
    assert describe_parts([first, second]) == ["all: engine 250, load 200", "of the load: plan 30, read 30"]
    left = {"0": "4 in 0.55 s (observers 0.00, engine 0.19, memory 0.04) and waits for the next one"}
    assert describe_parts([left]) == ["all: observers 0, engine 190, memory 40"]
