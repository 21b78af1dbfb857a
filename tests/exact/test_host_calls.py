"""Count the functions that a training step calls. The load of the machine does not change this number.

On small models and fast devices the host is what a step takes (`megascale bench train gpt2-124m`).
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megascale
from tests.exact.cases import case
from tests.exact.training import RankReport, make_engine, run_step

# With torch 2.13 it is 37,966, with 2.11 about 500 more. A change that needs more says what for.
MOST = 40_000
PACKAGE = str(Path(megascale.__file__).parent)
# Counted by `count_package_calls` on 28 November 2026: 2,041, and 23 more for functions that were parts of others
# before (parallel/tensor.py, `Engine._make_runner`), and 8 more, one for each action of the pipeline: it checks whether
# the rank must leave its attempt.
MOST_OF_PACKAGE = 2_072


@pytest.mark.xdist_group("processes")
def test_python_calls_of_a_tensor_parallel_step(pool):
    """Two llama layers, two tensor-parallel ranks, selective recomputation, two micro-batches."""
    model = {"attention_bias": False, "tied_embeddings": False, "norm": "rmsnorm", "activation": "swiglu", "layers": 2}
    model |= {"positions": "rotary", "kv_heads": 2, "mlp_bias": False}
    options: dict[str, Any] = {"train": {"precision": "float32"}, "parallel": {"recompute": "selective"}}
    calls, _ = pool.run(count_package_calls, 2, case(2, microbatches=2, model=model, **options).tree)
    assert calls <= MOST_OF_PACKAGE, f"{calls:,} calls per step; at most {MOST_OF_PACKAGE:,}"


def count_package_calls(rank: int, world: int, tree: dict[str, Any]) -> int:
    """Return the number of Python calls of the package's functions in the fourth step.

    Functions that Python generates, such as `__init__` of a dataclass, count too. Functions of torch do not count, so
    that the number holds for all releases of torch.
    """
    engine = make_engine(rank, world, tree)
    report = RankReport()
    for step in (1, 2, 3):
        run_step(engine, step, report)
    calls = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith((PACKAGE, "<string>"))

    gc.disable()
    sys.setprofile(count_call)
    try:
        run_step(engine, 4, report)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


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
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        test_calls_of_a_step(Path(folder))
