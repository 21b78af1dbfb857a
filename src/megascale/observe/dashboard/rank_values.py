"""A figure of every rank over a window of steps, and which ranks it sets apart: the heat map.

A rank is an outlier if its modified z-score, 0.6745 (value - median) / MAD of those it is compared with, is above
max(3.5, sqrt(2 ln n)) of n ranks (3.5: Iglewicz and Hoaglin 1993; the other is what the largest of n normal values
comes to by chance), and it differs from the median by 1% at least. Ranks are compared with those of the same pipeline
stage where there are enough, since stages do different work.
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
_PEERS = 8  # ranks of a stage from which on stages are compared each for itself
_LEAST = 0.01  # of the median: less is of no use to anybody
_FEWEST = 4  # ranks: of fewer nobody can say which one is the other
_MOST_OUTLIERS = 50
# A counter that counts up; its growth in the window is shown, of others the mean.
_GROWS = re.compile(r"^(nic_|ib_|cpu_)(?!speed|link_state|carrier$)")


@dataclass(frozen=True)
class Figure:
    """What a heat map can show.

    Attributes:
        name: for addresses, such as own.step, wait.tensor, bytes.data, counter.gpu_sm_clock_mhz.
        label: for people.
        unit: s, bytes or "".
    """

    name: str
    label: str
    unit: str


def figures(tables: SpanTables) -> list[Figure]:
    """All that this run has, the most telling first."""
    kinds = tables.query("SELECT DISTINCT action, axis FROM rollups ORDER BY ALL")
    pairs = list(zip(kinds["action"].tolist(), kinds["axis"].tolist(), strict=True))
    actions = sorted({action for action, axis in pairs if action not in ("wait", "transfer", "step")})
    found = []
    if any(action == "step" for action, _ in pairs):
        found += [
            Figure("own.step", "own time of a step (without waits)", "s"),
            Figure("total.step", "time of a step", "s"),
            Figure("waited.step", "all waits of a step", "s"),
        ]
    first = [name for name in ("forward", "backward", "optimizer") if name in actions]
    for action in [*first, *(name for name in actions if name not in first)]:
        found.append(Figure(f"own.{action}", f"{action.replace('_', ' ')}, own time", "s"))
    found += [Figure(f"wait.{axis}", f"wait along {axis}", "s") for action, axis in pairs if action == "wait" and axis]
    found += [Figure(f"bytes.{axis}", f"sent along {axis}", "bytes") for a, axis in pairs if a == "transfer" and axis]
    names = tables.query("SELECT DISTINCT name FROM counters ORDER BY name")["name"].tolist()
    found += [Figure(f"counter.{name}", f"host: {name.replace('_', ' ')}", "") for name in names]
    return found


def known_steps(tables: SpanTables) -> tuple[int, int]:
    """Return the first step with roll-ups and the last one of the newest attempt; (0, 0) if there are none.

    An earlier attempt may have come farther, before the run went back to a checkpoint.
    """
    found = tables.query(
        "SELECT min(step)::BIGINT AS first, max(step) FILTER (WHERE attempt = (SELECT max(attempt) FROM rollups WHERE "
        "action = 'step'))::BIGINT AS last FROM rollups WHERE action = 'step'"
    )
    first, last = found["first"], found["last"]
    return (0, 0) if np.ma.is_masked(first) or not len(first) else (int(first[0]), int(last[0]))


@dataclass(frozen=True)
class Ranks:
    """Who the ranks are, each a row, in order. host: index into `hosts`."""

    rank: Array
    host: Array
    tensor: Array
    pipeline: Array
    data: Array
    device: list[str]
    hosts: list[str]
    host_number: list[int]


def ranks_of(tables: SpanTables) -> Ranks:
    """The ranks in their newest attempt. Where nobody wrote who a rank is, its coordinates are -1."""
    found = tables.query(
        "WITH seen AS (SELECT rank, arg_max(host, attempt) AS host FROM rollups WHERE action = 'step' GROUP BY rank), "
        "told AS (SELECT rank, arg_max(host, attempt) AS host, arg_max(hostname, attempt) AS hostname, "
        "arg_max(device, attempt) AS device, arg_max(tensor, attempt) AS tensor, "
        "arg_max(pipeline, attempt) AS pipeline, arg_max(data, attempt) AS data FROM ranks WHERE rank >= 0 "
        "GROUP BY rank) "
        "SELECT coalesce(told.rank, seen.rank) AS rank, coalesce(told.host, seen.host)::INTEGER AS host, "
        "coalesce(hostname, '') AS hostname, coalesce(device, '') AS device, coalesce(tensor, -1) AS tensor, "
        "coalesce(pipeline, -1) AS pipeline, coalesce(data, -1) AS data "
        "FROM told FULL OUTER JOIN seen ON told.rank = seen.rank ORDER BY 1"
    )
    keys = list(zip(found["host"].tolist(), found["hostname"].tolist(), strict=True))
    order = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    same: dict[str, list[int]] = {}  # names of several hosts of one machine are told apart by their number
    for number, name in order:
        same.setdefault(name, []).append(number)
    hosts = [name if name and len(same[name]) == 1 else f"{name or 'host'} #{number}" for number, name in order]
    return Ranks(
        found["rank"], np.array([order[key] for key in keys], np.int32), found["tensor"], found["pipeline"],
        found["data"], found["device"].tolist(), hosts, [number for number, _ in order],
    )  # fmt: skip


def values_of(tables: SpanTables, figure: str, first: int, last: int, ranks: Ranks) -> Array:
    """The mean of a step of `figure` for each rank, seconds or bytes; nan where there is none."""
    kind, _, what = figure.partition(".")
    if kind == "counter":
        return _counters(tables, what, first, last, ranks)
    amount, where, words = _measure(kind, what)
    found = tables.query(
        f"WITH {NEWEST}, parts AS (SELECT rank, step, sum({amount})::DOUBLE AS v FROM rollups "
        f"JOIN newest USING (step, attempt) WHERE {where} AND step BETWEEN ? AND ? GROUP BY ALL) "
        "SELECT rank, avg(v) AS v FROM parts GROUP BY rank",
        [first, last, *words, first, last],
    )
    return _placed(ranks.rank, found["rank"], found["v"])


def _measure(kind: str, what: str) -> tuple[str, str, list[str]]:
    """(SQL of the amount, SQL of the rows, its parameters)."""
    measures = {
        "own": ("(total_ns - waited_ns) / 1e9", "action = ?", [what]),
        "total": ("total_ns / 1e9", "action = ?", [what]),
        "waited": ("waited_ns / 1e9", "action = ?", [what]),
        "wait": ("total_ns / 1e9", "action = 'wait' AND axis = ?", [what]),
        "bytes": ("bytes", "action = 'transfer' AND axis = ?", [what]),
    }
    if kind not in measures:
        raise ConfigError(f"figure={kind}.{what[:60]}: a figure begins with {', '.join(measures)} or counter")
    return measures[kind]


def _placed(ranks: Array, found: Array, values: Array) -> Array:
    out = np.full(len(ranks), np.nan)
    where = np.searchsorted(ranks, found)
    good = (where < len(ranks)) & (ranks[np.minimum(where, len(ranks) - 1)] == found) if len(ranks) else found < 0
    out[where[good]] = np.ma.filled(np.ma.asarray(values, np.float64), np.nan)[good]
    return out


def _counters(tables: SpanTables, name: str, first: int, last: int, ranks: Ranks) -> Array:
    when = tables.query(
        f"WITH {NEWEST} SELECT min(nullif(first_ns, 0))::BIGINT AS first, max(last_ns)::BIGINT AS last FROM rollups "
        "JOIN newest USING (step, attempt) WHERE action = 'step' AND step BETWEEN ? AND ?",
        [first, last, first, last],
    )
    if np.ma.is_masked(when["first"]):
        return np.full(len(ranks.rank), np.nan)
    amount = "max(value) - min(value)" if _GROWS.match(name) else "avg(value)"
    found = tables.query(
        f"SELECT host, device, {amount} AS v FROM counters WHERE name = ? AND time_ns BETWEEN ? AND ? GROUP BY ALL",
        [name, int(when["first"][0]) - 10**9, int(when["last"][0]) + 10**9],
    )
    by_device = {
        (host, device): value for host, device, value in zip(*(c.tolist() for c in found.values()), strict=True)
    }
    # A GPU's counter is its rank's; one of a NIC or the processors belongs to all ranks of the host, added up.
    whole: dict[int, float] = {}
    for (host, device), value in by_device.items():
        if not device.startswith("gpu"):
            whole[host] = whole.get(host, 0.0) + value
    out = []
    for index, device in zip(ranks.host.tolist(), ranks.device, strict=True):
        number = ranks.host_number[index]
        gpu = by_device.get((number, "gpu" + device.rpartition(":")[2])) if ":" in device else None
        out.append(gpu if gpu is not None else whole.get(number, math.nan))
    return np.array(out, np.float64)


@dataclass(frozen=True)
class Judged:
    """Values beside those of peers.

    Attributes:
        z: modified z-score of each rank; nan where there is no value or too few peers, 0 where peers do not
            differ.
        median: of each rank's peers.
        limit: from which |z| on a rank is an outlier, by rank.
        among: stage or job, by what ranks were compared with.
        outliers: indices of ranks, farthest first.
    """

    z: Array
    median: Array
    limit: Array
    among: str
    outliers: list[int]


def find_outliers(values: Array, pipeline: Array, among: str = "") -> Judged:
    """Args:
    values: [ranks].
    pipeline: [ranks], each rank's stage.
    among: stage, job, or "" for stages where each has enough ranks.
    """
    stages, counts = np.unique(pipeline, return_counts=True)
    if among not in ("", "stage", "job"):
        raise ConfigError(f"among={among[:60]}: ranks are compared among their stage or their job")
    among = among or ("stage" if len(stages) > 1 and counts.min() >= _PEERS else "job")
    z, median, limit = np.full(len(values), np.nan), np.full(len(values), np.nan), np.full(len(values), np.inf)
    groups = [pipeline == stage for stage in stages] if among == "stage" else [np.ones(len(values), bool)]
    for group in groups:
        good = group & np.isfinite(values)
        if good.sum() < _FEWEST:
            continue
        one = values[good]
        middle = np.median(one)
        spread = np.median(np.abs(one - middle))
        if spread == 0:  # more than half are equal: the mean distance, as Iglewicz and Hoaglin have it
            spread = 0.6745 * 1.253314 * np.abs(one - middle).mean()
        z[good] = 0.6745 * (one - middle) / spread if spread > 0 else 0.0
        median[good], limit[good] = middle, max(3.5, math.sqrt(2 * math.log(max(2, good.sum()))))
    with np.errstate(invalid="ignore"):
        far = (np.abs(z) > limit) & (np.abs(values - median) > _LEAST * np.abs(median))
    order = np.flatnonzero(far)
    order = order[np.argsort(-np.abs(z[order]))]
    return Judged(z, median, limit, among, order.tolist())


def heat_map(tables: SpanTables, figure: str, first: int | None, last: int | None, among: str = "") -> dict[str, Any]:
    """All that the heat map shows, by rank in columns. ConfigError names what of the question is none.

    Args:
        figure: one of `figures`; "" the first.
        first, last: window of steps; None: the last 20 there are.
    """
    known, (low, high) = figures(tables), known_steps(tables)
    names = {one.name: one for one in known}
    if figure and figure not in names:
        raise ConfigError(f"figure={figure[:60]}: this run has none of that name")
    chosen = names.get(figure) or (known[0] if known else Figure("", "nothing was recorded", ""))
    last = min(high, last) if last is not None else high
    first = max(low, first) if first is not None else max(low, last - 19)
    ranks = ranks_of(tables)
    values = values_of(tables, chosen.name, first, last, ranks) if chosen.name else np.full(len(ranks.rank), np.nan)
    found = find_outliers(values, ranks.pipeline, among)
    return {
        "figure": vars(chosen),
        "figures": [vars(one) for one in known],
        "steps": {"first": first, "last": last, "low": low, "high": high},
        "hosts": ranks.hosts,
        "rank": ranks.rank.tolist(),
        "host": ranks.host.tolist(),
        "tensor": ranks.tensor.tolist(),
        "pipeline": ranks.pipeline.tolist(),
        "data": ranks.data.tolist(),
        "value": rounded(values),
        "z": rounded(found.z, 3),
        "among": found.among,
        "limit": float(np.min(found.limit)) if np.isfinite(found.limit).any() else None,
        "outliers": [
            {
                "rank": int(ranks.rank[i]), "host": ranks.hosts[ranks.host[i]], "value": float(values[i]),
                "z": float(found.z[i]), "median": float(found.median[i]),
            }
            for i in found.outliers[:_MOST_OUTLIERS]
        ],
        "outlier_count": len(found.outliers),
        "skipped": [f"{name}: {why}" for name, why in list(tables.skipped.items())[:20]],
    }  # fmt: skip


def rank_history(tables: SpanTables, figure: str, rank: int, points: int = 400) -> dict[str, Any]:
    """A rank's figure by step beside the median and the extremes of all ranks, in at most `points` buckets of steps."""
    kind, _, what = figure.partition(".")
    if kind == "counter":
        raise ConfigError(f"figure={figure[:60]}: a host's counters have no history by step")
    amount, where, words = _measure(kind, what)
    low, high = known_steps(tables)
    width = max(1, math.ceil((high - low + 1) / points))
    found = tables.query(
        f"WITH {NEWEST}, parts AS (SELECT rank, step, sum({amount})::DOUBLE AS v FROM rollups "
        f"JOIN newest USING (step, attempt) WHERE {where} AND step BETWEEN ? AND ? GROUP BY ALL), "
        "bucketed AS (SELECT rank, step // ? AS bucket, avg(v) AS v, min(step) AS step FROM parts GROUP BY ALL) "
        "SELECT min(step)::BIGINT AS step, median(v) AS middle, min(v) AS low, max(v) AS high, "
        "max(v) FILTER (WHERE rank = ?) AS own FROM bucketed GROUP BY bucket ORDER BY bucket",
        [low, high, *words, low, high, width, rank],
    )
    own = np.ma.filled(np.ma.asarray(found["own"], np.float64), np.nan)
    return {
        "rank": rank,
        "step": found["step"].tolist(),
        "own": rounded(own),
        "median": rounded(found["middle"]),
        "low": rounded(found["low"]),
        "high": rounded(found["high"]),
    }


def rank_figures(tables: SpanTables, rank: int, first: int | None, last: int | None) -> dict[str, Any]:
    """All of one rank's roll-ups, means of a step: [action, axis, seconds, seconds waited in it, bytes] a row."""
    low, high = known_steps(tables)
    last = min(high, last) if last is not None else high
    first = max(low, first) if first is not None else max(low, last - 19)
    found = tables.query(
        "WITH mine AS (SELECT * FROM rollups WHERE rank = ? AND step BETWEEN ? AND ?), "
        "newest AS (SELECT step, max(attempt) AS attempt FROM mine GROUP BY step), "
        "kept AS (SELECT mine.* FROM mine JOIN newest USING (step, attempt)) "
        "SELECT action, axis, sum(total_ns)::DOUBLE / 1e9 AS s, sum(waited_ns)::DOUBLE / 1e9 AS w, "
        "sum(bytes)::DOUBLE AS b, (SELECT count(*) FROM newest)::DOUBLE AS n FROM kept GROUP BY ALL ORDER BY s DESC",
        [rank, first, last],
    )
    steps = float(found["n"][0]) if len(found["n"]) else 1.0
    rows = zip(found["action"].tolist(), found["axis"].tolist(), found["s"], found["w"], found["b"], strict=True)
    return {
        "rank": rank,
        "steps": {"first": first, "last": last},
        "rows": [
            [action, axis, float(s) / steps, float(w) / steps, float(b) / steps] for action, axis, s, w, b in rows
        ],
    }


def finite(value: float) -> float | None:
    """A number for JSON, None for what is none."""
    return float(value) if math.isfinite(value) else None


def rounded(values: Array, digits: int = 5) -> list[float | None]:
    """To so many digits, None for what is no finite number."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]
