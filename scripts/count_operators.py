#!/usr/bin/env python3
"""Counts what a training step asks of torch, to show that a change of the code's shape is none of its work.

    PYTHONPATH=OLD/src:OLD scripts/count_operators.py --out old.json
    PYTHONPATH=NEW/src:NEW scripts/count_operators.py --out new.json --against old.json

On a CPU, small models of five shapes on one rank and on two tensor-parallel ones, under three settings of recomputing,
and each on two ranks of a pipeline and two of data parallelism: of a step of rank 0 the operators in all
(torch.profiler), the kernels but for views and the calls of Python functions; on every rank whether kernels come in the
same order with the same sizes, and whether losses and gradient norms are equal bit for bit. It ends with 1 where a case
differs, asks for more operators or kernels, or is not in the other file. Calls are for people to judge.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megascale.train.engine import Engine
from tests.exact.cases import Case, case
from tests.exact.pool import Pool
from tests.exact.training import RankReport, make_engine, run_step

ROTARY: dict[str, Any] = {"block": "parallel", "positions": "rotary"}
PLAIN: dict[str, Any] = {"attention_bias": False, "tied_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "serial": {},
    "parallel": {"block": "parallel"},
    "neox": ROTARY | {"parallel_norms": 2},
    "gptj": ROTARY | PLAIN | {"rotary_fraction": 0.5, "rotary_interleaved": True, "head_bias": True},
    "llama": PLAIN
    | {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "kv_heads": 2, "mlp_bias": False},
}
VIEWS = {"view", "_unsafe_view", "t", "transpose", "slice", "detach", "expand", "permute", "unsqueeze", "select"}
VIEWS |= {"as_strided", "split", "unbind", "alias", "squeeze", "chunk", "reshape", "movedim", "split_with_sizes"}


class Recorded(TorchDispatchMode):
    """Notes every operator with the sizes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in VIEWS:
            sizes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
            self.kernels.append(f"{func} {sizes}")
        return func(*args, **(kwargs or {}))


def cases() -> Iterator[tuple[str, Case]]:
    """All of them, each by its name."""
    for name, model in SHAPES.items():
        options: dict[str, Any] = {"model": {**model, "layers": 2}, "train": {"precision": "float32"}}
        for tensor in (1, 2):
            for recompute in ("none", "selective", "full"):
                key = f"{name}, TP{tensor}, recompute {recompute}"
                yield key, case(tensor, microbatches=2, parallel={"recompute": recompute}, **options)
        yield f"{name}, PP2", case(1, 2, 1, microbatches=2, **options)
        yield f"{name}, DP2, ZeRO-1", case(1, 1, 2, microbatches=2, parallel={"bucket_elements": 900}, **options)


def python_calls(engine: Engine, step: int, report: RankReport) -> int:
    """Count the calls of Python functions in a step, including resumptions of generators."""
    calls = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    gc.disable()
    sys.setprofile(note)
    try:
        run_step(engine, step, report)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def count(rank: int, world: int, tree: dict[str, Any]) -> dict[str, Any]:
    """A worker's second step by kernel, its third by the profiler, its fourth by Python's."""
    engine = make_engine(rank, world, tree)
    report = RankReport()
    observed = Recorded()
    run_step(engine, 1, report)
    with observed:
        run_step(engine, 2, report)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run_step(engine, 3, report)
    calls = python_calls(engine, 4, report)
    return {
        "python calls": calls,
        "operators": sum(e.count for e in profile.key_averages() if "::" in e.key),
        "kernels": len(observed.kernels),
        "order": hashlib.blake2b("\n".join(observed.kernels).encode(), digest_size=6).hexdigest(),
        "results": [value.hex() for value in report.losses + report.norms],
    }


def row(then: list[dict[str, Any]], current: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return rank 0's counts before and after, which fields are equal on all ranks, and whether nothing is worse."""
    counts = [f"{then[0][subject]:,}, {current[0][subject]:,}" for subject in ("operators", "kernels", "python calls")]
    equal = [[item[field] for item in current] == [item[field] for item in then] for field in ("order", "results")]
    more = any(current[0][field] > then[0][field] for field in ("operators", "kernels"))
    return counts + ["equal" if is_equal else "DIFFERS" for is_equal in equal], all(equal) and not more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    inputs = parser.parse_args()
    before = json.loads(inputs.against.read_text()) if inputs.against else None
    pool = Pool()
    result = {}
    worse = []
    print("| case | operators | kernels | Python calls | order and sizes | losses, norms |\n|---|---|---|---|---|---|")
    for key, item in cases():
        result[key] = current = pool.run(count, item.world, item.tree)
        if before is None:
            cells, fine = (
                [f"{current[0][subject]:,}" for subject in ("operators", "kernels", "python calls")] + ["", ""],
                True,
            )
        elif key not in before:
            cells, fine = [f"not in {inputs.against}"] + [""] * 4, False
        else:
            cells, fine = row(before[key], current)
        worse += [] if fine else [key]
        print(f"| {' | '.join([key] + list(cells))} |", flush=True)
    inputs.out.write_text(json.dumps(result))
    pool.close()
    if worse:
        sys.exit(f"{len(worse)} of {len(result)} cases differ, ask for more or are not there: {'; '.join(worse)}")
    print(f"{len(result)} cases" + ("" if before is None else ", none worse"))


if __name__ == "__main__":
    main()
