"""Low-rank adapters as logical tensors: adapted matrices, shapes and cuts of factors, unsupported settings. No torch.

The adapter of a matrix W [O, I] has two factors, A [rank, I] and B [O, rank]: the layer computes
W x + alpha / rank * B A x. If tensor-parallel ranks divide the rows of W, they divide the rows of B and replicate A. If
they divide the columns of W, they divide the columns of A and replicate B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from megascale.config import Config, ModelConfig, TrainConfig
from megascale.config.parts import OPTIMIZERS
from megascale.core.inventory import layer_inventory, resolve_layers
from megascale.core.inventory_records import LogicalTensor
from megascale.core.layers import ChunkLayers

_SUFFIX = ".weight"  # of the name of a matrix
LORA_A, LORA_B = ".lora_a", ".lora_b"  # suffixes that replace it in the names of the two factors


@dataclass(frozen=True)
class AdapterSpec:
    """Settings of the adapters of a run.

    Attributes:
        rank: width between the two factors.
        alpha: scale of the adapters, see `scale`.
        targets: names within a layer of the matrices with adapters; empty: all matrices.
    """

    rank: int
    alpha: float
    targets: frozenset[str]

    @classmethod
    def from_config(cls, train: TrainConfig) -> AdapterSpec | None:
        """Return the adapters of a run, or None if the run trains the whole model."""
        if train.lora is None:
            return None
        return cls(train.lora.rank, train.lora.alpha, frozenset(train.lora.targets))

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return self.alpha / self.rank

    def is_target(self, tensor: LogicalTensor) -> bool:
        return can_adapt(tensor) and (not self.targets or name_within_layer(tensor) in self.targets)

    def make_pair(self, matrix: LogicalTensor) -> tuple[LogicalTensor, LogicalTensor]:
        """Return the factors A [rank, I] and B [O, rank] of a matrix [O, I].

        A starts with the variance of PEFT's default (Kaiming uniform with a = sqrt(5), whose variance is 1 / (3 I)). B
        starts with zeros, so that training starts from the model as it is.
        """
        rows, columns = matrix.shape
        name = matrix.name.removesuffix(_SUFFIX)
        a = LogicalTensor(
            name + LORA_A,
            (self.rank, columns),
            partition_dim=1 if matrix.partition_dim == 1 else None,
            init_std=(3 * columns) ** -0.5,
        )
        b = LogicalTensor(name + LORA_B, (rows, self.rank), partition_dim=0 if matrix.partition_dim == 0 else None)
        return a, b


def can_adapt(tensor: LogicalTensor) -> bool:
    """Return whether a tensor is a matrix that tensor-parallel ranks divide and ranks of other axes do not."""
    return (
        tensor.is_gemm_weight and len(tensor.shape) == 2 and tensor.partition_dim is not None and not tensor.other_cuts
    )


def name_within_layer(tensor: LogicalTensor) -> str:
    """Return the name of a layer's matrix without layer and suffix, such as `attention.query`."""
    _, _, name = tensor.name.split(".", 2)  # layers.INDEX.NAME
    return name.removesuffix(_SUFFIX)


def is_adapter(name: str) -> bool:
    """Return whether a logical tensor is a factor of an adapter."""
    return name.endswith((LORA_A, LORA_B))


class AdaptedMatrix(NamedTuple):
    """A matrix, and the factors A and B of its adapter."""

    matrix: LogicalTensor
    a: LogicalTensor
    b: LogicalTensor


@lru_cache(maxsize=64)
def list_adapters(model: ModelConfig, spec: AdapterSpec) -> tuple[AdaptedMatrix, ...]:
    """Return all matrices that have an adapter, in model order."""
    adapters: list[AdaptedMatrix] = []
    for index, layer in enumerate(resolve_layers(model)):
        for tensor in layer_inventory(layer, index):
            if spec.is_target(tensor):
                adapters.append(AdaptedMatrix(tensor, *spec.make_pair(tensor)))
    return tuple(adapters)


def count_adapter_elements(model: ModelConfig, spec: AdapterSpec, layers: ChunkLayers, tensor: int = 1) -> int:
    """Return the number of elements of a chunk's adapters on one tensor-parallel rank."""
    return sum(prod(factor.local_shape(tensor)) for factor in _list_chunk_factors(model, spec, layers))


def count_adapter_state(
    model: ModelConfig, spec: AdapterSpec, layers: ChunkLayers, optimizer: str, tensor: int = 1
) -> int:
    """Return the number of elements of optimizer state of a chunk's adapters on one tensor-parallel rank.

    Master weights are not counted. The number is that before data-parallel ranks shard the state.

    Args:
        optimizer: name of the optimizer.
    """
    list_state_names = OPTIMIZERS[optimizer].state_names
    total = 0
    for factor in _list_chunk_factors(model, spec, layers):
        total += prod(factor.local_shape(tensor)) * len(list_state_names(factor.name, factor.shape))
    return total


def _list_chunk_factors(model: ModelConfig, spec: AdapterSpec, layers: ChunkLayers) -> list[LogicalTensor]:
    """Return the factors A and B of all adapters in a chunk."""
    factors: list[LogicalTensor] = []
    layer_specs = resolve_layers(model)
    for index, half in layers:
        attention, mlp = layer_inventory(layer_specs[index], index).halves
        tensors_by_half = {"attention": attention, "mlp": mlp, "both": attention + mlp}
        for matrix in tensors_by_half[half]:
            if spec.is_target(matrix):
                factors += spec.make_pair(matrix)
    return factors


def list_adapter_faults(config: Config, layers: Sequence[ChunkLayers] | None) -> list[str]:
    """Return why a configuration cannot train its adapters, one sentence per fault; empty without adapters.

    Args:
        layers: layers of each model chunk; None if the configuration has no valid split.
    """
    spec = AdapterSpec.from_config(config.train)
    if spec is None:
        return []
    faults = []
    available = _list_adaptable(config.model)
    unknown = sorted(spec.targets - set(available))
    if unknown:
        faults.append(
            f"train.lora.targets has {', '.join(unknown)}, which no layer of this model has as a matrix; choose among "
            f"{', '.join(available)}"
        )
    if config.parallel.recompute not in ("none", "full"):
        faults.append(
            f"parallel.recompute={config.parallel.recompute} does not keep the inputs that train.lora reads; set "
            "--parallel.recompute=none or full"
        )
    if config.parallel.zero == 3:
        faults.append(
            "parallel.zero=3 shards trained matrices, and train.lora leaves the model whole on every rank; set "
            "--parallel.zero=2, and --parallel.tensor or --parallel.pipeline to divide the model"
        )
    if config.kernels.graphs == "on":
        faults.append("kernels.graphs=on does not capture train.lora; set --kernels.graphs=auto or off")
    if config.parallel.gather_precision == "float8":
        faults.append(
            "parallel.gather_precision=float8 gathers trained matrices, and train.lora trains none; set "
            "--parallel.gather_precision=default"
        )
    if not unknown and layers is not None:
        for position, chunk_layers in enumerate(layers):
            if not _list_chunk_factors(config.model, spec, chunk_layers):
                faults.append(
                    f"model chunk {position} has no matrix of train.lora.targets={','.join(sorted(spec.targets))}, so "
                    "nothing in it would be trained; name more targets, or set another parallel.layer_split"
                )
    return faults


def _list_adaptable(model: ModelConfig) -> list[str]:
    """Return the names within a layer of all matrices of the model that can have an adapter, each once."""
    names: dict[str, None] = {}
    for index, layer in enumerate(resolve_layers(model)):
        for tensor in layer_inventory(layer, index):
            if can_adapt(tensor):
                names[name_within_layer(tensor)] = None
    return list(names)
