"""`megascale bench train`: time steps of a model on random tokens through the engine that training uses.

It prints tokens/s and MFU with its convention, and the rate that plain GEMMs sustain on the same GPUs right before
and after. GPUs and power limits differ, so only the share of that rate is comparable.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections import Counter
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

# Sections that a step depends on; none has an address or a secret.
REPORTED_SECTIONS = {"model", "optimizer", "parallel", "overlap", "kernels", "train"}
VOCABULARY = 50304  # tokens of a model that is only timed
HOST_STEPS = 3  # steps that measure the host's own time
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(context_settings=OVERRIDES)
    def train(
        context: typer.Context,
        preset: str = typer.Argument(..., help="A shipped model shape, such as gpt-1.3b."),
        steps: int = typer.Option(20, min=1, help="Timed steps."),
        warmup: int = typer.Option(5, min=1, help="Steps before them."),
        profile: Path | None = typer.Option(None, help="Write a Chrome trace of one step and a table of its kernels."),
        cores: int | None = typer.Option(
            None, min=1, help="Cores per rank, each rank on cores of its own, as with taskset. \\[default: all]"
        ),
        watch: bool = typer.Option(
            False, "--watch", help="Sample clock, power and temperature of the first GPU by nvidia-smi, also for --out."
        ),
        mean_document: int = typer.Option(
            512, min=1, help="With --data.document_mask=true: mean length of the random documents, in tokens."
        ),
        even_experts: bool = typer.Option(
            False, "--even-experts", help="With model.mlp=experts: send each expert equally many tokens, by turns."
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
        config = load_shape(defaults + context.args)
        if not launcher.is_launched_rank():
            import torch

            if watch:
                gpu_watch.check_watch(uses_gpu=torch.cuda.is_available() and config.train.device != "cpu")
            world = launcher.count_processes(config, torch.cuda.device_count())
            if cores is not None:
                find_cores(cores, world - 1)
            if world > 1:
                layout = lay_out(config, world)
                arguments = sys.argv[sys.argv.index("train") :]
                raise typer.Exit(launcher.launch(["bench"] + arguments, layout))
        if cores is not None:
            rank_cores = find_cores(cores, int(os.environ.get("LOCAL_RANK", "0")))
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                    os.sched_setaffinity(int(thread), rank_cores)
        result = measure(
            config, steps, warmup, profile, watch=watch, mean_document=mean_document, even_experts=even_experts
        )
        if result is not None:
            show(result)
            if out is not None:
                out.write_text(strict_json.dumps(result, indent=2) + "\n")


def find_cores(cores: int, local_rank: int) -> set[int]:
    """Return the `cores` cores of a rank of this host. Raises ConfigError if there are too few, or without Linux."""
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError(f"--cores={cores}: only Linux keeps threads to cores; leave it out")
    available = sorted(os.sched_getaffinity(0))
    rank_cores = set(available[cores * local_rank : cores * (local_rank + 1)])
    if len(rank_cores) < cores:
        raise ConfigError(
            f"--cores={cores}: {len(available)} cores may be used here, and {local_rank + 1} ranks would take "
            f"{cores * (local_rank + 1)}; give each fewer"
        )
    return rank_cores


def load_shape(overrides: list[str]) -> Config:
    """Return the configuration of overrides alone, with a vocabulary if the model shape has none."""
    from megascale.api import adopt_imported_model
    from megascale.config import load_command_line

    config = adopt_imported_model(load_command_line(None, overrides))
    if config.model.vocab_size is not None:
        return config
    return load_command_line(None, overrides + [f"--model.vocab_size={VOCABULARY}"])


def join_groups(config: Config) -> tuple[RankInfo, Groups | None]:
    """Return this process's rank information, and its groups if it is not alone; collective."""
    from megascale.core.layout import lay_out
    from megascale.rendezvous.start_job import initialise
    from megascale.train.rank_info import check_local_ranks, find_rank_info

    rank_info = find_rank_info(config)
    check_local_ranks(lay_out(config, rank_info.world), rank_info, saves_checkpoints=False)
    if rank_info.world == 1:
        return rank_info, None
    groups = initialise(
        config, rank=rank_info.rank, world=rank_info.world, local_rank=rank_info.local_rank, device=rank_info.device
    )
    return rank_info, groups


def random_rows(config: Config, data_rank: int, device: torch.device) -> torch.Tensor:
    """Return one random micro-batch and the token after each, int64 [sequence + 1, micro_batch]."""
    import torch

    shape = (config.model.sequence_length + 1, config.train.micro_batch)
    generator = torch.Generator().manual_seed(7 + data_rank)
    return torch.randint(0, config.model.vocab, shape, generator=generator).to(device)


@dataclass(frozen=True)
class RandomSamples:
    """The micro-batch that a rank trains on in every step.

    Attributes:
        batch: on the device.
        fields: its optional fields.
        weight_sum: sum of the loss weights of the rank's micro-batches in a step.
        lengths: lengths of its documents; empty without data.document_mask.
    """

    batch: Batch[torch.Tensor]
    fields: SampleFields = NO_FIELDS
    weight_sum: float = 0.0
    lengths: tuple[int, ...] = ()

    def read_batch(self, i: int) -> Batch[torch.Tensor]:
        """Return micro-batch `i` of a step."""
        return self.batch

    def sum_weights(self) -> float:
        """Return the sum of the loss weights of a step."""
        return self.weight_sum


def make_samples(
    config: Config, data_rank: int, microbatches: int, mean_document: int, device: torch.device
) -> RandomSamples:
    """Return random tokens, under data.document_mask in documents of random lengths.

    Lengths are exponential with the given mean, at least 1; a sample's last document is cut at its end. Raises
    ConfigError if a sample has more documents than data.max_documents.
    """
    import numpy as np
    import torch

    from megascale.data.dataset.sample_fields import restart_positions

    rows = random_rows(config, data_rank, device)
    if not config.data.document_mask:
        return RandomSamples(Batch(rows[:-1], rows[1:]))
    length, samples = config.model.sequence_length, config.train.micro_batch
    limit = config.data.count_max_documents(length)
    draw = np.random.default_rng(7 + data_rank)
    boundaries = np.full((limit + 2, samples), length, np.int32)
    for sample in range(samples):
        stops = np.cumsum(np.maximum(1, draw.exponential(mean_document, length).round()))
        inner = stops[stops < length]
        if len(inner) >= limit:
            raise ConfigError(
                f"--mean-document={mean_document}: a sample has {len(inner) + 1} documents and data.max_documents="
                f"{limit} allows fewer; set --data.max_documents={2 * len(inner)}"
            )
        boundaries[: len(inner) + 1, sample] = [0, *inner]
    weights = np.ones((length, samples), np.float32)
    for sample, edges in enumerate(boundaries.T):
        weights[edges[1:] - 1, sample] = 0  # the last token of a document predicts nothing
    positions = np.stack([restart_positions(edges) for edges in boundaries.T], axis=1)
    batch = Batch(
        rows[:-1],
        rows[1:],
        loss_weights=torch.from_numpy(weights).to(device),
        positions=torch.from_numpy(positions).long().to(device),
        document_boundaries=torch.from_numpy(boundaries).to(device),
    )
    sizes = np.diff(boundaries, axis=0)
    fields = SampleFields(loss_weights=True, positions=True, max_documents=limit + 1)
    return RandomSamples(batch, fields, float(weights.sum()) * microbatches, tuple(sizes[sizes > 0].tolist()))


def measure(
    config: Config,
    steps: int,
    warmup: int,
    profile: Path | None,
    *,
    watch: bool = False,
    mean_document: int = 512,
    even_experts: bool = False,
) -> dict[str, Any] | None:
    """Run the steps; returns the figures on rank 0, None elsewhere.

    Args:
        mean_document: mean length of random documents under data.document_mask.
        even_experts: select experts by turns instead of by score. Raises ConfigError if the model has no experts.
    """
    import torch

    import megascale
    from megascale.bench.gpu_watch import GpuWatch
    from megascale.bench.timing import sustained_gemm_rate
    from megascale.core.flops import CONVENTION, DOCUMENT_CONVENTION, device_peak_tflops, document_flops, mfu
    from megascale.core.inventory import resolve_layers
    from megascale.core.layer_spec import ExpertsSpec
    from megascale.core.layout import lay_out
    from megascale.model.experts import list_expert_layers
    from megascale.rendezvous.groups import shutdown
    from megascale.train.engine import Engine
    from megascale.train.host_pauses import GarbageCollector

    if even_experts and not any(isinstance(layer.feed_forward, ExpertsSpec) for layer in resolve_layers(config.model)):
        raise ConfigError("--even-experts: the model has no experts; set --model.mlp=experts, or leave it out")
    rank_info, groups = join_groups(config)
    device, world = rank_info.device, rank_info.world
    is_cuda = device.type == "cuda"
    if is_cuda:
        gemm_rates = [sustained_gemm_rate(device, 2.0)]
    else:
        gemm_rates = None
    start = time.perf_counter()
    layout = lay_out(config, world)
    model, train = config.model, config.train
    samples = make_samples(
        config, layout.grid.replica(rank_info.rank), layout.microbatches, mean_document=mean_document, device=device
    )
    engine = Engine(layout, groups, device, fields=samples.fields)
    if even_experts:
        for layer in list_expert_layers(engine.chunks):
            layer.select = select_evenly
    start_seconds = time.perf_counter() - start
    seconds, losses = [], []
    loads: list[float] = []
    redone_steps = 0
    first_start = 0.0  # of the first timed step
    watcher = None
    if watch and not rank_info.rank:
        watcher = GpuWatch(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    garbage = GarbageCollector(train.gc_interval)
    with watcher or contextlib.nullcontext():
        for step in range(1, warmup + steps + 1):
            start = time.perf_counter()
            if step == warmup + 1:
                first_start = start
            engine.start_gather()
            result = engine.step(samples.read_batch, step, 1e-4, has_next_step=True, sum_weights=samples.sum_weights)
            garbage.collect(step)  # as in training
            losses.append(float(result.loss))  # waits for the update, not for work that overlaps the next step
            if step > warmup:
                seconds.append(time.perf_counter() - start)
            if result.expert_counts is not None and step > warmup:
                loads.append(result.expert_counts.summarise()["expert_rank_load_max"])
                redone_steps += result.expert_counts.is_repeated
    garbage.close()
    next_step = warmup + steps + 1
    peak_memory, device_memory = None, None
    host_seconds: list[float] = []
    if gemm_rates is not None:
        peak_memory = torch.cuda.max_memory_allocated(device) / 2**30
        free, total = torch.cuda.mem_get_info(device)
        device_memory = (total - free) / 2**30
        gemm_rates.append(sustained_gemm_rate(device, 2.0))
        if config.parallel.pipeline == 1:
            host_seconds = [_host_seconds(engine, samples, next_step + i) for i in range(HOST_STEPS)]
            next_step += HOST_STEPS
    if profile is not None:
        _profile(engine, samples, next_step, profile, rank_info.rank, is_cuda)
    engine.synchronize()
    engine.close()
    if groups is not None:
        shutdown(groups)
    if rank_info.rank:
        return None
    step_seconds = statistics.median(seconds)
    rate = train.global_batch * model.sequence_length / step_seconds
    if is_cuda:
        name = torch.cuda.get_device_name(device)
    else:
        name = "CPU"
    peak = config.observe.peak_tflops or device_peak_tflops(name)
    flops, convention = None, CONVENTION
    if samples.lengths:
        flops, convention = document_flops(model, Counter(samples.lengths)), DOCUMENT_CONVENTION
    return {
        "model": model.preset,
        "settings": config.model_dump(mode="json", exclude_none=True, include=REPORTED_SECTIONS),
        "processes": world,
        "global_batch": train.global_batch,
        "sequence_length": model.sequence_length,
        "date": date.today().isoformat(),
        "device": f"{world} x {name}",
        "versions": {"megascale": megascale.__version__, "torch": torch.__version__},
        "step_seconds": step_seconds,
        "all_step_seconds": seconds,
        "step_seconds_min_max": [min(seconds), max(seconds)],
        "host_seconds": statistics.median(host_seconds) if host_seconds else None,
        "tokens_per_second_per_device": rate / world,
        "mfu": mfu(model, rate, world, peak, flops) if peak else None,
        "mfu_convention": f"{convention}; peak {peak} TFLOP/s",
        "documents": len(samples.lengths) or None,
        "expert_rank_load_max": statistics.median(loads) if loads else None,
        "redone_steps": redone_steps if loads else None,
        "gemm_flop_per_s": gemm_rates,
        "peak_memory_gib": peak_memory,
        "device_memory_gib": device_memory,
        "watched": None if watcher is None else watcher.list_samples(first_start),
        "watch_trouble": None if watcher is None else watcher.problem,
        "start_seconds": start_seconds,
        "losses": [losses[0], losses[-1]],
        "active": engine.active | engine.runtime.kernels.active(),
    }


def select_evenly(scores: torch.Tensor, settings: ExpertsConfig, _: torch.Tensor | None) -> torch.Tensor:
    """Return experts by turns [..., top_k], where `ops.routing.select_experts` returns the best."""
    import torch

    choices = torch.arange(scores.shape[:-1].numel() * settings.top_k, device=scores.device)
    return (choices % settings.number).view(*scores.shape[:-1], settings.top_k)


def _host_seconds(engine: Engine, samples: RandomSamples, step: int) -> float:
    """Return the host's seconds to launch a step, without its waits for the device before each micro-batch.

    Without these waits full queues would block the host, which is no work of its own.
    """
    import torch

    waited = 0.0
    assert samples.batch.tokens is not None
    device = samples.batch.tokens.device

    def read_batch(i: int) -> Batch[torch.Tensor]:
        nonlocal waited
        start = time.perf_counter()
        torch.cuda.synchronize(device)
        waited += time.perf_counter() - start
        return samples.batch

    torch.cuda.synchronize(device)
    start = time.perf_counter()
    engine.start_gather()
    result = engine.step(read_batch, step, 1e-4, has_next_step=True, sum_weights=samples.sum_weights)
    elapsed = time.perf_counter() - start - waited
    float(result.loss)
    return elapsed


def _profile(engine: Any, samples: RandomSamples, step: int, out: Path, rank: int, cuda: bool) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        engine.start_gather()
        engine.step(samples.read_batch, step, 1e-4, has_next_step=True, sum_weights=samples.sum_weights)
        if cuda:
            torch.cuda.synchronize()
    if rank:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    if cuda:
        key = "self_cuda_time_total"
    else:
        key = "self_cpu_time_total"
    table = recorded.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=70)
    out.with_suffix(".txt").write_text(table)
    if not os.environ.get("MEGASCALE_NO_TRACE"):
        recorded.export_chrome_trace(str(out))


def show(result: dict[str, Any]) -> None:
    """Print the figures."""
    from rich.console import Console
    from rich.table import Table

    from megascale.bench.gpu_watch import summarize_samples

    table = Table.grid(padding=(0, 2))
    low, high = result["step_seconds_min_max"]
    rows = [
        ("model", f"{result['model']}, {result['global_batch']} x {result['sequence_length']} tokens per step"),
        ("device", f"{result['device']}, torch {result['versions']['torch']}, {result['date']}"),
        ("step", f"{result['step_seconds']:.4f} s (median; {low:.4f} to {high:.4f})"),
        ("tokens/s per device", f"{result['tokens_per_second_per_device']:,.0f}"),
        ("loss", f"{result['losses'][0]:.4f} -> {result['losses'][1]:.4f}"),
    ]
    if result.get("documents"):
        tokens = result["settings"]["train"]["micro_batch"] * result["sequence_length"]
        mean = tokens / result["documents"]
        rows.append(("documents", f"{result['documents']} in a micro-batch, of {mean:,.0f} tokens each in the mean"))
    if result.get("expert_rank_load_max") is not None:
        load, redone = result["expert_rank_load_max"], result["redone_steps"]
        steps = len(result["all_step_seconds"])
        rows.append(
            ("experts", f"{load:.2f} times the mean load on the slowest rank; {redone} of {steps} steps redone")
        )
    if result["mfu"] is not None:
        rows.append(("MFU", f"{100 * result['mfu']:.1f}% ({result['mfu_convention']})"))
    if result["gemm_flop_per_s"] is not None:
        host = result["host_seconds"]
        if host is not None:
            rows.append(("host", f"launches a step in {host:.4f} s, {host / result['step_seconds']:.1%} of it"))
        before, after = (x / 1e12 for x in result["gemm_flop_per_s"])
        rows.append(("sustained GEMM", f"{before:.0f} TFLOP/s before, {after:.0f} after, in the same run"))
        memory = f"{result['peak_memory_gib']:.1f} GiB in tensors, {result['device_memory_gib']:.1f} GiB of the device"
        rows.append(("peak memory", f"{memory} (as NVML has it: the allocator's reserve, CUDA, NCCL)"))
    if result["watched"] is not None:
        rows.append(("watched", f"{summarize_samples(result['watched'])} (medians of the first and last tenth)"))
        if result["watch_trouble"]:
            rows.append(("", result["watch_trouble"]))
    rows += [("active", f"{op}: {choice}") for op, choice in result["active"].items()]
    for label, value in rows:
        table.add_row(f"[dim]{label}[/dim]", value)
    Console(highlight=False, width=160).print(table)
