"""Replays on GPUs: how many differ on healthy GPUs, which must be none, and whether an injected wrong bit is named.

    PYTHONPATH=src:. torchrun --standalone --nproc-per-node 2 tests/gpu/replay.py
    PYTHONPATH=src:. torchrun --standalone --nproc-per-node 4 tests/gpu/replay.py "float8, graphs" wrong

Names of cases may follow; a part of a name chooses all cases that have it. `--replays=N` sets the replays of each case.
Each step is checked. Every case has two replicas or more; with four GPUs some divide a replica over two by tensor or
pipeline parallelism. All cases run in the same processes, and each row is printed at once. After BUDGET seconds no
further case starts, and the script ends itself at LIMIT. It ends with 1 if a replay differs, a wrong bit is not named,
or a case did not run.
"""

from __future__ import annotations

import faulthandler
import gc
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megascale import config as configuration
from megascale.bench.measured_steps import join_groups
from megascale.bench.random_samples import draw_tokens
from megascale.checkpoint.object_collectives import Peers, forget_groups
from megascale.core.batch import Batch
from megascale.core.layout import lay_out
from megascale.rendezvous.groups import Groups, shutdown
from megascale.train.engine import Engine
from megascale.train.rank_info import find_device_kind, find_rank_info
from megascale.train.replay_check import ReplayCheck, ReplayEvidence
from megascale.train.update_check import RANGE
from tests.chaos.corruption.bit_flips import BitFlip, Corruption

REPLAYS = 32  # of each case
BUDGET, LIMIT = 80.0, 97.0  # seconds
FAULTY_RANK, FAULTY_STEP = 1, 3
WHOLE_SHARD = 1 << 26  # elements: more than a rank has of any case
Settings = tuple[dict[str, Any], ...]
GRAPHS = {"kernels": {"graphs": "on"}}
EAGER = {"kernels": {"graphs": "off"}}
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
TENSOR = {"parallel": {"tensor": 2}}


@dataclass(frozen=True)
class Case:
    """Settings of a case.

    Attributes:
        settings: sections of the configuration.
        fault: kind of the wrong bit that one rank computes in step FAULTY_STEP, "" if all are healthy.
        update_range: elements of an update that a check recomputes.
    """

    settings: Settings = ()
    fault: str = ""
    update_range: int = RANGE


CASES = {
    "bf16, graphs": Case((GRAPHS,)),
    "float8, graphs": Case((GRAPHS, FLOAT8)),
    "float8 by rows, graphs": Case((GRAPHS, ROWWISE)),
    "bf16": Case(),
    "wrong GEMM, float8": Case((EAGER, FLOAT8), "gemm"),
    # RANGE has one element in 40 of a shard here, and a passing fault elsewhere is not seen.
    "wrong update, AdamW": Case((EAGER,), "update", WHOLE_SHARD),
    "bf16, graphs, rotary, SwiGLU": Case((GRAPHS, MODERN)),
    "float8, graphs, gathered in float8": Case((GRAPHS, FLOAT8, {"parallel": {"gather_precision": "float8"}})),
    "bf16, ZeRO-2": Case(({"parallel": {"zero": 2}},)),
    "bf16, ZeRO-3": Case(({"parallel": {"zero": 3}},)),
    "bf16, dropout, recomputed": Case(({"model": {"dropout": 0.1}, "parallel": {"recompute": "full"}},)),
    "LAMB": Case(({"optimizer": {"name": "lamb"}},)),
    "Muon": Case(({"optimizer": {"name": "muon"}},)),
}
FOUR_GPUS = {
    "tensor 2, bf16, graphs": Case((TENSOR, GRAPHS)),
    "tensor 2, float8, graphs": Case((TENSOR, GRAPHS, FLOAT8)),
    "tensor 2, experts": Case((TENSOR, EXPERTS)),
    "pipeline 2, bf16, graphs": Case(({"parallel": {"pipeline": 2}}, GRAPHS)),
    "wrong GEMM, tensor 2": Case((EAGER, TENSOR), "gemm"),
}
# On a CPU, to try the script.
TINY = {"model": {"layers": 2, "hidden": 64, "heads": 8, "sequence_length": 32, "vocab_size": 64}}


def make_config(settings: Settings, world: int, is_tiny: bool) -> configuration.Config:
    """Return the configuration of a case: a small model with two micro-batches per replica and step."""
    tree: dict[str, Any] = {
        "model": {"layers": 4, "hidden": 1024, "heads": 8, "sequence_length": 1024, "vocab_size": 32000},
        "train": {"precision": "bfloat16", "micro_batch": 2, "name": "replay"},
        "kernels": {"deterministic": True},
        "parallel": {},
    }
    for part in (*settings, *[TINY] * is_tiny):
        for section, values in part.items():
            tree[section] = tree.get(section, {}) | values
    if is_tiny:
        tree["kernels"].pop("graphs", None)
    parallel = tree["parallel"]
    replicas = world // (parallel.get("tensor", 1) * parallel.get("pipeline", 1))
    tree["train"]["global_batch"] = 4 * replicas
    return configuration.from_tree(tree)


@dataclass
class Outcome:
    """Results of a case.

    Attributes:
        replays: replays on healthy GPUs.
        evidence: of the mismatches.
        seconds: time of the checked steps.
        flips: wrong bits of this rank.
    """

    replays: int
    evidence: list[ReplayEvidence]
    seconds: float
    flips: int = 0


class Runner:
    """Runs cases in the processes of one torchrun."""

    def __init__(self, replays: int) -> None:
        self._replays = replays
        self.location = find_rank_info(make_config((), 1, is_tiny=False))
        self._is_tiny = self.location.device.type == "cpu"
        self._groups: Groups | None = None
        self._layout: tuple[int, int] | None = None

    def _make_config(self, case: Case) -> configuration.Config:
        return make_config(case.settings, self.location.world, self._is_tiny)

    def find_layout(self, case: Case) -> tuple[int, int]:
        """Return the sizes of the case's tensor and pipeline axes."""
        parallel = self._make_config(case).parallel
        return parallel.tensor, parallel.pipeline

    def join(self, case: Case) -> None:
        """Let the ranks meet in the groups of the case's layout."""
        layout = self.find_layout(case)
        if layout == self._layout:
            return
        self.leave()
        config = self._make_config(case)
        train = config.train.model_copy(update={"name": "replay-{}-{}".format(*layout)})
        _, self._groups = join_groups(config.model_copy(update={"train": train}))
        self._layout = layout

    def leave(self) -> None:
        """Leave the groups."""
        if self._groups is not None:
            shutdown(self._groups)
            forget_groups()
            self._groups = None

    def run(self, case: Case) -> Outcome:
        """Train some checked steps."""
        config, location = self._make_config(case), self.location
        engine = Engine(lay_out(config, location.world), self._groups, location.device)
        kind = find_device_kind(location.device)
        evidence: list[ReplayEvidence] = []
        engine.replay_check = ReplayCheck(
            engine,
            location.rank,
            f"{kind} {location.rank}",
            kind,
            interval=1,
            on_mismatch=evidence.append,
            update_range=case.update_range,
        )
        replicas = engine.layout.grid.replicas
        steps = FAULTY_STEP - 1 if case.fault else -(-self._replays // replicas)
        corruption = None
        if case.fault and location.rank == FAULTY_RANK:
            flip = BitFlip(case.fault, FAULTY_RANK, FAULTY_STEP, is_persistent=False, position=4, bit=5)
            corruption = Corruption(engine, flip)
        rows = draw_tokens(config, engine.data_rank, location.device)
        start = 0.0
        with corruption.inject() if corruption is not None else nullcontext():
            for step in range(1, steps + 2):
                if step == 2:
                    self._synchronize()
                    start = time.perf_counter()
                if corruption is not None:
                    corruption.begin_step(step)
                engine.start_gather()
                engine.step(lambda i: Batch(rows[:-1], rows[1:]), step, 1e-4, has_next_step=step <= steps)
        self._synchronize()
        outcome = Outcome(steps * replicas, evidence, (time.perf_counter() - start) / steps)
        if corruption is not None:
            outcome.flips = corruption.count
        engine.synchronize()
        engine.close()
        return outcome

    def _synchronize(self) -> None:
        if self.location.device.type == "cuda":
            torch.cuda.synchronize()


def describe(name: str, case: Case, outcome: Outcome) -> tuple[str, bool]:
    """Return the row of a case, and whether it is as it must be."""
    messages = "".join(f"\n    {item.message}" for item in outcome.evidence[:2])
    duration = f"{outcome.seconds:.3f} s per checked step"
    if not case.fault:
        differing = len(outcome.evidence)
        return f"{name:36} {differing} of {outcome.replays} replays differ, {duration}{messages}", not differing
    ranks = [item.verdict.ranks for item in outcome.evidence]
    is_named = ranks == [(FAULTY_RANK,)]
    verdict = "named" if is_named else f"NOT named: {ranks}"
    return f"{name:36} rank {FAULTY_RANK} is {verdict}{messages}", is_named


def main() -> None:
    """Run the cases."""
    start = time.monotonic()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    names = [word for word in sys.argv[1:] if not word.startswith("--")]
    replays = REPLAYS
    for word in sys.argv[1:]:
        if word.startswith("--replays="):
            replays = int(word.removeprefix("--replays="))
    runner = Runner(replays)
    location = runner.location
    if location.world < 2:
        sys.exit("replays need two GPUs or more: torchrun --standalone --nproc-per-node 2 tests/gpu/replay.py")
    cases = CASES | (FOUR_GPUS if location.world % 4 == 0 else {})
    if names:
        cases = {name: case for name, case in cases.items() if any(part in name for part in names)}
    failed, total = [], 0
    for name, case in sorted(cases.items(), key=lambda item: runner.find_layout(item[1])):
        runner.join(case)
        peers = Peers()
        if peers.broadcast(time.monotonic() - start > BUDGET, bool):
            failed.append(f"{name} (not run)")
            continue
        outcome = runner.run(case)
        row, is_right = describe(name, case, outcome)
        if case.fault and sum(peers.all_gather(outcome.flips, int)) != 1:
            row, is_right = f"{name:36} no bit was flipped", False
        total += 0 if case.fault else outcome.replays
        if not is_right:
            failed.append(name)
        if location.rank == 0:
            print(f"{time.monotonic() - start:5.1f} s  {row}", flush=True)
        gc.collect()
        if location.device.type == "cuda":
            torch.cuda.empty_cache()
    if location.rank == 0:
        result = f"failed: {', '.join(failed)}" if failed else "no replay differs, and each wrong bit is named"
        print(f"{total} replays on {location.world} ranks of {location.device.type}: {result}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    runner.leave()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
