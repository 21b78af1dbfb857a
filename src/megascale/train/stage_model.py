"""The part of the model that one pipeline stage trains: its chunks, and the flat buffers that hold their parameters."""

from __future__ import annotations

import torch

from megascale.config.parts import LINEAR_PRECISIONS
from megascale.core.adapters import AdapterSpec, list_adapters, name_within_layer
from megascale.core.layers import ChunkLayers
from megascale.core.layout import Layout
from megascale.errors import ConfigError
from megascale.model.transformer import Chunk
from megascale.ops.amax import AmaxPool
from megascale.parallel.buffers import Axes, ParamAndGradBuffer
from megascale.parallel.offload import InputCopies
from megascale.parallel.parameters import get_spec, initialise, materialise
from megascale.parallel.runtime import Runtime
from megascale.train.module_checks import check_tensors


class StageModel:
    """Makes the chunks of a stage in their flat buffers.

    Args:
        stage: the rank's pipeline stage.
        axes: the axes that the buffers and the layers communicate over.
        runtime: its kernels are current while the chunks are made.
        dtype: type of weights and activations.
        draws_weights: whether to draw initial weights; otherwise they are 0.

    Attributes:
        chunks: the stage's chunks, in the order of the model.
        buffers: the flat buffer of each chunk.
        adapters: adapters that are trained in place of the model; None without train.lora.
        lines: start-up lines by name.
    """

    def __init__(
        self,
        layout: Layout,
        stage: int,
        axes: Axes,
        *,
        runtime: Runtime,
        dtype: torch.dtype,
        device: torch.device,
        draws_weights: bool,
    ) -> None:
        self.chunks: list[Chunk] = []
        self.buffers: list[ParamAndGradBuffer] = []
        self.adapters = AdapterSpec.from_config(layout.config.train)
        self.lines: dict[str, str] = {}
        self._layout = layout
        self._config = layout.config
        self._stage = stage
        self._axes = axes
        self._runtime = runtime
        self._dtype = dtype
        self._device = device
        for chunk_index, layers in enumerate(layout.stage_layers(stage)):
            self._add_chunk(chunk_index, layers, draws_weights=draws_weights)
        self._offload_inputs()
        self._describe_adapters()
        self._check_linears()

    def _add_chunk(self, chunk_index: int, layers: ChunkLayers, *, draws_weights: bool) -> None:
        """Make a chunk in its flat buffer, with initial values if `draws_weights`."""
        config = self._config
        chunk = self._make_chunk(chunk_index, layers)
        check_tensors(chunk, layers, config.model, trains_all=self.adapters is None)
        if self.adapters is not None:
            self._allocate_frozen(chunk, self.adapters)
        # A precision that can gather float8 gives matrices buckets of their own even if it does not gather float8. The
        # shards, and therefore the bits of sums over shards, do not depend on that choice.
        can_gather_float8 = LINEAR_PRECISIONS[config.train.linear_precision].gathered_weight_bytes is not None
        buffer = ParamAndGradBuffer(
            chunk,
            self._device,
            axes=self._axes,
            zero=config.parallel.zero,
            bucket_elements=self._layout.bucket_elements,
            float8_gather=can_gather_float8 and self._layout.grid.shards > 1,
            table_part=self._layout.find_table_part(self._stage),
        )
        self.chunks.append(chunk)
        self.buffers.append(buffer)
        if draws_weights and buffer.zero < 3:
            initialise(chunk, config.train.seed)
        elif draws_weights:
            buffer.initialise_resident(config.train.seed)

    def _make_chunk(self, chunk_index: int, layers: ChunkLayers) -> Chunk:
        """Return the chunk with index `chunk_index` of this stage, on the meta device."""
        config, schedule = self._config, self._layout.schedule()
        global_chunk = schedule.global_chunk(self._stage, chunk_index)
        is_last = global_chunk == schedule.chunks - 1
        # If one stage has both ends of the model, the first chunk's buffers hold the embedding and its gradient.
        has_both_ends = is_last and chunk_index > 0 and schedule.chunk_map.first_stage == self._stage
        embedding = None
        if config.model.tied_embeddings and has_both_ends:
            embedding = self.chunks[0].token_embedding
        with self._runtime.kernels.as_current():
            return Chunk(
                config.model,
                layers,
                is_first=global_chunk == 0,
                is_last=is_last,
                axis=self._axes.model["tensor"],
                axes=self._axes.model,
                dtype=self._dtype,
                recompute=config.parallel.recompute,
                linear_precision=config.train.linear_precision,
                embedding=embedding,
                adapters=self.adapters,
            )

    def _allocate_frozen(self, chunk: Chunk, adapters: AdapterSpec) -> None:
        """Allocate the parameters that are not trained: weights only, complete on every data-parallel rank.

        Raises ConfigError if the module of an adapted matrix has made no adapters.
        """
        frozen = [parameter for parameter in chunk.parameters() if not parameter.requires_grad]
        materialise(chunk, {p: torch.zeros(p.shape, dtype=p.dtype, device=self._device) for p in frozen})
        trained_names: set[str] = set()
        frozen_names: set[str] = set()
        for parameter in chunk.parameters():
            names = trained_names if parameter.requires_grad else frozen_names
            names.update(piece.name for piece in get_spec(parameter).pieces)
        for matrix, a, b in list_adapters(self._config.model, adapters):
            if matrix.name in frozen_names and not {a.name, b.name} <= trained_names:
                raise ConfigError(
                    f"train.lora.targets includes {name_within_layer(matrix)}, whose module has no adapters; leave it "
                    "out of train.lora.targets"
                )

    def _offload_inputs(self) -> None:
        """Let the chunks keep the inputs of their layers in host memory, if parallel.offload_activations says so."""
        if not self._config.parallel.offload_activations:
            return
        input_copies = InputCopies(self._device)
        for chunk in self.chunks:
            chunk.input_copies = input_copies
        self.lines["offload"] = (
            "layer inputs are in host memory; on the device are the last one of each chunk and two being copied"
        )

    def _describe_adapters(self) -> None:
        """Record which matrices have adapters."""
        if self.adapters is not None:
            targets = ", ".join(sorted(self.adapters.targets)) or "all matrices of the layers"
            self.lines["adapters"] = f"rank {self.adapters.rank} on {targets}; the model itself is not trained"

    def _check_linears(self) -> None:
        """Check that the precision of linear layers suits their shapes. Make the maxima that float8 collects."""
        config, runtime = self._config, self._runtime
        token_count = config.model.sequence_length // self._layout.grid.context * config.train.micro_batch
        for chunk in self.chunks:
            with runtime.kernels.as_current():
                chunk.linears.check(chunk.collect_linear_weights(), token_count, self._device)
                chunk.linears.check_experts(chunk.collect_expert_stacks(), self._device)
        if any(chunk.linears.collects_amax for chunk in self.chunks):
            runtime.kernels.amaxes = AmaxPool()
