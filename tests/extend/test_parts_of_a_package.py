"""Parts of a model and its training from a package outside `src`: every command and every rank finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.checkpoint.complete_checkpoint import open_checkpoint
from tests.conftest import lines
from tests.extend.packaged import install

PACKAGE = '''
"""An activation, an optimizer without state and a schedule under another name."""

import os

import torch

from megascale.config.parts import OptimizerFacts
from megascale.core.schedule import build_1f1b
from megascale.core.schedule_registry import SCHEDULES, ScheduleDefinition
from megascale.ops import activation
from megascale.optim.base import UpdateRule
from megascale.optim.rules import register

open(os.environ["LOADED"], "a").write(f"{os.getpid()}\\n")


class Descent(UpdateRule):
    def update(self, step, updated):
        for s in self.shards.update_order:
            s.master.sub_(step.learning_rate * s.shard.grads)
            if s.param_out is not None:
                s.param_out.copy_(s.master)
            updated(s.shard)


activation.register("softsign", activation.Activation(torch.nn.functional.softsign, "softsign"))
register("descent", OptimizerFacts(lambda name, shape: ()), Descent)
SCHEDULES.register(
    "mine", ScheduleDefinition(lambda stages, virtual, count, each, group: build_1f1b(stages, count, each))
)
'''
OPTIONS = ["--model.activation=softsign", "--optimizer.name=descent", "--parallel.schedule=mine"]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which each importing process writes its number."""
    file = tmp_path / "loaded"
    file.touch()
    monkeypatch.setenv("LOADED", str(file))
    install(tmp_path / "site", "parts_of_mine", PACKAGE, monkeypatch)
    return file


def test_a_command_trains_with_them_on_every_rank_and_goes_on(loaded, megascale, tiny, tmp_path):
    first = megascale("train", tiny, *OPTIONS, "--parallel.pipeline=2", "--train.stop_after=5")
    second = megascale("train", tiny, *OPTIONS, "--parallel.pipeline=2")
    alone = megascale("train", tiny, *OPTIONS, "--train.name=alone")
    assert [done.returncode for done in (first, second, alone)] == [0, 0, 0], first.stderr + second.stderr
    numbers = loaded.read_text().split()
    assert len(numbers) == len(set(numbers)) >= 3  # once a process
    report = {name: lines(tmp_path / "runs" / name / "metrics.jsonl") for name in ("tiny", "alone")}
    losses = {name: [r["loss"] for r in records if "loss" in r] for name, records in report.items()}
    assert losses["tiny"] == pytest.approx(losses["alone"], rel=1e-4)
    assert len(losses["tiny"]) == 8
    assert losses["tiny"][-1] < losses["tiny"][0]
    tensors = open_checkpoint(tmp_path / "runs" / "tiny").tensors
    assert {name.split(".")[0] for name in tensors} == {"model"}  # the rule keeps nothing beside the weights


def test_nothing_of_a_package_is_imported_where_every_name_is_known(loaded, megascale, tiny):
    done = megascale("train", tiny, "--train.steps=1")
    assert done.returncode == 0, done.stderr
    assert not loaded.read_text()


def test_a_name_that_no_package_has_is_refused_with_those_there_are(loaded, megascale, tiny):
    done = megascale("train", tiny, "--optimizer.name=descend")
    assert done.returncode == 2
    assert "optimizer.name='descend' is not known; did you mean 'descent'?" in done.stderr
