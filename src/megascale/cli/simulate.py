"""`megascale simulate`: the command group, and `simulate step`, which predicts a step. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli import simulate_network
from megascale.cli.common import JSON, OVERRIDES, check_finite, make_console, print_choice, print_json
from megascale.cli.simulate_effective import effective
from megascale.cli.simulate_measured import CALIBRATION, SOFTWARE, calibrate, compare, measure, predict
from megascale.cli.simulate_options import (
    CHOICE_REASON,
    CLUSTER,
    CSV,
    FILE,
    GPUS,
    LEVEL,
    MEMORY,
    PLOT,
    PRICE,
    TOKENS,
    WATTS,
    load_scenario,
    make_baseline,
    parse_level,
    write_csv,
)
from megascale.cli.simulate_search import search
from megascale.cli.simulate_series import ablate, sweep
from megascale.errors import ConfigError

if TYPE_CHECKING:
    from megascale.simulate.fabric_study import StepOnNetwork
    from megascale.simulate.run_cost import RunCost
    from megascale.simulate.scenario import Scenario
    from megascale.simulate.step import StepEstimate

_HELP = """Predict step time, MFU, days and memory of any layout on thousands of GPUs, without needing a GPU.

Two levels behind one interface: a closed-form model, which runs in milliseconds, and the schedule's own actions event
by event (--level event). Constants come from measurements, each with its source. In a clone of the repository,
`python -m benchmarks simulator` prints the prediction errors.

  megascale simulate step examples/gpt-175b.toml --gpus 12288

  megascale simulate search examples/gpt-175b.toml --gpus 1024:16384 --days 2
"""


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode="markdown")
    # OVERRIDES lets typer pass --section.key=value, which it does not know, as `context.args`.
    for layout_command in (step, ablate, sweep, search, effective):
        group.command(context_settings=OVERRIDES)(layout_command)
    for command in (calibrate, measure, predict, compare):
        group.command()(command)
    app.add_typer(group, name="simulate")


def step(
    context: typer.Context,
    file: Path | None = FILE,
    gpus: int = GPUS,
    cluster: str = CLUSTER,
    calibration: str | None = CALIBRATION,
    software: str | None = SOFTWARE,
    against: str = typer.Option(
        "auto",
        "--against",
        help="Stack to compare with; 'auto': Megatron-Core, on A100 the paper's baseline; 'none': no comparison.",
    ),
    level: str = LEVEL,
    slow_hosts: float | None = typer.Option(
        None,
        "--slow-hosts",
        min=0,
        max=1,
        callback=check_finite,
        help="Share of hosts that are slow; default: the cluster's value.",
    ),
    seed: int = typer.Option(0, "--seed", help="Event level: seed of slow hosts and jitter."),
    tokens: float = TOKENS,
    price: float | None = PRICE,
    watts: float | None = WATTS,
    memory: bool = MEMORY,
    experts: int = typer.Option(1, "--experts", min=1, help="Experts of each layer, each as wide as the MLP."),
    top_k: int = typer.Option(1, "--top-k", min=1, help="Experts per token."),
    expert_parallel: int = typer.Option(1, "--expert-parallel", min=1, help="Ranks that share the experts."),
    as_json: bool = JSON,
    csv: Path | None = CSV,
    plot: Path | None = PLOT,
    trace: Path | None = typer.Option(
        None, "--trace", metavar="FILE.json", help="Event level: timeline for ui.perfetto.dev (.gz compresses)."
    ),
    fabric: str | None = simulate_network.FABRIC,
    fabric_changes: list[str] = simulate_network.FABRIC_CHANGES,
    placement: str = simulate_network.PLACEMENT,
    queue_pairs: int = simulate_network.QUEUE_PAIRS,
    job_starts: int = simulate_network.JOB_STARTS,
    outages: list[str] = simulate_network.OUTAGES,
    outage_at: float = simulate_network.OUTAGE_SECOND,
) -> None:
    """Predict step time (with a breakdown), training days and memory, and compare MegaScale with Megatron-LM.

    Exit 3, with the reason, for a layout that does not divide or does not fit the memory.

    Examples:

      megascale simulate step --model.preset=llama-8b --gpus 8

      megascale simulate step examples/gpt-175b.toml --gpus 12288 --cluster a100-roce

      megascale simulate step examples/gpt-175b.toml --gpus 1024 --train.global_batch=768 --level event --trace t.json

      megascale simulate step --model.preset=gpt-13b --gpus 8 --cluster h200-host --parallel.tensor=2 --json

      megascale simulate step examples/gpt-175b.toml --gpus 12288 --cluster a100-roce --fabric megascale
    """
    from megascale.simulate import perfetto, simulation_plots
    from megascale.simulate.cluster import set_value
    from megascale.simulate.run_cost import estimate_run_cost
    from megascale.simulate.step import estimate_step

    if trace is not None:
        level = "event"  # a timeline needs the events
    step_level = parse_level(level)
    scenario, is_chosen = load_scenario(
        file, context.args, gpus=gpus, cluster=cluster, calibration=calibration, software=software
    )
    scenario = replace(scenario, experts=experts, top_k=top_k, expert_parallel=expert_parallel)
    if scenario.uses_closed_form_only_features and step_level == "event":
        raise ConfigError("experts are modelled in closed form only; omit --level event and --trace")
    if slow_hosts is not None:
        scenario = replace(scenario, cluster=set_value(scenario.cluster, "stragglers", "slow_hosts", slow_hosts))
    # The scenario itself comes last, so that its values stand at the end of each output.
    scenarios = [scenario]
    if against != "none":
        scenarios.insert(0, make_baseline(scenario, None if against == "auto" else against, calibration))
    network = simulate_network.choose_network(
        fabric,
        fabric_changes,
        placement=placement,
        queue_pairs=queue_pairs,
        job_starts=job_starts,
        outages=outages,
        outage_second=outage_at,
        seed=seed,
    )
    network_results: list[StepOnNetwork] = []
    # `fleet` is the seed that chooses the slow hosts, `seed` that of jitter.
    if network is None:
        results = [estimate_step(item, step_level, fleet=seed, seed=seed, check_memory=memory) for item in scenarios]
    else:
        from megascale.simulate.fabric_study import estimate_steps_on_network

        with simulate_network.show_progress(network, gpus):
            network_results = estimate_steps_on_network(
                scenarios, network, level=step_level, fleet=seed, seed=seed, check_memory=memory
            )
        results = [result.median for result in network_results]
    costs = [estimate_run_cost(result, tokens, share=1.0, price=price, watts=watts) for result in results]
    if as_json:
        _print_records(results, costs, network_results)
    else:
        _print_tables(results, costs[-1], tokens=tokens, chosen_scenario=scenario if is_chosen else None)
        if network is not None:
            simulate_network.print_network(network_results, network, make_console())
    if csv is not None:
        write_csv([result.as_dict() for result in results], csv)
    if plot is not None:
        simulation_plots.plot_waterfall(results, plot)
    if trace is not None:
        if results[-1].event is None:
            raise ConfigError("--trace needs --level event")
        count = perfetto.write_step_trace(results[-1], trace)
        if not as_json:
            typer.echo(f"{count:,} events in {trace}; open it at https://ui.perfetto.dev")


def _print_records(results: list[StepEstimate], costs: list[RunCost], network_results: list[StepOnNetwork]) -> None:
    """Print a record per scenario as JSON.

    Args:
        network_results: a result per scenario, or an empty list without --fabric.
    """
    records = [result.as_dict() | {"cost": cost.as_dict()} for result, cost in zip(results, costs, strict=True)]
    for record, network_result in zip(records, network_results, strict=False):
        record["network"] = network_result.as_dict()
    print_json(records, indent=2)


def _print_tables(
    results: list[StepEstimate], cost: RunCost, *, tokens: float, chosen_scenario: Scenario | None
) -> None:
    """Print the steps, the cost of the last scenario, and the differences between the scenarios.

    Args:
        chosen_scenario: scenario whose layout or batch the command has chosen, or None.
    """
    from megascale.simulate import render

    console = make_console()
    render.print_summary(results, tokens, console)
    if chosen_scenario is not None:
        print_choice(chosen_scenario.config, CHOICE_REASON)
    render.print_cost(cost, console)
    render.print_waterfall(results, console)
    _print_slow_hosts(results, console)


def _print_slow_hosts(results: list[StepEstimate], console: Any) -> None:
    """Print the number and the cost of slow hosts, for results of the event level."""
    for result in results:
        if result.event is None:
            continue
        slow_count = int((result.event.slow > 1).sum())  # event.slow: slowdown factor by replica and stage
        cost_share = result.parts["stragglers"] / result.seconds
        console.print(
            f"[dim]{result.scenario.label}: {slow_count} of {result.event.slow.size:,} (replica, stage) pairs on a "
            f"slow host; they cost {cost_share:.2%} of the step[/dim]"
        )
