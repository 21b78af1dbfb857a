"""Models of Hugging Face families against `transformers` itself: logits both ways, odd sizes, what is refused."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megascale import config
from megascale.core.flops import count_parameters
from megascale.core.inventory import logical_shapes
from megascale.core.untrusted_files import LFS_POINTER
from megascale.errors import ConfigError, DataError
from megascale.model.huggingface.export import logical_shapes_with_biases, make_config, write_folder
from megascale.model.huggingface.families import FAMILIES, choose_family
from megascale.model.huggingface.family import (
    StoredWeight,
    join_weight,
    list_linear_weights,
    split_weight,
)
from megascale.model.huggingface.import_model import read_folder
from megascale.model.huggingface.rotary import compute_rotary_fraction
from megascale.parallel.parameters import get_spec
from tests.chaos.soak.huggingface import case
from tests.model.huggingface import CLOSE, CONFIGS, chunk_of, difference, load, small, transformers


def both_ways(theirs, folder: Path) -> None:
    """Their model read here gives their logits, and written again and loaded there gives them once more."""
    theirs.save_pretrained(folder / "theirs")
    result = read_folder(folder / "theirs")
    chunk = chunk_of(result.model, result.tensors)
    assert difference(chunk, theirs) < CLOSE
    write_folder(
        folder / "ours",
        result.family,
        result.model,
        lambda names: {name: result.tensors[name] for name in names},
        dtype=torch.float32,
        file_bytes=20_000,
    )
    assert len(list((folder / "ours").glob("*.safetensors"))) > 1
    assert difference(chunk, load(folder / "ours")) < CLOSE
    repeated = read_folder(folder / "ours").tensors
    assert all(torch.equal(repeated[name], tensor) for name, tensor in result.tensors.items())


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_transformers_both_ways(family, tied, tmp_path):
    both_ways(small(family, tie_word_embeddings=tied), tmp_path)


SETTINGS = {
    "gpt2": [
        {"activation_function": "gelu"},
        {"activation_function": "gelu_pytorch_tanh", "n_inner": None, "layer_norm_epsilon": 1e-3},
        {"n_head": 1},
    ],
    "gptj": [{"rotary_dim": 14}, {"rotary_dim": 2, "n_head": 6, "n_embd": 42, "activation_function": "gelu"}],
    "gpt_neox": [
        {"use_parallel_residual": False},
        {"attention_bias": False, "hidden_act": "gelu_new"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.61}},
    ],
    "llama": [
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1, "head_dim": None, "rms_norm_eps": 1e-3},
        {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ],
    "mistral": [
        {"attention_bias": False, "mlp_bias": False},
        {"sliding_window": None},
        {"sliding_window": 1},
        {"sliding_window": 64, "hidden_size": 26},
    ],
    "qwen2": [
        {"use_sliding_window": False, "layer_types": ["full_attention"] * 2},
        {"layer_types": ["sliding_attention"] * 2},
        {"layer_types": None, "sliding_window": None},
        {"layer_types": None, "max_window_layers": 1},
        {"head_dim": 10},
    ],
    "qwen3": [
        {"use_sliding_window": False, "layer_types": ["full_attention"] * 2},
        {"attention_bias": True, "layer_types": None, "max_window_layers": 1},
    ],
    "mixtral": [{"sliding_window": None, "num_experts_per_tok": 1}, {"num_local_experts": 1, "num_experts_per_tok": 1}],
    "qwen3_moe": [
        {"norm_topk_prob": True, "mlp_only_layers": [], "attention_bias": True},
        {"use_sliding_window": True, "sliding_window": 4, "mlp_only_layers": [0, 1]},
    ],
    "smollm3": [
        {"no_rope_layers": None, "layer_types": None, "use_sliding_window": False},
        {"no_rope_layers": None, "no_rope_layer_interval": 2, "layer_types": None},
        {"no_rope_layers": [0, 0, 0, 0], "layer_types": None},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 10},
    ],
}


@pytest.mark.parametrize(("family", "changes"), [(f, c) for f, changes in SETTINGS.items() for c in changes])
def test_settings_of_a_family_mean_the_same_here(family, changes, tmp_path):
    both_ways(small(family, **changes), tmp_path)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_size_of_llama(data):
    groups = data.draw(st.sampled_from([1, 2, 3]))
    heads = groups * data.draw(st.integers(1, 3))
    changes = {
        "hidden_size": heads * data.draw(st.integers(1, 9)),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": 2 * data.draw(st.integers(1, 7)),
        "intermediate_size": data.draw(st.integers(1, 50)),
        "num_hidden_layers": data.draw(st.integers(1, 3)),
        "tie_word_embeddings": data.draw(st.booleans()),
    }
    with tempfile.TemporaryDirectory() as folder:
        both_ways_of_any_size(small("llama", **changes), Path(folder))


def both_ways_of_any_size(theirs, folder: Path) -> None:
    theirs.save_pretrained(folder / "theirs")
    result = read_folder(folder / "theirs")
    chunk = chunk_of(result.model, result.tensors)
    write_folder(
        folder / "ours", result.family, result.model, lambda _: result.tensors, dtype=torch.float32, file_bytes=1 << 30
    )
    repeated = load(folder / "ours")
    assert all(torch.equal(p, q) for p, q in zip(theirs.parameters(), repeated.parameters(), strict=True))
    with torch.no_grad():
        tokens = torch.arange(20).reshape(2, 10)
        ours = chunk.compute_logits(chunk(tokens.t())).transpose(0, 1)
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-4, atol=CLOSE)


@pytest.mark.parametrize("from_theirs", [True, False])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_model_gives_the_same_logits_or_names_the_key(from_theirs, data):
    """Over all families, what is drawn has the outcome that belongs to it; see
    tests.chaos.soak.huggingface_cases."""
    with tempfile.TemporaryDirectory() as folder:
        result = case(transformers, lambda values: data.draw(st.sampled_from(list(values))), from_theirs, Path(folder))
    assert result.held, f"{result.name}: {result.outcome}"


# models of ours, exported ------------------------------------------------------------------------------------------

SMALL = ["hidden=24", "layers=3", "heads=4", "sequence_length=32", "vocab_size=101", "vocab_multiple=8"]
LLAMA = ["norm=rmsnorm", "activation=swiglu", "positions=rotary", "ffn_hidden=37", "attention_bias=false"]
LLAMA += ["mlp_bias=false"]
LLAMA_QKV_BIAS = LLAMA + ["attention_bias=true", "attention_out_bias=false"]
COHERE = LLAMA + ["block=parallel", "norm=layernorm_no_bias", "rotary_interleaved=true"]
GEMMA = LLAMA + ["norm=rmsnorm_zero_centred", "norm_placement=both", "activation=geglu_tanh", "head_dim=10"]
GEMMA += [f"embedding_multiplier={24**0.5!r}", "kv_heads=2"]
OURS = {
    "gpt2": [],
    "gpt2 without biases": ["attention_bias=false", "mlp_bias=false", "tied_embeddings=false"],
    "gptj": ["block=parallel", "positions=rotary", "rotary_interleaved=true", "attention_bias=false"],
    "gptj untied": [
        "block=parallel",
        "positions=rotary",
        "rotary_interleaved=true",
        "rotary_fraction=0.7",
        "attention_bias=false",
        "mlp_bias=false",
        "tied_embeddings=false",
        "head_bias=true",
        "activation=gelu_tanh",
    ],
    "gpt_neox": ["block=parallel", "parallel_norms=2", "positions=rotary", "rotary_fraction=0.4"],
    "gpt_neox of the paper's block": ["block=parallel", "positions=rotary", "attention_out_bias=false"],
    "gpt_neox serial": ["positions=rotary", "attention_bias=false", "mlp_bias=false"],
    "llama": LLAMA + ["kv_heads=2", "head_dim=10"],
    "seed_oss with some biases": LLAMA + ["attention_out_bias=true", "mlp_bias=true", "tied_embeddings=false"],
    "mistral of a window as long as its samples": LLAMA + ["window=32"],
    "mistral of a wide window": LLAMA + ["window=40"],
    "gpt2 of a window beyond its positions": ["window=32"],
    "mistral": LLAMA + ["kv_heads=2", "window=5", "head_dim=10"],
    "qwen2": LLAMA_QKV_BIAS + ["kv_heads=1", "window=5", "layer_pattern=SL"],
    "qwen2 with heads of its own size": LLAMA_QKV_BIAS + ["window=5", "layer_pattern=LS", "head_dim=10"],
    "ministral": LLAMA + ["kv_heads=1", "window=5", "layer_pattern=SL"],
    "ministral with heads of its own size": LLAMA + ["window=5", "layer_pattern=LS", "head_dim=10"],
    "cohere": COHERE + ["kv_heads=2", "logit_multiplier=0.7"],
    "cohere2": COHERE
    + ["window=5", "layer_pattern=SSN", "layer_kinds.N.positions=none", "layer_kinds.N.window=0"]
    + ["logit_multiplier=0.7"],
    "granite": LLAMA
    + ["embedding_multiplier=3", "residual_multiplier=0.4", "attention_multiplier=0.3", "logit_multiplier=0.3"],
    "granite with one multiplier": LLAMA + ["residual_multiplier=0.4", "tied_embeddings=false"],
    "olmo3": LLAMA
    + ["qk_norm=projection", "norm_placement=post", "kv_heads=2", "window=5", "layer_pattern=SGS", "rotary_base=50"]
    + ["layer_kinds.G.window=0", "layer_kinds.G.rotary_scaling.method=yarn", "layer_kinds.G.rotary_scaling.factor=4"]
    + ["layer_kinds.G.rotary_scaling.original_length=16"],
    "olmo3 of full attention": LLAMA + ["qk_norm=projection", "norm_placement=post", "window=5", "layer_pattern=SL"],
    "gemma2": GEMMA
    + ["attention_softcap=2", "logit_softcap=3", f"attention_multiplier={7**-0.5!r}", "window=5", "layer_pattern=SL"],
    "gemma2 without softcaps": GEMMA,
    "gemma3_text": GEMMA
    + ["qk_norm=head", "window=5", "layer_pattern=SSG", "layer_kinds.G.window=0", "layer_kinds.G.rotary_base=500"]
    + ["logit_softcap=3", "rotary_scaling.method=linear", "rotary_scaling.factor=2"]
    + ["layer_kinds.G.rotary_scaling.method=none"],
    "phi3 of a part of each head": LLAMA + ["rotary_fraction=0.67", "window=5", "kv_heads=2"],
    "phi3": LLAMA
    + ["rotary_scaling.method=longrope", "rotary_scaling.original_length=16", "rotary_base=50"]
    + ["rotary_scaling.short_factors=[1,1.5,2]", "rotary_scaling.long_factors=[2,4,8]"]
    + ["rotary_scaling.attention_factor=1.2"],
    "qwen3": LLAMA + ["qk_norm=head", "kv_heads=2", "head_dim=10", "window=5", "layer_pattern=SL"],
    "smollm3": LLAMA + ["layers=3", "layer_pattern=SNN", "layer_kinds.N.positions=none", "kv_heads=2"],
    "smollm3 with windows": LLAMA
    + [
        "layers=4",
        "window=5",
        "layer_pattern=SNGL",
        "layer_kinds.N.positions=none",
        "layer_kinds.G.positions=none",
        "layer_kinds.G.window=0",
        "head_dim=10",
    ],
    "llama with scaled positions": LLAMA
    + ["rotary_scaling.method=llama3", "rotary_scaling.factor=4", "rotary_scaling.original_length=16"]
    + ["rotary_scaling.low_frequency_factor=1", "rotary_scaling.high_frequency_factor=4", "rotary_base=50"],
    "mistral with scaled positions": LLAMA
    + ["rotary_scaling.method=yarn", "rotary_scaling.factor=4", "rotary_scaling.original_length=16", "window=5"],
    "olmo2": LLAMA + ["qk_norm=projection", "norm_placement=post", "kv_heads=2", "head_dim=10"],
    "seed_oss": LLAMA + ["attention_bias=true", "attention_out_bias=false", "hidden=26", "head_dim=10"],
    "qwen2 with its biases": LLAMA_QKV_BIAS,
}


def ours(*keys: str) -> tuple[config.ModelConfig, dict[str, torch.Tensor]]:
    """A random model of ours."""
    model = config.load(None, [f"--model.{key}" for key in tuple(SMALL) + tuple(keys)]).model
    generator = torch.Generator().manual_seed(2)
    tensors = {n: torch.empty(s).normal_(0, 0.3, generator=generator) for n, s in logical_shapes(model).items()}
    return model, tensors


@pytest.mark.parametrize("name", OURS)
def test_an_exported_model_gives_our_logits(name, tmp_path):
    model, tensors = ours(*OURS[name])
    family = choose_family(model)
    assert family.name == name.split()[0]
    write_folder(tmp_path / "out", family, model, lambda _: tensors, dtype=torch.float32, file_bytes=1 << 30)
    chunk = chunk_of(model, tensors)
    # Rotary positions (but GPT-J's) go further than the samples of the training, and a window is then felt.
    length = 24 if family.name in ("gpt2", "gptj") else 60
    assert difference(chunk, load(tmp_path / "out"), length) < CLOSE
    result = read_folder(tmp_path / "out")
    assert difference(chunk_of(result.model, result.tensors), load(tmp_path / "out"), length) < CLOSE


@pytest.mark.parametrize("name", OURS)
def test_the_list_of_logical_tensors_is_the_models(name):
    model, tensors = ours(*OURS[name])
    pieces = [piece for p in chunk_of(model, tensors).parameters() for piece in get_spec(p).pieces]
    assert {piece.name: piece.shape for piece in pieces} == logical_shapes(model)


@pytest.mark.parametrize(
    ("keys", "family", "named"),
    [
        (["block=parallel"], "gpt2", ["model.block='parallel'"]),
        (["block=parallel"], None, ["gpt2", "model.block='parallel'"]),
        (["positions=rotary"], "gpt2", ["model.positions='rotary'", "gpt_neox"]),
        (["window=4"], "gpt2", ["model.window=4"]),
        (["head_bias=true"], "gpt2", ["model.head_bias=True"]),
        (["kv_heads=2"], "gpt2", ["model.kv_heads=2"]),
        (["head_dim=8"], "gpt2", ["model.head_dim=8"]),
        (["block=parallel", "positions=rotary"], "gptj", ["rotary_interleaved=False", "attention_bias=True"]),
        (["block=parallel", "positions=rotary", "rotary_base=500"], "gptj", ["rotary_base=500.0"]),
        (LLAMA + ["norm_placement=post"], "llama", ["norm_placement='post'"]),
        (LLAMA + ["norm_placement=both"], "olmo2", ["norm_placement='both'", "qk_norm='none'"]),
        (LLAMA + ["rotary_fraction=0.7"], "llama", ["rotary_fraction=0.7"]),
        (LLAMA + ["window=4"], "llama", ["model.window=4", "mistral"]),
        (LLAMA + ["window=64"], "llama", ["model.window=64", "mistral"]),
        (["positions=rotary", "window=64"], "gpt_neox", ["model.window=64"]),
        (LLAMA + ["window=4", "layer_pattern=SL"], "mistral", ["layer_pattern='SL'", "qwen2"]),
        (LLAMA + ["attention_bias=true"], "mistral", ["attention_bias=True", "llama"]),
        (["positions=none"], None, ["model.positions='none'"]),
        (
            LLAMA + ["layer_pattern=SA", "layer_kinds.A.rotary_base=500"],
            None,
            ["model.layer_kinds.A={'rotary_base': 500.0}"],
        ),
        (LLAMA + ["layer_pattern=A", "layer_kinds.A.window=3"], "mistral", ["model.layer_kinds.A={'window': 3}"]),
        (LLAMA + ["layer_pattern=SN", "layer_kinds.N.positions=none"], "llama", ["model.layer_kinds.N", "smollm3"]),
        (LLAMA + ["logit_softcap=5"], "llama", ["model.logit_softcap=5.0"]),
        (LLAMA + ["attention_multiplier=0.3"], "llama", ["model.attention_multiplier=0.3", "granite"]),
        (GEMMA + ["attention_multiplier=0.4"], "gemma2", ["model.attention_multiplier=0.4", "query_pre_attn_scalar"]),
        (GEMMA + ["embedding_multiplier=3"], "gemma2", ["model.embedding_multiplier=3.0", "4.89"]),
        (GEMMA + ["qk_norm=head", "attention_softcap=5"], "gemma3_text", ["model.attention_softcap=5.0"]),
        (
            COHERE + ["window=5", "layer_pattern=SL"],
            "cohere2",
            ["layer_pattern='SL'", "exactly in layers with a window"],
        ),
        (
            GEMMA + ["qk_norm=head", "window=5", "layer_pattern=SA", "layer_kinds.A.rotary_base=5"],
            "gemma3_text",
            ["equal windows other positions"],
        ),
        (LLAMA + ["attention_gate=true"], None, ["model.attention_gate=True"]),
        (LLAMA + ["attention_sinks=true"], "llama", ["model.attention_sinks=True"]),
        (
            LLAMA + ["attention_sinks=true", "activation=swiglu_clamped", "mlp=experts"],
            "gpt_oss",
            ["model.experts.biases=False, and gpt-oss only has True"],
        ),
        ([], "bert", ["bert", "gpt2"]),
    ],
)
def test_what_cannot_be_exported_names_the_keys(keys, family, named):
    model, _ = ours(*keys)
    with pytest.raises(ConfigError) as error:
        choose_family(model, family)
    for part in named:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("preset", "family", "count"),
    [
        ("gpt2-124m", "gpt2", 124_439_808),
        ("gpt2-350m", "gpt2", 354_823_168),
        ("gpt-1.3b", "gpt2", None),
        ("gpt-13b", "gpt2", None),
        ("llama-8b", "llama", 8_030_261_248),
        ("mixtral-8x7b", "mixtral", 46_702_792_704),
        ("qwen3-30b-a3b", "qwen3_moe", 30_532_122_624),
        ("gpt-oss-20b", "gpt_oss", 20_914_757_184),
        ("llama3.1-8b", "llama", 8_030_261_248),
        ("llama3.1-70b", "llama", None),
        ("llama3.1-405b", "llama", None),
        ("qwen3-0.6b", "qwen3", None),
        ("qwen3-1.7b", "qwen3", None),
        ("qwen3-4b", "qwen3", None),
        ("qwen3-8b", "qwen3", None),
        ("qwen3-14b", "qwen3", None),
        ("qwen3-32b", "qwen3", None),
        ("olmo2-7b", "olmo2", None),
        ("olmo2-13b", "olmo2", None),
        ("olmo2-32b", "olmo2", None),
        ("seed-oss-36b", "qwen2", None),
    ],
)
def test_a_preset_is_the_published_model(preset, family, count):
    model = config.load(None, [f"--model.preset={preset}"]).model
    written = make_config(choose_family(model), model, torch.float32, {})
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**written))
    assert choose_family(model).name == family
    assert count_parameters(model) == sum(p.numel() for p in theirs.parameters())
    assert count is None or count_parameters(model) == count


# tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CONFIGS)
def test_splitting_and_joining_are_inverse(family, tmp_path):
    theirs = small(family)
    theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    model = read_folder(tmp_path).model
    shapes = logical_shapes_with_biases(model)
    for weight in FAMILIES[family].list_weights(model):
        parts = split_weight(weight, stored[weight.name])
        entry_shapes = {name: shapes[name][len(weight.stack_index) :] for name in weight.logical_names}
        assert {name: tuple(t.shape) for name, t in parts.items()} == entry_shapes
        if weight.stack_index:
            stack = torch.zeros(shapes[weight.logical_names[0]])
            stack[weight.stack_index] = parts[weight.logical_names[0]]
            parts = {weight.logical_names[0]: stack}
        assert torch.equal(join_weight(weight, parts), stored[weight.name])


def test_interleaved_heads_by_hand():
    """Two heads of size 1 in GPT-NeoX: rows are q0 k0 v0 q1 k1 v1."""
    weight = list_linear_weights("qkv", "q", "k", "v", interleaved_heads=2)[0]
    parts = split_weight(weight, torch.arange(6.0)[:, None])
    assert {name: t[:, 0].tolist() for name, t in parts.items()} == {
        "q.weight": [0, 3],
        "k.weight": [1, 4],
        "v.weight": [2, 5],
    }


def test_a_transposed_stack_by_hand():
    weight = StoredWeight("c", ("q", "k"), is_transposed=True)
    parts = split_weight(weight, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert parts["q"].tolist() == [[1, 3]]
    assert parts["k"].tolist() == [[2, 4]]


@given(st.integers(1, 512).flatmap(lambda size: st.tuples(st.integers(1, size), st.just(size))))
def test_a_fraction_gives_its_width_back(pair):
    width, size = pair
    assert int(compute_rotary_fraction(width, size) * size) == width


# what is refused ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One saved model a family."""
    folder = tmp_path_factory.mktemp("saved")
    for family in CONFIGS:
        small(family).save_pretrained(folder / family)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """Gives a copy of a family's folder with changed settings."""

    def make(family: str, **changes: object) -> Path:
        folder = tmp_path / family
        shutil.copytree(saved / family, folder)
        values = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(values))
        return folder

    return make


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["rope_parameters.rope_type='llama3'"]),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, ["rope_scaling.rope_type='dynamic'"]),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2, "beta": 1}}, ["rope_parameters.beta=1"]),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, ["rope_parameters=", "rope_scaling gives"]),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_parameters=", "rope_scaling gives"]),
        ("mistral", {"rope_scaling": {"type": "default", "rope_theta": 5.0}}, ["rope_parameters.rope_theta=10000"]),
        ("llama", {"rope_theta": 5.0}, ["rope_theta=5.0", "rope_parameters", "10000"]),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters", "layers"]),
        ("llama", {"rope_parameters": [1]}, ["rope_parameters=[1]"]),
        ("gpt_neox", {"rope_parameters": None, "rope_theta": 5.0}, ["rope_theta=5.0", "10000"]),
        ("gpt_neox", {"rotary_pct": 0.5}, ["rotary_pct=0.5", "0.25"]),
        ("gpt_neox", {"head_dim": 4}, ["head_dim=4"]),
        ("qwen2", {"use_sliding_window": False}, ["layer_types", "no window"]),
        ("qwen2", {"sliding_window": None}, ["layer_types", "no window"]),
        ("qwen2", {"layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers is 2"]),
        ("gpt2", {"num_hidden_layers": 3}, ["num_hidden_layers=3", "n_layer=2"]),
        ("gpt2", {"n_embd": "many"}, ["n_embd='many'"]),
        ("gptj", {"n_head": 0}, ["n_head=0"]),
        ("llama", {"rope_parameters": {"rope_theta": "wide"}}, ["must be a number", "wide"]),
        ("llama", {"is_causal": False}, ["is_causal=False"]),
        ("mistral", {"per_layer_config": {"0": {"sliding_window": 2}}}, ["per_layer_config"]),
        ("llama", {"hidden_act": "relu"}, ["hidden_act='relu'", "silu"]),
        ("llama", {"quantization_config": {"bits": 4}}, ["quantization_config"]),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4"}},
            ["quantization_config", "MXFP4", "Mxfp4Config(dequantize=True)"],
        ),
        ("gpt_oss", {"swiglu_limit": 5.0}, ["swiglu_limit=5.0", "swiglu_limit=7.0"]),
        ("gpt_oss", {"rope_parameters": None}, ["rope_parameters=None", "factor 32"]),
        ("gpt_oss", {"experts_per_token": 2}, ["experts_per_token=2", "num_experts_per_tok=3"]),
        ("llama", {"model_type": "mamba"}, ["model_type='mamba'", "llama"]),
        ("llama", {"hidden_size": None}, ["hidden_size"]),
        ("llama", {"attention_bias": True}, ["q_proj.bias", "missing"]),
        ("llama", {"intermediate_size": 40}, ["mlp.gate_proj.weight", "[37, 24]", "[40, 24]"]),
        ("llama", {"num_hidden_layers": 1}, ["model.layers.1.", "does not have"]),
        ("llama", {"num_hidden_layers": 3}, ["has no model.layers.2.", "take the config.json that belongs"]),
        ("llama", {"tie_word_embeddings": True}, ["tie_word_embeddings", "lm_head.weight"]),
        ("gpt2", {"tie_word_embeddings": False}, ["has no lm_head.weight", "set tie_word_embeddings to true"]),
        ("llama", {"num_attention_heads": 5}, ["model.heads=5", "kv_heads"]),
        ("gpt2", {"activation_function": "quick_gelu"}, ["activation_function='quick_gelu'"]),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx=True"]),
        ("gpt2", {"scale_attn_weights": False}, ["scale_attn_weights=False"]),
        ("gpt2", {"add_cross_attention": True}, ["add_cross_attention=True"]),
        ("gptj", {"rotary_dim": None}, ["rotary_dim"]),
        ("gpt_neox", {"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic"}}, ["rope_scaling.rope_type"]),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, ["layer_types='chunked_attention'"]),
    ],
)
def test_a_setting_without_a_counterpart_is_named(copy, family, changes, named):
    with pytest.raises(DataError) as error:
        read_folder(copy(family, **changes))
    for part in named:
        assert part in str(error.value)


def test_pickles_are_never_opened(copy):
    folder = copy("gpt2")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"whatever")
    with pytest.raises(DataError, match=r"pickle.*save_pretrained"):
        read_folder(folder)


def test_damaged_and_missing_files_are_named(copy, tmp_path):
    with pytest.raises(DataError, match=r"config\.json does not exist"):
        read_folder(tmp_path / "nowhere")
    folder = copy("gpt2")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read"):
        read_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="neither"):
        read_folder(folder)
    index = {"weight_map": {"transformer.wte.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="not in the folder itself"):
        read_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(DataError, match="not a JSON object"):
        read_folder(folder)


def add_shards(folder: Path, tensors: dict[str, torch.Tensor], files: int = 2) -> None:
    """Write a second set of weights: `files` shards and their index."""
    names = sorted(tensors)
    locations = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(locations.values()):
        save_file({n: tensors[n] for n in names if locations[n] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": locations}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_of_two_sets_of_weights_the_one_that_transformers_loads_counts(copy, family):
    folder = copy(family)
    add_shards(folder, {n: t + 1 for n, t in load_file(folder / "model.safetensors").items()})
    result = read_folder(folder)
    assert difference(chunk_of(result.model, result.tensors), load(folder)) < CLOSE
    assert any("model.safetensors.index.json" in note for note in result.notes)
    (folder / "model.safetensors").unlink()
    result = read_folder(folder)
    assert difference(chunk_of(result.model, result.tensors), load(folder)) < CLOSE
    assert not any("index.json" in note for note in result.notes)


def test_a_tensor_that_lies_in_a_folder_twice_is_refused(copy):
    folder = copy("gpt2")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"ln_f.weight": tensors["transformer.ln_f.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"transformer\.ln_f\.weight twice, as .*ln_f\.weight in model\.safetensors"):
        read_folder(folder)
    (folder / "model.safetensors").unlink()
    add_shards(folder, tensors)
    first = load_file(folder / "model-00001-of-00002.safetensors")
    second = load_file(folder / "model-00002-of-00002.safetensors")
    name = next(iter(first))
    save_file(second | {name: first[name] + 1}, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=f"{name} twice, as {name} in model-00001.* and as {name} in model-00002"):
        read_folder(folder)


def test_weights_that_transformers_would_take_from_elsewhere_are_refused(copy):
    with pytest.raises(DataError, match=r"transformers_weights='other\.safetensors'"):
        read_folder(copy("gpt2", transformers_weights="other.safetensors"))
    folder = copy("llama")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"adapter_config\.json.*merge_and_unload"):
        read_folder(folder)


def test_integers_are_no_weights(copy):
    folder = copy("gpt2")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DataError, match="int8"):
        read_folder(folder)


# files of other versions -------------------------------------------------------------------------------------------


def test_files_without_the_prefix_and_with_buffers_are_read(copy):
    """The published GPT-2 has such files."""
    folder = copy("gpt2")
    expected = dict(read_folder(folder).tensors)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare |= {f"h.{i}.attn.{name}": torch.ones(1, 1, 4, 4) for i in range(2) for name in ("bias", "masked_bias")}
    save_file(bare, folder / "model.safetensors")
    result = read_folder(folder).tensors
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_the_head_of_neox_under_its_other_name(copy):
    folder = copy("gpt_neox")
    expected = read_folder(folder).tensors["head.weight"]
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(read_folder(folder).tensors["head.weight"], expected)


def test_keys_of_older_versions_are_read(copy):
    old = {"rope_parameters": None, "rotary_pct": 0.4, "rotary_emb_base": 500}
    model = read_folder(copy("gpt_neox", **old)).model
    assert (model.rotary_fraction, model.rotary_base) == (0.4, 500.0)
    model = read_folder(copy("llama", rope_parameters=None, rope_theta=77.0, rope_scaling=None)).model
    assert model.rotary_base == 77.0


def test_a_tied_head_that_is_written_all_the_same_is_read_once(copy):
    folder = copy("llama", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert "head.weight" not in read_folder(folder).tensors


def test_dropout_is_taken_over_and_told_where_it_cannot_be(copy):
    result = read_folder(copy("gpt2", resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.3))
    assert result.model.dropout == 0.2
    assert any("attn_pdrop=0.3" in note for note in result.notes)
    assert any("embd_pdrop=0.1" in note for note in result.notes)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_are_not_numbers_are_refused(copy, value, dtype):
    folder = copy("llama")
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.norm.weight"][3] = value
    save_file(tensors, folder / "model.safetensors")
    result = read_folder(folder)
    with pytest.raises(DataError, match=r"model\.norm\.weight has NaN or infinite values.*download the file again"):
        dict(result.tensors)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}])
def test_an_index_without_a_map_is_named(copy, index):
    folder = copy("llama")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(DataError, match=r"holds model-00001-of-00001\.safetensors, but neither.*download .*index"):
        read_folder(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"index\.json has no weight_map.*download the file again"):
        read_folder(folder)


def test_pointers_and_quantised_weights_have_a_remedy(copy):
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"type F8_E4M3.*unquantised files, or convert the weights to bfloat16"):
        read_folder(folder)
    save_file(tensors | {f"{name}_scale_inv": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"up_proj\.weight_scale_inv.*Scales belong to quantised weights"):
        read_folder(folder)
    (folder / "model.safetensors").write_bytes(LFS_POINTER + b"v1\noid sha256:0\nsize 9\n")
    with pytest.raises(DataError, match=r"model\.safetensors is a pointer of Git LFS.*git lfs pull"):
        read_folder(folder)
