"""Search over layouts: the fastest for N GPUs, the fewest GPUs for a deadline, and sensitivities."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from megascale.config import Config, from_tree, replace_sections
from megascale.core.adapters import AdapterSpec
from megascale.core.flops import count_parameters
from megascale.core.layout import MAX_FORWARDS
from megascale.core.parameter_counts import count_checkpoint_elements
from megascale.core.saved_tensors import sum_saved_bytes
from megascale.core.tensors import DTYPE_BYTES
from megascale.errors import ConfigError, FitError
from megascale.simulate.calibration import Calibration, Constants
from megascale.simulate.case import Case
from megascale.simulate.closed import compute_step_parts
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.planner.layout_cost import make_plan
from megascale.simulate.planner.layout_figures import GIB, RESERVE_GIB
from megascale.simulate.scenario import Scenario, dump_settings
from megascale.simulate.software import RECOMPUTE, Software
from megascale.simulate.step import StepEstimate, estimate_step

# Layouts that are priced in one pass of array arithmetic; their arrays fit the processor's caches.
BLOCK = 16384
MICRO_BATCHES = (1, 2, 4, 8, 16)
# Shorter sequences are not divided over context ranks, since each rank would have too few tokens to fill a GPU.
LONG_SEQUENCE = 32_768
# A group of all micro-batches must save this share of the step. Its transfers slow compute (7% measured on two GPUs
# over NVLink), which the formulas leave out.
MIN_GROUP_SAVING = 0.1
# Layouts under ZeRO-3 whose kept layers are chosen, among which the fastest are listed. The search orders layouts by
# their time without kept layers, and kept layers save up to a tenth of a step.
KEPT_CANDIDATES = 12


class LayoutRow(NamedTuple):
    """A layout.

    Attributes:
        virtual: chunks per stage.
        micro_batch_group_size: micro-batches of a group; 0: as many as there are stages.
        micro: sequences per micro-batch.
    """

    tensor: int
    context: int
    pipeline: int
    virtual: int
    micro_batch_group_size: int
    data: int
    micro: int


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

    def select(self, mask: np.ndarray) -> SearchResult:
        """Return the layouts for which `mask` is true: [layouts] booleans."""
        return SearchResult(**{field.name: getattr(self, field.name)[mask] for field in fields(self)})


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
        fixed: values that fields of LayoutRow must have; default: none.
    """
    fixed = fixed or {}
    rows = []
    for tensor, context in _list_tensor_and_context(config, cluster, fixed):
        rows += _list_rows(config, tensor, context, fixed=fixed)
    rows = [row for row in rows if _uses_gpus(row, cluster, low, high)]
    rows = [row for row in rows if all(getattr(row, name) == value for name, value in fixed.items())]
    if not rows:
        model = config.model
        fixed_text = "".join(f", {name} {value}" for name, value in fixed.items())
        raise FitError(
            f"no layout of {model.layers} layers, {model.heads} heads and batch {config.train.global_batch}"
            f"{fixed_text} has between {low:,} and {high:,} GPUs in whole hosts of {cluster.gpus_per_host}; change "
            f"--gpus or train.global_batch{' or the settings of the layout' if fixed else ''}"
        )
    columns = np.array(rows, dtype=np.int64).T
    recompute_indices = np.array([RECOMPUTE.index(value) for value in recompute])
    arrays = {name: np.tile(column, len(recompute)) for name, column in zip(LayoutRow._fields, columns, strict=True)}
    return arrays | {"recompute": np.repeat(recompute_indices, len(rows))}


def _list_tensor_and_context(config: Config, cluster: ClusterSpec, fixed: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return the pairs of tensor and context sizes that divide the heads and stay within a host.

    A context size in `fixed` may reach beyond a host.
    """
    pairs = []
    for tensor in list_divisors(config.model.heads):
        if tensor > cluster.gpus_per_host:
            continue
        contexts = [1]
        if "context" in fixed:
            contexts = [c for c in list_divisors(config.model.heads // tensor) if c == fixed["context"]]
        elif config.model.sequence_length >= LONG_SEQUENCE:
            contexts = [c for c in list_divisors(config.model.heads // tensor) if tensor * c <= cluster.gpus_per_host]
        pairs += [(tensor, context) for context in contexts]
    return pairs


def _list_rows(config: Config, tensor: int, context: int, *, fixed: Mapping[str, int]) -> list[LayoutRow]:
    """Return all layouts with these sizes of the tensor and context axes."""
    layers = config.model.layers
    batch = config.train.global_batch
    micro_sizes = [fixed["micro"]] if "micro" in fixed else MICRO_BATCHES
    # ZeRO-2 and ZeRO-3 reduce after every micro-batch, so large groups do not help.
    allows_large_groups = config.parallel.zero < 2
    rows = []
    for pipeline in list_divisors(layers):
        for virtual, micro in itertools.product(list_divisors(layers // pipeline), micro_sizes):
            if batch % micro:
                continue
            for data in list_divisors(batch // micro):
                microbatches = batch // micro // data
                if pipeline * virtual * microbatches > MAX_FORWARDS:
                    continue
                row = LayoutRow(tensor, context, pipeline, virtual, micro_batch_group_size=0, data=data, micro=micro)
                if virtual == 1 or pipeline > 1:
                    rows.append(row)
                if virtual > 1 and data > 1 and allows_large_groups and microbatches > pipeline:
                    rows.append(row._replace(micro_batch_group_size=microbatches))
    return rows


def _uses_gpus(row: LayoutRow, cluster: ClusterSpec, low: int, high: int) -> bool:
    """Return whether a layout has `low` to `high` GPUs, in whole hosts or on a part of one host."""
    gpus = row.tensor * row.context * row.pipeline * row.data
    fills_hosts = gpus % cluster.gpus_per_host == 0 or gpus < cluster.gpus_per_host
    return low <= gpus <= high and fills_hosts


def price_layouts(
    make_case: Callable[[slice], Case], count: int, cluster: ClusterSpec, constants: Constants
) -> np.ndarray:
    """Return the seconds of a step for each of `count` layouts, [count].

    Args:
        make_case: returns the case whose arrays hold a range of the layouts.
    """
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
    """Price every layout that divides at the closed level, whether it fits the memory or not.

    Args:
        low, high: range of the number of GPUs.
        recompute: allowed values of parallel.recompute; default: that of the configuration.
        fixed: values that fields of LayoutRow must have; default: none.

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
    # Keep a layout with one group of all micro-batches only if it is faster than the layout before it, which is the
    # same with groups of the pipeline's length.
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


class LayoutSettings:
    """Configurations that differ from `config` in their layout only.

    A search makes hundreds of them. Sections without a part of the layout are validated once.
    """

    def __init__(self, config: Config) -> None:
        tree = dump_settings(config)
        self._tables = {name: tree[name] for name in ("parallel", "overlap", "train")}
        self._tree = tree
        self._validated: Config | None = None
        with contextlib.suppress(ConfigError):  # another layout may make these settings valid
            self._validated = from_tree(tree)

    def set_layout(
        self,
        *,
        tensor: int,
        context: int,
        pipeline: int,
        virtual: int,
        micro_batch_group_size: int,
        data: int,
        micro: int,
        recompute: str,
    ) -> Config:
        """Return the configuration with another layout. Raises ConfigError if its other settings exclude it.

        Args:
            virtual: chunks per stage.
            micro_batch_group_size: micro-batches of a group; 0: as many as there are stages.
            micro: sequences per micro-batch.
        """
        parallel = self._tables["parallel"] | {
            "tensor": tensor,
            "context": context,
            "pipeline": pipeline,
            "virtual_stages": virtual,
            "data": data,
            "recompute": recompute,
        }
        for key in ("layer_split", "micro_batch_group_size"):
            parallel.pop(key, None)
        if micro_batch_group_size:
            parallel["micro_batch_group_size"] = micro_batch_group_size
        overlap = dict(self._tables["overlap"])
        if context == 1:  # settings of an exchange between context ranks are refused without such ranks
            for key in ("context", "context_parts"):
                overlap.pop(key, None)
        tables = {"parallel": parallel, "overlap": overlap, "train": self._tables["train"] | {"micro_batch": micro}}
        if self._validated is None:
            return from_tree(self._tree | tables)
        return replace_sections(self._validated, tables)


def set_zero(config: Config, zero: int) -> Config:
    """Return the configuration with another parallel.zero. Raises ConfigError if its other settings exclude it."""
    tree = dump_settings(config)
    tree["parallel"]["zero"] = zero
    return from_tree(tree)


def estimate_fitting(
    result: SearchResult,
    indices: Sequence[int] | np.ndarray,
    config: Config,
    scenario: Scenario,
    check_memory: bool = True,
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[StepEstimate]:
    """Yield the estimate of each layout, at the closed level. Layouts that raise FitError are skipped.

    Args:
        indices: layouts in `result`, in the order of the estimates.
        check_memory: whether a layout that does not fit the memory raises FitError.
        report: called with the progress as text.
    """
    layout_scenarios = _make_scenarios(result, indices, config, scenario)
    for number, layout_scenario in enumerate(layout_scenarios, start=1):
        report(f"layout {number:,} of at most {len(indices):,}")
        try:
            yield estimate_step(layout_scenario, check_memory=check_memory)
        except FitError:
            continue


def _make_scenarios(
    result: SearchResult, indices: Sequence[int] | np.ndarray, config: Config, scenario: Scenario
) -> Iterator[Scenario]:
    """Yield the scenario of each layout; arguments are those of `estimate_fitting`."""
    settings = LayoutSettings(config)
    for index in indices:
        layout_config = settings.set_layout(
            tensor=int(result.tensor[index]),
            context=int(result.context[index]),
            pipeline=int(result.pipeline[index]),
            virtual=int(result.virtual[index]),
            micro_batch_group_size=int(result.micro_batch_group_size[index]),
            data=int(result.data[index]),
            micro=int(result.micro[index]),
            recompute=RECOMPUTE[int(result.recompute[index])],
        )
        yield replace(scenario.with_config(layout_config), gpus=int(result.gpus[index]))


def has_fitting_layout(result: SearchResult, config: Config, scenario: Scenario) -> bool:
    """Return whether any of the layouts fits the memory. No step is priced.

    Layouts are tried by rising lower bound of their memory.
    """
    device_gib = scenario.cluster.gpu.memory_gib
    bounds = _bound_rank_bytes(result, np.arange(len(result)), scenario.memory_config)
    indices = np.argsort(bounds, kind="stable")
    indices = indices[bounds[indices] <= (device_gib - RESERVE_GIB) * GIB]
    for layout_scenario in _make_scenarios(result, indices, config, scenario):
        try:
            if layout_scenario.memory_gib() <= device_gib:
                return True
        except FitError:
            continue
    return False


def _may_fit(result: SearchResult, indices: np.ndarray, config: Config, device_gib: float) -> np.ndarray:
    """Return for which layouts a lower bound of the memory fits the GPU: [indices] booleans.

    It saves building the schedules of most layouts that cannot fit.
    """
    may_fit: np.ndarray = _bound_rank_bytes(result, indices, config) <= (device_gib - RESERVE_GIB) * GIB
    return may_fit


def _bound_rank_bytes(result: SearchResult, indices: np.ndarray, config: Config) -> np.ndarray:
    """Return a lower bound of the bytes of the fullest rank: [indices] numbers.

    The bound is weights, gradients and optimizer state, spread evenly, and the saved activations of the first stage.
    """
    activation_bytes = _bound_activation_bytes(result, indices, config)
    if config.train.lora is not None or config.optimizer.offload:
        # Most parameters have no gradient, or the optimizer state is in host memory.
        return activation_bytes
    zero = config.parallel.zero
    shards = result.data[indices] * result.context[indices]
    parameters = count_parameters(config.model)
    itemsize = DTYPE_BYTES[config.train.precision]
    master_itemsize = max(4, itemsize)
    state_elements = count_checkpoint_elements(config.optimizer.name, config.model)
    if itemsize == master_itemsize:
        state_elements -= parameters  # the weights are the master weights
    weight_bytes = itemsize * parameters / (shards if zero == 3 else 1)
    gradient_bytes = master_itemsize * parameters / (shards if zero >= 2 else 1)
    state_bytes = master_itemsize * state_elements / (shards if zero >= 1 else 1)
    model_ranks = result.tensor[indices] * result.pipeline[indices]
    rank_bytes = (weight_bytes + gradient_bytes + state_bytes) / model_ranks
    bound: np.ndarray = rank_bytes + activation_bytes
    return bound


def _bound_activation_bytes(result: SearchResult, indices: np.ndarray, config: Config) -> np.ndarray:
    """Return a lower bound of the bytes of saved activations on the first stage: [indices] numbers.

    The first stage has at least the mean number of layers, since the logits count as layers of the last stage. It
    keeps at least as many micro-batches in flight as there are stages. The layer with the fewest bytes counts as each
    layer, because stages may have different kinds of layers.
    """
    if config.parallel.offload_activations:
        return np.zeros(len(indices))  # inputs of layers are in host memory
    columns = (result.tensor, result.context, result.micro, result.recompute)
    shapes, inverse = np.unique(np.stack([column[indices] for column in columns]), axis=1, return_inverse=True)
    layer_bytes = []
    for tensor, context, micro, recompute in shapes.T.tolist():
        saved = sum_saved_bytes(
            config.model,
            tensor,
            micro,
            config.train.precision,
            RECOMPUTE[recompute],
            config.train.linear_precision,
            AdapterSpec.from_config(config.train),
            context,
        )
        layer_bytes.append(np.diff(saved.running).min())
    microbatches = config.train.global_batch // (result.data[indices] * result.micro[indices])
    in_flight = np.minimum(microbatches, result.pipeline[indices])
    stage_layers = config.model.layers / result.pipeline[indices]
    activation_bytes: np.ndarray = np.array(layer_bytes)[inverse.reshape(-1)] * stage_layers * in_flight
    return activation_bytes


def find_fastest(
    result: SearchResult,
    config: Config,
    scenario: Scenario,
    gpus: int,
    count: int = 4,
    check_memory: bool = True,
    chooses_kept_layers: bool = True,
    report: Callable[[str], None] = lambda text: None,
) -> list[StepEstimate]:
    """Return the `count` fastest layouts on exactly `gpus` GPUs that fit the memory, fastest first.

    Args:
        chooses_kept_layers: whether as many layers as fit stay gathered under ZeRO-3 (parallel.zero3_keep_layers).
        report: called with the progress as text.

    Raises FitError if no layout fits.
    """
    indices = np.flatnonzero(result.gpus == gpus)
    divisible_count = len(indices)
    if check_memory:
        indices = indices[_may_fit(result, indices, scenario.memory_config, scenario.cluster.gpu.memory_gib)]
    may_keep_layers = chooses_kept_layers and config.parallel.zero == 3 and scenario.software.unit_slots
    candidate_count = max(count, KEPT_CANDIDATES) if may_keep_layers else count
    estimates: list[StepEstimate] = []
    listed_layouts = set()
    for estimate in estimate_fitting(result, indices, config, scenario, check_memory, report=report):
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
        if layout in listed_layouts:
            continue
        listed_layouts.add(layout)
        if may_keep_layers:
            estimate = keep_layers(estimate, check_memory=check_memory)
        estimates.append(estimate)
        if len(estimates) == candidate_count:
            break
    if not estimates:
        remedies = "more GPUs" if config.parallel.zero == 3 else "more GPUs, --parallel.zero=3"
        raise FitError(
            f"none of the {divisible_count} layouts of {gpus:,} GPUs that divide fits "
            f"{scenario.cluster.gpu.memory_gib:g} GiB; use {remedies} or, if --recompute was given, more of its kinds"
        )
    # The order may have changed. The search prices all layouts with the same software, and an estimate takes into
    # account what the software does in its layout only, such as CUDA graphs.
    return sorted(estimates, key=lambda estimate: estimate.seconds)[:count]


def keep_layers(estimate: StepEstimate, check_memory: bool = True) -> StepEstimate:
    """Return the estimate of a layout with as many kept layers as fit; `estimate` itself if they save no time.

    Args:
        check_memory: whether a layout that does not fit the memory raises FitError.
    """
    scenario = estimate.scenario
    kept_layers = make_plan(scenario.config, scenario.gpus, scenario.cluster.gpu.memory_gib).count_keepable_layers()
    if kept_layers <= scenario.config.parallel.zero3_keep_layers:
        return estimate
    parallel = scenario.config.parallel.model_copy(update={"zero3_keep_layers": kept_layers})
    config = scenario.config.model_copy(update={"parallel": parallel})
    kept_estimate = estimate_step(scenario.with_config(config), check_memory=check_memory)
    return min(estimate, kept_estimate, key=lambda item: item.seconds)


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

    Times are those without kept layers of ZeRO-3.

    Args:
        time_share: share of the time that is spent on steps, or a function from the numbers of GPUs to these shares.

    Raises:
        FitError: the deadline cannot be met; the message names the shortest time.
    """
    tokens_per_step = config.train.global_batch * config.model.sequence_length
    step_share = time_share(result.gpus) if callable(time_share) else time_share
    needed_days = tokens / tokens_per_step * result.seconds / 86400.0 / step_share
    is_candidate = needed_days <= days
    if check_memory:
        indices = np.flatnonzero(is_candidate)
        is_candidate[indices] = _may_fit(result, indices, scenario.memory_config, scenario.cluster.gpu.memory_gib)
    for gpus in np.unique(result.gpus[is_candidate]):
        indices = np.flatnonzero(is_candidate & (result.gpus == gpus))
        for estimate in estimate_fitting(result, indices, config, scenario, check_memory):
            return estimate
    raise FitError(
        f"{tokens:.3g} tokens in {days:g} days cannot be done with train.global_batch={config.train.global_batch} on "
        f"up to {int(result.gpus.max()):,} GPUs: the fastest layout needs {needed_days.min():.2f} days; raise --gpus, "
        "the deadline or train.global_batch"
    )
