"""What the engine computes with, against the sample order: each window once, whoever reads it, is killed or comes anew.

Ranks write down the tokens and targets of each micro-batch as the model gets them. What must come is drawn here, from
the seed and the numbers of samples alone.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from megascale.api import load_config
from megascale.core.layout import lay_out
from megascale.data.dataset.ledger import check_ledger
from tests.conftest import lines
from tests.data.sample_sources import open_samples
from tests.exact.processes import Start, end, ranks

# Python that has a rank write down what its chunks get, and end by SIGKILL in the middle of a step.
RECORD = """
import json, os, signal
from megascale.train.chunk_forward import ChunkForward
from megascale.train.engine import Engine

step, compute = Engine.step, ChunkForward._run_chunk
out = open(f"{file}-{{os.environ['RANK']}}", "a")
present_step = forwards = 0

def numbered(engine, batches, number, *given, **more):
    global present_step, forwards
    present_step, forwards = number, 0
    return step(engine, batches, number, *given, **more)

def recorded(chunk_forward, chunk, x, batch, context):
    global forwards
    module = chunk_forward._chunks[chunk]
    if module.is_first:
        print(json.dumps(["tokens", present_step, x.T.tolist()]), file=out, flush=True)
    if module.is_last:
        print(json.dumps(["targets", present_step, batch.targets.T.tolist()]), file=out, flush=True)
    forwards += 1
    if present_step == {dies} and forwards == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return compute(chunk_forward, chunk, x, batch, context)

Engine.step, ChunkForward._run_chunk = numbered, recorded
"""


def start(tiny: Path, file: Path, arguments: list[str], world: int, dies: int = 0) -> list[int]:
    """Run the ranks of one start, which write to files named after `file`; their exit codes."""
    before = RECORD.format(file=file, dies=dies)
    with ranks(tiny, arguments, [Start(rank, world, before=before) for rank in range(world)]) as processes:
        if dies:
            return [processes[1].wait(100)]  # the others are ended with it, as a launcher does
        ended = [end(process) for process in processes]
    assert [rank.code for rank in ended] == [0] * world, ended
    return [rank.code for rank in ended]


def read_report(
    tiny: Path, file: Path, arguments: list[str], world: int, subject: str, step: int
) -> dict[int, list[list[int]]]:
    """Rows of `what` that the engines of each tensor-parallel rank got in a step, over all data-parallel ranks."""
    grid = lay_out(load_config(tiny, arguments), world).grid
    rows: dict[int, list[list[int]]] = {}
    for rank in range(world):
        for kind, number, batch in lines(file.with_name(f"{file.name}-{rank}")):  # type: ignore[misc]
            if (kind, number) == (subject, step):
                rows.setdefault(grid.coordinate(rank).tensor, []).extend(batch)
    return rows


@pytest.mark.parametrize(("loader", "axis"), [("local", "pipeline"), ("host", "tensor")])
def test_the_engine_gets_each_sample_once(tiny: Path, tmp_path: Path, loader: str, axis: str) -> None:
    """Two data-parallel ranks are killed in mid-step; four go on in another layout, with another batch."""
    single, first_world = ["--parallel.data=2"], 2
    second, second_world = ["--parallel.data=2", f"--parallel.{axis}=2"], 4
    common = [f"--data.loader={loader}", "--train.micro_batch=1", "--train.steps=4"]
    single = common + single + ["--train.global_batch=8"]
    second = common + second + ["--train.global_batch=6"]
    assert start(tiny, tmp_path / "one", single, first_world, dies=4) == [-signal.SIGKILL]
    start(tiny, tmp_path / "other", second, second_world)
    source = open_samples(load_config(tiny, second))
    resumed = json.loads((tmp_path / "runs" / "tiny" / "samples" / "ledger.jsonl").read_text().splitlines()[2])["count"]
    assert resumed == 6  # from the checkpoint of step 2, and not of 3
    for file, arguments, world, steps in (
        ("one", single, first_world, {1: (0, 8), 2: (8, 8), 3: (16, 8)}),
        ("other", second, second_world, {3: (16, 6), 4: (22, 6)}),
    ):
        for step, (first, count) in steps.items():
            samples = source.read_tokens(first, count)
            for subject, due in (("tokens", samples[:, :-1]), ("targets", samples[:, 1:])):
                by_tensor_rank = read_report(tiny, tmp_path / file, arguments, world, subject, step)
                assert by_tensor_rank
                for rows in by_tensor_rank.values():
                    assert sorted(rows) == sorted(due.tolist()), (file, step, subject)
    ledger = lines(tmp_path / "runs" / "tiny" / "samples" / "ledger.jsonl")
    proof = check_ledger(ledger, source, full=True)
    assert (proof.faults, proof.missing, proof.steps_with_totals) == ([], [], 4)
