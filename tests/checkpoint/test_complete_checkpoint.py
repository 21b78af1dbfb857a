"""A checkpoint read tensor by tensor: any box of it, with the chunks that were used last kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megascale.checkpoint import complete_checkpoint, save
from megascale.checkpoint.complete_checkpoint import open_whole
from megascale.core.tensors import Box
from megascale.errors import DataError
from tests.checkpoint.conftest import assert_same, full_shards, logical_state, view


def test_any_box_of_a_tensor_is_read(folder: Path) -> None:
    state = logical_state()
    save(folder, 1, full_shards(state), {"step": 1}, keep=2)
    save(folder, 3, full_shards(logical_state(1)), {"step": 3}, keep=2)
    checkpoint = open_whole(folder, 1)
    assert checkpoint.state == {"step": 1}
    assert_same({name: checkpoint.read_tensor(name) for name in checkpoint.tensors}, state)
    name = "model.layers.0.cube"
    for box in (Box((1, 0, 2), (3, 2, 4)), Box((4, 3, 5), (1, 1, 1))):
        assert torch.equal(checkpoint.box(name, box), view(state[name], box))
    assert open_whole(folder).state == {"step": 3}
    with pytest.raises(DataError, match=r"no committed checkpoint of step 2 .*\[1, 3\]"):
        open_whole(folder, 2)


def test_the_chunks_used_last_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tensors of 400 bytes, and room for two of them."""
    monkeypatch.setattr(complete_checkpoint, "_CACHE_BYTES", 800)
    state = {f"model.{name}": torch.full((100,), float(i)) for i, name in enumerate("abc")}
    save(folder, 1, full_shards(state), {}, keep=1)
    checkpoint = open_whole(folder)
    fetched: list[int] = []
    fetch = complete_checkpoint.fetch
    monkeypatch.setattr(
        complete_checkpoint, "fetch", lambda index, rows, *rest: fetched.append(1) or fetch(index, rows, *rest)
    )

    def count_fetches(name: str) -> int:
        before = len(fetched)
        assert torch.equal(checkpoint.read_tensor(f"model.{name}"), state[f"model.{name}"])
        return len(fetched) - before

    assert [count_fetches(name) for name in "abab"] == [1, 1, 0, 0]
    assert [count_fetches(name) for name in "acacb"] == [0, 1, 0, 0, 1]  # c takes the room of b, then b that of a
    assert [count_fetches(name) for name in "cba"] == [0, 0, 1]
