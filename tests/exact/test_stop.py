"""A wish to stop: whichever rank has it, every rank knows of it after the same step."""

from __future__ import annotations

import signal
from typing import Any

import psutil
import pytest

from megascale import checkpoint
from megascale.core.batch import Batch
from tests.conftest import lines
from tests.exact.cases import case
from tests.exact.processes import LIMIT, end, launched, wait_for_step
from tests.exact.training import make_engine, tokens

pytestmark = pytest.mark.xdist_group("processes")


def stops(rank: int, world: int, tree: dict[str, Any]) -> list[bool]:
    """Whether a step said to stop: of one step without a wish, then of one for the wish of each rank."""
    import numpy as np
    import torch

    engine = make_engine(rank, world, tree)
    rows = np.stack([tokens(engine.config, 1, i) for i in range(engine.config.train.micro_batch)])
    columns = torch.from_numpy(rows).t().contiguous()
    results = []
    for step, wishing in enumerate([None] + list(range(world)), 1):
        engine.start_gather()
        result = engine.step(lambda i: Batch(columns[:-1], columns[1:]), step, 1e-3, stop_request=rank == wishing)
        results.append(bool(result.stop_sum > 0))
    return results


@pytest.mark.parametrize("axes", [(2, 1, 2), (1, 2, 2)], ids=["tensor and data", "pipeline and data"])
def test_the_wish_of_any_rank_counts_on_every_rank(axes, pool):
    layout = case(*axes, microbatches=2)
    assert pool.run(stops, layout.world, layout.tree) == [[False] + [True] * layout.world] * layout.world


def test_a_signal_to_one_rank_saves_and_ends_all(tiny, tmp_path):
    run = tmp_path / "runs" / "tiny"
    arguments = ("--parallel.data=2", "--train.steps=100000", "--checkpoint.interval=0")
    with launched(tiny, *arguments) as (launcher, ranks):
        wait_for_step(run, 3, launcher)
        ranks[1].send_signal(signal.SIGTERM)
        ended = end(launcher)
        assert not psutil.wait_procs(list(ranks.values()), timeout=LIMIT)[1]
    assert ended.code == 130, ended
    event = lines(run / "events.jsonl")[-1]
    assert (event["event"], event["saved"]) == ("interrupted", event["step"])
    assert checkpoint.latest(run / "checkpoints") == event["step"]
