"""Memory of a rank by kind (weights, gradients, ...), as a function of model, grid, schedule and precision. No torch.

Kinds that need an explanation:

- Activations: `core/saved_tensors.py` lists what a forward saves. The number of micro-batches in flight follows from
  the schedule's lists. If a backward is two actions, the inputs and output gradients of linear layers wait between them
  for the weight gradients.
- Logits exist for some tokens at a time, in the training precision, and their gradient overwrites them.
- Weight copies: float8 copies of weights exist from the first use in a step to the last.

A *unit* is the matrices of one block, or one matrix outside blocks. ZeRO-2 reduces units one after another, and ZeRO-3
also gathers them. The units share memory, which is called slots. All other parameters are *resident*
(core/parameter_counts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import ceil, prod

import numpy as np

from megascale.config import ModelConfig, ParallelConfig
from megascale.config.parts import LINEAR_PRECISIONS
from megascale.core.adapters import AdapterSpec, count_adapter_elements, count_adapter_state
from megascale.core.grid import Grid
from megascale.core.head_exchange import share_heads
from megascale.core.inventory import gradient_widths, has_experts, layer_inventory, resolve_layers
from megascale.core.inventory_records import LogicalTensor
from megascale.core.layer_spec import ExpertsSpec, LayerSpec
from megascale.core.layers import ChunkLayers, LayerSums, assign_layers, assign_stage_layers
from megascale.core.mapped_layout import count_mapped_bytes
from megascale.core.parameter_counts import (
    ceil_divide,
    count_stage_expert_elements,
    count_stage_matrix_elements,
    count_stage_parameters,
    count_stage_state,
    count_stage_units,
    sum_tensors,
)
from megascale.core.part_inventories import BLOCK_PARTS
from megascale.core.saved_tensors import head_saved_tensors, sum_saved_bytes
from megascale.core.schedule import (
    COMPUTES,
    INPUT_BACKWARDS,
    RECEIVES,
    SEND_SLOTS,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    make_kind_mask,
)
from megascale.core.tensors import DTYPE_BYTES
from megascale.core.unit_slots import assign_chunk_slots, has_chunk_slots, size_staging

# Largest size of the logits that exist at a time: the loss divides the tokens accordingly (ops/cross_entropy.py).
MAX_LOGITS_BYTES = 2**30
# With optimizer.offload state moves through this many slots of this many elements (optim/offload.py).
OFFLOAD_SLOTS = 3
OFFLOAD_ELEMENTS = 2**25
# With parallel.offload_activations, the number of layer inputs of which the device has a copy at a time.
OFFLOADED_DEVICE_INPUTS = 2


def count_logits_groups(tokens: int, columns: int, itemsize: int) -> int:
    """Return the number of groups of tokens whose logits the loss computes one after another.

    Args:
        columns: rows of the output matrix on a rank.
        itemsize: bytes of a logit.
    """
    max_tokens = max(128, MAX_LOGITS_BYTES // (columns * itemsize))
    group_count = ceil(tokens / max_tokens)
    group_tokens = 128 * ceil(tokens / group_count / 128)
    return ceil(tokens / group_tokens)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank by kind.

    Attributes:
        weights: parameters in the training precision. ZeRO-3: the shard of the units' matrices, the slots into which
            they are gathered, and resident parameters. Slots that contain own shards count them once
            (core/mapped_layout.py).
        weight_copies: copies of matrices in the format that GEMMs read, if train.linear_precision makes any: in float8
            the rows and the transposed rows. If data-parallel ranks gather float8, they receive the rows there.
        gradients: float32 gradient buffer. ZeRO-2: the shard of the units' gradients, the gradient slots, and the
            gradients of resident parameters: norms, biases, tied embeddings. With overlap.reductions=copies, also the
            staging memory of the copies.
        optimizer: float32 master weights (16-bit training) and the optimizer's state, sharded from ZeRO-1 on. The
            figure is the mean over data-parallel ranks. Ranks differ slightly if some tensors have more state.
        activations: saved activations at the schedule's peak, without logits.
        logits: the logits that exist at a time.
        workspace: gradients of activations inside one layer's backward, and activations that backward recomputes.
        tensor_buffers: gathered input and gathered gradient of a GEMM, and the copy in symmetric memory.
        pipeline_buffers: sends in flight and posted receives.
        graph_buffers: memory that CUDA graphs need in addition (parallel/chunk_graphs.py): temporaries of each
            micro-batch in flight, inputs and outputs. With data parallelism a micro-batch may run eagerly, and its
            activations count too: next to tensor or context parallelism, and in steps that replay checks trace.
        prepared_groups: NCCL's second set of communicators, with rendezvous.prepared_groups
            (core/communicator_memory.py).
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
    prepared_groups: int = 0

    @property
    def total(self) -> int:
        """Sum over all kinds."""
        return sum(self.bytes_by_kind().values())

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the bytes by kind, in the order of the attributes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def count_offloaded_state_bytes(parameters: int, shards: int, precision: str) -> int:
    """Return the bytes of host memory of a rank's state with optimizer.offload: master weights and AdamW's moments.

    Args:
        parameters: trained parameters of a pipeline stage on one tensor-parallel rank.
        shards: ranks among which the state is divided.
    """
    # Three values per parameter: the master weight and two moments.
    return 3 * max(4, DTYPE_BYTES[precision]) * ceil_divide(parameters, shards)


def estimate_stage_memory(
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
    offload: bool = False,
    adapters: AdapterSpec | None = None,
    expert_rows: float = 1.0,
    reduces_by_copies: bool = False,
    rounds_blocks: bool = False,
    runs_eager_steps: bool = False,
    maps_shards: bool = False,
) -> MemoryEstimate:
    """Estimate the peak memory of a rank of pipeline stage `stage`, in bytes by kind.

    Args:
        parallel: ZeRO stage, recompute, layer split.
        grid: sizes of the axes; the data axis may differ from `parallel.data`.
        schedule: gives micro-batches in flight and send buffers.
        micro_batch: sequences in a micro-batch.
        precision: float32, bfloat16 or float64.
        side_stream: whether weight gradients are computed on a side stream (Config.gemms_on_side_stream).
        optimizer: its name; config/parts.py declares its state.
        linear_precision: value of train.linear_precision; config/parts.py has its facts.
        graphs: whether chunks are CUDA graphs (core/rank_memory.py).
        offload: value of optimizer.offload.
        adapters: low-rank adapters, the only trained parameters; None: all parameters are trained.
        expert_rows: kernels.expert_rows: rows that graphs have room for, relative to an even load.
        reduces_by_copies: whether overlap.reductions is copies.
        rounds_blocks: whether blocks have gradient slots in bfloat16 only (core/rank_memory.py).
        runs_eager_steps: whether some steps run without the graphs (train/replay_check.py).
        maps_shards: whether slots of ZeRO-3 contain the rank's own shards (core/copy_choice.py).
    """
    rank = _RankShape(model, parallel, grid, schedule, stage, micro_batch, precision, linear_precision, adapters)
    trained = rank.count_trained()
    weights = _count_weight_bytes(
        model, parallel, grid, schedule, stage=stage, itemsize=rank.itemsize, maps_shards=maps_shards
    )
    if adapters is None:
        gradients = _gradient_bytes(
            model,
            parallel,
            grid=grid,
            stage=stage,
            master_itemsize=rank.master_itemsize,
            reduces_by_copies=reduces_by_copies,
            rounds_blocks=rounds_blocks,
        )
    else:
        weights += rank.itemsize * trained  # the adapters, next to the model's own parameters
        gradients = _adapter_gradient_bytes(
            trained,
            parallel,
            grid=grid,
            master_itemsize=rank.master_itemsize,
            reduces_by_copies=reduces_by_copies,
        )
    logits = rank.compute_logits_bytes()
    workspace = rank.compute_workspace_bytes(side_stream)
    return MemoryEstimate(
        weights=weights,
        weight_copies=rank.compute_weight_copy_bytes(),
        gradients=gradients,
        optimizer=rank.compute_optimizer_bytes(optimizer, trained, offload=offload),
        activations=_peak_activation_bytes(model, parallel, schedule, stage, micro_batch, precision, rank.saved),
        logits=logits,
        workspace=workspace,
        # Gathered input, gathered gradient, symmetric-memory copy.
        tensor_buffers=3 * rank.sequence * micro_batch * model.hidden * rank.itemsize if grid.tensor > 1 else 0,
        pipeline_buffers=rank.message_bytes * _count_pipeline_buffers(schedule, stage),
        graph_buffers=rank.compute_graph_bytes(workspace, logits, expert_rows, runs_eager_steps) if graphs else 0,
    )


@dataclass(frozen=True)
class _RankShape:
    """Sizes of a rank of a pipeline stage. Arguments are those of `estimate_stage_memory`."""

    model: ModelConfig
    parallel: ParallelConfig
    grid: Grid
    schedule: Schedule
    stage: int
    micro_batch: int
    precision: str
    linear_precision: str
    adapters: AdapterSpec | None

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter or activation."""
        return DTYPE_BYTES[self.precision]

    @property
    def master_itemsize(self) -> int:
        """Bytes of a gradient, master weight or value of optimizer state."""
        return max(4, self.itemsize)

    @property
    def sequence(self) -> int:
        """Tokens of a sample on one context rank."""
        return self.model.sequence_length // self.grid.context

    @property
    def message_bytes(self) -> int:
        """Bytes of an activation that pipeline stages send."""
        return self.sequence // self.grid.tensor * self.micro_batch * self.model.hidden * self.itemsize

    @cached_property
    def layers_by_chunk(self) -> list[ChunkLayers]:
        """Layers of each chunk of the stage."""
        return assign_stage_layers(self.model, self.parallel, self.stage)

    @cached_property
    def layer_indices(self) -> list[int]:
        """Indices in the model of the stage's layers, divided ones included."""
        return sorted({index for layers in self.layers_by_chunk for index, _ in layers})

    @cached_property
    def saved(self) -> LayerSums:
        """Bytes that a micro-batch saves per layer."""
        return self._sum_saved_bytes(self.parallel.recompute)

    def _sum_saved_bytes(self, recompute: str) -> LayerSums:
        """Return the bytes that a micro-batch saves per layer with this value of parallel.recompute."""
        return sum_saved_bytes(
            self.model,
            self.grid.tensor,
            self.micro_batch,
            self.precision,
            recompute,
            self.linear_precision,
            self.adapters,
            self.grid.context,
        )

    def count_trained(self) -> int:
        """Return the number of trained parameters, before they are sharded."""
        if self.adapters is None:
            return count_stage_parameters(self.model, self.parallel, self.stage)
        tensor = self.grid.tensor
        return sum(count_adapter_elements(self.model, self.adapters, layers, tensor) for layers in self.layers_by_chunk)

    def compute_optimizer_bytes(self, optimizer: str, trained: int, offload: bool) -> int:
        """Return the bytes of master weights and optimizer state on the device, for `trained` parameters."""
        if self.adapters is None:
            state = count_stage_state(self.model, self.parallel, self.stage, optimizer)
        else:
            state = sum(
                count_adapter_state(self.model, self.adapters, layers, optimizer, self.grid.tensor)
                for layers in self.layers_by_chunk
            )
        if self.itemsize < self.master_itemsize:
            state += trained  # master weights
        if self.parallel.zero:
            state = state * ceil_divide(trained, self.grid.shards) // trained
        optimizer_bytes = self.master_itemsize * state
        if offload:
            # Each slot has master weights and AdamW's two moments (optim/offload.py).
            slot_bytes = 3 * OFFLOAD_ELEMENTS * self.master_itemsize
            optimizer_bytes = min(optimizer_bytes, OFFLOAD_SLOTS * slot_bytes)
        return optimizer_bytes

    def compute_weight_copy_bytes(self) -> int:
        """Return the bytes of copies of matrices in the format that GEMMs read."""
        matrices = count_stage_matrix_elements(self.model, self.parallel, self.stage)
        has_float8_gathers = gathers_float8(self.model, self.parallel, self.linear_precision, self.grid.shards)
        if self.parallel.zero == 3 and has_float8_gathers:
            # One byte per element of the rank's shards; copies of gathered matrices lie in the parameter slots.
            return ceil_divide(matrices, self.grid.shards)
        matrices += count_stage_expert_elements(self.model, self.parallel, self.stage)
        return LINEAR_PRECISIONS[self.linear_precision].weight_copy_bytes * matrices

    def compute_logits_bytes(self) -> int:
        """Return the bytes of the logits that exist at a time, 0 without the last chunk."""
        if self.stage != self.schedule.chunk_map.last_stage:
            return 0
        vocabulary = self.model.padded_vocab // self.grid.tensor
        logits_bytes = min(self.sequence * self.micro_batch * vocabulary * self.itemsize, MAX_LOGITS_BYTES)
        if self.model.logit_softcap is not None:
            logits_bytes *= 2  # the slope of the softcap, until the gradient is known
        return logits_bytes

    def compute_workspace_bytes(self, side_stream: bool) -> int:
        """Return the bytes that the backward of the largest layer needs next to saved activations."""
        tensor, context = self.grid.tensor, self.grid.context
        bytes_per_width = self.sequence * self.micro_batch * self.itemsize
        all_saved = self._sum_saved_bytes(recompute="none")
        specs = resolve_layers(self.model)
        workspace = 0
        # Layers with equal specifications need equally much, so one index of each specification is enough.
        index_by_spec = {specs[index]: index for index in self.layer_indices}
        for spec, index in index_by_spec.items():
            recomputed = all_saved.running[index + 1] - all_saved.running[index]
            recomputed -= self.saved.running[index + 1] - self.saved.running[index]
            width = _workspace_width(spec, tensor, side_stream)
            width += 2 * _count_exchanged_values(spec, tensor, context)  # sent and received values
            workspace = max(workspace, bytes_per_width * width + int(recomputed))
        return workspace

    def compute_graph_bytes(self, workspace: int, logits: int, expert_rows: float, runs_eager_steps: bool) -> int:
        """Return the bytes that CUDA graphs need beyond those of eager chunks.

        Args:
            workspace, logits: bytes of these kinds in the estimate.
            expert_rows, runs_eager_steps: as for `estimate_stage_memory`.
        """
        schedule, tensor = self.schedule, self.grid.tensor
        in_flight = schedule.count_in_flight(self.stage)
        # Each micro-batch in flight has temporaries of its own; `workspace` and `logits` already count one of them.
        graph_bytes = (in_flight - 1) * (workspace + logits)
        if schedule.chunks > 1:
            graph_bytes += 3 * in_flight * self.message_bytes  # input, gradient of the output, gradient of the input
        # The exchange of these axes reaches across cuts of graphs, so some micro-batches are eager.
        has_exchange = tensor > 1 or self.grid.context > 1
        if self.grid.shards > 1 and (has_exchange or runs_eager_steps):
            # Memory of eager micro-batches is not available to graphs, so the activations of one are held twice. The
            # first micro-batches of all chunks of a stage are eager, and in flight together.
            running = self.saved.running
            layer_count = sum(layers.layer_count for layers in self.layers_by_chunk)
            layer_bytes = max((running[i + 1] - running[i] for i in self.layer_indices), default=0)
            graph_bytes += ceil(layer_count * layer_bytes) + workspace + logits
        if tensor > 1:
            # The rows of a rank's experts vary between micro-batches, but the shapes of graphs do not. So their buffers
            # have room for `expert_rows` times the rows of an even load.
            specs = resolve_layers(self.model)
            row_width = sum(_expert_row_width(specs[i]) for i in self.layer_indices)
            expert_bytes = row_width * self.sequence * self.micro_batch * self.itemsize // tensor
            even_load_bytes = in_flight * expert_bytes / schedule.virtual_stages + workspace
            graph_bytes += int((expert_rows - 1) * even_load_bytes)
        return graph_bytes


def gathers_float8(model: ModelConfig, parallel: ParallelConfig, linear_precision: str, data: int) -> bool:
    """Return whether `data` data-parallel ranks gather matrices as float8; resolves parallel.gather_precision=auto.

    Matrices of experts are gathered in train.precision, so a model with experts gathers no float8.
    """
    if LINEAR_PRECISIONS[linear_precision].gathered_weight_bytes is None or has_experts(model):
        return False
    return parallel.zero > 0 and data > 1 and parallel.gather_precision != "default"


def _count_weight_bytes(
    model: ModelConfig,
    parallel: ParallelConfig,
    grid: Grid,
    schedule: Schedule,
    *,
    stage: int,
    itemsize: int,
    maps_shards: bool,
) -> int:
    """Return the bytes of parameters in the training precision that a rank of a stage holds.

    Args:
        itemsize: bytes of a parameter.
    """
    parameters = count_stage_parameters(model, parallel, stage)
    if parallel.zero < 3 or grid.shards == 1:
        return itemsize * parameters
    units = count_stage_units(model, parallel, stage)
    resident_bytes = itemsize * (parameters - units.sharded)
    if maps_shards:
        chunk_slots = None
        if has_chunk_slots(parallel.virtual_stages):
            # Chunks differ in size, so the memory of a slot depends on which chunks share it.
            chunk_slots = assign_chunk_slots(schedule, stage)
        slot_units = units.list_slot_units(parallel.zero3_keep_layers, itemsize, chunk_slots)
        mapped_bytes = count_mapped_bytes(slot_units, grid.shards)
        if mapped_bytes is not None:
            return resident_bytes + mapped_bytes
    slots = units.count_parameter_slots(parallel.zero3_keep_layers)
    return resident_bytes + itemsize * (ceil_divide(units.sharded, grid.shards) + slots)


def _adapter_gradient_bytes(
    trained: int, parallel: ParallelConfig, grid: Grid, master_itemsize: int, reduces_by_copies: bool
) -> int:
    """Return an upper bound of the bytes of gradient buffers of a stage's adapters; ZeRO-2 may hold fewer at a time."""
    elements = trained
    if reduces_by_copies and grid.shards > 1:
        elements += prod(size_staging(trained, grid.shards))
    if parallel.zero >= 2 and grid.shards > 1:
        elements += ceil_divide(trained, grid.shards)
    total = master_itemsize * elements
    if parallel.reduce_dtype == "bfloat16" and grid.shards > 1:
        total += DTYPE_BYTES["bfloat16"] * trained
    return total


def _gradient_bytes(
    model: ModelConfig,
    parallel: ParallelConfig,
    grid: Grid,
    stage: int,
    master_itemsize: int,
    reduces_by_copies: bool,
    rounds_blocks: bool,
) -> int:
    parameters = count_stage_parameters(model, parallel, stage)
    if grid.shards == 1:
        return master_itemsize * parameters
    unreduced = parameters
    wide = parameters
    reduced_shards = 0
    staging = 0
    if parallel.zero >= 2:
        units = count_stage_units(model, parallel, stage)
        resident = parameters - units.sharded
        table_part = None
        if parallel.zero == 2:
            table_part = units.find_table_part(parallel.bucket_elements)
        slots = units.count_gradient_slots(table_part)
        unreduced = slots + resident
        wide = unreduced
        if rounds_blocks:
            wide = units.count_wide_slots(table_part) + resident
        if reduces_by_copies:
            staging = prod(size_staging(slots, grid.shards))
        reduced_shards = ceil_divide(units.sharded, grid.shards)
    total = master_itemsize * (wide + reduced_shards)
    sent_itemsize = master_itemsize
    if parallel.reduce_dtype == "bfloat16":
        sent_itemsize = DTYPE_BYTES["bfloat16"]
        # Each gradient that is not reduced yet has a rounded copy.
        total += sent_itemsize * unreduced
    return total + sent_itemsize * staging


def _expert_row_width(spec: LayerSpec) -> int:
    """Return the saved elements per token of the rows of experts, 0 for a layer without experts."""
    experts = spec.feed_forward
    if not isinstance(experts, ExpertsSpec):
        return 0
    return experts.settings.top_k * experts.input_matrices * experts.width


def _workspace_width(spec: LayerSpec, tensor: int, side_stream: bool) -> int:
    """Return the values per token that live inside one layer's backward at once."""
    is_parallel = BLOCK_PARTS[spec.norms.block].is_parallel
    layer = layer_inventory(spec)
    attention, mlp = (width // tensor for width in gradient_widths(spec))
    # A parallel block's two branches go backward through one GEMM, so both gradients live at once.
    width = attention + mlp if is_parallel else max(attention, mlp)
    if not side_stream:
        return width
    # Two weight gradients may be queued, and their GEMMs' operands then stay in memory (ops/side_stream.py). The widest
    # two belong to the projection into the MLP and to the projection out of it. A parallel block projects into
    # attention and MLP at once. Each GEMM's operands are an input and an output gradient.
    projected = layer.attention + layer.mlp if is_parallel else layer.mlp
    in_width = sum(w.shape[0] // tensor for w in projected if w.is_gemm_weight and w.partition_dim == 0)
    out_widths = [w.shape[1] // tensor for w in layer.mlp if w.is_gemm_weight and w.partition_dim == 1]
    return width + (spec.hidden + in_width) + (spec.hidden + max(out_widths, default=0))


def _count_exchanged_values(spec: LayerSpec, tensor: int, context: int) -> int:
    """Return the values per token that a rank exchanges with other context ranks in an attention; 0 if context is 1."""
    if context == 1:
        return 0
    mixer = spec.mixer
    share = share_heads(mixer.heads // tensor, mixer.kv_heads // tensor, context)
    key_value_width = 2 * mixer.kv_heads * mixer.head_size // tensor
    if share.gathers_keys:
        return context * key_value_width
    query_width = mixer.heads * mixer.head_size // tensor
    return query_width + share.copies * key_value_width


def _count_pipeline_buffers(schedule: Schedule, stage: int) -> int:
    """Return the number of message buffers of a stage."""
    kinds, chunks, _ = schedule.tables[stage].T  # the columns of the action table; the last one is the micro-batch
    count = 0
    for send in SENDS:
        sent = np.unique(chunks[kinds == send]).tolist()
        channels = {schedule.channel(stage, Action(send, chunk, microbatch=0)) for chunk in sent}
        count += SEND_SLOTS * len(channels)
    for receive, computes in zip(RECEIVES, ((ActionKind.FORWARD,), INPUT_BACKWARDS), strict=True):
        count += _count_posted(schedule, stage, receive, computes)
    # A received activation becomes the saved input and is counted there. A received gradient stays in its buffer while
    # backward reads it, and needs one buffer more than those that are posted.
    if ActionKind.RECV_BACKWARD in kinds:
        count += 1
    return count


def _count_posted(schedule: Schedule, stage: int, receive: ActionKind, computes: tuple[ActionKind, ...]) -> int:
    """Return the maximum number of receives of a kind that are posted or have arrived while the stage computes."""
    kinds, chunks, _ = schedule.tables[stage].T
    consumed = make_kind_mask(kinds, *computes) & schedule.message_mask(stage, receive)[chunks]
    waiting = ((kinds == receive).astype(int) - consumed).cumsum()
    return int(waiting[make_kind_mask(kinds, *COMPUTES)].max())


def _peak_activation_bytes(
    model: ModelConfig,
    parallel: ParallelConfig,
    schedule: Schedule,
    stage: int,
    micro_batch: int,
    precision: str,
    saved: LayerSums,
) -> int:
    """Return the maximum over the schedule of the bytes of saved activations.

    Between BACKWARD_INPUT and BACKWARD_WEIGHT, the operands of weight-gradient GEMMs replace the saved activations.
    """
    saved_head_tensors = head_saved_tensors(model, parallel.tensor, micro_batch, precision, parallel.context)
    head_bytes = sum(tensor.bytes for tensor in saved_head_tensors)
    length = model.sequence_length // parallel.context
    output_bytes = 0
    if schedule.stages > 1:
        output_bytes = length // parallel.tensor * micro_batch * model.hidden * DTYPE_BYTES[precision]
    layers = assign_layers(model, parallel)
    sizes = []  # bytes that a micro-batch saves in each chunk of the stage
    operand_widths = []
    operands = _weight_gradient_operand_sums(model, parallel.tensor)
    offloaded = _count_offloaded_input_bytes(parallel, layers, saved)
    for position in schedule.chunk_map.stage_chunks(stage):
        size = int(saved.of_chunk(layers[position])) - offloaded[position]
        sizes.append(size + (head_bytes if position == schedule.chunks - 1 else output_bytes))
        operand_widths.append(int(operands.of_chunk(layers[position])))
    kinds, chunks, _ = schedule.tables[stage].T
    deltas = schedule.in_flight_deltas(stage) * np.array(sizes)[chunks]
    queued_deltas = (kinds == ActionKind.BACKWARD_INPUT).astype(int) - (kinds == ActionKind.BACKWARD_WEIGHT)
    bytes_per_width = length * micro_batch * DTYPE_BYTES[precision]
    deltas = deltas + queued_deltas * bytes_per_width * np.array(operand_widths)[chunks]
    moving_bytes = 0
    if any(offloaded):
        layer_bytes = [int(saved.of_chunk(chunk) / chunk.layer_count) for chunk in layers if chunk.layer_count]
        moving_bytes = OFFLOADED_DEVICE_INPUTS * max(layer_bytes)
    return int(deltas.cumsum().max()) + moving_bytes


def _count_offloaded_input_bytes(
    parallel: ParallelConfig, layers: Sequence[ChunkLayers], saved: LayerSums
) -> list[int]:
    """Return the bytes of layer inputs that a micro-batch of each chunk keeps in host memory.

    The last layer's input stays on the device. So does the first layer's input in each chunk but the model's first,
    because the pipeline keeps it for its gradient.
    """
    if not parallel.offload_activations:
        return [0] * len(layers)
    byte_counts = []
    for position, chunk in enumerate(layers):
        kept_count = 1 if position == 0 else 2  # inputs on the device
        offloaded_share = 0.0
        if chunk.layer_count:
            offloaded_share = max(0.0, 1 - kept_count / chunk.layer_count)
        byte_counts.append(int(saved.of_chunk(chunk) * offloaded_share))
    return byte_counts


def estimate_offloaded_input_bytes(
    model: ModelConfig, parallel: ParallelConfig, schedule: Schedule, stage: int, micro_batch: int, precision: str
) -> int:
    """Return the peak bytes of host memory that a rank of a stage fills with layer inputs."""
    layers = assign_layers(model, parallel)
    # Inputs are offloaded with recompute=full only, which saves nothing else of a layer.
    saved = sum_saved_bytes(
        model,
        parallel.tensor,
        micro_batch,
        precision,
        recompute="full",
        linear_precision="default",
        context=parallel.context,
    )
    offloaded = _count_offloaded_input_bytes(parallel, layers, saved)
    sizes = np.array([offloaded[position] for position in schedule.chunk_map.stage_chunks(stage)])
    _, chunks, _ = schedule.tables[stage].T
    return int((schedule.in_flight_deltas(stage) * sizes[chunks]).cumsum().max())


@lru_cache(maxsize=256)
def _weight_gradient_operand_sums(model: ModelConfig, tensor: int) -> LayerSums:
    """Return the sums over layers of the values per token that the GEMMs of weight gradients read.

    Column-parallel matrices of a layer share one gathered input. Each row-parallel matrix has a gathered output
    gradient.
    """

    def count(tensors: Sequence[LogicalTensor]) -> int:
        columns = [matrix.shape for matrix in tensors if matrix.is_gemm_weight and matrix.partition_dim == 0]
        rows = [matrix.shape for matrix in tensors if matrix.is_gemm_weight and matrix.partition_dim == 1]
        width = sum(shape[0] for shape in columns) // tensor + max((shape[1] for shape in columns), default=0)
        return width + sum(shape[1] // tensor + shape[0] for shape in rows)

    return sum_tensors(model, count)
