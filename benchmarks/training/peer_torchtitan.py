"""A child of `python -m benchmarks peers`: training steps of torchtitan's Llama 3 trainer on random tokens.

Run under torchrun with a job file (see peer_job.py): compiled, fully sharded, no recomputation unless asked for,
with asynchronous tensor parallelism and interleaved 1F1B where the layout has those axes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.training.peer_job import PeerJob, PreparedPeer, run_child

FLAVOUR = "measured"


def prepare(job: PeerJob, device: torch.device) -> PreparedPeer:
    """The trainer and a function that makes one of its steps."""
    import torchtitan
    from torchtitan.config import ConfigManager
    from torchtitan.models import llama3
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    shape, arguments = job.model, _arguments(job)
    data = job.world // (job.tensor * job.pipeline)
    # Their sizes of the MLP: two thirds of four times the width, times a factor, rounded up.
    plain = int(2 * 4 * shape["hidden"] / 3)
    built = TransformerModelArgs(
        dim=shape["hidden"],
        n_layers=shape["layers"],
        n_heads=shape["heads"],
        n_kv_heads=shape["kv_heads"],
        vocab_size=shape["vocab"],
        multiple_of=1,
        ffn_dim_multiplier=(shape["ffn"] + 0.5) / plain,
        rope_theta=shape["rotary_base"],
    )

    class Random:
        """Batches as its loader gives them, always the same one."""

        def __init__(self, rank: int) -> None:
            # Of a pipeline's stages each asks for all micro-batches of a step at once.
            rows = job.draw_tokens(rank, torch.device("cpu"), job.micro_batch * (_in_step(job, data)))
            self.batch = rows[:-1].T.contiguous(), rows[1:].T.contiguous()

        def __iter__(self) -> Iterator[Any]:
            while True:
                yield {"input": self.batch[0]}, self.batch[1]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, _: dict[str, Any]) -> None:
            return None

    spec = replace(
        llama3.get_train_spec(),
        model_args={FLAVOUR: built},
        build_dataloader_fn=lambda dp_rank, **_: Random(dp_rank),
        build_tokenizer_fn=None,
    )
    register_train_spec("measured", spec)
    trainer = Trainer(ConfigManager().parse_args(arguments))
    batches = trainer.batch_generator(trainer.dataloader)

    def step() -> None:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)

    return PreparedPeer(step, {"torchtitan": torchtitan.__version__}, " ".join(arguments))


def _in_step(job: PeerJob, data: int) -> int:
    """Micro-batches that one call of its training step takes at once: all of a pipeline's, else one after another."""
    if job.pipeline > 1:
        return job.global_batch // (job.micro_batch * data)
    return 1


def _arguments(job: PeerJob) -> list[str]:
    """Its command line for a job."""
    data = job.world // (job.tensor * job.pipeline)
    arguments = {
        "model.name": "measured",
        "model.flavor": FLAVOUR,
        "training.local_batch_size": job.micro_batch * _in_step(job, data),
        "training.global_batch_size": job.global_batch,
        "training.seq_len": job.model["sequence"],
        "training.steps": job.warmup + job.steps,
        "metrics.log_freq": 10**6,
        "activation_checkpoint.mode": job.recompute,
        "parallelism.tensor_parallel_degree": job.tensor,
        "parallelism.pipeline_parallel_degree": job.pipeline,
        "parallelism.pipeline_parallel_microbatch_size": job.micro_batch,
        "optimizer.lr": 1e-4,
    }
    if job.pipeline > 1:
        if job.virtual > 1:
            arguments["parallelism.pipeline_parallel_schedule"] = "Interleaved1F1B"
        else:
            arguments["parallelism.pipeline_parallel_schedule"] = "1F1B"
    if job.float8:
        arguments |= {"model.converters": "quantize.linear.float8", "quantize.linear.float8.filter_fqns": "output"}
        if job.float8 != "tensorwise":  # that one has no name where parameters are gathered in float8
            arguments["quantize.linear.float8.recipe_name"] = job.float8
    if torch.cuda.is_available():
        flags = ["--compile.enable"]
    else:
        flags = []
    if job.tensor > 1 and torch.cuda.is_available():
        flags.append("--parallelism.enable_async_tensor_parallel")
    if job.float8 == "tensorwise" and data > 1:
        flags.append("--quantize.linear.float8.enable_fsdp_float8_all_gather")
        flags.append("--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp")
    return [f"--{key}={value}" for key, value in arguments.items()] + flags


if __name__ == "__main__":
    run_child(prepare, sys.argv[1])
