"""Check before a start that this host has the memory, disk space, processes and open files for the run. No torch.

The needs are lower estimates: the tensors that core/memory.py counts, and the minimum memory of each process. Without
the check, the kernel or the allocator would end the run. `train.fit=force` starts it nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale.config import CheckpointConfig, Config
from megascale.core.capacity import Capacity, free_disk
from megascale.core.host_memory import (
    HostMemory,
    checkpoint_bytes,
    count_replica_slots,
    count_slots,
    estimate_host_memory,
)
from megascale.core.layout import Layout
from megascale.core.memory import MemoryEstimate
from megascale.core.parameter_counts import ceil_divide
from megascale.core.rank_memory import GPU_CONTEXT, estimate_rank_memory
from megascale.core.terminal import print_error
from megascale.errors import FitError

MIB = 2**20
GIB = 2**30
# Minimum memory of each process (private memory after its imports: Python 3.12, torch 2.11, Linux).
TRAINER_BYTES = 150 * MIB
GPU_TRAINER_BYTES = 500 * MIB  # with the host side of CUDA and NCCL
FORKED_TRAINER_BYTES = 40 * MIB  # shares the imported modules with its fork server
FORK_SERVER_BYTES = 150 * MIB
AGENT_BYTES = 20 * MIB
TRAINER_OPEN_FILES = 64
TRAINER_EXTRA_THREADS = 8  # threads of a trainer that do not compute
MAX_TRAINERS_PER_CORE = 8  # above it a line warns that steps will be slow
FORCE_OPTION = "--train.fit=force"
# Environment variable that is set for processes whose parent has made this check.
CHECKED_VARIABLE = "MEGASCALE_PREFLIGHT"
# Environment variable with a file descriptor. A process writes to it after its imports, so that the parent can start
# processes in waves.
IMPORTED_PIPE_VARIABLE = "MEGASCALE_IMPORTED_PIPE"


def max_concurrent_imports(cores: int) -> int:
    """Return how many processes may import at the same time: at least 8 (one per GPU of a host), or twice the cores."""
    return max(8, 2 * cores)


@dataclass(frozen=True)
class HostShare:
    """Part of a run that this host starts.

    Attributes:
        world: number of ranks of the run on all hosts.
        first_rank, ranks: first rank and number of ranks on this host.
        nodes: number of agents with one fork server each (`megascale launch`), spares included; 0: only trainers.
        uses_gpus: whether ranks train on GPUs.
        has_model: whether ranks train the model of the configuration; False (evaluation, a benchmark of operators): the
            memory for training is not checked.
        writes_checkpoints: whether checkpoints are written.
        is_running: whether the processes exist already (started by torchrun), so that only their tensors count.
        reused_bytes: bytes of copies of the state that a checkpoint service of the run already has.
    """

    world: int
    first_rank: int
    ranks: int
    nodes: int = 0
    uses_gpus: bool = False
    has_model: bool = True
    writes_checkpoints: bool = True
    is_running: bool = False
    reused_bytes: int = 0


def check_host(
    layout: Layout,
    share: HostShare,
    capacity: Capacity | None = None,
    measure_free_disk: Callable[[Path], int] = free_disk,
    report: Callable[[str], None] = print_error,
) -> None:
    """Check this host's share of the run that `layout` describes before any of its processes starts.

    Args:
        capacity: free resources; default: measured.
        measure_free_disk: returns the free bytes at a folder.
        report: receives warnings.

    Raises FitError, one line per fault with its figures, key and remedy. With train.fit=force the faults are reported.
    """
    config = layout.config
    if capacity is None:
        capacity = Capacity.measure(gpus=share.uses_gpus)
    faults = _process_faults(config, share, capacity)
    if not faults and share.has_model:  # if the processes do not fit, the sizes of their tensors do not matter
        stage_ranks = count_local_stage_ranks(layout, share)
        faults += _memory_faults(config, layout, share, capacity, stage_ranks)
    if share.writes_checkpoints:
        faults += _disk_faults(config, measure_free_disk)
    _refuse(config, faults, report)
    if not share.uses_gpus and share.ranks > MAX_TRAINERS_PER_CORE * capacity.cores:
        report(f"{share.ranks} ranks share {capacity.cores} cores: starting will take long and steps will be slow")


def check_host_memory(
    layout: Layout,
    share: HostShare,
    capacity: Capacity,
    *,
    snapshot_growth: float = 1.0,
    report: Callable[[str], None] = print_error,
) -> None:
    """Check the host memory of a launched job's node, whose driver runs on another machine.

    Args:
        capacity: memory of the host, used or free.
        snapshot_growth: size of snapshots after the loss of as many replicas as are allowed, relative to the size now.
            A warning says if the host has too little memory for them.
        report: receives warnings.

    Raises FitError as `check_host`.
    """
    config = layout.config
    if capacity.memory is None:
        return
    needs = _host_needs(layout, share, count_local_stage_ranks(layout, share))
    if needs.total > capacity.memory:
        _refuse(config, [_describe_lack(config, share, capacity, needs)], report)
        return
    grown_bytes = needs.total + int((snapshot_growth - 1) * needs.memory.copies)
    if grown_bytes > capacity.memory:
        alternatives = ["resilience.continue_replicas=false"]
        if config.resilience.max_missing_replicas > 1:
            alternatives.insert(0, "a smaller resilience.max_missing_replicas")
        if count_slots(config.checkpoint) > 1:
            alternatives.insert(0, "checkpoint.slots=1")
        report(
            f"resilience.max_missing_replicas={config.resilience.max_missing_replicas}: with as many replicas missing, "
            f"copies of the state grow and {_describe_ranks(share)} need {_format_size(grown_bytes)} of this host's "
            f"memory, of which {capacity.memory_from} leaves {_format_size(capacity.memory)}. Snapshots would then "
            f"fail; set {' or '.join(alternatives)}"
        )


def check_processes(option: str, count: int, process_bytes: int, capacity: Capacity | None = None) -> None:
    """Check that `count` processes of at least `process_bytes` bytes fit. Raises FitError that names `option`."""
    if capacity is None:
        capacity = Capacity.measure()
    if capacity.processes is not None and count > capacity.processes:
        raise FitError(
            f"{option}={count} processes are more than the {capacity.processes:,} that {capacity.processes_from} "
            "leaves; ask for fewer"
        )
    if capacity.memory is not None and count * process_bytes > capacity.memory:
        raise FitError(
            f"{option}={count} processes need {_format_size(count * process_bytes)} at least and "
            f"{capacity.memory_from} leaves {_format_size(capacity.memory)}; ask for "
            f"{max(1, capacity.memory // process_bytes)} or fewer"
        )


def count_local_stage_ranks(layout: Layout, share: HostShare) -> dict[int, int]:
    """Return the number of this host's ranks by pipeline stage."""
    stage_size = layout.grid.world_size // layout.grid.pipeline  # ranks of a stage are contiguous (core/grid.py)
    first = share.first_rank
    stop = first + share.ranks
    counts = {}
    for stage in range(first // stage_size, ceil_divide(stop, stage_size)):
        stage_start, stage_stop = stage * stage_size, (stage + 1) * stage_size
        counts[stage] = min(stop, stage_stop) - max(first, stage_start)
    return counts


def _count_trainers(share: HostShare, has_standby: bool) -> int:
    """Return the number of trainers that this host starts; in a launched job each rank may have a standby process."""
    if has_standby and share.nodes:
        return 2 * share.ranks
    return share.ranks


def _process_bytes(share: HostShare, has_standby: bool = False) -> int:
    """Return the memory of the processes that this host starts, without their tensors.

    Args:
        has_standby: whether each rank of a launched job has a second process.
    """
    if share.is_running:
        return 0
    node_bytes = share.nodes * (AGENT_BYTES + FORK_SERVER_BYTES)
    process_count = _count_trainers(share, has_standby)
    if share.uses_gpus:
        return process_count * GPU_TRAINER_BYTES + node_bytes
    if share.nodes:
        return process_count * FORKED_TRAINER_BYTES + node_bytes
    return share.ranks * TRAINER_BYTES


def _memory_faults(
    config: Config, layout: Layout, share: HostShare, capacity: Capacity, stage_ranks: dict[int, int]
) -> list[str]:
    """Return the faults of GPU memory and of host memory.

    Args:
        stage_ranks: number of this host's ranks by pipeline stage.
    """
    schedule = layout.schedule()
    gpu_memory = None
    tensor_limit = None
    context_bytes = GPU_CONTEXT
    has_standby = config.resilience.standby_processes and share.nodes > 0
    if has_standby:
        context_bytes *= 2  # each rank's standby process has a context of its own
    if share.uses_gpus and capacity.gpu_memory is not None:
        gpu_memory = capacity.gpu_memory
        tensor_limit = gpu_memory - context_bytes
    estimates = {}
    for stage in stage_ranks:
        estimates[stage], _ = estimate_rank_memory(config, layout.grid, schedule, stage, tensor_limit, share.uses_gpus)
    faults = []
    fullest = max(estimates.values(), key=lambda estimate: estimate.total)
    sizes = f"model.layers={config.model.layers} x model.hidden={config.model.hidden}, {config.train.precision}"
    if gpu_memory is not None and fullest.total + context_bytes > gpu_memory:
        faults.append(
            f"the fullest rank needs {_format_size(fullest.total + context_bytes)} of GPU memory "
            f"({_describe_kinds(fullest)}; {sizes}) and the GPU has {_format_size(gpu_memory)}; "
            f"{_suggest_smaller_tensors(config, has_graphs=fullest.graph_buffers > 0, has_standby=has_standby)}"
        )
    needs = _host_needs(layout, share, stage_ranks, estimates)
    if capacity.memory is not None and needs.total > capacity.memory:
        faults.append(_describe_lack(config, share, capacity, needs))
    return faults


def _refuse(config: Config, faults: Sequence[str], report: Callable[[str], None]) -> None:
    """Raise FitError with the faults, if any. With train.fit=force report them instead."""
    if faults and config.train.fit == "check":
        hint = f"This is an estimate: {FORCE_OPTION} starts nevertheless"
        raise FitError("\n".join(f"{fault}. {hint}" for fault in faults))
    for fault in faults:
        report(f"train.fit=force: starting although {fault}")


def _host_needs(
    layout: Layout,
    share: HostShare,
    stage_ranks: dict[int, int],
    estimates: Mapping[int, MemoryEstimate] | None = None,
) -> _HostNeeds:
    """Return what this host's ranks need of its memory.

    Args:
        stage_ranks: number of this host's ranks by pipeline stage.
        estimates: memory of tensors by stage; default: computed for ranks on the CPU.
    """
    config = layout.config
    tensor_bytes = 0
    fullest = None
    if not share.uses_gpus:
        if estimates is None:
            estimates = {stage: _estimate_cpu_memory(layout, stage) for stage in stage_ranks}
        tensor_bytes = sum(estimates[stage].total * ranks for stage, ranks in stage_ranks.items())
        fullest = max(estimates.values(), key=lambda estimate: estimate.total)
    # All nodes of a job with agents on this machine keep their copies here.
    keeps_peers = share.ranks == share.world
    memory = estimate_host_memory(
        layout,
        stage_ranks,
        uses_gpus=share.uses_gpus,
        saves=share.writes_checkpoints,
        has_peers=not keeps_peers or (share.nodes > 0 and config.resilience.nodes > 1),
        keeps_peers=keeps_peers,
    )
    return _HostNeeds(
        process_bytes=_process_bytes(share, has_standby=config.resilience.standby_processes),
        tensor_bytes=tensor_bytes,
        memory=memory,
        reused_bytes=share.reused_bytes,
        fullest=fullest,
    )


def _estimate_cpu_memory(layout: Layout, stage: int) -> MemoryEstimate:
    """Return the peak memory of a rank of a stage that trains on the CPU."""
    estimate, _ = estimate_rank_memory(layout.config, layout.grid, layout.schedule(), stage, has_gpu=False)
    return estimate


def _describe_lack(config: Config, share: HostShare, capacity: Capacity, needs: _HostNeeds) -> str:
    """Return the fault of a host with too little memory."""
    assert capacity.memory is not None, "memory is compared"
    ranks = _describe_ranks(share)
    sizes = f"model.layers={config.model.layers} x model.hidden={config.model.hidden}, {config.train.precision}"
    tensors = f"tensors of {ranks}"
    if needs.fullest is not None:
        tensors += f" (the fullest: {_describe_kinds(needs.fullest)}; {sizes})"
    return (
        f"this host has too little memory: {needs.describe(config.checkpoint, ranks, tensors)}, "
        f"{_format_size(needs.total)} in total, and {capacity.memory_from} leaves {_format_size(capacity.memory)}; "
        f"{needs.suggest_remedy(config, share)}"
    )


@dataclass(frozen=True)
class _HostNeeds:
    """Bytes of this host's memory that its share of the run needs.

    Attributes:
        process_bytes: for the processes themselves.
        tensor_bytes: for tensors of ranks that train on the CPU.
        memory: for copies of the state, offloaded state and inputs of layers.
        reused_bytes: bytes of copies that a checkpoint service of the run already has.
        fullest: tensors of the rank with most of them; None for ranks that train on GPUs.
    """

    process_bytes: int
    tensor_bytes: int
    memory: HostMemory
    reused_bytes: int = 0
    fullest: MemoryEstimate | None = None

    @property
    def total(self) -> int:
        """Bytes that the host must still have free."""
        reused_bytes = min(self.reused_bytes, self.memory.copies)
        return self.process_bytes + self.tensor_bytes + self.memory.total - reused_bytes

    def describe(self, settings: CheckpointConfig, ranks: str, tensors: str) -> str:
        """Return the needs with their sizes.

        Args:
            settings: section `checkpoint` of the configuration.
            ranks: phrase for the ranks of this host.
            tensors: phrase for their tensors.
        """
        snapshot_keys = f"checkpoint.background=true, checkpoint.slots={count_slots(settings)}"
        replica_keys = f"checkpoint.replicas=true, {count_replica_slots(settings)} per rank"
        phrases = []
        for byte_count, purpose in (
            (self.process_bytes, f"the processes of {ranks}"),
            (self.tensor_bytes, tensors),
            (self.memory.snapshots, f"snapshots ({snapshot_keys})"),
            (self.memory.replicas, f"copies of other hosts' snapshots ({replica_keys})"),
            (self.memory.optimizer_state, "the optimizer's state (optimizer.offload=true)"),
            (self.memory.inputs, "inputs of layers (parallel.offload_activations=true)"),
        ):
            if byte_count:
                phrases.append(f"{_format_size(byte_count)} for {purpose}")
        return ", ".join(phrases)

    def suggest_remedy(self, config: Config, share: HostShare) -> str:
        """Return the remedy for the largest need."""
        memory = self.memory
        largest = max(self.process_bytes, self.tensor_bytes, memory.copies, memory.optimizer_state, memory.inputs)
        if largest == self.process_bytes:
            return _suggest_fewer_processes(config, share)
        if largest == self.tensor_bytes:
            return _suggest_smaller_tensors(config)
        if largest == memory.copies:
            return f"set {_list_smaller_copies(config)}, fewer ranks per host, or a host with more memory"
        if largest == memory.optimizer_state:
            return "set optimizer.offload=false, fewer ranks per host, or a host with more memory"
        return "set parallel.offload_activations=false, or use a host with more memory"


def _list_smaller_copies(config: Config) -> str:
    """Return the settings that need fewer copies of the state, as alternatives."""
    settings = config.checkpoint
    alternatives = []
    if count_slots(settings) > 1:
        alternatives.append("checkpoint.slots=1")
    if settings.replicas and config.resilience.continue_replicas:  # it needs the copies of other hosts' snapshots
        alternatives.append("resilience.continue_replicas=false and checkpoint.replicas=false")
    elif settings.replicas:
        alternatives.append("checkpoint.replicas=false")
    if not settings.memory_interval and not settings.replicas:
        alternatives.append("checkpoint.background=false")
    if not alternatives:  # one slot of copies in memory, which need the checkpoint service
        alternatives.append("checkpoint.memory_interval=0 and checkpoint.background=false")
    return " or ".join(alternatives)


def _process_faults(config: Config, share: HostShare, capacity: Capacity) -> list[str]:
    """Return the faults of processes, threads, open files, and of the memory of processes without tensors."""
    faults = []
    compute_threads = config.train.threads or max(1, capacity.cores // max(1, share.ranks))
    task_count = 0  # processes and threads
    if not share.is_running:
        trainer_count = _count_trainers(share, config.resilience.standby_processes)
        # A node has an agent, a fork server and a thread of the driver.
        task_count = trainer_count * (TRAINER_EXTRA_THREADS + compute_threads) + 3 * share.nodes
    if capacity.processes is not None and task_count > capacity.processes:
        faults.append(
            f"{_describe_ranks(share)} need {task_count:,} processes and threads and {capacity.processes_from} leaves "
            f"{capacity.processes:,}; {_suggest_fewer_processes(config, share)}, or raise that limit"
        )
    # The driver has connections to all nodes, and a trainer to all other ranks.
    driver_files = TRAINER_OPEN_FILES + 2 * share.nodes
    trainer_files = TRAINER_OPEN_FILES + share.world
    file_count = max(driver_files, trainer_files)
    if capacity.open_files is not None and file_count > capacity.open_files:
        if driver_files >= trainer_files:
            process = "the driver"
        else:
            process = "a trainer"
        faults.append(
            f"{process} needs {file_count:,} open files for its connections and may have {capacity.open_files:,}; "
            f"run `ulimit -n {file_count}` first (the hard limit must allow it), or {_suggest_fewer_ranks(share)}"
        )
    process_bytes = _process_bytes(share, has_standby=config.resilience.standby_processes)
    if capacity.memory is not None and process_bytes > capacity.memory and not faults:
        faults.append(
            f"this host has too little memory: {_describe_ranks(share)} need {_format_size(process_bytes)} for their "
            f"processes alone and {capacity.memory_from} leaves {_format_size(capacity.memory)}; "
            f"{_suggest_fewer_processes(config, share)}"
        )
    return faults


def _disk_faults(config: Config, measure_free_disk: Callable[[Path], int]) -> list[str]:
    """Return the fault of a checkpoint that does not fit on the disk of a local folder."""
    settings = config.checkpoint
    steps = config.train.steps
    writes_checkpoint = steps and (settings.at_end or 0 < settings.interval <= steps)
    is_remote = settings.location and "://" in settings.location
    if not writes_checkpoint or is_remote:
        return []
    if settings.location:
        folder = Path(settings.location)
    else:
        folder = config.run_folder / "checkpoints"
    needed_bytes = checkpoint_bytes(config)
    free_bytes = measure_free_disk(folder)
    if needed_bytes <= free_bytes:
        return []
    return [
        f"a checkpoint takes {_format_size(needed_bytes)} and {folder} has {_format_size(free_bytes)} of free disk; "
        "free some space, or set another folder as checkpoint.location (or train.runs)"
    ]


def _suggest_smaller_tensors(config: Config, has_graphs: bool = False, has_standby: bool = False) -> str:
    """Return advice: the settings that make a rank's tensors smaller and are not in use yet.

    Args:
        has_standby: whether standby processes take a part of the memory.
    """
    options = []
    if has_standby:
        options.append("--resilience.standby_processes=false")
    if config.rendezvous.prepared_groups:
        options.append("--rendezvous.prepared_groups=false")
    if has_graphs:
        options.append("--kernels.graphs=auto")
    if config.train.micro_batch > 1:
        options.append("--train.micro_batch=1")
    if config.parallel.recompute != "full":
        options.append("--parallel.recompute=full")
    advice = ""
    if options:
        advice = f"{' and '.join(options)} need less, else "
    return f"{advice}use more or larger devices or a smaller model (`megascale plan` shows what a layout needs)"


def _suggest_fewer_ranks(share: HostShare) -> str:
    if share.nodes:
        return "lower --nodes (resilience.nodes) or --spares"
    return "lower parallel.data, parallel.tensor or parallel.pipeline"


def _suggest_fewer_processes(config: Config, share: HostShare) -> str:
    """Return advice for processes that need too much memory."""
    advice = _suggest_fewer_ranks(share)
    if config.resilience.standby_processes and share.nodes:
        return f"set --resilience.standby_processes=false, or {advice}"
    return advice


def _describe_ranks(share: HostShare) -> str:
    ranks = "1 rank" if share.ranks == 1 else f"{share.ranks} ranks"
    if share.nodes:
        return f"{ranks} on {share.nodes} nodes (spares included)"
    return ranks


def _describe_kinds(memory: MemoryEstimate) -> str:
    """Return the three largest kinds of memory with their sizes."""
    largest = sorted(memory.bytes_by_kind().items(), key=lambda item: item[1], reverse=True)[:3]
    return ", ".join(f"{name.replace('_', ' ')} {_format_size(size)}" for name, size in largest if size)


def _format_size(byte_count: int) -> str:
    if byte_count >= GIB:
        return f"{byte_count / GIB:,.1f} GiB"
    if byte_count >= MIB or not byte_count:
        return f"{byte_count / MIB:,.0f} MiB"
    return f"{byte_count / 1024:,.1f} KiB"
