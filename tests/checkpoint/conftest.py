"""Fixtures of the checkpoint tests: state to save, cuts of it, and real processes in a gloo group."""

from __future__ import annotations

import os
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.checkpoint import TensorShard
from megascale.core.tensors import Box, flat_boxes
from tests.forked import context
from tests.forked_services import fork_services, forked_services


def _child(
    rank: int, size: int, store: str, environment: dict, results: Any, function: Callable[..., Any], args: tuple
) -> None:
    # The server may have been started before a fixture set its variables.
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    fork_services()
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        value = function(rank, size, *args)
        dist.barrier()
        dist.destroy_process_group()
        results.put((rank, True, value))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


def run_group(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(rank, size, *args)` in `size` processes of one gloo group; their results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        children = [
            context.Process(
                target=_child, args=(rank, size, f"{folder}/store", dict(os.environ), results, function, args)
            )
            for rank in range(size)
        ]
        for child in children:
            child.start()
        try:
            got = [results.get(timeout=60) for _ in children]
        finally:
            for child in children:
                child.join(5)
                if child.is_alive():
                    child.kill()
    failed = [text for _, ok, text in got if not ok]
    assert not failed, "\n".join(failed)
    return [value for _, _, value in sorted(got, key=lambda item: item[0])]


def logical_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """A small model's worth of logical tensors, with odd sizes and several types."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "model.embedding.weight": draw(37, 12),
        "model.layers.0.attention.query.weight": draw(12, 12, dtype=torch.bfloat16),
        "model.layers.0.attention.query.bias": draw(12, dtype=torch.float64),
        "model.layers.0.cube": draw(5, 4, 6),
        "optimizer.exp_avg.embedding.weight": draw(37, 12),
        "optimizer.step": torch.tensor(7 + seed),
    }


def full_shards(tensors: dict[str, torch.Tensor]) -> list[TensorShard]:
    """Each tensor as one shard."""
    return [TensorShard(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors.items()]


def cut(tensors: dict[str, torch.Tensor], how: str, rank: int, size: int) -> list[TensorShard]:
    """This rank's shards, views on `tensors`: by rows, columns, flat ranges, or all on every rank (replicas)."""
    shards = []
    for name, t in tensors.items():
        shape = tuple(t.shape)
        dim = {"rows": 0, "columns": t.dim() - 1}.get(how)
        if how == "replicas" or not shape:
            shards += full_shards({name: t})
        elif how == "flat":
            start, stop = t.numel() * rank // size, t.numel() * (rank + 1) // size
            for box, _, _ in flat_boxes(Box((0,) * t.dim(), shape), start, stop):
                shards.append(TensorShard(name, shape, box.offsets, view(t, box)))
        else:
            start, stop = shape[dim] * rank // size, shape[dim] * (rank + 1) // size
            offsets = tuple(start if d == dim else 0 for d in range(t.dim()))
            shards.append(TensorShard(name, shape, offsets, t.narrow(dim, start, stop - start)))
    return shards


def view(t: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a tensor as a view."""
    return t[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Equal bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros of the same shapes."""
    return {name: torch.zeros_like(t) for name, t in tensors.items()}


@pytest.fixture(autouse=True)
def _forked() -> Iterator[None]:
    with forked_services():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty run's checkpoints folder, not yet made."""
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 2 MB; needs the right to mount."""
    with tempfile.TemporaryDirectory() as name:
        command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", name]
        try:
            mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            mounted = False
        if not mounted:
            pytest.skip("mounting a small tmpfs is not permitted here")
        yield Path(name)
        subprocess.run(["umount", name], check=True)
