"""Facts of built-in parts, which memory, speed and messages rely on, and settings of span sinks."""

from __future__ import annotations

import pytest

from megascale.config.parts import (
    ACTIVATIONS,
    LINEAR_PRECISIONS,
    LR_SCHEDULES,
    NORMS,
    OPTIMIZERS,
    SPAN_SINKS,
    LinearFacts,
    is_hidden_matrix,
)

MATRIX, VECTOR = (4, 3), (4,)


def test_a_state_has_the_size_of_its_tensor_per_name() -> None:
    moments = ("exp_avg", "exp_avg_sq")
    for name in ("adamw", "lamb"):
        for tensor, shape in (("layers.0.mlp.out.weight", MATRIX), ("norm.weight", VECTOR)):
            assert OPTIMIZERS[name].state_names(tensor, shape) == moments
    muon = OPTIMIZERS["muon"].state_names
    assert muon("layers.0.mlp.out.weight", MATRIX) == ("momentum",)
    for tensor, shape in (
        ("embedding.token.weight", MATRIX),
        ("layers.0.mlp.out.bias", VECTOR),
        ("head.weight", MATRIX),
    ):
        assert muon(tensor, shape) == moments
        assert not is_hidden_matrix(tensor, shape)


def test_only_lamb_has_a_learning_rate_of_its_own() -> None:
    peaks = {name: OPTIMIZERS[name].default_peak for name in ("adamw", "lamb", "muon")}
    assert peaks == {"adamw": None, "lamb": 5e-3, "muon": None}
    assert OPTIMIZERS["adamw"].own_settings == LR_SCHEDULES["cosine"].own_settings == ()


def test_biases_and_gates_are_those_of_the_published_parts() -> None:
    assert {name: ACTIVATIONS[name].gated for name in ("gelu", "gelu_tanh", "swiglu")} == {
        "gelu": False,
        "gelu_tanh": False,
        "swiglu": True,
    }
    assert {name: NORMS[name].bias for name in ("layernorm", "rmsnorm")} == {"layernorm": True, "rmsnorm": False}


def test_float8_copies_are_a_byte_per_element() -> None:
    """A copy by rows and one by columns of each weight; inputs as the weight's gradient reads them."""
    default, tensor_wise, row_wise = (LINEAR_PRECISIONS[name] for name in ("default", "float8", "float8_rowwise"))
    assert default == LinearFacts(default.description, None, 0, "none", None, has_expert_gemms=True)
    assert tensor_wise == LinearFacts(tensor_wise.description, 1, 2, "all", 1, has_expert_gemms=True)
    assert row_wise == LinearFacts(
        row_wise.description, None, 2, "all but weight gradients", None, has_expert_gemms=True
    )
    all_gemms = LINEAR_PRECISIONS["float8_rowwise_wgrad"]
    assert all_gemms == LinearFacts(all_gemms.description, 1, 2, "all", None)


@pytest.mark.parametrize("setting", ["parquet", "clickhouse=http://h:8123/db", "kafka=h:9092,g:9092", "kafka=a=b"])
def test_a_span_sink_is_a_name_with_the_address_that_it_needs(setting: str) -> None:
    assert SPAN_SINKS.validate_setting(setting) == setting


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("kafka", r"observe\.span_sinks='kafka' needs an address: kafka=HOST:9092"),
        ("kafka=", "needs an address"),
        ("clickhouse", r"clickhouse=http://HOST:8123/DATABASE"),
        ("clickhouse=http://user:password@h/db", "the address of clickhouse holds a user or password"),
        ("nosuch=x", "nosuch"),
    ],
)
def test_a_wrong_span_sink_is_refused_with_the_remedy(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        SPAN_SINKS.validate_setting(setting)
    assert "password@" not in str(error.value)
