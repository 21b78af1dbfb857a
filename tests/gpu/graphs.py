"""CUDA graphs of chunks (parallel/chunk_graphs.py) beside eager launches, on a real GPU: bits, host and step time.

    PYTHONPATH=src:. python tests/gpu/graphs.py
    PYTHONPATH=src:. torchrun --nproc-per-node 2 tests/gpu/graphs.py tensor
    PYTHONPATH=src:. torchrun --nproc-per-node 2 tests/gpu/graphs.py data
    PYTHONPATH=src:. torchrun --nproc-per-node 4 tests/gpu/graphs.py "pipeline data"

With several processes, the first argument has the axes along which they are laid: tensor and pipeline of two ranks, and
data of all remaining ranks. zero2 and zero3 are data parallelism with that value of parallel.zero. Names of cases may
follow; a case that takes longer than CASE_SECONDS ends the script with all stacks. The groups of a pipeline depend on
the number of chunks per stage. A case with another number than the first one needs a call of its own.

With --early the captures of a step are made before its first forward, as in a pipeline.

Every case trains some steps of a small model twice from the same start, eagerly and replayed: losses, gradient norms
and weights must be the same bits. Then the milliseconds of a step each way, until the host has launched it and until
the device is done. It ends with 1 if anything differs or could not be captured.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from megascale import config as configuration
from megascale.bench.measured_steps import join_groups
from megascale.core.batch import NO_FIELDS, SampleFields
from megascale.core.capture_plan import CapturePlan
from megascale.parallel import chunk_graphs
from megascale.rendezvous.groups import shutdown
from tests.gpu.command_line import check_names, make_parser, require_gpu
from tests.gpu.small_steps import train

STEPS = 12  # the last ten replay each capture at least once
TIMED = 20
CASE_SECONDS = 120  # compiling kernels included
SERIAL: dict[str, Any] = {"model": {"block": "serial"}}
PARALLEL: dict[str, Any] = {"model": {"block": "parallel"}}
FLOAT8: dict[str, Any] = {"train": {"linear_precision": "float8"}}
FLOAT8_GATHERS: dict[str, Any] = {"parallel": {"gather_precision": "float8"}}
BUCKET_ELEMENTS = 200_000  # a block of the model has several buckets, between which captures are cut
WEIGHTS = "loss weights"
POSITIONS = "loss weights, positions"
DOCUMENTS = "documents"
FIELDS = {
    WEIGHTS: SampleFields(loss_weights=True),
    POSITIONS: SampleFields(loss_weights=True, positions=True),
    DOCUMENTS: SampleFields(loss_weights=True, positions=True, max_documents=16),
}
# Those that have a form of their own with several processes.
SEVERAL = (
    "serial",
    "parallel",
    "parallel, GEMMs on a side stream",
    "all recomputed",
    "rotary, SwiGLU, untied",
    "float8",
    "float8, parallel, side stream",
    WEIGHTS,
    POSITIONS,
    DOCUMENTS,
)
TWO_CHUNKS = "two chunks, three in flight"
ONE_MICROBATCH = "float8, gathered, one micro-batch"
TWO_MICROBATCHES = "float8, gathered, two micro-batches"
# Cases of data parallelism with another number of micro-batches than usual, in which all are the first or the last.
MICROBATCHES = {ONE_MICROBATCH: 1, TWO_MICROBATCHES: 2}
# Cases of data parallelism, whose first micro-batch awaits parameters and whose last one reduces gradients.
DATA = ("float8, gathered", "float8, row-wise", "nothing overlapped", "LAMB", *MICROBATCHES)
# Cases with several micro-batches in flight or with copies of weights, for pipelines of data-parallel stages.
PIPELINED = (TWO_CHUNKS, "float8, gathered", "float8, row-wise")
AXES = ("tensor", "pipeline", "data", "zero2", "zero3")
SAMPLES = {"data": 1, "zero2": 2, "zero3": 3}  # axes that cut the batch, and their parallel.zero
CASES: dict[str, list[dict[str, Any]]] = {
    "serial": [SERIAL],
    "parallel": [PARALLEL],
    "parallel, GEMMs on a side stream": [PARALLEL, {"overlap": {"gemms": "on"}}],
    "recomputed norms": [SERIAL, {"parallel": {"recompute": "norms"}}],
    "all recomputed": [SERIAL, {"parallel": {"recompute": "full"}}],
    "rotary, SwiGLU, untied": [
        SERIAL,
        {"model": {"positions": "rotary", "activation": "swiglu", "norm": "rmsnorm", "tied_embeddings": False}},
    ],
    TWO_CHUNKS: [SERIAL, {"parallel": {"virtual_stages": 2, "micro_batch_group_size": 4}}],
    "float8": [SERIAL, FLOAT8],
    "float8, gathered": [SERIAL, FLOAT8, FLOAT8_GATHERS],
    "float8, parallel": [PARALLEL, FLOAT8],
    "float8, parallel, side stream": [PARALLEL, FLOAT8, {"overlap": {"gemms": "on"}}],
    "float8, row-wise": [SERIAL, {"train": {"linear_precision": "float8_rowwise"}}],
    "float8, row-wise, all GEMMs": [SERIAL, {"train": {"linear_precision": "float8_rowwise_wgrad"}}],
    "float8, recomputed": [SERIAL, FLOAT8, {"parallel": {"recompute": "full"}}],
    WEIGHTS: [SERIAL],
    POSITIONS: [PARALLEL, {"model": {"block": "parallel", "positions": "rotary"}}],
    DOCUMENTS: [SERIAL, {"model": {"block": "serial", "positions": "rotary"}}],
    "LAMB": [SERIAL, {"optimizer": {"name": "lamb"}}],
    "nothing overlapped": [SERIAL, {"overlap": {"data": False}}],
    ONE_MICROBATCH: [SERIAL, FLOAT8, FLOAT8_GATHERS],
    TWO_MICROBATCHES: [SERIAL, FLOAT8, FLOAT8_GATHERS],
}
# Cases that need several processes.
UNSHARED = ("float8, gathered", "nothing overlapped", *MICROBATCHES)


def tree_of(
    parts: list[dict[str, Any]], graphs: str, axes: Sequence[str] = (), global_batch: int | None = None
) -> dict[str, Any]:
    """Return the configuration of a case for processes that are laid along `axes`.

    Args:
        global_batch: samples of a step; None: as many as several micro-batches of each rank have.
    """
    zero_settings = [SAMPLES[axis] for axis in axes if axis in SAMPLES]
    tree: dict[str, Any] = {
        "model": {"layers": 4, "hidden": 256, "heads": 4, "sequence_length": 256, "vocab_size": 1000},
        "train": {"micro_batch": 2, "global_batch": 32 if zero_settings else 8, "precision": "bfloat16"},
        "parallel": {
            "tensor": 2 if "tensor" in axes else 1,
            "pipeline": 2 if "pipeline" in axes else 1,
            "zero": max(zero_settings, default=1),
            # Where ZeRO-3 gathers matrices in their own type, float8 copies of them are not captured.
            "gather_precision": "auto" if "zero3" in axes else "default",
        },
        "kernels": {"graphs": graphs},
        "lr": {"peak": 1e-3, "warmup_steps": 2},
    }
    if "data" in axes:
        tree["parallel"]["bucket_elements"] = BUCKET_ELEMENTS
    for part in parts:
        for section, values in part.items():
            tree[section] = {**tree.get(section, {}), **values}
    if global_batch is not None:
        tree["train"]["global_batch"] = global_batch
    return tree


def find_global_batch(name: str, world: int, axes: Sequence[str]) -> int | None:
    """Return the samples of a step of a case with a number of micro-batches of its own, else None."""
    microbatches = MICROBATCHES.get(name)
    if microbatches is None:
        return None
    replicas = world
    for axis in ("tensor", "pipeline"):
        if axis in axes:
            replicas //= 2
    micro_batch = tree_of([], "off")["train"]["micro_batch"]
    return int(microbatches * micro_batch * replicas)


def is_included(name: str, chosen: Sequence[str], axes: Sequence[str]) -> bool:
    """Return whether a case runs: the chosen ones, or all that differ from the cases of one process."""
    if chosen:
        return name in chosen
    if not axes:
        return name not in UNSHARED
    if "data" in axes and name in DATA:
        return True
    overlaps_eager = "pipeline" in axes and ("data" in axes or "zero2" in axes)
    return name in SEVERAL or (overlaps_eager and name in PIPELINED)


def select_cases(chosen: Sequence[str], axes: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the cases that can share groups with the first one, and the included cases that need other groups."""
    included = [name for name in CASES if is_included(name, chosen, axes)]
    shared = included
    if "pipeline" in axes:
        shared = [name for name in included if _count_chunks(name) == _count_chunks(included[0])]
    return shared, [name for name in included if name not in shared]


def _count_chunks(name: str) -> int:
    """Return the number of a case's chunks per stage."""
    parallel = tree_of(CASES[name], "off")["parallel"]
    return int(parallel.get("virtual_stages", 1))


@contextmanager
def captures_precede_step() -> Iterator[None]:
    """Make the captures of a step before its first forward, as in a pipeline."""
    plan_captures = chunk_graphs.plan_captures

    def plan_early(*arguments: Any) -> CapturePlan:
        return replace(plan_captures(*arguments), precedes_step=True)

    with mock.patch.object(chunk_graphs, "plan_captures", plan_early):
        yield


def main() -> int:
    """The table; 1 if anything differs."""
    wrong = 0
    parser = make_parser(__doc__)
    parser.add_argument("axes", nargs="?", default="", help="axes of several processes, such as 'pipeline data'")
    parser.add_argument("cases", nargs="*", help=f"default: those of the axes; all: {'; '.join(CASES)}")
    parser.add_argument("--early", action="store_true", help="capture before the first forward of a step")
    arguments = parser.parse_args()
    axes = arguments.axes.split()
    check_names("axes", axes, AXES)
    check_names("cases", arguments.cases, CASES)
    require_gpu()
    names, omitted = select_cases(arguments.cases, axes)
    location, groups = join_groups(configuration.from_tree(tree_of(CASES[names[0]], "off", axes)))
    output = f"{location.world} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    if not location.rank:
        print(f"{output}, {' and '.join(axes)} parallelism" if axes else output)
        print(f"{'case':34} {'same bits':10} {'eager ms':>17} {'replayed ms':>17}", flush=True)
        for name in omitted:
            print(f"{name:34} not run: it needs other groups; name it alone in another call", flush=True)
    for name in names:
        parts = CASES[name]
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        try:
            fields = FIELDS.get(name, NO_FIELDS)
            global_batch = find_global_batch(name, location.world, axes)
            eager = train(tree_of(parts, "off", axes, global_batch), STEPS, TIMED, {}, location, groups, fields)
            tree = tree_of(parts, "on", axes, global_batch)
            with captures_precede_step() if arguments.early else nullcontext():
                graphs = train(tree, STEPS, TIMED, eager.attention, location, groups, fields)
        except Exception as error:  # the others are still of interest
            print(f"{name:34} {type(error).__name__}: {str(error).strip().splitlines()[0]}", flush=True)
            wrong += 1
            continue
        why = graphs.eager
        far = [i for i, (a, b) in enumerate(zip(eager.bits, graphs.bits, strict=True)) if not torch.equal(a, b)]
        wrong += bool(far or why)
        equal = "yes" if not far else f"no, from {far[0]}"
        if location.rank and not far and not why:
            continue
        rank = f"rank {location.rank}: " if location.rank else ""
        times = " ".join(f"{item.host:7.2f} of {item.whole:6.2f}" for item in (eager, graphs))
        print(f"{rank}{name:34} {equal:10} {times} {why}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    if groups is not None:
        shutdown(groups)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
