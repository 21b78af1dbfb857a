"""The sharded optimizers against torch's AdamW and a plain float64 LAMB, parameter by parameter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale import config
from megascale.config import OptimizerConfig
from megascale.config.parts import OPTIMIZERS
from megascale.model.transformer import Chunk
from megascale.ops.gradient_sink import get_main_grad
from megascale.optim.optimizer import ShardedOptimizer
from megascale.optim.update_hold import UpdateHold
from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.parameters import get_spec, initialise, list_piece_views
from megascale.train.engine_rejoin import find_complete_step


def make(options: OptimizerConfig, bucket: int | None = None, times: float = 1.0):
    """A small model with `times` the usual weights."""
    small = ["--model.hidden=16", "--model.layers=2", "--model.heads=4", "--model.sequence_length=8"]
    model = config.load(None, small + ["--model.vocab_size=21", "--model.vocab_multiple=8"]).model
    chunk = Chunk(model, range(2), is_first=True, is_last=True, dtype=torch.float64)
    flat = ParamAndGradBuffer(chunk, torch.device("cpu"), bucket_elements=bucket)
    initialise(chunk, 1)
    for p in chunk.parameters():
        p.data.mul_(times)
    return chunk, flat, ShardedOptimizer(options, [flat])


def fill(chunk: Chunk, step: int) -> dict[str, torch.Tensor]:
    """Random gradients, by logical name."""
    generator = torch.Generator().manual_seed(step)
    result = {}
    for p in chunk.parameters():
        get_main_grad(p).zero_()
        for piece, view in list_piece_views(get_spec(p), get_main_grad(p)):
            view.normal_(0, 0.1, generator=generator)
            result[piece.name] = view.clone()
    return result


def weights(chunk: Chunk) -> dict[str, torch.Tensor]:
    return {
        piece.name: view.clone() for p in chunk.parameters() for piece, view in list_piece_views(get_spec(p), p.data)
    }


@pytest.mark.parametrize("bucket", [None, 500])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_adamw_is_torchs(bucket, clip):
    options = OptimizerConfig(weight_decay=0.1, clip=clip, beta2=0.9)
    chunk, _, optimizer = make(options, bucket)
    twin = {name: torch.nn.Parameter(w) for name, w in weights(chunk).items()}
    groups = [
        {"params": [p for p in twin.values() if (p.dim() > 1) is decayed], "weight_decay": 0.1 if decayed else 0.0}
        for decayed in (True, False)
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.9), eps=1e-8)
    for step in range(1, 5):
        grads = fill(chunk, step)
        for name, p in twin.items():
            p.grad = grads[name]
        expected_norm = torch.cat([g.flatten() for g in grads.values()]).norm()
        if clip:
            torch.nn.utils.clip_grad_norm_(twin.values(), clip)
        for group in reference.param_groups:
            group["lr"] = 1e-2 * step
        reference.step()
        norm, _ = optimizer.step(1e-2 * step, step)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-12, atol=0)
        for name, w in weights(chunk).items():
            torch.testing.assert_close(w, twin[name].data, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bound", [None, 0.1])
def test_lamb_is_the_papers_algorithm(bound):
    """Without a bound a weight's own norm sets its steps, however large it is; with one, no more than that."""
    options = OptimizerConfig(name="lamb", weight_decay=0.05, clip=0.0, beta2=0.99, eps=1e-6, trust_max=bound)
    assert OptimizerConfig().trust_max is None
    chunk, _, optimizer = make(options, 500, times=1000.0)
    current = weights(chunk)
    m = {n: torch.zeros_like(w) for n, w in current.items()}
    v = {n: torch.zeros_like(w) for n, w in current.items()}
    for step in range(1, 4):
        for name, g in fill(chunk, step).items():
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.99 * v[name] + 0.01 * g * g
            u = (m[name] / (1 - 0.9**step)) / ((v[name] / (1 - 0.99**step)).sqrt() + 1e-6)
            ratio = 1.0
            if current[name].dim() > 1:
                u = u + 0.05 * current[name]
                norm = current[name].norm()
                assert norm > 100
                ratio = (norm if bound is None else bound) / u.norm()
            current[name] = current[name] - 1e-2 * ratio * u
        optimizer.step(1e-2, step)
        for name, w in weights(chunk).items():
            torch.testing.assert_close(w, current[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bucket", [None, 500])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_the_published_algorithm(bucket, nesterov):
    """Each matrix of the layers by itself, query, key and value too; all else as AdamW does it."""
    options = OptimizerConfig(name="muon", weight_decay=0.1, clip=0.5, beta2=0.9, muon_nesterov=nesterov)
    chunk, _, optimizer = make(options, bucket)
    twin, _, adamw = make(OptimizerConfig(weight_decay=0.1, clip=0.5, beta2=0.9), bucket)
    current = weights(chunk)
    stored = {n: torch.zeros_like(w) for n, w in current.items()}
    matrices = {n for n, w in current.items() if n.startswith("layers.") and w.dim() == 2}
    assert {"layers.0.attention.key.weight", "layers.1.mlp.out.weight"} <= matrices
    for step in range(1, 4):
        grads = fill(chunk, step)
        assert fill(twin, step).keys() == grads.keys()
        norm = torch.cat([g.flatten() for g in grads.values()]).norm()
        optimizer.step(1e-2, step)
        adamw.step(1e-2, step)
        as_adamw = weights(twin)
        for name, w in weights(chunk).items():
            if name not in matrices:
                assert torch.equal(w, as_adamw[name]), name
                continue
            g = grads[name] * (0.5 / (norm + 1e-6))
            stored[name] = 0.95 * stored[name] + g
            u = g + 0.95 * stored[name] if nesterov else stored[name]
            rows, columns = u.shape
            x = (u if rows <= columns else u.t()) / (u.norm() + 1e-7)
            for _ in range(5):
                a = x @ x.t()
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            x = x if rows <= columns else x.t()
            current[name] = (1 - 1e-3) * current[name] - 1e-2 * 0.2 * max(rows, columns) ** 0.5 * x
            torch.testing.assert_close(w, current[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS.names())
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_with_nonfinite_gradients_changes_nothing(name, bad):
    chunk, _, optimizer = make(OptimizerConfig(name=name))
    fill(chunk, 1)
    optimizer.step(1e-2, 1)
    before = weights(chunk)
    retained = [t.clone() for s in optimizer.states for t in s.state_tensors()]
    fill(chunk, 2)
    get_main_grad(next(chunk.parameters()))[0, 0] = bad
    assert not torch.isfinite(optimizer.step(1e-2, 2)[0])
    for key, w in weights(chunk).items():
        assert torch.equal(w, before[key]), key
    assert any(t.any() for t in retained)
    for current, then in zip((t for s in optimizer.states for t in s.state_tensors()), retained, strict=True):
        assert torch.equal(current, then)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_a_hold_keeps_queued_updates_from_changing_the_state(name):
    """Held updates change neither weights nor moments, whatever the gradients are, and are not counted."""
    states = []
    for held_steps in ((), (3, 4)):
        chunk, _, optimizer = make(OptimizerConfig(name=name))
        optimizer.update_hold = UpdateHold(torch.device("cpu"))
        optimizer.update_hold.set_step(10)
        for step in (1, 2, *held_steps):
            fill(chunk, step)
            if step in held_steps:
                optimizer.update_hold.request()
                get_main_grad(next(chunk.parameters())).fill_(1e9)
            optimizer.step(1e-2, step)
        assert optimizer.update_hold.read_step() == 12
        optimizer.update_hold.release()
        fill(chunk, 3)
        optimizer.step(1e-2, 3)
        assert optimizer.update_hold.read_step() == 13
        states.append(weights(chunk) | {str(i): x for i, x in enumerate(moments(optimizer))})
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


@pytest.mark.parametrize(
    ("name", "device", "expected"), [("adamw", "cuda", 4), ("lamb", "cuda", -1), ("lamb", "cpu", 4)]
)
def test_an_aborted_update_with_collectives_of_its_own_leaves_no_whole_state_on_a_gpu(name, device, expected):
    """Its last collective comes after the hold was read, and a GPU works on with what the abort leaves."""
    hold = UpdateHold(torch.device("cpu"))
    hold.set_step(3)
    hold.mask_norm(torch.ones(()))
    settings = config.load(None, [f"--optimizer.name={name}"])
    engine: Any = SimpleNamespace(
        optimizer=SimpleNamespace(update_hold=hold),
        config=settings,
        device=torch.device(device),
        begun_update=4,
        ended_update=4,
    )
    assert find_complete_step(engine) == expected


def moments(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    return [tensor for state in optimizer.states for part in state.parts for tensor in part.state.values()]
