"""The one count of memory of a rank, kind by kind, as a function of model, grid, schedule and precision. No torch.

What one layer keeps from forward to backward for one micro-batch (recompute none). Sequence s, micro-batch b, width
h, heads x head size q, key/value width k, MLP width f, tensor ranks t; sequence parallelism is always on with t > 1,
so everything between the tensor-parallel GEMMs is cut along the sequence. Activations are in the training
precision, statistics in float32.

| tensor | shape here | why |
|---|---|---|
| input | s/t, b, h | backward of the (first) norm |
| norm statistics | s/t, b (twice for LayerNorm) | the same |
| norm output | s/t, b, h | weight gradient of [QKV] or [QKV, MLP in]; gathered again in backward |
| query, key, value | s, b, (q + 2k)/t | attention |
| rotated query, key | s, b, (q + k)/t | rotary positions only: the GEMM result above stays for its value part |
| attention output | s, b, q/t | attention; weight gradient of the output GEMM |
| attention logsumexp | b, heads/t, s | attention (flash: no s x s matrix) |
| middle | s/t, b, h | serial block: residual stream between attention and MLP, for the second norm |
| second norm statistics, output | as above | serial block, or parallel block with two norms |
| MLP in | s, b, f/t (twice if gated) | backward of the activation |
| MLP activation | s, b, f/t | weight gradient of the MLP's output GEMM |

Dropout keeps nothing: its mask is a function of seed and index. With f = 4h and k = q = h in 16 bit this is
32 s b h / t for a serial block, Korthikanti et al. 2022's 34 less two dropout masks, and 28 for a parallel one.
Where `train.linear_precision` keeps a float8 copy of what a GEMM reads, that copy stands in for what is kept for its
weight gradient alone (norm output, MLP activation), and beside what attention needs too; and weights have copies from
their first use in a step to its last.
Recompute `norms` drops norm statistics and outputs, `activation` the MLP activation, `selective` both; `full` keeps the
input alone.

A chunk but the model's last also keeps its output, which autograd starts from (on one stage the next chunk's input is
that same tensor). The last adds the final norm's input and statistics, its output for the whole sequence, and the
loss's log-sum-exp; logits exist for some tokens at a time, in the training precision, and their gradient overwrites
them. Micro-batches in flight come from the schedule's lists.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import ceil, prod

import numpy as np

from megascale.config import ModelConfig, ParallelConfig
from megascale.config.parts import LINEAR_PRECISIONS, NORMS
from megascale.core.grid import Grid
from megascale.core.inventory import (
    BLOCK_PARTS,
    LogicalTensor,
    elements,
    embedding_tensors,
    gradient_widths,
    half_keeps,
    head_tensors,
    layer_inventory,
    layer_keeps,
    norm_tensors,
    output_matrix,
)
from megascale.core.layers import ChunkLayers, Half, chunk_layers
from megascale.core.optimizer_state import state_elements
from megascale.core.schedule import SEND_SLOTS, ActionKind, Schedule

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
# The loss takes as many tokens at a time as keep their logits within this (ops/cross_entropy.py).
LOGITS_BYTES = 2**30


@dataclass(frozen=True)
class Saved:
    """A tensor that a forward keeps for its backward: name, local shape, bytes an element."""

    name: str
    shape: tuple[int, ...]
    width: int

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return prod(self.shape) * self.width


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank by kind.

    Attributes:
        weights: parameters in the training precision.
        weight_copies: of matrices, as GEMMs read them, where train.linear_precision makes such. Where data-parallel
            ranks gather them as float8, one of the two is what they receive.
        gradients: float32 gradient buffer. ZeRO-2: its shard, and two buffers of the largest chunk's size, one that
            backward fills while the other is in flight.
        optimizer: float32 master weights (16-bit training) and the optimizer's state, sharded from ZeRO-1 on: the
            mean over data-parallel ranks, which differ where tensors keep different state (by a bucket's share).
        activations: what forwards keep, at the schedule's peak, without logits.
        logits: the chunk of logits that the loss works on.
        workspace: gradients of activations inside one layer's backward, and what recompute restores of a layer.
        tensor_buffers: gathered input and gathered gradient of a GEMM, and the symmetric-memory copy.
        pipeline_buffers: sends under way, receives posted.
        graph_buffers: what CUDA graphs (parallel/chunk_graphs.py) hold beyond that: temporaries of each micro-batch in
            flight, inputs and outputs of their own, and one eager micro-batch's activations with data parallelism.
    """

    weights: int = 0
    weight_copies: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    workspace: int = 0
    tensor_buffers: int = 0
    pipeline_buffers: int = 0
    graph_buffers: int = 0

    @property
    def total(self) -> int:
        """All kinds."""
        return sum(self.kinds().values())

    def kinds(self) -> dict[str, int]:
        """Bytes by kind, in the order above."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def layer_parameters(model: ModelConfig, tensor: int = 1) -> int:
    """Parameters of one layer on one tensor-parallel rank. Norms and row-parallel biases are replicated."""
    return _parameter_counts(model, tensor)[0]


def chunk_parameters(
    model: ModelConfig, layers: ChunkLayers, chunk: int, chunks: int, tensor: int = 1, stages: int | None = None
) -> int:
    """Parameters of global chunk `chunk` on one tensor-parallel rank, padding rows of the vocabulary included.

    Tied embeddings on more than one stage (default: a stage a chunk) are held by the first chunk and by the last.
    """
    _, embeddings, head, logits = _parameter_counts(model, tensor)
    tied_copy = logits if model.tied_embeddings and (stages or chunks) > 1 else 0
    held = _of_layers(layers, *_half_counts(model, tensor))
    return held + (embeddings if chunk == 0 else 0) + (head + tied_copy if chunk == chunks - 1 else 0)


def _of_layers(layers: ChunkLayers, attention: int, mlp: int) -> int:
    """What a chunk has of something of which a layer's halves have so much; a block that is one piece has whole layers
    only, so that it does not matter to which half its parts are counted."""
    return layers.attentions * attention + layers.mlps * mlp


@lru_cache(maxsize=256)
def _half_counts(model: ModelConfig, tensor: int) -> tuple[int, int]:
    """Parameters on one rank of a layer's attention with its norm, and of the rest."""
    attention, mlp = layer_inventory(model).halves
    return elements(attention, tensor), elements(mlp, tensor)


@lru_cache(maxsize=256)
def _parameter_counts(model: ModelConfig, tensor: int) -> tuple[int, int, int, int]:
    """On one rank: of a layer, the embeddings, what stands behind the last layer, and the matrix of the logits. Kept,
    as a search asks for every stage of many layouts."""
    return (
        elements(layer_inventory(model), tensor),
        elements(embedding_tensors(model), tensor),
        elements((*norm_tensors(model, "norm"), *head_tensors(model)), tensor),
        elements((output_matrix(model),), tensor),
    )


def _tables(model: ModelConfig, chunk: int, chunks: int, tensor: int, stages: int) -> int:
    """Of them elements of embeddings and output matrix."""
    _, embeddings, _, logits = _parameter_counts(model, tensor)
    has_logits = chunk == chunks - 1 and (not model.tied_embeddings or stages > 1)
    return (embeddings if chunk == 0 else 0) + (logits if has_logits else 0)


def stage_parameters(model: ModelConfig, parallel: ParallelConfig, stage: int) -> int:
    """Parameters of all chunks of a stage on one tensor-parallel rank."""
    return sum(_chunk_counts(model, parallel, stage))


def stage_matrices(model: ModelConfig, parallel: ParallelConfig, stage: int) -> int:
    """Of them those of the matrices that linear layers multiply with; the vocabulary's is none."""
    halves = (tuple(one for one in half if one.gemm) for half in layer_inventory(model).halves)
    attention, mlp = (elements(matrices, parallel.tensor) for matrices in halves)
    return sum(_of_layers(own, attention, mlp) for own in chunk_layers(model, parallel)[stage :: parallel.pipeline])


def _chunk_counts(model: ModelConfig, parallel: ParallelConfig, stage: int) -> list[int]:
    p, chunks = parallel.pipeline, parallel.pipeline * parallel.virtual_stages
    layers = chunk_layers(model, parallel)
    return [chunk_parameters(model, layers[g], g, chunks, parallel.tensor, p) for g in range(stage, chunks, p)]


def _kept_by_optimizer(model: ModelConfig, parallel: ParallelConfig, stage: int, optimizer: str) -> int:
    """Elements of optimizer state of all chunks of a stage on one tensor-parallel rank, before any sharding."""
    p, chunks, layers = parallel.pipeline, parallel.pipeline * parallel.virtual_stages, chunk_layers(model, parallel)
    count = (
        sum(layers[g].attentions for g in range(stage, chunks, p)),
        sum(layers[g].mlps for g in range(stage, chunks, p)),
    )
    tables = sum(_tables(model, g, chunks, parallel.tensor, p) for g in range(stage, chunks, p))
    return state_elements(optimizer, model, stage_parameters(model, parallel, stage), count, tables, parallel.tensor)


def saved_by_layer(
    model: ModelConfig,
    tensor: int,
    micro_batch: int,
    precision: str,
    recompute: str = "none",
    linear_precision: str = "default",
    half: Half = "both",
) -> list[Saved]:
    """What one layer's forward of one micro-batch keeps on one rank: the table in this module's docstring.

    half: of a layer that is divided, from the input or from the middle on.
    """
    s, b, a = model.sequence_length, micro_batch, BYTES[precision]
    kept = layer_keeps(model) if half == "both" else half_keeps(model)[half == "mlp"]
    if recompute == "full":
        kept = kept[:1]
    elif recompute != "none":
        dropped = ("norms", "activation") if recompute == "selective" else (recompute,)
        kept = tuple(one for one in kept if one.dropped not in dropped)
    copy = LINEAR_PRECISIONS[linear_precision].kept
    saved: list[Saved] = []
    for one in kept:
        shape = (s // tensor, b, one.width) if one.over == "sequence" else (s, b, one.width // tensor)
        if copy is None or one.gemm != "only":
            saved.append(Saved(one.name, shape, max(4, a) if one.statistic else a))
        if copy is not None and one.gemm != "no":
            saved.append(Saved(f"{one.name}_copy", shape, copy))
    return saved


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that a forward of one micro-batch keeps: of a whole layer, of its attention alone, of its MLP alone."""

    both: int
    attention: int
    mlp: int

    @classmethod
    def of(
        cls, model: ModelConfig, tensor: int, micro_batch: int, precision: str, recompute: str, linear_precision: str
    ) -> KeptBytes:
        """Arguments as of `saved_by_layer`."""
        about = (model, tensor, micro_batch, precision, recompute, linear_precision)
        halves: tuple[Half, ...] = ("both", "attention", "mlp")
        return cls(*(sum(one.bytes for one in saved_by_layer(*about, half)) for half in halves))

    def of_chunk(self, layers: ChunkLayers) -> int:
        """All that a chunk's layers keep."""
        whole = max(0, layers.stop // 2 - (layers.first + 1) // 2)
        return whole * self.both + (layers.attentions - whole) * self.attention + (layers.mlps - whole) * self.mlp


def saved_by_head(model: ModelConfig, tensor: int, micro_batch: int, precision: str) -> list[Saved]:
    """What final norm and loss keep on the last chunk."""
    s, b, h, a = model.sequence_length, micro_batch, model.hidden, BYTES[precision]
    moments, wide = (2 if NORMS[model.norm].bias else 1), max(4, a)
    return [
        Saved("final_norm_input", (s // tensor, b, h), a),
        Saved("final_norm_statistics", (moments, s // tensor, b), wide),
        Saved("final_norm_output", (s, b, h), a),
        Saved("loss_logsumexp", (s, b), wide),
    ]


def stage_memory(
    model: ModelConfig,
    parallel: ParallelConfig,
    grid: Grid,
    schedule: Schedule,
    stage: int,
    micro_batch: int,
    precision: str,
    side_stream: bool = False,
    optimizer: str = "adamw",
    linear_precision: str = "default",
    graphs: bool = False,
) -> MemoryEstimate:
    """Memory of a rank of pipeline stage `stage` at its peak, in bytes by kind.

    Args:
        parallel: ZeRO stage, recompute, layer split.
        grid: sizes of the axes (data parallelism is the grid's).
        schedule: gives micro-batches in flight and send buffers.
        micro_batch: sequences in a micro-batch.
        precision: float32, bfloat16 or float64.
        side_stream: whether weights' gradients are made on a side stream (Config.gemms_on_side_stream).
        optimizer: its name; what it keeps is what it declares (config/optimizers.py).
        linear_precision: as train.linear_precision; what it means is in config/parts.py.
        graphs: whether chunks are CUDA graphs (core/graph_choice.py).
    """
    t, a = grid.tensor, BYTES[precision]
    master = max(4, a)
    count = stage_parameters(model, parallel, stage)
    shard = -(-count // grid.data)
    state = _kept_by_optimizer(model, parallel, stage, optimizer) + (count if a < master else 0)
    gradients = master * count
    if parallel.zero == 2 and grid.data > 1:
        gradients = master * (shard + 2 * max(_chunk_counts(model, parallel, stage)))
    if parallel.reduce_dtype == "bfloat16" and grid.data > 1:
        # Rounded copies in flight: of a whole stage at the end of a step, of two chunks with ZeRO-2.
        sent = count if parallel.zero < 2 else 2 * max(_chunk_counts(model, parallel, stage))
        gradients += BYTES["bfloat16"] * sent
    full = sum(x.bytes for x in saved_by_layer(model, t, micro_batch, precision, "none", linear_precision))
    kept = KeptBytes.of(model, t, micro_batch, precision, parallel.recompute, linear_precision)
    restored = full - kept.both

    s, b, h = model.sequence_length, micro_batch, model.hidden
    block, layer = BLOCK_PARTS[model.block], layer_inventory(model)
    attention, mlp = (width // t for width in gradient_widths(model))
    # A parallel block's two branches go backward through one GEMM, so both gradients live at once.
    inside = attention + mlp if block.together else max(attention, mlp)
    # Two of them may be under way, whose factors then live on (ops/side_stream.py): the two with the widest.
    wide = sum(_columns(part, t) for part in ((layer.attention, layer.mlp) if block.together else (layer.mlp,)))
    f = max((one.shape[1] // t for one in layer.mlp if one.gemm and one.partition_dim == 1), default=0)
    factors = (h + wide) + (h + f) if side_stream else 0
    message = s // t * b * h * a
    moves = stage_moves(schedule, stage)
    held = sum(chunk_layers(model, parallel)[g].layer_count for g in range(stage, schedule.chunks, schedule.stages))
    logits = min(s * b * (model.padded_vocab // t) * a, LOGITS_BYTES) if stage == schedule.stages - 1 else 0
    workspace = s * b * (inside + factors) * a + restored
    held_by_graphs = 0
    if graphs:
        flying = _in_flight(schedule, stage)
        held_by_graphs = (flying - 1) * (workspace + logits)
        if schedule.chunks > 1:
            held_by_graphs += 3 * flying * message  # input, gradient of the output, gradient of the input
        if grid.data > 1:
            one = ceil(held / schedule.virtual_stages) * kept.both
            held_by_graphs += one + workspace + logits
    return MemoryEstimate(
        weights=a * count,
        weight_copies=LINEAR_PRECISIONS[linear_precision].copies * stage_matrices(model, parallel, stage),
        gradients=gradients,
        optimizer=master * (state * shard // count if parallel.zero else state),
        activations=_peak(model, parallel, schedule, stage, micro_batch, precision, kept),
        logits=logits,
        workspace=workspace,
        tensor_buffers=3 * s * b * h * a if t > 1 else 0,
        # A received activation becomes the saved input; a gradient is in use while others are posted.
        pipeline_buffers=message
        * (
            SEND_SLOTS * (moves[ActionKind.SEND_FORWARD] + moves[ActionKind.SEND_BACKWARD])
            + _posted(schedule, stage, ActionKind.RECV_FORWARD)
            + _posted(schedule, stage, ActionKind.RECV_BACKWARD)
            + moves[ActionKind.RECV_BACKWARD]
        ),
        graph_buffers=held_by_graphs,
    )


def _in_flight(schedule: Schedule, stage: int) -> int:
    """Most micro-batches, over all chunks, between forward and backward."""
    kind = schedule.table[stage][:, 0]
    sign = np.where(kind == ActionKind.FORWARD, 1, np.where(kind == ActionKind.BACKWARD, -1, 0))
    return int(sign.cumsum().max())


def stage_moves(schedule: Schedule, stage: int) -> dict[ActionKind, bool]:
    """Which kinds of transfer a stage has at all."""
    kinds = set(np.unique(schedule.table[stage][:, 0]).tolist())
    return {kind: int(kind) in kinds for kind in ActionKind if kind.is_send or kind.is_receive}


def _posted(schedule: Schedule, stage: int, receive: ActionKind) -> int:
    """Most receives of a kind that wait, posted or arrived, while the stage computes with others."""
    kind, chunk, _ = schedule.table[stage].T
    compute = ActionKind.FORWARD if receive == ActionKind.RECV_FORWARD else ActionKind.BACKWARD
    end = 0 if compute == ActionKind.FORWARD else schedule.chunks - 1
    taken = (kind == compute) & (chunk * schedule.stages + stage != end)
    waiting = ((kind == receive).astype(int) - taken).cumsum()
    return int(waiting[kind <= ActionKind.BACKWARD].max())


def _columns(part: tuple[LogicalTensor, ...], tensor: int) -> int:
    """Columns on one rank of the projection that a part reads."""
    return sum(one.shape[0] // tensor for one in part if one.gemm and one.partition_dim == 0)


def _peak(
    model: ModelConfig,
    parallel: ParallelConfig,
    schedule: Schedule,
    stage: int,
    micro_batch: int,
    precision: str,
    kept: KeptBytes,
) -> int:
    """Bytes of activations held at the moment of the schedule at which they are most."""
    p, chunks = schedule.stages, schedule.chunks
    layers = chunk_layers(model, parallel)
    own = [c * p + stage for c in range(schedule.virtual_stages)]
    head = sum(x.bytes for x in saved_by_head(model, parallel.tensor, micro_batch, precision))
    a, s = BYTES[precision], model.sequence_length // parallel.tensor
    output = s * micro_batch * model.hidden * a if p > 1 else 0
    size = np.array([kept.of_chunk(layers[g]) + (head if g == chunks - 1 else output) for g in own])
    kind, chunk, _ = schedule.table[stage].T
    sign = np.where(kind == ActionKind.FORWARD, 1, np.where(kind == ActionKind.BACKWARD, -1, 0))
    return int((sign * size[chunk]).cumsum().max())
