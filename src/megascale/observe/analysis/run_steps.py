"""Spans of whole steps by rank: which actions a rank ran, and the waits and transfers in each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megascale.core.spans import SpanKind
from megascale.errors import ConfigError, DataError
from megascale.observe.store.tables import SpanTables

_INNER = {SpanKind.WAIT.label, SpanKind.DATA_WAIT.label, SpanKind.TRANSFER.label}


@dataclass(frozen=True)
class InnerSpan:
    """A wait (or data_wait) within an action, or a transfer that began in it. Times are nanoseconds."""

    action: str
    axis: str
    begin: int
    end: int
    bytes: int
    waited_on: int


@dataclass(frozen=True)
class ActionSpan:
    """One action of a rank with what lies in it. Times are nanoseconds on the common clock."""

    action: str
    chunk: int
    microbatch: int
    begin: int
    end: int
    inner_spans: list[InnerSpan] = field(default_factory=list)

    def select_waits(self, *axes: str) -> list[InnerSpan]:
        """Waits for other ranks, along these axes or any."""
        return [one for one in self.inner_spans if one.action == "wait" and (not axes or one.axis in axes)]

    def select_transfers(self, axis: str) -> list[InnerSpan]:
        """Transfers along an axis that began in it."""
        return [one for one in self.inner_spans if one.action == "transfer" and one.axis == axis]


@dataclass(frozen=True)
class RankStep:
    """A rank's actions of one step, in the order they began.

    Attributes:
        place: tensor, pipeline and data coordinate.
        begin, end: of the step, nanoseconds.
        clock_error: how far its clock may be off the common one, nanoseconds; -1 if unknown.
    """

    step: int
    rank: int
    coordinates: tuple[int, int, int]
    begin: int
    end: int
    clock_error: int
    actions: list[ActionSpan]


def list_sampled_steps(tables: SpanTables) -> list[int]:
    """Steps of which every rank's spans were kept, in order. DataError if there are none."""
    found = tables.query(
        "WITH own AS (SELECT step, max(attempt) AS attempt FROM spans GROUP BY step), "
        "world AS (SELECT attempt, count(DISTINCT rank) AS ranks FROM ranks GROUP BY attempt) "
        "SELECT spans.step FROM spans JOIN own USING (step, attempt) JOIN world USING (attempt) "
        "WHERE action = 'step' GROUP BY spans.step, ranks HAVING count(DISTINCT rank) = ranks ORDER BY spans.step"
    )
    steps: list[int] = found["step"].tolist()
    if not steps:
        raise DataError(
            f"{tables.folder} holds no step of which all ranks' spans were kept; have some kept with megascale spans "
            "RUN --steps 5, or train with observe.spans=10"
        )
    return steps


def choose_sampled_steps(tables: SpanTables, wanted: str, last: int) -> list[int]:
    """Steps that --steps names ("7", "7-20"; empty: the last so many, without the attempt's first, which warms up)."""
    steps = list_sampled_steps(tables)
    if not wanted:
        return (steps[1:] if len(steps) > 1 else steps)[-last:]
    low, high = parse_step_range(wanted)
    found = [step for step in steps if low <= step <= high]
    if not found:
        raise ConfigError(f"--steps={wanted}: spans of all ranks were kept of {_listed(steps)} only")
    return found


def parse_step_range(wanted: str) -> tuple[int, int]:
    """First and last step of "7" or "7-20". ConfigError on anything else."""
    low, dash, high = wanted.partition("-")
    if not low.isdecimal() or not (high.isdecimal() if dash else True) or int(high or low) < int(low):
        raise ConfigError(f"--steps={wanted} is no step and no range; write 7 or 7-20")
    return int(low), int(high or low)


def _listed(steps: list[int]) -> str:
    shown = [str(step) for step in steps]
    return f"step{'s' * (len(shown) > 1)} " + ", ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]])


def read_rank_steps(tables: SpanTables, steps: list[int], ranks: list[int] | None = None) -> Iterator[RankStep]:
    """What each rank did in each of the steps, step by step. DataError names a step whose spans were partly lost."""
    places = {
        (attempt, rank): (tensor, pipeline, data)
        for attempt, rank, tensor, pipeline, data in zip(
            *tables.query("SELECT attempt, rank, tensor, pipeline, data FROM ranks").values(), strict=True
        )
    }
    names = "attempt, rank, action, chunk, microbatch, axis, bytes, start_ns, end_ns, waited_on, clock_error_ns"
    for step in steps:
        found = tables.query(
            f"SELECT {names} FROM spans WHERE step = ? AND attempt = (SELECT max(attempt) FROM spans WHERE step = ?) "
            + ("" if ranks is None else f"AND rank IN ({', '.join(map(str, map(int, ranks)))}) ")
            + "ORDER BY rank, start_ns, end_ns DESC",
            [step, step],
        )
        one: RankStep | None = None
        for attempt, rank, action, chunk, batch, axis, size, begin, end, on, error in zip(
            *(column.tolist() for column in found.values()), strict=True
        ):
            if one is None or one.rank != rank:
                if one is not None:
                    yield _checked(one)
                place = tuple(map(int, places.get((attempt, rank), (-1, -1, -1))))
                one = RankStep(step, rank, place, 0, 0, error, [])  # type: ignore[arg-type]
            if action == "step":
                one = RankStep(step, rank, one.coordinates, begin, end, error, one.actions)
            elif action not in _INNER:
                one.actions.append(ActionSpan(action, chunk, batch, begin, end))
            elif one.actions and begin <= one.actions[-1].end:
                one.actions[-1].inner_spans.append(InnerSpan(action, axis, begin, end, size, on))
        if one is not None:
            yield _checked(one)


def _checked(one: RankStep) -> RankStep:
    if one.end == 0 or min(one.coordinates) < 0 or not one.actions:
        raise DataError(
            f"step {one.step}: spans of rank {one.rank} were lost, or nobody wrote who it was; choose another step"
        )
    # Python's garbage collection and evaluations lie between steps.
    kept = [act for act in one.actions if act.begin >= one.begin and act.end <= one.end]
    return RankStep(one.step, one.rank, one.coordinates, one.begin, one.end, one.clock_error, kept)
