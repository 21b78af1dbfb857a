"""One step of some ranks on one time axis: what each did, what it waited for and why, and the schedule as planned.

A wait is split at the moment at which the other side was ready:

- *bubble*: the peer had not yet sent the message, or had not yet come to the collective;
- *exposed* (non-overlapped) communication: all were there, and bytes moved.

The plan is the same actions in the same order with each stage's chunks at their median own time over the ranks read,
transfers as quick as the quickest that a rank had to wait for, and no other waits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import numpy as np

from megascale.core.replay import Graph, replay
from megascale.core.schedule import ActionKind, Schedule
from megascale.errors import ConfigError, DataError
from megascale.observe.analysis.run_steps import Act, Inner, RankStep, chosen_steps, rank_steps
from megascale.observe.store.tables import SpanTables

VIEWS = ("pipeline", "tensor", "data")
# Up to so many ranks all are read, to say of each wait whom it was for; of larger jobs those that are shown alone, and
# their pipelines and tensor peers.
_WHOLE_JOB = 256
_COMPUTES = {"forward": ActionKind.FORWARD, "backward": ActionKind.BACKWARD}
_MESSAGES = {
    "send_forward": ActionKind.SEND_FORWARD,
    "recv_forward": ActionKind.RECV_FORWARD,
    "send_backward": ActionKind.SEND_BACKWARD,
    "recv_backward": ActionKind.RECV_BACKWARD,
}


@dataclass(frozen=True)
class Wait:
    """A rank waited within an action. Times are nanoseconds from the timeline's begin.

    Attributes:
        kind: bubble, exposed or samples.
        axis: along which, empty for samples.
        on: the rank that came last, -1 if unknown.
        why: in words.
        root: of a bubble, the rank with which it began: whom `on` waited for meanwhile, and so on; else as `on`.
    """

    rank: int
    act: str
    kind: str
    axis: str
    begin: int
    end: int
    waited_on: int
    reason: str
    root: int = -1


@dataclass(frozen=True)
class Planned:
    """A compute of the plan, nanoseconds from the timeline's begin."""

    backward: bool
    chunk: int
    microbatch: int
    begin: int
    end: int


@dataclass(frozen=True)
class Track:
    """A rank's step.

    Attributes:
        seconds: where its step went: compute, bubble, exposed AXIS, samples, optimizer, other; they add up to it.
    """

    rank: int
    coordinates: tuple[int, int, int]
    begin: int
    end: int
    acts: list[Act]
    waits: list[Wait]
    planned: list[Planned]
    seconds: dict[str, float]


@dataclass(frozen=True)
class StepTimeline:
    """What is shown.

    Attributes:
        origin: nanoseconds since 1970 of time 0.
        messages: (sender, its send's begin, receiver, its compute's begin) of messages between the ranks shown.
        planned_seconds: of the pipeline as planned; nan where the ranks of a pipeline are not all there.
        pipeline_seconds: from the first compute to the last of the same ranks, as it was.
        clock_error: the largest of the ranks' clocks, nanoseconds.
        bubbles: seconds of the shown ranks' bubbles by the rank that they began with, most first.
    """

    step: int
    view: str
    origin: int
    length: int
    virtual: int
    tracks: list[Track]
    messages: list[tuple[int, int, int, int]]
    planned_seconds: float
    pipeline_seconds: float
    clock_error: int
    bubbles: dict[int, float]


def step_timeline(tables: SpanTables, step: int | None, ranks: str, view: str) -> StepTimeline:
    """Read a step. ConfigError names what of the options is none; DataError what is not there.

    Args:
        tables: of the run.
        step: None: the last of which all spans were kept.
        ranks: "0-3,8", "all", or empty: the ranks of rank 0's group along the view.
        view: which axis the ranks are ordered by: pipeline, tensor or data.
    """
    if view not in VIEWS:
        raise ConfigError(f"--view={view} is none of {', '.join(VIEWS)}")
    number = chosen_steps(tables, "" if step is None else str(step), 1)[-1]
    found = tables.query(
        "SELECT rank, any_value(tensor) AS tensor, any_value(pipeline) AS pipeline, any_value(data) AS data FROM ranks "
        "WHERE attempt = (SELECT max(attempt) FROM spans WHERE step = ?) GROUP BY rank ORDER BY rank",
        [number],
    )
    places = {row[0]: tuple(row[1:]) for row in zip(*(column.tolist() for column in found.values()), strict=True)}
    shown = _chosen(ranks, view, places)
    if len(places) <= _WHOLE_JOB:
        read = list(places)
    else:
        pipes = {(places[rank][0], places[rank][2]) for rank in shown}
        peers = {places[rank][1:] for rank in shown}
        read = [rank for rank, place in places.items() if (place[0], place[2]) in pipes or place[1:] in peers]
    steps = {one.rank: one for one in rank_steps(tables, [number], read)}
    if missing := [rank for rank in shown if rank not in steps]:
        raise DataError(f"step {number}: spans of rank {missing[0]} were lost; choose another step")
    return _Reading(steps, {rank: place[1] for rank, place in places.items()}).timeline(number, shown, view)


def _chosen(ranks: str, view: str, places: dict[int, tuple[int, ...]]) -> list[int]:
    """Ranks to show, ordered by the view."""
    axis = {"tensor": 0, "pipeline": 1, "data": 2}[view]
    if not ranks:
        like = [n for n in range(3) if n != axis]
        first = places[min(places)]
        chosen = [rank for rank, place in places.items() if all(place[n] == first[n] for n in like)]
    elif ranks == "all":
        chosen = list(places)
    else:
        chosen = []
        for part in ranks.split(","):
            low, dash, high = part.strip().partition("-")
            if not low.isdecimal() or not (high.isdecimal() if dash else True):
                raise ConfigError(f"--ranks={ranks} is no list of ranks; write 0,1 or 0-3,8 or all")
            chosen += range(int(low), int(high or low) + 1)
            if missing := [rank for rank in chosen if rank not in places]:
                raise ConfigError(
                    f"--ranks={ranks}: rank {missing[0]} is none of the run's, {min(places)} to {max(places)}"
                )
    order = {"pipeline": (2, 0, 1), "tensor": (2, 1, 0), "data": (1, 0, 2)}[view]
    return sorted(set(chosen), key=lambda rank: tuple(places[rank][n] for n in order))


class _Reading:
    """The steps of the ranks that were read, and what of them is known of each other."""

    def __init__(self, steps: dict[int, RankStep], stage_of: dict[int, int]) -> None:
        self.steps = steps
        self.stages = max(stage_of.values()) + 1
        chunks = [act.chunk for one in steps.values() for act in one.acts if act.action in _COMPUTES]
        self.virtual = 1 + max(chunks, default=0)
        self.origin = min(one.begin for one in steps.values())
        self.at = {one.place: one.rank for one in steps.values()}
        # By replica and tensor, direction, the chunk of the model that made it and micro-batch: the send.
        self.sends: dict[tuple[int, int, str, int, int], tuple[int, Act]] = {}
        # By axis, who takes part, action and position: when each rank came.
        self.came: dict[tuple[object, ...], dict[int, int]] = defaultdict(dict)
        # By rank and axis: its collectives, with their key in `came`.
        self.collectives: dict[tuple[int, str], list[tuple[tuple[object, ...], Inner]]] = defaultdict(list)
        for one in steps.values():
            tensor, stage, data = one.place
            for act in one.acts:
                if act.action.startswith("send_"):
                    made = act.chunk * self.stages + stage
                    self.sends[data, tensor, act.action[5:], made, act.microbatch] = (one.rank, act)
                for key, moved in self._collectives(one, act):
                    self.came[key][one.rank] = moved.begin
                    self.collectives[one.rank, moved.axis].append((key, moved))

    def _collectives(self, one: RankStep, act: Act) -> list[tuple[tuple[object, ...], Inner]]:
        tensor, stage, data = one.place
        seen: Counter[str] = Counter()
        found: list[tuple[tuple[object, ...], Inner]] = []
        for moved in act.inner:
            group = {
                "tensor": (stage, data), "data": (stage, tensor), "stage": (stage,),
                "embedding": (tensor, data), "world": (),
            }.get(moved.axis)  # fmt: skip
            if moved.action == "transfer" and group is not None:
                found.append(((moved.axis, group, act.action, act.chunk, act.microbatch, seen[moved.axis]), moved))
                seen[moved.axis] += 1
        return found

    def timeline(self, number: int, shown: list[int], view: str) -> StepTimeline:
        planned, planned_seconds, pipeline_seconds = self._plan(shown)
        of_rank = {rank: [w for act in one.acts for w in self._waits(one, act)] for rank, one in self.steps.items()}
        tracks, messages = [], []
        bubbles: Counter[int] = Counter()
        for rank in shown:
            one = self.steps[rank]
            waits = [replace(wait, root=_root(wait, of_rank)) for wait in of_rank[rank]]
            for wait in waits:
                if wait.kind == "bubble":
                    bubbles[wait.root] += wait.end - wait.begin
            for act in one.acts:
                if (send := self._message(one, act)) and send[0] in shown:
                    messages.append((send[0], send[1].begin - self.origin, rank, act.begin - self.origin))
            begin, end = one.begin - self.origin, one.end - self.origin
            seconds = _seconds(one, waits)
            tracks.append(Track(rank, one.place, begin, end, one.acts, waits, planned.get(rank, []), seconds))
        return StepTimeline(
            number, view, self.origin, max(track.end for track in tracks), self.virtual, tracks, messages,
            planned_seconds, pipeline_seconds, max(one.clock_error for one in self.steps.values()),
            {rank: length / 1e9 for rank, length in bubbles.most_common()},
        )  # fmt: skip

    def _message(self, one: RankStep, act: Act) -> tuple[int, Act] | None:
        """The send of what a compute needs: (rank, its action), None if it needs nothing or that was not read."""
        if act.action not in _COMPUTES or self.stages == 1:
            return None
        tensor, stage, data = one.place
        made = act.chunk * self.stages + stage + (-1 if act.action == "forward" else 1)
        return self.sends.get((data, tensor, act.action, made, act.microbatch))

    def _waits(self, one: RankStep, act: Act) -> list[Wait]:
        found: list[Wait] = []
        name = _name(act)

        def add(kind: str, wait: Inner, begin: int, end: int, on: int, why: str) -> None:
            if end > begin:
                found.append(
                    Wait(one.rank, name, kind, wait.axis, begin - self.origin, end - self.origin, on, why)
                )  # fmt: skip

        message = self._message(one, act)
        for wait in act.inner:
            if wait.action == "data_wait":
                add("samples", wait, wait.begin, wait.end, -1, "samples from the loader")
            if wait.action != "wait":
                continue
            if wait.axis == "pipeline" and message is not None:
                on, send = message
                message = None  # the next is for a send's buffer
                sent = min(max(send.begin, wait.begin), wait.end)
                add(
                    "bubble", wait, wait.begin, sent, on, f"rank {on} had not yet sent it: {self._busy(on, wait, send)}"
                )
                add("exposed", wait, sent, wait.end, on, f"rank {on}'s {_name(send)} under way")
                continue
            if wait.axis == "pipeline":
                why = f"an earlier send to rank {wait.waited_on} to leave its buffer"
                add("exposed", wait, wait.begin, wait.end, wait.waited_on, why)
                continue
            # What was awaited ends with the wait; it may have begun in an action before.
            around = [
                (moved.end, key) for key, moved in self.collectives[one.rank, wait.axis]
                if moved.begin <= wait.begin and moved.end >= wait.end
            ]  # fmt: skip
            came = self.came[min(around, key=lambda one: one[0])[1]] if around else {}
            ready, on = wait.begin, -1
            if came:
                on = max(came, key=lambda rank: came[rank])
                ready = min(max(came[on], wait.begin), wait.end)
            add("bubble", wait, wait.begin, ready, on, f"rank {on} had not yet come to the {wait.axis} collective")
            add("exposed", wait, ready, wait.end, on, f"{wait.axis} collective under way")
        return found

    def _busy(self, rank: int, wait: Inner, send: Act) -> str:
        """What a rank did most while another waited."""
        most, name = 0, "nothing that was timed"
        for act in self.steps[rank].acts:
            over = min(act.end, send.begin, wait.end) - max(act.begin, wait.begin)
            if over > most:
                held = sum(
                    max(0, min(one.end, wait.end) - max(one.begin, wait.begin))
                    for one in act.inner
                    if one.action == "wait"
                )
                most, name = over, f"in {_name(act)}" + (", which itself waited" if held > over / 2 else "")
        return name

    def _plan(self, shown: list[int]) -> tuple[dict[int, list[Planned]], float, float]:
        """The plan of each rank shown, and its seconds beside the real ones."""
        pipes = sorted({(self.steps[rank].place[0], self.steps[rank].place[2]) for rank in shown})
        whole = [pipe for pipe in pipes if all((pipe[0], s, pipe[1]) in self.at for s in range(self.stages))]
        if not whole:
            return {}, float("nan"), float("nan")
        own: dict[tuple[int, str, int], list[int]] = defaultdict(list)
        moved: list[int] = []
        for one in self.steps.values():
            for act in one.acts:
                if act.action in _COMPUTES:
                    idle = sum(wait.end - wait.begin for wait in act.inner if wait.action != "transfer")
                    own[one.place[1], act.action, act.chunk].append(act.end - act.begin - idle)
                    send, waits = self._message(one, act), act.waits("pipeline")
                    if send is not None and waits and waits[0].end - waits[0].begin > 100_000:
                        moved.append(waits[0].end - max(send[1].begin, waits[0].begin))
        tables = []
        for stage in range(self.stages):
            acts = self.steps[self.at[whole[0][0], stage, whole[0][1]]].acts
            kinds = {**_COMPUTES, **_MESSAGES}
            tables.append([(kinds[a.action], a.chunk, a.microbatch) for a in acts if a.action in kinds])
        batches = 1 + max((batch for rows in tables for _, _, batch in rows), default=0)
        try:
            # A pass is recorded for each micro-batch and chunk of a stage, so damaged numbers are larger than that.
            if self.stages * self.virtual * batches > sum(map(len, tables)):
                raise ValueError(f"{batches:,} micro-batches of {self.virtual:,} chunks have more passes than recorded")
            schedule = Schedule(
                "recorded", self.stages, self.virtual, batches, tuple(np.array(rows, dtype=np.int32) for rows in tables)
            )
            graph = Graph.of(schedule)
        except (ValueError, IndexError) as error:
            raise DataError(f"the recorded actions make no schedule ({error}); choose another step") from None
        durations = np.full(graph.actions, float(max(0, min(moved, default=0))))
        for n in range(graph.actions):
            kind = ActionKind(int(graph.kind[n]))
            if kind <= ActionKind.BACKWARD:
                durations[n] = np.median(own[int(graph.stage[n]), kind.label, int(graph.chunk[n])])
        plan = replay(graph, durations)
        computes = np.flatnonzero(graph.kind <= ActionKind.BACKWARD)
        found: dict[int, list[Planned]] = {}
        real = 0.0
        for tensor, data in whole:
            members = [self.steps[self.at[tensor, stage, data]] for stage in range(self.stages)]
            acts = [act for one in members for act in one.acts if act.action in _COMPUTES]
            # What was waited for samples or from before the step is not the pipeline's: begin where work begins.
            first = min(act.begin + _before_work(act) for act in acts)
            real = max(real, (max(act.end for act in acts) - first) / 1e9)
            for one in members:
                found[one.rank] = [
                    Planned(
                        bool(graph.kind[n] == ActionKind.BACKWARD), int(graph.chunk[n]), int(graph.microbatch[n]),
                        round(first - self.origin + plan.start[n]), round(first - self.origin + plan.end[n]),
                    )
                    for n in computes[graph.stage[computes] == one.place[1]].tolist()
                ]  # fmt: skip
        return found, float(plan.makespan) / 1e9, real


def _before_work(act: Act) -> int:
    """Nanoseconds that a compute waited before it began to work."""
    at = act.begin
    for wait in act.inner:
        if wait.action != "transfer" and wait.begin - at < 100_000:
            at = max(at, wait.end)
    return at - act.begin


def _root(wait: Wait, of_rank: dict[int, list[Wait]]) -> int:
    """The rank with which a wait began: whom the rank that came last was itself waiting for in the same time."""
    seen = {wait.rank}
    begin, end, on = wait.begin, wait.end, wait.waited_on
    while wait.kind == "bubble" and on in of_rank and on not in seen:
        seen.add(on)
        most, cause = 0, None
        for other in of_rank[on]:
            over = min(other.end, end) - max(other.begin, begin)
            if other.kind == "bubble" and over > most:
                most, cause = over, other
        if cause is None or 2 * most < end - begin or cause.waited_on in seen:
            break
        begin, end, on = max(cause.begin, begin), min(cause.end, end), cause.waited_on
    return on


def _name(act: Act) -> str:
    return (
        act.action
        + (f" of micro-batch {act.microbatch}" if act.microbatch >= 0 else "")
        + (f", chunk {act.chunk}" if act.chunk > 0 else "")
    )


def _seconds(one: RankStep, waits: list[Wait]) -> dict[str, float]:
    """Where a rank's step went."""
    found: Counter[str] = Counter()
    for act in one.acts:
        idle = sum(wait.end - wait.begin for wait in act.inner if wait.action != "transfer")
        name = {"forward": "compute", "backward": "compute", "optimizer": "optimizer"}.get(act.action, "other")
        found[name] += act.end - act.begin - idle
    for wait in waits:
        found[f"exposed {wait.axis}" if wait.kind == "exposed" else wait.kind] += wait.end - wait.begin
    known = ("compute", "bubble", "samples", "optimizer")
    exposed = sorted(name for name in found if name.startswith("exposed"))
    found["other"] = one.end - one.begin - sum(found[name] for name in (*known, *exposed))
    return {name: found[name] / 1e9 for name in (*known, *exposed, "other")}
