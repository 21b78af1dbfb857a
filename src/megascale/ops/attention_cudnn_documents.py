"""cuDNN's attention within documents, through its own frontend (package nvidia-cudnn-frontend).

cuDNN takes documents as a batch of sequences of different lengths ("THD" layout): each tensor has an offset per
document, which is the document's first token times the stride of a token. Offsets are computed on the device, so that
CUDA graphs capture them. cuDNN refuses ragged layouts before Hopper.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops import dispatch
from megascale.ops.attention_backends import join_samples, separate_samples
from megascale.ops.attention_cudnn import AttentionPlan, cudnn_handle, cudnn_library, mask_options, new_graph
from megascale.ops.rope import allocate_qkv_gradients

_MOST_ELEMENTS = 2**31  # that an offset of 32 bits reaches


class RaggedLayout:
    """Layout of tokens [T, N, D] for cuDNN: [documents, N, longest, D] with an offset per document."""

    def __init__(self, x_TND: Tensor, documents: int, longest: int) -> None:
        T, N, D = x_TND.shape
        t, n, d = x_TND.stride()
        if d != 1:
            raise NotImplementedError("cuDNN attention needs adjacent elements of a head")
        if T * t >= _MOST_ELEMENTS:
            raise NotImplementedError(f"cuDNN's offsets of 32 bits do not reach {T * t:,} elements")
        self.dim = [documents, N, longest, D]
        self.stride = [longest * t, n, t, 1]
        self.token_stride = t


class RaggedGraph:
    """A cuDNN graph of attention within documents, before it is built.

    Attributes:
        inputs, outputs: the graph's tensors by name.
        token_strides: strides of a token whose offsets the graph reads, as inputs `offset0`, `offset1`, ...
    """

    def __init__(self, dtype: torch.dtype, handle: Any, documents: int) -> None:
        self.graph = new_graph(dtype, handle)
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.token_strides: list[int] = []
        self._documents = documents
        int32 = cudnn_library().data_type.INT32
        lengths = self.graph.tensor(dim=[documents, 1, 1, 1], stride=[1, 1, 1, 1], data_type=int32)
        self.inputs["lengths"] = lengths
        self.options = {"use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": lengths}

    def add_input(self, name: str, layout: RaggedLayout, **options: Any) -> Any:
        """Add an input and return it."""
        offset = self._offset(layout.token_stride)
        tensor = self.graph.tensor(dim=layout.dim, stride=layout.stride, ragged_offset=offset, **options)
        self.inputs[name] = tensor
        return tensor

    def set_output(self, name: str, tensor: Any, layout: RaggedLayout) -> None:
        """Give a result of the graph its layout."""
        tensor.set_output(True).set_dim(layout.dim).set_stride(layout.stride)
        tensor.set_ragged_offset(self._offset(layout.token_stride))
        self.outputs[name] = tensor

    def _offset(self, token_stride: int) -> Any:
        if token_stride not in self.token_strides:
            int32 = cudnn_library().data_type.INT32
            name = f"offset{len(self.token_strides)}"
            self.token_strides.append(token_stride)
            self.inputs[name] = self.graph.tensor(
                dim=[self._documents + 1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=int32
            )
        return self.inputs[f"offset{self.token_strides.index(token_stride)}"]


def add_forward(ragged: RaggedGraph, layouts: dict[str, RaggedLayout], window: int | None) -> None:
    """Add attention with softmax statistics [T, N]."""
    q, k, v = (ragged.add_input(name, layouts[name]) for name in ("q", "k", "v"))
    out, stats = ragged.graph.sdpa(
        name="attention",
        q=q,
        k=k,
        v=v,
        generate_stats=True,
        attn_scale=layouts["q"].dim[3] ** -0.5,
        **mask_options(window),
        **ragged.options,
    )
    ragged.set_output("o", out, layouts["o"])
    stats.set_data_type(cudnn_library().data_type.FLOAT)
    ragged.set_output("stats", stats, layouts["stats"])


def add_backward(
    ragged: RaggedGraph, layouts: dict[str, RaggedLayout], window: int | None, *, tokens: int, deterministic: bool
) -> None:
    """Add the gradients of queries, keys and values."""
    q, k, v, o, d_o = (ragged.add_input(name, layouts[name]) for name in ("q", "k", "v", "o", "d_o"))
    stats = ragged.add_input("stats", layouts["stats"], data_type=cudnn_library().data_type.FLOAT)
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
        **mask_options(window),
        **ragged.options,
    )
    for name, tensor in zip(("d_q", "d_k", "d_v"), grads, strict=True):
        ragged.set_output(name, tensor, layouts[name])


_plans: dict[tuple[Any, ...], tuple[AttentionPlan, list[int]]] = {}


def _run(
    backward: bool, tensors: dict[str, Tensor], cumulative: Tensor, longest: int, *, window: int | None, exact: bool
) -> None:
    """Run the forward or the backward on the current stream; the plan is built at the first call.

    Args:
        tensors: inputs and results [T, heads, D] by name; `stats` is [T, heads, 1].
        exact: sum gradients in one order.
    """
    like = tensors["q"]
    documents = len(cumulative) - 1
    shapes = [(name, t.shape, t.stride()) for name, t in tensors.items()]
    key = (backward, like.dtype, like.device, documents, longest, window, exact, *shapes)
    if key not in _plans:
        handle = cudnn_handle(like.device.index)
        ragged = RaggedGraph(like.dtype, handle, documents)
        layouts = {name: RaggedLayout(t, documents, longest) for name, t in tensors.items()}
        if backward:
            add_backward(ragged, layouts, window, tokens=len(like), deterministic=exact)
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
        _run(False, tensors, cumulative, S, window=window, exact=False)
        ctx.save_for_backward(*tensors.values(), cumulative)
        ctx.window, ctx.exact, ctx.batch = window, dispatch.deterministic(), B
        return separate_samples(out, B).reshape(S, B, N * D)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, stats, cumulative = ctx.saved_tensors
        d_o = join_samples(upstream[0].unflatten(-1, q.shape[1:])).contiguous()
        grads = allocate_qkv_gradients(q.unsqueeze(1), k.unsqueeze(1))  # [B x S, 1, heads, D]
        d_q, d_k, d_v = (grad.squeeze(1) for grad in grads)
        tensors = {"q": q, "k": k, "v": v, "o": out, "stats": stats, "d_o": d_o, "d_q": d_q, "d_k": d_k, "d_v": d_v}
        _run(True, tensors, cumulative, len(q) // ctx.batch, window=ctx.window, exact=ctx.exact)
        if ctx.batch > 1:
            grads = tuple(separate_samples(grad.squeeze(1), ctx.batch) for grad in grads)
        return *grads, None, None


def attend(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None, cumulative: Tensor) -> Tensor:
    """Compute attention within documents [S, B, N*D]. Raises ImportError without the package."""
    return _CudnnDocuments.apply(q_SBND, k_SBGD, v_SBGD, window, cumulative)
