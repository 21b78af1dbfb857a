"""Attention within documents: every layout trains as one process does, and as the documents do apart, in float64."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from megascale.config import from_tree
from megascale.core.batch import Batch, SampleFields
from megascale.data.dataset.sample_fields import restart_positions
from megascale.model.transformer import Chunk
from megascale.train.evaluation import evaluate_file
from tests.data.sample_sources import write_documents
from tests.exact.cases import SMALL, TWO_LAYERS, Case, case, cases
from tests.exact.compare import assert_equal
from tests.exact.training import FEW_STEPS, make_engine, train

pytestmark = pytest.mark.xdist_group("processes")

DOCUMENTS = SampleFields(loss_weights=True, positions=True, max_documents=4)
ROTARY = {**TWO_LAYERS, "positions": "rotary"}
EXAMPLES = 3

LAYOUTS = {
    "all axes": case(2, 2, 2, virtual=2, microbatches=2, zero=2, train={"micro_batch": 2}),
    "stages between the first and the last, recomputed": case(
        1, 4, 1, microbatches=3, model={"positions": "rotary"}, parallel={"recompute": "full"}
    ),
    "tensor, windows, grouped queries": case(
        2, 1, 2, microbatches=2, model={**ROTARY, "window": 3, "kv_heads": 2, "block": "parallel"}
    ),
    "two chunks on one stage": case(
        1, 1, 2, virtual=2, microbatches=3, zero=0, parallel={"micro_batch_group_size": 3}, model={"dropout": 0.1}
    ),
    "data, ZeRO-1": case(1, 1, 4, microbatches=2, zero=1, model=ROTARY, train={"micro_batch": 2}),
}


def check(layout: Case, pool: Any) -> None:
    """Compare a layout with one process, both on samples with documents of unequal numbers of counted tokens."""
    [expected] = pool.run(train, 1, layout.twin, FEW_STEPS, nullcontext, DOCUMENTS)
    report = pool.run(train, layout.world, layout.tree, FEW_STEPS, nullcontext, DOCUMENTS)
    assert_equal(expected, report, from_tree(layout.tree).model)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, pool: Any) -> None:
    check(LAYOUTS[name], pool)


def test_any_layout(pool: Any) -> None:
    @seed(0)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def check_some(layout: Case) -> None:
        note(from_tree(layout.tree).to_toml())
        check(layout, pool)

    check_some()


def losses_and_gradients(chunk: Chunk, batch: Batch[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the weighted sum of a batch's losses, and its gradients."""
    assert batch.tokens is not None
    assert batch.loss_weights is not None
    loss = (chunk(batch.tokens, batch) * batch.loss_weights).sum()
    return loss.detach(), list(torch.autograd.grad(loss, list(chunk.parameters())))


@given(
    edges=st.lists(st.integers(1, 15), max_size=5, unique=True),
    positions=st.sampled_from(["learned", "rotary"]),
    window=st.sampled_from([None, 3]),
)
@settings(max_examples=8, deadline=None, database=None, phases=[Phase.generate])
def test_a_packed_sample_has_the_loss_of_its_documents_apart(
    edges: list[int], positions: str, window: int | None
) -> None:
    length = 16
    model = {**SMALL["model"], "sequence_length": length, "positions": positions, "layers": 2}
    if window is not None:
        model["window"] = window
    config = from_tree({**SMALL, "model": model, "train": {**SMALL["train"], "global_batch": 1}})
    chunk = Chunk(config.model, range(2), is_first=True, is_last=True, dtype=torch.float64)
    chunk.to_empty(device="cpu")
    draw = torch.Generator().manual_seed(0)
    for parameter in chunk.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=draw)
    tokens = torch.randint(0, 21, (length + 1, 1), generator=torch.Generator().manual_seed(len(edges)))
    boundaries = np.array([0] + sorted(edges) + ([length] * (6 - len(edges))), np.int32)
    weights = torch.ones(length, 1, dtype=torch.float64)
    weights[np.unique(boundaries)[1:] - 1] = 0
    packed = Batch(
        tokens[:-1],
        tokens[1:],
        loss_weights=weights,
        positions=torch.from_numpy(restart_positions(boundaries)).long()[:, None],
        document_boundaries=torch.from_numpy(boundaries)[:, None],
    )
    total, gradients = losses_and_gradients(chunk, packed)
    summed = torch.zeros((), dtype=torch.float64)
    summed_gradients = [torch.zeros_like(gradient) for gradient in gradients]
    for start, stop in zip([0] + sorted(edges), sorted(edges) + [length], strict=True):
        apart = Batch(tokens[start:stop], tokens[start + 1 : stop + 1], loss_weights=weights[start:stop])
        loss, apart_gradients = losses_and_gradients(chunk, apart)
        summed += loss
        for gradient, addition in zip(summed_gradients, apart_gradients, strict=True):
            gradient += addition
    torch.testing.assert_close(total, summed, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, summed_gradients, rtol=1e-12, atol=1e-12)


def evaluate(rank: int, world: int, tree: dict[str, Any], prefix: str) -> float:
    """Return the held-out loss of a file whose documents are kept apart."""
    engine = make_engine(rank, world, tree, DOCUMENTS)
    return evaluate_file(engine, engine.config, prefix).loss


def test_held_out_loss(tmp_path: Path, pool: Any) -> None:
    """The loss is the mean over all tokens but each document's first, each in the context of its window."""
    lengths = [5, 1, 17, 2, 8, 3, 11]
    prefix = write_documents(tmp_path / "valid", lengths, vocabulary=21)
    layout = case(2, 2, 2, microbatches=1, train={"micro_batch": 2}, model=ROTARY)
    masked = {"data": {"document_mask": True}}
    [expected] = pool.run(evaluate, 1, layout.twin | masked, prefix)
    losses = pool.run(evaluate, layout.world, layout.tree | masked, prefix)
    assert losses == pytest.approx([expected] * layout.world, rel=1e-12)
    [without] = pool.run(evaluate, 1, layout.twin, prefix)
    assert abs(without - expected) > 1e-3
