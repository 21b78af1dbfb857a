"""cuDNN's attention through its own frontend (package nvidia-cudnn-frontend).

It has windows at cuDNN's speed, and writes gradients into one [q | k | v] tensor, which `split_qkv` takes without a
copy. torch's cuDNN attention has neither. A graph is built once per shape and layout; calls only pass pointers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops import dispatch
from megascale.ops.rope import allocate_attention_gradients

# Names of a graph's tensors; cuDNN knows them by number.
NAMES = ("q", "k", "v", "o", "stats", "d_o", "d_q", "d_k", "d_v", "lengths", *(f"offset{i}" for i in range(9)))
UIDS = {name: number for number, name in enumerate(NAMES, start=1)}


@functools.cache
def cudnn_library() -> Any:
    """Return the package; ImportError without it."""
    import cudnn  # ImportError without the package

    return cudnn


@functools.cache
def cudnn_handle(device: int) -> Any:
    """Return cuDNN's handle of a device."""
    with torch.cuda.device(device):
        return cudnn_library().create_handle()


class TensorLayout:
    """Layout of a tensor for cuDNN: [B, N, S, D] with the strides of its [S, B, N, D] memory."""

    def __init__(self, x_SBND: Tensor) -> None:
        S, B, N, D = x_SBND.shape
        s, b, n, d = x_SBND.stride()
        if d != 1:
            raise NotImplementedError("cuDNN attention needs adjacent elements of a head")
        self.dim = [B, N, S, D]
        self.stride = [b, n, s, 1]


class AttentionPlan:
    """A built cuDNN graph and the size of its workspace."""

    def __init__(self, graph: Any, handle: Any, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        cudnn = cudnn_library()
        for name, tensor in {**inputs, **outputs}.items():
            tensor.set_uid(UIDS[name])
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self.graph = graph
        self.handle = handle
        self.workspace = graph.get_workspace_size()

    def run(self, **tensors: Tensor) -> None:
        """Run on the current stream; the tensors have the layouts of the graph."""
        device = next(iter(tensors.values())).device
        cudnn_library().set_stream(handle=self.handle, stream=torch.cuda.current_stream(device).cuda_stream)
        workspace = torch.empty(max(self.workspace, 1), dtype=torch.uint8, device=device)
        pointers = {UIDS[name]: tensor.data_ptr() for name, tensor in tensors.items()}
        self.graph.execute(pointers, workspace.data_ptr(), handle=self.handle)


def new_graph(dtype: torch.dtype, handle: Any) -> Any:
    """Return an empty graph for tensors of `dtype` that computes in float32."""
    cudnn = cudnn_library()
    kind = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[dtype]
    return cudnn.pygraph(
        io_data_type=kind,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )


def mask_options(window: int | None, is_slice: bool = False) -> dict[str, Any]:
    """Return the options of a causal mask; cuDNN's left bound counts the token itself, as windows here do.

    Args:
        is_slice: whether there are more keys than queries; the mask then aligns the last query with the last key.
    """
    bound = {} if window is None else {"diagonal_band_left_bound": window}
    alignments = cudnn_library().diagonal_alignment
    alignment = alignments.BOTTOM_RIGHT if is_slice else alignments.TOP_LEFT
    return {"diagonal_alignment": alignment, "diagonal_band_right_bound": 0, **bound}


def add_forward(
    graph: Any, q: TensorLayout, k: TensorLayout, v: TensorLayout, o: TensorLayout, window: int | None
) -> tuple[dict, dict]:
    """Add attention with softmax statistics; returns the graph's inputs and outputs by name."""
    inputs = {name: graph.tensor(dim=t.dim, stride=t.stride) for name, t in (("q", q), ("k", k), ("v", v))}
    out, stats = graph.sdpa(
        name="attention",
        q=inputs["q"],
        k=inputs["k"],
        v=inputs["v"],
        generate_stats=True,
        attn_scale=q.dim[3] ** -0.5,
        **mask_options(window, is_slice=q.dim[2] != k.dim[2]),
    )
    out.set_output(True).set_dim(o.dim).set_stride(o.stride)
    B, N, S, _ = q.dim
    stats.set_output(True).set_data_type(cudnn_library().data_type.FLOAT).set_dim([B, N, S, 1]).set_stride(
        [N * S, S, 1, 1]
    )
    return inputs, {"o": out, "stats": stats}


def add_backward(
    graph: Any,
    q: TensorLayout,
    k: TensorLayout,
    v: TensorLayout,
    o: TensorLayout,
    grads: tuple[TensorLayout, ...],
    window: int | None,
    deterministic: bool = False,
) -> tuple[dict, dict]:
    """Add the gradients of queries, keys and values, each in its own layout; deterministic: summed in one order."""
    layouts = {"q": q, "k": k, "v": v, "o": o, "d_o": o}
    inputs = {name: graph.tensor(dim=t.dim, stride=t.stride) for name, t in layouts.items()}
    B, N, S, _ = q.dim
    inputs["stats"] = graph.tensor(dim=[B, N, S, 1], stride=[N * S, S, 1, 1], data_type=cudnn_library().data_type.FLOAT)
    outputs = graph.sdpa_backward(
        name="attention backward",
        q=inputs["q"],
        k=inputs["k"],
        v=inputs["v"],
        o=inputs["o"],
        dO=inputs["d_o"],
        stats=inputs["stats"],
        attn_scale=q.dim[3] ** -0.5,
        use_deterministic_algorithm=deterministic,
        **mask_options(window, is_slice=q.dim[2] != k.dim[2]),
    )
    for tensor, layout in zip(outputs, grads, strict=True):
        tensor.set_output(True).set_dim(layout.dim).set_stride(layout.stride)
    return inputs, dict(zip(("d_q", "d_k", "d_v"), outputs, strict=True))


_plans: dict[tuple[Any, ...], AttentionPlan] = {}


def _plan(
    backward: bool, tensors: tuple[Tensor, ...], window: int | None, deterministic: bool = False
) -> AttentionPlan:
    like = tensors[0]
    key = (backward, like.dtype, like.device, window, deterministic, *[(t.shape, t.stride()) for t in tensors])
    if key not in _plans:
        handle = cudnn_handle(like.device.index)
        layouts = [TensorLayout(t) for t in tensors]
        graph = new_graph(like.dtype, handle)
        if backward:
            q, k, v, o, *grads = layouts
            inputs, outputs = add_backward(graph, q, k, v, o, tuple(grads), window, deterministic)
        else:
            q, k, v, o = layouts
            inputs, outputs = add_forward(graph, q, k, v, o, window)
        _plans[key] = AttentionPlan(graph, handle, inputs, outputs)
    return _plans[key]


@torch_private.call_directly
class _CudnnAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        S, B, N, D = q.shape
        out = torch.empty((S, B, N, D), dtype=q.dtype, device=q.device)
        stats = torch.empty((B, N, S, 1), dtype=torch.float32, device=q.device)
        _plan(False, (q, k, v, out), window).run(q=q, k=k, v=v, o=out, stats=stats)
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.window, ctx.deterministic = window, dispatch.deterministic()
        return out.view(S, B, N * D)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, stats = ctx.saved_tensors
        d_out = upstream[0].contiguous().view(q.shape)
        grads = allocate_attention_gradients(q, k)
        plan = _plan(True, (q, k, v, out, *grads), ctx.window, ctx.deterministic)
        plan.run(q=q, k=k, v=v, o=out, d_o=d_out, stats=stats, **dict(zip(("d_q", "d_k", "d_v"), grads, strict=True)))
        return *grads, None


def attend(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None) -> Tensor:
    """Compute causal attention [S, B, N*D], with an optional window. Raises ImportError without the package."""
    return _CudnnAttention.apply(q_SBND, k_SBGD, v_SBGD, window)


def attend_with_statistics(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Return causal attention [S, B, N, D] and the log-sum-exp of its scores [B, N, S, 1], without autograd."""
    S, B, N, D = q.shape
    out = torch.empty((S, B, N, D), dtype=q.dtype, device=q.device)
    stats = torch.empty((B, N, S, 1), dtype=torch.float32, device=q.device)
    _plan(False, (q, k, v, out), window).run(q=q, k=k, v=v, o=out, stats=stats)
    return out, stats


def attend_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, window: int | None
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, given the output's gradient [S, B, N, D] and the forward's results."""
    grads = allocate_attention_gradients(q, k)
    plan = _plan(True, (q, k, v, out, *grads), window, dispatch.deterministic())
    plan.run(q=q, k=k, v=v, o=out, d_o=d_out, stats=stats, **dict(zip(("d_q", "d_k", "d_v"), grads, strict=True)))
    return grads
