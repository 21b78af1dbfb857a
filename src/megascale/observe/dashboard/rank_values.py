"""A figure of every rank over a window of steps, and the ranks that stand out: the heat map.

A rank is an outlier if its modified z-score, 0.6745 (value - median) / MAD of the compared ranks, exceeds
max(3.5, sqrt(2 ln n)) for n ranks, and if it differs from the median by at least 1%. The value 3.5 is from Iglewicz and
Hoaglin (1993); the other is what the largest of n normal values reaches by chance. Ranks are compared within their
pipeline stage if it has enough ranks, because stages do different work.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.errors import ConfigError
from megascale.observe.store.tables import NEWEST, SpanTables

Array = np.ndarray[Any, Any]
_STAGE_RANKS = 8  # ranks per stage from which stages are compared separately
_LEAST_DIFFERENCE = 0.01  # of the median; smaller differences do not matter
_FEWEST_RANKS = 4  # with fewer ranks it is undecidable which one stands out
_MAX_OUTLIERS = 50
_WINDOW = 20  # steps of the default window
_FIRST_ACTIONS = ("forward", "backward", "optimizer")
# Counters that count up are shown by their growth in the window, other counters by their mean.
_GROWING_COUNTER = re.compile(r"^(nic_|ib_|cpu_)(?!speed|link_state|carrier$)")
# Figures by the first part of their name: SQL of the amount and of the rows, with the rest of the name as parameter.
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
        name: in addresses, such as own.step, wait.tensor, bytes.data, counter.gpu_sm_clock_mhz.
        label: text for the page.
        unit: s, bytes or an empty string.
    """

    name: str
    label: str
    unit: str


def list_figures(tables: SpanTables) -> list[Figure]:
    """Return all figures of a run, the most important first."""
    kinds = tables.query("SELECT DISTINCT action, axis FROM rollups ORDER BY ALL")
    pairs = list(zip(kinds["action"].tolist(), kinds["axis"].tolist(), strict=True))
    figures = []
    if any(action == "step" for action, _ in pairs):
        figures += [
            Figure("own.step", "own time of a step (without waits)", "s"),
            Figure("total.step", "time of a step", "s"),
            Figure("waited.step", "all waits of a step", "s"),
        ]
    actions = sorted({action for action, _ in pairs} - {"wait", "transfer", "step"})
    actions.sort(key=lambda action: _FIRST_ACTIONS.index(action) if action in _FIRST_ACTIONS else len(_FIRST_ACTIONS))
    for action in actions:
        figures.append(Figure(f"own.{action}", f"{action.replace('_', ' ')}, own time", "s"))
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
    """Return the first step with roll-ups and the last one of the newest attempt; (0, 0) without roll-ups.

    An earlier attempt may have reached a later step, before the run went back to a checkpoint.
    """
    rows = tables.query(
        "SELECT min(step)::BIGINT AS first, max(step) FILTER (WHERE attempt = (SELECT max(attempt) FROM rollups WHERE "
        "action = 'step'))::BIGINT AS last FROM rollups WHERE action = 'step'"
    )
    first, last = rows["first"], rows["last"]
    if np.ma.is_masked(first) or not len(first):
        return (0, 0)
    return (int(first[0]), int(last[0]))


@dataclass(frozen=True)
class Ranks:
    """Location of the ranks, one row each, in order. host: index into `hosts`."""

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
    """Return the ranks in their newest attempt; coordinates are -1 if they were not recorded."""
    rows = tables.query(
        "WITH timed AS (SELECT rank, arg_max(host, attempt) AS host FROM rollups WHERE action = 'step' GROUP BY rank), "
        "facts AS (SELECT rank, arg_max(host, attempt) AS host, arg_max(hostname, attempt) AS hostname, "
        "arg_max(device, attempt) AS device, arg_max(tensor, attempt) AS tensor, "
        "arg_max(pipeline, attempt) AS pipeline, arg_max(data, attempt) AS data, "
        "arg_max(context, attempt) AS context FROM ranks WHERE rank >= 0 GROUP BY rank) "
        "SELECT coalesce(facts.rank, timed.rank) AS rank, coalesce(facts.host, timed.host)::INTEGER AS host, "
        "coalesce(hostname, '') AS hostname, coalesce(device, '') AS device, coalesce(tensor, -1) AS tensor, "
        "coalesce(pipeline, -1) AS pipeline, coalesce(data, -1) AS data, coalesce(context, -1) AS context "
        "FROM facts FULL OUTER JOIN timed ON facts.rank = timed.rank ORDER BY 1"
    )
    keys = list(zip(rows["host"].tolist(), rows["hostname"].tolist(), strict=True))
    index_by_key = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    # Several hosts of one machine share a name and are distinguished by their number.
    names = [name for _, name in index_by_key]
    return Ranks(
        rank=rows["rank"],
        host=np.array([index_by_key[key] for key in keys], np.int32),
        tensor=rows["tensor"],
        pipeline=rows["pipeline"],
        data=rows["data"],
        context=rows["context"],
        device=rows["device"].tolist(),
        hosts=[
            name if name and names.count(name) == 1 else f"{name or 'host'} #{number}" for number, name in index_by_key
        ],
        host_number=[number for number, _ in index_by_key],
    )


def read_values(tables: SpanTables, figure: str, first: int, last: int, ranks: Ranks) -> Array:
    """Return the mean of `figure` per step for each rank, in seconds or bytes; NaN if it was not recorded."""
    kind, _, subject = figure.partition(".")
    if kind == "counter":
        return _read_counter(tables, subject, first, last, ranks)
    amount, condition = _select_measure(kind, subject)
    rows = tables.query(
        f"WITH {NEWEST}, parts AS (SELECT rank, step, sum({amount})::DOUBLE AS v FROM rollups "
        f"JOIN newest USING (step, attempt) WHERE {condition} AND step BETWEEN ? AND ? GROUP BY ALL) "
        "SELECT rank, avg(v) AS v FROM parts GROUP BY rank",
        [first, last, subject, first, last],
    )
    by_rank = dict(zip(rows["rank"].tolist(), _fill_missing(rows["v"]).tolist(), strict=True))
    return np.array([by_rank.get(rank, math.nan) for rank in ranks.rank.tolist()], np.float64)


def _select_measure(kind: str, subject: str) -> tuple[str, str]:
    """Return SQL of the amount and of the rows of a figure."""
    if kind not in _MEASURES:
        raise ConfigError(f"figure={kind}.{subject[:60]}: a figure begins with {', '.join(_MEASURES)} or counter")
    return _MEASURES[kind]


def _fill_missing(values: Array) -> Array:
    """Return a column with NaN in place of missing values."""
    return np.asarray(np.ma.filled(np.ma.asarray(values, np.float64), np.nan))


def _read_counter(tables: SpanTables, name: str, first: int, last: int, ranks: Ranks) -> Array:
    times = tables.query(
        f"WITH {NEWEST} SELECT min(nullif(first_ns, 0))::BIGINT AS first, max(last_ns)::BIGINT AS last FROM rollups "
        "JOIN newest USING (step, attempt) WHERE action = 'step' AND step BETWEEN ? AND ?",
        [first, last, first, last],
    )
    if np.ma.is_masked(times["first"]):
        return np.full(len(ranks.rank), np.nan)
    if _GROWING_COUNTER.match(name):
        amount = "max(value) - min(value)"
    else:
        amount = "avg(value)"
    rows = tables.query(
        f"SELECT host, device, {amount} AS v FROM counters WHERE name = ? AND time_ns BETWEEN ? AND ? GROUP BY ALL",
        [name, int(times["first"][0]) - 10**9, int(times["last"][0]) + 10**9],
    )
    by_device: dict[tuple[int, str], float] = {}
    host_totals: dict[int, float] = {}
    for host, device, value in zip(*(column.tolist() for column in rows.values()), strict=True):
        by_device[host, device] = value
        if not device.startswith("gpu"):
            host_totals[host] = host_totals.get(host, 0.0) + value
    # A GPU's counter belongs to its rank. Counters of NICs and processors are summed for all ranks of the host.
    values = []
    for index, device in zip(ranks.host.tolist(), ranks.device, strict=True):
        host = ranks.host_number[index]
        if ":" in device:
            value = by_device.get((host, "gpu" + device.rpartition(":")[2]))
        else:
            value = None
        values.append(host_totals.get(host, math.nan) if value is None else value)
    return np.array(values, np.float64)


@dataclass(frozen=True)
class Outliers:
    """Values compared with those of peers.

    Attributes:
        z: modified z-score of each rank; NaN without a value or with too few peers, 0 if the peers are equal.
        median: median of each rank's peers.
        limit: |z| from which a rank is an outlier, by rank.
        among: stage or job, the peers of the comparison.
        outliers: indices of ranks, the largest |z| first.
    """

    z: Array
    median: Array
    limit: Array
    among: str
    outliers: list[int]


def find_outliers(values: Array, pipeline: Array, among: str = "") -> Outliers:
    """Compare the values of ranks.

    Args:
        values: [ranks].
        pipeline: [ranks], each rank's stage.
        among: stage, job, or an empty string for stages if each has enough ranks.
    """
    stages, counts = np.unique(pipeline, return_counts=True)
    if among not in ("", "stage", "job"):
        raise ConfigError(f"among={among[:60]}: ranks are compared among their stage or their job")
    among = among or ("stage" if len(stages) > 1 and counts.min() >= _STAGE_RANKS else "job")
    z = np.full(len(values), np.nan)
    median = np.full(len(values), np.nan)
    limit = np.full(len(values), np.inf)
    if among == "stage":
        groups = [pipeline == stage for stage in stages]
    else:
        groups = [np.ones(len(values), bool)]
    for group in groups:
        finite = group & np.isfinite(values)
        if finite.sum() < _FEWEST_RANKS:
            continue
        differences = values[finite] - np.median(values[finite])
        deviation = np.median(np.abs(differences))
        if deviation == 0:  # more than half of the values are equal: use the mean distance (Iglewicz and Hoaglin)
            deviation = 0.6745 * 1.253314 * np.abs(differences).mean()
        if deviation > 0:
            z[finite] = 0.6745 * differences / deviation
        else:
            z[finite] = 0.0
        median[finite] = np.median(values[finite])
        limit[finite] = max(3.5, math.sqrt(2 * math.log(max(2, finite.sum()))))
    with np.errstate(invalid="ignore"):
        is_outlier = (np.abs(z) > limit) & (np.abs(values - median) > _LEAST_DIFFERENCE * np.abs(median))
    outliers = np.flatnonzero(is_outlier)
    outliers = outliers[np.argsort(-np.abs(z[outliers]))]
    return Outliers(z, median, limit, among, outliers.tolist())


def make_heat_map(
    tables: SpanTables, figure: str, first: int | None, last: int | None, among: str = ""
) -> dict[str, Any]:
    """Return the content of the heat map, by rank in columns. ConfigError for an unknown figure.

    Args:
        figure: a name of `list_figures`; an empty string chooses the first.
        first, last: window of steps; None: the last 20 steps.
    """
    figures = {entry.name: entry for entry in list_figures(tables)}
    if figure and figure not in figures:
        raise ConfigError(f"figure={figure[:60]}: this run has no such figure")
    chosen = figures.get(figure) or next(iter(figures.values()), Figure("", "nothing was recorded", ""))
    low, high = read_step_range(tables)
    first, last = _limit_window(low, high, first, last)
    ranks = read_ranks(tables)
    values = np.full(len(ranks.rank), np.nan)
    if chosen.name:
        values = read_values(tables, chosen.name, first, last, ranks)
    result = find_outliers(values, ranks.pipeline, among)
    return {
        "figure": vars(chosen),
        "figures": [vars(entry) for entry in figures.values()],
        "steps": {"first": first, "last": last, "low": low, "high": high},
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


def _limit_window(low: int, high: int, first: int | None, last: int | None) -> tuple[int, int]:
    """Return a window within the recorded steps; by default the last steps."""
    last = high if last is None else min(high, last)
    first = max(low, last - _WINDOW + 1 if first is None else first)
    return first, last


def read_rank_history(tables: SpanTables, figure: str, rank: int, points: int = 400) -> dict[str, Any]:
    """Return a rank's figure by step with median and extremes of all ranks, in at most `points` buckets of steps."""
    kind, _, subject = figure.partition(".")
    if kind == "counter":
        raise ConfigError(f"figure={figure[:60]}: a host's counters have no history by step")
    amount, condition = _select_measure(kind, subject)
    low, high = read_step_range(tables)
    width = max(1, math.ceil((high - low + 1) / points))
    rows = tables.query(
        f"WITH {NEWEST}, parts AS (SELECT rank, step, sum({amount})::DOUBLE AS v FROM rollups "
        f"JOIN newest USING (step, attempt) WHERE {condition} AND step BETWEEN ? AND ? GROUP BY ALL), "
        "bucketed AS (SELECT rank, step // ? AS bucket, avg(v) AS v, min(step) AS step FROM parts GROUP BY ALL) "
        "SELECT min(step)::BIGINT AS step, median(v) AS middle, min(v) AS low, max(v) AS high, "
        "max(v) FILTER (WHERE rank = ?) AS own FROM bucketed GROUP BY bucket ORDER BY bucket",
        [low, high, subject, low, high, width, rank],
    )
    return {
        "rank": rank,
        "step": rows["step"].tolist(),
        "own": round_values(_fill_missing(rows["own"])),
        "median": round_values(rows["middle"]),
        "low": round_values(rows["low"]),
        "high": round_values(rows["high"]),
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


def finite(value: float) -> float | None:
    """Return a number for JSON, None for infinity and NaN."""
    if math.isfinite(value):
        return float(value)
    return None


def round_values(values: Array, digits: int = 5) -> list[float | None]:
    """Round to significant digits; None for infinity and NaN."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]
