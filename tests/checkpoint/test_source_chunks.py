"""Tensors that a function reads by box fill shards of any cut, in chunks of any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.index import CheckpointIndex, TensorInfo
from megascale.checkpoint.loader import fill_shards
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.source_chunks import SourceChunks, make_index
from megascale.core.tensors import Box
from megascale.errors import DataError


def make_tensors(shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return tensors of distinct numbers of two types."""
    tensors = {}
    for number, shape in enumerate(shapes):
        values = torch.arange(torch.Size(shape).numel()).reshape(shape) + 1000 * number
        tensors[f"model.{number}.weight"] = values.to(torch.float64 if number % 2 else torch.float32)
    return tensors


def make_chunks(tensors: dict[str, torch.Tensor], limit: int, *, damaged: str = "") -> SourceChunks:
    """Return tensors as chunks; reading the tensor `damaged` fails."""
    infos = {name: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}

    def read(name: str, box: Box) -> torch.Tensor:
        if name == damaged:
            raise DataError("the file ends early")
        return tensors[name][tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]

    index = CheckpointIndex.from_bytes(make_index(infos, limit).to_bytes())
    return SourceChunks("a folder", index, (infos, read))


@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4),
    limit=st.sampled_from([8, 24, 100, 1 << 20]),
    cut=st.integers(0, 8),
    parts=st.sampled_from(["first", "second", "both"]),
)
def test_shards_of_any_cut_are_filled(shapes: list[tuple[int, ...]], limit: int, cut: int, parts: str) -> None:
    tensors = make_tensors(shapes)
    shards = []
    for name, tensor in tensors.items():
        last = tensor.dim() - 1
        middle = min(cut, tensor.shape[last])
        for part_name, start, stop in (("first", 0, middle), ("second", middle, tensor.shape[last])):
            if start < stop and parts in (part_name, "both"):
                part = torch.full_like(tensor.narrow(last, start, stop - start), -1)
                shards.append(TensorShard(name, tuple(tensor.shape), (0,) * last + (start,), part))
    assert fill_shards(make_chunks(tensors, limit), shards, Peers(), covers_model=parts == "both") is None
    for shard in shards:
        last = shard.tensor.dim() - 1
        expected = tensors[shard.name].narrow(last, shard.offsets[last], shard.tensor.shape[last])
        assert torch.equal(shard.tensor, expected)


def test_a_read_that_fails_is_damage_and_no_crash() -> None:
    """An exception on one rank would leave the others waiting."""
    tensors = make_tensors([(4, 3), (2,)])
    shards = [TensorShard(name, tuple(t.shape), (0,) * t.dim(), torch.empty_like(t)) for name, t in tensors.items()]
    damage = fill_shards(make_chunks(tensors, 16, damaged="model.1.weight"), shards, Peers(), covers_model=True)
    assert damage is not None
    assert "the file ends early" in damage


def test_a_model_with_fewer_layers_is_refused() -> None:
    tensors = make_tensors([(4, 3), (2,)])
    shard = TensorShard("model.0.weight", (4, 3), (0, 0), torch.empty(4, 3))
    with pytest.raises(DataError, match=r"model\.1\.weight"):
        fill_shards(make_chunks(tensors, 16), [shard], Peers(), covers_model=True)
