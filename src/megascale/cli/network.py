"""`megascale network`: the network between hosts, simulated. Imports no torch; numba for packets only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import OVERRIDES, check_picture, finite, load_for_gpus
from megascale.cli.network_packets import packets, tune, validate
from megascale.core import strict_json

if TYPE_CHECKING:
    from megascale.simulate.fabric.step_traffic import StepTraffic
    from megascale.simulate.fabric.topology import Topology

_HELP = """Try a network before you buy it: topology, placement, ECMP, congestion control, timers.

No GPU and no torch. Every figure of a fabric names its source; `validate` prints how far the levels agree with each
other and with what papers print.

  megascale network topology --plot fabric.png

  megascale network flows examples/gpt-175b.toml --gpus 12288 --vary leaf_oversubscription=1,2,4

  megascale network tune --flaps 3 --out network.env
"""

FABRIC = typer.Option("megascale", "--fabric", help="Shipped fabric (megascale, hpn, meta) or TOML file.")
SET = typer.Option([], "--set", metavar="KEY=VALUE", help="Change a key of the fabric, such as hosts=128; repeatable.")
FILE = typer.Argument(..., metavar="FILE.toml", help="Configuration; settings follow as --section.key=value.")
GPUS = typer.Option(..., "--gpus", min=1, metavar="N", help="GPUs to lay the model over.")
PLACEMENT = typer.Option("data", "--placement", help="data, replicas, random, adversarial, or a placement file.")
SEED = typer.Option(0, "--seed", help="Of hashes and random placement.")
JSON = typer.Option(False, "--json", help="Print JSON instead of a table.")
PLOT = typer.Option(None, "--plot", metavar="FILE.png", help="Draw it.", callback=check_picture)


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode="markdown")
    for name, command in (
        ("topology", topology),
        ("placement", placement),
        ("ecmp", ecmp),
        ("flows", flows),
        ("packets", packets),
        ("tune", tune),
        ("validate", validate),
    ):
        group.command(name, context_settings=OVERRIDES if name in ("placement", "flows") else {})(command)
    app.add_typer(group, name="network")


def _fabric(name: str, words: list[str], **more: Any) -> Topology:
    from megascale.simulate.fabric.fabric_spec import load_fabric, parse_changes
    from megascale.simulate.fabric.topology import build

    return build(load_fabric(name, {**parse_changes(words), **more}))


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console

    from megascale.simulate.render import show_rows

    show_rows(columns, rows, Console(highlight=False), title)


def topology(
    fabric: str = FABRIC,
    changes: list[str] = SET,
    plot: Path | None = PLOT,
    as_json: bool = JSON,
) -> None:
    """Switches, cables, paths and their bandwidth; checks that everything is connected.

    Exit 3 for sizes that the switches cannot connect and for failures that cut the network.

    Examples:

      megascale network topology --plot fabric.png

      megascale network topology --set hosts=256 --set leaf_oversubscription=2.0

      megascale network topology --set 'failed=["core0", "leaf3-agg5"]'
    """
    import numpy as np

    built = _fabric(fabric, changes)
    spec = built.spec
    whole = {
        "gpus": spec.gpus,
        "hosts": spec.hosts,
        "planes": spec.planes,
        "pods": built.pods,
        "switches": built.switch_counts(),
        "cables": built.cable_counts(),
        "links_up_a_leaf_switch": built.uplinks.shape[1],
        "failed_links": int((built.bandwidth == 0).sum() // 2),
        "bisection_gbs": spec.planes
        * float(built.bandwidth[built.tier == (2 if built.cores else 1)].sum() / 2 / 2 / 1e9),
        "path_links": {"same leaf switch": 2, "same pod": 4, "other pod": 6 if built.pods > 1 else None},
        "buffer_mb": spec.buffer_mb,
        "sources": spec.sources,
    }
    if as_json:
        typer.echo(strict_json.dumps(whole, indent=2))
    else:
        down = built.bandwidth[built.tier == 0].sum() / 2
        rows = [["hosts, NICs", f"{spec.hosts:,}", f"{spec.gpus:,} x {spec.nic_gbps:g}G", ""]]
        for name, tier, (kind, cables) in zip(
            ("leaf", "aggregation", "core"), (0, 1, 2), built.cable_counts().items(), strict=True
        ):
            own = built.bandwidth[built.tier == tier].sum() / 2
            share = f"{down / own:.2f} : 1" if own else "-"
            rows.append([f"{name} switches", f"{built.switch_counts()[name]:,}", f"{cables:,} {kind}", share])
        planes = f", each of {spec.planes} planes" if spec.planes > 1 else ""
        _table(f"{spec.name}: {built.pods} pods{planes}", ["", "count", "cables below", "NICs over these links"], rows)
        dead = np.flatnonzero(built.bandwidth == 0)
        typer.echo(
            "paths: 2 links under one leaf switch, 4 in a pod" + (", 6 between pods" if built.pods > 1 else "")
            + (f"; {len(dead) // 2} links are down, everything is connected" if len(dead) else "")
        )  # fmt: skip
        assumed = sorted(key for key, source in spec.sources.items() if source.startswith("assumed"))
        if assumed:
            typer.echo(f"assumed, not printed by anyone: {', '.join(assumed)}")
    if plot is not None:
        from megascale.simulate.fabric.fabric_plots import draw_topology

        draw_topology(built, plot)


def _traffic(context: typer.Context, file: Path, gpus: int) -> StepTraffic:
    from megascale.simulate.fabric.step_traffic import step_traffic

    return step_traffic(load_for_gpus(file, list(context.args)), gpus)


def _names(file: Path, hosts: int) -> list[str]:
    """Names of the fabric's machines, in its order; ConfigError for too few, DataError for one that stands twice."""
    from megascale.config.text_files import read_text
    from megascale.errors import ConfigError, DataError

    try:
        listed = read_text(file).split()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--names={file}: {error}; give a text file of names, one a line") from None
    if len(listed) < hosts:
        raise ConfigError(
            f"--names={file} has {len(listed)} names for {hosts} hosts of the fabric; name each, in the order of leaf "
            f"switches, or make the fabric as large as the cluster (--set hosts={len(listed)})"
        )
    if len(set(listed)) < len(listed):
        twice = next(name for i, name in enumerate(listed) if name in listed[:i])
        raise DataError(f"--names={file} has {twice} twice; each machine stands there once")
    return listed


def placement(
    context: typer.Context,
    file: Path = FILE,
    gpus: int = GPUS,
    fabric: str = FABRIC,
    changes: list[str] = SET,
    chosen: str = PLACEMENT,
    seed: int = SEED,
    names: Path | None = typer.Option(None, "--names", metavar="FILE", help="Names of the machines, one a line."),
    out: Path | None = typer.Option(
        None, "--out", metavar="FILE.json", help="Write the placement: hosts in rank order."
    ),
    as_json: bool = JSON,
    plot: Path | None = PLOT,
) -> None:
    """Where to run which ranks: bytes of a step that cross each tier, for this placement beside the others.

    Examples:

      megascale network placement examples/gpt-175b.toml --gpus 12288

      megascale network placement examples/gpt-175b.toml --gpus 2048 --placement replicas --out placement.json
    """
    from megascale.errors import ConfigError
    from megascale.simulate.fabric.placement import (
        CROSSINGS,
        STRATEGIES,
        bytes_by_tier,
        make_placement,
        step_flows,
        write,
    )

    built, sent = _fabric(fabric, changes), _traffic(context, file, gpus)
    if names is not None and out is None:
        raise ConfigError("--names is for the file that --out writes; add --out FILE.json")
    listed = _names(names, built.spec.hosts) if names is not None else None
    kinds = list(dict.fromkeys([chosen, *STRATEGIES]))
    found: dict[str, Any] = {}
    for kind in kinds:
        laid = make_placement(sent.grid, built, kind, seed)
        data = bytes_by_tier(built, step_flows(laid, "data", sent.reduce + sent.gather))
        stages = bytes_by_tier(built, step_flows(laid, "pipeline", sent.pipeline))
        found[kind] = {"data": data.tolist(), "pipeline": stages.tolist()}
        if kind == chosen and out is not None:
            try:
                write(laid, out, listed)
            except OSError as error:
                raise ConfigError(f"--out={out} cannot be written: {error.strerror or error}") from None
    if as_json:
        typer.echo(strict_json.dumps({"tiers": CROSSINGS, "bytes": found}, indent=2))
    else:
        rows = []
        for kind, both in found.items():
            pairs = list(zip(both["data"], both["pipeline"], strict=True))[1:]
            everything = sum(both["data"]) + sum(both["pipeline"])
            rows.append(
                [kind, *(f"{d / 1e12:.2f} + {p / 1e12:.2f}" for d, p in pairs), f"{sum(pairs[-1]) / everything:.1%}"]
            )
        _table(
            f"TB of a step through each tier, data + pipeline, {gpus:,} GPUs",
            ["placement", *CROSSINGS[1:], "share over core"], rows,
        )  # fmt: skip
    if plot is not None:
        from megascale.simulate.fabric.fabric_plots import bars

        series = {
            tier: [(found[k]["data"][i] + found[k]["pipeline"][i]) / 1e12 for k in found]
            for i, tier in enumerate(CROSSINGS) if i
        }  # fmt: skip
        bars(list(found), series, plot, "TB of a step", f"highest tier that traffic passes, {gpus:,} GPUs")


def ecmp(
    fabric: str = FABRIC,
    changes: list[str] = SET,
    queue_pairs: str = typer.Option("1,2,4,8,16", "--queue-pairs", help="Connections a flow is spread over."),
    same_leaf: float = typer.Option(
        0.0, "--same-leaf", min=0, max=1, callback=finite, help="Share of flows under their own switch."
    ),
    polarised: bool = typer.Option(False, "--polarised", help="One hash seed in all switches."),
    pair_entropy: bool = typer.Option(False, "--pair-entropy", help="NICs that give all queue pairs one UDP port."),
    draws: int = typer.Option(400, "--draws", min=2, help="Starts of the job to draw."),
    seed: int = SEED,
    as_json: bool = JSON,
    plot: Path | None = PLOT,
) -> None:
    """What hashing flows over uplinks costs: real hashes of five-tuples beside the binomial closed form.

    Every NIC of a leaf switch sends to the same place under the next one; with a split cable an uplink carries two.

    Examples:

      megascale network ecmp --plot ecmp.png

      megascale network ecmp --same-leaf 0.75 --queue-pairs 1,4
    """
    from megascale.errors import ConfigError
    from megascale.simulate.fabric.ecmp_study import study

    try:
        counts = [int(word) for word in queue_pairs.split(",")]
    except ValueError:
        raise ConfigError(f"--queue-pairs={queue_pairs!r} must be numbers, such as 1,4,16") from None
    built = _fabric(fabric, changes)
    rows = study(built, counts, same_leaf, draws, seed, "pair" if pair_entropy else "qp", polarised)
    if as_json:
        typer.echo(strict_json.dumps(rows, indent=2))
    else:
        keys = ("utilisation", "slowdown", "worst", "worst_p99", "shared")
        _table(
            f"{rows[0]['flows']} flows over {rows[0]['uplinks']} uplinks that carry {rows[0]['capacity']:g} each; "
            f"hashed {draws} times / closed form",
            ["queue pairs", "carried", "slow-down", "slowest flow", "its P99", "flows in conflict", "whole path"],
            [
                [str(r["queue_pairs"]), *(f"{r['hashed'][k]:.3f} / {r['closed'][k]:.3f}" for k in keys),
                 f"{r['path_worst']:.2f}"]
                for r in rows
            ],
        )  # fmt: skip
        typer.echo("whole path: slowest flow through all tiers, max-min sharing, mean of draws")
    if plot is not None:
        from megascale.simulate.fabric.fabric_plots import lines

        series = {
            "slowest flow at the leaf switch, hashed": [r["hashed"]["worst"] for r in rows],
            "the same, closed form": [r["closed"]["worst"] for r in rows],
            "mean flow, hashed": [r["hashed"]["slowdown"] for r in rows],
            "slowest flow, whole path": [r["path_worst"] for r in rows],
        }
        lines(counts, series, plot, "queue pairs a flow", "time over that without conflicts", log=True)


def flows(
    context: typer.Context,
    file: Path = FILE,
    gpus: int = GPUS,
    fabric: str = FABRIC,
    changes: list[str] = SET,
    vary: str | None = typer.Option(
        None, "--vary", metavar="KEY=A,B", help="A key of the fabric, or placement, queue_pairs, algorithm."
    ),
    chosen: str = PLACEMENT,
    queue_pairs: int = typer.Option(4, "--queue-pairs", min=1, help="Connections a pair of ranks spreads over."),
    algorithm: str = typer.Option("ring", "--algorithm", help="ring, tree, hierarchical, all-to-all."),
    polarised: bool = typer.Option(False, "--polarised", help="One hash seed in all switches."),
    alone: bool = typer.Option(False, "--one-group", help="Rank 0's groups only, instead of all at once."),
    draws: int = typer.Option(1, "--draws", min=1, help="Hash seeds."),
    seed: int = SEED,
    as_json: bool = JSON,
    plot: Path | None = PLOT,
) -> None:
    """All groups of a step at once, bandwidth shared max-min: what the network costs, and a step with it.

    The step is the simulator's (megascale simulate step) with data-parallel and pipeline times slowed by what this
    network does to them relative to the paper's own, on which that simulator is calibrated.

    Examples:

      megascale network flows examples/gpt-175b.toml --gpus 12288 --vary leaf_oversubscription=1,2,4

      megascale network flows examples/gpt-175b.toml --gpus 12288 --vary placement=data,replicas,random
    """
    from megascale.errors import ConfigError
    from megascale.simulate.fabric.fabric_spec import parse_changes
    from megascale.simulate.fabric_study import Variant, vary_network

    base = Variant(fabric, parse_changes(changes), chosen, queue_pairs, algorithm, polarised, draws, seed, alone=alone)
    variants, varied = {"this network": base}, ""
    if vary is not None:
        key, equals, values = vary.partition("=")
        if not equals:
            raise ConfigError(f"--vary={vary!r} must be KEY=A,B, such as leaf_oversubscription=1,2")
        variants = {value: base.with_key(key, value) for value in values.split(",")}
        varied = f", by {key}"
    config = load_for_gpus(file, list(context.args))
    rows = vary_network(config, gpus, variants)
    whose = "rank 0's" if alone else "all"
    if as_json:
        typer.echo(strict_json.dumps(rows, indent=2))
    else:
        _table(
            f"{whose} groups at once, {gpus:,} GPUs{varied}",
            ["", "data", "beside", "pipeline", "reduce, s", "gather, s", "step, s"],
            [
                [
                    r["name"], f"{r['data']:.2f}", f"{r['data_busy']:.2f}", f"{r['pipeline']:.2f}",
                    f"{r['reduce_s']:.3f}", f"{r['gather_s']:.3f}",
                    f"{r['step_s']:.3f} ({r['step_s'] / rows[0]['step_s'] - 1:+.1%})",
                ]
                for r in rows
            ],
        )  # fmt: skip
        typer.echo(
            "data, beside, pipeline: the slowest group's time over that at full NIC rate, of\n"
            "collectives alone, beside pipeline traffic, and of transfers between stages;\n"
            "reduce, gather: of gradients and parameters, at that; "
            f"the flow level took {sum(r['wall_s'] for r in rows):.1f} s"
        )
    if plot is not None:
        from megascale.simulate.fabric.fabric_plots import bars

        series = {
            "data-parallel, alone": [r["data"] for r in rows],
            "with pipeline": [r["data_busy"] for r in rows],
            "pipeline, alone": [r["pipeline"] for r in rows],
        }
        title = f"{config.train.name} on {gpus:,} GPUs: " + ", ".join(f"{r['step_s']:.2f} s" for r in rows) + " a step"
        key = vary.partition("=")[0] + " " if vary else ""
        bars([key + r["name"] for r in rows], series, plot, "time over that at full NIC rate", title)
