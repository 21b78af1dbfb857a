"""Links that are slower than comparable ones, told from ranks that are: by waits that no late peer explains.

A late peer makes the others of a collective wait, but never the one that comes last: what *every* member of a group
waits is the transfer itself. So along the data and tensor axes the least wait of a group's members is compared with
that of the groups of the same stage. Along the pipeline tensor peers wait for the same neighbour stage, whose ranks are
in step: what one of them waits longer than its peers is its own message. A rank whose link is slow has both: its
messages, in and out, and its group's reductions. Where the data axis alone says it, the group is named.

Where a stage has one data group (no tensor parallelism) nothing is comparable, and no link is named.
Communication that is hidden under computing is seen nowhere here; it costs nothing either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.observe.analysis.rank_parts import RankParts
from megascale.observe.analysis.slow_ranks import ALARMS, against_peers, healthy_spread, nan_median

Array = np.ndarray[Any, Any]

LEAST_SHARE = 0.002  # of a step; below it no link is named
_MANY_DEVIATIONS = 1.5  # links' waits have longer tails than computes: a limit is so much further out


@dataclass(frozen=True)
class SlowLink:
    """A link that makes others wait.

    Attributes:
        ranks: whose: one, or the group among which it is.
        axis: along which it was seen.
        seconds: longer waits a step than comparable ones have; error: standard error.
        share: of a step.
        limit: seconds, what it had to exceed.
        confidence: 1 - healthy links of this job that would be expected to show as much.
        evidence: sentences.
    """

    ranks: tuple[int, ...]
    axis: str
    seconds: float
    error: float
    share: float
    limit: float
    confidence: float
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class _Longer:
    """Waits beyond comparable ones: of each unit (rank or group) median seconds a step, error, limit and z."""

    seconds: Array
    error: Array
    limit: Array
    z: float

    @property
    def found(self) -> Array:
        return np.asarray(np.nan_to_num(self.seconds, nan=-np.inf) > self.limit)

    def sure(self, index: int) -> float:
        from statistics import NormalDist

        units = int(np.isfinite(self.seconds).sum())
        return 1 - min(1.0, units * NormalDist().cdf(-self.z * self.seconds[index] / self.limit[index]))


def slow_links(parts: RankParts, slow: set[int], alarms: float = ALARMS) -> list[SlowLink]:
    """Links that stand out; `slow`: ranks that are slow themselves, for which others of their replica wait."""
    step = float(np.nanmedian(parts.seconds))
    tensor, stage, data = parts.coordinates.T
    found: list[SlowLink] = []
    named: set[int] = set()
    pipeline = _pipeline(parts, step, alarms)
    by_axis = {"data": _groups(parts, "data", step, alarms)}
    late = {int(data[r]) for r, rank in enumerate(parts.ranks.tolist()) if rank in slow}
    members, longer = by_axis["data"]
    number = {key: g for g, key in enumerate(members)}

    def late_group(r: int) -> bool:
        g = number.get((int(tensor[r]), int(stage[r])))
        return g is not None and longer is not None and bool(longer.found[g])

    for r, seen in _sources(parts, pipeline, late_group) if pipeline is not None else ():
        assert pipeline is not None
        late.add(int(data[r]))
        axis = "pipeline"
        who = "" if r == seen else f"rank {parts.ranks[seen]} of its neighbour stage "
        text = [
            f"{who}waits {1e3 * pipeline.seconds[seen]:.2f} ms a step longer for messages of its neighbour stages than "
            "ranks whose neighbours are in step with them"
        ]
        if late_group(r) and longer is not None:
            axis = "pipeline and data"
            g = number[int(tensor[r]), int(stage[r])]
            rows = members[int(tensor[r]), int(stage[r])]
            text.append(
                f"and all {len(rows)} ranks of its data group wait {1e3 * longer.seconds[g]:.2f} ms a step longer than "
                "other groups of the stage, the last of them too"
            )
            named |= set(rows.tolist())
        found.append(_link(parts, pipeline, seen, (int(parts.ranks[r]),), axis, step, text))
    # In a replica with a late rank or message tensor peers take turns at being the last: all of them wait.
    by_axis["tensor"] = _groups(parts, "tensor", step, alarms, late)
    for axis, (members, longer) in by_axis.items():
        if longer is None:
            continue
        for g, (key, rows) in enumerate(members.items()):
            if longer.found[g] and not (axis == "data" and named & set(rows.tolist())):
                where = f"stage {key[1]}, " + (f"tensor {key[0]}" if axis == "data" else f"data {key[0]}")
                text = [
                    f"all {len(rows)} ranks of the {axis} group ({where}) wait {1e3 * longer.seconds[g]:.2f} ms a step "
                    "longer than other groups of the stage, the last of them too",
                    "which of them cannot be told from waits: their messages along the pipeline are hidden or even",
                ]
                ranks = tuple(parts.ranks[rows].tolist())
                found.append(_link(parts, longer, g, ranks, axis, step, text))
    found.sort(key=lambda one: -one.share)
    return found


def _link(
    parts: RankParts, longer: _Longer, index: int, ranks: tuple[int, ...], axis: str, step: float, text: list[str]
) -> SlowLink:
    seconds = float(longer.seconds[index])
    return SlowLink(
        ranks, axis, seconds, float(longer.error[index]), seconds / step, float(longer.limit[index]),
        longer.sure(index), tuple(text),
    )  # fmt: skip


def _longer(values: Array, group: Array, step: float, alarms: float) -> _Longer | None:
    """Compare waits of units by steps; None where there is nothing to compare with."""
    differs, _ = against_peers(values, group)
    seconds = nan_median(differs)
    known = np.isfinite(differs).sum(1)
    if np.isfinite(seconds).sum() < 2:
        return None
    noise = 1.4826 * nan_median(np.abs(differs - seconds[:, None]))
    error = 1.2533 * noise / np.sqrt(np.maximum(known, 1))
    spread, z = healthy_spread(seconds, error, alarms)
    spread = 0.0 if np.isnan(spread) else spread
    limit = np.maximum(LEAST_SHARE * step, _MANY_DEVIATIONS * z * np.sqrt(spread**2 + error**2))
    return _Longer(seconds, error, limit, _MANY_DEVIATIONS * z)


def _pipeline(parts: RankParts, step: float, alarms: float) -> _Longer | None:
    """What each rank waits for neighbour stages beyond its tensor peers; None without such."""
    tensor, stage, data = parts.coordinates.T
    if stage.max() < 1 or stage.min() < 0 or tensor.max() < 1:
        return None
    return _longer(parts.waits["pipeline"], data * (stage.max() + 1) + stage, step, alarms)


def _sources(parts: RankParts, longer: _Longer, late_group: Callable[[int], bool]) -> list[tuple[int, int]]:
    """One rank of each pipeline in which ranks wait longer, and the one that waits most there: the rank whose data
    group waits too, else who waits most, as it waits for messages of both its sides.

    It may itself wait for nothing, on the stage with most work: its neighbours wait for it then.
    """
    place = {tuple(one): r for r, one in enumerate(parts.coordinates.tolist())}
    stages = int(parts.coordinates[:, 1].max()) + 1
    pipelines: dict[tuple[int, int], list[int]] = {}
    for r in np.flatnonzero(longer.found).tolist():
        tensor, _, data = parts.coordinates[r].tolist()
        pipelines.setdefault((tensor, data), []).append(r)
    found = []
    for (tensor, data), rows in pipelines.items():
        seen = max(rows, key=lambda r: longer.seconds[r])
        at = {(int(parts.coordinates[r, 1]) + by) % stages for r in rows for by in (-1, 0, 1)}
        near = [place[tensor, stage, data] for stage in sorted(at) if (tensor, stage, data) in place]
        late = [r for r in near if late_group(r)]
        found.append((max(late, key=lambda r: np.nan_to_num(longer.seconds[r], nan=-np.inf)) if late else seen, seen))
    return found


def _groups(
    parts: RankParts, axis: str, step: float, alarms: float, leave_out: set[int] | None = None
) -> tuple[dict[tuple[int, int], Array], _Longer | None]:
    """The groups of an axis by (its other coordinate, stage), and what the least of their members waits beyond others;
    without the groups of some replicas."""
    tensor, stage, data = parts.coordinates.T
    other = tensor if axis == "data" else data
    if stage.min() < 0 or (data if axis == "data" else tensor).max() < 1:
        return {}, None
    keys = sorted(set(zip(other.tolist(), stage.tolist(), strict=True)))
    members = {key: np.flatnonzero((other == key[0]) & (stage == key[1])) for key in keys}
    waits = parts.waits[axis]
    with np.errstate(all="ignore"):
        least = np.stack([np.min(waits[rows], 0) for rows in members.values()])
    least[[key[0] in (leave_out or ()) for key in keys]] = np.nan
    group = np.array([key[1] for key in keys])
    # The group with the quickest link must not make the others of a pair look slow: three at least.
    return members, _longer(least, group, step, alarms) if (np.bincount(group) >= 3).any() else None
