"""Replays on GPUs: how many differ on healthy GPUs, which must be none, and whether injected wrong bits are named.

    PYTHONPATH=src:. torchrun --standalone --nproc-per-node 2 tests/gpu/replay.py
    PYTHONPATH=src:. torchrun --standalone --nproc-per-node 4 tests/gpu/replay.py "float8, graphs" wrong

Names of cases may follow; a part of a name chooses all cases that have it. `--replays=N` sets the replays of each
healthy case, `--seconds=N` the time after which no further case starts. Each step is checked. Every case has two
replicas or more; with four GPUs some divide a replica over two by tensor or pipeline parallelism. The last rank is the
faulty one. With three replicas or more it must be named. With two it must be named if the fault passes, and be one of
two ranks if it stays.

All cases run in the same processes, and each row is printed at once. The script ends itself MARGIN seconds after its
time. It ends with 1 if a replay differs, a wrong bit is not named, a case did not run, or a case with graphs captured
none. On CPUs the same cases run with a tiny model and without captures.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megascale import config as configuration
from megascale.bench.measured_steps import join_groups
from megascale.bench.random_samples import draw_tokens
from megascale.checkpoint.object_collectives import Peers, forget_groups
from megascale.core.batch import Batch
from megascale.core.layout import lay_out
from megascale.core.replay_verdict import ReplayVerdict
from megascale.rendezvous.groups import Groups, shutdown
from megascale.train.engine import Engine
from megascale.train.rank_info import find_device_kind, find_rank_info
from megascale.train.replay_check import ReplayCheck, ReplayEvidence
from megascale.train.update_check import RANGE
from tests.chaos.corruption.bit_flips import STATE_KINDS, BitFlip, Corruption, settle
from tests.gpu.command_line import exit_with, make_parser

REPLAYS = 32  # of each healthy case
SECONDS, MARGIN = 80.0, 17.0
# Graphs are captured in the third step, so that later steps replay them.
FIRST_FAULTY_STEP = 5
MICRO_BATCHES = 4  # per replica and step: with tensor parallelism the first and the last run without graphs
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
PIPELINE = {"parallel": {"pipeline": 2}}


@dataclass(frozen=True)
class Fault:
    """A kind of wrong bit (tests/chaos/corruption/bit_flips.py), once or every time."""

    kind: str
    is_persistent: bool = False

    def __str__(self) -> str:
        return f"{self.kind}, {'every time' if self.is_persistent else 'once'}"


@dataclass(frozen=True)
class Case:
    """Settings of a case.

    Attributes:
        settings: sections of the configuration.
        faults: wrong bits that one rank computes, each in a step of its own; none: all ranks are healthy.
        update_range: elements of an update that a check recomputes.
    """

    settings: Settings = ()
    faults: tuple[Fault, ...] = ()
    update_range: int = RANGE


GEMM_FAULTS = (Fault("gemm"), Fault("gemm", is_persistent=True))
# "activation" is the loss in a replica of one stage. A stage sends no gradient before its first layer.
FAULTS = (
    *GEMM_FAULTS,
    Fault("activation"),
    Fault("activation", is_persistent=True),
    Fault("weight gradient"),
    Fault("weight gradient", is_persistent=True),
    Fault("update"),
    Fault("update", is_persistent=True),
    *[Fault(kind) for kind in STATE_KINDS],
)
STAGE_FAULTS = (Fault("activation gradient"), Fault("activation gradient", is_persistent=True))
CASES = {
    "bf16, graphs": Case((GRAPHS,)),
    "float8, graphs": Case((GRAPHS, FLOAT8)),
    "float8 by rows, graphs": Case((GRAPHS, ROWWISE)),
    "bf16": Case(),
    # RANGE has one element in 40 of a shard here, and a passing fault elsewhere is not seen.
    "wrong, bf16, graphs": Case((GRAPHS,), FAULTS, WHOLE_SHARD),
    "wrong, float8, graphs": Case((GRAPHS, FLOAT8), FAULTS, WHOLE_SHARD),
    "wrong GEMM, float8": Case((EAGER, FLOAT8), GEMM_FAULTS),
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
    "pipeline 2, bf16, graphs": Case((PIPELINE, GRAPHS)),
    "wrong, tensor 2, bf16, graphs": Case((TENSOR, GRAPHS), FAULTS, WHOLE_SHARD),
    "wrong, tensor 2, float8, graphs": Case((TENSOR, GRAPHS, FLOAT8), GEMM_FAULTS),
    "wrong, pipeline 2, bf16, graphs": Case((PIPELINE, GRAPHS), GEMM_FAULTS + STAGE_FAULTS),
}
# On a CPU, to try the script.
TINY = {"model": {"layers": 2, "hidden": 64, "heads": 8, "sequence_length": 32, "vocab_size": 64}}


def make_config(settings: Settings, world: int, is_tiny: bool) -> configuration.Config:
    """Return the configuration of a case: a small model with MICRO_BATCHES per replica and step."""
    tree: dict[str, Any] = {
        "model": {"layers": 4, "hidden": 1024, "heads": 8, "sequence_length": 1024, "vocab_size": 32000},
        "train": {"precision": "bfloat16", "micro_batch": 2, "name": "replay"},
        "kernels": {"deterministic": True},
        "parallel": {},
    }
    for part in (*settings, *[TINY] * is_tiny):
        for section, values in part.items():
            tree[section] = tree.get(section, {}) | values
    parallel = tree["parallel"]
    replicas = world // (parallel.get("tensor", 1) * parallel.get("pipeline", 1))
    tree["train"]["global_batch"] = tree["train"]["micro_batch"] * MICRO_BATCHES * replicas
    return configuration.from_tree(tree)


@dataclass
class Trial:
    """Result of one fault.

    Attributes:
        fault: the fault.
        flips: wrong bits that this rank computed.
        verdict: verdict of the first mismatch, None without one.
        alarms: mismatches in the healthy step after it.
    """

    fault: Fault
    flips: int
    verdict: ReplayVerdict | None
    alarms: int


@dataclass
class Outcome:
    """Results of a case.

    Attributes:
        replays: replays on healthy GPUs.
        messages: of the mismatches on healthy GPUs.
        seconds: time of the checked steps.
        has_captured: whether this rank has replayed micro-batches from graphs, or needs none.
        trials: results of the faults.
    """

    replays: int = 0
    messages: list[str] = field(default_factory=list)
    seconds: float = 0.0
    has_captured: bool = True
    trials: list[Trial] = field(default_factory=list)


class CheckedTraining:
    """A training whose steps are all checked, from the second one on."""

    def __init__(self, engine: Engine, case: Case, rank: int) -> None:
        self.engine = engine
        self.step = 0
        self.evidence: list[ReplayEvidence] = []
        kind = find_device_kind(engine.device)
        self.check = ReplayCheck(
            engine,
            rank,
            f"{kind} {rank}",
            kind,
            interval=1,
            on_mismatch=self.evidence.append,
            update_range=case.update_range,
        )
        engine.replay_check = self.check
        self._rows = draw_tokens(engine.config, engine.data_rank, engine.device)

    def run_step(self) -> None:
        """Run the next step."""
        self.step += 1
        self.engine.start_gather()
        self.engine.step(lambda i: Batch(self._rows[:-1], self._rows[1:]), self.step, 1e-4, has_next_step=True)

    @contextmanager
    def restored_state(self) -> Iterator[None]:
        """Restore the weights and the optimizer's state after the enclosed steps."""
        states = self.engine.optimizer.states
        tensors = [tensor for state in states for tensor in (state.master, *state.state_tensors())]
        saved = [tensor.clone() for tensor in tensors]
        yield
        self.engine.synchronize()
        with torch.no_grad(), self.engine.loading_weights():
            for tensor, saved_tensor in zip(tensors, saved, strict=True):
                tensor.copy_(saved_tensor)
        self.check.restart()


class Runner:
    """Runs cases in the processes of one torchrun."""

    def __init__(self, replays: int) -> None:
        self._replays = replays
        self.location = find_rank_info(make_config((), 1, is_tiny=False))
        self.faulty_rank = self.location.world - 1
        self._is_tiny = self.location.device.type == "cpu"
        self._groups: Groups | None = None
        self._layout: tuple[int, int] | None = None

    def _make_config(self, case: Case) -> configuration.Config:
        return make_config(case.settings, self.location.world, self._is_tiny)

    def find_layout(self, case: Case) -> tuple[int, int]:
        """Return the sizes of the case's tensor and pipeline axes."""
        parallel = self._make_config(case).parallel
        return parallel.tensor, parallel.pipeline

    def count_replicas(self, case: Case) -> int:
        """Return the number of replicas of the case."""
        tensor, pipeline = self.find_layout(case)
        return self.location.world // (tensor * pipeline)

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
        training = CheckedTraining(engine, case, location.rank)
        if case.faults:
            outcome = self._inject_all(training, case)
        else:
            outcome = self._run_healthy(training)
        if config.kernels.graphs == "on":
            outcome.has_captured = engine.graphs is not None and engine.graphs.count_captures() > 0
        engine.synchronize()
        engine.close()
        return outcome

    def _run_healthy(self, training: CheckedTraining) -> Outcome:
        replicas = training.engine.layout.grid.replicas
        steps = max(-(-self._replays // replicas), FIRST_FAULTY_STEP - 1)  # some of them with graphs
        training.run_step()
        self._synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            training.run_step()
        self._synchronize()
        seconds = (time.perf_counter() - start) / steps
        messages = [item.message for item in training.evidence]
        return Outcome(steps * replicas, messages, seconds)

    def _inject_all(self, training: CheckedTraining, case: Case) -> Outcome:
        """Inject one fault after another, with a healthy step after each."""
        outcome = Outcome()
        while training.step < FIRST_FAULTY_STEP - 1:
            training.run_step()
        outcome.messages = [item.message for item in training.evidence]
        for fault in case.faults:
            training.evidence.clear()
            with training.restored_state():
                flips = self._run_faulty_step(training, fault)
            verdict = training.evidence[0].verdict if training.evidence else None
            training.evidence.clear()
            training.run_step()
            outcome.replays += training.engine.layout.grid.replicas
            outcome.trials.append(Trial(fault, flips, verdict, len(training.evidence)))
        return outcome

    def _run_faulty_step(self, training: CheckedTraining, fault: Fault) -> int:
        """Run a step in which one rank is faulty, and return the wrong bits of this rank."""
        step = training.step + 1
        flip = BitFlip(fault.kind, self.faulty_rank, step, fault.is_persistent, position=4, bit=5)
        corruption = Corruption(training.engine, flip)
        settle(training.engine, flip)
        if self.location.rank != self.faulty_rank:
            training.run_step()
            return 0
        with corruption.inject():
            corruption.begin_step(step)
            training.run_step()
        return corruption.count

    def _synchronize(self) -> None:
        if self.location.device.type == "cuda":
            torch.cuda.synchronize()


def is_named(trial: Trial, faulty_rank: int, replicas: int) -> bool:
    """Return whether the verdict is right: the faulty rank, or one of two ranks if a fault stays with two replicas."""
    if trial.verdict is None:
        return False
    ranks = trial.verdict.ranks
    if ranks == (faulty_rank,):
        return True
    return trial.fault.is_persistent and replicas == 2 and len(ranks) == 2 and faulty_rank in ranks


def describe_trial(trial: Trial, flips: int, is_right: bool) -> str:
    """Return a line about a fault.

    Args:
        flips: wrong bits of all ranks.
    """
    if not flips:
        return f"    {trial.fault}: NO BIT WAS FLIPPED"
    if trial.alarms:
        return f"    {trial.fault}: THE HEALTHY STEP AFTER IT DIFFERS"
    if trial.verdict is None:
        return f"    {trial.fault}: NOT DETECTED"
    ranks = " or ".join(str(rank) for rank in trial.verdict.ranks)
    return f"    {trial.fault}: rank {ranks}, {trial.verdict.tensor}{'' if is_right else ': WRONG'}"


def report(runner: Runner, name: str, case: Case, outcome: Outcome, peers: Peers) -> tuple[list[str], bool]:
    """Return the rows of a case, and whether it is as it must be. Collective."""
    differing = len(outcome.messages)
    rows = [f"    {message}" for message in outcome.messages[:2]]
    are_right = not differing
    if not peers.all_true(outcome.has_captured):
        rows.append("    NO MICRO-BATCH WAS CAPTURED")
        are_right = False
    if not case.faults:
        text = f"{differing} of {outcome.replays} replays differ, {outcome.seconds:.3f} s per checked step"
        return [f"{name:36} {text}", *rows], are_right
    named = 0
    for trial in outcome.trials:
        flips = sum(peers.all_gather(trial.flips, int))
        is_right = is_named(trial, runner.faulty_rank, runner.count_replicas(case)) and not trial.alarms and flips > 0
        named += is_right
        rows.append(describe_trial(trial, flips, is_right))
    text = f"{named} of {len(outcome.trials)} faults of rank {runner.faulty_rank} are named"
    return [f"{name:36} {text}", *rows], are_right and named == len(outcome.trials)


def select_cases(parts: Sequence[str], world: int) -> dict[str, Case]:
    """Return the cases whose names have one of the parts, else all. End the program if a part is in no name."""
    cases = CASES | (FOUR_GPUS if world % 4 == 0 else {})
    for part in parts:
        if not any(part in name for name in cases):
            exit_with(f"cases={part!r} is in no name of a case for {world} processes; choose among: {'; '.join(cases)}")
    if not parts:
        return cases
    return {name: case for name, case in cases.items() if any(part in name for part in parts)}


def main() -> None:
    """Run the cases."""
    start = time.monotonic()
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no case begins after this time")
    parser.add_argument("--replays", type=int, default=REPLAYS, help="replays of each healthy case")
    parser.add_argument("cases", nargs="*", help="names of cases or parts of names; default: all")
    arguments = parser.parse_args()
    seconds = arguments.seconds
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        exit_with(
            f"WORLD_SIZE={world}, and replays need two processes or more; run torchrun --standalone "
            "--nproc-per-node 2 tests/gpu/replay.py"
        )
    faulthandler.dump_traceback_later(seconds + MARGIN, exit=True)
    cases = select_cases(arguments.cases, world)
    runner = Runner(arguments.replays)
    location = runner.location
    failed = []
    replays = faults = 0
    for name, case in sorted(cases.items(), key=lambda item: runner.find_layout(item[1])):
        runner.join(case)
        peers = Peers()
        if peers.broadcast(time.monotonic() - start > seconds, bool):
            failed.append(f"{name} (not run)")
            continue
        outcome = runner.run(case)
        rows, is_right = report(runner, name, case, outcome, peers)
        replays += outcome.replays
        faults += len(outcome.trials)
        if not is_right:
            failed.append(name)
        if location.rank == 0:
            print(f"{time.monotonic() - start:5.1f} s  " + "\n".join(rows), flush=True)
        gc.collect()
        if location.device.type == "cuda":
            torch.cuda.empty_cache()
    if location.rank == 0:
        result = f"failed: {', '.join(failed)}" if failed else "no replay differs, and each fault is named"
        ranks = f"{location.world} ranks of {location.device.type}"
        print(f"{replays} healthy replays and {faults} faults on {ranks}: {result}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    runner.leave()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
