"""Choice of the batch and the layout of a plan whose configuration leaves them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import log2

from megascale.config import Config, ModelConfig
from megascale.core.flops import count_parameters
from megascale.core.grid import Grid
from megascale.core.inventory import has_experts
from megascale.errors import ConfigError, FitError
from megascale.simulate.planner.layout_cost import make_plan
from megascale.simulate.planner.layout_figures import RESERVE_GIB
from megascale.simulate.scenario import Scenario
from megascale.simulate.search import (
    SearchResult,
    find_fastest,
    has_fitting_layout,
    list_divisors,
    search_layouts,
    set_zero,
)
from megascale.simulate.step import StepEstimate

# GPT-2's vocabulary, padded: assumed for a shape without one, such as the preset tiny.
ASSUMED_VOCABULARY = 50_304
# Upper bound of the parameters, with the usual tokens per step: rounded from Brown et al. 2020, table 2.1 (3.2 M for
# 175 billion).
_TOKENS_PER_STEP = ((1e9, 2**19), (1e10, 2**21), (float("inf"), 2**22))
_MAX_TOKENS_PER_GPU = 2**17  # keeps a step on few GPUs below about a minute
_MICRO_BATCH_TOKENS = 8192  # enough to fill a GPU
_MAX_MICRO_BATCH = 8  # samples
_MAX_TENSOR_RANKS = 8  # a tensor group stays within a host
# Settings that determine the layout or its memory. If the configuration sets none of them, the layout is chosen.
_LAYOUT_KEYS = (
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.virtual_stages",
    "parallel.micro_batch_group_size",
    "parallel.layer_split",
    "parallel.context",
    "parallel.data",
    "parallel.expert",
    "parallel.replicate",
    "parallel.axes",
    "parallel.zero",
    "parallel.recompute",
    "train.micro_batch",
    "train.lora",
    "optimizer.offload",
)
_BATCH_KEYS = ("train.micro_batch", "train.global_batch")
# Settings that `format_flags` returns.
_FLAG_KEYS = (
    "parallel.tensor",
    "parallel.context",
    "parallel.pipeline",
    "parallel.virtual_stages",
    "parallel.micro_batch_group_size",
    "parallel.expert",
    "parallel.experts_over",
    "parallel.zero",
    "parallel.zero3_keep_layers",
    "parallel.recompute",
    "train.linear_precision",
    *_BATCH_KEYS,
)
# Values of parallel.recompute that a search tries, cheapest first.
RECOMPUTE_KINDS = ("none", "norms", "activation", "selective", "full")
SHARDINGS = (1, 2, 3)  # values of parallel.zero that a search tries


def assume_vocabulary(config: Config) -> Config:
    """Return the configuration with a vocabulary: GPT-2's, padded, if neither the model nor a data set has one."""
    if config.model.vocab_size is not None:
        return config
    model = config.model.model_copy(update={"vocab_size": ASSUMED_VOCABULARY})
    return config.model_copy(update={"model": model})


def is_set(config: Config, setting: str) -> bool:
    """Return whether a file, the command line or `_change` has set a setting ("section.key")."""
    section, _, key = setting.partition(".")
    return key in getattr(config, section).model_fields_set


def format_flags(config: Config) -> str:
    """Return the layout, the precision of linear layers and the batch as options for a command line.

    Settings at their defaults are left out, except the batch. An assumed vocabulary is included.
    """
    flags = []
    if config.model.vocab_size == ASSUMED_VOCABULARY:
        flags.append(f"--model.vocab_size={ASSUMED_VOCABULARY}")
    for setting in _FLAG_KEYS:
        section, _, key = setting.partition(".")
        table = getattr(config, section)
        value = getattr(table, key)
        if setting in _BATCH_KEYS or value != type(table).model_fields[key].default:
            flags.append(f"--{setting}={value}")
    return " ".join(flags)


def choose_batch(config: Config, gpus: int) -> Config:
    """Return the configuration with a global batch and, if it has a layout, a micro-batch. Set values stay.

    The global batch is the usual one for the size of the model. With a layout it divides over the layout's replicas, or
    else over the replicas of many layouts. If the configuration has a global batch and a layout but no micro-batch, the
    micro-batch divides the batch of each replica.
    """
    model = config.model
    if is_set(config, "train.global_batch"):
        if not has_layout(config) or is_set(config, "train.micro_batch"):
            return config
        return _choose_dividing_micro_batch(config, gpus)
    usual_samples = min(_choose_step_tokens(model), gpus * _MAX_TOKENS_PER_GPU) / model.sequence_length
    if not has_layout(config):
        batch = _round_for_any_layout(usual_samples, model, gpus)
        return _change(config, "train", global_batch=batch)
    try:
        replicas = Grid.from_config(config.parallel, gpus).replicas
    except FitError:
        return config  # `lay_out` reports the fault later
    if not is_set(config, "train.micro_batch"):
        config = _change(config, "train", micro_batch=_choose_micro_batch(model))
    samples_per_microbatch = replicas * config.train.micro_batch  # over all replicas
    microbatches = max(1, round(usual_samples / samples_per_microbatch))
    # Round up to complete groups of interleaved 1F1B.
    stages = config.parallel.pipeline
    microbatches = -(-microbatches // stages) * stages
    return _change(config, "train", global_batch=microbatches * samples_per_microbatch)


def has_layout(config: Config) -> bool:
    """Return whether the configuration sets a part of the layout."""
    return any(is_set(config, setting) for setting in _LAYOUT_KEYS)


def choose_layout(scenario: Scenario, report: Callable[[str], None] = lambda text: None) -> Config:
    """Return the configuration with a batch and the fastest layout that fits the cluster's GPUs.

    The simulator has no step times of models with experts. For these, the choice is the first layout of
    `_list_expert_layouts` that fits.

    Args:
        report: called with the progress as text.

    Raises FitError if no layout fits.
    """
    if has_experts(scenario.config.model):
        config = choose_batch(scenario.config, scenario.gpus)
        return _choose_by_memory(config, scenario.gpus, scenario.cluster.gpu.memory_gib, report)
    return rank_layouts(scenario, report)[0].scenario.config


def rank_layouts(scenario: Scenario, report: Callable[[str], None] = lambda text: None) -> list[StepEstimate]:
    """Return the estimate of the fastest layout that fits for each value of parallel.zero, the fastest one first.

    With ZeRO-3 as many layers stay gathered as fit. Batches that are not set are chosen.

    Args:
        report: called with the progress as text.

    Raises FitError if no layout fits.
    """
    config = choose_batch(scenario.config, scenario.gpus)
    reasons = []
    candidates = []
    has_divisible = False
    for zero in SHARDINGS:

        def report_layout(text: str, zero: int = zero) -> None:
            report(f"{scenario.gpus:,} GPUs, parallel.zero={zero}: {text}")

        report_layout("listing the layouts")
        try:
            variant = scenario.with_config(set_zero(config, zero))
            layouts = _list_sharded_layouts(variant)
            has_divisible = True
            candidates += find_fastest(layouts, variant.config, variant, scenario.gpus, count=1, report=report_layout)
        except (FitError, ConfigError) as error:
            reasons.append(str(error))
    if not candidates and has_divisible:
        memory_gib = scenario.cluster.gpu.memory_gib
        raise FitError(
            f"no layout on {count_gpus(scenario.gpus)} fits {memory_gib:g} GiB, with parallel.zero=1 to 3 and every "
            "kind of recomputation; use more GPUs"
        )
    if not candidates:
        raise FitError(reasons[-1])
    ranked = []
    for estimate in sorted(candidates, key=lambda estimate: estimate.seconds):
        # The search has set the data-parallel ranks, which fill the GPUs by themselves.
        layout_config = _change(estimate.scenario.config, "parallel", data=config.parallel.data)
        ranked.append(replace(estimate, scenario=estimate.scenario.with_config(layout_config)))
    return ranked


def _list_sharded_layouts(scenario: Scenario) -> SearchResult:
    """Return all layouts with the scenario's value of parallel.zero on its GPUs, sorted by time.

    With one data-parallel rank all values of parallel.zero are the same layout, which is listed with the first value.

    Raises FitError if no layout divides.
    """
    layouts = search_layouts(
        scenario.config,
        scenario.cluster,
        scenario.calibration,
        scenario.software,
        low=scenario.gpus,
        high=scenario.gpus,
        recompute=RECOMPUTE_KINDS,
    )
    if scenario.config.parallel.zero != SHARDINGS[0]:
        layouts = layouts.select(layouts.data * layouts.context > 1)
    return layouts


def can_choose_layout(scenario: Scenario, report: Callable[[str], None] = lambda text: None) -> bool:
    """Return whether `choose_layout` would return a layout, without pricing the layouts of a dense model.

    Args:
        report: called with the progress as text.
    """
    if has_experts(scenario.config.model):
        try:
            choose_layout(scenario, report)
        except FitError:
            return False
        return True
    config = choose_batch(scenario.config, scenario.gpus)
    # Full sharding needs the least memory, unless the layout has one data-parallel rank.
    for zero in reversed(SHARDINGS):
        report(f"{scenario.gpus:,} GPUs, parallel.zero={zero}: memory of the layouts")
        try:
            variant = scenario.with_config(set_zero(config, zero))
            layouts = _list_sharded_layouts(variant)
        except (FitError, ConfigError):
            continue
        if has_fitting_layout(layouts, variant.config, variant):
            return True
    return False


def count_gpus(gpus: int) -> str:
    """Return a number of GPUs with its noun."""
    return f"{gpus:,} GPU{'' if gpus == 1 else 's'}"


def _choose_step_tokens(model: ModelConfig) -> int:
    """Return the usual tokens per step for the size of the model."""
    parameters = count_parameters(model)
    return next(tokens for bound, tokens in _TOKENS_PER_STEP if parameters < bound)


def _choose_micro_batch(model: ModelConfig) -> int:
    """Return the samples of a micro-batch that fill a GPU."""
    return max(1, min(_MAX_MICRO_BATCH, _MICRO_BATCH_TOKENS // model.sequence_length))


def _choose_dividing_micro_batch(config: Config, gpus: int) -> Config:
    """Return the configuration with the largest usual micro-batch that divides the batch of each replica."""
    try:
        replicas = Grid.from_config(config.parallel, gpus).replicas
    except FitError:
        return config  # `lay_out` reports the fault later
    micro_batch = _choose_micro_batch(config.model)
    if config.train.global_batch % replicas == 0:
        batch_per_replica = config.train.global_batch // replicas
        micro_batch = max(size for size in range(1, micro_batch + 1) if batch_per_replica % size == 0)
    return _change(config, "train", micro_batch=micro_batch)


def _round_for_any_layout(samples: float, model: ModelConfig, gpus: int) -> int:
    """Return about `samples` samples, rounded so that they divide over the replicas of many layouts.

    The result is the largest odd divisor of `gpus`, times a power of two. It may be larger than `samples`, so that
    every replica gets a sample even if each copy of the model has as many ranks as possible.
    """
    odd_divisor = gpus
    while odd_divisor % 2 == 0:
        odd_divisor //= 2
    batch = odd_divisor * 2 ** max(0, round(log2(samples / odd_divisor)))
    max_copy_ranks = min(_MAX_TENSOR_RANKS, model.heads) * model.layers  # tensor ranks x stages
    while batch * max_copy_ranks < gpus:
        batch *= 2
    return batch


def _choose_by_memory(config: Config, gpus: int, device_gib: float, report: Callable[[str], None]) -> Config:
    """Return the first layout of `_list_expert_layouts` that fits. Raises FitError if no layout fits."""
    smallest_gib = float("inf")
    for number, candidate in enumerate(_list_expert_layouts(config, gpus), start=1):
        report(f"{gpus:,} GPUs: layout {number:,}")
        try:
            plan = make_plan(candidate, gpus, device_gib)
        except FitError:
            continue
        if plan.fits:
            return candidate
        smallest_gib = min(smallest_gib, plan.needed_gib)
    raise FitError(
        f"no layout on {count_gpus(gpus)} fits {device_gib:g} GiB: the smallest that was tried needs "
        f"{smallest_gib:.1f} GiB with {RESERVE_GIB:g} in reserve; use more GPUs"
    )


def _list_expert_layouts(config: Config, gpus: int) -> Iterator[Config]:
    """Yield layouts by rising recomputation, then by rising ranks of the tensor and pipeline axes.

    Experts on data-parallel ranks are faster than tensor parallelism: 69,500 instead of 48,100 tokens/s per GPU for
    Qwen3-30B-A3B (docs/experts.md). Groups of expert ranks within a host precede those over several hosts.
    """
    model = config.model
    # Whether experts span hosts, tensor x pipeline, pipeline, tensor and expert sizes; sorted in this order.
    shapes = []
    for tensor in (1, 2, 4, 8):
        for pipeline in list_divisors(model.layers):
            for expert in list_divisors(gpus):
                ranks = tensor * pipeline * expert
                if gpus % ranks == 0 and model.expert_settings.number % (tensor * expert) == 0:
                    spans_hosts = tensor * expert > config.parallel.gpus_per_host
                    shapes.append((spans_hosts, tensor * pipeline, pipeline, tensor, expert))
    for recompute in ("none", "selective", "full"):
        for *_, pipeline, tensor, expert in sorted(shapes):
            parallel: dict[str, object] = {"tensor": tensor, "pipeline": pipeline, "recompute": recompute}
            if expert > 1:
                parallel |= {"expert": expert, "experts_over": "data"}
            yield _change(_change(config, "parallel", **parallel), "train", micro_batch=1)


def _change(config: Config, section: str, **values: object) -> Config:
    """Return the configuration with other values of a section, for which `is_set` is true."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
