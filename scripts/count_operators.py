#!/usr/bin/env python3
"""Counts what a training step asks of torch, to show that a change of the code's shape is none of its work.

    PYTHONPATH=OLD/src:OLD scripts/count_operators.py --out old.json
    PYTHONPATH=NEW/src:NEW scripts/count_operators.py --out new.json --against old.json

On a CPU, small models of several shapes on one rank and on two: operators in all (torch.profiler), kernels but for
views, whether their order and sizes are the same, and whether losses and gradient norms are equal bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from tests.exact.cases import case
from tests.exact.pool import Pool
from tests.exact.training import Told, make_engine, run_step
from torch.utils._python_dispatch import TorchDispatchMode

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


def count(rank: int, world: int, tree: dict[str, Any]) -> dict[str, Any]:
    """A worker's second step by kernel, its third by the profiler."""
    engine, told, seen = make_engine(rank, world, tree), Told(), Recorded()
    run_step(engine, 1, told)
    with seen:
        run_step(engine, 2, told)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run_step(engine, 3, told)
    return {
        "operators": sum(e.count for e in profile.key_averages() if "::" in e.key),
        "kernels": len(seen.kernels),
        "order": hashlib.blake2b("\n".join(seen.kernels).encode(), digest_size=6).hexdigest(),
        "results": [value.hex() for value in told.losses + told.norms],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    before = json.loads(given.against.read_text()) if given.against else {}
    pool, found = Pool(), {}
    for name, model in SHAPES.items():
        for tensor in (1, 2):
            for recompute in ("none", "selective", "full"):
                options = {"model": {**model, "layers": 2}, "parallel": {"recompute": recompute}}
                tree = case(tensor, microbatches=2, train={"precision": "float32"}, **options).tree
                key = f"{name}, TP{tensor}, recompute {recompute}"
                found[key] = now = pool.run(count, tensor, tree)[0]
                then = before.get(key, now)
                same = ["equal" if now[what] == then[what] else "DIFFERS" for what in ("order", "results")]
                counts = [f"{then[what]:,}, {now[what]:,}" for what in ("operators", "kernels")]
                print(f"| {' | '.join([key, *counts, *same])} |", flush=True)
    given.out.write_text(json.dumps(found))
    pool.close()


if __name__ == "__main__":
    main()
