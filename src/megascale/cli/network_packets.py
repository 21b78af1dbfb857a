"""`megascale network packets|tune|validate`: simulate packets, choose timers, check the simulation."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import (
    JSON,
    check_finite,
    check_picture,
    make_console,
    print_json,
    require_package,
    split_option,
    write_text,
)
from megascale.errors import ConfigError

if TYPE_CHECKING:
    from megascale.simulate.fabric.flaps import Advice

_PLOT = typer.Option(None, "--plot", metavar="FILE.png", help="Draw a picture.", callback=check_picture)

_VERDICTS = {True: ("pass ", "green"), False: ("miss ", "red")}  # (text, colour) by whether a target is reached
_ON_OFF = {True: "on", False: "off"}
_DRAWS = 60  # other sets of flaps for which the advice of `tune` is checked
_ENOUGH_FLAPS = 30  # With fewer observed flaps, `tune` recommends collecting more.


def packets(
    pattern: str = typer.Option("permutation", "--pattern", help="permutation, incast, all-to-all, shuffle."),
    control: str = typer.Option(
        "dcqcn,swift,hybrid-both,hybrid-cut", "--control", help="none, dcqcn, swift, hybrid-both, hybrid-cut."
    ),
    dcqcn: str = typer.Option("fast", "--dcqcn", help="Parameter set: paper, hpcc, hpcc-paper, fast."),
    target_us: float | None = typer.Option(
        None, "--swift-base-us", min=0.1, max=1e6, callback=check_finite, help="Swift's base target delay, in us."
    ),
    hosts: int = typer.Option(64, "--hosts", min=2, help="Hosts with one NIC each, under leaf switches of 8."),
    changes: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Change a key of the fabric; repeatable."),
    tiers: int = typer.Option(3, "--tiers", help="Tiers of switches: 2 or 3."),
    mb: float = typer.Option(2.0, "--mb", max=1e6, callback=check_finite, help="Size of a flow, in 10^6 bytes."),
    senders: int = typer.Option(32, "--senders", help="Senders of incast and all-to-all."),
    pfc: bool = typer.Option(True, "--pfc/--no-pfc", help="Switches pause their neighbours (PFC)."),
    tuned: bool = typer.Option(False, "--tuned", help="Tune DCQCN and Swift on this traffic first, by a grid."),
    seed: int = typer.Option(0, "--seed", help="Seed of hashes and marking."),
    as_json: bool = JSON,
    plot: Path | None = _PLOT,
) -> None:
    """Simulate the same traffic under several congestion controls, packet by packet, on 200G NICs and 400G switches.

    The MegaScale paper gives no equations of its control, so hybrid-both and hybrid-cut are two interpretations.

    Examples:

      megascale network packets --pattern incast --senders 32

      megascale network packets --pattern all-to-all --senders 64 --mb 0.25 --tuned --plot all-to-all.png
    """
    from rich.console import Console

    from megascale.simulate.fabric.control_settings import SETS, SwiftSettings
    from megascale.simulate.fabric.fabric_spec import parse_changes
    from megascale.simulate.fabric.max_min import compute_finish_times

    require_package("numba", "network")
    from megascale.simulate.fabric import patterns
    from megascale.simulate.fabric.packets import PacketSettings, compare_controls

    if dcqcn not in SETS:
        raise ConfigError(f"--dcqcn={dcqcn!r} is unknown; choose one of {', '.join(SETS)}")
    if tiers not in (2, 3):
        raise ConfigError(f"--tiers={tiers} is not supported; use 2 or 3 tiers of switches")
    if target_us is None:
        swift = SwiftSettings()
    else:
        swift = replace(SwiftSettings(), base_us=target_us)
    settings = PacketSettings(dcqcn=SETS[dcqcn], swift=swift, pfc=pfc, seed=seed)
    fabric = patterns.build_small_fabric(hosts, tiers, **parse_changes(changes))
    traffic = patterns.make_traffic(fabric, pattern, size=mb * 1e6, senders=senders, seed=seed)
    subtitle = f"DCQCN set {dcqcn!r}"
    if tuned:
        from megascale.simulate.fabric.fair_tuning import tune_controls

        settings, subtitle = tune_controls(traffic, settings)
    with Console(stderr=True).status("packets") as status:
        results = compare_controls(
            fabric,
            traffic.flows,
            paths=traffic.paths,
            settings=settings,
            controls=tuple(control.split(",")),
            progress=lambda name, share: status.update(f"{name}: {share:.0%} of the packets have arrived"),
        )
    rows = {name: patterns.summarise_result(result, traffic) for name, result in results.items()}
    # Finish of the flows in us at the flow level, which shares links fairly without packets or queues.
    bandwidth = patterns.get_fluid_bandwidth(fabric, settings)
    fluid_us = compute_finish_times(traffic.paths, traffic.flows.size, bandwidth) * 1e6
    title = f"{pattern}, {len(traffic.flows)} flows of {mb:g} MB on {hosts} hosts"
    if as_json:
        print_json(rows | {"fluid": {"mean_us": float(fluid_us.mean()), "max_us": float(fluid_us.max())}}, indent=2)
    else:
        _print_packets(rows, fluid_us, f"{title}\n{subtitle}")
        speeds = [f"{name} {result.packets_per_second / 1e6:.2f}" for name, result in results.items()]
        typer.echo(f"million packets per second and core: {', '.join(speeds)}")
    if plot is not None:
        from megascale.simulate.fabric.fabric_plots import plot_controls

        plot_controls(rows, plot, title)


def _print_packets(rows: dict[str, dict[str, float]], fluid_us: Any, title: str) -> None:
    """Print a row per congestion control, and one for the flow level, whose finish times are `fluid_us` (array)."""
    from megascale.simulate.render import show_rows

    columns = ("", "mean", "P99", "last", "GB/s", "queue", "RTT", "pauses", "paused", "drops")
    keys = ("mean_us", "p99_us", "max_us", "gbs", "queue_kb", "rtt_us", "pauses", "pause_us", "drops")
    cells = []
    for name, row in rows.items():
        cells.append([name] + [f"{row[key]:,.0f}" if key in row else "-" for key in keys])
    fluid_cells = ["max-min", f"{fluid_us.mean():,.0f}", "", f"{fluid_us.max():,.0f}"]
    cells.append(fluid_cells + [""] * (len(columns) - len(fluid_cells)))
    console = make_console()
    show_rows(columns, cells, console, title)
    console.print(
        "[dim]us: finish of flows (mean, P99, last), mean round trip, time that links were paused by PFC; KB: largest "
        "queue; max-min: the flow level, without queues[/dim]",
        soft_wrap=True,
    )


def tune(
    flaps: str = typer.Option(
        ..., "--flaps", help="Median seconds of a flap, or a file of seconds, one flap per line."
    ),
    sigma: float = typer.Option(
        1.0,
        "--sigma",
        min=0,
        max=100,
        callback=check_finite,
        help="Spread of ln(seconds) if a median is given; the default is an assumption.",
    ),
    per_day: float = typer.Option(
        1.0, "--per-day", min=0, max=1e9, callback=check_finite, help="Flaps of the complete job per day."
    ),
    restart: float = typer.Option(
        600.0, "--restart", min=0, help="Seconds that the job loses if NCCL gives up; the default is an assumption."
    ),
    dead: float = typer.Option(
        0.02,
        "--dead",
        min=0,
        max=1,
        callback=check_finite,
        help="Share of failed links that stay down; the default is an assumption.",
    ),
    adaptive: str = typer.Option("either", "--adaptive", help="NIC's adaptive retransmission: on, off or either."),
    out: Path | None = typer.Option(
        None, "--out", metavar="FILE.env", help="Write the file for launch's resilience.environment."
    ),
    as_json: bool = JSON,
    plot: Path | None = _PLOT,
) -> None:
    """Choose timers for links that flap: NCCL_IB_TIMEOUT, NCCL_IB_RETRY_CNT and the NIC's adaptive retransmission.

    Weighs jobs that abort, idle time after the link is back, and the delay until a dead link is reported. Prints the
    uncertainty of the advice.

    Examples:

      megascale network tune --flaps 3 --per-day 1 --out network.env

      megascale launch examples/stdlib.toml --resilience.environment=network.env
    """
    from megascale.simulate.fabric.flaps import MAX_RETRIES, advise_timers, format_environment, read_durations

    # --flaps is a number of seconds or the name of a file.
    median: float | None = None
    durations = None
    try:
        median = float(flaps)
    except ValueError:
        durations = read_durations(Path(flaps))
    modes = {"on": True, "off": False, "either": None}
    if adaptive not in modes:
        raise ConfigError(f"--adaptive={adaptive!r} is unknown; choose on, off or either")
    advice = advise_timers(
        median, sigma, observed=durations, restart=restart, dead=dead, adaptive=modes[adaptive], draws=_DRAWS
    )
    if as_json:
        print_json(asdict(advice), indent=2)
    else:
        _print_timers(advice, MAX_RETRIES, per_day)
        _print_advice(advice, per_day)
    if out is not None:
        if advice.flaps:
            source = f"{advice.flaps} flaps of {flaps}"
        else:
            source = f"flaps of median {flaps} s, sigma {sigma:g}"
        comment = f"megascale network tune: {source}, restart {restart:g} s, {dead:.0%} dead links"
        write_text(out, format_environment(advice.best, comment), "--out")
    if plot is not None:
        from megascale.simulate.fabric.fabric_plots import plot_flap_timers

        plot_flap_timers(advice, plot, restart)


def _print_timers(advice: Advice, retries: int, per_day: float) -> None:
    """Print a row per setting, with its seconds per flap and its cost for `per_day` flaps."""
    from megascale.simulate.render import show_rows

    columns = ("NCCL_IB_TIMEOUT", "adaptive", "aborts", "idle after", "stalled", "gives up", "cost per day")
    cells = [
        [
            str(row.timeout), _ON_OFF[row.adaptive], f"{row.abort:.1%}", f"{row.idle:.2f}", f"{row.stalled:.2f}",
            f"{row.gives_up:,.1f}", f"{per_day * row.cost:,.0f}",
        ]
        for row in advice.table
    ]  # fmt: skip
    show_rows(columns, cells, make_console(), f"{retries} retries; seconds")


def _print_advice(advice: Advice, per_day: float) -> None:
    """Print the cheapest setting, and for how many other sets of flaps it is nearly the cheapest."""
    best = advice.best
    typer.echo(
        f"advice: NCCL_IB_TIMEOUT={best.timeout} NCCL_IB_RETRY_CNT={best.retries}, adaptive retransmission "
        f"{_ON_OFF[best.adaptive]}: "
        f"{best.abort:.2%} of flaps abort, {best.idle:.1f} s idle after the link is back, a dead link is reported "
        f"after {best.gives_up:.0f} s; {per_day * best.cost:.0f} s of the job per day"
    )
    if advice.flaps:
        draws = "resampled flaps"
    else:
        draws = "other medians (up to 1.5 times as long or short) and spreads (0.5 to 1.5)"
    line = f"certainty: within 10% of the best for {advice.agreement:.0%} of {_DRAWS} draws of {draws}; P90 regret "
    line += f"{advice.regret:.1f} s per flap"
    if 0 < advice.flaps < _ENOUGH_FLAPS:
        line += f"; {advice.flaps} flaps are few, collect {_ENOUGH_FLAPS} or more"
    typer.echo(line)


def validate(
    only: str | None = typer.Option(
        None, "--only", help="Check only targets whose names contain one of these texts, comma-separated."
    ),
    full: bool = typer.Option(False, "--full", help="Also targets that take minutes: 1,024 hosts, a 12,288-GPU step."),
    as_json: bool = JSON,
) -> None:
    """Check every target: closed forms, levels against each other, published figures, speed.

    Exit 1 if a target is missed.

    Example:

      megascale network validate --full
    """
    require_package("numba", "network")
    from megascale.simulate.fabric_targets import run_targets

    rows = []
    for row in run_targets(split_option(only), full):
        rows.append(row)
        if not as_json:
            verdict, colour = _VERDICTS[bool(row.passed)]
            typer.secho(verdict, fg=colour, nl=False)
            typer.echo(f"{row.name}: {row.result}  [{row.target}]  ({row.wall:.1f} s, {row.cpu:.1f} s CPU)")
    passed = sum(row.passed for row in rows)
    if as_json:
        print_json([asdict(row) for row in rows], indent=2)
    else:
        typer.echo(f"{passed} of {len(rows)} targets reached")
    if passed < len(rows):
        raise typer.Exit(1)
