"""Tables of results for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megascale.config import ParallelConfig
from megascale.core import flops
from megascale.simulate.run_cost import RunCost
from megascale.simulate.scenario import Scenario
from megascale.simulate.step import StepEstimate

MAX_BAR = 28  # characters
MIN_BAR = 6  # characters; narrower bars are left out
PART_NAMES = {
    "gemm": "GEMMs",
    "attention": "attention",
    "elementwise": "element-wise",
    "recompute": "recomputation",
    "host": "kernel launches",
    "tensor": "exposed tensor comm.",
    "exchange": "head, expert exchange",
    "pipeline": "exposed pipeline comm.",
    "data": "exposed data comm.",
    "logits": "logits imbalance",
    "bubble": "pipeline bubble",
    "stragglers": "stragglers and skew",
    "optimizer": "optimizer",
    "fixed": "fixed (data, host)",
    "interplay": "interplay of events",
}


def show_rows(headers: Sequence[str], rows: Sequence[Sequence[str]], console: Console, title: str = "") -> None:
    """Print rows as a table or, if the terminal is too narrow for it, as one block of lines per row."""
    widths = [max(len(Text.from_markup(r[i]).plain) for r in (headers, *rows)) for i in range(len(headers))]
    if title:
        console.print(f"[italic]{title}[/italic]", soft_wrap=True)
    if sum(widths) + 2 * len(widths) > console.width:
        for row in rows:
            for name, cell in zip(headers, row, strict=True):
                if cell:
                    console.print(f"  {name or '-':{max(map(len, headers))}s}  {cell}", soft_wrap=True)
            console.print()
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for i, name in enumerate(headers):
        is_numeric = all(r[i][:1].isdigit() or r[i][:1] in "+-~[" or not r[i] for r in rows)
        table.add_column(name, justify="right" if is_numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def list_shown_parts(results: Sequence[StepEstimate]) -> list[str]:
    """Return the parts that take more than 0.01% of the step in any of the results, in the order of PART_NAMES."""
    return [part for part in PART_NAMES if any(abs(r.parts.get(part, 0.0)) > 1e-4 * r.seconds for r in results)]


def _describe_replicas(scenario: Scenario) -> str:
    """Return the sizes of the context axis, if it has several ranks, and of data parallelism."""
    grid = scenario.layout.grid
    if grid.context == 1:
        return f"data {grid.shards}"
    return f"context {grid.context} x data {grid.shards // grid.size('context')}"


def print_summary(results: Sequence[StepEstimate], tokens: float, console: Console) -> None:
    """Print layout, time, MFU, days and memory, with one column per result."""
    first = results[0].scenario
    parallel, train = first.config.parallel, first.config.train
    console.print(
        f"[bold]{train.name}[/bold] on {first.gpus:,} GPUs of {first.cluster.name}: tensor {parallel.tensor} x "
        f"pipeline {parallel.pipeline} (x{parallel.virtual_stages}) x {_describe_replicas(first)}, "
        f"{train.global_batch:,} sequences of {first.config.model.sequence_length:,}, micro-batch {train.micro_batch}",
        soft_wrap=True,
    )
    models_memory = all(r.scenario.software.is_memory_modelled for r in results)
    if models_memory:
        memory_label = "GiB, fullest rank"
    else:
        memory_label = "GiB, with this engine"
    rows = [
        ["linear layers in"] + [r.scenario.software.precision for r in results],
        ["step, s"] + [f"[bold]{r.seconds:.3f}[/bold]" for r in results],
        ["P10-P90"] + [f"{r.low:.3f}-{r.high:.3f}" for r in results],
        ["tokens/s"] + [f"{r.tokens_per_second:,.0f}" for r in results],
        ["MFU"] + [f"{100 * r.mfu:.1f}%" for r in results],
        [f"days for {tokens:.3g} tokens"] + [f"{r.days(tokens):.2f}" for r in results],
        [memory_label] + [f"{r.memory_gib:.1f}" for r in results],
    ]
    if len(results) > 1:
        rows.append(["time against the first"] + [f"{results[0].seconds / r.seconds:.3f}x" for r in results])
    show_rows([""] + [r.scenario.label for r in results], rows, console)
    print_assumptions(results, console)


def print_assumptions(results: Sequence[StepEstimate], console: Console) -> None:
    """Print the level, the calibrations, and the cautions of the results."""
    constants = {r.scenario.label: r.scenario.calibration for r in results}
    descriptions = []
    for label, constant in constants.items():
        fit = ", nothing fitted"
        if constant.fitted:
            fit = f" ({len(constant.rows)} rows, spread {constant.spread:.1%})"
        descriptions.append(f"{label}: calibration {constant.name}{fit}")
    described = "; ".join(descriptions)
    console.print(
        f"[dim]{results[0].level} level; {described}; MFU: {flops.CONVENTION}; days without failures "
        "(see `simulate effective`)[/dim]",
        soft_wrap=True,
    )
    for text in dict.fromkeys(text for r in results for text in r.cautions):
        console.print(Text.assemble(("caution", "yellow"), " ", text), soft_wrap=True)


def print_waterfall(results: Sequence[StepEstimate], console: Console) -> None:
    """Print the seconds of each part, with a bar per part if the terminal is wide enough."""
    table = Table(title="where the step goes, seconds", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("part", no_wrap=True)
    parts = list_shown_parts(results)
    name_width = max(len(PART_NAMES[part]) for part in parts)
    seconds_width = 6
    bar_width = min(MAX_BAR, (console.width - name_width - 4) // len(results) - seconds_width - 4)
    has_bars = bar_width >= MIN_BAR
    for result in results:
        # With bars, a result has two columns, and its label is above the bars, where there is more room.
        if has_bars:
            table.add_column("", justify="right", no_wrap=True)
        table.add_column(result.scenario.label, justify="left" if has_bars else "right", overflow="fold")
    longest = max(max(r.parts.values()) for r in results)
    colours = ("cyan", "green", "magenta", "yellow")
    for part in parts:
        cells = []
        for i, result in enumerate(results):
            value = result.parts.get(part, 0.0)
            cells.append(f"{value:.3f}")
            if has_bars:
                bar = "█" * max(0, round(bar_width * value / longest)) or "▏"
                cells.append(f"[{colours[i % 4]}]{bar}[/]")
        table.add_row(PART_NAMES[part], *cells)
    console.print(table)


def print_ablation(rows: Sequence[tuple[str, StepEstimate, float]], title: str, change: str, console: Console) -> None:
    """Print step and MFU per technique, and the relative change by the technique in a column named `change`."""
    cells = [
        [name, f"{result.seconds:.3f}", f"{100 * result.mfu:.1f}%", f"{changed:.1%}" if i else ""]
        for i, (name, result, changed) in enumerate(rows)
    ]
    show_rows(["", "step, s", "MFU", change], cells, console, title)


def print_cost(cost: RunCost, console: Console) -> None:
    """Print the GPU hours, money and energy of a run, if a price or a power is known."""
    figures = [f"{cost.gpu_hours:,.0f} GPU hours"]
    if cost.money is not None:
        figures.append(f"{cost.money:,.0f} at the price given")
    if cost.megawatt_hours is not None:
        figures.append(f"{cost.megawatt_hours:,.1f} MWh")
    if len(figures) > 1:
        console.print("the run: " + ", ".join(figures), highlight=False)


def print_layouts(
    results: Sequence[StepEstimate], console: Console, title: str, days: Sequence[float] | None = None
) -> None:
    """Print one row per layout.

    Args:
        days: days of the run for each result; None: not printed.
    """
    rows = []
    for i, r in enumerate(results):
        p, t = r.scenario.config.parallel, r.scenario.config.train
        rows.append(
            {
                "GPUs": f"{r.scenario.gpus:,}",
                "batch": f"{t.global_batch:,}",
                "in": r.scenario.label,
                "TP": str(p.tensor),
                "CP": str(p.context),
                "PP": _describe_pipeline(p),
                "DP": str(r.scenario.layout.grid.shards // p.context),
                "ZeRO": str(p.zero),
                "kept": str(p.zero3_keep_layers or ""),
                "MBS": str(t.micro_batch),
                "recompute": p.recompute,
                "step, s": f"{r.seconds:.3f}",
                "P10-P90": f"{r.low:.2f}-{r.high:.2f}",
                "MFU": f"{100 * r.mfu:.1f}%",
                "GiB": f"{r.memory_gib:.1f}",
                "days": "" if days is None else f"{days[i]:.2f}",
            }
        )
    kept_columns = ["step, s", "P10-P90", "MFU", "GiB"]
    if days is not None:
        kept_columns.append("days")
    names, shared_values = split_constant_columns(rows, keep=kept_columns)
    if shared_values:
        title += f" (all: {', '.join(f'{name} {value}' for name, value in shared_values.items())})"
    show_rows(names, [[row[name] for name in names] for row in rows], console, title)
    if any(r.scenario.config.parallel.virtual_stages > 1 for r in results):
        console.print("[dim]PP: stages x chunks per stage : micro-batches of a group[/dim]", soft_wrap=True)
    if any(r.scenario.config.parallel.zero3_keep_layers for r in results):
        console.print("[dim]kept: layers that stay gathered (parallel.zero3_keep_layers)[/dim]", soft_wrap=True)


def _describe_pipeline(parallel: ParallelConfig) -> str:
    """Return STAGESxCHUNKS:GROUP, without the chunks if there is one per stage, and without the default group size."""
    text = str(parallel.pipeline)
    if parallel.virtual_stages > 1:
        text += f"x{parallel.virtual_stages}"
        if parallel.micro_batch_group_size not in (None, parallel.pipeline):
            text += f":{parallel.micro_batch_group_size}"
    return text


def split_constant_columns(
    rows: Sequence[Mapping[str, str]], keep: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Return (columns to show, the other columns with the value that all rows share).

    Args:
        keep: columns that are shown even if all rows have the same value.
    """
    names: list[str] = []
    shared_values: dict[str, str] = {}
    for name, value in rows[0].items():
        if name in keep or (len(rows) > 1 and any(row[name] != value for row in rows)):
            names.append(name)
        elif value:
            shared_values[name] = value
    return names, shared_values
