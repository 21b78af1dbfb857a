"""What a training step asks of the host, counted: functions called a step, which no other load of a machine changes.

On small models and fast devices the host is what a step takes (`megascale bench train gpt2-124m`).
"""

from __future__ import annotations

import cProfile
import pstats

import torch
import torch.distributed as dist

from tests.exact.cases import case
from tests.exact.training import RankReport, make_engine, run_step

# With torch 2.13 it is 37,966, with 2.11 about 500 more. A change that needs more says what for.
MOST = 40_000


def test_calls_of_a_step(tmp_path):
    """12 layers, 8 micro-batches, one rank, plain operators."""
    tree = case(
        1,
        microbatches=8,
        train={"precision": "float32"},
        model={"layers": 12, "block": "serial"},
        parallel={"recompute": "none"},
    ).tree
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        engine, report = make_engine(0, 1, tree), RankReport()
        for step in (1, 2, 3):  # the first micro-batch learns, the first steps choose
            run_step(engine, step, report)
        profile = cProfile.Profile()
        profile.enable()
        run_step(engine, 4, report)
        profile.disable()
    finally:
        dist.destroy_process_group()
    calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    assert calls < MOST, f"{calls:,} calls a step with torch {torch.__version__}"
    print(f"{calls:,} calls a step with torch {torch.__version__}")


if __name__ == "__main__":
    from pathlib import Path
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        test_calls_of_a_step(Path(folder))
