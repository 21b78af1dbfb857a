"""Messages of a block: one gather and one scatter for a parallel block, two of each for a serial block."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megascale.model.context import EVALUATION
from tests.exact.cases import case
from tests.exact.training import make_engine

pytestmark = pytest.mark.xdist_group("processes")

GATHER, SCATTER = "_allgather_base_", "_reduce_scatter_base_"


class Collectives(TorchDispatchMode):
    """Counts every operation that torch hands to a process group, started by any function."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count(rank: int, world: int, tree: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of one block's forward and of its backward, with its inputs spread over `world` tensor ranks."""
    chunk = make_engine(rank, world, tree).chunks[0]
    x = torch.randn(chunk.model.sequence_length // world, 2, chunk.model.hidden, dtype=torch.float64)
    x.requires_grad_()
    with Collectives() as forward:
        y = chunk.blocks[0](x, None, EVALUATION)
    with Collectives() as backward:
        y.sum().backward()
    return dict(forward.counts), dict(backward.counts)


@pytest.mark.parametrize("recompute", ["none", "norms", "activation", "selective"])
@pytest.mark.parametrize(
    ("block", "norms", "gathers", "scatters"),
    [("parallel", 1, 1, 1), ("serial", 1, 2, 2), ("parallel", 2, 2, 1)],
    ids=["parallel", "serial", "parallel with two norms"],
)
def test_gathers_and_scatters_of_a_block(block, norms, gathers, scatters, recompute, pool):
    model = {"block": block, "parallel_norms": norms, "positions": "none", "activation": "swiglu"}
    tree = case(2, microbatches=1, model=model, parallel={"recompute": recompute}).tree
    for forward, backward in pool.run(count, 2, tree):
        assert forward == {GATHER: gathers, SCATTER: scatters}
        # A gather's gradient is scattered and a scatter's is gathered; besides, the input of each column-parallel
        # product is gathered again, because only the local part of it was kept.
        assert backward == {GATHER: scatters + gathers, SCATTER: gathers}
