"""FLOPs and parameters against closed formulas and published counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.config import from_tree
from megascale.core import flops, inventory, part_inventories


def model(**keys):
    return from_tree({"model": keys}).model


@given(st.integers(1, 20), st.integers(1, 32), st.integers(1, 8), st.integers(2, 4096), st.integers(1, 600))
def test_megatron_s_formula(layers, heads, head_eighths, sequence, vocab_units):
    """Narayanan et al. 2021, without recompute: 72 B s L h^2 (1 + s/6h + V/12Lh)."""
    h, vocab = heads * head_eighths * 8, 128 * vocab_units
    m = model(layers=layers, hidden=h, heads=heads, sequence_length=sequence, vocab_size=vocab)
    formula = 72 * layers * h**2 * (1 + sequence / (6 * h) + vocab / (12 * layers * h))
    assert flops.flops_per_token(m).training == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "billions", "locations"),
    [
        ("gpt2-124m", 0.124439808, 9),  # OpenAI's release
        ("gpt2-350m", 0.354823168, 9),
        ("gpt-1.3b", 1.316, 3),
        ("gpt-13b", 12.9, 1),
        ("gpt-175b", 174.7, 0),  # 12 L h^2 + V h; the MegaScale paper's table 1
        ("gpt-530b", 529.8, 0),
        ("llama-8b", 8.030261248, 9),  # Meta's release
    ],
)
def test_parameters_of_known_models(name, billions, locations):
    assert round(flops.count_parameters(model(preset=name)) / 1e9, locations) == round(billions, locations)


def test_flops_of_the_paper_s_rows():
    """Back-solved from the paper's throughput and MFU: 1.076e12 a token for full attention at 175B."""
    assert flops.flops_per_token(model(preset="gpt-175b")).training == pytest.approx(1.076e12, rel=0.002)


@given(st.integers(2, 512), st.data())
def test_window_share_is_the_area_kept(sequence, data):
    window = data.draw(st.integers(1, sequence))
    retained = sum(min(window, query + 1) for query in range(sequence))
    full = sequence * (sequence + 1) / 2
    assert part_inventories.window_area_fraction(sequence, window) == pytest.approx(retained / full)
    assert part_inventories.window_area_fraction(sequence, sequence) == 1.0
    assert part_inventories.window_area_fraction(sequence, None) == 1.0


def test_layer_pattern_counts_layer_by_layer():
    shape = {"layers": 4, "hidden": 64, "heads": 4, "sequence_length": 256, "vocab_size": 128}
    full, windowed = model(**shape), model(**shape, window=32, layer_pattern="SSL")
    part = part_inventories.window_area_fraction(256, 32)
    assert part < 0.25
    single = flops.flops_per_token(full).attention / 4
    assert flops.flops_per_token(windowed).attention == pytest.approx(single * (3 * part + 1))
    assert flops.flops_per_token(windowed).mlp == flops.flops_per_token(full).mlp


def test_gated_and_grouped_models():
    m = model(preset="llama-8b")
    layer = flops.layer_flops(inventory.resolve_layers(m)[0], m.sequence_length)
    assert layer.projections == 2 * 4096 * (4096 + 2 * 1024) + 2 * 4096 * 4096
    assert layer.mlp == 2 * 3 * 4096 * 14336
    # 6 N per token without embeddings' look-up, plus attention.
    n = flops.count_parameters(m, embeddings=False) + m.vocab * m.hidden
    assert flops.flops_per_token(m).training == pytest.approx(6 * n + 12 * 32 * 4096 * 8192, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H800", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L40S", 362.0),
        ("abacus", None),
    ],
)
def test_dense_bf16_peaks_are_those_of_the_data_sheets(name, peak):
    """TFLOP/s without sparsity, for names as `torch.cuda.get_device_name` gives them."""
    assert flops.device_peak_tflops(name) == peak


def test_mfu():
    # The paper's row: 12,288 A100s, 6.34 s a step of 6,144 x 2,048 tokens; Megatron's credit gives 55.7%.
    rate = 6144 * 2048 / 6.34
    assert flops.mfu(model(preset="gpt-175b"), rate, 12288, 312.0) == pytest.approx(0.557, abs=0.002)


def test_layers_of_different_kinds_are_counted_one_by_one():
    shape = {"layers": 3, "hidden": 64, "heads": 4, "sequence_length": 256, "vocab_size": 128}
    mixed = model(**shape, layer_pattern="SWS", layer_kinds={"W": {"ffn_hidden": 512, "kv_heads": 1, "window": 32}})
    uniform = model(**shape)
    wide = model(**shape, ffn_hidden=512, kv_heads=1, window=32)
    body = [c.forward - c.logits for c in (flops.flops_per_token(m) for m in (mixed, uniform, wide))]
    assert body[0] == pytest.approx((2 * body[1] + body[2]) / 3)
    outer = flops.count_parameters(uniform) - flops.count_parameters(uniform, embeddings=False)
    inner = [flops.count_parameters(m, embeddings=False) - 2 * 64 for m in (uniform, wide)]
    assert flops.count_parameters(mixed) == outer + 2 * 64 + (2 * inner[0] + inner[1]) / 3
