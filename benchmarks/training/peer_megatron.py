"""A child of `python -m benchmarks peers`: training steps of Megatron-Core, as its own training script sets it up.

Run under torchrun with a job file (see peer_job.py). Overlaps of gradients, parameters and transfers, the
distributed optimizer, fp32 gradients and sequence parallelism are on. With TransformerEngine its layers are used;
without it Megatron's own, given torch's fused attention and a norm that sequence parallelism knows, which they lack.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import Store

from benchmarks.training.peer_job import PeerJob, PreparedPeer, connect, run_child
from megascale.train.host_pauses import GarbageCollector

_FUSED = "fused_weight_gradient_mlp_cuda"


def fuse_gradients() -> None:
    """Let TransformerEngine's GEMMs add weight gradients in float32. To be called before Megatron is imported.

    Megatron's switch for it also asks for a kernel of apex, which only the logits' layer then uses; where apex is not
    installed, that layer's gradient takes two passes, as without the switch.
    """
    if _FUSED in sys.modules or importlib.util.find_spec("transformer_engine") is None:
        return
    if importlib.util.find_spec(_FUSED) is not None:
        importlib.import_module(_FUSED)
        return

    def add(into: Tensor, gradient: Tensor, total: Tensor) -> None:
        total.add_(gradient.t() @ into)

    built = types.ModuleType(_FUSED)
    built.wgrad_gemm_accum_fp32 = built.wgrad_gemm_accum_fp16 = add  # type: ignore[attr-defined]
    sys.modules[_FUSED] = built


class Attention(nn.Module):
    """torch's fused causal attention where Megatron's own layers would write out the scores."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.groups = config.num_query_groups != config.num_attention_heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[s, b, heads, size] each; [s, b, heads x size]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups)
        return out.permute(2, 0, 1, 3).flatten(2)


class PeerNorm:
    """Makes torch's norm; its parameters say that sequence-parallel ranks must sum their gradients."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        built = (nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm)(hidden_size, eps)
        for parameter in built.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return built


def layers(job: PeerJob) -> tuple[Any, str]:
    """The specification of a layer, and in words what it is made of."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import transformer_block

    try:
        import transformer_engine

        experts = job.experts or {}
        spec = specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts.get("number"), moe_grouped_gemm=bool(experts), qk_layernorm=job.model["head_norms"]
        )
        return spec, f"TransformerEngine {transformer_engine.__version__}"
    except ImportError:
        pass
    spec = specs.get_gpt_layer_local_spec(normalization="RMSNorm" if job.model["norm"] == "rmsnorm" else None)
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = transformer_block.LayerNormImpl = PeerNorm
    parts.self_attention.submodules.core_attention = Attention
    return spec, "its own layers with torch's fused attention (TransformerEngine is not installed)"


def expert_settings(job: PeerJob) -> dict[str, Any]:
    """Return Megatron's settings of experts: all its fusions, grouped GEMMs, tokens sent by an all-to-all."""
    experts = job.experts
    if experts is None:
        return {}
    balance: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-3}
    if experts["even"]:
        balance = {"moe_router_load_balancing_type": "none", "moe_router_force_load_balancing": True}
    return balance | {
        "num_moe_experts": experts["number"],
        "moe_router_topk": experts["top_k"],
        "moe_ffn_hidden_size": experts["width"],
        "moe_router_pre_softmax": not experts["selected"],
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_permute_fusion": True,
        "moe_router_fusion": True,
        "expert_model_parallel_size": experts["ranks"],
        "expert_tensor_parallel_size": 1,
    }


def shape_of(job: PeerJob) -> Any:
    """Return Megatron's configuration of the model and of overlaps."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    shape, virtual = job.model, job.virtual
    swiglu = shape["activation"] == "swiglu"
    float8: dict[str, Any] = {}
    if job.float8:  # E4M3 forward, E5M2 for gradients; the first and the last layer too, as ours
        float8 = {"fp8": "hybrid", "fp8_recipe": job.float8}
        if job.float8 == "delayed":
            float8 |= {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    settings: dict[str, Any] = dict(
        **float8,
        **expert_settings(job),
        apply_rope_fusion=shape["positions"] == "rotary" and has_engine,
        kv_channels=shape["head_size"],
        qk_layernorm=shape["head_norms"],
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        num_attention_heads=shape["heads"],
        num_query_groups=shape["kv_heads"],
        ffn_hidden_size=shape["ffn"],
        normalization="RMSNorm" if shape["norm"] == "rmsnorm" else "LayerNorm",
        add_bias_linear=shape["bias"],
        gated_linear_unit=swiglu,
        activation_func=nn.functional.silu if swiglu else nn.functional.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=shape["bias"] or swiglu,
        bias_dropout_fusion=True,
        cross_entropy_loss_fusion=True,
        gradient_accumulation_fusion=_FUSED in sys.modules,
        tensor_model_parallel_size=job.tensor,
        pipeline_model_parallel_size=job.pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=job.context,
        cp_comm_type=job.context_exchange if job.context > 1 else None,
        sequence_parallel=job.tensor > 1,
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        overlap_p2p_comm=virtual > 1,
        batch_p2p_comm=virtual == 1,
        deallocate_pipeline_outputs=True,
        recompute_granularity=None if job.recompute == "none" else job.recompute,
        recompute_method="uniform" if job.recompute == "full" else None,
        recompute_num_layers=1 if job.recompute == "full" else None,
    )
    return TransformerConfig(**settings | read_settings(job))


def read_settings(job: PeerJob) -> dict[str, Any]:
    """Return the job's settings with `attention_backend` as Megatron's enumeration, from its name such as "flash".

    Megatron checks the environment variables of TransformerEngine's attention against the setting, and sets them. So
    those of an earlier model in this process are removed.
    """
    from megatron.core.transformer.enums import AttnBackend

    for kind in ("FLASH", "FUSED", "UNFUSED"):
        os.environ.pop(f"NVTE_{kind}_ATTN", None)
    settings: dict[str, Any] = dict(job.settings)
    if "attention_backend" in settings:
        settings["attention_backend"] = AttnBackend[settings["attention_backend"]]
    return settings


def chunks_of(job: PeerJob, config: Any, spec: Any, data: int, device: torch.device) -> list[Any]:
    """This rank's model chunks in their data-parallel wrappers, and `config` told of what these do by themselves."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel

    shape, virtual = job.model, job.virtual
    data_settings: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": data > 1,
        "overlap_param_gather": data > 1,
        "use_distributed_optimizer": True,
        "bucket_size": max(40_000_000, 1_000_000 * data),
    }
    sharing = DistributedDataParallelConfig(**data_settings | job.data_settings)
    chunks = []
    for chunk in range(virtual):
        if virtual > 1:
            where = {"ignore_virtual": False, "vp_stage": chunk}
        else:
            where = {}
        model = GPTModel(
            config,
            spec,
            vocab_size=shape["vocab"],
            max_sequence_length=shape["sequence"],
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=shape["tied"],
            position_embedding_type="rope" if shape["positions"] == "rotary" else "learned_absolute",
            rotary_base=int(shape["rotary_base"]),
            vp_stage=chunk if virtual > 1 else None,
        )
        model = model.to(device=device, dtype=torch.bfloat16)
        chunks.append(DistributedDataParallel(config, sharing, model, disable_bucketing=chunk > 0))
    if data > 1:
        syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = syncs if virtual > 1 else syncs[0]
        if virtual > 1:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
            config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    return chunks


def select_slices(x: Tensor, rank: int, ranks: int) -> Tensor:
    """Return an early and a late slice [b, s / ranks] of x [b, s], as Megatron balances causal work over ranks."""
    slices = x.unflatten(1, (2 * ranks, -1))
    return torch.cat([slices[:, rank], slices[:, 2 * ranks - 1 - rank]], dim=1).contiguous()


def prepare(job: PeerJob, device: torch.device, store: Store | None = None) -> PreparedPeer:
    """Return a peer with model and optimizer.

    Args:
        store: as for `connect`.
    """
    from importlib.metadata import version

    fuse_gradients()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    virtual, length = job.virtual, job.model["sequence"]
    connect(device, store)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=job.tensor,
        pipeline_model_parallel_size=job.pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=job.context,
        expert_model_parallel_size=1 if job.experts is None else job.experts["ranks"],
        expert_tensor_parallel_size=None if job.experts is None else 1,
    )
    has_graphs = job.settings.get("cuda_graph_impl", "none") != "none"
    # CUDA graphs need TransformerEngine's generators. A job before this one may have used the others.
    tensor_parallel.model_parallel_cuda_manual_seed(1234, te_rng_tracker=has_graphs, force_reset_rng=True)
    config, (spec, arguments) = shape_of(job), layers(job)
    data = parallel_state.get_data_parallel_world_size()
    shards = data * job.context  # ranks over which gradients are reduced
    chunks = chunks_of(job, config, spec, shards, device)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            weight_decay=0.1,
            adam_beta2=0.95,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=shards > 1,
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss
    forward_backward = get_forward_backward_func()
    if job.settings.get("cuda_graph_impl") == "full_iteration":
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        forward_backward = FullCudaGraphWrapper(forward_backward, config.cuda_graph_warmup_steps)
    rows = job.draw_tokens(parallel_state.get_data_parallel_rank(), device)  # [s + 1, b]
    tokens, labels = rows[:-1].T.contiguous(), rows[1:].T.contiguous()
    positions = torch.arange(length, device=device).expand_as(tokens)
    if job.context > 1:
        rank = parallel_state.get_context_parallel_rank()
        tokens, labels, positions = (select_slices(x, rank, job.context) for x in (tokens, labels, positions))

    def forward_step(_: Any, model: Any) -> Any:
        output = model(tokens, positions, None, labels=labels)

        def loss(output: Tensor) -> Any:
            value = output.float().mean()
            # The schedule divides `value` in place by the number of micro-batches.
            return value, {"loss": value.detach().clone()}

        return output, loss

    garbage = GarbageCollector(100)
    if job.float8:
        precision = f"float8 {job.float8}"
    else:
        precision = "bfloat16"
    exchange = f", context {job.context} by {job.context_exchange}" if job.context > 1 else ""

    def step() -> Tensor | None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        report = forward_backward(
            forward_step_func=forward_step,
            data_iterator=[None] * virtual if virtual > 1 else None,
            model=chunks if virtual > 1 else chunks[0],
            num_microbatches=job.global_batch // (job.micro_batch * data),
            seq_length=length,
            micro_batch_size=job.micro_batch,
            forward_only=False,
        )
        optimizer.step()
        garbage.collect(1)  # its --manual-gc
        if report:
            return torch.stack([item["loss"] for item in report]).mean()
        return None

    measure_load = None
    if job.experts is not None:
        from megatron.core.transformer.moe.router import TopKRouter

        measure_load = partial(measure_rank_load, chunks, step, ranks=job.experts["ranks"], router_type=TopKRouter)
    overrides = "".join(f", {key}={value}" for key, value in (job.settings | job.data_settings).items())
    return PreparedPeer(
        step,
        {"megatron-core": version("megatron-core")},
        f"{arguments}, {precision}{exchange}, distributed optimizer, all overlaps, planned collection{overrides}"
        + ", weight gradients added inside their GEMMs" * config.gradient_accumulation_fusion
        + f", CUDA_DEVICE_MAX_CONNECTIONS={os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS', 'not set')}",
        measure_load=measure_load,
        close=partial(free_job, chunks, garbage),
    )


def measure_rank_load(
    chunks: list[Any], step: Callable[[], Any], *, ranks: int, router_type: type[nn.Module]
) -> float | None:
    """Make a step and return the largest load of a rank with experts over the mean load, in any layer. Collective.

    Every rank must hold the same layers. The result is None if the step replays a CUDA graph, which calls no routers.

    Args:
        ranks: number of ranks that divide the experts.
        router_type: type of the modules that return a routing map as the second output.
    """
    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, router_type)]
    counts: dict[int, Tensor] = {}

    def add_counts(index: int, _: Any, __: Any, output: tuple[Tensor, Tensor]) -> None:
        _, routing_map = output  # bool [tokens, experts]
        counts[index] = counts.get(index, 0) + routing_map.sum(0, dtype=torch.float64)

    hooks = [router.register_forward_hook(partial(add_counts, index)) for index, router in enumerate(routers)]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    if len(counts) < len(routers):
        return None
    counts_LE = torch.stack([counts[index] for index in range(len(routers))])
    torch.distributed.all_reduce(counts_LE)
    loads_LR = counts_LE.unflatten(1, (ranks, -1)).sum(2) / counts_LE.sum(1, keepdim=True)
    return float(loads_LR.max() * ranks)


def free_job(chunks: list[Any], garbage: GarbageCollector) -> None:
    """End planned collections and empty the model, which cannot be used afterwards.

    Dispatchers of experts keep tensors of the last step. Their autograd graph holds the hooks that hold the model, and
    Python's garbage collector does not see cycles through that graph.
    """
    garbage.close()
    modules = [module for chunk in chunks for module in chunk.modules()]
    for module in modules:
        vars(module).clear()


def drop_graphs() -> None:
    """Drop captured graphs, which hold communicators: the abort of these waits until no graph holds them."""
    step_graphs = sys.modules.get("megatron.core.full_cuda_graph")
    if step_graphs is not None:
        step_graphs.FullCudaGraphWrapper(None).reset_cuda_graph()
    layer_graphs = sys.modules.get("megatron.core.transformer.cuda_graphs")
    if layer_graphs is not None:
        # `delete_cuda_graphs` sees only runners without graphs: Megatron-Core empties its record when it has made them.
        for runner in gc.get_objects():
            if isinstance(runner, layer_graphs._CudaGraphRunner):
                runner.fwd_graph = None
                runner.bwd_graph = None
        layer_graphs.delete_cuda_graphs()


def close() -> None:
    """Drop the global state of Megatron-Core and of TransformerEngine, so that another job may follow."""
    if "megatron.core" not in sys.modules:
        return
    from megatron.core import parallel_state

    # The cache of rotary positions holds its module, whose hooks hold the whole model with gradients and optimizer.
    embeddings = sys.modules.get("megatron.core.models.common.embeddings.rotary_pos_embedding")
    if embeddings is not None:
        for function in vars(embeddings.RotaryEmbedding).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
    drop_graphs()
    parallel_state.destroy_model_parallel()
    metrics = sys.modules.get("megatron.core.transformer.moe.moe_logging")  # of version 0.17 and later
    if metrics is not None:
        metrics.destroy_moe_metrics_tracker()
    if importlib.util.find_spec("transformer_engine") is not None:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()


if __name__ == "__main__":
    run_child(prepare, sys.argv[1])
