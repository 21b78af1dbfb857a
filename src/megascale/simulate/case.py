"""A case: model shape, layout and software as numbers or arrays, so that one formula prices any number of layouts.

The *software* is a training stack (software.py), whose switches and times the case contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megascale.config import ModelConfig
from megascale.core.inventory import resolve_layers
from megascale.core.layer_spec import AttentionSpec, DenseSpec, ExpertsSpec
from megascale.core.part_inventories import window_area_fraction
from megascale.errors import FitError
from megascale.simulate.cluster import ATTENTION_KERNELS
from megascale.simulate.software import RECOMPUTE, Software


@dataclass(frozen=True)
class Case:
    """A model shape, a layout and a software stack as numbers, bools or arrays that broadcast together.

    Fields that are not listed are those of `Software`.

    Attributes:
        layers, hidden, heads, ffn, sequence: the model's sizes.
        gated: whether the MLP has a gate.
        query, kv: widths of the query projection, and of the key or value projection.
        gate: width of the projection that gates the output of attention; 0 without one.
        vocab: vocabulary with padding.
        causal_share: share of the causal triangle within attention windows, mean over layers.
        tensor, pipeline, data: ranks of the axes.
        virtual: chunks per stage.
        micro: sequences per micro-batch.
        batch: sequences per step.
        middle_layers: layers of the fullest stage besides the last one.
        attention, recompute: indices into ATTENTION_KERNELS and RECOMPUTE.
        tied: whether the output layer is the embedding.
        micro_batch_group_size: parallel.micro_batch_group_size; 0: as many micro-batches as stages.
        context: ranks that divide a sequence.
        top_k: experts of a token.
        gather_share: gathers of blocks under ZeRO-3, relative to two per micro-batch (core/traffic.py).
        expert_parallel: ranks (of data x context) that divide the experts.
    """

    layers: Any
    hidden: Any
    heads: Any
    query: Any
    kv: Any
    ffn: Any
    gated: Any
    vocab: Any
    sequence: Any
    causal_share: Any
    tensor: Any
    pipeline: Any
    virtual: Any
    data: Any
    micro: Any
    batch: Any
    middle_layers: Any
    last_layers: Any
    parallel_block: Any
    tp_overlap: Any
    pp_overlap: Any
    dp_overlap: Any
    fused_operators: Any
    async_data: Any
    attention: Any
    sequence_parallel: Any
    distributed_optimizer: Any
    recompute: Any
    gradient_bytes: Any
    reduce_bytes: Any
    gather_bytes: Any = 2
    reduces_each_microbatch: Any = False
    elementwise_passes: Any = 1.0
    full_sharding: Any = False
    shard_copies: Any = False
    unit_slots: Any = False
    copied_gathers: Any = False
    copied_reductions: Any = np.inf
    mapped_shards: Any = False
    rounded_gradients: Any = False
    gather_share: Any = 1.0
    tied: Any = False
    tied_shards: Any = False
    micro_batch_group_size: Any = 0
    launch_us: Any = 0.0
    region_host_us: Any = 0.0
    region_gap_us: Any = 0.0
    float8: Any = False
    float8_agrees: Any = False
    bf16_weight_gradients: Any = False
    fused_loss: Any = False
    fused_accumulation: Any = True
    tp_backward_overlap: Any = True
    context: Any = 1
    experts: Any = 1
    top_k: Any = 1
    expert_parallel: Any = 1
    gate: Any = 0
    trains_adapters: Any = False

    @classmethod
    def from_model(
        cls,
        model: ModelConfig,
        software: Software,
        *,
        tensor: Any,
        pipeline: Any,
        virtual: Any,
        data: Any,
        micro: Any,
        batch: Any,
        middle_layers: Any = None,
        last_layers: Any = None,
        micro_batch_group_size: Any = 0,
        context: Any = 1,
        gather_share: Any = 1.0,
        experts: Any = 1,
        top_k: Any = 1,
        expert_parallel: Any = 1,
    ) -> Case:
        """Return the case of a model under a software stack in one layout or, with arrays, in many layouts.

        Block and window are those of the software, not of the model. `middle_layers` and `last_layers` default to
        layers / pipeline. `experts`, `top_k` and `expert_parallel` add experts to a dense model, for a rough estimate.

        Raises FitError for a model with layers of experts, whose kernels are not calibrated.
        """
        model_of_software = model
        if model.window != software.window:
            model_of_software = model.model_copy(update={"window": software.window})
        layers = resolve_layers(model_of_software)
        if any(isinstance(layer.feed_forward, ExpertsSpec) for layer in layers):
            raise FitError(
                "model.mlp=experts has no price: the simulator is not calibrated for grouped GEMMs; `megascale plan` "
                "gives memory and FLOPs of the model, and --experts with a dense model prices a rough alternative"
            )
        window_shares = [window_area_fraction(model.sequence_length, layer.window) for layer in layers]
        attentions = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec)]
        dense = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, DenseSpec)]
        host_factor = software.float8_host if software.float8 else 1.0
        return cls(
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            query=_mean([mixer.heads * mixer.head_size for mixer in attentions], model.heads * model.head_size),
            kv=_mean([mixer.kv_heads * mixer.head_size for mixer in attentions], model.num_kv_heads * model.head_size),
            gate=_mean([mixer.heads * mixer.head_size * mixer.has_gate for mixer in attentions], 0),
            ffn=_mean([part.width for part in dense], model.ffn),
            gated=model.has_gated_mlp,
            vocab=model.padded_vocab,
            sequence=model.sequence_length,
            causal_share=float(np.mean(window_shares)),
            tensor=tensor,
            pipeline=pipeline,
            virtual=virtual,
            data=data,
            micro=micro,
            batch=batch,
            middle_layers=model.layers / pipeline if middle_layers is None else middle_layers,
            last_layers=model.layers / pipeline if last_layers is None else last_layers,
            parallel_block=software.parallel_block,
            tp_overlap=software.tp_overlap,
            pp_overlap=software.pp_overlap,
            dp_overlap=software.dp_overlap,
            fused_operators=software.fused_operators,
            async_data=software.async_data,
            attention=ATTENTION_KERNELS.index(software.attention),
            sequence_parallel=software.sequence_parallel,
            distributed_optimizer=software.distributed_optimizer,
            recompute=RECOMPUTE.index(software.recompute),
            gradient_bytes=software.gradient_bytes,
            reduce_bytes=software.reduce_bytes,
            gather_bytes=software.gather_bytes,
            reduces_each_microbatch=software.reduces_each_microbatch,
            elementwise_passes=software.elementwise_passes,
            full_sharding=software.full_sharding,
            shard_copies=software.shard_copies,
            unit_slots=software.unit_slots,
            copied_gathers=software.copied_gathers,
            copied_reductions=software.copied_reductions,
            mapped_shards=software.mapped_shards,
            rounded_gradients=software.rounded_gradients,
            gather_share=gather_share,
            tied=model.tied_embeddings,
            tied_shards=software.tied_shards,
            micro_batch_group_size=micro_batch_group_size,
            launch_us=software.launch_us * host_factor,
            region_host_us=software.region_host_us * host_factor,
            region_gap_us=software.region_gap_us,
            float8=software.float8,
            float8_agrees=software.float8_agrees,
            bf16_weight_gradients=software.bf16_weight_gradients,
            fused_loss=software.fused_loss,
            fused_accumulation=software.fused_accumulation,
            tp_backward_overlap=software.tp_backward_overlap,
            trains_adapters=software.trains_adapters,
            context=context,
            experts=experts,
            top_k=top_k,
            expert_parallel=expert_parallel,
        )

    @classmethod
    def stack(cls, cases: Sequence[Case]) -> Case:
        """Return many scalar cases as one case of arrays."""
        columns = {}
        for field in fields(cls):
            columns[field.name] = np.array([getattr(case, field.name) for case in cases])
        return cls(**columns)

    @property
    def gpus(self) -> Any:
        """Ranks of the layout."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def tokens(self) -> Any:
        """Tokens of a micro-batch on one rank."""
        return self.micro * self.sequence / self.context

    @property
    def replicas(self) -> Any:
        """Ranks that hold the same dense weights and sum their gradients."""
        return self.data * self.context

    @property
    def microbatches(self) -> Any:
        """Micro-batches per replica and step."""
        return self.batch // (self.data * self.micro)

    @property
    def flops(self) -> Any:
        """Model FLOPs of a step, forward and backward, as in megascale.core.flops."""
        # The logits are the product of the hidden states with the vocabulary. Backward counts twice as much as forward.
        forward_per_token = self.layers * self.layer_flops + 2.0 * self.hidden * self.vocab
        return 3.0 * forward_per_token * self.batch * self.sequence

    @property
    def layer_flops(self) -> Any:
        """Forward FLOPs of one token in one layer."""
        h = self.hidden
        q = self.query
        f = self.ffn
        # Query and output projection, key and value projection, a gate, and the two or three matrices of the MLP.
        projections = 2.0 * h * (2 * q + 2 * self.kv + self.gate) + 2.0 * h * f * self.top_k * np.where(
            self.gated, 3, 2
        )
        # Attention has two products of 2 FLOPs per channel and key. As in megascale.core.flops, full attention counts
        # all keys of the sequence.
        return projections + 4.0 * self.sequence * q * self.causal_share

    @property
    def layer_parameters(self) -> Any:
        """Weights of one layer on all tensor-parallel ranks together, without biases, norms and routers."""
        return self.hidden * (2 * self.query + 2 * self.kv + self.gate) + self.expert_parameters

    @property
    def expert_parameters(self) -> Any:
        """Weights of the MLP: all of a dense MLP, or those of the experts that an expert-parallel rank holds."""
        matrix_count = np.where(self.gated, 3, 2)
        return self.hidden * self.ffn * matrix_count * self.experts / self.expert_parallel

    def fits(self) -> Any:
        """Return whether sizes divide: layers over chunks, heads and widths over tensor, batch over replicas.

        Several chunks per stage also need a pipeline or a micro-batch group. Memory is not considered.
        """
        t = self.tensor
        chunks = self.pipeline * self.virtual
        return (
            (self.layers % chunks == 0)
            & (self.heads % t == 0)
            & (self.ffn % t == 0)
            & (self.kv % t == 0)
            & (self.vocab % t == 0)
            & (self.sequence % (t * self.context) == 0)
            & (self.experts % self.expert_parallel == 0)
            & (self.replicas % self.expert_parallel == 0)
            & (self.top_k <= self.experts)
            & (self.batch % (self.data * self.micro) == 0)
            & (self.batch >= self.data * self.micro)
            & ((self.virtual == 1) | (self.pipeline > 1) | (self.micro_batch_group_size > 0))
        )


def _mean(widths: Sequence[int], default: int) -> int | float:
    """Return the mean width over layers, as an integer if all are equal; `default` without layers."""
    if not widths:
        return default
    if len(set(widths)) == 1:
        return widths[0]
    return sum(widths) / len(widths)
