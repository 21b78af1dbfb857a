"""Memory that a checkpoint service keeps for the next start of its run."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from megascale.checkpoint.background.early_slots import prepare_slots
from megascale.checkpoint.background.service_memory import measure_service_memory
from megascale.config import Config, from_tree

SIZE = 64 << 20


def make_config(run: Path, *, background: bool = True) -> Config:
    train = {"runs": str(run.parent), "name": run.name}
    return from_tree({"train": train, "checkpoint": {"background": background}})


def test_a_service_that_lingers_holds_the_copies_of_the_last_start(run: Path) -> None:
    config = make_config(run)
    assert measure_service_memory(config) == 0
    slots = prepare_slots(config.checkpoint, run, rank=0, size=SIZE, reserved=SIZE, device=torch.device("cpu"))
    try:
        assert len(slots) == 1
        assert SIZE <= measure_service_memory(config) < 2 * SIZE
        assert measure_service_memory(make_config(run, background=False)) == 0
    finally:
        for slot in slots:
            slot.close()
        gc.collect()
