"""`megascale bench train`: time steps of a model on random tokens through the engine that training uses.

It prints tokens/s and MFU with its convention, and the rate that plain GEMMs sustain on the same GPUs right before
and after the steps. GPUs and power limits differ, so compare machines by the ratio of the model's rate to the GEMMs'.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.core import strict_json
from megascale.core.batch import NO_FIELDS, Batch, SampleFields
from megascale.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from megascale.config import Config
    from megascale.config.experts_section import ExpertsConfig
    from megascale.rendezvous.groups import Groups
    from megascale.train.engine import Engine
    from megascale.train.rank_info import RankInfo

# Configuration sections that determine a step's time. The result includes them; they hold no address and no secret.
REPORTED_SECTIONS = {"model", "optimizer", "parallel", "overlap", "kernels", "train"}
DEFAULT_VOCABULARY = 50304  # vocabulary size of a model shape that has none: GPT-2's, rounded up to a multiple of 128
LEARNING_RATE = 1e-4  # small, so that the loss stays finite; the time of a step does not depend on it
HOST_STEPS = 3  # steps that measure the host's launch time
SEED = 7  # arbitrary; each data rank adds its number, so that replicas train on different tokens
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
            rank_cores = find_cores(cores, int(os.environ.get("LOCAL_RANK", "0")))
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                    os.sched_setaffinity(int(thread), rank_cores)
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


def load_shape_config(overrides: list[str]) -> Config:
    """Return the configuration that `overrides` (--section.key=value) give without a file.

    A model shape without a vocabulary size gets DEFAULT_VOCABULARY.
    """
    from megascale.api import adopt_imported_model
    from megascale.config import load_command_line

    config = adopt_imported_model(load_command_line(None, overrides))
    if config.model.vocab_size is not None:
        return config
    return load_command_line(None, overrides + [f"--model.vocab_size={DEFAULT_VOCABULARY}"])


def join_groups(config: Config, name_suffix: str = "") -> tuple[RankInfo, Groups | None]:
    """Return this process's rank information and its process groups; None for a single process. Collective.

    Args:
        name_suffix: as for `rendezvous.groups.make_groups`.
    """
    from megascale.core.layout import lay_out
    from megascale.rendezvous.start_job import initialise
    from megascale.train.rank_info import check_local_ranks, find_rank_info

    rank_info = find_rank_info(config)
    check_local_ranks(lay_out(config, rank_info.world), rank_info, saves_checkpoints=False)
    if rank_info.world == 1:
        return rank_info, None
    groups = initialise(
        config,
        rank=rank_info.rank,
        world=rank_info.world,
        local_rank=rank_info.local_rank,
        device=rank_info.device,
        name_suffix=name_suffix,
    )
    return rank_info, groups


def draw_tokens(config: Config, data_rank: int, device: torch.device) -> torch.Tensor:
    """Return random tokens of one micro-batch, int64 [sequence + 1, micro_batch].

    Inputs are the rows [:-1], targets the rows [1:].
    """
    import torch

    shape = (config.model.sequence_length + 1, config.train.micro_batch)
    generator = torch.Generator().manual_seed(SEED + data_rank)
    return torch.randint(0, config.model.vocab, shape, generator=generator).to(device)


@dataclass(frozen=True)
class RandomSamples:
    """The random micro-batch that a rank trains on in every step, again and again.

    Attributes:
        batch: the micro-batch, on the device.
        fields: the optional fields of `batch`.
        weight_sum: sum of the loss weights of all micro-batches of the rank in a step.
        document_lengths: tokens of each document of `batch`; empty without data.document_mask.
    """

    batch: Batch[torch.Tensor]
    fields: SampleFields = NO_FIELDS
    weight_sum: float = 0.0
    document_lengths: tuple[int, ...] = ()

    def read_batch(self, i: int) -> Batch[torch.Tensor]:
        """Return micro-batch `i` of a step, which is the same for all `i`."""
        return self.batch

    def sum_weights(self) -> float:
        """Return the sum of the loss weights of a step."""
        return self.weight_sum


def make_samples(
    config: Config, data_rank: int, microbatches: int, mean_document: int, device: torch.device
) -> RandomSamples:
    """Return random tokens; under data.document_mask they form documents of random lengths.

    Lengths are exponentially distributed with mean `mean_document`, at least 1. The end of a sample cuts its last
    document. Raises ConfigError if a sample has more documents than data.max_documents.

    Args:
        microbatches: micro-batches of the rank per step.
    """
    import numpy as np
    import torch

    from megascale.data.dataset.sample_fields import restart_positions

    tokens = draw_tokens(config, data_rank, device)
    if not config.data.document_mask:
        return RandomSamples(Batch(tokens[:-1], tokens[1:]))
    length, sample_count = config.model.sequence_length, config.train.micro_batch
    max_documents = config.data.count_max_documents(length)
    generator = np.random.default_rng(SEED + data_rank)
    # As in training, column i holds the index of the first token of each document in sample i. The remaining rows hold
    # the sample's length.
    boundaries = np.full((max_documents + 2, sample_count), length, np.int32)
    for sample in range(sample_count):
        ends = np.cumsum(np.maximum(1, generator.exponential(mean_document, length).round()))
        ends = ends[ends < length]
        if len(ends) >= max_documents:
            raise ConfigError(
                f"--mean-document={mean_document}: a sample has {len(ends) + 1} documents and data.max_documents="
                f"{max_documents} allows fewer; set --data.max_documents={2 * len(ends)}"
            )
        boundaries[0, sample] = 0
        boundaries[1 : len(ends) + 1, sample] = ends
    weights = np.ones((length, sample_count), np.float32)
    for sample, sample_boundaries in enumerate(boundaries.T):
        weights[sample_boundaries[1:] - 1, sample] = 0  # the last token of a document has no target
    positions = np.stack([restart_positions(sample_boundaries) for sample_boundaries in boundaries.T], axis=1)
    batch = Batch(
        tokens[:-1],
        tokens[1:],
        loss_weights=torch.from_numpy(weights).to(device),
        positions=torch.from_numpy(positions).long().to(device),
        document_boundaries=torch.from_numpy(boundaries).to(device),
    )
    lengths = np.diff(boundaries, axis=0)
    document_lengths = tuple(lengths[lengths > 0].tolist())
    fields = SampleFields(loss_weights=True, positions=True, max_documents=len(boundaries) - 1)
    return RandomSamples(batch, fields, float(weights.sum()) * microbatches, document_lengths)


def measure_training(
    config: Config,
    steps: int,
    warmup: int,
    profile: Path | None,
    *,
    watch: bool = False,
    mean_document: int = 512,
    even_experts: bool = False,
) -> dict[str, Any] | None:
    """Run the steps; returns the content of the JSON result on rank 0, None on other ranks.

    Raises ConfigError for `even_experts` if the model has no experts.

    Args:
        steps: timed steps.
        warmup: untimed steps before the timed steps.
        profile: file of the Chrome trace of one step, or None.
        watch: sample clock, power and temperature of rank 0's GPU.
        mean_document: mean tokens of a random document under data.document_mask.
        even_experts: select experts in turn instead of by score.
    """
    from megascale.rendezvous.groups import shutdown

    check_even_experts(config, even_experts)
    rank_info, groups = join_groups(config)
    result = measure_steps(
        config,
        rank_info,
        groups=groups,
        steps=steps,
        warmup=warmup,
        profile=profile,
        watch=watch,
        mean_document=mean_document,
        even_experts=even_experts,
    )
    if groups is not None:
        shutdown(groups)
    return result


def check_even_experts(config: Config, even_experts: bool) -> None:
    """Raise ConfigError if experts are to be selected in turn and the model has none."""
    from megascale.core.inventory import resolve_layers
    from megascale.core.layer_spec import ExpertsSpec

    if even_experts and not any(isinstance(layer.feed_forward, ExpertsSpec) for layer in resolve_layers(config.model)):
        raise ConfigError("--even-experts: the model has no experts; set --model.mlp=experts, or leave it out")


def measure_steps(
    config: Config,
    rank_info: RankInfo,
    *,
    groups: Groups | None,
    steps: int,
    warmup: int,
    profile: Path | None = None,
    watch: bool = False,
    mean_document: int = 512,
    even_experts: bool = False,
    gemm_seconds: float = 2.0,
    host_steps: int = HOST_STEPS,
) -> dict[str, Any] | None:
    """Run the steps in process groups that exist; returns the content of the JSON result on rank 0, else None.

    The arguments are those of `measure_training`, and:

    Args:
        rank_info, groups: the result of `join_groups`. The caller shuts the groups down.
        gemm_seconds: duration of the sustained GEMMs before and after the steps, on a GPU.
        host_steps: further steps that measure the host's launch time; 0 leaves the time out.
    """
    import torch

    import megascale
    from megascale.bench.gpu_watch import GpuWatch
    from megascale.bench.timing import measure_sustained_gemm_rate
    from megascale.core.flops import CONVENTION, DOCUMENT_CONVENTION, device_peak_tflops, document_flops, mfu
    from megascale.core.layout import lay_out
    from megascale.model.experts import list_expert_layers
    from megascale.train.engine import Engine
    from megascale.train.host_pauses import GarbageCollector

    device, world = rank_info.device, rank_info.world
    is_cuda = device.type == "cuda"
    if is_cuda:
        gemm_rates = [measure_sustained_gemm_rate(device, gemm_seconds)]
    else:
        gemm_rates = None
    start = time.perf_counter()
    layout = lay_out(config, world)
    model, train = config.model, config.train
    samples = make_samples(
        config, layout.grid.replica(rank_info.rank), layout.microbatches, mean_document=mean_document, device=device
    )
    all_step_seconds = []
    losses = []
    largest_loads: list[float] = []
    redone_steps = 0
    first_timed_start = 0.0
    peak_memory_gib, device_memory_gib = None, None
    host_seconds: list[float] = []
    watcher = None
    if watch and rank_info.rank == 0:
        watcher = GpuWatch(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    engine = Engine(layout, groups, device, fields=samples.fields)
    if even_experts:
        for layer in list_expert_layers(engine.chunks):
            layer.selection_override = select_evenly
    start_seconds = time.perf_counter() - start
    with close_engine_at_end(engine):
        garbage_collector = GarbageCollector(train.gc_interval)
        with watcher or contextlib.nullcontext(), contextlib.closing(garbage_collector):
            for step in range(1, warmup + steps + 1):
                start = time.perf_counter()
                if step == warmup + 1:
                    first_timed_start = start
                engine.start_gather()
                result = engine.step(
                    samples.read_batch, step, LEARNING_RATE, has_next_step=True, sum_weights=samples.sum_weights
                )
                garbage_collector.collect(step)  # as in training
                losses.append(float(result.loss))  # waits for the update, not for work that overlaps the next step
                if step > warmup:
                    all_step_seconds.append(time.perf_counter() - start)
                if result.expert_counts is not None and step > warmup:
                    largest_loads.append(result.expert_counts.summarise()["expert_rank_load_max"])
                    if result.expert_counts.is_repeated:
                        redone_steps += 1
        next_step = warmup + steps + 1
        if gemm_rates is not None:
            peak_memory_gib = torch.cuda.max_memory_allocated(device) / 2**30
            free_bytes, total_bytes = torch.cuda.mem_get_info(device)
            device_memory_gib = (total_bytes - free_bytes) / 2**30
            gemm_rates.append(measure_sustained_gemm_rate(device, gemm_seconds))
            if config.parallel.pipeline == 1:
                host_seconds = [_measure_host_seconds(engine, samples, next_step + i) for i in range(host_steps)]
                next_step += host_steps
        if profile is not None:
            _profile_step(engine, samples, next_step, out=profile, rank=rank_info.rank, is_cuda=is_cuda)
        engine.synchronize()
    if rank_info.rank != 0:
        return None
    step_seconds = statistics.median(all_step_seconds)
    tokens_per_second = train.global_batch * model.sequence_length / step_seconds
    if is_cuda:
        device_name = torch.cuda.get_device_name(device)
    else:
        device_name = "CPU"
    peak_tflops = config.observe.peak_tflops or device_peak_tflops(device_name)
    if samples.document_lengths:
        flop_count = document_flops(model, Counter(samples.document_lengths))
        convention = DOCUMENT_CONVENTION
    else:
        flop_count = None  # `mfu` counts attention over the whole sequence
        convention = CONVENTION
    return {
        "model": model.preset,
        "settings": config.model_dump(mode="json", exclude_none=True, include=REPORTED_SECTIONS),
        "processes": world,
        "global_batch": train.global_batch,
        "sequence_length": model.sequence_length,
        "date": date.today().isoformat(),
        "device": f"{world} x {device_name}",
        "versions": {"megascale": megascale.__version__, "torch": torch.__version__},
        "step_seconds": step_seconds,
        "all_step_seconds": all_step_seconds,
        "step_seconds_min_max": [min(all_step_seconds), max(all_step_seconds)],
        "host_seconds": statistics.median(host_seconds) if host_seconds else None,
        "tokens_per_second_per_device": tokens_per_second / world,
        "mfu": mfu(model, tokens_per_second, world, peak_tflops, flop_count) if peak_tflops else None,
        "mfu_convention": f"{convention}; peak {peak_tflops} TFLOP/s",
        "documents": len(samples.document_lengths) or None,
        "expert_rank_load_max": statistics.median(largest_loads) if largest_loads else None,
        "redone_steps": redone_steps if largest_loads else None,
        "gemm_flop_per_s": gemm_rates,
        "peak_memory_gib": peak_memory_gib,
        "device_memory_gib": device_memory_gib,
        "watched": None if watcher is None else watcher.list_samples(first_timed_start),
        "watch_trouble": None if watcher is None else watcher.error,
        "start_seconds": start_seconds,
        "losses": [losses[0], losses[-1]],
        "active": engine.active | engine.runtime.kernels.list_choices(),
    }


@contextlib.contextmanager
def close_engine_at_end(engine: Engine) -> Iterator[None]:
    """Close the engine after the block. If the block raised an error, the engine's peers learn that it failed."""
    try:
        yield
    except BaseException:
        engine.close(failed=True)
        raise
    engine.close()


def select_evenly(scores: torch.Tensor, settings: ExpertsConfig, _: torch.Tensor | None) -> torch.Tensor:
    """Return expert numbers in turn [..., top_k], whatever the scores are.

    Layers call it in place of `ops.routing.select_experts`, which returns the experts with the highest scores.
    """
    import torch

    choices = torch.arange(scores.shape[:-1].numel() * settings.top_k, device=scores.device)
    return (choices % settings.number).view(*scores.shape[:-1], settings.top_k)


def _measure_host_seconds(engine: Engine, samples: RandomSamples, step: int) -> float:
    """Return the seconds that the host takes to launch a step.

    The host waits for the device before each micro-batch, because a full launch queue would block it. These waits are
    subtracted.
    """
    import torch

    wait_seconds = 0.0
    assert samples.batch.tokens is not None
    device = samples.batch.tokens.device

    def read_batch(i: int) -> Batch[torch.Tensor]:
        nonlocal wait_seconds
        start = time.perf_counter()
        torch.cuda.synchronize(device)
        wait_seconds += time.perf_counter() - start
        return samples.batch

    torch.cuda.synchronize(device)
    start = time.perf_counter()
    engine.start_gather()
    result = engine.step(read_batch, step, LEARNING_RATE, has_next_step=True, sum_weights=samples.sum_weights)
    elapsed = time.perf_counter() - start - wait_seconds
    float(result.loss)  # waits for the step's end
    return elapsed


def _profile_step(engine: Any, samples: RandomSamples, step: int, *, out: Path, rank: int, is_cuda: bool) -> None:
    """Profile one step on all ranks; rank 0 writes a table of kernels (.txt) and the Chrome trace `out`."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if is_cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        engine.start_gather()
        engine.step(samples.read_batch, step, LEARNING_RATE, has_next_step=True, sum_weights=samples.sum_weights)
        if is_cuda:
            torch.cuda.synchronize()
    if rank != 0:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    if is_cuda:
        sort_key = "self_cuda_time_total"
    else:
        sort_key = "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=sort_key, row_limit=40, max_name_column_width=70)
    out.with_suffix(".txt").write_text(table)
    if not os.environ.get("MEGASCALE_NO_TRACE"):  # a trace of a large model has hundreds of megabytes
        profiler.export_chrome_trace(str(out))


def print_result(result: dict[str, Any]) -> None:
    """Print the figures of `measure_training`'s result as a table."""
    from rich.console import Console
    from rich.table import Table

    from megascale.bench.gpu_watch import summarize_samples

    table = Table.grid(padding=(0, 2))
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
        table.add_row(f"[dim]{label}[/dim]", value)
    Console(highlight=False, width=160).print(table)
