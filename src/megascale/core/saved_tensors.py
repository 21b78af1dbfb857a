"""Tensors that a rank saves from forward to backward: of each layer, and of the final norm and the loss. No torch.

The table lists what one layer saves for one micro-batch if parallel.recompute is "none". Symbols: sequence s,
micro-batch b, hidden size h, query width q (heads x head size), key width k (equal to the value width), MLP width f,
t tensor-parallel ranks. With t > 1 sequence parallelism is always on, so activations between the tensor-parallel GEMMs
are divided along the sequence. Activations are in the training precision, statistics in float32.

| tensor | shape here | why |
|---|---|---|
| input | s/t, b, h | backward of the (first) norm |
| norm statistics | s/t, b (twice for LayerNorm) | the same |
| norm output | s/t, b, h | weight gradient of [QKV] or [QKV, MLP in]; gathered again in backward |
| query, key, value | s, b, (q + 2k)/t | attention |
| rotated query, key | s, b, (q + k)/t | rotary positions or norms of query and key only; the GEMM result above stays |
| query, key norm statistics | s, b, heads/t | norms of query and key only (twice for LayerNorm; over projections: 2) |
| attention output | s, b, q/t | attention; weight gradient of the output GEMM |
| attention logsumexp | b, heads/t, s | attention (flash: no s x s matrix) |
| post norm input, statistics | s/t, b, h and s/t, b | only with norms on the outputs of attention and MLP, for each |
| middle | s/t, b, h | serial block: residual stream between attention and MLP, for the second norm |
| second norm statistics, output | as above | serial block, or parallel block with two norms |
| MLP in | s, b, f/t (twice if gated) | backward of the activation |
| MLP activation | s, b, f/t | weight gradient of the MLP's output GEMM |
| router scores, expert plan | s/t, b, experts and 6 top_k | experts instead of an MLP: the experts of each token |
| gathered choices | s, b, 3 top_k | experts only: row and weight of each choice of all ranks' tokens |
| experts in | s, b, top_k f/t (twice if gated) | experts only, with an even load; backward recomputes the activation |

Dropout saves nothing, because its mask is a function of seed and index. With f = 4h and k = q = h in 16 bit, the sum of
the table is 32 s b h / t bytes for a serial block and 28 s b h / t for a parallel block. Korthikanti et al. 2022 have
34, since they save two dropout masks.

Other settings change the table:

- Recompute `norms` drops norm statistics and outputs, `activation` the MLP activation, `selective` both. `mlp` or
  `attention` keeps only the input of that half of a serial block, `full` only the input of the layer.
- If `train.linear_precision` saves a float8 copy of a GEMM's input, the copy replaces activations that only the weight
  gradient needs (norm output, MLP activation). It is added to activations that something else needs too.
- With c context ranks, s is a slice of the sequence. Attention then saves what it receives from other ranks instead of
  the projection: query, key, value of s, b, (q + 2k)/t, with keys repeated where several ranks read them. It saves its
  output twice, before and after the exchange. If keys are gathered, it saves the query, and keys and values of c s
  tokens.

Every chunk except the model's last also saves its output, from which autograd starts (on one stage it is the next
chunk's input). The last chunk adds the final norm's input and statistics, its output for the whole sequence, and the
loss's log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from megascale.config import ModelConfig
from megascale.config.parts import LINEAR_PRECISIONS, NORMS
from megascale.core.adapters import AdapterSpec
from megascale.core.head_exchange import share_heads
from megascale.core.inventory import (
    count_distinct_layers,
    half_saved_activations,
    layer_inventory,
    layer_saved_activations,
    resolve_layers,
)
from megascale.core.inventory_records import SavedActivation
from megascale.core.layer_spec import LayerSpec
from megascale.core.layers import Half, LayerSums
from megascale.core.part_inventories import has_fused_projection
from megascale.core.tensors import DTYPE_BYTES


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a forward saves for its backward: name, local shape, bytes per element."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return prod(self.shape) * self.itemsize


def layer_saved_tensors(
    layer: LayerSpec,
    sequence: int,
    tensor: int,
    micro_batch: int,
    precision: str,
    recompute: str = "none",
    linear_precision: str = "default",
    half: Half = "both",
    keeps_inputs: bool = False,
    context: int = 1,
) -> list[SavedTensor]:
    """Return the tensors that one layer's forward of one micro-batch saves on one rank, as in this module's table.

    Args:
        sequence: tokens of a sample.
        half: "attention" or "mlp" for one half of a divided layer.
        keeps_inputs: whether inputs of GEMMs are saved next to their float8 copies, because adapters read them.
        context: ranks that divide the tokens of a sample.
    """
    s = sequence // context
    b = micro_batch
    itemsize = DTYPE_BYTES[precision]
    if half == "both":
        activations = layer_saved_activations(layer)
    else:
        attention, mlp = half_saved_activations(layer)
        activations = mlp if half == "mlp" else attention
    if recompute == "full":
        # The layer's recomputation needs the input itself, so a float8 copy cannot replace it. The input is the first.
        activations = (replace(activations[0], gemm_input="no"),)
    elif recompute in ("mlp", "attention"):
        activations = _drop_half(layer, activations, recompute)
    elif recompute != "none":
        recomputed = ("norms", "activation") if recompute == "selective" else (recompute,)
        activations = tuple(a for a in activations if a.recompute_name not in recomputed)
    if context > 1:
        activations = _exchange_activations(layer, activations, tensor, context)
    copy_itemsize = LINEAR_PRECISIONS[linear_precision].saved_input_bytes
    saved: list[SavedTensor] = []
    for activation in activations:
        if activation.split_along == "sequence":
            shape = (s // tensor, b, activation.width)
        elif activation.split_along == "none":
            shape = (s, b, activation.width)
        else:
            shape = (s, b, activation.width // tensor)
        if copy_itemsize is None or keeps_inputs or activation.gemm_input != "only":
            saved.append(SavedTensor(activation.name, shape, max(4, itemsize) if activation.is_statistic else itemsize))
        if copy_itemsize is not None and activation.gemm_input != "no":
            saved.append(SavedTensor(f"{activation.name}_copy", shape, copy_itemsize))
    return saved


def _drop_half(layer: LayerSpec, activations: tuple[SavedActivation, ...], half: str) -> tuple[SavedActivation, ...]:
    """Return saved activations without those of a half that is recomputed from its input."""
    attention, mlp = half_saved_activations(layer)
    half_input, *dropped = mlp if half == "mlp" else attention
    dropped_names = {activation.name for activation in dropped}
    result = []
    for activation in activations:
        if activation.name == half_input.name:
            result.append(replace(activation, gemm_input="no"))
        elif activation.name not in dropped_names:
            result.append(activation)
    return tuple(result)


def _exchange_activations(
    layer: LayerSpec, activations: tuple[SavedActivation, ...], tensor: int, context: int
) -> tuple[SavedActivation, ...]:
    """Return a layer's saved activations for several context ranks, which exchange heads or gather keys.

    Attention saves what it receives from other ranks instead of its own projection. Rotation and scaling come before
    the exchange and save nothing by themselves.
    """
    mixer = layer.mixer
    share = share_heads(mixer.heads // tensor, mixer.kv_heads // tensor, context)
    key_value_width = 2 * mixer.kv_heads * mixer.head_size
    query_width = mixer.heads * mixer.head_size
    # The MLP's columns lie in the same memory as those of a projection that is fused with them.
    keeps_projection = mixer.qk_norm is not None or has_fused_projection(layer)
    if share.gathers_keys:
        received = [SavedActivation("gathered_key_value", context * key_value_width, "columns")]
        if mixer.rope is not None or mixer.multiplier is not None:
            received.append(SavedActivation("query", query_width, "columns"))
        else:
            keeps_projection = True  # the query is a view of the projection
    else:
        received = [
            SavedActivation("exchanged_query_key_value", query_width + share.copies * key_value_width, "columns"),
            SavedActivation("exchanged_attention_output", query_width, "columns"),
        ]
    dropped_names = {"rotated_query_key", "scaled_query"}
    if not keeps_projection:
        dropped_names.add("query_key_value")
    result: list[SavedActivation] = []
    for activation in activations:
        if activation.name == "query_key_value":
            result += received
        if activation.name not in dropped_names:
            result.append(activation)
    return tuple(result)


# Cached because the estimates of all stages of a layout ask for the same sums, and a search asks for those of all
# combinations of sizes.
@lru_cache(maxsize=1024)
def sum_saved_bytes(
    model: ModelConfig,
    tensor: int,
    micro_batch: int,
    precision: str,
    recompute: str,
    linear_precision: str,
    adapters: AdapterSpec | None = None,
    context: int = 1,
) -> LayerSums:
    """Return the sums of the bytes that a forward of one micro-batch saves in layers; see `layer_saved_tensors`.

    Each adapter also saves its inner activation, of width `rank`, unless backward recomputes the layer.
    """
    tokens = model.sequence_length // context * micro_batch

    def sum_part(layer: LayerSpec, half: Half) -> int:
        tensors = layer_saved_tensors(
            layer,
            model.sequence_length,
            tensor=tensor,
            micro_batch=micro_batch,
            precision=precision,
            recompute=recompute,
            linear_precision=linear_precision,
            half=half,
            keeps_inputs=adapters is not None,
            context=context,
        )
        return sum(saved.bytes for saved in tensors)

    bytes_by_layer: dict[LayerSpec, tuple[int, int, int]] = {}
    for layer, _ in count_distinct_layers(model):
        adapter_bytes = [0, 0]  # of attention and MLP
        if adapters is not None and recompute != "full":
            for half_index, tensors in enumerate(layer_inventory(layer).halves):
                adapter_count = sum(adapters.is_target(matrix) for matrix in tensors)
                adapter_bytes[half_index] = adapter_count * adapters.rank * tokens * DTYPE_BYTES[precision]
        bytes_by_layer[layer] = (
            sum_part(layer, "both") + sum(adapter_bytes),
            sum_part(layer, "attention") + adapter_bytes[0],
            sum_part(layer, "mlp") + adapter_bytes[1],
        )
    return LayerSums.collect([bytes_by_layer[layer] for layer in resolve_layers(model)])


def head_saved_tensors(
    model: ModelConfig, tensor: int, micro_batch: int, precision: str, context: int = 1
) -> list[SavedTensor]:
    """Return the tensors that final norm and loss save on the last chunk."""
    s = model.sequence_length // context
    b = micro_batch
    itemsize = DTYPE_BYTES[precision]
    moments = NORMS[model.norm].moments
    return [
        SavedTensor("final_norm_input", (s // tensor, b, model.hidden), itemsize),
        SavedTensor("final_norm_statistics", (moments, s // tensor, b), max(4, itemsize)),
        SavedTensor("final_norm_output", (s, b, model.hidden), itemsize),
        SavedTensor("loss_logsumexp", (s, b), max(4, itemsize)),
    ]
