"""cuDNN's attention through its own frontend (package nvidia-cudnn-frontend).

This attention has windows, and writes gradients into one [q | k | v] tensor, which the backward of `split_qkv` uses
without a copy. torch's cuDNN attention has neither. A cuDNN graph is built once per shape and memory layout. Later
calls only pass pointers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops import dispatch
from megascale.ops.rope import allocate_attention_gradients

# Names of a graph's tensors. cuDNN identifies tensors by numbers.
TENSOR_NAMES = ("q", "k", "v", "o", "stats", "d_o", "d_q", "d_k", "d_v", "lengths", *(f"offset{i}" for i in range(9)))
TENSOR_IDS = {name: number for number, name in enumerate(TENSOR_NAMES, start=1)}


@functools.cache
def load_cudnn() -> Any:
    """Return cuDNN's Python package. Raises ImportError without the package."""
    import cudnn

    return cudnn


@functools.cache
def get_cudnn_handle(device: int) -> Any:
    """Return cuDNN's handle of a device."""
    with torch.cuda.device(device):
        return load_cudnn().create_handle()


class TensorLayout:
    """Layout of a tensor [S, B, N, D] as cuDNN describes it: `dim` [B, N, S, D], and the strides in this order."""

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
        cudnn = load_cudnn()
        for name, tensor in {**inputs, **outputs}.items():
            tensor.set_uid(TENSOR_IDS[name])
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self.graph = graph
        self.handle = handle
        self.workspace_bytes = graph.get_workspace_size()

    def run(self, **tensors: Tensor) -> None:
        """Run the graph on the current stream. The tensors must have the layouts for which the graph was built."""
        device = next(iter(tensors.values())).device
        load_cudnn().set_stream(handle=self.handle, stream=torch.cuda.current_stream(device).cuda_stream)
        workspace = torch.empty(max(self.workspace_bytes, 1), dtype=torch.uint8, device=device)
        pointers = {TENSOR_IDS[name]: tensor.data_ptr() for name, tensor in tensors.items()}
        self.graph.execute(pointers, workspace.data_ptr(), handle=self.handle)


def make_graph(dtype: torch.dtype, handle: Any) -> Any:
    """Return an empty graph for tensors of `dtype` that computes in float32."""
    cudnn = load_cudnn()
    cudnn_dtype = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[dtype]
    return cudnn.pygraph(
        io_data_type=cudnn_dtype,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )


def make_mask_options(window: int | None, is_slice: bool = False) -> dict[str, Any]:
    """Return cuDNN's options of a causal mask. cuDNN's left bound includes the query itself, as `window` does.

    Args:
        is_slice: whether there are more keys than queries. The last query is then at the last key's position.
    """
    alignments = load_cudnn().diagonal_alignment
    options = {"diagonal_alignment": alignments.TOP_LEFT, "diagonal_band_right_bound": 0}
    if is_slice:
        options["diagonal_alignment"] = alignments.BOTTOM_RIGHT
    if window is not None:
        options["diagonal_band_left_bound"] = window
    return options


def add_forward(
    graph: Any, q: TensorLayout, k: TensorLayout, v: TensorLayout, o: TensorLayout, window: int | None
) -> tuple[dict, dict]:
    """Add attention with softmax statistics to the graph. Return the graph's inputs and outputs by name."""
    inputs = {name: graph.tensor(dim=t.dim, stride=t.stride) for name, t in (("q", q), ("k", k), ("v", v))}
    out, stats = graph.sdpa(
        name="attention",
        q=inputs["q"],
        k=inputs["k"],
        v=inputs["v"],
        generate_stats=True,
        attn_scale=q.dim[3] ** -0.5,
        **make_mask_options(window, is_slice=q.dim[2] != k.dim[2]),
    )
    out.set_output(True).set_dim(o.dim).set_stride(o.stride)
    B, N, S, _ = q.dim
    stats.set_output(True).set_data_type(load_cudnn().data_type.FLOAT).set_dim([B, N, S, 1]).set_stride(
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
    """Add the gradients of queries, keys and values to the graph. Return the graph's inputs and outputs by name.

    Args:
        grads: layouts of the gradients of q, k and v.
        deterministic: whether gradients are summed in a fixed order.
    """
    layouts = {"q": q, "k": k, "v": v, "o": o, "d_o": o}
    inputs = {name: graph.tensor(dim=t.dim, stride=t.stride) for name, t in layouts.items()}
    B, N, S, _ = q.dim
    inputs["stats"] = graph.tensor(dim=[B, N, S, 1], stride=[N * S, S, 1, 1], data_type=load_cudnn().data_type.FLOAT)
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
        **make_mask_options(window, is_slice=q.dim[2] != k.dim[2]),
    )
    for tensor, layout in zip(outputs, grads, strict=True):
        tensor.set_output(True).set_dim(layout.dim).set_stride(layout.stride)
    return inputs, dict(zip(("d_q", "d_k", "d_v"), outputs, strict=True))


_plans: dict[tuple[Any, ...], AttentionPlan] = {}


def _get_forward_plan(tensors: tuple[Tensor, ...], window: int | None) -> AttentionPlan:
    """Return the plan of the forward for tensors with the layouts of (q, k, v, output)."""
    key = ("forward", window, *_list_layout_keys(tensors))
    if key not in _plans:
        handle = get_cudnn_handle(tensors[0].device.index)
        graph = make_graph(tensors[0].dtype, handle)
        q, k, v, o = (TensorLayout(tensor) for tensor in tensors)
        inputs, outputs = add_forward(graph, q, k, v, o, window)
        _plans[key] = AttentionPlan(graph, handle, inputs, outputs)
    return _plans[key]


def _get_backward_plan(tensors: tuple[Tensor, ...], window: int | None, deterministic: bool) -> AttentionPlan:
    """Return the plan of the backward for tensors with the layouts of (q, k, v, output, d_q, d_k, d_v)."""
    key = ("backward", window, deterministic, *_list_layout_keys(tensors))
    if key not in _plans:
        handle = get_cudnn_handle(tensors[0].device.index)
        graph = make_graph(tensors[0].dtype, handle)
        q, k, v, o, *grads = (TensorLayout(tensor) for tensor in tensors)
        inputs, outputs = add_backward(graph, q, k, v, o, tuple(grads), window, deterministic)
        _plans[key] = AttentionPlan(graph, handle, inputs, outputs)
    return _plans[key]


def _list_layout_keys(tensors: tuple[Tensor, ...]) -> list[Any]:
    """Return everything about the tensors that a plan depends on."""
    return [tensors[0].dtype, tensors[0].device, *[(tensor.shape, tensor.stride()) for tensor in tensors]]


@torch_private.call_directly
class _CudnnAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        S, B, N, D = q.shape
        out = torch.empty((S, B, N, D), dtype=q.dtype, device=q.device)
        stats = torch.empty((B, N, S, 1), dtype=torch.float32, device=q.device)
        _get_forward_plan((q, k, v, out), window).run(q=q, k=k, v=v, o=out, stats=stats)
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.window = window
        ctx.deterministic = dispatch.is_deterministic()
        return out.view(S, B, N * D)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, stats = ctx.saved_tensors
        d_out = upstream[0].contiguous().view(q.shape)
        d_q, d_k, d_v = allocate_attention_gradients(q, k)
        plan = _get_backward_plan((q, k, v, out, d_q, d_k, d_v), ctx.window, ctx.deterministic)
        plan.run(q=q, k=k, v=v, o=out, d_o=d_out, stats=stats, d_q=d_q, d_k=d_k, d_v=d_v)
        return d_q, d_k, d_v, None


def attend(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None) -> Tensor:
    """Compute causal attention [S, B, N*D], with an optional window. Raises ImportError without the package."""
    return _CudnnAttention.apply(q_SBND, k_SBGD, v_SBGD, window)


def attend_with_statistics(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Return causal attention [S, B, N, D] and the log-sum-exp of its scores [B, N, S, 1], without autograd."""
    S, B, N, D = q.shape
    out = torch.empty((S, B, N, D), dtype=q.dtype, device=q.device)
    stats = torch.empty((B, N, S, 1), dtype=torch.float32, device=q.device)
    _get_forward_plan((q, k, v, out), window).run(q=q, k=k, v=v, o=out, stats=stats)
    return out, stats


def attend_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, window: int | None
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, given the output's gradient [S, B, N, D] and the forward's results."""
    d_q, d_k, d_v = allocate_attention_gradients(q, k)
    plan = _get_backward_plan((q, k, v, out, d_q, d_k, d_v), window, dispatch.is_deterministic())
    plan.run(q=q, k=k, v=v, o=out, d_o=d_out, stats=stats, d_q=d_q, d_k=d_k, d_v=d_v)
    return d_q, d_k, d_v
