"""Training against an implementation that shares no code with it: models of transformers, optimizers written here.

Layouts that agree with each other may all be wrong. Here gradients come from autograd through a model of the
transformers library, and AdamW, LAMB and Muon are plain float64 formulas over logical tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megascale.parallel.parameters import get_spec, list_piece_views
from megascale.train.engine import Engine
from tests.exact.training import STEPS, RankReport, make_engine, run_step, tokens
from tests.model.huggingface import transformers

LAYERS = 2
HIDDEN = 16
HEADS = 4
LENGTH = 8
VOCABULARY = 32
PEAK = 1e-2
WARMUP = 2
DECAY_STEPS = 6
BETA1 = 0.9
BETA2 = 0.95
EPS = 1e-6
DECAY = 0.3
CLIP_BELOW, CLIP_ABOVE = 0.05, 1000.0  # below and above the gradient norm of every step

Tensors = dict[str, torch.Tensor]


def settings(optimizer: str, clip: float, **model: Any) -> dict[str, Any]:
    """Return a configuration of two micro-batches per step in one process."""
    return {
        "model": {
            "layers": LAYERS,
            "hidden": HIDDEN,
            "heads": HEADS,
            "sequence_length": LENGTH,
            "vocab_size": VOCABULARY,
            "vocab_multiple": 8,
            "init_std": 0.2,
            **model,
        },
        "optimizer": {
            "name": optimizer,
            "clip": clip,
            "beta1": BETA1,
            "beta2": BETA2,
            "eps": EPS,
            "weight_decay": DECAY,
        },
        "lr": {"peak": PEAK, "warmup_steps": WARMUP, "decay_steps": DECAY_STEPS},
        "train": {"micro_batch": 2, "global_batch": 4, "precision": "float64"},
    }


GPT2 = {"norm": "layernorm", "activation": "gelu_tanh", "positions": "learned", "ffn_hidden": 40}
LLAMA = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "kv_heads": 2,
    "ffn_hidden": 40,
    "attention_bias": False,
    "mlp_bias": False,
    "tied_embeddings": False,
}


def make_gpt2(tied: bool) -> Any:
    """Return a GPT-2 of transformers in float64."""
    config = transformers.GPT2Config(
        n_embd=HIDDEN,
        n_head=HEADS,
        n_layer=LAYERS,
        n_positions=LENGTH,
        n_inner=40,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return transformers.GPT2LMHeadModel(config).double()


def make_llama() -> Any:
    """Return a Llama of transformers; its norms and rotary angles are computed in float32 whatever its type."""
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        num_hidden_layers=LAYERS,
        intermediate_size=40,
        max_position_embeddings=LENGTH,
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).double()


def gpt2_tensors(model: Any, read: Callable[[torch.Tensor], torch.Tensor], width: int = HIDDEN) -> Tensors:
    """Return views of `read(parameter)` by logical name. GPT-2 stores its matrices transposed, and three in one."""
    body = model.transformer
    tensors = {"embedding.token.weight": read(body.wte.weight), "embedding.position.weight": read(body.wpe.weight)}
    for number, block in enumerate(body.h):
        layer = f"layers.{number}"
        for name, norm in (("norm1", block.ln_1), ("norm2", block.ln_2)):
            tensors |= {f"{layer}.{name}.weight": read(norm.weight), f"{layer}.{name}.bias": read(norm.bias)}
        weights = read(block.attn.c_attn.weight).t().split(width)
        biases = read(block.attn.c_attn.bias).split(width)
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            tensors |= {f"{layer}.attention.{name}.weight": weight, f"{layer}.attention.{name}.bias": bias}
        for name, linear in (
            ("attention.output", block.attn.c_proj),
            ("mlp.in", block.mlp.c_fc),
            ("mlp.out", block.mlp.c_proj),
        ):
            tensors |= {f"{layer}.{name}.weight": read(linear.weight).t(), f"{layer}.{name}.bias": read(linear.bias)}
    tensors |= {"norm.weight": read(body.ln_f.weight), "norm.bias": read(body.ln_f.bias)}
    if not model.config.tie_word_embeddings:
        tensors["head.weight"] = read(model.lm_head.weight)
    return tensors


def llama_tensors(model: Any, read: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    """Return `read(parameter)` by logical name."""
    tensors = {"embedding.token.weight": read(model.model.embed_tokens.weight)}
    for number, block in enumerate(model.model.layers):
        layer = f"layers.{number}"
        tensors |= {
            f"{layer}.norm1.weight": read(block.input_layernorm.weight),
            f"{layer}.norm2.weight": read(block.post_attention_layernorm.weight),
            f"{layer}.attention.query.weight": read(block.self_attn.q_proj.weight),
            f"{layer}.attention.key.weight": read(block.self_attn.k_proj.weight),
            f"{layer}.attention.value.weight": read(block.self_attn.v_proj.weight),
            f"{layer}.attention.output.weight": read(block.self_attn.o_proj.weight),
            f"{layer}.mlp.gate.weight": read(block.mlp.gate_proj.weight),
            f"{layer}.mlp.in.weight": read(block.mlp.up_proj.weight),
            f"{layer}.mlp.out.weight": read(block.mlp.down_proj.weight),
        }
    return tensors | {"norm.weight": read(model.model.norm.weight), "head.weight": read(model.lm_head.weight)}


def adamw_update(state: Tensors, gradient: torch.Tensor, step: int) -> torch.Tensor:
    """Return the direction of Adam with bias correction, and keep the moments in `state`."""
    state["m"] = BETA1 * state.get("m", torch.zeros_like(gradient)) + (1 - BETA1) * gradient
    state["v"] = BETA2 * state.get("v", torch.zeros_like(gradient)) + (1 - BETA2) * gradient**2
    return (state["m"] / (1 - BETA1**step)) / ((state["v"] / (1 - BETA2**step)).sqrt() + EPS)


def muon_update(state: Tensors, gradient: torch.Tensor) -> torch.Tensor:
    """Return the orthogonalised Nesterov momentum, scaled to the RMS of 0.2 of an AdamW update."""
    state["momentum"] = 0.95 * state.get("momentum", torch.zeros_like(gradient)) + gradient
    direction = gradient + 0.95 * state["momentum"]
    x = direction / (direction.norm() + 1e-7)
    for _ in range(5):
        # For a tall matrix x (x^T x) = (x x^T) x, so that no transposition is needed.
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x * 0.2 * math.sqrt(max(x.shape))


def update(optimizer: str, name: str, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors, step: int) -> None:
    """Update one logical tensor in place. Only matrices decay, embeddings and the head among them."""
    rate = PEAK * step / WARMUP
    if step > WARMUP:
        rate = PEAK * (1 + math.cos(math.pi * (step - WARMUP) / (DECAY_STEPS - WARMUP))) / 2
    decay = DECAY if weight.dim() == 2 else 0.0
    if optimizer == "muon" and weight.dim() == 2 and name.startswith("layers."):
        direction = muon_update(state, gradient) + decay * weight
    else:
        direction = adamw_update(state, gradient, step) + decay * weight
        if optimizer == "lamb" and weight.dim() == 2:
            direction = direction * (weight.norm() / direction.norm())
    weight.sub_(rate * direction)


def train_plainly(model: Any, tensors: Any, engine: Engine, optimizer: str, clip: float) -> tuple[RankReport, Tensors]:
    """Train the model of transformers on the samples of `run_step`; return losses, norms and the last weights."""
    report, states = RankReport(), {}
    train = engine.config.train
    for step in range(1, STEPS + 1):
        rows = torch.stack([torch.from_numpy(tokens(engine.config, step, i)) for i in range(train.global_batch)])
        model.zero_grad()
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        gradients = tensors(model, lambda parameter: parameter.grad)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        scale = clip / (norm + 1e-6) if clip and norm > clip else 1.0
        with torch.no_grad():
            for name, weight in tensors(model, lambda parameter: parameter.data).items():
                update(optimizer, name, weight, gradients[name] * scale, states.setdefault(name, {}), step)
        report.losses.append(loss.item())
        report.norms.append(norm)
    return report, tensors(model, lambda parameter: parameter.data)


def logical_weights(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (logical name, view of the weight in use)."""
    for chunk in engine.chunks:
        for parameter in chunk.parameters():
            for piece, view in list_piece_views(get_spec(parameter), parameter.data):
                yield piece.name, view


def compare(tree: dict[str, Any], model: Any, tensors: Any, clip: float, tolerance: float) -> RankReport:
    """Train both from the same weights; losses, norms and weights must agree to `tolerance`, relatively."""
    engine = make_engine(0, 1, tree)
    theirs = tensors(model, lambda parameter: parameter.data)
    assert {name for name, _ in logical_weights(engine)} == set(theirs)
    for name, weight in logical_weights(engine):
        theirs[name].copy_(weight)
    expected, expected_weights = train_plainly(model, tensors, engine, tree["optimizer"]["name"], clip)
    report = RankReport()
    for step in range(1, STEPS + 1):
        run_step(engine, step, report)
    assert report.losses == pytest.approx(expected.losses, rel=tolerance)
    assert report.norms == pytest.approx(expected.norms, rel=tolerance)
    for name, weight in logical_weights(engine):
        # A bias of keys stays near zero: its gradient is rounding alone.
        difference = (weight - expected_weights[name]).norm() / expected_weights[name].norm().clamp(min=PEAK)
        assert difference < tolerance, f"{name}: {difference:.1e}"
    return report


@pytest.mark.parametrize("clip", [0.0, CLIP_BELOW, CLIP_ABOVE])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon"])
def test_gpt2_with_an_untied_head(optimizer, clip):
    """The head decays as every matrix does, and gradients below the clip keep their size."""
    tree = settings(optimizer, clip, **GPT2, tied_embeddings=False)
    report = compare(tree, make_gpt2(tied=False), gpt2_tensors, clip, 1e-9)
    assert CLIP_BELOW < min(report.norms) < max(report.norms) < CLIP_ABOVE


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon"])
def test_gpt2_with_tied_embeddings(optimizer):
    """Two operators contribute to the gradient of the tied embedding, in each of two micro-batches."""
    compare(settings(optimizer, CLIP_BELOW, **GPT2), make_gpt2(tied=True), gpt2_tensors, CLIP_BELOW, 1e-9)


def test_llama():
    compare(settings("adamw", CLIP_ABOVE, **LLAMA), make_llama(), llama_tensors, CLIP_ABOVE, 1e-5)


def test_first_values_are_those_of_gpt2():
    """Matrices that add to the residual stream begin smaller, by the depth; norms begin at one, biases at zero."""
    depth, width = 8, 48
    tree = settings("adamw", 0.0, **GPT2 | {"layers": depth, "hidden": width, "ffn_hidden": 2 * width})
    tree["model"] |= {"init_std": 0.03, "tied_embeddings": False, "vocab_size": 96}
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=width,
        n_head=HEADS,
        n_layer=depth,
        n_positions=LENGTH,
        n_inner=2 * width,
        vocab_size=96,
        initializer_range=0.03,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    theirs = gpt2_tensors(transformers.GPT2LMHeadModel(config), lambda parameter: parameter.data, width)
    observed: list[torch.Tensor] = []
    for name, weight in logical_weights(make_engine(0, 1, tree)):
        if weight.dim() == 1:
            assert torch.equal(weight, theirs[name].double()), name
            continue
        error = 1 / math.sqrt(2 * weight.numel())  # relative standard error of an estimated standard deviation
        assert float(weight.std()) == pytest.approx(float(theirs[name].std()), rel=6 * error), name
        assert abs(float(weight.mean())) < 5 * float(weight.std()) / math.sqrt(weight.numel()), name
        outside = float((weight.abs() > 2 * weight.std()).double().mean())
        assert outside == pytest.approx(0.0455, abs=5 * math.sqrt(0.0455 / weight.numel())), f"{name} is not normal"
        assert not any(torch.equal(weight, peer) for peer in observed if peer.shape == weight.shape), name
        observed.append(weight)
