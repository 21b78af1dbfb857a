"""cuDNN's attention within documents, through its own frontend (package nvidia-cudnn-frontend).

For cuDNN, documents are a batch of sequences of different lengths ("THD" or ragged layout). Each tensor has one offset
per document: the index of the document's first token times the stride of a token. Offsets are computed on the device,
so that CUDA graphs can capture them. cuDNN supports ragged layouts on Hopper and newer GPUs only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops import dispatch
from megascale.ops.attention_backends import join_samples, separate_samples
from megascale.ops.attention_cudnn import AttentionPlan, get_cudnn_handle, load_cudnn, make_graph, make_mask_options
from megascale.ops.rope import allocate_qkv_gradients

_MAX_ELEMENTS = 2**31  # offsets are 32-bit integers


class RaggedLayout:
    """Layout of a tensor [T, N, D] as cuDNN describes it: `dim` [documents, N, longest document, D], and strides.

    Raises NotImplementedError for a layout that cuDNN does not support.
    """

    def __init__(self, x_TND: Tensor, document_count: int, longest: int) -> None:
        T, N, D = x_TND.shape
        t, n, d = x_TND.stride()
        if d != 1:
            raise NotImplementedError("cuDNN attention needs adjacent elements of a head")
        if T * t >= _MAX_ELEMENTS:
            raise NotImplementedError(f"cuDNN's offsets of 32 bits do not reach {T * t:,} elements")
        self.dim = [document_count, N, longest, D]
        self.stride = [longest * t, n, t, 1]
        self.token_stride = t


class RaggedGraph:
    """A cuDNN graph of attention within documents, before it is built.

    Attributes:
        inputs, outputs: the graph's tensors by name.
        token_strides: distinct strides of a token among the tensors. The input `offset{i}` has the offsets for stride
            i.
        options: arguments of cuDNN's attention for sequences of different lengths.
    """

    def __init__(self, dtype: torch.dtype, handle: Any, document_count: int) -> None:
        self.graph = make_graph(dtype, handle)
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.token_strides: list[int] = []
        self._document_count = document_count
        int32 = load_cudnn().data_type.INT32
        lengths = self.graph.tensor(dim=[document_count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=int32)
        self.inputs["lengths"] = lengths
        self.options = {"use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": lengths}

    def add_input(self, name: str, layout: RaggedLayout, **options: Any) -> Any:
        offset = self._get_offset(layout.token_stride)
        tensor = self.graph.tensor(dim=layout.dim, stride=layout.stride, ragged_offset=offset, **options)
        self.inputs[name] = tensor
        return tensor

    def set_output(self, name: str, tensor: Any, layout: RaggedLayout) -> None:
        """Make `tensor`, a result of the graph, an output with this name and layout."""
        tensor.set_output(True).set_dim(layout.dim).set_stride(layout.stride)
        tensor.set_ragged_offset(self._get_offset(layout.token_stride))
        self.outputs[name] = tensor

    def _get_offset(self, token_stride: int) -> Any:
        """Return the input that holds the offsets of documents for a stride, and add it if it is missing."""
        if token_stride not in self.token_strides:
            int32 = load_cudnn().data_type.INT32
            name = f"offset{len(self.token_strides)}"
            self.token_strides.append(token_stride)
            self.inputs[name] = self.graph.tensor(
                dim=[self._document_count + 1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=int32
            )
        return self.inputs[f"offset{self.token_strides.index(token_stride)}"]


def add_forward(ragged: RaggedGraph, layouts: dict[str, RaggedLayout], window: int | None) -> None:
    """Add attention with softmax statistics [T, N] to the graph. `layouts` has the tensors by name."""
    q, k, v = (ragged.add_input(name, layouts[name]) for name in ("q", "k", "v"))
    out, stats = ragged.graph.sdpa(
        name="attention",
        q=q,
        k=k,
        v=v,
        generate_stats=True,
        attn_scale=layouts["q"].dim[3] ** -0.5,
        **make_mask_options(window),
        **ragged.options,
    )
    ragged.set_output("o", out, layouts["o"])
    stats.set_data_type(load_cudnn().data_type.FLOAT)
    ragged.set_output("stats", stats, layouts["stats"])


def add_backward(
    ragged: RaggedGraph, layouts: dict[str, RaggedLayout], window: int | None, *, tokens: int, deterministic: bool
) -> None:
    """Add the gradients of queries, keys and values to the graph.

    Args:
        layouts: layouts of all tensors by name.
        tokens: number of tokens of all documents.
        deterministic: whether gradients are summed in a fixed order.
    """
    q, k, v, o, d_o = (ragged.add_input(name, layouts[name]) for name in ("q", "k", "v", "o", "d_o"))
    stats = ragged.add_input("stats", layouts["stats"], data_type=load_cudnn().data_type.FLOAT)
    grads = ragged.graph.sdpa_backward(
        name="attention backward",
        q=q,
        k=k,
        v=v,
        o=o,
        dO=d_o,
        stats=stats,
        attn_scale=layouts["q"].dim[3] ** -0.5,
        use_deterministic_algorithm=deterministic,
        max_total_seq_len_q=tokens,
        max_total_seq_len_kv=tokens,
        **make_mask_options(window),
        **ragged.options,
    )
    for name, tensor in zip(("d_q", "d_k", "d_v"), grads, strict=True):
        ragged.set_output(name, tensor, layouts[name])


# Built graphs with their `token_strides`, by everything that they depend on.
_plans: dict[tuple[Any, ...], tuple[AttentionPlan, list[int]]] = {}


def _run(
    tensors: dict[str, Tensor],
    cumulative: Tensor,
    max_length: int,
    *,
    window: int | None,
    is_backward: bool,
    deterministic: bool,
) -> None:
    """Run the forward or the backward on the current stream. The first call for a shape builds the plan.

    Args:
        tensors: inputs and results [T, heads, D] by name; `stats` is [T, heads, 1].
        cumulative: cumulative lengths of documents, int32 [documents + 1].
        max_length: maximum length of a document.
        deterministic: whether gradients are summed in a fixed order.
    """
    q = tensors["q"]
    document_count = len(cumulative) - 1
    shapes = [(name, tensor.shape, tensor.stride()) for name, tensor in tensors.items()]
    key = (is_backward, q.dtype, q.device, document_count, max_length, window, deterministic, *shapes)
    if key not in _plans:
        handle = get_cudnn_handle(q.device.index)
        ragged = RaggedGraph(q.dtype, handle, document_count)
        layouts = {name: RaggedLayout(tensor, document_count, max_length) for name, tensor in tensors.items()}
        if is_backward:
            add_backward(ragged, layouts, window, tokens=len(q), deterministic=deterministic)
        else:
            add_forward(ragged, layouts, window)
        _plans[key] = AttentionPlan(ragged.graph, handle, ragged.inputs, ragged.outputs), ragged.token_strides
    plan, token_strides = _plans[key]
    offsets = {f"offset{i}": cumulative * stride for i, stride in enumerate(token_strides)}
    plan.run(**tensors, **offsets, lengths=cumulative.diff())


@torch_private.call_directly
class _CudnnDocuments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, cumulative: Tensor) -> Tensor:
        S, B, N, D = q.shape
        q_TND, k_TGD, v_TGD = (join_samples(t) for t in (q, k, v))
        out = torch.empty((B * S, N, D), dtype=q.dtype, device=q.device)
        stats = torch.empty((B * S, N, 1), dtype=torch.float32, device=q.device)
        tensors = {"q": q_TND, "k": k_TGD, "v": v_TGD, "o": out, "stats": stats}
        _run(tensors, cumulative, S, window=window, is_backward=False, deterministic=False)
        ctx.save_for_backward(q_TND, k_TGD, v_TGD, out, stats, cumulative)
        ctx.window = window
        ctx.deterministic = dispatch.is_deterministic()
        ctx.batch = B
        return separate_samples(out, B).reshape(S, B, N * D)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, stats, cumulative = ctx.saved_tensors
        d_o = join_samples(upstream[0].unflatten(-1, q.shape[1:])).contiguous()
        grads = allocate_qkv_gradients(q.unsqueeze(1), k.unsqueeze(1))  # [B x S, 1, heads, D]
        d_q, d_k, d_v = (grad.squeeze(1) for grad in grads)
        tensors = {"q": q, "k": k, "v": v, "o": out, "stats": stats, "d_o": d_o, "d_q": d_q, "d_k": d_k, "d_v": d_v}
        length = len(q) // ctx.batch
        _run(tensors, cumulative, length, window=ctx.window, is_backward=True, deterministic=ctx.deterministic)
        if ctx.batch > 1:
            grads = tuple(separate_samples(grad.squeeze(1), ctx.batch) for grad in grads)
        return *grads, None, None


def attend(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None, cumulative: Tensor) -> Tensor:
    """Compute attention within documents [S, B, N*D]. Raises ImportError without the package.

    `cumulative`: cumulative lengths of documents, int32 [documents + 1].
    """
    return _CudnnDocuments.apply(q_SBND, k_SBGD, v_SBGD, window, cumulative)
