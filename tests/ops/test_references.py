"""The plain references: against torch's own operators, explicit formulas and numerical derivatives in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from megascale.errors import ConfigError
from megascale.ops import activation, dispatch
from megascale.ops.activation import activate, gelu, swiglu
from megascale.ops.adam import adamw_apply, compute_bias_correction
from megascale.ops.attention import AttentionChoice, AttentionChooser, AttentionShape, attention, attention_reference
from megascale.ops.cross_entropy import VocabShard, chunk_tokens, cross_entropy, linear_cross_entropy
from megascale.ops.dropout import dropout, dropout_add, make_dropout_key, philox
from megascale.ops.gradient_sink import GradientSink, SinkParameter, attach
from megascale.ops.lamb import lamb_apply, lamb_direction, trust_ratio
from megascale.ops.norm import add_norm, layer_norm, rms_norm
from megascale.ops.rope import apply_rotary, make_rotary_tables, split_qkv
from megascale.ops.segments import TILE, Segments, square_sums_reference

D = torch.float64


def randn(*shape, grad=True, seed=0):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def test_gradcheck_of_every_differentiable_operator():
    x = randn(3, 2, 8)
    w = randn(8, seed=1)
    b = randn(8, seed=2)
    assert gradcheck(lambda *a: layer_norm(*a, 1e-5), (x, w, b))
    assert gradcheck(lambda *a: rms_norm(*a, 1e-5), (x, w))
    assert gradcheck(lambda x, r, w, b, c: add_norm(x, r, w, b, 1e-5, "layernorm", c), (x, randn(3, 2, 8), w, b, b))
    assert gradcheck(gelu, (x, b))
    assert gradcheck(lambda x, b: gelu(x, b, "tanh"), (x, b))
    assert gradcheck(swiglu, (x, b))
    assert gradcheck(lambda x, b: activate("geglu_tanh", x, b), (x, b))
    assert gradcheck(lambda x, b: activate("swiglu_clamped", x, b), ((6 * x).detach().requires_grad_(), b))
    assert gradcheck(lambda x, b, r: dropout_add(x, b, r, 0.3, 5, 0, 0), (x, b, randn(3, 2, 8, seed=3)))
    tables = make_rotary_tables(3, 4, 100.0, "cpu", D)
    for interleaved in (False, True):
        assert gradcheck(lambda x, i=interleaved: apply_rotary(x, *tables, i), (randn(3, 1, 2, 6),))
        assert gradcheck(lambda x, i=interleaved: split_qkv(x, 2, 1, *tables, i), (randn(3, 1, 24),))
    for window in (None, 2):
        q = randn(4, 1, 2, 4)
        k = randn(4, 1, 1, 4, seed=1)
        v = randn(4, 1, 1, 4, seed=2)
        assert gradcheck(lambda *a, w=window: attention(*a, window=w), (q, k, v))
        assert gradcheck(lambda *a, w=window: attention(*a, window=w, softcap=0.5), (q, k, v))
        sinks = randn(2, seed=3)
        assert gradcheck(lambda *a, w=window: attention(*a[:3], window=w, sinks_N=a[3]), (q, k, v, sinks))
    targets = torch.tensor([[0, 4], [-100, 2], [3, 1]])
    head = lambda x, w, b: linear_cross_entropy(x, w, targets, bias=b, vocab=5, chunk=4)
    assert gradcheck(head, (x, randn(7, 8, seed=3), randn(7, seed=4)))
    capped = lambda x, w: linear_cross_entropy(x, w, targets, vocab=5, chunk=4, softcap=1.5)
    assert gradcheck(capped, (x, randn(7, 8, seed=3)))


def test_rms_norm_and_rotary_are_what_the_formulas_say():
    x, w = randn(2, 6), randn(6, seed=1)
    torch.testing.assert_close(rms_norm(x, w, 1e-3), torch.nn.functional.rms_norm(x, (6,), w, 1e-3))
    cos, sin = make_rotary_tables(5, 4, 50.0, "cpu", D)
    q = randn(5, 1, 1, 4, grad=False)
    for interleaved, pairs in ((True, [(0, 1), (2, 3)]), (False, [(0, 2), (1, 3)])):
        y = apply_rotary(q, cos, sin, interleaved)
        for position in range(5):
            for i, (a, b) in enumerate(pairs):
                turned = complex(q[position, 0, 0, a], q[position, 0, 0, b]) * complex(
                    math.cos(position * 50.0 ** (-2 * i / 4)), math.sin(position * 50.0 ** (-2 * i / 4))
                )
                assert y[position, 0, 0, a].item() == pytest.approx(turned.real)
                assert y[position, 0, 0, b].item() == pytest.approx(turned.imag)


def test_sliced_tables_continue_a_sequence():
    cos, sin = make_rotary_tables(9, 4, 100.0, "cpu", D)
    x = randn(9, 2, 3, 6)
    full = apply_rotary(x, cos, sin, False)
    assert torch.equal(apply_rotary(x[4:], cos[4:], sin[4:], False), full[4:])
    with pytest.raises(ValueError, match="9 rows"):
        apply_rotary(x, cos[1:], sin[1:], False)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(0, 8),
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.sampled_from([None, 0.5, 30.0]),
    st.data(),
)
def test_attention_window_against_an_explicit_mask(queries, extra, heads, softcap, data):
    """Windows of every size, the edges 1, S - 1 and S included, and fewer queries than keys; with bounded scores."""
    keys = queries + extra
    edges = sorted({1, max(1, keys - 1), keys, keys + 3})
    window = data.draw(st.one_of(st.none(), st.sampled_from(edges), st.integers(1, keys)))
    N, G = heads
    q = randn(queries, 2, N, 4)
    k = randn(keys, 2, G, 4, seed=1)
    v = randn(keys, 2, G, 4, seed=2)
    out = attention(q, k, v, window=window, softcap=softcap)
    for i in range(queries):
        at = keys - queries + i
        observed = range(0 if window is None else max(0, at - window + 1), at + 1)
        for n in range(N):
            kn, vn = k[list(observed), 1, n * G // N], v[list(observed), 1, n * G // N]
            scores = (q[i, 1, n] @ kn.T) / 2
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            expected = scores.softmax(-1) @ vn
            torch.testing.assert_close(out[i, 1, n * 4 : n * 4 + 4], expected)
    torch.testing.assert_close(attention_reference(q, k, v, window=window, softcap=softcap), out)


def test_attention_backend_is_checked_and_recorded():
    q = randn(3, 1, 1, 4)
    with pytest.raises(ConfigError, match="not a backend"):
        attention(q, q, q, window=None, backend="fastest")
    with pytest.raises(ConfigError, match="no sliding window"):
        attention(q, q, q, window=2, backend="cudnn")
    chooser = AttentionChooser()
    assert chooser.choose(8, 1, 2, 2, 4, 3, torch.float32, "cpu") == "sdpa"
    chooser.adopt(AttentionShape(8, 1, 2, 2, 4, None, torch.bfloat16), "cudnn")
    assert chooser.choose(8, 1, 2, 2, 4, 8, torch.bfloat16, "cpu") == "cudnn"  # a window of S is full attention
    assert len(chooser.describe()) == 2
    assert "window 3" in chooser.describe()[0]


def test_a_kernel_without_a_softcap_is_refused_and_never_measured():
    q = randn(3, 1, 1, 4)
    for name in ("cudnn", "flash", "flash_window", "cudnn_frontend", "flash4", "sdpa"):
        with pytest.raises(ConfigError, match=f"'{name}' has no softcap, which this layer has .50.; set --kernels"):
            attention(q, q, q, window=None, softcap=50.0, backend=name)
    chooser = AttentionChooser()
    shape = AttentionShape(8, 1, 2, 2, 4, None, torch.bfloat16, softcap=50.0)
    assert "has no softcap" in chooser.explain_refusal("flash", shape, torch.device("cpu"))
    assert chooser.explain_refusal("eager", shape, torch.device("cpu")) == ""
    assert chooser.choose(8, 1, 2, 2, 4, None, torch.float32, "cpu", softcap=50.0) == "eager"
    assert chooser.describe() == ["attention 8 x 1, 2 heads (2 kv) of 4, full, softcap 50, float32: eager"]
    assert chooser.choose(8, 1, 2, 2, 4, None, torch.float32, "cpu") == "sdpa"


def test_a_kernel_may_be_chosen_in_a_layer_that_is_recomputed():
    chooser = AttentionChooser()
    weight = randn(3).requires_grad_()

    def measured(shape, device):
        with torch.enable_grad():
            torch.autograd.grad((weight * weight).exp().sum(), weight)
        return AttentionChoice("sdpa")

    chooser.measure = measured

    def layer(x):
        chooser.choose(8, 1, 2, 2, 4, None, torch.float32, "cpu")
        return (x * weight).sin()

    torch.utils.checkpoint.checkpoint(layer, randn(3), use_reentrant=False).sum().backward()
    assert weight.grad is not None


def test_philox_matches_the_published_vectors():
    """Salmon et al. 2011, kat_vectors: counter and key of zeros."""
    zero = torch.zeros(1, dtype=torch.int64)
    draws = [int(d) for d in philox(zero, zero, zero, 0)]
    assert draws == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 40), st.integers(0, 1000), st.integers(0, 2**62 - 1), st.data())
def test_a_part_of_the_batch_draws_the_same_dropout(sequence_start, sample_start, key, data):
    S = 6
    B = 4
    H = 10
    x = torch.ones(S, B, H, dtype=D)
    full = dropout(x, 0.4, key, sequence_start, sample_start)
    s = data.draw(st.integers(0, S - 1))
    b = data.draw(st.integers(0, B - 1))
    part = dropout(x[s:, b:], 0.4, key, sequence_start + s, sample_start + b)
    assert torch.equal(part, full[s:, b:])


def test_dropout_statistics():
    x = torch.ones(64, 32, 96, dtype=D)
    for p in (0.1, 0.5):
        y = dropout(x, p, make_dropout_key(7, 1), 0, 0)
        dropped = (y == 0).double()
        n = dropped.numel()
        assert abs(dropped.mean() - p) < 5 * math.sqrt(p * (1 - p) / n)
        assert y[y != 0].eq(1 / (1 - p)).all()
        # Neighbours along every axis are independent: their products have the mean p^2.
        for axis in range(3):
            pair = (dropped.narrow(axis, 1, x.shape[axis] - 1) * dropped.narrow(axis, 0, x.shape[axis] - 1)).mean()
            assert abs(pair - p * p) < 6 * math.sqrt(p * p / n)
    masks = [
        dropout(x, 0.5, make_dropout_key(*parts), 0, 0) == 0 for parts in ((1, 2), (2, 1), (1, 3), (1,), (1, 2, 0))
    ]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs((a == b).double().mean() - 0.5) < 0.02
    assert dropout(x, 0.5, 3, 0, 0, training=False) is x


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 7), st.sampled_from([None, 1, 3]), st.booleans(), st.booleans())
def test_head_gives_the_plain_loss_whatever_the_chunks(tokens, chunk, has_bias, promised):
    x, w = randn(tokens, 6), SinkParameter(randn(11, 6, seed=1).detach())
    b = randn(11, seed=2) if has_bias else None
    targets = torch.randint(0, 9, (tokens,), generator=torch.Generator().manual_seed(tokens))
    targets[0] = -100
    upstream = torch.rand(tokens, dtype=D)
    called = []
    sink = attach(w, GradientSink(torch.zeros_like(w), lambda: called.append(1)))
    loss = linear_cross_entropy(x, w, targets, bias=b, vocab=9, chunk=chunk, token_grad=upstream if promised else None)
    inputs = [t for t in (x, b) if t is not None]
    grads = torch.autograd.grad(loss, inputs + [w], upstream, allow_unused=True)
    assert grads[-1] is None
    assert called == [1]
    want = cross_entropy(torch.nn.functional.linear(x, w, b), targets, 9)
    expected = torch.autograd.grad(want, list(inputs) + [w], upstream)
    torch.testing.assert_close(loss, want)
    for a, c in zip(tuple(grads[:-1]) + (sink.main_grad,), expected, strict=True):
        torch.testing.assert_close(a, c)
    assert sink.main_grad[9:].eq(0).all()


@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("custom", [False, True])
def test_head_bounds_its_logits(promised, custom):
    """With the losses of both passes, and with a custom loss, which sees bounded logits."""
    x, w = randn(5, 6), randn(11, 6, seed=1)
    targets = torch.tensor([0, 8, -100, 2, 3])
    upstream = torch.rand(5, dtype=D)
    loss = linear_cross_entropy(
        x,
        w,
        targets,
        vocab=9,
        chunk=2,
        token_grad=upstream if promised else None,
        softcap=0.7,
        loss=(lambda logits: logits.log_sum_exp() - logits.target_logits()) if custom else None,
    )
    expected = cross_entropy(0.7 * torch.tanh(x @ w.T / 0.7), targets, 9)
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(loss, (x, w), upstream)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, (x, w), upstream), strict=True):
        torch.testing.assert_close(gradient, reference)


def test_head_refuses_a_gradient_it_was_not_promised():
    x = randn(3, 4)
    w = randn(5, 4)
    targets = torch.tensor([0, 1, 2])
    loss = linear_cross_entropy(x, w, targets, token_grad=torch.tensor(0.5))
    with pytest.raises(RuntimeError, match="not token_grad"):
        loss.sum().backward()


@pytest.mark.parametrize("promised", [False, True])
def test_vocabulary_shards_give_the_whole_heads_loss_and_gradients(promised):
    """Four shards in lock step, the last of them padding only; all-reduces as sums over threads' turns."""
    import threading

    V = 4
    ranks = 4
    vocab = 11
    x, w = randn(5, 6), randn(V * ranks, 6, seed=1)
    targets = torch.tensor([0, 10, 5, -100, 7])
    upstream = torch.rand(5, dtype=D)
    want = cross_entropy(x @ w.T, targets, vocab)
    expected = torch.autograd.grad(want, (x, w), upstream)
    barrier = threading.Barrier(ranks)
    slots = [None] * ranks
    results = [None] * ranks

    def reduce(rank, tensor, how):
        slots[rank] = tensor.clone()
        barrier.wait()
        total = how(torch.stack(slots))
        barrier.wait()
        tensor.copy_(total)

    def work(rank):
        shard = VocabShard(
            rank * V, lambda t: reduce(rank, t, lambda s: s.amax(0)), lambda t: reduce(rank, t, lambda s: s.sum(0))
        )
        local, my_x = w[rank * V : (rank + 1) * V].detach().requires_grad_(), x.detach().requires_grad_()
        loss = linear_cross_entropy(
            my_x, local, targets, vocab=vocab, chunk=2, shard=shard, token_grad=upstream if promised else None
        )
        results[rank] = (loss.detach(),) + torch.autograd.grad(loss, (my_x, local), upstream)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    for loss, _, _ in results:
        torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(sum(r[1] for r in results), expected[0])
    torch.testing.assert_close(torch.cat([r[2] for r in results]), expected[1])


@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_head_computes_only_the_gradients_that_are_needed(frozen, promised):
    tensors = {"x": randn(5, 6), "weight": randn(11, 6, seed=1), "bias": randn(11, seed=2)}
    tensors[frozen] = tensors[frozen].detach()
    targets = torch.tensor([0, 10, 5, -100, 7])
    upstream = torch.tensor(0.25, dtype=D)
    x, weight, bias = tensors.values()
    loss = linear_cross_entropy(x, weight, targets, bias=bias, chunk=2, token_grad=upstream if promised else None)
    (loss * upstream).sum().backward()
    gradients = {name: tensor.grad for name, tensor in tensors.items()}
    assert gradients[frozen] is None
    for tensor in tensors.values():
        tensor.grad = None
    want = cross_entropy(torch.nn.functional.linear(x, weight, bias), targets, 11)
    torch.testing.assert_close(loss, want)
    (want * upstream).sum().backward()
    for name, tensor in tensors.items():
        if name != frozen:
            torch.testing.assert_close(gradients[name], tensor.grad)


def test_head_keeps_float32_sums_of_narrow_types():
    x, weight = (
        randn(*shape, seed=i).detach().bfloat16().requires_grad_() for i, shape in enumerate([(300, 8), (9, 8)])
    )
    targets = torch.arange(300) % 9
    loss = linear_cross_entropy(x, weight, targets, chunk=10, token_grad=torch.tensor(1.0))
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    wide_x, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    torch.nn.functional.cross_entropy(wide_x @ wide_weight.T, targets, reduction="sum").backward()
    # Thirty sums in bfloat16 would be off by several percent.
    assert (weight.grad.double() - wide_weight.grad).norm() < 0.01 * wide_weight.grad.norm()


@pytest.mark.parametrize(
    ("tokens", "columns", "itemsize", "expected"),
    [
        (4096, 64000, 2, 4096),
        (16384, 128256, 2, 4096),  # four chunks of at most 4,185 tokens
        (5000, 50304, 2, 5000),
        (10673, 50304, 2, 5376),  # one more than fits: two halves, rounded up to 128
        (10672, 50304, 2, 10672),
        (129, 1 << 40, 2, 128),  # never less than 128
        (100, 1 << 40, 2, 100),
        (1, 1, 1, 1),
        (0, 5, 2, 1),
        (8, 0, 2, 8),
    ],
)
def test_chunks_are_even_and_as_large_as_fits(tokens, columns, itemsize, expected):
    assert chunk_tokens(tokens, columns, itemsize) == expected


@pytest.mark.parametrize(("tokens", "columns"), [(1, 10), (4096, 64000), (16384, 128256), (5000, 50304), (0, 5)])
def test_chunks_cover_and_fit(tokens, columns):
    size = chunk_tokens(tokens, columns, 2)
    assert 1 <= size <= max(tokens, 1)
    assert size * columns * 2 <= (1 << 30) + 128 * columns * 2
    assert size == tokens or size % 128 == 0 or tokens == 0


def test_adamw_is_torchs():
    weights = [randn(7), randn(4, seed=1)]
    flat = torch.cat([t.detach() for t in weights])
    m, v = torch.zeros_like(flat), torch.zeros_like(flat)
    segments = Segments([(0, 7, True, 0), (7, 11, False, 1)], 2, "cpu")
    theirs = torch.optim.AdamW(
        [{"params": [weights[0]], "weight_decay": 0.1}, {"params": [weights[1]], "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in range(1, 6):
        grads = [randn(*w.shape, grad=False, seed=step) for w in weights]
        for w, g in zip(weights, grads, strict=True):
            w.grad = g.clone()
        theirs.step()
        adamw_apply(
            flat, m, v, torch.cat(grads) * 4, None, lr=torch.tensor(0.01, dtype=D), step=torch.tensor(step),
            beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, segments=segments, grad_scale=torch.tensor(0.25),
        )  # fmt: skip
    torch.testing.assert_close(flat, torch.cat([w.detach() for w in weights]))


def test_lamb_is_algorithm_2():
    """You et al. 2020, written out a tensor at a time; the tensor of zeros moves without a ratio."""
    tensors = [randn(6, grad=False), torch.zeros(3, dtype=D), 30 * randn(5, grad=False, seed=1)]
    decays = [True, True, False]
    segments = Segments([(0, 6, True, 2), (6, 9, True, 0), (9, 14, False, 1)], 3, "cpu")
    flat = torch.cat(tensors)
    state_m, state_v = torch.zeros_like(flat), torch.zeros_like(flat)
    out = torch.zeros(14, dtype=torch.bfloat16)
    moments = [(torch.zeros_like(t), torch.zeros_like(t)) for t in tensors]
    for step in range(1, 4):
        grads = [randn(len(t), grad=False, seed=10 * step + i) for i, t in enumerate(tensors)]
        g = torch.cat(grads)
        sums = lamb_direction(
            flat, state_m, state_v, g, g, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.01, step=step,
            segments=segments,
        )  # fmt: skip
        lamb_apply(flat, g, out, sums, lr=0.1, trust_min=0.0, trust_max=10.0, segments=segments)
        for i, (w, grad) in enumerate(zip(tensors, grads, strict=True)):
            m, v = moments[i]
            m = 0.9 * m + 0.1 * grad
            v = 0.999 * v + 0.001 * grad**2
            moments[i] = (m, v)
            u = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-6) + (0.01 * w if decays[i] else 0)
            norm = w.norm()
            ratio = min(norm, 10.0) / u.norm() if norm > 0 and u.norm() > 0 else 1.0
            tensors[i] = w - 0.1 * ratio * u
    torch.testing.assert_close(flat, torch.cat(tensors))
    torch.testing.assert_close(out, flat.bfloat16())
    assert flat[9:14].norm() > 10


@pytest.mark.parametrize("number", [1, 2, 10])
def test_a_moving_average_is_corrected_by_its_weight(number):
    expected = 1 - 0.9**number
    assert compute_bias_correction(0.9, number) == pytest.approx(expected, rel=1e-15)
    on_device = compute_bias_correction(0.9, torch.tensor(number))
    assert on_device.dtype == torch.float64
    assert on_device.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("weight", "update", "bounds", "expected"),
    [
        (3.0, 2.0, (0.0, math.inf), 1.5),
        (3.0, 2.0, (0.0, 1.0), 0.5),
        (3.0, 2.0, (4.0, 8.0), 2.0),
        (0.0, 2.0, (4.0, 8.0), 1.0),
        (3.0, 0.0, (0.0, math.inf), 1.0),
        (0.0, 0.0, (0.0, math.inf), 1.0),
    ],
)
def test_the_trust_ratio_is_one_where_a_norm_is_zero(weight, update, bounds, expected):
    sums = torch.tensor([[weight**2, 25.0], [update**2, 1.0]], dtype=D)
    ratio = trust_ratio(sums, *bounds)
    assert ratio[0].item() == pytest.approx(expected)
    assert ratio[1].item() == pytest.approx(min(max(5.0, bounds[0]), bounds[1]))


def test_a_skipped_step_changes_nothing():
    flat, m, v, g = (randn(5, grad=False, seed=i).abs() for i in range(4))
    g[2] = float("nan")
    before = [t.clone() for t in (flat, m, v)]
    segments = Segments([(0, 5, True, 0)], 1, "cpu")
    options = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "segments": segments}
    adamw_apply(flat, m, v, g, None, lr=0.1, step=1, skip=torch.tensor(True), **options)
    sums = lamb_direction(flat, m, v, g, g, step=1, skip=torch.tensor(True), **options)
    lamb_apply(flat, g, None, sums, lr=0.1, trust_min=0, trust_max=10, segments=segments, skip=torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip((flat, m, v), before, strict=True))


def test_segments_are_checked_and_summed():
    for rows in ([(0, 5, True, 0), (4, 6, True, 1)], [(3, 3, True, 0)], [(0, 2, True, 2)]):
        with pytest.raises(ValueError, match="segment"):
            Segments(rows, 2, "cpu")
    x = torch.arange(6.0)
    table = Segments([(1, 3, True, 1), (4, 6, True, 1)], 3, "cpu")
    assert square_sums_reference(x, table).tolist() == [0, 1 + 4 + 16 + 25, 0]


def test_dispatch_says_what_runs_and_why():
    auto, reference = dispatch.Kernels(), dispatch.Kernels("reference")
    with auto.as_current():
        rms_norm(randn(2, 4), randn(4), 1e-5)
        with reference.as_current():
            rms_norm(randn(2, 4), randn(4), 1e-5)
        assert dispatch.list_choices() == auto.list_choices() == {"rms norm": "reference (cpu tensors)"}
    assert reference.list_choices() == {"rms norm": "reference (kernels.mode)"}
    if not torch.cuda.is_available() and not dispatch.IS_INTERPRETED:
        with pytest.raises(ConfigError, match=r"kernels.mode='fused' is unavailable"):
            dispatch.Kernels("fused")


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 1 << 22),
    st.integers(1, 1 << 16),
    st.sampled_from([getattr(activation, name) for name in dir(activation) if name.startswith("TILE")]),
)
def test_tiles_of_an_activation_cover_it_within_what_a_grid_holds(rows, width, tile):
    """Also of 131,072 tokens and more, for which the second dimension of a CUDA grid is too short for a tile each."""
    grid = activation._make_grid(rows, width, tile)
    assert 1 <= grid.row_programs <= 65_535
    assert grid.program_rows % tile.rows == 0
    assert (grid.row_programs - 1) * grid.program_rows < rows <= grid.row_programs * grid.program_rows
    assert (grid.column_blocks - 1) * grid.block_columns < width <= grid.column_blocks * grid.block_columns


def test_tiles_cover_each_segment_once():
    """A tile is (number, first and last element within it, decay, tensor): what a program of a kernel works on."""
    rows = [(0, 5, True, 2), (5, TILE + 1, False, 0), (TILE + 3, 3 * TILE, True, 2)]
    segments = Segments(rows, 4, "cpu")
    assert segments.tiles.tolist() == [
        [0, 0, 5, 1, 2],
        [0, 5, TILE, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 3, TILE, 1, 2],
        [2, 0, TILE, 1, 2],
    ]
    assert segments.tiles.dtype == torch.int32
    order, begin = segments.by_tensor
    assert order.tolist() == [1, 2, 0, 3, 4]
    assert begin.tolist() == [0, 2, 2, 5, 5]
    assert segments.stop == 3 * TILE
    assert Segments([], 1, "cpu").tiles.shape == (0, 5)


@pytest.mark.parametrize(
    "rows", [[(0, 5, True, 0), (4, 6, True, 0)], [(3, 3, True, 0)], [(0, 5, True, 2)], [(0, 5, True, -1)]]
)
def test_segments_that_overlap_or_name_no_tensor_are_refused(rows):
    with pytest.raises(ValueError, match="overlaps the previous one, is empty, or its tensor is not below 2"):
        Segments(rows, 2, "cpu")
    Segments([(0, 5, True, 0), (5, 6, True, 1)], 2, "cpu")
