"""Megatron-Core's example loop (examples/run_simple_mcore_train_loop.py) on CPUs or GPUs, with the line that it prints.

Like Megatron-LM it saves to `iter_NNNNNNN`. On CPUs the calls that Megatron-Core makes for CUDA go to the CPU.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from injected import Plan, read_plan
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

SEQUENCE = 16
VOCABULARY = 64
BATCH = 2
SAVE_INTERVAL = 15  # steps


class CpuForCuda(TorchFunctionMode):
    """Makes tensors on the CPU that Megatron-Core asks for on the device "cuda"."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def main() -> None:
    """Train, and resume from the newest checkpoint."""
    plan = read_plan()
    device = start_torch()
    parallel_state.initialize_model_parallel(1, 1)
    if device == "cuda":
        model_parallel_cuda_manual_seed(123)
    else:
        initialize_rng_tracker(inference_rng_tracker=True)
    # NCCL does not notice that calls of two kinds meet in one communicator, so losses have their own, as is usual.
    metrics = dist.new_group() if device == "cuda" else None
    model, optimizer = make_model(device)
    run_step = get_forward_backward_func()
    step = load(plan.folder, model)
    batches = read_batches(device)
    while step < plan.steps:
        step += 1
        plan.compute(device)
        optimizer.zero_grad()
        model.zero_grad_buffer()
        losses = run_step(
            forward_step_func=compute_forward,
            data_iterator=batches,
            model=model,
            num_microbatches=1,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            decoder_seq_length=SEQUENCE,
            forward_only=False,
        )
        finalize_model_grads([model])
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad  # where Megatron-Core sums gradients, which torch's Adam does not read
        optimizer.step()
        plan.gather_loss(step, losses[0]["lm loss"], group=metrics)
        report(plan, step)
        print(f"Iteration {step}: Losses reduced: {losses}", flush=True)
        if step % SAVE_INTERVAL == 0:
            save(plan.folder / f"iter_{step:07}", model)
    dist.destroy_process_group()


def start_torch() -> str:
    """Start torch.distributed and return the kind of device."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        return "cuda"
    CpuForCuda().__enter__()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    dist.init_process_group("gloo")
    return "cpu"


def make_model(device: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Return a GPT of two layers and its optimizer."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    specification = get_gpt_layer_local_spec()
    model = GPTModel(
        config=config,
        transformer_layer_spec=specification,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
    )
    replicas = DistributedDataParallelConfig(
        grad_reduce_in_fp32=False, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    wrapped = DistributedDataParallel(config=config, ddp_config=replicas, module=model.to(device))
    return wrapped, torch.optim.Adam(wrapped.parameters())


def read_batches(device: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of tokens of shape (BATCH, SEQUENCE), positions and mask."""
    while True:
        mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device), 1)
        yield {
            "tokens": torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), device=device),
            "positions": torch.arange(SEQUENCE, device=device).expand(BATCH, SEQUENCE),
            "mask": mask,
        }


def compute_forward(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    """Return the loss of each token and the function that reduces it, as the schedule wants them."""
    batch = next(batches)
    output = model(batch["tokens"], batch["positions"], batch["mask"], labels=batch["tokens"])
    mask = torch.ones_like(batch["tokens"], dtype=torch.float32)
    return output, partial(reduce_loss, mask)


def reduce_loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean loss, and the dictionary that the example prints."""
    loss = torch.sum(output.float().view(-1) * mask.view(-1)) / mask.sum()
    return loss, {"lm loss": loss}


def report(plan: Plan, step: int) -> None:
    """Call `megascale.watch` in a run that uses it."""
    if plan.uses_watch:
        import megascale.watch

        megascale.watch.step(step)


def load(folder: Path, model: DistributedDataParallel) -> int:
    """Load the newest complete checkpoint and return its step, 0 without one."""
    saves = sorted(
        path.parent for path in folder.glob("iter_*/.metadata") if re.fullmatch(r"iter_\d+", path.parent.name)
    )
    if not saves:
        return 0
    state = dist_checkpointing.load(model.module.sharded_state_dict(prefix=""), str(saves[-1]))
    model.module.load_state_dict(state)
    return int(saves[-1].name.removeprefix("iter_"))


def save(folder: Path, model: DistributedDataParallel) -> None:
    """Save a checkpoint under its final name once it is complete."""
    temporary = Path(f"{folder}.tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    dist.barrier()
    dist_checkpointing.save(model.module.sharded_state_dict(prefix=""), str(temporary))
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    dist.barrier()


if __name__ == "__main__":
    main()
