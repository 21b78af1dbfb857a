"""What-if on traces with published results: accuracy and duration (`benchmarks observe --parts whatif`)."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.errors import DataError
from megascale.observe.analysis.operation_trace import read_trace
from megascale.observe.analysis.whatif import analyse_trace

MOST_OFF, MOST_SECONDS = 0.01, 5.0


def measure(folder: Path) -> list[dict[str, Any]]:
    """For each trace-NAME.parquet with its result-NAME.json: ours, theirs and the seconds of a fresh reading.

    DataError if the folder holds none, or if a result is not StragglerAnalysis'.
    """
    files = [file for file in sorted(folder.glob("trace-*.parquet")) if _result(file).is_file()]
    if not files:
        raise DataError(
            f"--traces={folder} holds no trace-NAME.parquet with its result-NAME.json; name the folder `data` of "
            "ByteDance's StragglerAnalysis"
        )
    output = []
    for file in files:
        begin, used = time.perf_counter(), time.process_time()
        trace = read_trace(file)
        ours = analyse_trace(trace)
        seconds, used = time.perf_counter() - begin, time.process_time() - used
        try:
            result = strict_json.loads(_result(file).read_text())
            times = [_mean(result[name]) for name in ("step_t_base", "step_t_nodelay", "step_t_noblk")]
            slow_down = float(result["blocking_slowdown"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{_result(file)} is not a result of StragglerAnalysis: {error!r}") from None
        pairs = {
            "recorded": (ours.recorded, times[0]), "total": (ours.original, times[1]), "ideal": (ours.ideal, times[2]),
            "slow-down": (ours.slow_down, slow_down),
        }  # fmt: skip
        for name, key, value in (("ms", "Ms", ours.stage_share), ("mw", "Mw", ours.worker_share)):
            share = file.with_name(file.name.replace("trace-", f"{name}-")).with_suffix(".json")
            if share.is_file() and not math.isnan(value):
                pairs[key] = (value, float(strict_json.loads(share.read_text())[key]))
        figures = {name: {"ours": local, "published": remote} for name, (local, remote) in pairs.items()}
        name = file.stem.removeprefix("trace-")
        output.append(
            {"name": name, "operations": len(trace), "seconds": seconds, "cpu_seconds": used, "figures": figures}
        )
    return output


def missed(result: list[dict[str, Any]]) -> list[str]:
    """Return the bounds that are missed: total, ideal and slow-down to 1%, 5 s."""
    out = []
    for item in result:
        for name in ("total", "ideal", "slow-down"):
            figure = item["figures"][name]
            if abs(figure["ours"] / figure["published"] - 1) > MOST_OFF:
                out.append(f"{item['name']}: {name} {figure['ours']:.4f}, published {figure['published']:.4f}")
        if item["seconds"] > MOST_SECONDS:
            out.append(f"{item['name']}: {item['seconds']:.1f} s, {MOST_SECONDS:.0f} wanted")
    return out


def lines(result: list[dict[str, Any]]) -> list[str]:
    """One line a trace."""
    return [
        f"what-if: {item['name']}: {item['operations']:,} operations in {item['seconds']:.2f} s "
        f"({item['cpu_seconds']:.2f} "
        "CPU seconds); "
        + ", ".join(
            f"{name} {pair['ours']:.4f} (published {pair['published']:.4f})" for name, pair in item["figures"].items()
        )
        for item in result
    ]


def _result(file: Path) -> Path:
    return file.with_name(file.name.replace("trace-", "result-")).with_suffix(".json")


def _mean(seconds: dict[str, float]) -> float:
    return math.fsum(seconds.values()) / len(seconds)
