"""Estimated step times of a configuration on N GPUs under a software stack, with parts and an error band.

An estimate is made at one of two levels: in closed form (closed.py), or event by event (event.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megascale.core import flops
from megascale.errors import ConfigError, FitError
from megascale.simulate.case import Case
from megascale.simulate.closed import compute_step_parts
from megascale.simulate.event import SimulatedStep, draw_hosts, simulate_step
from megascale.simulate.network import Network
from megascale.simulate.prediction_band import estimate_band_width, list_cautions
from megascale.simulate.scenario import ATTENTION, Scenario, requests_float8

Level = Literal["closed", "event"]


@dataclass(frozen=True)
class StepEstimate:
    """The estimated time of a step and its parts.

    Attributes:
        low, high: P10 and P90 of the step's time (prediction_band.py).
        parts: seconds by part, which add up to `seconds` (closed.StepParts). At the event level, `stragglers` is the
            simulated delay by slow hosts, `interplay` is the difference of the two levels, and the other parts are
            those of the closed level.
        memory_gib: memory of the fullest rank.
        event: result of the event level; None at the closed level.
        cautions: reasons why the error may be larger than the band, such as extrapolation or assumed figures.
    """

    scenario: Scenario
    level: Level
    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    memory_gib: float
    event: SimulatedStep | None = None
    cautions: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all GPUs."""
        config = self.scenario.config
        return config.train.global_batch * config.model.sequence_length / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, 0 to 1, relative to the bf16 peak (megascale.core.flops.CONVENTION)."""
        if self.scenario.uses_closed_form_only_features:
            case = self.scenario.make_case()
            peak = self.scenario.cluster.gpu.peak_tflops * 1e12
            return float(case.flops) / (self.seconds * self.scenario.gpus * peak)
        model = self.scenario.config.model.model_copy(update={"window": self.scenario.software.window})
        peak = self.scenario.cluster.gpu.peak_tflops
        return flops.mfu(
            model,
            self.tokens_per_second,
            self.scenario.gpus,
            peak_tflops=peak,
            has_adapters=self.scenario.software.trains_adapters,
        )

    def days(self, tokens: float) -> float:
        """Return the days for training on `tokens` tokens, without failures."""
        return tokens / self.tokens_per_second / 86400.0

    def as_dict(self) -> dict[str, object]:
        """Return the fields of --json and CSV."""
        scenario = self.scenario
        parallel, train = scenario.config.parallel, scenario.config.train
        return {
            "label": scenario.label,
            "level": self.level,
            "cluster": scenario.cluster.name,
            "calibration": scenario.calibration.name,
            "gpus": scenario.gpus,
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "virtual": parallel.virtual_stages,
            "context": parallel.context,
            "data": scenario.layout.grid.shards // scenario.layout.grid.size("context"),
            "micro_batch": train.micro_batch,
            "global_batch": train.global_batch,
            "precision": scenario.software.precision,
            "recompute": scenario.software.recompute,
            "zero": parallel.zero,
            "zero3_keep_layers": parallel.zero3_keep_layers,
            "seconds": self.seconds,
            "p10": self.low,
            "p90": self.high,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "mfu_convention": flops.CONVENTION,
            "memory_gib": self.memory_gib,
            "parts": self.parts,
            "cautions": list(self.cautions),
        }


# Values of parallel.schedule that the closed level can price.
CLOSED_FORM = ("auto", "1f1b", "interleaved")


def estimate_step(
    scenario: Scenario,
    level: Level = "closed",
    *,
    network: Network | None = None,
    fleet: int | None = None,
    slow_hosts: dict[int, float] | None = None,
    jitter: bool = True,
    seed: int = 0,
    check_memory: bool = True,
) -> StepEstimate:
    """Estimate the step of a scenario.

    Args:
        level: "closed" (takes microseconds to milliseconds) or "event" (takes tens of milliseconds and more).
        network: network model; default: rings. Flow and packet models are given here.
        fleet: for the event level, seed of randomly drawn slow hosts, which replace `slow_hosts`.
        slow_hosts: for the event level, factor on the compute time by host.
        jitter: for the event level, whether compute times vary by the cluster's figure.
        seed: seed of the jitter.
        check_memory: whether a layout that does not fit the GPUs is an error.

    Raises FitError if sizes do not divide or memory is insufficient, and ConfigError if the level, the cluster or the
    calibration does not support the configuration.
    """
    case = scenario.make_case(counts_gathers=False)
    constants = scenario.calibration.constants
    _check_level(scenario, level)
    memory = scenario.memory_gib()
    _check_fit(scenario, case, memory, check_memory=check_memory)
    case = scenario.make_case()  # only if it fits, because counting gathers takes time
    _check_rates(scenario)
    scenario.layout.schedule()  # raises an error if the schedule deadlocks
    closed_parts = compute_step_parts(scenario.cluster, case, constants, network)
    parts = {name: float(value) for name, value in closed_parts.as_dict().items()}
    seconds = float(closed_parts.total)
    event = None
    if level == "event":
        if fleet is not None:
            slow_hosts = draw_hosts(scenario.cluster, case, fleet, constants.slow_by)

        def simulate_hosts(slow: dict[int, float] | None) -> SimulatedStep:
            return simulate_step(
                scenario.cluster,
                case,
                constants,
                network,
                slow_hosts=slow,
                jitter=scenario.cluster.stragglers.jitter if jitter else 0.0,
                seed=seed,
                layers=scenario.count_chunk_layers(),
                schedule=scenario.config.parallel.schedule,
            )

        event = simulate_hosts(slow_hosts)
        healthy_seconds = simulate_hosts(None).seconds if slow_hosts else event.seconds
        parts["stragglers"] = event.seconds - healthy_seconds
        parts["interplay"] = healthy_seconds - sum(value for name, value in parts.items() if name != "stragglers")
        seconds = event.seconds
    family = scenario.software.family
    launch_share = parts["host"] / seconds
    band_width = estimate_band_width(scenario.cluster, case, scenario.calibration, family, launch_share)
    low, high = (float(bound) for bound in band_width.around(seconds))
    cautions = list_cautions(scenario.cluster, case, scenario.calibration, family, launch_share)
    return StepEstimate(
        scenario,
        level,
        seconds=seconds,
        low=low,
        high=high,
        parts=parts,
        memory_gib=memory,
        event=event,
        cautions=cautions + _list_unpriced(scenario),
    )


def _check_level(scenario: Scenario, level: Level) -> None:
    """Raise ConfigError if the level cannot price the configuration."""
    parallel = scenario.config.parallel
    if level == "closed" and parallel.schedule not in CLOSED_FORM:
        raise ConfigError(
            f"parallel.schedule={parallel.schedule} has no closed form, which {', '.join(CLOSED_FORM)} have; price it "
            "event by event (--level event), or set --parallel.schedule=auto"
        )
    if level == "event" and parallel.context > 1:
        raise ConfigError(
            f"{scenario.label}: parallel.context={parallel.context} is priced in closed form only; leave out --level "
            "event"
        )
    if level == "event" and scenario.software.full_sharding:
        raise ConfigError(f"{scenario.label}: full sharding is priced in closed form only; leave out --level event")


def _check_fit(scenario: Scenario, case: Case, memory: float, *, check_memory: bool) -> None:
    """Raise FitError if the experts of a rough estimate do not divide, or if memory is insufficient.

    Args:
        memory: GiB of the fullest rank.
    """
    if scenario.uses_closed_form_only_features:
        if not bool(case.fits()):
            raise FitError(
                f"{scenario.label}: --experts={scenario.experts}, --top-k={scenario.top_k}, "
                f"--expert-parallel={scenario.expert_parallel} do not divide: experts over their ranks, replicas over "
                "them, and a token's experts must be at most all experts"
            )
        return
    gpu = scenario.cluster.gpu
    if not check_memory or memory <= gpu.memory_gib:
        return
    memory_note = ""
    if not scenario.software.is_memory_modelled:
        memory_note = f" (the figure is this engine's; {scenario.label} needs another amount)"
    raise FitError(
        f"{scenario.label}: the fullest rank needs {memory:.1f} GiB and a {gpu.name} has "
        f"{gpu.memory_gib:g}{memory_note}; raise parallel.tensor, parallel.pipeline or the number "
        "of GPUs, lower train.micro_batch, set parallel.recompute=full, or price it all the same with --no-memory"
    )


def _check_rates(scenario: Scenario) -> None:
    """Raise ConfigError if the cluster lacks a rate that the configuration or the software needs."""
    cluster, software = scenario.cluster, scenario.software
    train = scenario.config.train
    is_set = "precision" in train.model_fields_set
    if is_set and train.precision != "bfloat16" and cluster.gpu.name != "cpu":
        raise ConfigError(
            f"train.precision={train.precision} has no price: the rates of {cluster.name} are those of bfloat16; set "
            "--train.precision=bfloat16 (`megascale plan` gives memory and FLOPs in any precision)"
        )
    if software.float8 and cluster.gpu.float8_tflops is None:
        raise ConfigError(
            f"train.linear_precision={scenario.config.train.linear_precision}: cluster {cluster.name} gives "
            f"{cluster.gpu.name} no float8 rate (gpu.float8_tflops); set --train.linear_precision=default or "
            "name another --cluster"
        )
    if software.attention not in ("unfused", *cluster.kernels.attention):
        raise ConfigError(
            f"cluster {cluster.name} gives no rate for attention kernel {software.attention!r} of "
            f"{scenario.label}; name a stack with one of its kernels ({', '.join(cluster.kernels.attention)}), such as "
            f"megatron-core-h200 for cudnn, or add kernels.attention.{software.attention} to its file"
        )


def _list_unpriced_settings(scenario: Scenario) -> list[str]:
    """Return sentences on settings of this engine's kernels that the estimate does not price."""
    kernel = scenario.config.kernels.attention
    if kernel == "auto" or kernel in ATTENTION:
        return []
    return [f"kernels.attention={kernel} has no rates: attention is priced with those of {scenario.software.attention}"]


def _list_unpriced(scenario: Scenario) -> tuple[str, ...]:
    """Return sentences on what the estimate does not price, or has not been compared with measurements."""
    notes = []
    if not scenario.software.is_memory_modelled:
        notes.append(f"memory is this engine's: that of {scenario.label} is not modelled (--no-memory skips the check)")
    if requests_float8(scenario.config) and not scenario.software.float8:
        notes.append(f"{scenario.label} has no float8: it is priced in bfloat16")
    if not scenario.is_baseline:
        notes += _list_unpriced_settings(scenario)
    if scenario.software.trains_adapters:
        notes.append(
            "train.lora: the kernels and messages of adapters have no price, and no measured step was compared"
        )
    optimizer = scenario.config.optimizer.name
    if optimizer != "adamw":
        notes.append(f"optimizer.name={optimizer}: its update is priced as that of adamw")
    if scenario.config.data.document_mask:
        notes.append("data.document_mask: attention is priced over whole sequences, which takes longer")
    if scenario.config.optimizer.offload:
        notes.append("optimizer.offload moves state over the host's bus in each update, which has no price")
    if scenario.config.parallel.zero3_keep_layers and not scenario.software.unit_slots:
        notes.append("parallel.zero3_keep_layers saves gathers of this engine only")
    if scenario.uses_closed_form_only_features:
        notes.append("experts: not compared with any measured step, and not counted in the memory")
    if scenario.config.parallel.context > 1:
        notes.append("context parallelism: not compared with any measured step")
    return tuple(notes)
