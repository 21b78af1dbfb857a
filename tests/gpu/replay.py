"""Replays on healthy GPUs: how many differ, which must be none.

    PYTHONPATH=src:. python tests/gpu/replay.py 2
    PYTHONPATH=src:. python tests/gpu/replay.py 4 200

Arguments: GPUs, and replays of each case. Each step is checked. Every case has two replicas or more; with four GPUs
some divide a replica over two by tensor or pipeline parallelism. Each case runs in processes of its own. It ends with 1
if a replay differs, and names the first operator that did.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import torch

from megascale import config as configuration
from megascale.bench.train import join_groups, random_rows
from megascale.core.batch import Batch
from megascale.core.layout import lay_out
from megascale.rendezvous.groups import shutdown
from megascale.train.engine import Engine
from megascale.train.rank_info import find_device_kind
from megascale.train.replay_check import ReplayCheck, ReplayEvidence

REPLAYS = 100
GRAPHS = {"kernels": {"graphs": "on"}}
FLOAT8 = {"train": {"linear_precision": "float8"}}
ROWWISE = {"train": {"linear_precision": "float8_rowwise"}}
MODERN = {"model": {"positions": "rotary", "activation": "swiglu", "norm": "rmsnorm", "kv_heads": 4}}
EXPERTS = {
    "model": {
        "mlp": "experts",
        "mlp_bias": False,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "experts": {"number": 8, "top_k": 2},
    }
}
CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "bf16": (),
    "bf16, graphs": (GRAPHS,),
    "bf16, graphs, rotary, SwiGLU": (GRAPHS, MODERN),
    "float8, graphs": (GRAPHS, FLOAT8),
    "float8 by rows, graphs": (GRAPHS, ROWWISE),
    "float8, graphs, gathered in float8": (GRAPHS, FLOAT8, {"parallel": {"gather_precision": "float8"}}),
    "bf16, ZeRO-2": ({"parallel": {"zero": 2}},),
    "bf16, ZeRO-3": ({"parallel": {"zero": 3}},),
    "bf16, dropout, recomputed": ({"model": {"dropout": 0.1}, "parallel": {"recompute": "full"}},),
}
FOUR_GPUS: dict[str, tuple[dict[str, Any], ...]] = {
    "tensor 2, bf16, graphs": ({"parallel": {"tensor": 2}}, GRAPHS),
    "tensor 2, float8, graphs": ({"parallel": {"tensor": 2}}, GRAPHS, FLOAT8),
    "tensor 2, overlap async": ({"parallel": {"tensor": 2}, "overlap": {"tensor": "async"}},),
    "tensor 2, experts": ({"parallel": {"tensor": 2}}, EXPERTS),
    "pipeline 2, bf16, graphs": ({"parallel": {"pipeline": 2}}, GRAPHS),
}


def make_config(settings: tuple[dict[str, Any], ...], world: int) -> configuration.Config:
    """Return the configuration of a case: a small model with two micro-batches per replica and step."""
    tree: dict[str, Any] = {
        "model": {"layers": 4, "hidden": 2048, "heads": 16, "sequence_length": 2048, "vocab_size": 32000},
        "train": {"precision": "bfloat16", "micro_batch": 2, "name": "replay"},
        "kernels": {"deterministic": True},
        "parallel": {},
    }
    for part in settings:
        for section, values in part.items():
            tree[section] = tree.get(section, {}) | values
    parallel = tree["parallel"]
    replicas = world // (parallel.get("tensor", 1) * parallel.get("pipeline", 1))
    tree["train"]["global_batch"] = 4 * replicas
    return configuration.from_tree(tree)


def count_differences(settings: tuple[dict[str, Any], ...], replays: int) -> tuple[int, int, float, list[str]]:
    """Return the replays, those that differ, seconds per checked step, and the first messages."""
    config = make_config(settings, int(os.environ["WORLD_SIZE"]))
    location, groups = join_groups(config)
    evidence: list[ReplayEvidence] = []
    engine = Engine(lay_out(config, location.world), groups, location.device)
    kind = find_device_kind(location.device)
    engine.replay_check = ReplayCheck(
        engine, location.rank, f"{kind} {location.rank}", kind, interval=1, on_mismatch=evidence.append
    )
    rows = random_rows(config, engine.data_rank, location.device)
    replicas = engine.layout.grid.replicas
    steps = -(-replays // replicas)
    start = 0.0
    for step in range(1, steps + 2):
        if step == 2:
            torch.cuda.synchronize()
            start = time.perf_counter()
        engine.start_gather()
        engine.step(lambda i: Batch(rows[:-1], rows[1:]), step, 1e-4, has_next_step=step <= steps)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    engine.synchronize()
    if groups is not None:
        engine.close()
        shutdown(groups)
    return steps * replicas, len(evidence), seconds, [item.message for item in evidence[:2]]


def run_case(name: str, replays: int) -> None:
    """Run a case as one of its ranks; rank 0 prints its line. Exit 1 if a replay differs."""
    settings = (CASES | FOUR_GPUS)[name]
    count, differences, seconds, messages = count_differences(settings, replays)
    if os.environ["RANK"] == "0":
        print(f"{name:40} {differences} of {count} replays differ, {seconds:.3f} s per checked step", flush=True)
        for message in messages:
            print(f"    {message}", flush=True)
    sys.exit(differences > 0)


def main() -> None:
    """Run all cases."""
    if "RANK" in os.environ:
        run_case(sys.argv[1], int(sys.argv[2]))
    gpus = int(sys.argv[1])
    replays = sys.argv[2] if len(sys.argv) > 2 else str(REPLAYS)
    failed = []
    for name in CASES | (FOUR_GPUS if gpus % 4 == 0 else {}):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        if subprocess.run([*launch, __file__, name, replays], check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "no replay differs")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
