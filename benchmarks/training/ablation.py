"""`python -m benchmarks ablation`: what each technique adds on this machine, one on top of the other.

The order is that of the paper's Table 3 (section 6.1). Every row is a real `megascale train` of some steps; rows take
turns over several repeats, so that a GPU that warms up or a busy host touches all alike.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.temporary import temporary_folder
from benchmarks.harness.training_runs import describe_machine, make_timing_config, train
from megascale.config import Config
from megascale.core import strict_json

# MFU of 175B on 256 GPUs after each row, percent: paper, Table 3.
PAPER = {
    "all off": 47.7,
    "parallel block": 52.3,
    "window": 53.3,
    "tensor overlap": 55.5,
    "pipeline overlap": 58.0,
    "data overlap": 59.5,
    "operators": 61.2,
    "misc": 62.3,
    "LAMB, 3x batch": 65.3,
}
TIMES = 3  # LAMB's batch, in AdamW's
# Links -> variables of the runs: without peer-to-peer copies NCCL moves every byte through the host's memory.
LINKS = {"on": {}, "slow": {"NCCL_P2P_DISABLE": "1"}}


@dataclass(frozen=True)
class AblationRow:
    """One row: its name and the settings that it and all rows before it make, {"section.key": value}."""

    name: str
    settings: dict[str, Any]


@dataclass
class AblationRun:
    """One run of a row.

    Attributes:
        seconds: of each timed step.
        tokens: of a step.
        mfu: median of the timed steps, None where the device's peak is unknown.
        memory_gib: most that rank 0 held on its GPU, None on CPU.
        sustained: FLOP/s of plain GEMMs right before its repeat, mean over the GPUs; None on CPU.
    """

    row: str
    links: str
    repeat: int
    processes: int
    seconds: list[float]
    tokens: int
    mfu: float | None
    memory_gib: float | None
    sustained: float | None

    @property
    def rate(self) -> float:
        """Tokens a second and process, of the median step."""
        return self.tokens / statistics.median(self.seconds) / self.processes


def register(app: typer.Typer) -> None:
    """Add the bench."""
    app.command("ablation", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(ablation)


def ablation(
    context: typer.Context,
    file: Path = typer.Argument(..., help="Configuration with data, model and layout.", show_default=False),
    steps: int = typer.Option(8, min=1, help="Timed steps of each run (a third of them with LAMB's batch)."),
    warmup: int = typer.Option(3, min=1, help="Steps before them."),
    repeats: int = typer.Option(3, min=1, help="Runs of each row; rows take turns."),
    window: int | None = typer.Option(None, min=1, help="Of the windowed rows; default: a quarter of the sequence."),
    links: list[str] = typer.Option(
        ["on"], help="on, or slow: every byte between GPUs goes through host memory. Give both and they alternate."
    ),
    row: list[str] = typer.Option([], help="Only these rows, such as --row 'all off'; may be given again."),
    out: Path = typer.Option(Path("bench-ablation.json"), help="JSON file; runs that it holds are not made again."),
    plot: Path = typer.Option(Path("bench-ablation.png"), help="PNG to draw."),
) -> None:
    """Train with everything off, then with one technique more a row, as the paper's Table 3.

    Any setting can be given as --section.key=value; it holds for all rows. Stopped and called again it goes on.

    Examples:

      python -m benchmarks ablation examples/stdlib-3d.toml --steps 5 --repeats 2

      python -m benchmarks ablation gpt-13b.toml --links on --links slow
    """
    from megascale import api
    from megascale.config import load_command_line
    from megascale.core.layout import lay_out
    from megascale.errors import ConfigError
    from megascale.train.launcher import count_processes

    config = api.resolve(load_command_line(file, context.args))
    cuda = api.visible_gpus() > 0 and config.train.device != "cpu"
    for name in links:
        if name not in LINKS:
            raise ConfigError(f"--links={name}: there are {', '.join(LINKS)}")
        if name == "slow" and not cuda:
            raise ConfigError("--links=slow is a matter of GPUs, and this run has none; leave it out")
    processes = count_processes(config, api.visible_gpus())
    grid = lay_out(config, processes).grid
    length = config.model.sequence_length
    rows, nothing = rows_of(config, grid.replicas, window or max(1, length // 4), cuda)
    unknown = set(row) - {r.name for r in rows}
    if unknown:
        raise ConfigError(f"--row={unknown.pop()}: this configuration has {', '.join(r.name for r in rows)}")
    rows = [r for r in rows if not row or r.name in row]
    plans = [(r, name, _config(config, r, name, steps, warmup)) for r in rows for name in links]
    for _, _, item in plans:
        lay_out(item, processes)  # all are checked before the first one trains
    key = _key(config, steps, warmup, window, processes)
    runs = _before(out, key)
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        **describe_machine(config),
        "file": str(file),
        "key": key,
        "processes": processes,
        "layout": config.parallel.model_dump(exclude_none=True),
        "steps": steps,
        "rows": [asdict(r) for r in rows],
        "without_effect": nothing,
    }
    for run in _run_all(plans, processes, repeats, warmup, cuda, runs):
        runs.append(run)
        out.write_text(strict_json.dumps(record | {"runs": [asdict(r) for r in runs]}, indent=1) + "\n")
    show(record, runs)
    draw(record, runs, plot)
    typer.echo(f"metrics: {out}; plot: {plot}")


def rows_of(config: Config, data: int, window: int, cuda: bool) -> tuple[list[AblationRow], list[str]]:
    """The rows that change something in this layout, and the names of those that do not.

    data: data-parallel ranks. Before "operators" attention is FlashAttention-2, as Megatron-LM had it.
    """
    if cuda:
        flash = {"kernels.attention": "flash"}
    else:
        flash = {}
    if cuda:
        windowed = {"kernels.attention": "flash_window"}
    else:
        windowed = {}
    parallel = config.parallel
    steps: list[tuple[str, dict[str, Any], bool]] = [
        (
            "all off",
            {
                "model.block": "serial",
                "model.window": None,
                "overlap.tensor": "off",
                "overlap.pipeline": False,
                "overlap.data": False,
                "kernels.mode": "reference",
                "data.loader": "local",
                "train.gc_interval": 0,
                "optimizer.name": "adamw",
                **flash,
            },
            True,
        ),
        ("parallel block", {"model.block": "parallel"}, True),
        ("window", {"model.window": window, **windowed}, True),
        ("tensor overlap", {"overlap.tensor": "auto"}, parallel.tensor > 1),
        ("pipeline overlap", {"overlap.pipeline": True}, parallel.pipeline > 1),
        ("data overlap", {"overlap.data": True}, data > 1),
        ("operators", {"kernels.mode": "auto", "kernels.attention": "auto"}, True),
        ("misc", {"data.loader": "auto", "train.gc_interval": config.train.gc_interval or 50}, True),
        (
            "LAMB, 3x batch",
            {"optimizer.name": "lamb", "train.global_batch": TIMES * config.train.global_batch},
            True,
        ),
    ]
    rows: list[AblationRow] = []
    settings: dict[str, Any] = {}
    for name, more, has_effect in steps:
        settings = settings | more
        if has_effect:
            rows.append(AblationRow(name, settings))
    return rows, [name for name, _, has_effect in steps if not has_effect]


def _config(config: Config, row: AblationRow, links: str, steps: int, warmup: int) -> Config:
    from megascale.config import from_tree

    settings = dict(row.settings)
    if links == "slow" and settings["overlap.tensor"] == "auto":
        settings["overlap.tensor"] = "async"  # symmetric memory would go around the slow links
    if settings.get("train.global_batch"):
        steps = max(1, round(steps / TIMES))
    tree = make_timing_config(config, warmup + steps)
    tree["observe"]["progress"] = False
    for name, value in settings.items():
        section, key = name.split(".")
        if value is None:
            tree[section].pop(key, None)
        else:
            tree[section][key] = value
    return from_tree(tree)


def _key(config: Config, steps: int, warmup: int, window: int | None, processes: int) -> str:
    subject = [config.model_dump(mode="json"), steps, warmup, window, processes]
    return hashlib.blake2b(strict_json.dumps(subject, sort_keys=True).encode(), digest_size=8).hexdigest()


def _before(out: Path, key: str) -> list[AblationRun]:
    """Runs that `out` holds from a call that was stopped; ConfigError if they are of other settings."""
    from megascale.errors import ConfigError

    if not out.exists():
        return []
    try:
        record = json.loads(out.read_text())
        runs = [AblationRun(**run) for run in record["runs"]]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"--out={out} is there and holds no figures of this bench; name another file") from None
    if record["key"] != key:
        raise ConfigError(f"--out={out} holds figures of other settings; name another file or remove it")
    return runs


def _run_all(
    plans: list[tuple[AblationRow, str, Config]],
    processes: int,
    repeats: int,
    warmup: int,
    cuda: bool,
    before: list[AblationRun],
) -> Iterator[AblationRun]:
    """Make the runs that are missing, repeat by repeat, every second time in reverse order."""
    from rich.progress import Progress

    built = {(run.row, run.links, run.repeat) for run in before}
    with temporary_folder() as folder, Progress(transient=True) as progress:
        full = progress.add_task("all runs", total=len(plans) * repeats)
        bar = progress.add_task("")
        for repeat in range(repeats):
            sustained: float | None = None
            for number, (row, links, config) in enumerate(plans if repeat % 2 == 0 else plans[::-1]):
                if (row.name, links, repeat) not in built:
                    progress.update(
                        bar, description=f"{row.name}, links {links}", total=config.train.steps, completed=0
                    )
                    if cuda and sustained is None:  # once a repeat: it takes a quarter as long as a row
                        sustained = _sustained()
                    records = train(
                        config,
                        processes,
                        Path(folder) / f"{repeat}-{number}",
                        f"{row.name!r} with links {links}",
                        LINKS[links],
                        on_progress=lambda done: progress.update(bar, completed=done),
                    )
                    yield _figures(row.name, links, repeat, processes, config, records[warmup:], sustained)
                progress.advance(full)


def _figures(
    row: str,
    links: str,
    repeat: int,
    processes: int,
    config: Config,
    records: list[dict[str, Any]],
    sustained: float | None,
) -> AblationRun:
    credits = [r["mfu"] for r in records if r.get("mfu") is not None]
    memory = [r["memory_gib"] for r in records if r.get("memory_gib") is not None]
    return AblationRun(
        row,
        links,
        repeat,
        processes,
        [r["seconds"] for r in records],
        config.train.global_batch * config.model.sequence_length,
        statistics.median(credits) if credits else None,
        max(memory) if memory else None,
        sustained,
    )


def _sustained(seconds: float = 2.0) -> float:
    """FLOP/s that plain GEMMs sustain on all GPUs at once, their mean, in a process of its own."""
    import subprocess
    import sys

    code = (
        "import torch, concurrent.futures as f; from megascale.bench.timing import measure_sustained_gemm_rate; "
        "n = torch.cuda.device_count(); "
        f"rate = lambda i: measure_sustained_gemm_rate(torch.device('cuda', i), {seconds}); "
        "print(sum(f.ThreadPoolExecutor(n).map(rate, range(n))) / n)"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def table(rows: list[str], runs: list[AblationRun], links: str) -> list[dict[str, Any]]:
    """One entry a row: medians over repeats, their spread, and gains over the row before and over the first."""
    result: list[dict[str, Any]] = []
    for name in rows:
        local = [run for run in runs if run.row == name and run.links == links]
        if not local:
            continue
        rates = [run.rate for run in local]
        rate, credits = statistics.median(rates), [run.mfu for run in local if run.mfu is not None]
        memory = [run.memory_gib for run in local if run.memory_gib is not None]
        sustained = [run.sustained for run in local if run.sustained is not None]
        result.append(
            {
                "row": name,
                "seconds": statistics.median(statistics.median(run.seconds) for run in local),
                "rate": rate,
                "spread": (max(rates) - min(rates)) / rate,
                "mfu": statistics.median(credits) if credits else None,
                "memory_gib": max(memory) if memory else None,
                "sustained": statistics.median(sustained) if sustained else None,
                "gain": rate / result[-1]["rate"] - 1 if result else 0.0,
                "over_first": rate / result[0]["rate"] if result else 1.0,
                "paper_over_first": PAPER[name] / PAPER[result[0]["row"] if result else name],
            }
        )
    return result


def show(record: dict[str, Any], runs: list[AblationRun]) -> None:
    """A table for each kind of links."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    names = [row["name"] for row in record["rows"]]
    for links in dict.fromkeys(run.links for run in runs):
        result = table(names, runs, links)
        cells = [_cells(item, _peak(record)) for item in result]
        shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), collapse_padding=True)
        columns = [c for c in cells[0] if any(row[c] for row in cells)]  # not what this machine does not tell
        for number, column in enumerate(columns):
            shown.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in cells:
            shown.add_row(*(row[column] for column in columns))
        console.print(
            f"{record['file']} on {record['processes']} x {record['device']}, links {links}, {record['date']}.\n"
            "Each row has what the rows above it have and one thing more. Total: tokens/s over the first row's."
        )
        console.print(shown)
    if any(run.links == "slow" for run in runs):
        console.print(
            "links slow: tensor overlap is async there, since symmetric memory would go around the slow links"
        )
    for name in record["without_effect"]:
        console.print(f"{name}: no row, this layout has nothing of the kind")


def _cells(single: dict[str, Any], peak: float | None) -> dict[str, str]:
    """A row of the table by heading; empty where nothing is known."""
    attribute = single["mfu"]
    if attribute and peak and single["sustained"]:
        share = attribute * peak / single["sustained"]
    else:
        share = None
    return {
        "with": single["row"],
        "s/step": f"{single['seconds']:.3f}",
        "tokens/s each": f"{single['rate']:,.0f}",
        "spread": f"{100 * single['spread']:.1f}%",
        "gain": f"{100 * single['gain']:+.1f}%",
        "total": f"{single['over_first']:.3f}",
        "paper's": f"{single['paper_over_first']:.3f}",
        "MFU": f"{100 * attribute:.1f}%" if attribute else "",
        "of GEMM": f"{100 * share:.0f}%" if share else "",
        "GiB": f"{single['memory_gib']:.1f}" if single["memory_gib"] else "",
    }


def _peak(record: dict[str, Any]) -> float | None:
    from megascale.core.flops import device_peak_tflops

    peak = device_peak_tflops(record["device"])
    return None if peak is None else peak * 1e12


def draw(record: dict[str, Any], runs: list[AblationRun], out: Path) -> None:
    """Tokens a second over the first row, row by row, a line for each kind of links and one for the paper."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [row["name"] for row in record["rows"]]
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    last: list[dict[str, Any]] = []
    for number, links in enumerate(dict.fromkeys(run.links for run in runs)):
        last = table(names, runs, links)
        locations = [names.index(item["row"]) for item in last]
        values = [step["over_first"] for step in last]
        error = [item["over_first"] * item["spread"] / 2 for item in last]
        label = f"here, links {links}: {values[-1]:.2f}x"
        axes.errorbar(locations, values, error, fmt="o-", color=f"C{number}", capsize=3, label=label)
    values = [item["paper_over_first"] for item in last]
    locations = [names.index(item["row"]) for item in last]
    axes.plot(locations, values, "s--", color="0.6", label=f"paper, 175B on 256 GPUs: {values[-1]:.2f}x (of MFU)")
    axes.set_xticks(range(len(names)), [names[0]] + [f"+ {name}" for name in names[1:]], rotation=25, ha="right")
    axes.set_ylabel("Relative throughput")
    axes.set_title(f"{record['file']} on {record['processes']} x {record['device']}, {record['date']}", fontsize=10)
    axes.grid(alpha=0.3, axis="y")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)
