"""`megascale simulate search`: the fastest layouts on N GPUs, or the fewest GPUs that meet a deadline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import (
    JSON,
    check_finite,
    check_picture,
    join_arguments,
    make_console,
    parse_numbers,
    print_choice,
    print_json,
    show_progress,
    write_text,
)
from megascale.cli.simulate_measured import CALIBRATION, SOFTWARE
from megascale.cli.simulate_options import (
    CLUSTER,
    CSV,
    FILE,
    MEMORY,
    PRICE,
    TOKENS,
    WATTS,
    load_scenario,
    print_skipped,
    write_csv,
)
from megascale.errors import ConfigError, FitError

if TYPE_CHECKING:
    from megascale.config import Config
    from megascale.simulate.run_cost import RunCost
    from megascale.simulate.scenario import Scenario
    from megascale.simulate.step import StepEstimate

_TOML = typer.Option(
    None, "--toml", metavar="FILE", help="Write the first layout's configuration for `megascale train`."
)
_MAX_LISTED_LAYOUTS = 5
_LAYOUTS_PER_VARIANT = 4  # fastest layouts that are kept per batch, precision and value of parallel.zero
_RECOMPUTE_MODES = ("none", "norms", "activation", "selective", "full")  # default of --recompute
_LINEAR_PRECISIONS = {"bfloat16": "default", "float8": "float8"}  # train.linear_precision by value of --precisions
_SENSITIVITY_CHANGE = 0.2  # relative change of each input of the cluster model, up and down
_MIN_SHOWN_CHANGE = 0.0005  # a smaller change of the step time would be printed as 0.0%


def search(
    context: typer.Context,
    file: Path | None = FILE,
    gpus: str = typer.Option(..., "--gpus", metavar="N|A:B", help="Number of GPUs, or the range to search."),
    days: float | None = typer.Option(
        None, "--days", min=0, max=1e9, callback=check_finite, help="Deadline: find the fewest GPUs that meet it."
    ),
    tokens: float = TOKENS,
    effective_share: float | None = typer.Option(
        None,
        "--effective",
        min=0.01,
        max=1,
        callback=check_finite,
        help="Effective training time, as a share; default 1 (see --faults).",
    ),
    faults: bool = typer.Option(
        False, "--faults", help="Estimate the effective training time from faults of hosts, per number of GPUs."
    ),
    batches: str | None = typer.Option(
        None, "--batches", metavar="A,B", help="Global batches to try; default: the file's."
    ),
    precisions: str | None = typer.Option(
        None, "--precisions", help="bfloat16, float8 or both, comma-separated; default: the file's."
    ),
    recompute: str | None = typer.Option(
        None,
        "--recompute",
        help="Values of parallel.recompute, comma-separated; default: all, or the value on the command line.",
    ),
    zero: str | None = typer.Option(
        None, "--zero", help="Values of parallel.zero, comma-separated; default: 1,2,3, or the value that is set."
    ),
    memory: bool = MEMORY,
    price: float | None = PRICE,
    watts: float | None = WATTS,
    cluster: str = CLUSTER,
    calibration: str | None = CALIBRATION,
    software: str | None = SOFTWARE,
    as_json: bool = JSON,
    csv: Path | None = CSV,
    toml: Path | None = _TOML,
    plot: Path | None = typer.Option(
        None, "--plot", metavar="FILE.png", help="Draw the sensitivities of the answer.", callback=check_picture
    ),
) -> None:
    """Find the best layouts for N GPUs, or the fewest GPUs that meet a deadline. Checks memory; prints sensitivities.

    Settings of the layout on the command line are kept: --parallel.tensor, context, pipeline, virtual_stages, data,
    zero, zero3_keep_layers, recompute and --train.micro_batch. Otherwise ZeRO-3 keeps as many layers gathered as fit,
    as `megascale plan` does. A file's layout is replaced. The simulator does not model convergence, so
    it varies the global batch only over the values in --batches.

    Examples:

      megascale simulate search examples/gpt-175b.toml --gpus 12288

      megascale simulate search examples/gpt-175b.toml --gpus 64:16384 --days 2 --faults --price 2.5

      megascale simulate search --model.preset=llama-8b --gpus 8 --precisions bfloat16,float8 --toml job.toml
    """
    from megascale.simulate import render, simulation_plots
    from megascale.simulate.run_cost import estimate_run_cost
    from megascale.simulate.sensitivity import compute_sensitivities

    min_gpus, max_gpus = _parse_gpu_range(gpus)
    if effective_share is not None and faults:
        raise ConfigError("--effective gives the share that --faults would estimate; give only one of them")
    base, _ = load_scenario(
        file,
        context.args,
        gpus=max_gpus,
        cluster=cluster,
        calibration=calibration,
        software=software,
        chooses_layout=False,
    )
    zero_values = _parse_zero(zero, base.config)
    arguments = join_arguments(file, context.args)
    layout_finder = _LayoutFinder(
        min_gpus=min_gpus,
        max_gpus=max_gpus,
        recompute_modes=_choose_recompute_modes(recompute, base.config, arguments=arguments),
        fixed_sizes=_list_fixed_sizes(base.config, arguments),
        tokens=tokens,
        days=days,
        checks_memory=memory,
        estimates_faults=faults,
        given_share=1.0 if effective_share is None else effective_share,
        gpus_per_host=base.cluster.gpus_per_host,
        chooses_kept_layers=not _is_on_command_line("parallel.zero3_keep_layers", base.config, arguments=arguments),
    )
    variants = _list_variants(base, batches, precisions=precisions, zero_values=zero_values)
    results, skipped = layout_finder.find_layouts(variants)
    title = _sort_layouts(results, tokens, days)
    if not (batches or precisions):  # with these options each variant must be listed
        del results[_MAX_LISTED_LAYOUTS:]
    best = results[0]
    shares = [float(layout_finder.estimate_effective_share(result.scenario.gpus)) for result in results]
    costs = []
    for result, share in zip(results, shares, strict=True):
        costs.append(estimate_run_cost(result, tokens, share=share, price=price, watts=watts))
    # By input of the cluster model: relative change of the step time for (a lower input, a higher input).
    sensitivities = compute_sensitivities(best.scenario, _SENSITIVITY_CHANGE)
    if as_json:
        records = [result.as_dict() | {"cost": cost.as_dict()} for result, cost in zip(results, costs, strict=True)]
        print_json({"layouts": records, "sensitivities": sensitivities, "left_out": skipped}, indent=2)
    else:
        console = make_console()
        searched = layout_finder.describe(zero_values)
        console.print(f"searched: {searched}, {shares[0]:.0%} effective training time", soft_wrap=True)
        days_by_layout = [result.days(tokens) / share for result, share in zip(results, shares, strict=True)]
        render.print_layouts(results, console, title, days_by_layout)
        _print_best(best, costs[0], skipped=skipped, console=console)
        _print_sensitivities(sensitivities, console)
    if toml is not None:
        write_text(toml, best.scenario.config.to_toml(), "--toml")
    if csv is not None:
        write_csv([result.as_dict() for result in results], csv)
    if plot is not None:
        title = f"{best.scenario.gpus:,} GPUs, {best.seconds:.2f} s per step"
        simulation_plots.plot_tornado(sensitivities, _SENSITIVITY_CHANGE, path=plot, title=title)


@dataclass(frozen=True)
class _LayoutFinder:
    """Search for layouts that `search` repeats for each variant of the scenario.

    Attributes:
        min_gpus, max_gpus: range of --gpus.
        recompute_modes: values of parallel.recompute to search.
        fixed_sizes: sizes of the layout that the command line sets, by column of the search's result.
        tokens: training tokens of the run.
        days: deadline of the run, or None to search for the fastest layout on the most GPUs.
        checks_memory: whether layouts that exceed the memory are rejected.
        estimates_faults: whether the share of effective training time is estimated from faults of hosts.
        given_share: share of effective training time if it is not estimated.
        gpus_per_host: number of GPUs of each host.
        chooses_kept_layers: whether as many layers as fit stay gathered under ZeRO-3.
    """

    min_gpus: int
    max_gpus: int
    recompute_modes: list[str]
    fixed_sizes: dict[str, int]
    tokens: float
    days: float | None
    checks_memory: bool
    estimates_faults: bool
    given_share: float
    gpus_per_host: int
    chooses_kept_layers: bool

    def find_layouts(self, variants: list[Scenario]) -> tuple[list[StepEstimate], list[str]]:
        """Return the best layouts of all variants, and the reason of each variant without a layout.

        Raises FitError with these reasons if no variant has a layout.
        """
        results: list[StepEstimate] = []
        skipped: list[str] = []
        for variant in variants:
            config = variant.config
            try:
                results += self._find_variant_layouts(variant)
            except FitError as error:
                reason = str(error).splitlines()[0]
                description = f"{variant.label}, batch {config.train.global_batch:,}, ZeRO-{config.parallel.zero}"
                skipped.append(f"{description}: {reason}")
        if not results:
            raise FitError("\n".join(skipped))
        return results, skipped

    def _find_variant_layouts(self, variant: Scenario) -> list[StepEstimate]:
        """Return the fastest layouts on the most GPUs, or on the fewest that meet the deadline.

        Raises FitError if no layout divides, fits the memory and meets the deadline.
        """
        from megascale.simulate import search as layout_search

        layouts = layout_search.search_layouts(
            variant.config,
            variant.cluster,
            calibration=variant.calibration,
            software=variant.software,
            low=self.min_gpus,
            high=self.max_gpus,
            recompute=self.recompute_modes,
            fixed=self.fixed_sizes,
        )
        gpu_count = int(layouts.gpus.max())
        if self.days is not None:
            fewest_gpus_layout = layout_search.find_fewest_gpus(
                layouts,
                variant.config,
                scenario=variant,
                tokens=self.tokens,
                days=self.days,
                time_share=self.estimate_effective_share,
                check_memory=self.checks_memory,
            )
            gpu_count = fewest_gpus_layout.scenario.gpus
        with show_progress(f"comparing layouts on {gpu_count:,} GPUs") as report:
            return layout_search.find_fastest(
                layouts,
                variant.config,
                scenario=variant,
                gpus=gpu_count,
                count=_LAYOUTS_PER_VARIANT,
                check_memory=self.checks_memory,
                chooses_kept_layers=self.chooses_kept_layers,
                report=report,
            )

    def estimate_effective_share(self, gpu_counts: Any) -> Any:
        """Return the share of effective training time for a number of GPUs, or for an array of numbers."""
        from megascale.simulate.effective import FaultRates, estimate_first_order_share

        if self.estimates_faults:
            return estimate_first_order_share(FaultRates(), gpu_counts / self.gpus_per_host)
        return gpu_counts * 0.0 + self.given_share  # the product gives the share the shape of gpu_counts

    def describe(self, zero_values: list[int]) -> str:
        """Return the searched values as options, and the sizes that the command line sets."""
        text = f"--recompute={','.join(self.recompute_modes)} --zero={','.join(map(str, zero_values))}"
        return text + "".join(f", {column} {size} as given" for column, size in self.fixed_sizes.items())


def _parse_gpu_range(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of GPUs of --gpus. They are equal for a single number."""
    first, colon, last = text.partition(":")
    try:
        min_gpus = int(first)
        max_gpus = int(last) if colon else min_gpus
    except ValueError:
        raise ConfigError(f"--gpus={text!r} is neither a number nor a range such as 1024:16384") from None
    if not 1 <= min_gpus <= max_gpus:
        raise ConfigError(f"--gpus={text!r}: a range rises from a number of at least 1, such as 1024:16384")
    return min_gpus, max_gpus


def _choose_recompute_modes(option: str | None, config: Config, *, arguments: list[str]) -> list[str]:
    """Return the values of parallel.recompute to search: those of --recompute, else the value that is set, else all.

    Args:
        option: text of --recompute, or None.
        config: resolved configuration, which has a value of parallel.recompute in every case.
        arguments: settings of the command line.

    Raises:
        ConfigError: --recompute has an unknown value.
    """
    from megascale.simulate.software import ENGINE_RECOMPUTE

    if option is None:
        if _is_on_command_line("parallel.recompute", config, arguments=arguments):
            return [config.parallel.recompute]
        return list(_RECOMPUTE_MODES)
    modes = option.split(",")
    for mode in modes:
        if mode not in ENGINE_RECOMPUTE:
            raise ConfigError(f"--recompute={option}: {mode!r} is unknown; choose among {', '.join(ENGINE_RECOMPUTE)}")
    return modes


def _is_on_command_line(key: str, config: Config, *, arguments: list[str]) -> bool:
    """Return whether the command line sets a key of the configuration, such as parallel.tensor.

    Hyphens in the key count as underscores, as in all settings.

    Args:
        config: the configuration of the command line. A key whose value is "unset" is not set in it.
        arguments: all arguments, the first one included, which typer passes as FILE if there is no file.
    """
    from megascale.simulate.defaults import is_set

    options = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    keys = {option.removeprefix("--").replace("-", "_") for option in options}
    return key in keys and is_set(config, key)


def _list_fixed_sizes(config: Config, arguments: list[str]) -> dict[str, int]:
    """Return the sizes of the layout that the command line sets, by column of the search's result."""
    columns_and_sizes: dict[str, tuple[str, int | None]] = {  # by key of the configuration
        "parallel.tensor": ("tensor", config.parallel.tensor),
        "parallel.context": ("context", config.parallel.context),
        "parallel.pipeline": ("pipeline", config.parallel.pipeline),
        "parallel.virtual_stages": ("virtual", config.parallel.virtual_stages),
        "parallel.data": ("data", config.parallel.data),
        "train.micro_batch": ("micro", config.train.micro_batch),
    }
    fixed_sizes = {}
    for key, (column, size) in columns_and_sizes.items():
        if size is not None and _is_on_command_line(key, config, arguments=arguments):
            fixed_sizes[column] = size
    return fixed_sizes


def _parse_zero(text: str | None, config: Config) -> list[int]:
    """Return the values of parallel.zero to search: those of --zero, else the value that is set, else 1, 2 and 3.

    A configuration with LoRA keeps its value, since LoRA excludes ZeRO-3. Raises ConfigError for unknown values.
    """
    from megascale.simulate.defaults import SHARDINGS, is_set

    if text is not None:
        values = parse_numbers("--zero", text, "1,3")
        for value in values:
            if value not in (0, 1, 2, 3):
                raise ConfigError(f"--zero={text}: {value} is unknown; choose among 0, 1, 2, 3")
        return values
    if is_set(config, "parallel.zero") or config.train.lora is not None:
        return [config.parallel.zero]
    return list(SHARDINGS)


def _list_variants(
    base: Scenario, batches: str | None, *, precisions: str | None, zero_values: list[int]
) -> list[Scenario]:
    """Return a scenario per combination of precision, global batch and parallel.zero, labelled by its precision.

    Raises ConfigError for unknown or unsupported values.
    """
    from megascale.simulate.search import set_zero
    from megascale.simulate.series import vary_scenario

    global_batches = [base.config.train.global_batch]
    if batches:
        global_batches = parse_numbers("--batches", batches, "1536,3072,6144")
    variants = []
    names = precisions.split(",") if precisions else [""]  # "": the precision that is configured
    for precision in names:
        if precision not in ("", "bfloat16", "float8"):
            raise ConfigError(f"--precisions={precisions!r}: {precision!r} is unknown; choose bfloat16 or float8")
        if precision == "float8" and base.cluster.gpu.float8_tflops is None:
            raise ConfigError(
                f"--precisions=float8: cluster {base.cluster.name} has no float8 rate of {base.cluster.gpu.name}; set "
                "gpu.float8_tflops in a cluster file"
            )
        scenario = base
        if precision:
            scenario = vary_scenario(base, "train.linear_precision", _LINEAR_PRECISIONS[precision])
        scenario = replace(scenario, label=precision or base.software.precision)
        for global_batch in global_batches:
            scenario_of_batch = vary_scenario(scenario, "train.global_batch", global_batch)
            for zero in zero_values:
                variants.append(scenario_of_batch.with_config(set_zero(scenario_of_batch.config, zero)))
    return variants


def _sort_layouts(results: list[StepEstimate], tokens: float, days: float | None) -> str:
    """Sort layouts, the best one first, and return the title of their table.

    Args:
        tokens: training tokens of the run.
        days: deadline of the run; None: the fastest layout is the best.
    """
    if days is not None:
        results.sort(key=lambda result: (result.scenario.gpus, result.days(tokens)))
        return f"fewest GPUs for {tokens:.3g} tokens in {days:g} days"
    results.sort(key=lambda result: result.days(tokens))
    return f"fastest layouts on {results[0].scenario.gpus:,} GPUs"


def _print_best(best: StepEstimate, cost: RunCost, *, skipped: list[str], console: Any) -> None:
    """Print the assumptions, the cost and the options of the best layout, and the variants without a layout."""
    from megascale.simulate import render

    render.print_assumptions([best], console)
    render.print_cost(cost, console)
    print_skipped(skipped, console)
    print_choice(best.scenario.config, "the first, to paste:")


def _print_sensitivities(sensitivities: dict[str, tuple[float, float]], console: Any) -> None:
    """Print how the step time changes with each input of the cluster model, except inputs without effect."""
    from megascale.simulate import render

    rows = []
    for name, (change_if_lower, change_if_higher) in sensitivities.items():
        if max(abs(change_if_lower), abs(change_if_higher)) >= _MIN_SHOWN_CHANGE:
            rows.append([name, f"{change_if_lower:+.1%}", f"{change_if_higher:+.1%}"])
    percent = f"{_SENSITIVITY_CHANGE:.0%}"
    headers = ["figure of the machine", f"{percent} less", f"{percent} more"]
    render.show_rows(headers, rows, console=console, title="change of the step's time")
