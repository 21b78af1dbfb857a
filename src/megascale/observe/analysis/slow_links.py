"""Search for links that are slower than comparable links, by waits that no late peer explains.

In a collective the last member to join does not wait for peers, so the time that *every* member waits is the transfer
itself. Along the data and tensor axes, the smallest wait of a group's members is compared with the smallest wait in the
other groups of the stage. Along the pipeline, tensor peers wait for ranks of the same neighbour stage, which send at
the same time. If one of the peers waits longer, its message is slow. A rank with a slow link is seen along the pipeline
axis in its messages, and along the data axis in the reductions of its group. If only the data axis shows a longer wait,
the group is reported.

*Rows* are indexes of ranks in the arrays of `RankTimes`.

A stage with one data group (no tensor parallelism) has no comparable groups, so no link is reported there.
Communication that is hidden under compute is not visible in waits, and it costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from megascale.observe.analysis.rank_times import RankTimes
from megascale.observe.analysis.slow_ranks import measure_healthy_spread, nan_median, subtract_peer_median

Array = np.ndarray[Any, Any]

MIN_SHARE = 0.002  # report a link whose additional wait is at least this fraction of a step
_SD_PER_MAD = 1.4826  # standard deviation of a normal distribution, per median absolute deviation
_MEDIAN_ERROR = 1.2533  # standard error of a median divided by that of a mean
_WIDER_TAILS = 1.5  # waits for links have longer tails than computes, so their limits are wider by this factor


@dataclass(frozen=True)
class SlowLink:
    """A link that makes other ranks wait.

    Attributes:
        ranks: the rank at the link, or the group that contains it.
        axis: axis along which the waits were seen.
        seconds: additional wait per step compared with similar links.
        error: standard error of `seconds`.
        share: additional wait as a fraction of a step.
        limit: smallest additional wait that is reported, in seconds.
        confidence: 1 minus the expected number of healthy links with such a wait.
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
class _ExcessWaits:
    """Additional waits of units compared with similar units. A unit is a rank or a group of ranks.

    Attributes:
        members: rows of the ranks of each unit.
        keys: identity of each unit. For groups: the coordinate on the other axis, and the stage. Empty if units are
            ranks.
        seconds, error, limit: additional wait per step, its standard error, smallest reported wait, [units].
        z: the limit in standard deviations of healthy units.
    """

    members: list[Array]
    keys: list[tuple[int, int]]
    seconds: Array
    error: Array
    limit: Array
    z: float

    @property
    def is_slow(self) -> Array:
        """Return which units wait longer than their limit, bool [units]."""
        return np.asarray(np.nan_to_num(self.seconds, nan=-np.inf) > self.limit)

    def describe(self, unit: int, ranks: tuple[int, ...], axis: str, step: float, evidence: list[str]) -> SlowLink:
        """Return the report on a unit.

        Args:
            ranks: the reported ranks.
            step: duration of a step in seconds.
        """
        seconds = float(self.seconds[unit])
        deviation = self.z * self.seconds[unit] / self.limit[unit]
        # Number of healthy units that wait as long by chance.
        expected = int(np.isfinite(self.seconds).sum()) * NormalDist().cdf(-deviation)
        return SlowLink(
            ranks=ranks,
            axis=axis,
            seconds=seconds,
            error=float(self.error[unit]),
            share=seconds / step,
            limit=float(self.limit[unit]),
            confidence=1 - min(1.0, expected),
            evidence=tuple(evidence),
        )


def find_slow_links(times: RankTimes, slow: set[int]) -> list[SlowLink]:
    """Find the slow links, those with the largest share first.

    Args:
        slow: numbers of the ranks that are slow themselves; the other ranks of their replicas wait for them.
    """
    return _LinkSearch(times).find_links(slow)


class _LinkSearch:
    """The search for slow links in one window of steps."""

    def __init__(self, times: RankTimes) -> None:
        self.times = times
        self.step_seconds = float(np.nanmedian(times.seconds))
        self.tensor, self.stage, self.data = times.coordinates.T
        self.pipeline_waits = self._measure_pipeline()
        self.data_waits = self._measure_groups("data", excluded_replicas=set())

    def find_links(self, slow: set[int]) -> list[SlowLink]:
        """Return the slow links, those with the largest share first; see `find_slow_links`."""
        links: list[SlowLink] = []
        late_replicas = {int(self.data[r]) for r, rank in enumerate(self.times.ranks.tolist()) if rank in slow}
        explained: set[int] = set()  # rows of the data groups whose waits a slow pipeline message explains
        for source, observer in self._find_sources():
            late_replicas.add(int(self.data[source]))
            group = self._find_slow_data_group(source)
            if group is not None and self.data_waits is not None:
                explained |= set(self.data_waits.members[group].tolist())
            links.append(self._describe_source(source, observer, group))
        # In a replica with a late rank or message, tensor peers take turns at being last, so all of them wait.
        tensor_waits = self._measure_groups("tensor", excluded_replicas=late_replicas)
        for axis, waits in (("data", self.data_waits), ("tensor", tensor_waits)):
            if waits is None:
                continue
            for unit in np.flatnonzero(waits.is_slow).tolist():
                if axis == "data" and explained & set(waits.members[unit].tolist()):
                    continue
                links.append(self._describe_group(axis, waits, unit))
        links.sort(key=lambda link: -link.share)
        return links

    def _describe_source(self, source: int, observer: int, group: int | None) -> SlowLink:
        """Return the report on a rank with slow messages.

        Args:
            source, observer: rows of the rank and of the rank that waits for it.
            group: unit of the rank's data group if the group is slow too.
        """
        assert self.pipeline_waits is not None
        if source == observer:
            subject = ""
        else:
            subject = f"rank {self.times.ranks[observer]} of the neighbouring stage "
        evidence = [
            f"{subject}waits {1e3 * self.pipeline_waits.seconds[observer]:.2f} ms per step longer for messages of the "
            "neighbouring stages than its tensor peers"
        ]
        axis = "pipeline"
        if group is not None and self.data_waits is not None:
            axis = "pipeline and data"
            rows = self.data_waits.members[group]
            evidence.append(
                f"all {len(rows)} ranks of its data group wait {1e3 * self.data_waits.seconds[group]:.2f} ms per step "
                "longer than other groups of the stage, including the last rank"
            )
        return self.pipeline_waits.describe(
            observer, (int(self.times.ranks[source]),), axis, self.step_seconds, evidence
        )

    def _describe_group(self, axis: str, waits: _ExcessWaits, unit: int) -> SlowLink:
        coordinate, stage = waits.keys[unit]
        rows = waits.members[unit]
        other_axis = "tensor" if axis == "data" else "data"
        evidence = [
            f"all {len(rows)} ranks of the {axis} group (stage {stage}, {other_axis} {coordinate}) wait "
            f"{1e3 * waits.seconds[unit]:.2f} ms per step longer than other groups of the stage, including the last "
            "rank",
            "waits do not show which of these ranks has the slow link: their pipeline messages are hidden or equally "
            "fast",
        ]
        return waits.describe(unit, tuple(self.times.ranks[rows].tolist()), axis, self.step_seconds, evidence)

    def _find_slow_data_group(self, row: int) -> int | None:
        """Return the unit of a rank's data group if that group's wait is above its limit, else None."""
        waits = self.data_waits
        key = (int(self.tensor[row]), int(self.stage[row]))
        if waits is None or key not in waits.keys:
            return None
        unit = waits.keys.index(key)
        return unit if waits.is_slow[unit] else None

    def _find_sources(self) -> list[tuple[int, int]]:
        """Return the source and the observer for each affected pipeline: rows of ranks.

        The observer is the rank that waits most. The source is the rank with the slow link: a rank near the waiting
        ranks whose data group waits too. Without such a rank it is the observer, because a rank with a slow link waits
        for the messages of both its sides. On the stage with most work the source itself may not wait, but its
        neighbours do.
        """
        waits = self.pipeline_waits
        if waits is None:
            return []
        rows_by_coordinates = {tuple(coordinates): r for r, coordinates in enumerate(self.times.coordinates.tolist())}
        stages = int(self.stage.max()) + 1
        pipelines: dict[tuple[int, int], list[int]] = {}
        for r in np.flatnonzero(waits.is_slow).tolist():
            pipelines.setdefault((int(self.tensor[r]), int(self.data[r])), []).append(r)
        sources = []
        for (tensor, data), rows in pipelines.items():
            observer = max(rows, key=lambda r: waits.seconds[r])
            near_stages = {(int(self.stage[r]) + offset) % stages for r in rows for offset in (-1, 0, 1)}
            near_coordinates = [(tensor, stage, data) for stage in sorted(near_stages)]
            near_rows = [rows_by_coordinates[key] for key in near_coordinates if key in rows_by_coordinates]
            candidates = [r for r in near_rows if self._find_slow_data_group(r) is not None]
            finite_waits = np.nan_to_num(waits.seconds, nan=-np.inf)
            source = observer
            if candidates:
                source = max(candidates, key=lambda r: finite_waits[r])
            sources.append((source, observer))
        return sources

    def _measure_pipeline(self) -> _ExcessWaits | None:
        """Compare each rank's waits for neighbouring stages with its tensor peers'; None without such peers."""
        if self.stage.max() < 1 or self.stage.min() < 0 or self.tensor.max() < 1:
            return None
        group = self.data * (self.stage.max() + 1) + self.stage
        rows = [np.array([r]) for r in range(len(self.stage))]
        return self._compare(self.times.waits["pipeline"], group, rows, keys=[])

    def _measure_groups(self, axis: str, excluded_replicas: set[int]) -> _ExcessWaits | None:
        """Compare the smallest wait of each group along an axis with the other groups of its stage.

        Returns None without groups of several ranks, or with fewer than three groups per stage.

        Args:
            axis: "data" or "tensor".
            excluded_replicas: along the tensor axis, replicas whose groups are left out.
        """
        # Coordinate that numbers the groups of a stage, and coordinate within a group.
        across = self.tensor if axis == "data" else self.data
        along = self.data if axis == "data" else self.tensor
        if self.stage.min() < 0 or along.max() < 1:
            return None
        keys = sorted(set(zip(across.tolist(), self.stage.tolist(), strict=True)))
        members = [np.flatnonzero((across == coordinate) & (self.stage == stage)) for coordinate, stage in keys]
        stages = np.array([stage for _, stage in keys])
        # Of two groups, the one with the faster link would make the other look slow, so require three groups.
        if not (np.bincount(stages) >= 3).any():
            return None
        waits = self.times.waits[axis]
        with np.errstate(all="ignore"):
            smallest = np.stack([np.min(waits[rows], 0) for rows in members])
        smallest[[coordinate in excluded_replicas for coordinate, _ in keys]] = np.nan
        return self._compare(smallest, stages, members, keys)

    def _compare(
        self, values: Array, group: Array, members: list[Array], keys: list[tuple[int, int]]
    ) -> _ExcessWaits | None:
        """Compare waits within groups of units; None if fewer than two units have peers.

        Args:
            values: seconds of waiting, [units, steps].
            group: units with the same number are comparable, [units].
            members, keys: see _ExcessWaits.
        """
        differences, _ = subtract_peer_median(values, group)
        seconds = nan_median(differences)
        if np.isfinite(seconds).sum() < 2:
            return None
        noise = _SD_PER_MAD * nan_median(np.abs(differences - seconds[:, None]))
        error = _MEDIAN_ERROR * noise / np.sqrt(np.maximum(np.isfinite(differences).sum(1), 1))
        spread, z = measure_healthy_spread(seconds, error)
        spread = 0.0 if np.isnan(spread) else spread
        z *= _WIDER_TAILS
        limit = np.maximum(MIN_SHARE * self.step_seconds, z * np.sqrt(spread**2 + error**2))
        return _ExcessWaits(members, keys, seconds=seconds, error=error, limit=limit, z=z)
