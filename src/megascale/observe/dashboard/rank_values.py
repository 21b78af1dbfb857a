"""The dashboard's heat map: a metric of every rank over a window of steps, and the outliers among the ranks.

A figure is a metric with a value per rank, such as the time of a step without waits, or a counter of the host. The
figures of the training itself come from roll-ups: sums of a step's spans by rank, action and axis.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.errors import ConfigError
from megascale.observe.dashboard.outliers import find_outliers
from megascale.observe.store.tables import NEWEST, SpanTables

Array = np.ndarray[Any, Any]
_MAX_OUTLIERS = 50
_DEFAULT_STEPS = 20  # steps of the default window
# After the figures of a step, `list_figures` lists those of these actions, then those of all other actions.
_FIRST_ACTIONS = ("forward", "backward", "optimizer")
# Counters that only increase are shown by their growth in the window, other counters by their mean. The exceptions are
# a NIC's speed and state.
_GROWING_COUNTER = re.compile(r"^(nic_|ib_|cpu_)(?!speed|link_state|carrier$)")
# The name of a figure is KIND.SUBJECT, such as wait.tensor. For each kind: SQL of the amount, and SQL that selects
# rows, with the subject as parameter. The subject of own, total and waited is an action: its time without waits, its
# time, and the waits inside it. The subject of wait and bytes is an axis, along which ranks wait and send.
_MEASURES = {
    "own": ("(total_ns - waited_ns) / 1e9", "action = ?"),
    "total": ("total_ns / 1e9", "action = ?"),
    "waited": ("waited_ns / 1e9", "action = ?"),
    "wait": ("total_ns / 1e9", "action = 'wait' AND axis = ?"),
    "bytes": ("bytes", "action = 'transfer' AND axis = ?"),
}


@dataclass(frozen=True)
class Figure:
    """A figure that a heat map can show.

    Attributes:
        name: name in addresses of pages, such as own.step, wait.tensor, bytes.data, counter.gpu_sm_clock_mhz.
        label: text for the page.
        unit: "s", "bytes" or an empty string.
    """

    name: str
    label: str
    unit: str


def list_figures(tables: SpanTables) -> list[Figure]:
    """Return all figures of a run, the most important first."""
    rows = tables.query("SELECT DISTINCT action, axis FROM rollups ORDER BY ALL")
    pairs = list(zip(rows["action"].tolist(), rows["axis"].tolist(), strict=True))
    figures = []
    # Roll-ups have the action "wait" or "transfer" with an axis, or any other action without one.
    if any(action == "step" for action, _ in pairs):
        figures += [
            Figure("own.step", "time of a step without waits", "s"),
            Figure("total.step", "time of a step", "s"),
            Figure("waited.step", "all waits of a step", "s"),
        ]
    actions = sorted({action for action, _ in pairs} - {"wait", "transfer", "step"})
    actions.sort(key=lambda action: _FIRST_ACTIONS.index(action) if action in _FIRST_ACTIONS else len(_FIRST_ACTIONS))
    for action in actions:
        figures.append(Figure(f"own.{action}", f"{action.replace('_', ' ')}, without waits", "s"))
    for action, axis in pairs:
        if action == "wait" and axis:
            figures.append(Figure(f"wait.{axis}", f"wait along {axis}", "s"))
    for action, axis in pairs:
        if action == "transfer" and axis:
            figures.append(Figure(f"bytes.{axis}", f"sent along {axis}", "bytes"))
    for name in tables.query("SELECT DISTINCT name FROM counters ORDER BY name")["name"].tolist():
        figures.append(Figure(f"counter.{name}", f"host: {name.replace('_', ' ')}", ""))
    return figures


def read_step_range(tables: SpanTables) -> tuple[int, int]:
    """Return the first step with roll-ups, and the last step of the newest attempt; (0, 0) without roll-ups.

    An earlier attempt may have reached a later step, because a new attempt continues from a checkpoint.
    """
    rows = tables.query(
        "SELECT min(step)::BIGINT AS first, max(step) FILTER (WHERE attempt = (SELECT max(attempt) FROM rollups WHERE "
        "action = 'step'))::BIGINT AS last FROM rollups WHERE action = 'step'"
    )
    first, last = rows["first"], rows["last"]
    if np.ma.is_masked(first) or not len(first):  # a masked value stands for SQL's NULL
        return (0, 0)
    return (int(first[0]), int(last[0]))


@dataclass(frozen=True)
class Ranks:
    """Location of the ranks. All attributes but the last two have an element per rank, sorted by rank.

    Attributes:
        host: index into `hosts`.
        tensor, pipeline, data, context: coordinates, -1 if they were not recorded.
        device: name of each rank's device, such as cuda:0; empty if it was not recorded.
        hosts: name of each host.
        host_number: number of each host, by which the tables of spans and counters name it.
    """

    rank: Array
    host: Array
    tensor: Array
    pipeline: Array
    data: Array
    context: Array
    device: list[str]
    hosts: list[str]
    host_number: list[int]


def read_ranks(tables: SpanTables) -> Ranks:
    """Return the location of each rank in the rank's newest attempt."""
    # A rank without a row in `ranks` has a host if it has roll-ups of steps.
    rows = tables.query(
        "WITH timed AS (SELECT rank, arg_max(host, attempt) AS host FROM rollups WHERE action = 'step' GROUP BY rank), "
        "recorded AS (SELECT rank, arg_max(host, attempt) AS host, arg_max(hostname, attempt) AS hostname, "
        "arg_max(device, attempt) AS device, arg_max(tensor, attempt) AS tensor, "
        "arg_max(pipeline, attempt) AS pipeline, arg_max(data, attempt) AS data, "
        "arg_max(context, attempt) AS context FROM ranks WHERE rank >= 0 GROUP BY rank) "
        "SELECT coalesce(recorded.rank, timed.rank) AS rank, coalesce(recorded.host, timed.host)::INTEGER AS host, "
        "coalesce(hostname, '') AS hostname, coalesce(device, '') AS device, coalesce(tensor, -1) AS tensor, "
        "coalesce(pipeline, -1) AS pipeline, coalesce(data, -1) AS data, coalesce(context, -1) AS context "
        "FROM recorded FULL OUTER JOIN timed ON recorded.rank = timed.rank ORDER BY 1"
    )
    host_of_rank = list(zip(rows["host"].tolist(), rows["hostname"].tolist(), strict=True))  # number and name
    hosts = list(dict.fromkeys(host_of_rank))
    index_by_host = {host: index for index, host in enumerate(hosts)}
    names = [name for _, name in hosts]
    labels = []
    for number, name in hosts:
        if name and names.count(name) == 1:
            labels.append(name)
        else:
            labels.append(f"{name or 'host'} #{number}")  # several hosts may have one name (on one machine)
    return Ranks(
        rank=rows["rank"],
        host=np.array([index_by_host[host] for host in host_of_rank], np.int32),
        tensor=rows["tensor"],
        pipeline=rows["pipeline"],
        data=rows["data"],
        context=rows["context"],
        device=rows["device"].tolist(),
        hosts=labels,
        host_number=[number for number, _ in hosts],
    )


def read_values(tables: SpanTables, figure: str, first: int, last: int, ranks: Ranks) -> Array:
    """Return the value of `figure` for each rank, [ranks]; NaN if it was not recorded.

    The value is the mean per step from `first` to `last`, in seconds or bytes. For a counter it is the growth or the
    mean within these steps, in the counter's unit.
    """
    kind, _, subject = figure.partition(".")
    if kind == "counter":
        return _read_counter(tables, subject, first, last, ranks)
    amount, condition = _select_measure(kind, subject)
    rows = tables.query(
        f"WITH {NEWEST}, by_step AS (SELECT rank, step, sum({amount})::DOUBLE AS v FROM rollups "
        f"JOIN newest USING (step, attempt) WHERE {condition} AND step BETWEEN ? AND ? GROUP BY ALL) "
        "SELECT rank, avg(v) AS v FROM by_step GROUP BY rank",
        # NEWEST, which selects the newest attempt of each step, has the first two parameters.
        [first, last, subject, first, last],
    )
    value_by_rank = dict(zip(rows["rank"].tolist(), _fill_missing(rows["v"]).tolist(), strict=True))
    return np.array([value_by_rank.get(rank, math.nan) for rank in ranks.rank.tolist()], np.float64)


def _select_measure(kind: str, subject: str) -> tuple[str, str]:
    """Return the SQL of a figure's amount and rows (see _MEASURES). Raises ConfigError for an unknown kind."""
    if kind not in _MEASURES:
        raise ConfigError(f"figure={kind}.{subject[:60]}: a figure begins with {', '.join(_MEASURES)} or counter")
    return _MEASURES[kind]


def _fill_missing(values: Array) -> Array:
    """Return a column with NaN in place of missing values."""
    return np.asarray(np.ma.filled(np.ma.asarray(values, np.float64), np.nan))


def _read_counter(tables: SpanTables, name: str, first: int, last: int, ranks: Ranks) -> Array:
    """Return a counter's value of each rank in a window of steps, [ranks]; NaN if it was not recorded.

    A GPU's counter belongs to its rank. Counters of NICs and processors are summed for all ranks of the host.
    """
    times = tables.query(
        f"WITH {NEWEST} SELECT min(nullif(first_ns, 0))::BIGINT AS first, max(last_ns)::BIGINT AS last FROM rollups "
        "JOIN newest USING (step, attempt) WHERE action = 'step' AND step BETWEEN ? AND ?",
        [first, last, first, last],  # NEWEST has the first two parameters.
    )
    if np.ma.is_masked(times["first"]):
        return np.full(len(ranks.rank), np.nan)
    if _GROWING_COUNTER.match(name):
        amount = "max(value) - min(value)"
    else:
        amount = "avg(value)"
    # A short window may lie between two samples of a counter, so widen it by a second at both ends.
    rows = tables.query(
        f"SELECT host, device, {amount} AS v FROM counters WHERE name = ? AND time_ns BETWEEN ? AND ? GROUP BY ALL",
        [name, int(times["first"][0]) - 10**9, int(times["last"][0]) + 10**9],
    )
    value_by_device: dict[tuple[int, str], float] = {}
    host_totals: dict[int, float] = {}
    for host, device, value in zip(*(column.tolist() for column in rows.values()), strict=True):
        value_by_device[host, device] = value
        if not device.startswith("gpu"):
            host_totals[host] = host_totals.get(host, 0.0) + value
    values = []
    for index, device in zip(ranks.host.tolist(), ranks.device, strict=True):
        host = ranks.host_number[index]
        value = host_totals.get(host, math.nan)
        if ":" in device:  # cuda:3 is gpu3 in the counters
            value = value_by_device.get((host, "gpu" + device.rpartition(":")[2]), value)
        values.append(value)
    return np.array(values, np.float64)


def make_heat_map(
    tables: SpanTables, figure: str, first: int | None, last: int | None, among: str = ""
) -> dict[str, Any]:
    """Return the content of the heat map as columns with an element per rank. Raises ConfigError for an unknown figure.

    Args:
        figure: a name of `list_figures`; an empty string chooses the first figure.
        first, last: window of steps; None: the last 20 steps.
        among: see `find_outliers`.
    """
    figures = list_figures(tables)
    matches = [candidate for candidate in figures if figure in ("", candidate.name)]
    if figure and not matches:
        raise ConfigError(f"figure={figure[:60]}: this run has no such figure")
    chosen = Figure("", "nothing was recorded", "")  # if the run has no figures
    if matches:
        chosen = matches[0]
    first_recorded, last_recorded = read_step_range(tables)
    first, last = _limit_window(first_recorded, last_recorded, first, last)
    ranks = read_ranks(tables)
    values = np.full(len(ranks.rank), np.nan)
    if chosen.name:
        values = read_values(tables, chosen.name, first, last, ranks)
    result = find_outliers(values, ranks.pipeline, among)
    return {
        "figure": vars(chosen),
        "figures": [vars(candidate) for candidate in figures],
        "steps": {"first": first, "last": last, "low": first_recorded, "high": last_recorded},
        "hosts": ranks.hosts,
        "rank": ranks.rank.tolist(),
        "host": ranks.host.tolist(),
        "tensor": ranks.tensor.tolist(),
        "pipeline": ranks.pipeline.tolist(),
        "data": ranks.data.tolist(),
        "context": ranks.context.tolist(),
        "value": round_values(values),
        "z": round_values(result.z, digits=3),
        "among": result.among,
        "limit": float(np.min(result.limit)) if np.isfinite(result.limit).any() else None,
        "outliers": [
            {
                "rank": int(ranks.rank[i]),
                "host": ranks.hosts[ranks.host[i]],
                "value": float(values[i]),
                "z": float(result.z[i]),
                "median": float(result.median[i]),
            }
            for i in result.outliers[:_MAX_OUTLIERS]
        ],
        "outlier_count": len(result.outliers),
        "skipped": [f"{name}: {reason}" for name, reason in list(tables.skipped.items())[:20]],
    }


def _limit_window(first_recorded: int, last_recorded: int, first: int | None, last: int | None) -> tuple[int, int]:
    """Return first and last step of a window within the recorded steps; by default the last steps."""
    last = last_recorded if last is None else min(last_recorded, last)
    if first is None:
        first = last - _DEFAULT_STEPS + 1
    return max(first_recorded, first), last


def read_rank_history(tables: SpanTables, figure: str, rank: int, points: int = 400) -> dict[str, Any]:
    """Return a rank's figure with median and extremes of all ranks, in at most `points` buckets of steps.

    Raises ConfigError for an unknown figure and for counters, which are not recorded by step.
    """
    kind, _, subject = figure.partition(".")
    if kind == "counter":
        raise ConfigError(f"figure={figure[:60]}: a host's counters have no history by step")
    amount, condition = _select_measure(kind, subject)
    first_recorded, last_recorded = read_step_range(tables)
    bucket_steps = max(1, math.ceil((last_recorded - first_recorded + 1) / points))
    rows = tables.query(
        f"WITH {NEWEST}, by_step AS (SELECT rank, step, sum({amount})::DOUBLE AS v FROM rollups "
        f"JOIN newest USING (step, attempt) WHERE {condition} AND step BETWEEN ? AND ? GROUP BY ALL), "
        "bucketed AS (SELECT rank, step // ? AS bucket, avg(v) AS v, min(step) AS step FROM by_step GROUP BY ALL) "
        "SELECT min(step)::BIGINT AS step, median(v) AS middle, min(v) AS least, max(v) AS greatest, "
        "max(v) FILTER (WHERE rank = ?) AS own FROM bucketed GROUP BY bucket ORDER BY bucket",
        # NEWEST has the first two parameters.
        [first_recorded, last_recorded, subject, first_recorded, last_recorded, bucket_steps, rank],
    )
    return {
        "rank": rank,
        "step": rows["step"].tolist(),
        "own": round_values(_fill_missing(rows["own"])),
        "median": round_values(rows["middle"]),
        "low": round_values(rows["least"]),
        "high": round_values(rows["greatest"]),
    }


def read_rank_figures(tables: SpanTables, rank: int, first: int | None, last: int | None) -> dict[str, Any]:
    """Return all roll-ups of a rank as means per step: rows of [action, axis, seconds, waited seconds, bytes]."""
    first, last = _limit_window(*read_step_range(tables), first, last)
    rows = tables.query(
        "WITH selected AS (SELECT * FROM rollups WHERE rank = ? AND step BETWEEN ? AND ?), "
        "newest AS (SELECT step, max(attempt) AS attempt FROM selected GROUP BY step), "
        "counted AS (SELECT selected.* FROM selected JOIN newest USING (step, attempt)), "
        "steps AS (SELECT count(*)::DOUBLE AS n FROM newest) "
        "SELECT action, axis, sum(total_ns)::DOUBLE / 1e9 / any_value(n) AS seconds, "
        "sum(waited_ns)::DOUBLE / 1e9 / any_value(n) AS waited, sum(bytes)::DOUBLE / any_value(n) AS bytes "
        "FROM counted, steps GROUP BY action, axis ORDER BY seconds DESC",
        [rank, first, last],
    )
    return {
        "rank": rank,
        "steps": {"first": first, "last": last},
        "rows": [list(row) for row in zip(*(column.tolist() for column in rows.values()), strict=True)],
    }


def to_json_number(value: float) -> float | None:
    """Return a number for JSON: None for infinity and NaN."""
    if math.isfinite(value):
        return float(value)
    return None


def round_values(values: Array, digits: int = 5) -> list[float | None]:
    """Round to significant digits; None for infinity and NaN."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]
