#!/usr/bin/env python3
"""The pictures of docs/monitoring.md: the panels of both dashboards, drawn from a Prometheus by their own queries.

    scripts/monitoring_pictures.py [--seconds 240] [--out docs/images]
    scripts/monitoring_pictures.py --prometheus http://prometheus:9090 --run NAME --seconds 3600

The first command starts a Prometheus and two small jobs, kills a node of one, and draws what was recorded. The second
draws the runs of a Prometheus that exists. This is not Grafana: matplotlib draws the titles, units, legends and
positions that the dashboards' JSON gives. It needs the extras `dev` and Debian's package `prometheus`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness.launched import Launched, make
from megascale.observe.prometheus.dashboards import make_fleet_dashboard, make_run_dashboard
from megascale.resilience.faults.inject import Options, inject

Json = dict[str, Any]
RUN = "pretrain"
SAMPLES = 300  # per series, over the whole range
SCRAPE_SECONDS = 2
STEPS = 1_500  # planned, more than the recording has time for
COLUMN_INCHES = 0.6
ROW_INCHES = 0.33
TITLE_INCHES = 0.3
MARGINS = (0.75, 0.15, 0.3, 0.65)  # left, right, above and below a panel's axes, in inches
PACE = {RUN: 0.3, "ablation": 0.15}  # run -> least seconds per step


@dataclass(frozen=True)
class Range:
    """A Prometheus server and the range of time to draw, seconds since 1970."""

    url: str
    start: float
    end: float

    def query(self, expression: str) -> list[Json]:
        """Return the series of an expression over the range."""
        step = max((self.end - self.start) / SAMPLES, 1.0)
        return self._get("query_range", query=expression, start=self.start, end=self.end, step=step)

    def query_end(self, expression: str) -> list[Json]:
        """Return the series of an expression at the end of the range."""
        return self._get("query", query=expression, time=self.end)

    def _get(self, page: str, **arguments: object) -> list[Json]:
        with urllib.request.urlopen(f"{self.url}/api/v1/{page}?{urlencode(arguments)}", timeout=60) as response:
            return list(json.load(response)["data"]["result"])


# drawing --------------------------------------------------------------------------------------------------------------


def draw_dashboard(dashboard: Json, source: Range, variables: dict[str, str], file: Path) -> list[str]:
    """Draw all panels into a PNG file. Return the titles of panels without data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    height = rows * ROW_INCHES + TITLE_INCHES
    figure = pyplot.figure(figsize=(24 * COLUMN_INCHES, height))
    empty = []
    for panel in dashboard["panels"]:
        axes = figure.add_axes(_find_rectangle(panel["gridPos"], height))
        axes.set_title(panel["title"], fontsize=9, loc="left")
        if not _DRAW[panel["type"]](axes, panel, source, variables):
            axes.text(0.5, 0.5, "No data", ha="center", va="center", transform=axes.transAxes, color="grey")
            axes.set_axis_off()
            empty.append(panel["title"])
    begin, end = (datetime.fromtimestamp(seconds, UTC) for seconds in (source.start, source.end))
    figure.suptitle(
        f"{dashboard['title']}, {begin:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S} UTC", fontsize=11, y=1 - 0.1 / height
    )
    figure.savefig(file, dpi=80)
    pyplot.close(figure)
    return empty


def _find_rectangle(position: dict[str, int], height: float) -> tuple[float, float, float, float]:
    """Return left, bottom, width and height of a panel's axes as fractions of the figure.

    Args:
        position: of the panel in Grafana's grid of 24 columns.
        height: of the figure in inches.
    """
    left, right, above, below = MARGINS
    top = height - TITLE_INCHES - position["y"] * ROW_INCHES - above
    bottom = height - TITLE_INCHES - (position["y"] + position["h"]) * ROW_INCHES + below
    width = position["w"] * COLUMN_INCHES - left - right
    figure_width = 24 * COLUMN_INCHES
    x = position["x"] * COLUMN_INCHES + left
    return x / figure_width, bottom / height, width / figure_width, (top - bottom) / height


def _draw_series(axes: Any, panel: Json, source: Range, variables: dict[str, str]) -> bool:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    names = []
    for target in panel["targets"]:
        for series in source.query(_replace(target["expr"], variables)):
            name = _format_legend(target, series["metric"])
            times = [datetime.fromtimestamp(seconds, UTC) for seconds, _ in series["values"]]
            values = [float(value) for _, value in series["values"]]
            axes.plot(times, values, label=name, linewidth=1.2)
            names.append(name)
    if not names:
        return False
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.yaxis.set_major_formatter(lambda value, _: _format_value(value, unit))
    locator = AutoDateLocator(maxticks=5)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, show_offset=False))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(0, -0.1), ncols=3, frameon=False)
    return True


def _draw_stat(axes: Any, panel: Json, source: Range, variables: dict[str, str]) -> bool:
    (target,) = panel["targets"]
    names = [
        _format_legend(target, series["metric"]) for series in source.query_end(_replace(target["expr"], variables))
    ]
    axes.set_axis_off()
    axes.text(0.5, 0.5, ", ".join(names), ha="center", va="center", transform=axes.transAxes, fontsize=22)
    return bool(names)


def _draw_table(axes: Any, panel: Json, source: Range, variables: dict[str, str]) -> bool:
    units = {
        override["matcher"]["options"]: change["value"]
        for override in panel["fieldConfig"]["overrides"]
        for change in override["properties"]
        if change["id"] == "unit"
    }
    cells: dict[str, dict[str, str]] = {}
    titles = [target["legendFormat"] for target in panel["targets"]]
    for target, title in zip(panel["targets"], titles, strict=True):
        for series in source.query_end(_replace(target["expr"], variables)):
            text = _format_value(float(series["value"][1]), units.get(title, "none"))
            cells.setdefault(series["metric"]["run"], {})[title] = text
    axes.set_axis_off()
    if not cells:
        return False
    rows = [[run] + [row.get(title, "") for title in titles] for run, row in sorted(cells.items())]
    table = axes.table(rows, colLabels=["Run"] + titles, loc="upper center", cellLoc="left")
    table.scale(1, 1.4)
    return True


_DRAW = {"timeseries": _draw_series, "stat": _draw_stat, "table": _draw_table}


def _replace(expression: str, variables: dict[str, str]) -> str:
    for name, value in variables.items():
        expression = re.sub(rf"\${name}\b", value, expression)
    return expression


def _format_legend(target: Json, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), target["legendFormat"])


def _format_value(value: float, unit: str) -> str:
    """Return a value in a unit of Grafana."""
    from matplotlib.ticker import EngFormatter

    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "none":
        return f"{value:,.4g}"
    symbol = {"Bps": "B/s", "watt": "W", "celsius": "°C"}.get(unit, unit)
    return str(EngFormatter(symbol, places=1).format_data(value))


# recording ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def record(folder: Path, seconds: float) -> Iterator[Range]:
    """Scrape two jobs for some time, kill a node of the first after a third of it, and leave the server running."""
    targets = folder / "targets"
    targets.mkdir()
    subprocess.run(
        [sys.executable, "-m", "megascale", "monitoring", str(folder), "--targets", str(targets)], check=True
    )
    configuration = folder / "prometheus.yml"
    intervals = f"global: {{scrape_interval: {SCRAPE_SECONDS}s, evaluation_interval: {SCRAPE_SECONDS}s}}\n"
    text = configuration.read_text().replace("refresh_interval: 15s", "refresh_interval: 1s")
    configuration.write_text(intervals + text)
    port = _free_port()
    command = ["prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with open(folder / "prometheus.log", "wb") as log:
        server = subprocess.Popen(command + [f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    jobs: list[Launched] = []
    try:
        file = make(folder)
        start = time.time()
        for name, pace in PACE.items():
            arguments = [f"--resilience.targets={targets}", f"--train.steps={STEPS}", "--resilience.test_spares=false"]
            arguments += [f"--resilience.driver_metrics=127.0.0.1:{_free_port()}", "--resilience.job_name=example"]
            jobs.append(Launched(file, name, arguments, pace))
        for job in jobs:
            job.first(lambda event: event.kind == "first_step")
        _sleep_up_to(start + seconds / 3)
        print("\n".join(inject(jobs[0].run, "kill-node", Options(node="n1"))))
        _sleep_up_to(start + seconds)
        yield Range(f"http://127.0.0.1:{port}", start, time.time())
    finally:
        for job in jobs:
            job.process.send_signal(signal.SIGINT)
        for job in jobs:
            job.end(60.0)
            job.end_agents()
        server.terminate()
        server.wait()


def _sleep_up_to(deadline: float) -> None:
    time.sleep(max(deadline - time.time(), 0.0))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> int:
    """Record unless a server is given, and draw both dashboards."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prometheus", default="", help="URL of a server; default: record two small jobs")
    parser.add_argument("--run", default=RUN, help="the run of the run dashboard")
    parser.add_argument("--seconds", type=float, default=240.0, help="length of the recording or of the range")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if options.prometheus:
            now = time.time()
            source = Range(options.prometheus.rstrip("/"), now - options.seconds, now)
        else:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ms", ignore_cleanup_errors=True)))
            source = stack.enter_context(record(folder, options.seconds))
        pictures = (
            ("monitoring-run.png", make_run_dashboard(), {"run": options.run}),
            ("monitoring-fleet.png", make_fleet_dashboard(), {"job_name": ".*"}),
        )
        for name, dashboard, variables in pictures:
            empty = draw_dashboard(dashboard, source, variables, options.out / name)
            print(f"{options.out / name}; panels without data: {', '.join(empty) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
