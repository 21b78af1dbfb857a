"""Training job of a compared system (peer_comparison.py), and the process that runs the job there."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.bench.step_monitor import StepMonitor
from megascale.core import strict_json
from megascale.errors import TrainingError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from megascale.config import Config, ModelConfig

RECOMPUTE = ("none", "selective", "full")
CONTEXT_EXCHANGES = ("a2a", "p2p", "all_gather")


@dataclass(frozen=True)
class PeerJob:
    """Training job of a compared system.

    Attributes:
        model: layers, hidden, heads, kv_heads, ffn, vocab (rows in memory), sequence, norm, activation, positions,
            rotary_base, tied, bias, head_size, head_norms.
        tensor, pipeline, virtual, world: the layout. The data-parallel size is the quotient.
        recompute: value of RECOMPUTE, with the peer's meaning.
        steps, warmup: number of timed steps, and of steps before them.
        out: file for the measurements of the last rank.
        float8: recipe of the linear layers, a value of `peer_choice.FLOAT8`; "" for bfloat16.
        context: ranks that divide the tokens of each sequence.
        context_exchange: communication of their attention, a value of CONTEXT_EXCHANGES.
        experts: number, top_k, width, selected (whether weights are normalised after the selection), ranks (that divide
            the experts) and even (whether the load is forced); None for a dense model.
        settings, data_settings: overrides of Megatron-Core's TransformerConfig and DistributedDataParallelConfig.
    """

    model: dict[str, Any]
    tensor: int
    pipeline: int
    virtual: int
    world: int
    micro_batch: int
    global_batch: int
    recompute: str
    steps: int
    warmup: int
    out: str
    float8: str = ""
    context: int = 1
    context_exchange: str = "a2a"
    experts: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    data_settings: dict[str, Any] = field(default_factory=dict)

    def draw_tokens(self, data_rank: int, device: torch.device, count: int | None = None) -> torch.Tensor:
        """Return random tokens of a data-parallel rank, int64 [sequence + 1, count or micro_batch]."""
        import torch

        generator = torch.Generator().manual_seed(7 + data_rank)
        size = (self.model["sequence"] + 1, count or self.micro_batch)
        return torch.randint(0, self.model["vocab"], size, generator=generator).to(device)


@dataclass
class PreparedPeer:
    """A peer that is ready to train.

    Attributes:
        step: makes a step, and may return the loss.
        versions: versions of the peer's packages by name.
        settings: settings of the peer, as text.
        measure_load: makes another step and returns the largest load of a rank with experts over the mean load, in any
            layer; None if the step replays a graph. The function is None for a dense model. Collective.
        close: ends what `prepare` began in this process.
    """

    step: Callable[[], Any]
    versions: dict[str, str]
    settings: str
    measure_load: Callable[[], float | None] | None = None
    close: Callable[[], None] = lambda: None


def _describe_model(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of a model that all peers understand, see `PeerJob.model`."""
    return {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.num_kv_heads,
        "ffn": model.ffn,
        "vocab": model.padded_vocab,
        "sequence": model.sequence_length,
        "norm": model.norm,
        "activation": model.activation,
        "positions": model.positions,
        "rotary_base": model.rotary_base,
        "tied": model.tied_embeddings,
        "bias": model.mlp_bias,
        "head_size": model.head_size,
        "head_norms": model.qk_norm == "head",
    }


def make_job(
    config: Config,
    world: int,
    steps: int,
    warmup: int,
    out: Path,
    micro_batch: int | None = None,
    recompute: str = "none",
) -> PeerJob:
    """Return the job description for a peer."""
    model = config.model
    parallel = config.parallel
    train = config.train
    tensor = parallel.tensor
    experts = None
    settings = model.experts
    if model.mlp == "experts" and settings is not None:
        experts = {
            "number": settings.number,
            "top_k": settings.top_k,
            "width": settings.width or model.ffn,
            "selected": settings.normalize == "selected",
            "ranks": parallel.tensor * parallel.expert,
            "even": False,
        }
        # In Megatron-Core the ranks that divide the experts read different samples, on every axis.
        tensor = 1
    return PeerJob(
        model=_describe_model(model),
        tensor=tensor,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual_stages,
        world=world,
        micro_batch=micro_batch or train.micro_batch,
        global_batch=train.global_batch,
        recompute=recompute,
        steps=steps,
        warmup=warmup,
        out=str(out),
        context=parallel.context,
        experts=experts,
    )


def connect(device: torch.device, store: Store | None = None) -> None:
    """Create the default process group, for a peer that does not create the group itself.

    Args:
        store: store of the rendezvous; None for MASTER_ADDR and MASTER_PORT. With a store, the process outlives its
            groups.
    """
    import torch.distributed as dist

    from megascale.rendezvous.start_job import set_watchdog

    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    if store is None:
        dist.init_process_group(backend, device_id=device_id)
        return
    set_watchdog(is_persistent=True)
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, device_id=device_id)


def run_child(prepare: Callable[[PeerJob, torch.device], PreparedPeer], file: str) -> None:
    """Prepare a peer, make the steps, and write the measurements on the last rank, which knows the loss.

    Args:
        file: file with the job, as JSON.
    """
    import torch
    import torch.distributed as dist

    job = PeerJob(**json.loads(Path(file).read_text()))
    rank = int(os.environ["RANK"])
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")

    peer = prepare(job, device)
    monitor = StepMonitor("peer", warmup=job.warmup, steps=job.steps, prints=rank == 0)
    seconds, losses = time_steps(peer, job, device, monitor)
    if rank == job.world - 1:
        memory_gib = torch.cuda.max_memory_allocated(device) / 2**30 if has_cuda else None
        report = {
            "seconds": seconds,
            "memory_gib": memory_gib,
            "versions": {"torch": torch.__version__, **peer.versions},
            "settings": peer.settings,
            "losses": losses,
        }
        Path(job.out).write_text(strict_json.dumps(report))
    dist.barrier()
    if has_cuda:
        os._exit(0)  # Megatron-Core's communicators of experts did not end within a minute
    dist.destroy_process_group()


def time_steps(
    peer: PreparedPeer, job: PeerJob, device: torch.device, monitor: StepMonitor
) -> tuple[list[float], list[float]]:
    """Make all steps of a job; return the seconds of each timed step, and the losses that this rank knows.

    The lists are those of the monitor. A warm-up step measures the load of experts about every ten seconds.

    Raises TrainingError for a loss that is not finite.
    """
    import torch

    def read_clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    measure_load = peer.measure_load
    if job.settings.get("cuda_graph_impl", "none") != "none":
        measure_load = None  # a capture would keep the hooks that count
    seconds = monitor.seconds
    losses = monitor.losses
    for number in range(job.warmup + job.steps):
        is_warmup = number < job.warmup
        if is_warmup and number > 0 and measure_load is not None:
            is_last = number == job.warmup - 1
            if is_last or agree(monitor.is_load_due(), device):
                load = measure_load()
                monitor.record_step(load)
                continue
        start = read_clock()
        loss = peer.step()
        elapsed = read_clock() - start
        if not is_warmup:
            seconds.append(elapsed)
        if loss is not None:
            losses.append(float(loss))
            if not math.isfinite(losses[-1]):
                raise TrainingError(f"the loss of step {number + 1} is {losses[-1]}, so its time cannot be compared")
        monitor.record_step()
    return seconds, losses


def agree(choice: bool, device: torch.device) -> bool:
    """Return the choice of rank 0. Collective."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor([int(choice)], device=device)
    dist.broadcast(flag, 0)
    return bool(flag.item())
