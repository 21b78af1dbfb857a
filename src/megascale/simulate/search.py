"""Search over layouts: the fastest for N GPUs, the fewest GPUs for a deadline, and sensitivities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megascale.config import Config, from_tree
from megascale.core.flops import count_parameters
from megascale.core.layout import MAX_FORWARDS
from megascale.core.memory import DTYPE_BYTES, count_checkpoint_elements
from megascale.errors import FitError
from megascale.simulate.calibration import Calibration, Constants
from megascale.simulate.case import Case
from megascale.simulate.closed import step_parts
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.planner.layout_cost import GIB, RESERVE_GIB
from megascale.simulate.software import RECOMPUTE, Software
from megascale.simulate.step import Scenario, StepEstimate, run

# Layouts priced in one pass of array arithmetic: arrays that stay in the caches.
BLOCK = 16384
MICRO_BATCHES = (1, 2, 4, 8, 16)
# Columns of a layout's row, in the order of `layouts`.
LAYOUT = ("tensor", "context", "pipeline", "virtual", "micro_batch_group_size", "data", "micro")
# Shorter sequences are not divided: a micro-batch then has fewer tokens than fill a GPU.
LONG_SEQUENCE = 32_768
# Long rounds of a pipeline count only where they save this share: what transfers that wait longer take from compute
# (7% measured on two GPUs over NVLink) is in no formula.
WORTH = 0.1


@dataclass(frozen=True)
class SearchResult:
    """Layouts that divide, with their times, fastest first for each number of GPUs.

    Attributes:
        gpus, tensor, context, pipeline, virtual, micro_batch_group_size, data, micro: arrays [layouts].
        recompute: [layouts] positions in RECOMPUTE.
        seconds: of a step.
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


def divisors(n: int) -> list[int]:
    """Divisors in rising order."""
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def layouts(
    config: Config, cluster: ClusterSpec, low: int, high: int, recompute: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return all layouts of `config` on low to high GPUs that divide, whole hosts only: arrays by name.

    Each comes with each kind of `recompute`. Where there are replicas to talk to, several chunks a stage come in rounds
    of the pipeline's length (`micro_batch_group_size` 0) and in one long round of all micro-batches. Long sequences
    also come divided over the context ranks of a host.
    """
    model, batch = config.model, config.train.global_batch
    long_rounds = config.parallel.zero < 2  # which sends after every micro-batch
    tensors = [t for t in divisors(model.heads) if t <= cluster.gpus_per_host]
    sharings = []
    for t in tensors:
        contexts = [1]
        if model.sequence_length >= LONG_SEQUENCE:
            contexts = [c for c in divisors(model.heads // t) if t * c <= cluster.gpus_per_host]
        sharings += [(t, c) for c in contexts]
    rows = []
    for t, c in sharings:
        for p in divisors(model.layers):
            for v in divisors(model.layers // p):
                for b in MICRO_BATCHES:
                    if batch % b:
                        continue
                    for d in divisors(batch // b):
                        gpus = t * c * p * d
                        if p * v * (batch // b // d) > MAX_FORWARDS:
                            continue
                        fills_hosts = gpus % cluster.gpus_per_host == 0 or gpus < cluster.gpus_per_host
                        if not (low <= gpus <= high and fills_hosts):
                            continue
                        if v == 1 or p > 1:
                            rows.append((t, c, p, v, 0, d, b))
                        if v > 1 and d > 1 and long_rounds and batch // b // d > p:
                            rows.append((t, c, p, v, batch // b // d, d, b))
    if not rows:
        raise FitError(
            f"no layout of {model.layers} layers, {model.heads} heads and batch {batch} has between {low:,} and "
            f"{high:,} GPUs in whole hosts of {cluster.gpus_per_host}; change --gpus or train.global_batch"
        )
    columns = np.array(rows, dtype=np.int64).T
    kinds = np.array([RECOMPUTE.index(kind) for kind in recompute])
    arrays = {name: np.tile(column, len(kinds)) for name, column in zip(LAYOUT, columns, strict=True)}
    return arrays | {"recompute": np.repeat(kinds, len(rows))}


def price(case_of: Callable[[slice], Case], count: int, cluster: ClusterSpec, constants: Constants) -> np.ndarray:
    """Seconds of `count` layouts, block by block."""
    out = np.empty(count)
    for start in range(0, count, BLOCK):
        part = slice(start, min(count, start + BLOCK))
        out[part] = step_parts(cluster, case_of(part), constants).total
    return out


def search(
    config: Config,
    cluster: ClusterSpec,
    calibration: Calibration,
    software: Software,
    low: int,
    high: int,
    recompute: Sequence[str] | None = None,
) -> SearchResult:
    """Price every layout that divides in closed form, sorted by GPUs and then by time, without regard to memory.

    `recompute`: what backward may recompute, of the engine's kinds; default: the configuration's.
    """
    arrays = layouts(config, cluster, low, high, recompute or [config.parallel.recompute])
    count = len(arrays["tensor"])

    def case_of(part: slice) -> Case:
        chosen = {k: v[part] for k, v in arrays.items()}
        kind = chosen.pop("recompute")
        return replace(
            Case.from_model(config.model, software, batch=config.train.global_batch, **chosen), recompute=kind
        )

    everything = case_of(slice(0, count))
    fits = np.asarray(everything.fits()) & np.ones(count, dtype=bool)
    arrays = {k: v[fits] for k, v in arrays.items()}
    count = int(fits.sum())
    if not count:
        raise FitError("no layout divides the model's widths; give model.vocab_multiple a multiple of parallel.tensor")
    seconds = price(case_of, count, cluster, calibration.constants)
    # A long round follows the same layout in short ones.
    worth = (
        (arrays["micro_batch_group_size"] == 0)
        | (arrays["pipeline"] == 1)
        | (seconds < (1 - WORTH) * np.roll(seconds, 1))
    )
    arrays, seconds = {k: v[worth] for k, v in arrays.items()}, seconds[worth]
    gpus = arrays["tensor"] * arrays["context"] * arrays["pipeline"] * arrays["data"]
    order = np.lexsort((seconds, gpus))
    columns = {k: v[order] for k, v in arrays.items()}
    return SearchResult(gpus=gpus[order], seconds=seconds[order], **columns)


def with_layout(
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
    """Return the configuration with another layout; `micro_batch_group_size` 0: the pipeline's length."""
    tree = config.model_dump(exclude_none=True)
    layout_values: dict[str, object] = {
        "tensor": tensor,
        "context": context,
        "pipeline": pipeline,
        "virtual_stages": virtual,
        "data": data,
        "recompute": recompute,
    }
    if micro_batch_group_size:
        layout_values["micro_batch_group_size"] = micro_batch_group_size
    tree["parallel"] = {
        k: v for k, v in tree["parallel"].items() if k not in ("layer_split", "micro_batch_group_size")
    } | layout_values
    tree["train"] = tree["train"] | {"micro_batch": micro}
    tree["model"].pop("preset", None)
    return from_tree(tree)


def set_zero(config: Config, zero: int) -> Config:
    """Return the configuration with another parallel.zero. Raises ConfigError if its other settings exclude it."""
    tree = config.model_dump(exclude_none=True)
    tree["parallel"]["zero"] = zero
    tree["model"].pop("preset", None)
    return from_tree(tree)


def feasible(
    result: SearchResult,
    chosen: Sequence[int] | np.ndarray,
    config: Config,
    scenario: Scenario,
    check_memory: bool = True,
) -> Iterator[StepEstimate]:
    """Yield the chosen layouts that fit the memory, in the order given, priced on the closed level."""
    for i in chosen:
        layout = with_layout(
            config,
            int(result.tensor[i]),
            int(result.context[i]),
            int(result.pipeline[i]),
            int(result.virtual[i]),
            int(result.micro_batch_group_size[i]),
            int(result.data[i]),
            int(result.micro[i]),
            RECOMPUTE[int(result.recompute[i])],
        )
        try:
            yield run(replace(scenario.with_config(layout), gpus=int(result.gpus[i])), check_memory=check_memory)
        except FitError:
            continue


def _may_fit(result: SearchResult, chosen: np.ndarray, config: Config, device_gib: float) -> np.ndarray:
    """Return which of the chosen layouts may fit: weights, gradients and state, spread evenly, fit their GPUs.

    This is a lower bound that spares the schedules of most layouts that cannot fit.
    """
    if config.train.lora is not None or config.optimizer.offload:
        return np.ones(len(chosen), dtype=bool)
    zero = config.parallel.zero
    shards = result.data[chosen] * result.context[chosen]
    parameters = count_parameters(config.model)
    itemsize = DTYPE_BYTES[config.train.precision]
    master_itemsize = max(4, itemsize)
    state = count_checkpoint_elements(config.optimizer.name, config.model)
    if itemsize == master_itemsize:
        state -= parameters  # the weights are the master weights
    weight_bytes = itemsize * parameters / (shards if zero == 3 else 1)
    gradient_bytes = master_itemsize * parameters / (shards if zero >= 2 else 1)
    state_bytes = master_itemsize * state / (shards if zero >= 1 else 1)
    model_ranks = result.tensor[chosen] * result.pipeline[chosen]
    rank_bytes = (weight_bytes + gradient_bytes + state_bytes) / model_ranks
    may_fit: np.ndarray = rank_bytes <= (device_gib - RESERVE_GIB) * GIB
    return may_fit


def best(
    result: SearchResult, config: Config, scenario: Scenario, gpus: int, count: int = 4, check_memory: bool = True
) -> list[StepEstimate]:
    """Return the fastest layouts for exactly `gpus` that fit the memory, fastest first. FitError if none does."""
    chosen = np.flatnonzero(result.gpus == gpus)
    divisible_count = len(chosen)
    if check_memory:
        chosen = chosen[_may_fit(result, chosen, config, scenario.cluster.gpu.memory_gib)]
    estimates: list[StepEstimate] = []
    layouts_listed = set()
    for estimate in feasible(result, chosen, config, scenario, check_memory):
        parallel, train = estimate.scenario.config.parallel, estimate.scenario.config.train
        layout = (
            parallel.tensor,
            parallel.context,
            parallel.pipeline,
            parallel.virtual_stages,
            parallel.micro_batch_group_size,
            train.micro_batch,
        )
        # Of one layout the fastest kind of recomputation that fits.
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
    # A layout may decide what the stack does, such as replaying graphs, which the search priced as the file has it.
    return sorted(estimates, key=lambda estimate: estimate.seconds)


def fewest(
    result: SearchResult,
    config: Config,
    scenario: Scenario,
    tokens: float,
    days: float,
    effective: float | Callable[[np.ndarray], np.ndarray] = 1.0,
    check_memory: bool = True,
) -> StepEstimate:
    """Return the best layout on the fewest GPUs that train on `tokens` in `days`.

    Args:
        effective: share of the time spent stepping, or a function from the number of GPUs to this share.

    Raises:
        FitError: the deadline cannot be met; the message names the shortest time.
    """
    per_step = config.train.global_batch * config.model.sequence_length
    share = effective(result.gpus) if callable(effective) else effective
    needed = tokens / per_step * result.seconds / 86400.0 / share
    fast = needed <= days
    for gpus in np.unique(result.gpus[fast]):
        chosen = np.flatnonzero(fast & (result.gpus == gpus))
        if check_memory:
            chosen = chosen[_may_fit(result, chosen, config, scenario.cluster.gpu.memory_gib)]
        for estimate in feasible(result, chosen, config, scenario, check_memory):
            return estimate
    raise FitError(
        f"{tokens:.3g} tokens in {days:g} days cannot be done with train.global_batch={config.train.global_batch} on "
        f"up to {int(result.gpus.max()):,} GPUs: the fastest layout needs {needed.min():.2f} days; raise --gpus, the "
        "deadline or train.global_batch"
    )


# Figures whose influence the sensitivities show: name -> (cluster part, key).
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


def scaled(cluster: ClusterSpec, part: str, key: str, factor: float) -> ClusterSpec:
    """Return the cluster with one figure multiplied. A link's bandwidths move together, and a GPU's peaks."""
    section = getattr(cluster, part)
    change: dict[str, object] = {}
    if part in ("inside", "between") and key in ("gbs", "bus"):
        change = {
            "gbs": section.gbs * factor,
            "bus": [[ranks, gbs * factor] for ranks, gbs in section.bus],
            "p2p_gbs": section.p2p_gbs * factor,
        }
    elif key == "peak_tflops":
        change = {key: section.peak_tflops * factor}
        if section.float8_tflops is not None:
            change["float8_tflops"] = section.float8_tflops * factor
    else:
        change = {key: getattr(section, key) * factor}
    return cluster.model_copy(update={part: section.model_copy(update=change)})


def scale_figure(scenario: Scenario, part: str, key: str, factor: float) -> Scenario:
    """Return the scenario with a figure multiplied: the calibration's where it replaces the cluster's."""
    calibration = scenario.calibration
    fitted = getattr(calibration.constants, key, None)
    if fitted is None:
        return replace(scenario, cluster=scaled(scenario.cluster, part, key, factor))
    constants = replace(calibration.constants, **{key: fitted * factor})
    return replace(scenario, calibration=replace(calibration, constants=constants))


def sensitivities(scenario: Scenario, change: float = 0.2) -> dict[str, tuple[float, float]]:
    """Return name -> relative change of the step when a figure falls and when it rises by `by`, largest first."""
    base = run(scenario, check_memory=False).seconds
    out = {}
    for name, (part, key) in FIGURES.items():
        changed = [scale_figure(scenario, part, key, factor) for factor in (1 - change, 1 + change)]
        lower, higher = (run(scenario_b, check_memory=False).seconds / base - 1 for scenario_b in changed)
        out[name] = (lower, higher)
    return dict(sorted(out.items(), key=lambda item: -max(abs(x) for x in item[1])))
