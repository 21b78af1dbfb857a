"""`tests.chaos soak --parts layouts`: cases can be laid out, and hold where training is right, not elsewhere."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from megascale.config import from_tree
from megascale.core.layout import lay_out
from tests.chaos.soak import layouts as soak_layouts
from tests.chaos.soak.command import SoakCase
from tests.chaos.soak.layouts import TOLERANCE, Tale, differences, draw, one_process, run

pytestmark = pytest.mark.xdist_group("processes")


def test_every_drawn_case_can_be_laid_out_and_all_kinds_come():
    observed: dict[str, set[object]] = {}
    for number in range(300):
        tree, world = draw(random.Random(f"7 {number}"))
        assert 1 < world <= 4
        assert lay_out(from_tree(tree), world).microbatches >= 1
        assert lay_out(from_tree(one_process(tree)), 1).microbatches == 1
        for section, keys in tree.items():
            for key, value in keys.items():
                observed.setdefault(f"{section}.{key}", set()).add(str(value))
    assert observed["parallel.zero"] == {"0", "1", "2", "3"}
    assert observed["optimizer.name"] == {"adamw", "lamb", "muon"}
    for key in ("model.block", "model.tied_embeddings", "model.window", "parallel.virtual_stages", "parallel.tensor"):
        assert len(observed[key]) >= 2
    assert draw(random.Random("7 1")) == draw(random.Random("7 1"))


def test_cases_hold(tmp_path):
    cases: list[SoakCase] = []
    run(range(2), 3, tmp_path, cases.append)
    assert [case.held for case in cases] == [True, True], cases
    assert all("largest relative difference" in case.outcome for case in cases)


def test_a_case_that_differs_or_fails_does_not_hold(tmp_path, monkeypatch):
    def rearrange(tree):
        changed = one_process(tree)
        return changed | {"lr": {**changed["lr"], "peak": 1.001e-2}}

    result: list[SoakCase] = []
    monkeypatch.setattr(soak_layouts, "one_process", rearrange)
    run(range(1), 3, tmp_path / "other", result.append)
    monkeypatch.setattr(soak_layouts, "draw", lambda chance: (draw(chance)[0], 1))  # too few for the layout
    run(range(1), 3, tmp_path / "undivided", result.append)
    assert [case.held for case in result] == [False, False]
    assert "rank" in result[1].outcome
    assert result[0] == replace(result[0], held=False)


def test_an_element_that_nobody_holds_and_a_number_that_is_none_are_seen():
    config = from_tree({"model": {"vocab_size": 8}})
    full = ("model.norm.weight", (4,), (0,), np.ones(4))
    half = ("model.norm.weight", (4,), (2,), np.ones(2))
    expected: Tale = ([1.0], [1.0], [full])
    assert max(differences(config, expected, [expected]).values()) == 0
    with pytest.raises(ValueError, match="2 elements are on no rank"):
        differences(config, expected, [([1.0], [1.0], [half])])
    assert max(differences(config, expected, [([float("nan")], [1.0], [full])]).values()) > TOLERANCE
