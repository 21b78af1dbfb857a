"""Reading of the spans of whole steps: the actions of each rank, and the waits and transfers in each action."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megascale import config as configuration
from megascale.core.chunk_map import Placement, round_robin
from megascale.core.schedule_registry import SCHEDULES
from megascale.core.spans import SpanKind
from megascale.core.untrusted_files import is_small_file
from megascale.errors import ConfigError, DataError, MegascaleError
from megascale.observe.store.tables import SpanTables

_INNER_KINDS = {SpanKind.WAIT.label, SpanKind.DATA_WAIT.label, SpanKind.TRANSFER.label}


@dataclass(frozen=True)
class InnerSpan:
    """A wait within an action, or a transfer that began in the action. Times are nanoseconds.

    Attributes:
        action: "wait" (for other ranks), "data_wait" (for samples) or "transfer".
        axis: axis of the communication, empty for samples.
        waited_on: the awaited rank, -1 if unknown.
    """

    action: str
    axis: str
    begin: int
    end: int
    bytes: int
    waited_on: int


@dataclass(frozen=True)
class ActionSpan:
    """An action of a rank with its inner spans. Times are nanoseconds on the common clock."""

    action: str
    chunk: int
    microbatch: int
    begin: int
    end: int
    inner_spans: list[InnerSpan] = field(default_factory=list)

    def select_waits(self, *axes: str) -> list[InnerSpan]:
        """Return the waits for other ranks along these axes, by default along any axis."""
        return [span for span in self.inner_spans if span.action == "wait" and (not axes or span.axis in axes)]

    def select_transfers(self, axis: str) -> list[InnerSpan]:
        """Return the transfers along an axis that began in the action."""
        return [span for span in self.inner_spans if span.action == "transfer" and span.axis == axis]

    def sum_waits(self) -> int:
        """Return the nanoseconds of all waits, including those for samples."""
        return sum(span.end - span.begin for span in self.inner_spans if span.action != "transfer")


@dataclass(frozen=True)
class RankStep:
    """A rank's actions of one step, in the order in which they began.

    Attributes:
        coordinates: tensor, pipeline and data coordinate. The data coordinate counts context ranks first.
        begin, end: begin and end of the step in nanoseconds.
        clock_error: largest error of the rank's clock in nanoseconds; -1 if unknown.
        context: coordinate along the context axis.
    """

    step: int
    rank: int
    coordinates: tuple[int, int, int]
    begin: int
    end: int
    clock_error: int
    actions: list[ActionSpan]
    context: int = 0


def list_sampled_steps(tables: SpanTables) -> list[int]:
    """Return the steps with the spans of every rank, in order. Raises DataError if there are none."""
    rows = tables.query(
        "WITH newest AS (SELECT step, max(attempt) AS attempt FROM spans GROUP BY step), "
        "world AS (SELECT attempt, count(DISTINCT rank) AS ranks FROM ranks GROUP BY attempt) "
        "SELECT spans.step FROM spans JOIN newest USING (step, attempt) JOIN world USING (attempt) "
        "WHERE action = 'step' GROUP BY spans.step, ranks HAVING count(DISTINCT rank) = ranks ORDER BY spans.step"
    )
    steps: list[int] = rows["step"].tolist()
    if not steps:
        raise DataError(
            f"{tables.folder} holds no step with the spans of all ranks; request some with megascale spans RUN "
            "--steps 5, or train with observe.spans=10"
        )
    return steps


def choose_sampled_steps(tables: SpanTables, step_range: str, last: int) -> list[int]:
    """Return the sampled steps of a range such as "7" or "7-20".

    If the range is empty, return the `last` newest sampled steps without the first one, which is warm-up. Raises
    ConfigError if the range has no sampled step.
    """
    steps = list_sampled_steps(tables)
    if not step_range:
        if len(steps) > 1:
            steps = steps[1:]
        return steps[-last:]
    first_step, last_step = parse_step_range(step_range)
    chosen = [step for step in steps if first_step <= step <= last_step]
    if not chosen:
        shown = [str(step) for step in steps]
        if len(shown) > 8:
            shown = shown[:4] + ["..."] + shown[-3:]
        plural = "s" if len(steps) > 1 else ""
        raise ConfigError(f"--steps={step_range}: spans of all ranks exist for step{plural} {', '.join(shown)} only")
    return chosen


def read_placement(tables: SpanTables) -> Placement:
    """Return the function that places model chunks on stages under the run's parallel.schedule.

    Without a readable configuration of the run, the function is `round_robin`. Raises DataError if the schedule is not
    registered here.
    """
    file = tables.folder.parent / "config.toml"
    if not is_small_file(file):
        return round_robin
    try:
        name = configuration.load(file, keep_unknown_parts=True).parallel.schedule
    except (MegascaleError, ValueError, RecursionError):
        return round_robin
    try:
        return SCHEDULES[name].placement
    except ConfigError as error:
        raise DataError(
            f"the run's schedule is unknown here ({error}); install the package that registers it"
        ) from None


def parse_step_range(text: str) -> tuple[int, int]:
    """Return the first and the last step of "7" or "7-20". Raises ConfigError for other texts."""
    first, dash, last = text.partition("-")
    if not dash:
        last = first
    if not first.isdecimal() or not last.isdecimal() or int(last) < int(first):
        raise ConfigError(f"--steps={text} is neither a step nor a range; write 7 or 7-20")
    return int(first), int(last)


def read_rank_steps(tables: SpanTables, steps: list[int], ranks: list[int] | None = None) -> Iterator[RankStep]:
    """Yield the actions of each rank, step by step. Raises DataError for a step with lost spans.

    Args:
        ranks: ranks to read; None reads all.
    """
    rank_rows = tables.query("SELECT attempt, rank, tensor, pipeline, data, context FROM ranks")
    coordinates = {}
    contexts = {}
    for attempt, rank, tensor, pipeline, data, context in zip(*rank_rows.values(), strict=True):
        # The key holds the attempt because ranks of a later attempt may have other coordinates.
        coordinates[attempt, rank] = int(tensor), int(pipeline), int(data)
        contexts[attempt, rank] = max(0, int(context))
    names = "attempt, rank, action, chunk, microbatch, axis, bytes, start_ns, end_ns, waited_on, clock_error_ns"
    if ranks is None:
        condition = ""
    else:
        condition = f"AND rank IN ({', '.join(str(int(rank)) for rank in ranks)}) "
    for step in steps:
        rows = tables.query(
            f"SELECT {names} FROM spans WHERE step = ? AND attempt = (SELECT max(attempt) FROM spans WHERE step = ?) "
            f"{condition}ORDER BY rank, start_ns, end_ns DESC",
            [step, step],
        )
        current: RankStep | None = None
        for attempt, rank, action, chunk, microbatch, axis, size, begin, end, waited_on, error in zip(
            *(column.tolist() for column in rows.values()), strict=True
        ):
            if current is None or current.rank != rank:
                if current is not None:
                    yield _check_rank_step(current)
                rank_coordinates = coordinates.get((attempt, rank), (-1, -1, -1))
                context = contexts.get((attempt, rank), 0)
                current = RankStep(step, rank, rank_coordinates, 0, 0, clock_error=error, actions=[], context=context)
            if action == "step":
                current = replace(current, begin=begin, end=end, clock_error=error)
            elif action not in _INNER_KINDS:
                current.actions.append(ActionSpan(action, chunk, microbatch, begin, end))
            elif current.actions and begin <= current.actions[-1].end:
                current.actions[-1].inner_spans.append(InnerSpan(action, axis, begin, end, size, waited_on))
        if current is not None:
            yield _check_rank_step(current)


def _check_rank_step(rank_step: RankStep) -> RankStep:
    """Remove the actions outside of the step, and return it.

    Raises DataError if spans or the rank's coordinates are missing.
    """
    if rank_step.end == 0 or min(rank_step.coordinates) < 0 or not rank_step.actions:
        raise DataError(
            f"step {rank_step.step}: spans of rank {rank_step.rank} were lost or its coordinates are not recorded; "
            "choose another step"
        )
    # Garbage collections and evaluations have spans too, but run between steps.
    actions = [act for act in rank_step.actions if act.begin >= rank_step.begin and act.end <= rank_step.end]
    rank_step.actions[:] = actions
    return rank_step
