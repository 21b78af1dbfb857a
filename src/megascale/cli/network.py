"""`megascale network`: simulate the network between hosts. Imports no torch, and numba for `packets` only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from megascale.cli.common import (
    JSON,
    OVERRIDES,
    check_finite,
    check_picture,
    format_count,
    load_for_gpus,
    make_console,
    parse_numbers,
    print_json,
    print_marked,
)
from megascale.cli.network_packets import packets, tune, validate
from megascale.errors import ConfigError, DataError, FitError

if TYPE_CHECKING:
    from megascale.simulate.fabric.topology import Topology

_HELP = """Simulate a network before it is bought: topology, placement, ECMP, congestion control, timers.

It needs neither a GPU nor torch. Every figure of a fabric names its source; `validate` prints how far the levels agree
with each other and with published figures.

  megascale network topology --plot fabric.png

  megascale network flows examples/gpt-175b.toml --gpus 12288 --vary leaf_oversubscription=1,2,4

  megascale network tune --flaps 3 --out network.env
"""

FABRIC = typer.Option("megascale", "--fabric", help="Shipped fabric (megascale, hpn, meta) or TOML file.")
SET = typer.Option([], "--set", metavar="KEY=VALUE", help="Change a key of the fabric, such as hosts=128; repeatable.")
FILE = typer.Argument(..., metavar="FILE.toml", help="Configuration; settings follow as --section.key=value.")
GPUS = typer.Option(..., "--gpus", min=1, metavar="N", help="Number of GPUs for the layout.")
PLACEMENT = typer.Option("data", "--placement", help="data, replicas, random, adversarial, or a placement file.")
SEED = typer.Option(0, "--seed", help="Seed of hashes and random placement.")
PLOT = typer.Option(None, "--plot", metavar="FILE.png", help="Draw a picture.", callback=check_picture)
POLARISED = typer.Option(False, "--polarised", help="Use one hash seed in all switches.")


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode="markdown")
    for command in (topology, ecmp, packets, tune, validate):
        group.command()(command)
    for layout_command in (placement, flows):
        group.command(context_settings=OVERRIDES)(layout_command)
    app.add_typer(group, name="network")


def _build_fabric(name: str, changes: list[str]) -> Topology:
    """Return the switches and links of a fabric. `changes` are KEY=VALUE texts of --set."""
    from megascale.simulate.fabric.fabric_spec import load_fabric, parse_changes
    from megascale.simulate.fabric.topology import build_topology

    return build_topology(load_fabric(name, parse_changes(changes)))


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from megascale.simulate.render import show_rows

    show_rows(columns, rows, make_console(), title)


def topology(
    fabric: str = FABRIC,
    changes: list[str] = SET,
    plot: Path | None = PLOT,
    as_json: bool = JSON,
) -> None:
    """Print switches, cables, paths and their bandwidth, and check that everything is connected.

    Exit 3 for sizes that the switches cannot connect and for failures that cut the network.

    Examples:

      megascale network topology --plot fabric.png

      megascale network topology --set hosts=256 --set leaf_oversubscription=2.0

      megascale network topology --set 'failed=["core0", "leaf3-agg5"]'
    """
    built_topology = _build_fabric(fabric, changes)
    spec = built_topology.spec
    top_tier = 2 if built_topology.cores else 1
    failed_links = int((built_topology.bandwidth == 0).sum() // 2)
    if as_json:
        # The topology has a link per direction of each cable. Half of the top tier's cables join the two halves of the
        # network.
        one_way_bandwidth = built_topology.bandwidth[built_topology.tier == top_tier].sum() / 2  # bytes/s
        bisection = float(one_way_bandwidth / 2 / 1e9)
        record = {
            "gpus": spec.gpus,
            "hosts": spec.hosts,
            "planes": spec.planes,
            "pods": built_topology.pods,
            "switches": built_topology.switch_counts(),
            "cables": built_topology.cable_counts(),
            "links_up_a_leaf_switch": built_topology.uplinks.shape[1],
            "failed_links": failed_links,
            "bisection_gbs": spec.planes * bisection,
            "path_links": {"same leaf switch": 2, "same pod": 4, "other pod": 6 if built_topology.pods > 1 else None},
            "buffer_mb": spec.buffer_mb,
            "sources": spec.sources,
        }
        print_json(record, indent=2)
    else:
        _print_topology(built_topology, failed_links)
    if plot is not None:
        from megascale.simulate.fabric.fabric_plots import draw_topology

        draw_topology(built_topology, plot)


def _print_topology(built_topology: Topology, failed_links: int) -> None:
    """Print the switches and cables of each tier, the lengths of paths, and which figures are assumed.

    The oversubscription of a tier is the bandwidth of all NICs relative to that of the cables below the tier.
    """
    spec = built_topology.spec
    switch_counts = built_topology.switch_counts()
    nic_bandwidth = built_topology.bandwidth[built_topology.tier == 0].sum() / 2
    rows = [["hosts, NICs", f"{spec.hosts:,}", f"{spec.gpus:,} x {spec.nic_gbps:g}G", ""]]
    cable_counts = built_topology.cable_counts().items()  # (kind of cable, number) per tier
    tier_names = ("leaf", "aggregation", "core")
    for tier, (kind, cables) in enumerate(cable_counts):
        name = tier_names[tier]
        tier_bandwidth = built_topology.bandwidth[built_topology.tier == tier].sum() / 2
        if tier_bandwidth:
            ratio = f"{nic_bandwidth / tier_bandwidth:.2f} : 1"
        else:
            ratio = "-"
        rows.append([f"{name} switches", f"{switch_counts[name]:,}", f"{cables:,} {kind}", ratio])
    title = f"{spec.name}: {format_count(built_topology.pods, 'pod')}"
    if spec.planes > 1:
        title += f", each of {spec.planes} planes"
    _print_table(title, ["", "count", "cables below", "oversubscription"], rows)
    paths = "paths: 2 links under one leaf switch, 4 in a pod"
    if built_topology.pods > 1:
        paths += ", 6 between pods"
    if failed_links:
        paths += f"; {failed_links} links are down, everything is connected"
    typer.echo(paths)
    assumed = sorted(key for key, source in spec.sources.items() if source.startswith("assumed"))
    if assumed:
        typer.echo(f"assumed, without a published source: {', '.join(assumed)}")


def _read_names(file: Path, hosts: int) -> list[str]:
    """Return the names of the fabric's hosts in a file, in the fabric's order.

    Raises ConfigError for fewer names than hosts, and DataError for a repeated name.
    """
    from megascale.config.text_files import read_text

    try:
        names = read_text(file).split()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--names={file}: {error}; give a text file with one name per line") from None
    if len(names) < hosts:
        raise ConfigError(
            f"--names={file} has {len(names)} names for {hosts} hosts of the fabric; name each host, in the order of "
            f"leaf switches, or make the fabric as large as the cluster (--set hosts={len(names)})"
        )
    for index, name in enumerate(names):
        if name in names[:index]:
            raise DataError(f"--names={file} has {name} twice; list each machine once")
    return names


def placement(
    context: typer.Context,
    file: Path = FILE,
    gpus: int = GPUS,
    fabric: str = FABRIC,
    changes: list[str] = SET,
    strategy: str = PLACEMENT,
    seed: int = SEED,
    names: Path | None = typer.Option(None, "--names", metavar="FILE", help="Names of the machines, one per line."),
    out: Path | None = typer.Option(
        None, "--out", metavar="FILE.json", help="Write the placement: hosts in rank order."
    ),
    as_json: bool = JSON,
    plot: Path | None = PLOT,
) -> None:
    """Compare placements of ranks: bytes of a step that cross each tier of switches.

    Examples:

      megascale network placement examples/gpt-175b.toml --gpus 12288

      megascale network placement examples/gpt-175b.toml --gpus 2048 --placement replicas --out placement.json
    """
    from megascale.simulate.fabric.placement import (
        CROSSINGS,
        STRATEGIES,
        make_placement,
        make_step_flows,
        sum_bytes_by_tier,
        write_placement,
    )
    from megascale.simulate.fabric.step_traffic import estimate_step_traffic

    built_topology = _build_fabric(fabric, changes)
    traffic = estimate_step_traffic(load_for_gpus(file, context.args), gpus)  # bytes of a step
    if names is not None and out is None:
        raise ConfigError("--names is for the file that --out writes; add --out FILE.json")
    if names is not None:
        host_names = _read_names(names, built_topology.spec.hosts)
    else:
        host_names = None
    bytes_by_strategy: dict[str, dict[str, list[float]]] = {}  # bytes per tier, by strategy and axis
    skipped = []
    for name in dict.fromkeys([strategy, *STRATEGIES]):
        try:
            rank_placement = make_placement(traffic.grid, built_topology, name, seed)
        except FitError as error:
            if name == strategy:
                raise
            skipped.append(f"{name}: {error}")
            continue
        data = sum_bytes_by_tier(
            built_topology, make_step_flows(rank_placement, "data", traffic.reduce + traffic.gather)
        )
        pipeline_flows = make_step_flows(rank_placement, "pipeline", traffic.pipeline, wrap_share=traffic.wrap_share)
        pipeline = sum_bytes_by_tier(built_topology, pipeline_flows)
        bytes_by_strategy[name] = {"data": data.tolist(), "pipeline": pipeline.tolist()}
        if name == strategy and out is not None:
            try:
                write_placement(rank_placement, out, host_names)
            except OSError as error:
                raise ConfigError(f"--out={out} cannot be written: {error.strerror or error}") from None
    if as_json:
        print_json({"tiers": CROSSINGS, "bytes": bytes_by_strategy, "left_out": skipped}, indent=2)
    else:
        _print_placements(bytes_by_strategy, gpus)
        for text in skipped:
            print_marked(make_console(), "skipped", "yellow", text)
    if plot is not None:
        _plot_placements(bytes_by_strategy, gpus, plot)


def _print_placements(bytes_by_strategy: dict[str, dict[str, list[float]]], gpus: int) -> None:
    """Print the TB of a step by the highest tier that they pass. Bytes within a host (tier 0) are left out."""
    from megascale.simulate.fabric.placement import CROSSINGS

    rows = []
    for name, sent_bytes in bytes_by_strategy.items():
        bytes_by_tier = list(zip(sent_bytes["data"], sent_bytes["pipeline"], strict=True))
        cells = [f"{data / 1e12:.2f} + {pipeline / 1e12:.2f}" for data, pipeline in bytes_by_tier[1:]]
        total = sum(map(sum, bytes_by_tier))
        share = sum(bytes_by_tier[-1]) / total if total else 0.0
        rows.append([name] + cells + [f"{share:.1%}"])
    title = f"TB of a step through each tier, data + pipeline, {gpus:,} GPUs"
    _print_table(title, ["placement"] + list(CROSSINGS[1:]) + ["share over core"], rows)


def _plot_placements(bytes_by_strategy: dict[str, dict[str, list[float]]], gpus: int, plot: Path) -> None:
    """Draw the rows of `_print_placements` as bars."""
    from megascale.simulate.fabric.fabric_plots import plot_bars
    from megascale.simulate.fabric.placement import CROSSINGS

    series = {}
    for index, tier in enumerate(CROSSINGS[1:], start=1):
        series[tier] = [
            (sent_bytes["data"][index] + sent_bytes["pipeline"][index]) / 1e12
            for sent_bytes in bytes_by_strategy.values()
        ]
    title = f"highest tier that traffic passes, {gpus:,} GPUs"
    plot_bars(list(bytes_by_strategy), series, plot, "TB of a step", title)


def ecmp(
    fabric: str = FABRIC,
    changes: list[str] = SET,
    queue_pairs: str = typer.Option("1,2,4,8,16", "--queue-pairs", help="Connections per flow, comma-separated."),
    same_leaf: float = typer.Option(
        0.0, "--same-leaf", min=0, max=1, callback=check_finite, help="Share of flows under one leaf switch."
    ),
    polarised: bool = POLARISED,
    pair_entropy: bool = typer.Option(False, "--pair-entropy", help="NICs give all queue pairs one UDP port."),
    draws: int = typer.Option(400, "--draws", min=2, help="Starts of the job to draw."),
    seed: int = SEED,
    as_json: bool = JSON,
    plot: Path | None = PLOT,
) -> None:
    """Compute the cost of hashing flows over uplinks: real hashes of five-tuples, and the binomial closed form.

    Every NIC of a leaf switch sends to the same position under the next one; with a split cable an uplink carries two.

    Examples:

      megascale network ecmp --plot ecmp.png

      megascale network ecmp --same-leaf 0.75 --queue-pairs 1,4
    """
    from megascale.simulate.fabric.ecmp_study import study_hash_conflicts

    counts = parse_numbers("--queue-pairs", queue_pairs, "1,4,16")
    # What varies the hashed UDP source port: the pair of NICs only, or each queue pair.
    entropy: Literal["pair", "qp"] = "pair" if pair_entropy else "qp"
    built = _build_fabric(fabric, changes)
    with make_console(stderr=True).status(f"hashing the flows {draws} times for each number of queue pairs"):
        rows = study_hash_conflicts(
            built,
            counts,
            leaf_share=same_leaf,
            draws=draws,
            seed=seed,
            entropy=entropy,
            polarised=polarised,
        )
    if as_json:
        print_json(rows, indent=2)
    else:
        keys = ("utilisation", "slowdown", "worst", "worst_p99", "shared")
        cells = []
        for row in rows:
            comparisons = [f"{row['hashed'][key]:.3f} / {row['closed'][key]:.3f}" for key in keys]  # hash / formula
            cells.append([str(row["queue_pairs"])] + comparisons + [f"{row['path_worst']:.2f}"])
        _print_table(
            f"{rows[0]['flows']} flows over {rows[0]['uplinks']} uplinks that carry {rows[0]['capacity']:g} each; "
            f"hashed {draws} times / closed form",
            ["queue pairs", "carried", "slow-down", "slowest flow", "its P99", "flows in conflict", "whole path"],
            cells,
        )
        typer.echo("whole path: slowest flow through all tiers, max-min sharing, mean of draws")
    if plot is not None:
        from megascale.simulate.fabric.fabric_plots import plot_lines

        series = {
            "slowest flow at the leaf switch, hashed": [row["hashed"]["worst"] for row in rows],
            "the same, closed form": [row["closed"]["worst"] for row in rows],
            "mean flow, hashed": [row["hashed"]["slowdown"] for row in rows],
            "slowest flow, whole path": [row["path_worst"] for row in rows],
        }
        plot_lines(counts, series, plot, xlabel="queue pairs per flow", ylabel="time relative to no conflicts")


def flows(
    context: typer.Context,
    file: Path = FILE,
    gpus: int = GPUS,
    fabric: str = FABRIC,
    changes: list[str] = SET,
    vary: str | None = typer.Option(
        None, "--vary", metavar="KEY=A,B", help="A key of the fabric, or placement, queue_pairs, algorithm."
    ),
    strategy: str = PLACEMENT,
    queue_pairs: int = typer.Option(4, "--queue-pairs", min=1, help="Connections per pair of ranks."),
    algorithm: str = typer.Option("ring", "--algorithm", help="ring, tree, hierarchical, all-to-all."),
    polarised: bool = POLARISED,
    one_group: bool = typer.Option(False, "--one-group", help="Rank 0's groups only, instead of all at once."),
    draws: int = typer.Option(1, "--draws", min=1, help="Number of hash seeds."),
    seed: int = SEED,
    as_json: bool = JSON,
    plot: Path | None = PLOT,
) -> None:
    """Simulate all groups of a step at once with max-min sharing: the network's cost, and the step time with it.

    The step is the simulator's (megascale simulate step). Its data-parallel and pipeline times are slowed by the ratio
    of this network to the paper's own, on which that simulator is calibrated.

    Examples:

      megascale network flows examples/gpt-175b.toml --gpus 12288 --vary leaf_oversubscription=1,2,4

      megascale network flows examples/gpt-175b.toml --gpus 12288 --vary placement=data,replicas,random
    """
    from megascale.simulate.fabric.fabric_spec import parse_changes
    from megascale.simulate.fabric_study import Variant, vary_network

    base = Variant(
        fabric=fabric,
        changes=parse_changes(changes),
        placement=strategy,
        queue_pairs=queue_pairs,
        algorithm=algorithm,
        polarised=polarised,
        draws=draws,
        seed=seed,
        alone=one_group,
    )
    variants = {"this network": base}
    key = ""
    if vary is not None:
        key, equals, values = vary.partition("=")
        if not equals:
            raise ConfigError(f"--vary={vary!r} must be KEY=A,B, such as leaf_oversubscription=1,2")
        variants = {value: base.with_key(key, value) for value in values.split(",")}
    config = load_for_gpus(file, context.args)
    with make_console(stderr=True).status(f"simulating the groups of {gpus:,} GPUs") as status:
        rows = vary_network(config, gpus, variants, report=status.update)
    if as_json:
        print_json(rows, indent=2)
    else:
        title = f"{'rank 0 groups' if one_group else 'all groups'} at once, {gpus:,} GPUs"
        if key:
            title += f", by {key}"
        _print_flows(rows, title)
    if plot is not None:
        from megascale.simulate.fabric.fabric_plots import plot_bars

        series = {
            "data-parallel, alone": [row["data"] for row in rows],
            "with pipeline": [row["data_busy"] for row in rows],
            "pipeline, alone": [row["pipeline"] for row in rows],
        }
        step_times = ", ".join(f"{row['step_s']:.2f} s" for row in rows)
        title = f"{config.train.name} on {gpus:,} GPUs: {step_times} per step"
        names = [f"{key} {row['name']}".strip() for row in rows]
        plot_bars(names, series, plot, "time relative to full NIC rate", title)


def _print_flows(rows: list[dict[str, Any]], title: str) -> None:
    """Print one line per network, with the step time relative to that of the first network."""
    lines = []
    for row in rows:
        cells = [row["name"]]
        cells += [f"{row[key]:.2f}" for key in ("data", "data_busy", "pipeline")]
        cells += [f"{row[key]:.3f}" for key in ("reduce_s", "gather_s")]
        cells.append(f"{row['step_s']:.3f} ({row['step_s'] / rows[0]['step_s'] - 1:+.1%})")
        lines.append(cells)
    _print_table(title, ["", "data", "with pipeline", "pipeline", "reduce, s", "gather, s", "step, s"], lines)
    typer.echo(
        "data, with pipeline, pipeline: the slowest group's time relative to full NIC rate, for\n"
        "collectives alone, collectives during pipeline traffic, and transfers between stages;\n"
        "reduce, gather: of gradients and parameters, at that rate; "
        f"the flow level took {sum(row['wall_s'] for row in rows):.1f} s;\n"
        "step: on cluster a100-roce, with which this network is compared (`simulate step --fabric` takes any cluster)"
    )
