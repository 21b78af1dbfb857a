"""The transformer against plain formulas: counts, gradients, causality, windows, cached generation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale import config
from megascale.core.batch import Batch
from megascale.core.flops import count_parameters
from megascale.core.inventory import resolve_layers
from megascale.model.context import ForwardContext, KVCache
from megascale.model.transformer import Chunk
from megascale.ops.gradient_sink import detach, get_main_grad
from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.parameters import get_spec, initialise

SHAPES = {
    "serial": [],
    "parallel": ["--model.block=parallel"],
    "neox": ["--model.block=parallel", "--model.parallel_norms=2", "--model.positions=rotary"],
    "gptj": [
        "--model.block=parallel",
        "--model.positions=rotary",
        "--model.rotary_fraction=0.5",
        "--model.rotary_interleaved=true",
        "--model.attention_bias=false",
        "--model.tied_embeddings=false",
        "--model.head_bias=true",
    ],
    "odd": [  # biases on one half of the fused projection, narrow heads, few groups, windows in two layers of three
        "--model.block=parallel",
        "--model.mlp_bias=false",
        "--model.attention_out_bias=false",
        "--model.positions=rotary",
        "--model.rotary_fraction=0.4",
        "--model.head_dim=6",
        "--model.kv_heads=2",
        "--model.window=3",
        "--model.layer_pattern=SLS",
        "--model.layers=3",
    ],
    "mixed": [  # a window, a base and a rotated width of its own in one layer, no positions in the other
        "--model.layers=3",
        "--model.positions=rotary",
        "--model.layer_pattern=GNS",
        "--model.layer_kinds.G.window=3",
        "--model.layer_kinds.G.rotary_base=50",
        "--model.layer_kinds.G.rotary_fraction=0.5",
        "--model.layer_kinds.G.kv_heads=2",
        "--model.layer_kinds.N.positions=none",
        "--model.layer_kinds.N.ffn_hidden=24",
    ],
    "qwen3": ["--model.norm=rmsnorm", "--model.positions=rotary", "--model.qk_norm=head", "--model.kv_heads=2"],
    "olmo2": [
        "--model.norm=rmsnorm",
        "--model.positions=rotary",
        "--model.qk_norm=projection",
        "--model.norm_placement=post",
        "--model.kv_heads=2",
    ],
    "norms on both sides": ["--model.norm_placement=both", "--model.positions=rotary", "--model.qk_norm=head"],
    "scaled positions in one layer": [
        "--model.positions=rotary",
        "--model.layer_pattern=SY",
        "--model.layer_kinds.Y.rotary_scaling.method=yarn",
        "--model.layer_kinds.Y.rotary_scaling.factor=4",
        "--model.layer_kinds.Y.rotary_scaling.original_length=8",
    ],
    "gemma": [
        "--model.norm=rmsnorm_zero_centred",
        "--model.norm_placement=both",
        "--model.activation=geglu_tanh",
        "--model.positions=rotary",
        "--model.qk_norm=head",
        "--model.embedding_multiplier=4",
        "--model.attention_multiplier=0.4",
        "--model.attention_softcap=2",
        "--model.logit_softcap=3",
    ],
    "cohere": [
        "--model.block=parallel",
        "--model.norm=layernorm_no_bias",
        "--model.activation=swiglu",
        "--model.positions=rotary",
        "--model.rotary_interleaved=true",
        "--model.logit_multiplier=0.3",
    ],
    "granite": [
        "--model.norm=rmsnorm",
        "--model.positions=rotary",
        "--model.residual_multiplier=0.4",
        "--model.attention_multiplier=0.3",
    ],
    "parallel with norms of queries and keys": [
        "--model.block=parallel",
        "--model.positions=rotary",
        "--model.layer_pattern=SN",
        "--model.layer_kinds.N.qk_norm=head",
    ],
    "llama": [
        "--model.norm=rmsnorm",
        "--model.activation=swiglu",
        "--model.positions=rotary",
        "--model.kv_heads=2",
        "--model.ffn_hidden=48",
        "--model.attention_bias=false",
        "--model.mlp_bias=false",
        "--model.tied_embeddings=false",
    ],
}


def make(overrides: Sequence[str] = (), dtype: torch.dtype = torch.float64, buffers: bool = True) -> Chunk:
    """A small whole model."""
    small = ["--model.hidden=16", "--model.layers=2", "--model.heads=4", "--model.sequence_length=12"]
    small += ["--model.vocab_size=21", "--model.vocab_multiple=8", "--model.init_std=0.3"]
    model = config.load(None, small + list(overrides)).model
    chunk = Chunk(model, range(model.layers), is_first=True, is_last=True, dtype=dtype)
    ParamAndGradBuffer(chunk, torch.device("cpu"))
    initialise(chunk, 3)
    if not buffers:  # ordinary autograd gradients, for gradcheck
        for p in chunk.parameters():
            detach(p)
            p._post_accumulate_grad_hooks.clear()
    return chunk


def batch(samples: int = 3, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 21, (length + 1, samples), generator=torch.Generator().manual_seed(1))
    return tokens[:-1], tokens[1:]


@pytest.mark.parametrize("shape", SHAPES)
def test_parameter_count_is_the_formula(shape):
    chunk = make(SHAPES[shape])
    counted = sum(piece.box.count for p in chunk.parameters() for piece in get_spec(p).pieces)
    assert counted == count_parameters(chunk.model)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_a_block_pass_gradcheck(shape):
    chunk = make(SHAPES[shape], buffers=False)
    block = chunk.blocks[0]
    weights = tuple(block.parameters())
    x = torch.randn(5, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rotary = chunk._rotary.select(0, 5, x.device)[0]

    def run(x, *ignored):
        return block(x, rotary, ForwardContext())

    assert torch.autograd.gradcheck(run, (x,) + weights, fast_mode=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_buffers_hold_autograds_gradients(shape):
    inputs, targets = batch()
    plain, flat = make(SHAPES[shape], buffers=False), make(SHAPES[shape])
    plain(inputs, Batch(targets=targets)).sum().backward()
    flat(inputs, Batch(targets=targets)).sum().backward()
    for p, q in zip(plain.parameters(), flat.parameters(), strict=True):
        assert q.grad is None
        torch.testing.assert_close(get_main_grad(q), p.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_token_sees_its_future(shape):
    chunk = make(SHAPES[shape])
    inputs, _ = batch()
    changed = inputs.clone()
    changed[7] = (changed[7] + 1) % 21
    a, b = chunk(inputs), chunk(changed)
    torch.testing.assert_close(a[:7], b[:7], rtol=0, atol=0)
    assert not torch.equal(a[7], b[7])


@pytest.mark.parametrize("shape", ["serial", "parallel", "llama"])
def test_a_window_of_the_whole_sequence_is_full_attention(shape):
    inputs, targets = batch()
    full = make(SHAPES[shape])(inputs, Batch(targets=targets))
    wide = make(SHAPES[shape] + ["--model.window=12"])(inputs, Batch(targets=targets))
    narrow = make(SHAPES[shape] + ["--model.window=3"])(inputs, Batch(targets=targets))
    torch.testing.assert_close(wide, full, rtol=0, atol=0)
    assert (narrow[:3] - full[:3]).abs().max() < 1e-12
    assert (narrow[3:] - full[3:]).abs().max() > 1e-6


def test_each_layer_sees_its_own_window():
    """Only layers of full attention, and layers behind them, depend on a distant token."""
    far = []
    for pattern in ("S", "SSL", "LSS"):
        chunk = make(["--model.window=2", f"--model.layer_pattern={pattern}", "--model.layers=3"])
        inputs, _ = batch(1)
        changed = inputs.clone()
        changed[0] = (changed[0] + 1) % 21
        separate = (chunk(inputs) - chunk(changed)).abs().amax((1, 2)) > 1e-9
        far.append(int(separate.nonzero().max()))
    # Three windows of 2 reach 3 tokens on; a layer of full attention reaches all.
    assert far == [3, 11, 11]


def test_layer_pattern_alternates_layers():
    model = config.load(None, ["--model.window=8", "--model.layer_pattern=SSL", "--model.layers=5"]).model
    assert [layer.window for layer in resolve_layers(model)] == [8, 8, None, 8, 8]


def test_a_layer_of_a_kind_is_the_layer_of_a_model_of_that_kind():
    """A model of mixed layers computes what layers of uniform models with its weights compute in turn."""
    mixed = make(SHAPES["mixed"])
    inputs, _ = batch()
    token_embedding = mixed.token_embedding
    assert token_embedding is not None
    x = token_embedding[inputs]
    for index, letter in enumerate("GNS"):
        uniform = Chunk(mixed.model.resolve_kind(letter), range(1), is_first=False, is_last=False, dtype=torch.float64)
        block = uniform.blocks[0].to_empty(device="cpu")
        block.load_state_dict(mixed.blocks[index].state_dict())
        x = uniform(x)
    assert mixed.norm is not None
    torch.testing.assert_close(mixed(inputs), mixed.norm(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [1, 3])
def test_cache_keeps_no_more_than_a_window_sees(window):
    chunk = make([f"--model.window={window}", "--model.layer_pattern=SL"])
    cache = KVCache()
    inputs, _ = batch()
    for start in range(0, 12, 4):
        chunk(inputs[start : start + 4], None, ForwardContext(cache=cache))
        cache.length = start + 4
    assert [cache.layers[i][0].shape[0] for i in (0, 1)] == [window - 1, 12]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [[], ["--model.window=4"]])
def test_cached_steps_give_the_whole_passes_hidden_states(shape, window):
    chunk = make(SHAPES[shape] + window)
    inputs, _ = batch()
    full = chunk(inputs)
    cache, parts = KVCache(), []
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 12)):
        parts.append(chunk(inputs[start:stop], None, ForwardContext(cache=cache)))
        cache.length = stop
    torch.testing.assert_close(torch.cat(parts), full, rtol=1e-10, atol=1e-10)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3), st.integers(1, 3))
def test_dropout_depends_on_the_global_sample_only(start, count):
    """A micro-batch cut out of a batch draws the batch's masks."""
    chunk = make(["--model.dropout=0.3"])
    inputs, targets = batch(6)
    full = chunk(inputs, Batch(targets=targets), ForwardContext(dropout_key=5))
    part = chunk(
        inputs[:, start : start + count],
        Batch(targets=targets[:, start : start + count]),
        ForwardContext(dropout_key=5, sample_start=start),
    )
    torch.testing.assert_close(part, full[:, start : start + count], rtol=1e-10, atol=1e-10)
    second = chunk(inputs, Batch(targets=targets), ForwardContext(dropout_key=6))
    assert not torch.allclose(second, full)
