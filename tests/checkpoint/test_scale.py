"""Plans and indexes of large runs: what torch reads of ours, and how long and large planning gets."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megascale.checkpoint.format.index import CheckpointIndex, TensorInfo
from megascale.checkpoint.format.torch_index import MAX_SMALL_TABLE, make_torch_metadata


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([1, 2, MAX_SMALL_TABLE, MAX_SMALL_TABLE + 1])),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([0, 1 << 20, 1 << 40]),
    st.integers(0, 2**16),
)
def test_torch_unpickles_what_was_meant(tensors: list[tuple[int, int]], start: int, seed: int) -> None:
    """Any shapes (also without dimensions), few and many chunks, positions beyond 2 GiB."""
    rng = np.random.default_rng(seed)
    infos = {}
    owner = []
    boxes = []
    for number, (dims, chunks) in enumerate(tensors):
        infos[f"t{number:03d}.é"] = TensorInfo(
            tuple(rng.integers(1, 2**33, dims).tolist()), ["float32", "bfloat16", "int64"][number % 3]
        )
        for _ in range(chunks):
            owner.append(number)
            boxes.append(np.pad(rng.integers(0, 2**33, (2, dims)), ((0, 0), (0, 5 - dims))))
    n = len(owner)
    columns = {
        "tensor": np.array(owner, np.int32),
        "in_file": rng.integers(0, 300, n).astype(np.int32),
        "start": start + np.arange(n) * 64,
        "length": rng.integers(1, 2**26, n),
        "data": np.zeros(n, np.int64),
        "crc": np.zeros(n, np.uint32),
        "box": np.array(boxes),
    }
    index = CheckpointIndex(infos, [f"file-{i}" for i in range(300)], columns)
    got = pickle.loads(make_torch_metadata(index))
    assert isinstance(got, Metadata)
    assert list(got.state_dict_metadata) == list(infos)
    locations = {}
    for name, info in infos.items():
        entry = got.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        assert (entry.size, entry.properties.dtype) == (torch.Size(info.shape), getattr(torch, info.dtype))
        assert isinstance(entry.size, torch.Size)
        assert entry.properties.memory_format == torch.contiguous_format
        assert entry.properties.layout == torch.strided
        dims = len(info.shape)
        rows = index.rows(name)
        assert [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks] == [
            (tuple(columns["box"][r, 0, :dims]), tuple(columns["box"][r, 1, :dims])) for r in rows
        ]
        for i, r in enumerate(rows):
            key = MetadataIndex(name, torch.Size(columns["box"][r, 0, :dims].tolist()), i)
            locations[key] = (f"file-{columns['in_file'][r]}", columns["start"][r], columns["length"][r])
    assert {k: (v.relative_path, v.offset, v.length) for k, v in got.storage_data.items()} == locations
    assert all(isinstance(v, _StorageInfo) for v in got.storage_data.values())
    # As torch itself writes it: loading and writing again changes nothing that it can see.
    assert pickle.loads(pickle.dumps(got)) == got


def test_a_thousand_processes_are_planned_quickly() -> None:
    """gpt-13b on 1,024 ranks, the engine's own cuts: balanced, complete, in seconds on any machine."""
    from benchmarks.checkpoint.measures import planning

    figures = planning("gpt-13b", tensor=8, pipeline=4, data=32)
    assert figures["ranks"] == 1024
    assert figures["most_one_writes"] < 1.1 * figures["least_one_writes"]
    assert figures["first_save_s"] < 20
    assert figures["peak_rss_gib"] < 1


@pytest.mark.parametrize("dims", [0, 2])
def test_index_survives_its_file(dims: int) -> None:
    columns = {name: np.zeros(1, np.int64) for name in ("tensor", "in_file", "start", "length", "data", "crc")} | {
        "box": np.array([[[0] * dims, [1] * dims]], np.int64).reshape(1, 2, dims)
    }
    index = CheckpointIndex({"a": TensorInfo((1,) * dims, "float32")}, ["f"], columns)
    second = CheckpointIndex.from_bytes(index.to_bytes())
    assert second.tensors == index.tensors
    assert second.box(0) == index.box(0)
    with pytest.raises(ValueError):
        CheckpointIndex.from_bytes(b"PK\x03\x04 not an index")
