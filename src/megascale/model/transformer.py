"""The transformer, divided into chunks of consecutive blocks. The first chunk embeds tokens, the last computes losses.

A pipeline stage holds one or more chunks; without pipeline parallelism one chunk is the whole model. Every layer is
written for a tensor-parallel axis, which may have size one. Activations are x_SBH = [sequence / tensor ranks, batch,
hidden] between layers. In shapes, s is the number of tokens in this context rank's slice of the sequence, b the
micro-batch, t the number of tensor-parallel ranks, h the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megascale.config import ModelConfig
from megascale.core.adapters import AdapterSpec, is_adapter
from megascale.core.batch import Batch
from megascale.core.inventory import embedding_tensors, head_tensors, resolve_layers
from megascale.core.inventory_records import LogicalTensor, norm_tensors
from megascale.core.layers import ChunkLayers
from megascale.model.block import make_block
from megascale.model.context import EVALUATION, ForwardContext, LayerSetup, Rotary
from megascale.model.experts import keep_routing, list_expert_layers
from megascale.model.fusion import ResidualStream, add_and_norm
from megascale.model.norm import Norm
from megascale.model.rotary import RotaryTables
from megascale.ops.attention_documents import DocumentMask
from megascale.ops.cross_entropy import softcap_
from megascale.ops.dropout import dropout, make_dropout_key
from megascale.parallel.collectives import SINGLE_RANK, Axis
from megascale.parallel.linear import make_linears
from megascale.parallel.module import DirectModule
from megascale.parallel.offload import InputCopies, InputStack, LastInput, OffloadedInput
from megascale.parallel.parameters import get_spec, local_parameter
from megascale.parallel.tensor import ColumnLinear, RowLinear
from megascale.parallel.vocabulary import vocabulary_embedding, vocabulary_logits, vocabulary_loss


def recompute_block(
    block: nn.Module,
    x_SBH: torch.Tensor,
    rotary: Rotary,
    context: ForwardContext,
    layer_input: OffloadedInput | LastInput | None = None,
) -> torch.Tensor:
    """Run a block whose activations backward recomputes.

    Args:
        layer_input: reads the block's input from host memory, if it was offloaded. The block then uses this instead of
            `x_SBH`.
    """
    # Recomputation must send tokens to the same experts as the first run.
    run_block = keep_routing(block)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if layer_input is None:
        y_SBH: torch.Tensor = checkpoint(run_block, x_SBH, rotary, context, **options)
        return y_SBH
    y_SBH = checkpoint(lambda: run_block(layer_input.read(), rotary, context), **options)
    return y_SBH


class Chunk(DirectModule):
    """Consecutive blocks of the model, with the embeddings in the first chunk, final norm and loss in the last.

    Args:
        model: shape of the whole model.
        layers: layers of this chunk, of which some may be halves (attention or MLP). A range stands for whole layers.
        is_first: whether the chunk has the embeddings.
        is_last: whether the chunk has the final norm and the loss.
        axis: the tensor-parallel axis.
        axes: axes of the grid that attention and MLP may communicate along, by name.
        dtype: type of weights and activations.
        recompute: value of parallel.recompute.
        linear_precision: value of train.linear_precision.
        embedding: token embedding of another chunk in this process, which tied logits use. The other chunk owns it.
        adapters: low-rank adapters, which are then the only trained parameters; None: all parameters are trained.

    Attributes:
        input_copies: copies between device and host for inputs of recomputed layers; None: inputs stay on the device.
        pre_forward_gather: called with the index of a unit before its forward. A unit is a group of parameters that
            are gathered together (ZeRO-3), see `list_forward_units`.
        pre_backward_gather: called with the index of a unit before its backward; None: not called.
    """

    def __init__(
        self,
        model: ModelConfig,
        layers: ChunkLayers | range,
        *,
        is_first: bool,
        is_last: bool,
        axis: Axis = SINGLE_RANK,
        axes: Mapping[str, Axis] | None = None,
        dtype: torch.dtype = torch.float32,
        recompute: str = "none",
        linear_precision: str = "default",
        embedding: nn.Parameter | None = None,
        adapters: AdapterSpec | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.axis = axis
        self.context_axis = (axes or {}).get("context", SINGLE_RANK)
        self.is_first = is_first
        self.is_last = is_last
        self.dtype = dtype
        self.recompute = recompute
        self.linears = make_linears(linear_precision, axis)
        if adapters is not None:
            self.linears.adapters = adapters
        # In a tuple, because a plain attribute would register the embedding as a parameter of this chunk.
        self._borrowed_embedding = () if embedding is None else (embedding,)
        has_embedding = is_first or (is_last and model.tied_embeddings and not self._borrowed_embedding)
        # The token embedding, and the position embedding if positions are learned.
        token_tensor, *position_tensors = embedding_tensors(model)
        self.token_embedding = self._make_parameter(token_tensor) if has_embedding else None
        self.position_embedding: nn.Parameter | None = None
        if is_first and position_tensors:
            self.position_embedding = self._make_parameter(position_tensors[0])
        if isinstance(layers, range):
            layers = ChunkLayers.from_range(layers)
        specs = resolve_layers(model)
        setups = [
            LayerSetup(specs[index], index, self.linears, dtype, model.dropout, recompute, half=half, axes=axes or {})
            for index, half in layers
        ]
        self.blocks = nn.ModuleList(make_block(setup) for setup in setups)
        self._rotary = RotaryTables([setup.layer.rope for setup in setups], model.sequence_length, dtype)
        self.norm: Norm | None = None
        head: dict[str, nn.Parameter] = {}
        if is_last:
            norm = norm_tensors(model.norm, model.hidden, "norm")
            self.norm = Norm(model.norm, model.norm_eps, norm, dtype)
            head = {tensor.name: self._make_parameter(tensor) for tensor in head_tensors(model)}
        # The matrix of the logits and its bias; None in other chunks, for tied embeddings, and without a bias.
        self.head = head.get("head.weight")
        self.head_bias = head.get("head.bias")
        self.input_copies: InputCopies | None = None
        self.pre_forward_gather: Callable[[int], None] = lambda unit: None
        self.pre_backward_gather: Callable[[int], None] | None = None
        if adapters is not None:
            self._freeze()

    def _freeze(self) -> None:
        """Exclude all parameters but adapters from training."""
        for parameter in self.parameters():
            if not any(is_adapter(piece.name) for piece in get_spec(parameter).pieces):
                parameter.requires_grad_(False)

    def list_forward_units(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each unit in the order of forward: embeddings, each block, and last all parameters.

        The last unit is that of norm and head. It lists all parameters, so that their gathers have ended when forward
        ends. Forward calls `pre_forward_gather(i)` before it uses unit i. A gather of the unit may therefore still run
        when forward starts.
        """
        blocks = [list(block.parameters()) for block in self.blocks]
        embeddings: list[nn.Parameter] = []
        if self.is_first:
            embeddings = [p for p in (self.token_embedding, self.position_embedding) if p is not None]
        units = [embeddings, *blocks, list(self.parameters())]
        if self.linears.adapters is None:
            return units
        return [[parameter for parameter in unit if parameter.requires_grad] for unit in units]

    def list_shared_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that several units use: an embedding that is also the matrix of the logits."""
        if self.token_embedding is not None and self.model.tied_embeddings:
            return [self.token_embedding]
        return []

    def collect_linear_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights [O, I] of linear layers, vocabulary excluded, by the names of their logical tensors."""
        weights: dict[str, torch.Tensor] = {}
        for module in self.modules():
            if isinstance(module, ColumnLinear | RowLinear):
                name = " + ".join(piece.name for piece in get_spec(module.weight).pieces)
                weights[name] = module.weight
        return weights

    def collect_expert_stacks(self) -> dict[str, torch.Tensor]:
        """Return the stacks of the experts' matrices [experts, ..., I] by the names of their logical tensors."""
        stacks: dict[str, torch.Tensor] = {}
        for layer in list_expert_layers([self]):
            for stack in (layer.experts_in, layer.experts_out):
                stacks[" + ".join(piece.name for piece in get_spec(stack).pieces)] = stack
        return stacks

    def _make_parameter(self, tensor: LogicalTensor) -> nn.Parameter:
        """Make the parameter with this tensor-parallel rank's shard of a logical tensor."""
        return local_parameter([tensor], self.axis.rank, self.axis.size, self.dtype)

    def forward(
        self, x: torch.Tensor, batch: Batch[torch.Tensor] | None = None, context: ForwardContext = EVALUATION
    ) -> torch.Tensor:
        """Run the chunk.

        Args:
            x: tokens [s, b] for the first chunk, else x_SBH [s/t, b, h].
            batch: the micro-batch, cut to the same slice. Blocks read its positions and document boundaries, and the
                last chunk reads its targets. Without targets the last chunk returns the normed hidden states, times
                the multiplier of logits.

        Returns:
            x_SBH, or on the last chunk with targets the loss of every token [s, b] in float32 or wider.
        """
        self.pre_forward_gather(0)
        slice_count = 1 if context.is_replicated else self.context_axis.size
        slice_length = x.shape[0] if self.is_first else x.shape[0] * self.axis.size
        if slice_count > 1:
            context = replace(context, sequence_start=self.context_axis.rank * slice_length)
        positions = None if batch is None else batch.positions
        if self.is_first:
            x = self._embed(x, context, positions)
            if self.pre_backward_gather is not None:
                self._call_before_backward(x, 0)
            if self.linears.adapters is not None and torch.is_grad_enabled():
                # Make every activation a part of the graph, even in layers before the first adapter.
                x.requires_grad_()
        # Number of new tokens in the whole sequence, of which this context rank has a slice.
        length = slice_length * slice_count
        if batch is not None and batch.document_boundaries is not None:
            context = replace(context, documents=DocumentMask.from_boundaries(batch.document_boundaries, length))
        # Positions count from the first cached token (generation), and from this rank's slice.
        past_length = context.past_length
        start = past_length + context.sequence_start
        if positions is None:
            rotary = self._rotary.select(start, start + slice_length, x.device, length=past_length + length)
        else:
            rotary = self._rotary.select(past_length, past_length + length, x.device, positions)
        stream = self._run_blocks(x, rotary, context)
        self.pre_forward_gather(len(self.blocks) + 1)
        if not self.is_last:
            assert isinstance(stream, torch.Tensor)
            return stream
        return self._run_head(stream, batch, context)

    def _run_blocks(self, x: torch.Tensor, rotary: list[Rotary], context: ForwardContext) -> ResidualStream:
        """Run the blocks on x_SBH. Return the residual stream, on the last chunk perhaps with a sum that is deferred.

        Args:
            rotary: cosines and sines for each block.
        """
        recomputes_layers = self.recompute == "full" and torch.is_grad_enabled()
        input_stack: InputStack | None = None
        if recomputes_layers and self.input_copies is not None:
            input_stack = InputStack(self.input_copies)
        stream: ResidualStream = x
        for i, block in enumerate(self.blocks):
            self.pre_forward_gather(i + 1)
            if recomputes_layers:
                assert isinstance(stream, torch.Tensor)
                layer_input: OffloadedInput | LastInput | None = None
                if input_stack is not None:
                    layer_input = self._offload(stream, i, input_stack)
                stream = recompute_block(block, stream, rotary[i], context, layer_input)
            else:
                # Let the next norm compute the block's last residual sum. The last block of a chunk has no next norm,
                # except in the last chunk.
                stream = block(stream, rotary[i], context, defer_add=self.is_last or i + 1 < len(self.blocks))
            if self.pre_backward_gather is not None:
                self._call_before_backward(stream, i + 1)
        return stream

    def _run_head(
        self, stream: ResidualStream, batch: Batch[torch.Tensor] | None, context: ForwardContext
    ) -> torch.Tensor:
        """Return what `forward` returns on the last chunk, for the residual stream after the last block."""
        assert self.norm is not None
        _, x = add_and_norm(self.norm, stream)
        if self.model.logit_multiplier != 1:
            # Logits are linear in x, so the smaller tensor is multiplied.
            x = x * self.model.logit_multiplier
        if batch is None or batch.targets is None:
            return x
        token_grad = context.token_grad if torch.is_grad_enabled() else None
        losses_SB = vocabulary_loss(
            x,
            self.output_weight,
            self.head_bias,
            batch.targets,
            vocab=self.model.vocab,
            axis=self.axis,
            token_grad=token_grad,
            linears=self.linears,
            loss=context.token_loss,
            softcap=self.model.logit_softcap,
        )
        if self.pre_backward_gather is not None:
            self._call_before_backward(losses_SB, len(self.blocks) + 1)
        return losses_SB

    def _offload(self, x_SBH: torch.Tensor, i: int, stack: InputStack) -> OffloadedInput | LastInput | None:
        """Offload the input of block `i` to the host. Return its reader, or None if the input stays on the device.

        The last block's input stays on the device, because backward begins with this block. The pipeline keeps a
        chunk's input for its gradient, so the first block's input stays too, unless it is the embedding's output.
        """
        if i + 1 == len(self.blocks):
            return LastInput(x_SBH, stack)
        if i == 0 and not self.is_first:
            return None
        return OffloadedInput(x_SBH, stack)

    def _call_before_backward(self, stream: ResidualStream, unit: int) -> None:
        """Let the backward of the unit that computed `stream` call `pre_backward_gather(unit)` when it begins.

        If the sum is deferred, the hook is on its summand y. The unit's last GEMM computed y, so the unit's backward
        begins with the gradient of y.
        """
        output = stream if isinstance(stream, torch.Tensor) else stream.y_SBH
        if output.requires_grad:
            assert self.pre_backward_gather is not None
            gather = self.pre_backward_gather
            output.register_hook(lambda grad: gather(unit))

    @property
    def output_weight(self) -> nn.Parameter:
        """Matrix of the logits: this tensor-parallel rank's rows of the vocabulary."""
        if self._borrowed_embedding:
            return self._borrowed_embedding[0]
        weight = self.token_embedding if self.head is None else self.head
        assert weight is not None
        return weight

    def changes_rotary_tables(self, past_length: int, length: int) -> bool:
        """Return whether the rotary tables of `past_length` tokens and of `length` tokens differ (longrope).

        Cached keys of the earlier tokens are then invalid.
        """
        return past_length > 0 and self._rotary.has_different_tables(past_length, length)

    def compute_logits(self, x_SBH: torch.Tensor) -> torch.Tensor:
        """Return the logits [s, b, vocab] of the last chunk's output, gathered over the tensor axis, for generation."""
        logits = vocabulary_logits(x_SBH, self.output_weight, self.head_bias, self.model.vocab, self.axis, self.linears)
        if self.model.logit_softcap is not None:
            softcap_(logits, self.model.logit_softcap)
        return logits

    def _embed(
        self, tokens_SB: torch.Tensor, context: ForwardContext, positions_SB: torch.Tensor | None
    ) -> torch.Tensor:
        """Return x_SBH: the embeddings of tokens and learned positions, after dropout."""
        assert self.token_embedding is not None
        x = vocabulary_embedding(tokens_SB, self.token_embedding, self.axis)
        if self.model.embedding_multiplier != 1:
            x = x * self.model.embedding_multiplier
        if self.position_embedding is not None and positions_SB is not None:
            start = self.axis.rank * x.shape[0]
            x = x + functional.embedding(positions_SB[start : start + x.shape[0]], self.position_embedding)
        elif self.position_embedding is not None:
            start = context.past_length + context.sequence_start + self.axis.rank * x.shape[0]
            x = x + self.position_embedding[start : start + x.shape[0], None, :]
        if self.model.dropout and context.dropout_key is not None:
            # Dropout masks depend on a layer's number. Blocks have the numbers below `model.layers`.
            key = make_dropout_key(context.dropout_key, self.model.layers, 0)
            first_row = context.sequence_start + self.axis.rank * x.shape[0]
            x = dropout(x, self.model.dropout, key, first_row, context.sample_start)
        return x
