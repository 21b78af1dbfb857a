"""Inventories of the built-in parts of a layer and of blocks, in registries (inventory.py). No torch.

A layer has two parts: a mixer (attention) and a feed-forward (MLP). `ATTENTION_PARTS` and `MLP_PARTS` hold the
inventory of each part by the value of `model.attention` or `model.mlp`. A plugin registers the inventory of its part
there (see tests/extend).
"""

from __future__ import annotations

from megascale.config.parts import ATTENTIONS, BLOCKS, MLPS
from megascale.config.registry import Registry
from megascale.core.inventory_records import (
    BlockInventory,
    LogicalTensor,
    PartInventory,
    SavedActivation,
    linear_tensors,
    norm_tensors,
)
from megascale.core.layer_spec import DenseSpec, ExpertsSpec, LayerSpec

# attention ----------------------------------------------------------------------------------------------------------


def _attention_tensors(layer: LayerSpec, name: str) -> list[LogicalTensor]:
    """Return the tensors of causal attention. The layer's tensors have names that begin with `name`."""
    mixer = layer.mixer
    d = mixer.head_size
    tensors: list[LogicalTensor] = []
    projections = [("query", mixer.heads), ("key", mixer.kv_heads), ("value", mixer.kv_heads)]
    if mixer.has_gate:
        projections.append(("gate", mixer.heads))
    for projection, heads in projections:
        tensors += linear_tensors(
            f"{name}.attention.{projection}",
            rows=heads * d,
            columns=layer.hidden,
            partition_dim=0,
            bias=mixer.input_bias,
            std=layer.init_std,
        )
    if mixer.has_sinks:
        tensors.append(LogicalTensor(f"{name}.attention.sink.weight", (mixer.heads,), 0))
    for projection, heads in (("query", mixer.heads), ("key", mixer.kv_heads)):
        norm_name = f"{name}.attention.{projection}_norm"
        if mixer.qk_norm == "head":
            tensors += norm_tensors(layer.norms.name, d, norm_name)
        elif mixer.qk_norm == "projection":
            tensors.append(LogicalTensor(f"{norm_name}.weight", (heads * d,), 0, init_value=1.0))
    return tensors + linear_tensors(
        f"{name}.attention.output",
        rows=layer.hidden,
        columns=mixer.heads * d,
        partition_dim=1,
        bias=mixer.output_bias,
        std=layer.output_init_std,
    )


def _attention_saved_activations(layer: LayerSpec) -> list[SavedActivation]:
    mixer = layer.mixer
    d = mixer.head_size
    saved = [SavedActivation("query_key_value", (mixer.heads + 2 * mixer.kv_heads) * d, "columns", has_gradient=True)]
    normed_heads = mixer.heads + mixer.kv_heads
    if mixer.rope is not None or mixer.qk_norm:
        saved.append(SavedActivation("rotated_query_key", normed_heads * d, "columns"))
    if mixer.qk_norm:
        # A norm over the whole projection has one statistic for the query and one for the key.
        statistics = 2 if mixer.qk_norm == "projection" else normed_heads * layer.norms.moments
        saved.append(SavedActivation("query_key_norm_statistics", statistics, "columns", is_statistic=True))
    output_width = mixer.heads * d
    if mixer.multiplier is not None:
        saved.append(SavedActivation("scaled_query", output_width, "columns"))
    saved.append(SavedActivation("attention_output", output_width, "columns", has_gradient=True, gemm_input="also"))
    saved.append(SavedActivation("attention_logsumexp", mixer.heads, "columns", is_statistic=True))
    if mixer.has_gate:
        # The projection, its sigmoid, and the product that the output projection reads.
        saved.append(SavedActivation("attention_gate", output_width, "columns", has_gradient=True))
        saved.append(SavedActivation("attention_gate_sigmoid", output_width, "columns"))
        saved.append(SavedActivation("gated_output", output_width, "columns", has_gradient=True, gemm_input="only"))
    return saved


def window_area_fraction(sequence: int, window: int | None) -> float:
    """Return the fraction of the causal triangle's area within a window; 1 for full attention."""
    if window is None or window >= sequence:
        return 1.0
    area = window * (window + 1) / 2 + (sequence - window) * window
    return area / (sequence * (sequence + 1) / 2)


def _score_flops(layer: LayerSpec, sequence: int) -> float:
    """Return the forward FLOPs per token of the two GEMMs of attention: scores, and the weighted sum of values.

    By the convention of core/flops.py, masked positions of full causal attention count too.
    """
    mixer = layer.mixer
    return 4.0 * sequence * mixer.heads * mixer.head_size * window_area_fraction(sequence, mixer.window)


# dense MLP ----------------------------------------------------------------------------------------------------------


def _mlp_tensors(layer: LayerSpec, name: str) -> list[LogicalTensor]:
    return _dense_tensors(layer, layer.feed_forward, f"{name}.mlp")


def _dense_tensors(layer: LayerSpec, mlp: DenseSpec, name: str) -> list[LogicalTensor]:
    """Return the tensors of a dense MLP, with names that begin with `name`."""
    h = layer.hidden
    f = mlp.width
    tensors: list[LogicalTensor] = []
    if mlp.is_gated:
        tensors += linear_tensors(f"{name}.gate", rows=f, columns=h, partition_dim=0, bias=mlp.bias, std=layer.init_std)
    tensors += linear_tensors(f"{name}.in", rows=f, columns=h, partition_dim=0, bias=mlp.bias, std=layer.init_std)
    return tensors + linear_tensors(
        f"{name}.out", rows=h, columns=f, partition_dim=1, bias=mlp.bias, std=layer.output_init_std
    )


def _mlp_saved_activations(layer: LayerSpec) -> list[SavedActivation]:
    return _dense_saved_activations(layer.feed_forward, "mlp")


def _dense_saved_activations(mlp: DenseSpec, name: str) -> list[SavedActivation]:
    """Return the activations that a dense MLP saves, with names that begin with `name`."""
    return [
        SavedActivation(f"{name}_in", mlp.input_width, "columns", has_gradient=True),
        SavedActivation(
            f"{name}_activation",
            mlp.width,
            "columns",
            recompute_name="activation",
            has_gradient=True,
            gemm_input="only",
        ),
    ]


# experts ------------------------------------------------------------------------------------------------------------


def _experts_tensors(layer: LayerSpec, name: str) -> list[LogicalTensor]:
    """Return the tensors of the router, of the stacks of experts, and of the shared MLP."""
    h = layer.hidden
    mlp: ExpertsSpec = layer.feed_forward
    expert_count = mlp.settings.number
    width = mlp.width
    input_shape = (expert_count, mlp.input_matrices, width, h)

    def make_stack(part_name: str, shape: tuple[int, ...], std: float | None) -> LogicalTensor:
        return LogicalTensor(f"{name}.mlp.experts.{part_name}", shape, 0, std, other_cuts=(("expert", 0), ("slice", 0)))

    tensors = [
        LogicalTensor(f"{name}.mlp.router.weight", (expert_count, h), init_std=layer.init_std),
        make_stack("in.weight", input_shape, layer.init_std),
        make_stack("out.weight", (expert_count, h, width), layer.output_init_std),
    ]
    if mlp.settings.biases:
        tensors.append(LogicalTensor(f"{name}.mlp.router.logit.bias", (expert_count,)))
        tensors.append(make_stack("in.bias", input_shape[:-1], None))
        tensors.append(make_stack("out.bias", (expert_count, h), None))
    if mlp.settings.bias_rate:
        tensors.append(LogicalTensor(f"{name}.mlp.router.bias", (expert_count,), is_trained=False))
    if mlp.shared is not None:
        tensors += _dense_tensors(layer, mlp.shared, f"{name}.mlp.shared")
    if mlp.settings.shared_gate:
        tensors.append(LogicalTensor(f"{name}.mlp.shared.scale.weight", (h,), init_std=layer.init_std))
    return tensors


def _experts_saved_activations(layer: LayerSpec) -> list[SavedActivation]:
    """Return the activations that experts save with an even load; backward recomputes the MLP activation."""
    mlp: ExpertsSpec = layer.feed_forward
    settings = mlp.settings
    top_k = settings.top_k
    # Widths are in float32 values. Each choice has the chosen expert in int64, which is as wide as two float32, and the
    # token and the slot of its row in int32.
    plan_width = 4 * top_k
    if settings.normalize == "selected":
        plan_width += top_k + 1  # the selected scores and their sum
    saved = [
        SavedActivation("router_scores", settings.number, "sequence", is_statistic=True),
        SavedActivation("expert_plan", plan_width, "sequence", is_statistic=True),
        # The row in int32 and the weight of each choice of all ranks' tokens.
        SavedActivation("gathered_choices", 2 * top_k, "none", is_statistic=True),
        SavedActivation("experts_in", top_k * mlp.input_matrices * mlp.width, "columns", has_gradient=True),
    ]
    if settings.z_loss:
        saved.append(SavedActivation("router_logits", settings.number + 1, "sequence", is_statistic=True))
    if mlp.shared is not None:
        saved += _dense_saved_activations(mlp.shared, "shared")
    if settings.shared_gate:
        saved.append(SavedActivation("shared_output", layer.hidden, "sequence"))
        saved.append(SavedActivation("shared_scale", 1, "sequence", is_statistic=True))
    return saved


def _experts_workspace(layer: LayerSpec) -> int:
    """Return the values per token of backward's temporary rows.

    Each token has `top_k` rows. There are two arrays of rows as wide as the layer, and three as wide as the experts'
    activation.
    """
    mlp: ExpertsSpec = layer.feed_forward
    return mlp.settings.top_k * (2 * layer.hidden + 3 * mlp.width)


def _experts_flops(layer: LayerSpec, sequence: int) -> float:
    """Return the forward FLOPs per token of the router and of the experts that the token passes."""
    mlp: ExpertsSpec = layer.feed_forward
    expert_elements = (mlp.input_matrices + 1) * mlp.width * layer.hidden
    router_elements = mlp.settings.number * layer.hidden
    return 2.0 * (mlp.settings.top_k * expert_elements + router_elements)


# registries ---------------------------------------------------------------------------------------------------------


_CAUSAL_ATTENTION = PartInventory(
    _attention_tensors, _attention_saved_activations, _score_flops, splits_fused_projection=True
)
_DENSE_MLP = PartInventory(_mlp_tensors, _mlp_saved_activations, splits_fused_projection=True)
ATTENTION_PARTS: Registry[PartInventory] = Registry(ATTENTIONS.key, {"causal": _CAUSAL_ATTENTION})
_EXPERTS = PartInventory(
    _experts_tensors,
    _experts_saved_activations,
    _experts_flops,
    make_spec=ExpertsSpec.from_model,
    saves_norm_output=True,
    workspace=_experts_workspace,
)
MLP_PARTS: Registry[PartInventory] = Registry(MLPS.key, {"dense": _DENSE_MLP, "experts": _EXPERTS})


def has_fused_projection(layer: LayerSpec) -> bool:
    """Return whether one projection serves both parts of a parallel block.

    The parts must share a norm and be able to read the fused projection. An attention with a gate cannot.
    """
    if getattr(layer.mixer, "has_gate", False):
        return False
    parts = (ATTENTION_PARTS[layer.mixer.name], MLP_PARTS[layer.feed_forward.name])
    return layer.norms.count == 1 and all(part.splits_fused_projection for part in parts)


BLOCK_PARTS: Registry[BlockInventory] = Registry(
    BLOCKS.key,
    {
        "serial": BlockInventory(lambda model: 2, lambda layer: (2, 2), is_parallel=False, can_split=True),
        "parallel": BlockInventory(
            lambda model: model.parallel_norms,
            lambda layer: (1 if has_fused_projection(layer) else 2, 1),
            is_parallel=True,
        ),
    },
)
