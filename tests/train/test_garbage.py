"""Python's garbage is collected after planned steps only, and a step makes none worth speaking of."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megascale.config import from_tree
from megascale.core.batch import Batch
from megascale.core.layout import lay_out
from megascale.train import host_pauses
from megascale.train.engine import Engine
from megascale.train.host_pauses import GarbageCollector, exclude_imports


class Knot:
    """Something that only the collector can free."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture
def garbage(monkeypatch):
    monkeypatch.setattr(host_pauses, "gc", gc)
    gc.unfreeze()
    built = GarbageCollector(3)
    yield built
    built.close()
    gc.freeze()


def test_collects_after_planned_steps_and_leaves_python_as_it_was(garbage):
    garbage.collect(1)
    assert not gc.isenabled()
    knot = weakref.ref(Knot())
    for step in (2, 3):
        assert knot() is not None
        garbage.collect(step)
    assert knot() is None
    garbage.close()
    assert gc.isenabled()
    assert not gc.get_freeze_count()


def test_imports_stay_excluded_in_a_process_that_outlives_a_training(garbage: GarbageCollector) -> None:
    knot_before = weakref.ref(Knot())
    exclude_imports()
    count = gc.get_freeze_count()
    assert count
    kept = GarbageCollector(1, excludes_objects=False)
    old_knot = Knot()
    kept.collect(1)
    assert not gc.isenabled()
    knot, old = weakref.ref(Knot()), weakref.ref(old_knot)
    del old_knot
    kept.collect(2)
    assert knot() is None
    assert old() is not None  # it has outlived a collection, so that most later ones do not examine it
    knot = weakref.ref(Knot())
    kept.close()
    assert gc.isenabled()
    # Some of the excluded objects may have ended by their reference counts.
    assert 0.9 * count < gc.get_freeze_count() <= count
    gc.collect()
    assert knot() is None
    assert old() is None
    assert knot_before() is not None
    gc.unfreeze()
    gc.collect()
    assert knot_before() is None


def test_objects_that_outlived_a_collection_are_collected_in_a_long_training(garbage: GarbageCollector) -> None:
    kept = GarbageCollector(3, excludes_objects=False)
    old_knot = Knot()
    kept.collect(1)
    old = weakref.ref(old_knot)
    del old_knot
    full_step = 3 * kept.full_period
    for step in range(2, full_step):
        kept.collect(step)
    assert old() is not None
    kept.collect(full_step)
    assert old() is None
    kept.close()


def test_zero_leaves_it_to_python():
    garbage = GarbageCollector(0)
    garbage.collect(1)
    assert gc.isenabled()


@pytest.mark.parametrize("recompute", ["none", "norms", "activation", "selective", "full"])
def test_a_step_leaves_no_tensor_to_the_collector(recompute):
    """Activations in reference cycles would pile up between collections."""
    model = {"hidden": 16, "heads": 2, "layers": 2, "sequence_length": 8, "vocab_size": 32, "dropout": 0.1}
    tree = {"model": model, "parallel": {"recompute": recompute}, "train": {"global_batch": 4, "micro_batch": 2}}
    engine = Engine(lay_out(from_tree(tree), 1), None, torch.device("cpu"))
    rows = torch.zeros(9, 2, dtype=torch.long)

    def step(number: int) -> None:
        engine.step(lambda i: Batch(rows[:-1], rows[1:]), number, 1e-3)

    step(1)
    gc.collect()
    gc.disable()
    try:
        before = {id(x) for x in gc.get_objects() if isinstance(x, torch.Tensor)}
        for number in (2, 3, 4):
            step(number)
        remaining = [x.shape for x in gc.get_objects() if isinstance(x, torch.Tensor) and id(x) not in before]
    finally:
        gc.enable()
    assert len(remaining) <= 8, (
        remaining
    )  # the masks and scalars of the last step; a cycle would leave three steps' worth
