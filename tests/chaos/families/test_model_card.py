"""`tests.chaos model-card`: a page per family, an index of all pages, and no page for a family that fails."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from megascale.config import from_tree
from megascale.errors import ConfigError, TrainingError
from megascale.model.huggingface.families import FAMILIES
from tests.chaos.families import model_card
from tests.chaos.families.model_card import Card, make_index

PAGES = Path(__file__).parents[3] / "docs" / "models"
CARD = Card("llama", 5, 1e-6, 1e-15, 1e-16, (4.2, 3.5), {"2 data, ZeRO-2": 1e-16}, "model.layers = 3\nmodel.hidden = 8")


def test_every_family_has_a_card_that_is_listed():
    assert {page.stem for page in PAGES.glob("*.md")} == {*FAMILIES, "index"}
    assert (PAGES / "index.md").read_text() == make_index(PAGES, list(FAMILIES))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_of_a_card_is_read(family):
    text = (PAGES / f"{family}.md").read_text()
    [table] = re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)
    assert from_tree(tomllib.loads(table)).model.vocab_size == 64
    assert len(text.split()) < 400


def test_a_page_has_the_results(tmp_path):
    (tmp_path / "llama.md").write_text(CARD.to_page("torch 2", "x86", "2026-11-27"))
    text = (tmp_path / "llama.md").read_text()
    assert "| loss of step 20 | 3.5000 |" in text
    assert "| layouts with the losses of one process | 2 data, ZeRO-2 (1e-16) |" in text
    index = make_index(tmp_path, ["llama"])
    assert "| [`llama`](llama.md) | 1.0e-06 | 1.0e-15 | 1.0e-16 | 4.2000 | 3.5000 | 2026-11-27 |" in index


def test_a_family_that_fails_gets_no_page(tmp_path, monkeypatch):
    def check(family, draws, folder):
        if family == "gpt2":
            raise TrainingError("gpt2: losses of 2 data differ")
        return CARD

    monkeypatch.setattr(model_card, "check_family", check)
    with pytest.raises(TrainingError, match="1 families failed: gpt2: losses of 2 data differ"):
        model_card.model_card(families=["gpt2", "llama"], draws=1, out=tmp_path)
    assert sorted(page.name for page in tmp_path.iterdir()) == ["index.md", "llama.md"]
    with pytest.raises(ConfigError, match="gpt5 is not a family"):
        model_card.model_card(families=["gpt5"], draws=1, out=tmp_path)


def test_losses_of_a_layout_that_differ_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(model_card, "_write_tokens", lambda folder: None)
    monkeypatch.setattr(model_card, "_train", lambda folder, name, arguments: [4.0, 3.0 + 1e-9 * len(arguments)])
    with pytest.raises(TrainingError, match=r"llama: losses of 2 data, ZeRO-2 differ .* by 6\.7e-10"):
        model_card._train_layouts("llama", tmp_path)
