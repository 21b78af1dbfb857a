"""Search over layouts: the fastest for N GPUs, the fewest GPUs for a deadline, and sensitivities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megascale.config import Config, from_tree
from megascale.core.flops import count_parameters
from megascale.core.layout import MAX_FORWARDS
from megascale.core.parameter_counts import count_checkpoint_elements
from megascale.core.tensors import DTYPE_BYTES
from megascale.errors import FitError
from megascale.simulate.calibration import Calibration, Constants
from megascale.simulate.case import Case
from megascale.simulate.closed import compute_step_parts
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.planner.layout_cost import GIB, RESERVE_GIB
from megascale.simulate.software import RECOMPUTE, Software
from megascale.simulate.step import Scenario, StepEstimate, estimate_step

# Layouts that are priced in one pass of array arithmetic; their arrays fit the processor's caches.
BLOCK = 16384
MICRO_BATCHES = (1, 2, 4, 8, 16)
# Columns of a row of `list_layouts`.
LAYOUT = ("tensor", "context", "pipeline", "virtual", "micro_batch_group_size", "data", "micro")
# Shorter sequences are not divided: a micro-batch then has fewer tokens than fill a GPU.
LONG_SEQUENCE = 32_768
# A large micro-batch group must save this share of the step. Its transfers slow compute (7% measured on two GPUs over
# NVLink), which the formulas leave out.
MIN_GROUP_SAVING = 0.1


@dataclass(frozen=True)
class SearchResult:
    """Layouts that divide, with their times, fastest first for each number of GPUs.

    Attributes:
        gpus, tensor, context, pipeline, virtual, micro_batch_group_size, data, micro: arrays [layouts]; `virtual` is
            chunks per stage, `micro` is sequences per micro-batch.
        recompute: [layouts] indices into RECOMPUTE.
        seconds: [layouts] time of a step.
    """

    gpus: np.ndarray
    tensor: np.ndarray
    context: np.ndarray
    pipeline: np.ndarray
    virtual: np.ndarray
    micro_batch_group_size: np.ndarray
    data: np.ndarray
    micro: np.ndarray
    recompute: np.ndarray
    seconds: np.ndarray

    def __len__(self) -> int:
        return len(self.seconds)


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a number in rising order."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def list_layouts(
    config: Config,
    cluster: ClusterSpec,
    low: int,
    high: int,
    recompute: Sequence[str],
    fixed: Mapping[str, int] | None = None,
) -> dict[str, np.ndarray]:
    """Return all layouts of `config` that divide, on `low` to `high` GPUs in whole hosts: arrays by name.

    The layouts are combined with each value in `recompute`. Layouts with several chunks per stage have micro-batch
    groups of the pipeline's length (`micro_batch_group_size` 0) and, if there are replicas, also one group of all
    micro-batches. Long sequences are also divided over context ranks within a host.

    Args:
        fixed: values that columns of LAYOUT must have; default: none.
    """
    fixed = fixed or {}
    micro_batches = [fixed["micro"]] if "micro" in fixed else MICRO_BATCHES
    model = config.model
    batch = config.train.global_batch
    # ZeRO-2 and ZeRO-3 reduce after every micro-batch, so large groups do not help.
    allows_large_groups = config.parallel.zero < 2
    tensor_context_pairs = []
    for t in list_divisors(model.heads):
        if t > cluster.gpus_per_host:
            continue
        contexts = [1]
        if "context" in fixed:
            contexts = [c for c in list_divisors(model.heads // t) if c == fixed["context"]]
        elif model.sequence_length >= LONG_SEQUENCE:
            contexts = [c for c in list_divisors(model.heads // t) if t * c <= cluster.gpus_per_host]
        tensor_context_pairs += [(t, c) for c in contexts]
    rows = []
    for t, c in tensor_context_pairs:
        for p in list_divisors(model.layers):
            for v in list_divisors(model.layers // p):
                for b in micro_batches:
                    if batch % b:
                        continue
                    for d in list_divisors(batch // b):
                        gpus = t * c * p * d
                        microbatches = batch // b // d
                        if p * v * microbatches > MAX_FORWARDS:
                            continue
                        fills_hosts = gpus % cluster.gpus_per_host == 0 or gpus < cluster.gpus_per_host
                        if not (low <= gpus <= high and fills_hosts):
                            continue
                        if v == 1 or p > 1:
                            rows.append((t, c, p, v, 0, d, b))
                        if v > 1 and d > 1 and allows_large_groups and microbatches > p:
                            rows.append((t, c, p, v, microbatches, d, b))
    columns_fixed = [(LAYOUT.index(name), value) for name, value in fixed.items()]
    rows = [row for row in rows if all(row[column] == value for column, value in columns_fixed)]
    if not rows:
        given = "".join(f", {name} {value}" for name, value in fixed.items())
        raise FitError(
            f"no layout of {model.layers} layers, {model.heads} heads and batch {batch}{given} has between {low:,} and "
            f"{high:,} GPUs in whole hosts of {cluster.gpus_per_host}; change --gpus or train.global_batch"
            f"{' or the settings of the layout' if fixed else ''}"
        )
    columns = np.array(rows, dtype=np.int64).T
    recompute_indices = np.array([RECOMPUTE.index(value) for value in recompute])
    arrays = {name: np.tile(column, len(recompute)) for name, column in zip(LAYOUT, columns, strict=True)}
    return arrays | {"recompute": np.repeat(recompute_indices, len(rows))}


def price_layouts(
    make_case: Callable[[slice], Case], count: int, cluster: ClusterSpec, constants: Constants
) -> np.ndarray:
    """Return the seconds of a step for each of `count` layouts. `make_case` returns the case of a range of layouts."""
    seconds = np.empty(count)
    for start in range(0, count, BLOCK):
        block = slice(start, min(count, start + BLOCK))
        seconds[block] = compute_step_parts(cluster, make_case(block), constants).total
    return seconds


def search_layouts(
    config: Config,
    cluster: ClusterSpec,
    calibration: Calibration,
    software: Software,
    low: int,
    high: int,
    recompute: Sequence[str] | None = None,
    fixed: Mapping[str, int] | None = None,
) -> SearchResult:
    """Price every layout that divides in closed form, whether it fits the memory or not.

    Args:
        low, high: range of the number of GPUs.
        recompute: allowed values of parallel.recompute; default: that of the configuration.
        fixed: values that columns of LAYOUT must have; default: none.

    Returns:
        The layouts, sorted by number of GPUs and then by time.

    Raises FitError if no layout divides.
    """
    arrays = list_layouts(config, cluster, low, high, recompute or [config.parallel.recompute], fixed)
    count = len(arrays["tensor"])

    def make_case(block: slice) -> Case:
        columns = {name: array[block] for name, array in arrays.items()}
        recompute_indices = columns.pop("recompute")
        case = Case.from_model(config.model, software, batch=config.train.global_batch, **columns)
        return replace(case, recompute=recompute_indices)

    fits = np.asarray(make_case(slice(0, count)).fits()) & np.ones(count, dtype=bool)
    arrays = {name: array[fits] for name, array in arrays.items()}
    count = int(fits.sum())
    if not count:
        raise FitError("no layout divides the model's widths; give model.vocab_multiple a multiple of parallel.tensor")
    seconds = price_layouts(make_case, count, cluster, calibration.constants)
    # A layout with a large group follows the same layout with groups of the pipeline's length.
    is_kept = (
        (arrays["micro_batch_group_size"] == 0)
        | (arrays["pipeline"] == 1)
        | (seconds < (1 - MIN_GROUP_SAVING) * np.roll(seconds, 1))
    )
    arrays = {name: array[is_kept] for name, array in arrays.items()}
    seconds = seconds[is_kept]
    gpus = arrays["tensor"] * arrays["context"] * arrays["pipeline"] * arrays["data"]
    order = np.lexsort((seconds, gpus))
    columns = {name: array[order] for name, array in arrays.items()}
    return SearchResult(gpus=gpus[order], seconds=seconds[order], **columns)


def set_layout(
    config: Config,
    tensor: int,
    context: int,
    pipeline: int,
    virtual: int,
    micro_batch_group_size: int,
    data: int,
    micro: int,
    recompute: str,
) -> Config:
    """Return the configuration with another layout.

    Args:
        virtual: chunks per stage.
        micro_batch_group_size: micro-batches of a group; 0: as many as there are stages.
        micro: sequences per micro-batch.
    """
    tree = config.model_dump(exclude_none=True)
    layout_values: dict[str, object] = {
        "tensor": tensor,
        "context": context,
        "pipeline": pipeline,
        "virtual_stages": virtual,
        "data": data,
        "recompute": recompute,
    }
    for key in ("layer_split", "micro_batch_group_size"):
        tree["parallel"].pop(key, None)
    if micro_batch_group_size:
        layout_values["micro_batch_group_size"] = micro_batch_group_size
    tree["parallel"] |= layout_values
    tree["train"] = tree["train"] | {"micro_batch": micro}
    tree["model"].pop("preset", None)
    return from_tree(tree)


def set_zero(config: Config, zero: int) -> Config:
    """Return the configuration with another parallel.zero. Raises ConfigError if its other settings exclude it."""
    tree = config.model_dump(exclude_none=True)
    tree["parallel"]["zero"] = zero
    tree["model"].pop("preset", None)
    return from_tree(tree)


def estimate_fitting(
    result: SearchResult,
    indices: Sequence[int] | np.ndarray,
    config: Config,
    scenario: Scenario,
    check_memory: bool = True,
) -> Iterator[StepEstimate]:
    """Yield the estimates of those layouts that fit the memory, at the closed level.

    Args:
        indices: layouts in `result`, in the order of the estimates.
    """
    for index in indices:
        layout_config = set_layout(
            config,
            tensor=int(result.tensor[index]),
            context=int(result.context[index]),
            pipeline=int(result.pipeline[index]),
            virtual=int(result.virtual[index]),
            micro_batch_group_size=int(result.micro_batch_group_size[index]),
            data=int(result.data[index]),
            micro=int(result.micro[index]),
            recompute=RECOMPUTE[int(result.recompute[index])],
        )
        layout_scenario = replace(scenario.with_config(layout_config), gpus=int(result.gpus[index]))
        try:
            yield estimate_step(layout_scenario, check_memory=check_memory)
        except FitError:
            continue


def _may_fit(result: SearchResult, indices: np.ndarray, config: Config, device_gib: float) -> np.ndarray:
    """Return for which layouts a lower bound of the memory fits the GPU: [indices] booleans.

    The bound is weights, gradients and optimizer state, spread evenly. It saves building the schedules of most layouts
    that cannot fit.
    """
    if config.train.lora is not None or config.optimizer.offload:
        return np.ones(len(indices), dtype=bool)
    zero = config.parallel.zero
    shards = result.data[indices] * result.context[indices]
    parameters = count_parameters(config.model)
    itemsize = DTYPE_BYTES[config.train.precision]
    master_itemsize = max(4, itemsize)
    state = count_checkpoint_elements(config.optimizer.name, config.model)
    if itemsize == master_itemsize:
        state -= parameters  # the weights are the master weights
    weight_bytes = itemsize * parameters / (shards if zero == 3 else 1)
    gradient_bytes = master_itemsize * parameters / (shards if zero >= 2 else 1)
    state_bytes = master_itemsize * state / (shards if zero >= 1 else 1)
    model_ranks = result.tensor[indices] * result.pipeline[indices]
    rank_bytes = (weight_bytes + gradient_bytes + state_bytes) / model_ranks
    may_fit: np.ndarray = rank_bytes <= (device_gib - RESERVE_GIB) * GIB
    return may_fit


def find_fastest(
    result: SearchResult, config: Config, scenario: Scenario, gpus: int, count: int = 4, check_memory: bool = True
) -> list[StepEstimate]:
    """Return the `count` fastest layouts on exactly `gpus` GPUs that fit the memory, fastest first.

    Raises FitError if no layout fits.
    """
    indices = np.flatnonzero(result.gpus == gpus)
    divisible_count = len(indices)
    if check_memory:
        indices = indices[_may_fit(result, indices, config, scenario.cluster.gpu.memory_gib)]
    estimates: list[StepEstimate] = []
    layouts_listed = set()
    for estimate in estimate_fitting(result, indices, config, scenario, check_memory):
        parallel = estimate.scenario.config.parallel
        train = estimate.scenario.config.train
        layout = (
            parallel.tensor,
            parallel.context,
            parallel.pipeline,
            parallel.virtual_stages,
            parallel.micro_batch_group_size,
            train.micro_batch,
        )
        # Layouts are in the order of time, so the first one has the fastest value of parallel.recompute that fits.
        if layout in layouts_listed:
            continue
        layouts_listed.add(layout)
        estimates.append(estimate)
        if len(estimates) == count:
            break
    if not estimates:
        remedies = "more GPUs" if config.parallel.zero == 3 else "more GPUs, --parallel.zero=3"
        raise FitError(
            f"none of the {divisible_count} layouts of {gpus:,} GPUs that divide fits "
            f"{scenario.cluster.gpu.memory_gib:g} GiB; use {remedies} or, if --recompute was given, more of its kinds"
        )
    # The order may have changed: the search prices all layouts with one stack, and an estimate with the stack's
    # switches for its layout, such as CUDA graphs.
    return sorted(estimates, key=lambda estimate: estimate.seconds)


def find_fewest_gpus(
    result: SearchResult,
    config: Config,
    scenario: Scenario,
    tokens: float,
    days: float,
    time_share: float | Callable[[np.ndarray], np.ndarray] = 1.0,
    check_memory: bool = True,
) -> StepEstimate:
    """Return the fastest layout on the fewest GPUs that train on `tokens` tokens in `days` days.

    Args:
        effective: share of the time that is spent on steps, or a function from the numbers of GPUs to these shares.

    Raises:
        FitError: the deadline cannot be met; the message names the shortest time.
    """
    tokens_per_step = config.train.global_batch * config.model.sequence_length
    effective_share = time_share(result.gpus) if callable(time_share) else time_share
    needed_days = tokens / tokens_per_step * result.seconds / 86400.0 / effective_share
    is_fast_enough = needed_days <= days
    for gpus in np.unique(result.gpus[is_fast_enough]):
        indices = np.flatnonzero(is_fast_enough & (result.gpus == gpus))
        if check_memory:
            indices = indices[_may_fit(result, indices, config, scenario.cluster.gpu.memory_gib)]
        for estimate in estimate_fitting(result, indices, config, scenario, check_memory):
            return estimate
    raise FitError(
        f"{tokens:.3g} tokens in {days:g} days cannot be done with train.global_batch={config.train.global_batch} on "
        f"up to {int(result.gpus.max()):,} GPUs: the fastest layout needs {needed_days.min():.2f} days; raise --gpus, "
        "the deadline or train.global_batch"
    )


# Figures that `compute_sensitivities` changes, by name: (section of the cluster file, key).
FIGURES = {
    "GPU peak": ("gpu", "peak_tflops"),
    "HBM bandwidth": ("gpu", "memory_gbs"),
    "NVLink bandwidth": ("inside", "bus"),
    "NIC bandwidth": ("between", "gbs"),
    "share of slow hosts": ("stragglers", "slow_hosts"),
    "how slow they are": ("stragglers", "slow_by"),
    "TP overlap residual": ("overlap", "tp_residual"),
    "collectives slow compute": ("overlap", "slowdown"),
}


def scale_cluster(cluster: ClusterSpec, section_name: str, key: str, factor: float) -> ClusterSpec:
    """Return the cluster with one figure multiplied. All bandwidths of a link scale together, as do a GPU's peaks."""
    section = getattr(cluster, section_name)
    updates: dict[str, object] = {}
    if section_name in ("inside", "between") and key in ("gbs", "bus"):
        updates = {
            "gbs": section.gbs * factor,
            "bus": [[ranks, gbs * factor] for ranks, gbs in section.bus],
            "p2p_gbs": section.p2p_gbs * factor,
        }
    elif key == "peak_tflops":
        updates = {key: section.peak_tflops * factor}
        if section.float8_tflops is not None:
            updates["float8_tflops"] = section.float8_tflops * factor
    else:
        updates = {key: getattr(section, key) * factor}
    return cluster.model_copy(update={section_name: section.model_copy(update=updates)})


def _scale_figure(scenario: Scenario, section_name: str, key: str, factor: float) -> Scenario:
    """Return the scenario with a figure multiplied: that of the calibration if it has one, else that of the cluster."""
    calibration = scenario.calibration
    fitted = getattr(calibration.constants, key, None)
    if fitted is None:
        return replace(scenario, cluster=scale_cluster(scenario.cluster, section_name, key, factor))
    constants = replace(calibration.constants, **{key: fitted * factor})
    return replace(scenario, calibration=replace(calibration, constants=constants))


def compute_sensitivities(scenario: Scenario, change: float = 0.2) -> dict[str, tuple[float, float]]:
    """Return by figure the relative change of the step: (if the figure falls by `change`, if it rises by `change`).

    The figure with the largest effect comes first.
    """
    base_seconds = estimate_step(scenario, check_memory=False).seconds
    effects = {}
    for name, (section_name, key) in FIGURES.items():
        lower_scenario = _scale_figure(scenario, section_name, key, 1 - change)
        higher_scenario = _scale_figure(scenario, section_name, key, 1 + change)
        lower = estimate_step(lower_scenario, check_memory=False).seconds / base_seconds - 1
        higher = estimate_step(higher_scenario, check_memory=False).seconds / base_seconds - 1
        effects[name] = (lower, higher)
    return dict(sorted(effects.items(), key=lambda item: -max(abs(effect) for effect in item[1])))
