"""Before any process starts: does this host hold what the run needs? No torch.

Needs are estimates from below: the tensors that core/memory.py counts and what a process takes by itself at least, so
that what is refused would have ended by the kernel's or the allocator's hand. `train.fit=force` goes past a refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megascale.config import Config
from megascale.core.capacity import Capacity, free_disk
from megascale.core.layout import Layout, lay_out
from megascale.core.memory import BYTES, MemoryEstimate
from megascale.core.optimizer_state import checkpoint_elements
from megascale.core.rank_memory import GPU_CONTEXT, rank_memory
from megascale.core.terminal import print_error
from megascale.errors import FitError

MIB, GIB = 2**20, 2**30
# What each process takes for itself at least (private memory after its imports: Python 3.12, torch 2.11, Linux).
TRAINER = 150 * MIB  # started by itself
GPU_TRAINER = 500 * MIB  # with CUDA's and NCCL's host side
FORKED = 40 * MIB  # of a fork server, with which it shares what was imported
FORK_SERVER = 150 * MIB
AGENT = 20 * MIB
# Of a GPU, for the CUDA context and communicators, at least; `megascale plan` keeps more.
FILES = 64  # open in any trainer
THREADS = 8  # of a trainer beside those that compute
CROWD = 8  # trainers a core, above which a line says that it will be slow
FORCE = "--train.fit=force"
# Environment of processes whose starter has looked whether they fit; and of those that start in waves, the file
# descriptor on which they say that they have imported everything.
CHECKED, CAME = "MEGASCALE_PREFLIGHT", "MEGASCALE_CAME"


def max_concurrent_imports(cores: int) -> int:
    """Processes that import everything at the same time: a host's GPUs, or twice its cores."""
    return max(8, 2 * cores)


@dataclass(frozen=True)
class Share:
    """What of a run this host starts.

    Attributes:
        world: ranks of the run on all hosts.
        first_rank, ranks: those on this host.
        nodes: agents with a fork server each (`megascale launch`), spares included; 0: trainers alone.
        gpus: whether ranks train on GPUs.
        model: whether they hold the model (a bench of operators does not).
        keeps: whether checkpoints are written.
        running: whether its processes are there already and only what they will hold is asked for (torchrun's).
    """

    world: int
    first_rank: int
    ranks: int
    nodes: int = 0
    gpus: bool = False
    model: bool = True
    keeps: bool = True
    running: bool = False


def check_host(
    config: Config,
    share: Share,
    capacity: Capacity | None = None,
    disk: Callable[[Path], int] = free_disk,
    report: Callable[[str], None] = print_error,
) -> None:
    """Check `share` of the run of `config` (resolved) against this machine before anything of it starts.

    Args:
        capacity: what the machine has; default: asked.
        disk: free bytes where a folder is.
        say: takes lines that refuse nothing.

    Raises FitError, one line a fault with its figures, key and remedy, unless train.fit is `force`: then they are said.
    """
    layout = lay_out(config, share.world)
    if capacity is None:
        capacity = Capacity.measure(gpus=share.gpus)
    faults = _process_faults(config, share, capacity)
    if not faults and share.model:  # sizes of a crowd that cannot be are not worth counting
        stages = stages_here(layout, share)
        faults += _memory_faults(config, layout, share, capacity, stages)
    if share.keeps:
        faults += _disk_faults(config, disk)
    if faults and config.train.fit == "check":
        raise FitError("\n".join(f"{fault}. This is an estimate: {FORCE} starts all the same" for fault in faults))
    for fault in faults:
        report(f"train.fit=force: starting although {fault}")
    if not share.gpus and share.ranks > CROWD * capacity.cores:
        report(f"{share.ranks} ranks share {capacity.cores} cores: starting will take long and steps will be slow")


def check_processes(option: str, count: int, each: int, capacity: Capacity | None = None) -> None:
    """Whether so many processes of at least `each` bytes fit, before the first starts; FitError naming `option`."""
    capacity = Capacity.measure() if capacity is None else capacity
    if capacity.processes is not None and count > capacity.processes:
        raise FitError(
            f"{option}={count} processes are more than the {capacity.processes:,} that {capacity.processes_from} "
            "leaves; ask for fewer"
        )
    if capacity.memory is not None and count * each > capacity.memory:
        raise FitError(
            f"{option}={count} processes need {_size(count * each)} at least and {capacity.memory_from} leaves "
            f"{_size(capacity.memory)}; ask for {max(1, capacity.memory // each)} or fewer"
        )


def stages_here(layout: Layout, share: Share) -> dict[int, int]:
    """Ranks of each pipeline stage among those that this host starts."""
    each = layout.grid.world_size // layout.grid.pipeline  # ranks of a stage follow each other (core/grid.py)
    first, stop = share.first_rank, share.first_rank + share.ranks
    found = {}
    for stage in range(first // each, -(-stop // each)):
        found[stage] = min(stop, (stage + 1) * each) - max(first, stage * each)
    return found


def checkpoint_bytes(config: Config) -> int:
    """A checkpoint: master weights and the optimizer's state."""
    return max(4, BYTES[config.train.precision]) * checkpoint_elements(config.optimizer.name, config.model)


def own_bytes(share: Share) -> int:
    """What the processes that are to start on this host take whatever they train."""
    if share.running:
        return 0
    if share.gpus:
        return share.ranks * GPU_TRAINER + share.nodes * (AGENT + FORK_SERVER)
    if share.nodes:
        return share.ranks * FORKED + share.nodes * (AGENT + FORK_SERVER)
    return share.ranks * TRAINER


def _memory_faults(
    config: Config, layout: Layout, share: Share, capacity: Capacity, stages: dict[int, int]
) -> list[str]:
    memory, schedule = {}, layout.schedule()
    most = capacity.gpu_memory - GPU_CONTEXT if share.gpus and capacity.gpu_memory is not None else None
    for stage in stages:
        memory[stage], _ = rank_memory(config, layout.grid, schedule, stage, most, share.gpus > 0)
    faults = []
    fullest = max(memory.values(), key=lambda m: m.total)
    sizes = f"model.layers={config.model.layers} x model.hidden={config.model.hidden}, {config.train.precision}"
    if share.gpus and capacity.gpu_memory is not None and fullest.total + GPU_CONTEXT > capacity.gpu_memory:
        faults.append(
            f"the fullest rank needs {_size(fullest.total + GPU_CONTEXT)} of GPU memory ({_kinds(fullest)}; {sizes}) "
            f"and the GPU has {_size(capacity.gpu_memory)}; {_remedies(config, fullest.graph_buffers > 0)}"
        )
    host = own_bytes(share)
    tensors = 0 if share.gpus else sum(memory[stage].total * ranks for stage, ranks in stages.items())
    copies = _staged(config, share)
    if capacity.memory is not None and host + tensors + copies > capacity.memory:
        parts = []
        if host:
            parts.append(f"{_size(host)} for the processes of {_ranks(share)}")
        if tensors:
            parts.append(f"{_size(tensors)} for tensors of {_ranks(share)} (the fullest: {_kinds(fullest)}; {sizes})")
        if copies:
            parts.append(f"{_size(copies)} for copies of the state (checkpoint.background)")
        text = ", ".join(parts)
        remedy = _remedies(config) if max(tensors, host) == tensors else ""
        if copies > max(tensors, host):
            remedy = "set checkpoint.background=false or fewer checkpoint.slots, or use a host with more memory"
        faults.append(
            f"this host's memory does not suffice: {text}, {_size(host + tensors + copies)} in all, and "
            f"{capacity.memory_from} leaves {_size(capacity.memory)}; {remedy or _fewer(share)}"
        )
    return faults


def _staged(config: Config, share: Share) -> int:
    """Copies of the state that checkpoint services keep in this host's memory: its own, and as many of its peers, two
    at least, where there are peers."""
    settings = config.checkpoint
    if not settings.background or not share.keeps:
        return 0
    slots = settings.slots or (2 if settings.memory_interval else 1)
    if settings.replicas and (share.ranks < share.world or (share.nodes and config.resilience.nodes > 1)):
        slots += max(2, slots)
    return slots * checkpoint_bytes(config) * share.ranks // share.world


def _process_faults(config: Config, share: Share, capacity: Capacity) -> list[str]:
    """Processes, threads and open files; and memory for processes alone, before sizes of tensors are looked at."""
    faults = []
    threads = config.train.threads or max(1, capacity.cores // max(1, share.ranks))
    tasks = 0 if share.running else share.ranks * (THREADS + threads) + 3 * share.nodes
    if capacity.processes is not None and tasks > capacity.processes:
        faults.append(
            f"{_ranks(share)} need {tasks:,} processes and threads and {capacity.processes_from} leaves "
            f"{capacity.processes:,}; {_fewer(share)}, or raise that limit"
        )
    driver = FILES + 2 * share.nodes
    files = max(driver, FILES + share.world)
    if capacity.open_files is not None and files > capacity.open_files:
        who = "the driver" if driver >= files else "a trainer"
        faults.append(
            f"{who} needs {files:,} open files for its connections and may have {capacity.open_files:,}; "
            f"run `ulimit -n {files}` first (the hard limit must allow it), or {_fewer(share)}"
        )
    own = own_bytes(share)
    if capacity.memory is not None and own > capacity.memory and not faults:
        faults.append(
            f"this host's memory does not suffice: {_ranks(share)} need {_size(own)} for their processes alone and "
            f"{capacity.memory_from} leaves {_size(capacity.memory)}; {_fewer(share)}"
        )
    return faults


def _disk_faults(config: Config, disk: Callable[[Path], int]) -> list[str]:
    settings, train = config.checkpoint, config.train
    saves = settings.at_end or 0 < settings.interval <= train.steps
    if not (saves and train.steps) or (settings.location and "://" in settings.location):
        return []
    folder = Path(settings.location) if settings.location else config.run_folder / "checkpoints"
    needed, free = checkpoint_bytes(config), disk(folder)
    if needed <= free:
        return []
    return [
        f"a checkpoint takes {_size(needed)} and {folder} has {_size(free)} of free disk; make room, or give another "
        "folder as checkpoint.location (or train.runs)"
    ]


def _remedies(config: Config, graphs: bool = False) -> str:
    """What makes a rank's tensors smaller, by what is not yet so."""
    words = []
    if graphs:
        words.append("--kernels.graphs=auto")
    if config.train.micro_batch > 1:
        words.append("--train.micro_batch=1")
    if config.parallel.recompute != "full":
        words.append("--parallel.recompute=full")
    tried = f"{' and '.join(words)} need less, else " if words else ""
    return f"{tried}use more or larger devices or a smaller model (`megascale plan` shows what a layout needs)"


def _fewer(share: Share) -> str:
    if share.nodes:
        return "lower --nodes (resilience.nodes) or --spares"
    return "lower parallel.data, parallel.tensor or parallel.pipeline"


def _ranks(share: Share) -> str:
    ranks = f"{share.ranks} rank{'s' * (share.ranks != 1)}"
    return f"{ranks} on {share.nodes} nodes (spares included)" if share.nodes else ranks


def _kinds(memory: MemoryEstimate) -> str:
    """The largest kinds of memory in words."""
    largest = sorted(memory.kinds().items(), key=lambda kind: -kind[1])[:3]
    return ", ".join(f"{name.replace('_', ' ')} {_size(count)}" for name, count in largest if count)


def _size(count: int) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / MIB:,.0f} MiB"
