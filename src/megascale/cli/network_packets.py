"""`megascale network packets | tune | validate`: every packet, timers against flapping links, and the yardsticks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from megascale.cli.common import check_picture, finite, write_text
from megascale.core import strict_json


def packets(
    pattern: str = typer.Option("permutation", "--pattern", help="permutation, incast, all-to-all, shuffle."),
    control: str = typer.Option(
        "dcqcn,swift,hybrid-both,hybrid-cut", "--control", help="none, dcqcn, swift, hybrid-both, hybrid-cut."
    ),
    dcqcn: str = typer.Option("fast", "--dcqcn", help="Parameter set: paper, hpcc, hpcc-paper, fast."),
    target_us: float | None = typer.Option(
        None, "--swift-base-us", min=0.1, max=1e6, callback=finite, help="Swift's base target delay."
    ),
    hosts: int = typer.Option(64, "--hosts", min=2, help="Hosts of one NIC each, leaf switches of 8."),
    changes: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Change a key of the fabric; repeatable."),
    tiers: int = typer.Option(3, "--tiers", help="2 or 3."),
    mb: float = typer.Option(2.0, "--mb", max=1e6, callback=finite, help="10^6 bytes of a flow."),
    senders: int = typer.Option(32, "--senders", help="Of incast and all-to-all."),
    pfc: bool = typer.Option(True, "--pfc/--no-pfc", help="Whether switches pause their neighbours."),
    tuned: bool = typer.Option(False, "--tuned", help="Tune DCQCN and Swift on this traffic first, by a grid."),
    seed: int = typer.Option(0, "--seed", help="Of hashes and marking."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
    plot: Path | None = typer.Option(None, "--plot", metavar="FILE.png", help="Draw it.", callback=check_picture),
) -> None:
    """The same traffic under several congestion controls, packet by packet, on 200G NICs and 400G switches.

    The MegaScale paper gives no equations of its control: hybrid-both and hybrid-cut are two readings of it.

    Examples:

      megascale network packets --pattern incast --senders 32

      megascale network packets --pattern all-to-all --senders 64 --mb 0.25 --tuned --plot all-to-all.png
    """
    from dataclasses import replace

    from rich.console import Console

    from megascale.cli.common import need
    from megascale.errors import ConfigError
    from megascale.simulate.fabric.control_settings import SETS, SwiftSettings
    from megascale.simulate.fabric.max_min import finish_times

    need("numba", "network")
    from megascale.simulate.fabric import patterns
    from megascale.simulate.fabric.packets import PacketSettings, compare_controls

    if dcqcn not in SETS:
        raise ConfigError(f"--dcqcn={dcqcn!r} is unknown; {', '.join(SETS)}")
    if tiers not in (2, 3):
        raise ConfigError(f"--tiers={tiers} cannot be built here; use 2 or 3 tiers of switches")
    swift = SwiftSettings() if target_us is None else replace(SwiftSettings(), base_us=target_us)
    settings = PacketSettings(dcqcn=SETS[dcqcn], swift=swift, pfc=pfc, seed=seed)
    from megascale.simulate.fabric.fabric_spec import parse_changes

    built = patterns.small_fabric(hosts, tiers, **parse_changes(changes))
    traffic = patterns.traffic(built, pattern, mb * 1e6, senders, seed)
    about = f"DCQCN set {dcqcn!r}"
    if tuned:
        from megascale.simulate.fabric.fair_tuning import tuned_parents

        settings, about = tuned_parents(traffic, settings)
    controls_named = tuple(control.split(","))
    with Console(stderr=True).status("packets") as status:
        found = compare_controls(
            built,
            traffic.flows,
            traffic.paths,
            settings,
            controls_named,
            lambda name, share: status.update(f"{name}: {share:.0%} of the packets have arrived"),
        )
    rows = {name: patterns.summary(result, traffic) for name, result in found.items()}
    fluid = finish_times(traffic.paths, traffic.flows.size, patterns.fluid_bandwidth(built, settings)) * 1e6
    if as_json:
        extra = {"fluid": {"mean_us": float(fluid.mean()), "max_us": float(fluid.max())}}
        typer.echo(strict_json.dumps({**rows, **extra}, indent=2))
    else:
        _show(rows, fluid, f"{pattern}, {len(traffic.flows)} flows of {mb:g} MB on {hosts} hosts\n{about}")
        speed = {name: result.packets_per_second / 1e6 for name, result in found.items()}
        typer.echo("million packets a second and core: " + ", ".join(f"{n} {v:.2f}" for n, v in speed.items()))
    if plot is not None:
        from megascale.simulate.fabric.fabric_plots import controls

        controls(rows, plot, f"{pattern}, {len(traffic.flows)} flows of {mb:g} MB on {hosts} hosts")


def _show(rows: dict[str, dict[str, float]], fluid: Any, title: str) -> None:
    from rich.console import Console

    from megascale.simulate.render import show_rows

    columns = ("", "mean", "P99", "last", "GB/s", "queue", "RTT", "pauses", "paused", "drops")
    keys = ("mean_us", "p99_us", "max_us", "gbs", "queue_kb", "rtt_us", "pauses", "pause_us", "drops")
    cells = [[name, *(f"{r[k]:,.0f}" if k in r else "-" for k in keys)] for name, r in rows.items()]
    cells.append(["max-min", f"{fluid.mean():,.0f}", "", f"{fluid.max():,.0f}", *[""] * 6])
    console = Console(highlight=False)
    show_rows(columns, cells, console, title)
    console.print(
        "[dim]us: finish of flows (mean, P99, last), mean round trip, time that links were paused by PFC; KB: largest "
        "queue; max-min: the flow level, without queues[/dim]",
        soft_wrap=True,
    )


def tune(
    flaps: str = typer.Option(..., "--flaps", help="Median seconds of a flap, or a file of seconds, one a line."),
    sigma: float = typer.Option(
        1.0, "--sigma", min=0, max=100, callback=finite, help="Spread of ln(seconds) where a median is given: assumed."
    ),
    per_day: float = typer.Option(
        1.0, "--per-day", min=0, max=1e9, callback=finite, help="Flaps of the whole job a day."
    ),
    restart: float = typer.Option(600.0, "--restart", min=0, help="Seconds the job loses if NCCL gives up: assumed."),
    dead: float = typer.Option(
        0.02, "--dead", min=0, max=1, callback=finite, help="Share of losses that never come back: assumed."
    ),
    adaptive: str = typer.Option("either", "--adaptive", help="NIC's adaptive retransmission: on, off or either."),
    out: Path | None = typer.Option(
        None, "--out", metavar="FILE.env", help="Write the file for launch's resilience.environment."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
    plot: Path | None = typer.Option(None, "--plot", metavar="FILE.png", help="Draw it.", callback=check_picture),
) -> None:
    """Timers for links that flap: NCCL_IB_TIMEOUT, NCCL_IB_RETRY_CNT and the NIC's adaptive retransmission.

    Weighs jobs that abort, time idle after the link is back, and how late a dead link is reported; says how sure it is.

    Examples:

      megascale network tune --flaps 3 --per-day 1 --out network.env

      megascale launch examples/stdlib.toml --resilience.environment=network.env
    """
    from dataclasses import asdict

    from megascale.errors import ConfigError
    from megascale.simulate.fabric.flaps import MOST_RETRIES, advise, environment, read_durations

    try:
        median: float | None = float(flaps)
        observed = None
    except ValueError:
        median, observed = None, read_durations(Path(flaps))
    kinds = {"on": True, "off": False, "either": None}
    if adaptive not in kinds:
        raise ConfigError(f"--adaptive={adaptive!r}: on, off or either")
    advice = advise(median, sigma, observed, restart, dead, kinds[adaptive])
    best = advice.best
    source = f"{advice.flaps} flaps of {flaps}" if advice.flaps else f"flaps of median {median:g} s, sigma {sigma:g}"
    about = f"megascale network tune: {source}, restart {restart:g} s, {dead:.0%} dead links"
    if as_json:
        typer.echo(strict_json.dumps(asdict(advice), indent=2))
    else:
        _show_timers(advice, MOST_RETRIES, per_day)
        kind = "on" if best.adaptive else "off"
        typer.echo(
            f"advice: NCCL_IB_TIMEOUT={best.timeout} NCCL_IB_RETRY_CNT={best.retries}, adaptive retransmission {kind}: "
            f"{best.abort:.2%} of flaps abort, {best.idle:.1f} s idle after the link is back, a dead link is reported "
            f"after {best.gives_up:.0f} s; {per_day * best.cost:.0f} s of the job a day"
        )
        what = "resampled flaps" if advice.flaps else "other medians (x/ 1.5) and spreads (0.5 to 1.5)"
        typer.echo(
            f"how sure: within 10% of the best for {advice.agreement:.0%} of 60 draws of {what}; P90 regret "
            f"{advice.regret:.1f} s a flap"
            + ("" if not advice.flaps or advice.flaps >= 30 else f"; {advice.flaps} flaps are few, collect 30 or more")
        )
    if out is not None:
        write_text(out, environment(best, about), "--out")
    if plot is not None:
        from megascale.simulate.fabric.fabric_plots import flap_timers

        flap_timers(advice, plot, restart)


def _show_timers(advice: Any, retries: int, per_day: float) -> None:
    from rich.console import Console

    from megascale.simulate.render import show_rows

    columns = ("NCCL_IB_TIMEOUT", "adaptive", "aborts", "idle after", "stalled", "gives up", "cost a day")
    cells = [
        [
            str(t.timeout), "on" if t.adaptive else "off", f"{t.abort:.1%}", f"{t.idle:.2f}", f"{t.stalled:.2f}",
            f"{t.gives_up:,.1f}", f"{per_day * t.cost:,.0f}",
        ]
        for t in advice.table
    ]  # fmt: skip
    show_rows(columns, cells, Console(highlight=False), f"{retries} retries; seconds")


def validate(
    only: str | None = typer.Option(None, "--only", help="Parts of targets' names, comma-separated."),
    full: bool = typer.Option(False, "--full", help="Also what takes minutes: 1,024 hosts, a 12,288-GPU step."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Every yardstick with pass or miss: closed forms, levels against each other, figures of papers, speed.

    Exit 1 if one is missed.

    Example:

      megascale network validate --full
    """
    from megascale.cli.common import need

    need("numba", "network")
    from megascale.simulate.fabric_targets import run_targets

    rows = []
    words = only.split(",") if only else []
    for row in run_targets(words, full):
        rows.append(row)
        if not as_json:
            typer.secho("pass " if row.passed else "miss ", fg="green" if row.passed else "red", nl=False)
            typer.echo(f"{row.name}: {row.result}  [{row.target}]  ({row.wall:.1f} s, {row.cpu:.1f} s CPU)")
    if as_json:
        from dataclasses import asdict

        typer.echo(strict_json.dumps([asdict(r) for r in rows], indent=2))
    missed = [row.name for row in rows if not row.passed]
    if not as_json:
        typer.echo(f"{len(rows) - len(missed)} of {len(rows)} targets reached")
    raise typer.Exit(1 if missed else 0)
