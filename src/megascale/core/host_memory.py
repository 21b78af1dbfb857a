"""Host memory of a rank: snapshots, copies of other hosts' snapshots, and state that the GPU does not hold. No torch.

Preflight compares it with the memory of the host, and `megascale plan` prints it. The sizes are lower estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megascale.config import CheckpointConfig, Config
from megascale.core.adapters import AdapterSpec, count_adapter_elements, count_adapter_state
from megascale.core.layers import ChunkLayers
from megascale.core.layout import Layout
from megascale.core.memory import count_offloaded_state_bytes, estimate_offloaded_input_bytes
from megascale.core.parameter_counts import count_checkpoint_elements, count_stage_parameters, count_stage_state
from megascale.core.tensors import DTYPE_BYTES


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory that ranks need besides their processes.

    Attributes:
        snapshots: copies of their own state (checkpoint.slots).
        replicas: copies of other hosts' state (checkpoint.replicas).
        optimizer_state: state with optimizer.offload.
        inputs: inputs of layers with parallel.offload_activations.
    """

    snapshots: int = 0
    replicas: int = 0
    optimizer_state: int = 0
    inputs: int = 0

    @property
    def copies(self) -> int:
        """Bytes of all copies in checkpoint services."""
        return self.snapshots + self.replicas

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.copies + self.optimizer_state + self.inputs


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of a checkpoint: master weights and the optimizer's state."""
    itemsize = max(4, DTYPE_BYTES[config.train.precision])
    adapters = AdapterSpec.from_config(config.train)
    if adapters is not None:
        layers = ChunkLayers.from_range(range(config.model.layers))
        elements = count_adapter_elements(config.model, adapters, layers)
        return itemsize * (elements + count_adapter_state(config.model, adapters, layers, config.optimizer.name))
    return itemsize * count_checkpoint_elements(config.optimizer.name, config.model)


def count_slots(settings: CheckpointConfig) -> int:
    """Return the number of snapshots of a rank that its host's memory holds."""
    return settings.slots or (2 if settings.memory_interval else 1)


def count_replica_slots(settings: CheckpointConfig) -> int:
    """Return the number of another rank's snapshots that a host's memory holds (checkpoint.replicas)."""
    return max(2, count_slots(settings))


def count_other_snapshots(settings: CheckpointConfig, local_ranks: int, *, has_peer: bool) -> int:
    """Return the number of snapshots that a host's memory holds besides those of one of its ranks.

    Args:
        local_ranks: number of ranks of the host.
        has_peer: whether the host also holds copies of another host's snapshots (checkpoint.replicas).
    """
    count = (local_ranks - 1) * count_slots(settings)
    if has_peer:
        count += local_ranks * count_replica_slots(settings)
    return count


def estimate_snapshot_bytes(layout: Layout, stage: int) -> int:
    """Return the bytes of one snapshot of a rank of a pipeline stage."""
    config = layout.config
    grid = layout.grid
    total = checkpoint_bytes(config)
    if grid.pipeline == 1 or config.train.lora is not None:
        return total // grid.world_size
    elements = []
    for index in range(grid.pipeline):
        state = count_stage_state(config.model, config.parallel, index, config.optimizer.name)
        elements.append(count_stage_parameters(config.model, config.parallel, index) + state)
    # Parameters that several tensor ranks hold are in the checkpoint once, so only the stage's share is used.
    return total * elements[stage] // (sum(elements) * (grid.world_size // grid.pipeline))


def estimate_host_memory(
    layout: Layout,
    stage_ranks: Mapping[int, int],
    *,
    uses_gpus: bool,
    saves: bool = True,
    has_peers: bool = True,
    keeps_peers: bool = False,
) -> HostMemory:
    """Estimate the host memory that some ranks need besides their processes and their tensors on the CPU.

    Args:
        stage_ranks: number of the ranks by pipeline stage.
        uses_gpus: whether ranks train on GPUs. Otherwise state and inputs count as their tensors.
        saves: whether checkpoints are written.
        has_peers: whether the run has another host for copies (checkpoint.replicas).
        keeps_peers: whether the copies are those of the same ranks, because the hosts are agents of one machine.
    """
    config = layout.config
    grid = layout.grid
    settings = config.checkpoint
    snapshots = replicas = optimizer_state = inputs = 0
    if saves and settings.background:
        sizes = {stage: estimate_snapshot_bytes(layout, stage) for stage in range(grid.pipeline)}
        snapshot_bytes = sum(sizes[stage] * ranks for stage, ranks in stage_ranks.items())
        snapshots = count_slots(settings) * snapshot_bytes
        if settings.replicas and has_peers:
            # The peer may have any stage, so the smallest one counts.
            peer_bytes = min(sizes.values()) * sum(stage_ranks.values())
            replicas = count_replica_slots(settings) * (snapshot_bytes if keeps_peers else peer_bytes)
    if uses_gpus:
        optimizer_state = sum(ranks * _offloaded_state_bytes(layout, stage) for stage, ranks in stage_ranks.items())
        inputs = sum(ranks * _offloaded_input_bytes(layout, stage) for stage, ranks in stage_ranks.items())
    return HostMemory(snapshots, replicas=replicas, optimizer_state=optimizer_state, inputs=inputs)


def _offloaded_state_bytes(layout: Layout, stage: int) -> int:
    """Return the bytes of a rank's optimizer state in host memory (optimizer.offload)."""
    config = layout.config
    if not config.optimizer.offload or config.train.lora is not None:
        return 0
    shards = layout.grid.shards if config.parallel.zero else 1
    parameters = count_stage_parameters(config.model, config.parallel, stage)
    return count_offloaded_state_bytes(parameters, shards, config.train.precision)


def _offloaded_input_bytes(layout: Layout, stage: int) -> int:
    """Return the bytes of layer inputs that a rank keeps in host memory (parallel.offload_activations)."""
    config = layout.config
    if not config.parallel.offload_activations:
        return 0
    return estimate_offloaded_input_bytes(
        config.model,
        config.parallel,
        schedule=layout.schedule(),
        stage=stage,
        micro_batch=config.train.micro_batch,
        precision=config.train.precision,
    )
