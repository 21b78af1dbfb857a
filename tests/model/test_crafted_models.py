"""Hugging Face folders that lie are refused, in a sentence and for no more memory than they take up."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from megascale.errors import DataError
from megascale.model.huggingface.import_model import read_folder
from tests.chaos.fuzz.crafted_models import CRAFTED, SETTINGS, write_model

ROOM = 64 << 20  # bytes that reading a crafted folder may take


@pytest.mark.parametrize("family", SETTINGS)
def test_the_sound_ones_are_read(family: str, tmp_path: Path) -> None:
    write_model(tmp_path, family)
    assert read_folder(tmp_path).model.layers == 2


@pytest.mark.parametrize("how", CRAFTED)
def test_a_crafted_folder_is_refused(how: str, tmp_path: Path) -> None:
    family, craft = CRAFTED[how]
    write_model(tmp_path, family)
    craft(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as caught:
            read_folder(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < ROOM
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 2000
