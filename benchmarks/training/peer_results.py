"""Results of `python -m benchmarks peers`, and their table."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.training.peer_choice import OURS

if TYPE_CHECKING:
    from rich.table import Table

    from megascale.config import Config


@dataclass
class PeerResult:
    """Turn of a contestant.

    Attributes:
        seconds: seconds of each timed step.
        memory_gib: peak memory of a rank.
        versions: versions of packages by name.
        settings: settings, as text.
        sustained: sustained FLOP/s of a GEMM, measured in the same turn.
    """

    name: str
    turn: int
    seconds: list[float]
    memory_gib: float | None
    versions: dict[str, str]
    settings: str
    sustained: float | None = None
    losses: list[float] = field(default_factory=list)


def summarize(
    config: Config, processes: int, peak_tflops: float | None, results: list[PeerResult]
) -> list[dict[str, Any]]:
    """Return a summary per contestant.

    `seconds` is the median of the turns' median steps, `spread` the range of those medians over `seconds`, and `rate`
    tokens/s per process. `mfu` counts the same FLOPs for all contestants.
    """
    from megascale.core.flops import mfu

    summaries: list[dict[str, Any]] = []
    for name in dict.fromkeys(result.name for result in results):
        turns = [result for result in results if result.name == name]
        turn_seconds = [statistics.median(turn.seconds) for turn in turns]
        seconds = statistics.median(turn_seconds)
        rate = config.train.global_batch * config.model.sequence_length / seconds
        memory = [turn.memory_gib for turn in turns if turn.memory_gib is not None]
        summaries.append(
            {
                "name": name,
                "seconds": seconds,
                "spread": (max(turn_seconds) - min(turn_seconds)) / seconds,
                "rate": rate / processes,
                "mfu": mfu(config.model, rate, processes, peak_tflops) if peak_tflops else None,
                "memory_gib": max(memory) if memory else None,
                "settings": turns[-1].settings,
                "versions": turns[-1].versions,
            }
        )
    return summaries


def print_results(record: dict[str, Any], config: Config, results: list[PeerResult]) -> None:
    """Print the table, and the versions and settings of each contestant."""
    from megascale.core.flops import CONVENTION, device_peak_tflops
    from megascale.core.output_console import OutputConsole

    console = OutputConsole(highlight=False)
    peak = config.observe.peak_tflops or device_peak_tflops(record["device"])
    summaries = summarize(config, record["processes"], peak, results)
    console.print(
        f"{record['preset']}, {config.train.global_batch} x {config.model.sequence_length} tokens per step, "
        f"{record['processes']} x {record['device']}, {record['date']}"
    )
    console.print(_make_table(summaries))
    console.print(f"MFU: {CONVENTION}; peak {peak} TFLOP/s")
    rates = [result.sustained for result in results if result.sustained]
    if rates:
        console.print(f"sustained GEMM in the same run: {statistics.mean(rates) / 1e12:.0f} TFLOP/s")
    for summary in summaries:
        versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
        line = f"{summary['name']}: {versions}; {summary['settings']}"
        console.print(line, soft_wrap=True, markup=False)
    for name, obstacle in record["left_out"].items():
        console.print(f"{name}: left out, {obstacle}", soft_wrap=True, markup=False)


def _make_table(summaries: list[dict[str, Any]]) -> Table:
    """Return a table with one row per contestant."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(("", "s/step", "spread", "tokens/s each", "MFU", "GiB", "ours over it")):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    ours = next((summary for summary in summaries if summary["name"] == OURS), None)
    for summary in summaries:
        ratio = ""
        if ours is not None and summary is not ours:
            ratio = f"{summary['seconds'] / ours['seconds']:.3f}x"
        table.add_row(
            summary["name"],
            f"{summary['seconds']:.4f}",
            f"{100 * summary['spread']:.1f}%",
            f"{summary['rate']:,.0f}",
            f"{100 * summary['mfu']:.1f}%" if summary["mfu"] else "",
            f"{summary['memory_gib']:.1f}" if summary["memory_gib"] else "",
            ratio,
        )
    return table
