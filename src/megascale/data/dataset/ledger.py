"""The ledger of a run's samples: proof that each was trained once, and which ones they were. No torch.

Rank 0 appends a line a step to `samples/ledger.jsonl`: the step, its first sample's number, how many, and a hash of
their ids (epoch, file, window) as the loader drew them. A resumed run drops the lines of steps that it does again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megascale.data.dataset.samples import SampleSource, hash_ids


@dataclass
class Checked:
    """What a ledger proves.

    Attributes:
        steps, samples: in it.
        distinct: different ids among them; equal to `samples` where no epoch was left unfinished and begun again.
        epochs: passes over the data.
        faults: a sentence each; empty where every sample from 0 on was trained once, in order, as the seed says.
    """

    steps: int = 0
    samples: int = 0
    distinct: int = 0
    epochs: float = 0.0
    faults: list[str] = field(default_factory=list)


def check(lines: Sequence[dict[str, Any]], source: SampleSource | None, shown: int = 10) -> Checked:
    """Check a ledger's lines; with `source` the ids too, by drawing them again. At most `shown` faults are told."""
    found = Checked()
    faults = found.faults
    step, due = 0, 0
    ids: list[np.ndarray] = []
    for line in lines:
        if line["step"] != step + 1:
            faults.append(f"step {line['step']} follows step {step}")
        if line["first"] != due:
            what = "repeats" if line["first"] < due else "skips"
            faults.append(f"step {line['step']} begins at sample {line['first']} where {due} is due: it {what} some")
        if source is not None:
            drawn = source.ids(line["first"], line["count"])
            if f"{hash_ids(drawn):016x}" != line["ids"]:
                faults.append(f"step {line['step']} trained other samples than the seed and the files give")
            ids.append(drawn)
        step, due = line["step"], line["first"] + line["count"]
        found.steps += 1
        found.samples += line["count"]
    if source is not None and ids:
        every = np.concatenate(ids)
        unique, counts = np.unique(every, axis=0, return_counts=True)
        found.distinct, found.epochs = len(unique), source.epochs(due)
        faults += [
            f"sample {tuple(unique[i].tolist())} was trained {counts[i]} times" for i in np.flatnonzero(counts > 1)
        ]
    if len(faults) > shown:
        faults[shown:] = [f"and {len(faults) - shown} more"]
    return found


def of_step(lines: Sequence[dict[str, Any]], step: int, global_batch: int) -> tuple[int, int]:
    """(first sample's number, how many) of a step, done or the next to be done.

    A step that is not in the ledger follows the last one before it that is, at `global_batch` samples a step.
    """
    before = [line for line in lines if line["step"] <= step]
    if not before:
        return (step - 1) * global_batch, global_batch
    last = max(before, key=lambda line: line["step"])
    if last["step"] == step:
        return last["first"], last["count"]
    return last["first"] + last["count"] + (step - last["step"] - 1) * global_batch, global_batch
