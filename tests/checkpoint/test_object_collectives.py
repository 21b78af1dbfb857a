"""Objects that processes of a group exchange: plain data of a known type, so that nothing received is run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from megascale.checkpoint import object_collectives
from megascale.checkpoint.format.index import TensorInfo
from megascale.checkpoint.format.write_plan import Offer, RankFileLayout
from megascale.checkpoint.object_collectives import Peers, decode_value, encode_value
from megascale.errors import TrainingError
from tests.checkpoint.conftest import run_group

NUMBERS = arrays.arrays(st.sampled_from([np.int32, np.int64, np.uint32]), arrays.array_shapes(max_dims=3, min_side=0))


def arrays_equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


@given(NUMBERS, NUMBERS, st.integers(0, 1 << 40))
@settings(deadline=None)
def test_arrays_in_dataclasses_are_read_back(first: np.ndarray, two: np.ndarray, size: int) -> None:
    part = RankFileLayout(first, two, first, two, size)
    result = decode_value(encode_value(part), RankFileLayout | str)
    assert all(arrays_equal(getattr(part, name), getattr(result, name)) for name in vars(part))
    offer = Offer({"a": TensorInfo((2, 3), "float32")}, first, two)
    result = decode_value(encode_value(offer), Offer | str)
    assert result.tensors == offer.tensors
    assert arrays_equal(result.box, two)


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=100)
def test_bytes_that_are_no_such_value_are_refused(data: bytes) -> None:
    for kind in (RankFileLayout | str, tuple[str, int] | None, dict[str, dict[str, str]], tuple[np.ndarray, int]):
        try:
            decode_value(data, kind)
        except TrainingError as error:
            assert "another process" in str(error)


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _with_a_pickle(rank: int, size: int, path: Path) -> str:
    """Rank 1 sends what torch's collectives over objects would run."""
    peers = Peers()
    if rank == 1:
        object_collectives.encode_value = lambda value: pickle.dumps(Trap(path))  # type: ignore[assignment]
    try:
        peers.all_gather("plain", str)
    except TrainingError as error:
        return str(error)
    return "taken"


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    errors = run_group(2, _with_a_pickle, tmp_path / "trap")
    assert all("of an unexpected type" in text for text in errors)
    assert not (tmp_path / "trap").exists()


def _collectives(rank: int, size: int) -> None:
    peers, array = Peers(), np.arange(rank + 2, dtype=np.int64)
    assert peers.broadcast(("first", 1) if rank == 0 else None, tuple[str, int]) == ("first", 1)
    assert peers.broadcast("x" * 100_000 if rank == 0 else None, str) == "x" * 100_000
    assert peers.all_gather("y" * rank, str) == ["y" * r for r in range(3)]
    gathered = peers.gather((array, rank), tuple[np.ndarray, int])
    assert [len(a) for a, _ in gathered] == ([2, 3, 4] if rank == 0 else [])
    assert peers.scatter([f"for {r}" * r for r in range(3)] if rank == 0 else [], str) == f"for {rank}" * rank
    # An impossible size.
    if rank == 0:
        dist.broadcast(torch.tensor([1 << 60]), group=peers.group, group_src=0)
    else:
        with pytest.raises(TrainingError, match="announced"):
            peers.broadcast(None, str)


def test_collectives_give_each_what_is_its(tmp_path: Path) -> None:
    run_group(3, _collectives)
