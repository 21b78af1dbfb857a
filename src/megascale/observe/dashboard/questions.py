"""Answers to the questions of the dashboard's pages. A question is a request of a page for one view of a run.

Each answer is JSON that is read from a run folder. A separate process (query_process.py) runs this code. Answers about
spans are cached as text until the run writes more spans.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megascale.core import strict_json
from megascale.errors import ConfigError, DataError, MegascaleError
from megascale.observe.analysis.rank_times import choose_window, read_rank_times
from megascale.observe.analysis.run_steps import list_sampled_steps
from megascale.observe.analysis.step_timeline import Track, read_step_timeline
from megascale.observe.analysis.stragglers import find_stragglers
from megascale.observe.dashboard.expert_loads import read_expert_loads
from megascale.observe.dashboard.fleet import Fleet
from megascale.observe.dashboard.rank_values import (
    make_heat_map,
    read_rank_figures,
    read_rank_history,
    read_ranks,
    to_json_number,
)
from megascale.observe.dashboard.run_reader import RunReader
from megascale.observe.hang.sentences import describe_position
from megascale.observe.hang.verdict import examine_run, format_headline
from megascale.observe.store.tables import SpanTables

log = logging.getLogger("megascale.dashboard")
_MAX_OPEN_TABLES = 3  # runs whose tables stay open
_MAX_READERS = 64  # runs whose metrics and events stay in memory
_MAX_CACHED_ANSWERS = 64
_NODE_SECONDS = 1.0  # a driver's answer about its nodes is reused for this time
_CHECK_SECONDS = 2.0  # time between checks whether a run has written spans
_QUERY_THREADS = 2
_MAX_POINTS = 2000  # per curve of an answer
_MAX_SERIES = 40  # curves per answer
_MEASURED_KEYS = ("seconds", "tokens_per_second", "mfu", "memory_gib")  # metrics that the page compares with the plan
WATCH_SECONDS = 0.5  # time for which ranks are watched for progress
_MAX_HANG_RANKS = 20_000
_MAX_STRAGGLERS = 40
_MAX_STRAGGLER_VALUES = 250_000  # product of ranks and steps that the memory of a query can hold
_MIN_STRAGGLER_STEPS = 10
_MAX_TRACKS = 512  # ranks of a timeline
_MAX_LISTED_STEPS = 500
_RECENT_STEPS = 200  # the medians that are compared with the plan are over this number of newest steps
_SMALL_JOB_RANKS = 32  # in jobs of at most this number of ranks a timeline shows all ranks by default


@dataclass(frozen=True)
class Sources:
    """Functions of other packages. The first argument of each is a run folder, from which the function reads.

    Attributes:
        job: returns the state of the driver or its journal, None if the run was not launched. Raises MegascaleError if
            the state is unreadable.
        nodes: returns the job's nodes, with their ranks and history.
        plan: returns memory, bubble and predicted step time of the run's configuration. Further arguments: number of
            ranks, and name of a cluster.
    """

    job: Callable[[Path], dict[str, Any] | None]
    nodes: Callable[[Path], dict[str, Any]]
    plan: Callable[[Path, int, str], dict[str, Any]]


@dataclass
class _OpenTables:
    """Tables of a run that stay open.

    Attributes:
        version: text that changes with the files of spans.
        check_time: time of the last check of the files (time.monotonic).
    """

    tables: SpanTables
    version: str
    check_time: float


class Questions:
    """Answers the questions of the pages with `answer`.

    Args:
        memory: memory limit of a query over spans, such as "320MB".
    """

    def __init__(self, sources: Sources, memory: str) -> None:
        self._sources = sources
        self._memory = memory
        # Caches by run folder. In ordered caches the least recently used items come first.
        self._nodes: dict[Path, tuple[float, dict[str, Any]]] = {}  # time and content of the newest answer, of one run
        self._readers: OrderedDict[Path, RunReader] = OrderedDict()
        self._tables: OrderedDict[Path, _OpenTables] = OrderedDict()
        # Cache of answers about spans, by question, run and options: version of the spans, and the answer.
        self._answers: OrderedDict[tuple[Any, ...], tuple[str, bytes]] = OrderedDict()
        self._fleet = Fleet(sources.job)
        self._run_questions: dict[str, Callable[..., dict[str, Any]]] = {
            "pulse": lambda run: self._get_reader(run).read_pulse(),
            "overview": lambda run: self._get_reader(run).read_overview(),
            "events": self._answer_events,
            "series": self._answer_series,
            "experts": self._answer_experts,
            "nodes": self._answer_nodes,
            "plan": self._answer_plan,
            "hang": answer_hang,
            "fleet": self._fleet.list_rows,
        }
        self._span_questions: dict[str, Callable[..., dict[str, Any]]] = {
            "spans_heat": make_heat_map,
            "spans_stragglers": answer_stragglers,
            "spans_history": read_rank_history,
            "spans_rank": read_rank_figures,
            "spans_timeline": answer_timeline,
        }

    def answer(self, question: str, run: Path, **options: Any) -> bytes:
        """Return the answer to `question` about the folder `run` as JSON.

        Raises MegascaleError for invalid options or an unreadable run.
        """
        try:
            return self._answer(question, run, options)
        except MegascaleError:
            raise
        except Exception as error:
            log.exception("%s of %s failed", question, run)
            raise DataError(
                f"the files of {run.name} cannot be read for this view ({type(error).__name__}: {str(error)[:200]}); "
                "the output of the dashboard has the details"
            ) from error

    def _answer(self, question: str, run: Path, options: dict[str, Any]) -> bytes:
        if question in self._run_questions:
            return strict_json.dumps(self._run_questions[question](run, **options)).encode()
        tables, version = self._open_tables(run)
        key = (question, run) + tuple(sorted(options.items()))
        cached_version, text = self._answers.get(key, ("", b""))
        if key not in self._answers or cached_version != version:
            text = strict_json.dumps(self._span_questions[question](tables, **options)).encode()
            self._answers[key] = (version, text)
        self._answers.move_to_end(key)
        while len(self._answers) > _MAX_CACHED_ANSWERS:
            self._answers.popitem(last=False)
        return text

    def _get_reader(self, run: Path) -> RunReader:
        if run not in self._readers:
            self._readers[run] = RunReader(run, self._sources.job)
            while len(self._readers) > _MAX_READERS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(run)
        return self._readers[run]

    def _open_tables(self, run: Path) -> tuple[SpanTables, str]:
        """Return the run's tables, at most _CHECK_SECONDS old, and their version."""
        opened = self._tables.pop(run, None)
        if opened is not None and time.monotonic() - opened.check_time < _CHECK_SECONDS:
            self._tables[run] = opened
            return opened.tables, opened.version
        version = _describe_files(run / "spans")
        if opened is not None and opened.version == version:
            tables = opened.tables
        else:
            if opened is not None:
                opened.tables.close()
            tables = SpanTables(run, threads=_QUERY_THREADS, memory=self._memory)
        self._tables[run] = _OpenTables(tables, version, time.monotonic())
        while len(self._tables) > _MAX_OPEN_TABLES:
            _, oldest = self._tables.popitem(last=False)
            oldest.tables.close()
        return tables, version

    def _answer_events(self, run: Path, count: int) -> dict[str, Any]:
        reader = self._get_reader(run)
        reader.refresh()
        return {"events": reader.list_events(count), "count": reader.event_count}

    def _answer_series(
        self, run: Path, keys: list[str], x: str, points: int, low: float | None, high: float | None
    ) -> dict[str, Any]:
        if x not in ("step", "tokens", "time"):
            raise ConfigError(f"x={x[:60]}: curves are drawn over step, tokens or time")
        if len(keys) > _MAX_SERIES or not 2 <= points <= _MAX_POINTS:
            raise ConfigError(f"a request may have at most {_MAX_SERIES} keys and 2 to {_MAX_POINTS} points")
        metrics = self._get_reader(run).metrics
        metrics.refresh()
        return {"rows": metrics.rows, "series": metrics.make_series(keys, x, points, low, high)}

    def _answer_experts(self, run: Path, step: int | None) -> dict[str, Any]:
        settings, _ = self._get_reader(run).read_settings()
        return read_expert_loads(run, step, settings)

    def _answer_nodes(self, run: Path) -> dict[str, Any]:
        # Ask the driver at most once per second, since many pages may be open.
        answer_time, nodes = self._nodes.get(run, (0.0, {}))
        if not nodes or time.monotonic() - answer_time > _NODE_SECONDS:
            nodes = self._sources.nodes(run)
            self._nodes = {run: (time.monotonic(), nodes)}
        return nodes

    def _answer_plan(self, run: Path, cluster: str) -> dict[str, Any]:
        reader = self._get_reader(run)
        reader.refresh()
        job, _ = reader.read_job()
        world = job["world"] if job and job["world"] else 0
        if not world:
            with contextlib.suppress(DataError):
                tables, _ = self._open_tables(run)
                world = len(read_ranks(tables).rank)
        columns = reader.metrics.read_columns()
        medians = {}
        for key in _MEASURED_KEYS:
            if key not in columns:
                continue
            recent = columns[key][-_RECENT_STEPS:]
            recent = np.sort(recent[recent > 0])  # drops NaN, which stands for a missing value
            if recent.size:
                medians[key] = float(recent[recent.size // 2])
        plan = self._sources.plan(run, world, cluster)
        return {"plan": plan, "world": world, "measured": medians, "step": reader.metrics.latest.get("step")}


def _describe_files(spans: Path) -> str:
    """Return a text that changes with the files of spans: by host, their number, total size and time of change."""
    texts = []
    for host in sorted(spans.glob("host=*")):
        try:
            with os.scandir(host) as entries:
                files = list(entries)
            size = sum(file.stat().st_size for file in files if file.name.startswith(("spool-", "ranks")))
            texts.append(f"{host.name}:{len(files)}:{size}:{host.stat().st_mtime_ns}")
        except OSError:
            continue
    return ";".join(texts)


def answer_hang(run: Path) -> dict[str, Any]:
    """Return the verdict of `megascale hang`, from the files of the run only: the ranks are not asked for stacks.

    The answer has the verdict, its evidence, all waits, and position and stack of each rank. `known` is false if no
    rank has a record.
    """
    try:
        scene, verdict = examine_run(run, ask=False, watch_seconds=WATCH_SECONDS)
    except DataError:
        reason = "No rank has recorded its position: the run has not begun, or its status files are elsewhere."
        return {"known": False, "why": reason, "kind": "none", "ranks": [], "waits": [], "by_rank": []}
    return {
        "known": True,
        "kind": verdict.kind,
        "headline": format_headline(verdict),
        "ranks": list(verdict.ranks),
        "group": verdict.group,
        "evidence": list(verdict.evidence)[:20],
        "sent": scene.from_agents,
        "time": scene.now_ns / 1e9,
        "waits": [
            {
                "rank": wait.rank,
                "group": wait.group,
                "op": wait.op,
                "sequence": wait.sequence,
                "on": list(wait.on[:64]),
                "all_came": wait.all_came,
                "seconds": round(wait.seconds, 1),
            }
            for wait in verdict.waits[:_MAX_HANG_RANKS]
        ],
        "by_rank": [
            {
                "rank": rank,
                "process": evidence.process,
                "place": describe_position(evidence),
                "answered": evidence.answered,
                "moving": evidence.moving,
                "stack": list(evidence.stack),
            }
            for rank, evidence in sorted(scene.ranks.items())[:_MAX_HANG_RANKS]
        ],
    }


def answer_stragglers(tables: SpanTables, first: int | None, last: int | None) -> dict[str, Any]:
    """Return slow ranks and links with cause, confidence and evidence. Raises DataError without steps to analyse.

    Args:
        first, last: window of steps; None: the default window of `megascale stragglers`.
    """
    step_range = ""
    if first is not None and last is not None:
        step_range = f"{first}-{last}"
    attempt, first_step, last_step = choose_window(tables, step_range)
    max_steps = max(_MIN_STRAGGLER_STEPS, _MAX_STRAGGLER_VALUES // max(1, _count_ranks(tables)))
    first_step = max(first_step, last_step + 1 - max_steps)  # keep the newest steps
    result = find_stragglers(read_rank_times(tables, attempt, first_step, last_step), tables)
    steps = result.times.steps
    return {
        "steps": {"first": int(steps[0]), "last": int(steps[-1])},
        "compared": len(result.times.ranks) - result.judgement.uncompared,
        "lonely": result.judgement.uncompared,
        "spread": to_json_number(result.judgement.spread),
        "limit": to_json_number(result.judgement.limit),
        "count": len(result.ranks) + len(result.links),
        "ranks": [
            {
                "rank": straggler.slow_rank.rank,
                "hostname": straggler.hostname,
                "slower": to_json_number(straggler.slow_rank.excess),
                "state": straggler.slow_rank.state,
                "first": straggler.slow_rank.first,
                "last": straggler.slow_rank.last,
                "cause": straggler.cause,
                "costs": to_json_number(straggler.delay_seconds),
                "confidence": to_json_number(straggler.slow_rank.confidence),
                "evidence": list(straggler.evidence),
            }
            for straggler in result.ranks[:_MAX_STRAGGLERS]
        ],
        "links": [
            {
                "ranks": list(link.ranks[:64]),
                "axis": link.axis,
                "share": to_json_number(link.share),
                "seconds": to_json_number(link.seconds),
                "confidence": to_json_number(link.confidence),
                "evidence": list(link.evidence),
            }
            for link in result.links[:_MAX_STRAGGLERS]
        ],
    }


def _count_ranks(tables: SpanTables) -> int:
    return int(tables.query("SELECT count(DISTINCT rank) AS n FROM ranks")["n"][0])


def answer_timeline(tables: SpanTables, step: int | None, ranks: str, view: str) -> dict[str, Any]:
    """Return a step's timeline; see `read_step_timeline` for the arguments and the errors.

    Times are microseconds since the timeline's begin. `tracks` has an object per rank, in which three keys hold lists
    of rows with these columns:

        acts      action, chunk, micro-batch, begin, end
        waits     kind, axis, begin, end, awaited rank, rank that caused the wait, action, reason
        planned   1 for a backward and 0 for a forward, chunk, micro-batch, begin, end

    The rows of `messages` are: sender, begin of the send, receiver, begin of the receiver's compute.
    """
    steps = list_sampled_steps(tables)
    if not ranks and _count_ranks(tables) <= _SMALL_JOB_RANKS:
        ranks = "all"
    timeline = read_step_timeline(tables, step, ranks, view)
    if len(timeline.tracks) > _MAX_TRACKS:
        raise ConfigError(
            f"ranks={ranks[:60]} selects {len(timeline.tracks):,} ranks; the timeline shows at most {_MAX_TRACKS}"
        )
    has_plan = not math.isnan(timeline.planned_seconds)
    return {
        "step": timeline.step,
        "steps": steps[-_MAX_LISTED_STEPS:],
        "view": timeline.view,
        "length": _to_microseconds(timeline.length),
        "virtual": timeline.virtual,
        "planned_seconds": timeline.planned_seconds if has_plan else None,
        "pipeline_seconds": timeline.pipeline_seconds if has_plan else None,
        "clock_error": _to_microseconds(timeline.clock_error) if timeline.clock_error >= 0 else None,
        "bubbles": list(timeline.bubbles.items())[:20],
        "messages": [
            [
                message.sender,
                _to_microseconds(message.send_begin),
                message.receiver,
                _to_microseconds(message.compute_begin),
            ]
            for message in timeline.messages
        ],
        "tracks": [_format_track(track, timeline.origin) for track in timeline.tracks],
    }


def _to_microseconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e3, 1)


def _format_track(track: Track, origin: int) -> dict[str, Any]:
    """Return a track for JSON. `origin` is the timeline's begin, from which recorded actions are not yet counted."""
    to_us = _to_microseconds
    return {
        "rank": track.rank,
        "place": track.coordinates,
        "begin": to_us(track.begin),
        "end": to_us(track.end),
        "seconds": track.seconds,
        "acts": [
            [act.action, act.chunk, act.microbatch, to_us(act.begin - origin), to_us(act.end - origin)]
            for act in track.actions
        ],
        "waits": [
            [
                wait.kind, wait.axis, to_us(wait.begin), to_us(wait.end), wait.waited_on, wait.root, wait.action,
                wait.reason,
            ]
            for wait in track.waits
        ],
        "planned": [
            [int(compute.is_backward), compute.chunk, compute.microbatch, to_us(compute.begin), to_us(compute.end)]
            for compute in track.planned_computes
        ],
    }  # fmt: skip
