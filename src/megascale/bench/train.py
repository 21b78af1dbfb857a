"""`megascale bench train`: time steps of a model on random tokens through the engine that training uses.

It prints tokens/s and MFU with its convention, and the rate that plain GEMMs sustain on the same GPUs right before
and after the steps. GPUs and power limits differ, so compare machines by the ratio of the model's rate to the GEMMs'.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.core import strict_json
from megascale.errors import ConfigError

if TYPE_CHECKING:
    from megascale.config import Config

DEFAULT_VOCABULARY = 50304  # vocabulary size of a model shape that has none: GPT-2's, rounded up to a multiple of 128
OVERRIDE_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}  # accept --section.key=value


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(context_settings=OVERRIDE_SETTINGS)
    def train(
        context: typer.Context,
        preset: str = typer.Argument(..., help="A shipped model shape, such as gpt-1.3b."),
        steps: int = typer.Option(20, min=1, help="Timed steps."),
        warmup: int = typer.Option(5, min=1, help="Untimed steps before the timed steps."),
        profile: Path | None = typer.Option(None, help="Write a Chrome trace of one step and a table of its kernels."),
        cores: int | None = typer.Option(
            None, min=1, help="Cores per rank; ranks share no core, as with taskset. \\[default: all]"
        ),
        watch: bool = typer.Option(
            False, "--watch", help="Sample clock, power and temperature of the first GPU by nvidia-smi, also for --out."
        ),
        mean_document: int = typer.Option(
            512, min=1, help="With --data.document_mask=true: mean length of the random documents, in tokens."
        ),
        even_experts: bool = typer.Option(
            False, "--even-experts", help="With model.mlp=experts: assign experts in turn, equally many tokens to each."
        ),
        out: Path | None = typer.Option(None, help="Write the figures as JSON."),
    ) -> None:
        """Measure step time, tokens/s and MFU of a model on random tokens, with any setting as --section.key=value.

        Starts one process per GPU as training does.

        Examples:

          megascale bench train gpt-1.3b --train.micro_batch=8 --train.global_batch=64

          megascale bench train gpt-1.3b --train.micro_batch=8 --steps 500 --watch

          megascale bench train gpt-13b --model.layers=20 --parallel.tensor=2 --train.micro_batch=1 --cores 1

          megascale bench train llama-8b --model.layers=12 --data.document_mask=true --mean-document 512

          megascale bench train qwen3-30b-a3b --model.layers=12 --parallel.tensor=4 --train.micro_batch=4 --even-experts
        """
        from megascale.bench import gpu_watch
        from megascale.bench.measured_steps import measure_training
        from megascale.core.layout import lay_out
        from megascale.train import launcher

        defaults = [f"--model.preset={preset}", "--train.precision=bfloat16", "--train.global_batch=64"]
        defaults.append("--train.name=bench-train")
        config = load_shape_config(defaults + context.args)
        if not launcher.is_launched_rank():
            import torch

            if watch:
                gpu_watch.check_watch(uses_gpu=torch.cuda.is_available() and config.train.device != "cpu")
            world = launcher.count_processes(config, torch.cuda.device_count())
            if cores is not None:
                find_cores(cores, world - 1)  # Without enough cores for the last rank, fail before ranks are started.
            if world > 1:
                layout = lay_out(config, world)
                arguments = sys.argv[sys.argv.index("train") :]
                raise typer.Exit(launcher.launch(["bench"] + arguments, layout))
        if cores is not None:
            bind_threads(find_cores(cores, int(os.environ.get("LOCAL_RANK", "0"))))
        result = measure_training(
            config, steps, warmup, profile, watch=watch, mean_document=mean_document, even_experts=even_experts
        )
        if result is not None:
            print_result(result)
            if out is not None:
                out.write_text(strict_json.dumps(result, indent=2) + "\n")


def find_cores(cores_per_rank: int, local_rank: int) -> set[int]:
    """Return the numbers of the cores of one rank of this host.

    Raises ConfigError if this process may use too few cores, or if the system is not Linux.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError(f"--cores={cores_per_rank}: only Linux binds threads to cores; leave --cores out")
    available = sorted(os.sched_getaffinity(0))
    end = cores_per_rank * (local_rank + 1)
    rank_cores = set(available[end - cores_per_rank : end])
    if len(rank_cores) < cores_per_rank:
        raise ConfigError(
            f"--cores={cores_per_rank}: this process may use {len(available)} cores, and {local_rank + 1} ranks need "
            f"{end}; lower --cores"
        )
    return rank_cores


def bind_threads(cores: set[int]) -> None:
    """Let all present threads of this process, and those that they start, run on `cores` only."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def load_shape_config(overrides: list[str]) -> Config:
    """Return the configuration that `overrides` (--section.key=value) give without a file.

    A model shape without a vocabulary size gets DEFAULT_VOCABULARY.
    """
    from megascale.api import adopt_imported_model
    from megascale.config import load_command_line

    config = adopt_imported_model(
        load_command_line(None, overrides)
    )  # the model of an imported folder, if one is named
    if config.model.vocab_size is not None:
        return config
    return load_command_line(None, overrides + [f"--model.vocab_size={DEFAULT_VOCABULARY}"])


def print_result(result: dict[str, Any]) -> None:
    """Print the figures of `measure_training`'s result as a table."""
    from rich.markup import escape
    from rich.table import Table

    from megascale.bench.gpu_watch import summarize_samples
    from megascale.core.output_console import OutputConsole

    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(no_wrap=True)
    shortest, longest = result["step_seconds_min_max"]
    rows = [
        ("model", f"{result['model']}, {result['global_batch']} x {result['sequence_length']} tokens per step"),
        ("device", f"{result['device']}, torch {result['versions']['torch']}, {result['date']}"),
        ("step", f"{result['step_seconds']:.4f} s (median; {shortest:.4f} to {longest:.4f})"),
        ("tokens/s per device", f"{result['tokens_per_second_per_device']:,.0f}"),
        ("loss", f"{result['losses'][0]:.4f} -> {result['losses'][1]:.4f}"),
    ]
    if result.get("documents"):
        tokens = result["settings"]["train"]["micro_batch"] * result["sequence_length"]
        mean_length = tokens / result["documents"]
        rows.append(("documents", f"{result['documents']} per micro-batch, with {mean_length:,.0f} tokens on average"))
    if result.get("expert_rank_load_max") is not None:
        steps = len(result["all_step_seconds"])
        load = f"the most loaded rank has {result['expert_rank_load_max']:.2f} times the mean load"
        rows.append(("experts", f"{load}; {result['redone_steps']} of {steps} steps were recomputed"))
    if result["mfu"] is not None:
        rows.append(("MFU", f"{100 * result['mfu']:.1f}% ({result['mfu_convention']})"))
    if result["gemm_flop_per_s"] is not None:
        host = result["host_seconds"]
        if host is not None:
            rows.append(("host", f"launches a step in {host:.4f} s, {host / result['step_seconds']:.1%} of its time"))
        before, after = (rate / 1e12 for rate in result["gemm_flop_per_s"])
        rows.append(("sustained GEMM", f"{before:.0f} TFLOP/s before, {after:.0f} after, in the same run"))
        memory = f"{result['peak_memory_gib']:.1f} GiB in tensors, {result['device_memory_gib']:.1f} GiB of the device"
        rows.append(("peak memory", f"{memory} (NVML's figure: includes the allocator's reserve, CUDA and NCCL)"))
    if result["watched"] is not None:
        rows.append(("watched", f"{summarize_samples(result['watched'])} (medians of the first and last tenth)"))
        if result["watch_trouble"]:
            rows.append(("", result["watch_trouble"]))
    rows += [("active", f"{op}: {choice}") for op, choice in result["active"].items()]
    for label, value in rows:
        table.add_row(f"[dim]{label}[/dim]", escape(value))
    OutputConsole(highlight=False).print(table)
