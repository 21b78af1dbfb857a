"""`tests.chaos families`: the table of errors, and a wrong model that is noticed."""

from __future__ import annotations

import json

import pytest
import torch

from megascale.errors import ConfigError, TrainingError
from tests.chaos.families import measures
from tests.chaos.families.command import families
from tests.chaos.families.measures import LogitErrors, draw_family
from tests.model.test_huggingface_exactness import FAMILIES as NEWER_FAMILIES


def test_errors_of_two_families_are_listed(tmp_path, capsys):
    out = tmp_path / "families.json"
    families(names="gpt2, gemma2", draws=1, seed=1, out=out)
    assert "gemma2" in capsys.readouterr().out
    records = json.loads(out.read_text())["families"]
    assert [record["family"] for record in records] == ["gpt2", "gemma2"]
    for record in records:
        assert 0 < record["float32"] < 1e-4
        assert 0 < record["float64"] < 1e-10
        assert 0 < record["gradients"] < 1e-9


def test_a_model_with_other_weights_is_noticed(tmp_path, monkeypatch):
    make_chunk = measures.make_chunk

    def make_damaged(imported, dtype):
        chunk = make_chunk(imported, dtype)
        with torch.no_grad():
            next(chunk.parameters())[1] *= 1 + 1e-6
        return chunk

    monkeypatch.setattr(measures, "make_chunk", make_damaged)
    with pytest.raises(TrainingError, match="gpt_neox, draw 0: the logits' error in float64"):
        families(names="gpt_neox", draws=1, seed=0, out=tmp_path / "families.json")


def test_an_unknown_family_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--families=llama,gpt5: gpt5 is unknown"):
        families(names="llama,gpt5", draws=1, seed=0, out=tmp_path / "families.json")


@pytest.mark.parametrize(
    ("errors", "fault"),
    [
        (LogitErrors(9e-6, 9e-11, 0.0), ""),
        (LogitErrors(2e-5, 9e-11, 1e-5), ""),  # an ill-conditioned model
        (LogitErrors(4e-5, 9e-11, 1e-5), "float32"),
        (LogitErrors(2e-5, 9e-11, 1e-6), "float32"),
        (LogitErrors(9e-6, 2e-10, 1.0), "float64"),
        (LogitErrors(float("inf"), 0.0, 1.0), "float32"),
    ],
)
def test_limits_of_errors(errors, fault):
    assert fault in errors.find_fault()
    assert bool(errors.find_fault()) == bool(fault)


@pytest.mark.parametrize("family", ["gpt2", "gptj", "gpt_neox", *NEWER_FAMILIES])
def test_draws_of_a_family_differ_and_repeat(family):
    draws = [draw_family(family, number) for number in range(8)]
    assert draws == [draw_family(family, number) for number in range(8)]
    assert any(draw != draws[0] for draw in draws[1:])
