"""What pages ask, answered in a process of its own: one function a question, from a run folder to JSON.

Answers are kept as text until the run has written more.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.errors import ConfigError, DataError, MegascaleError
from megascale.observe.dashboard import hang_answer, rank_values, straggler_answer, timeline_answer
from megascale.observe.dashboard.run_reader import RunReader
from megascale.observe.store.tables import SpanTables

log = logging.getLogger("megascale.dashboard")
_OPEN = 3  # runs whose tables are kept open
_READERS = 64
_KEPT = 64  # answers
_NODES = 1.0  # seconds for which what a driver said of its nodes holds
_LOOK = 2.0  # seconds before a run's spans are looked at again
_THREADS = 2
_MOST_POINTS, _MOST_SERIES = 2000, 40


@dataclass(frozen=True)
class Sources:
    """What comes from packages that this one does not know, by functions of the run folder.

    Attributes:
        job: what the driver or its journal says, None if none was launched; MegascaleError if it cannot be read.
        nodes: the job's nodes, their ranks and history.
        plan: memory, bubble and predicted step of the run's configuration on so many ranks of a cluster, by name.
    """

    job: Callable[[Path], dict[str, Any] | None]
    nodes: Callable[[Path], dict[str, Any]]
    plan: Callable[[Path, int, str], dict[str, Any]]


class Questions:
    """Lives in the process that answers. `ask` is all there is to call.

    Args:
        memory: that a query over spans may take.
    """

    def __init__(self, sources: Sources, memory: str) -> None:
        self._sources, self._memory = sources, memory
        self._nodes: dict[Path, tuple[float, dict[str, Any]]] = {}
        self._readers: OrderedDict[Path, RunReader] = OrderedDict()
        self._tables: OrderedDict[Path, tuple[SpanTables, str, float]] = OrderedDict()
        self._answers: OrderedDict[tuple[Any, ...], tuple[str, bytes]] = OrderedDict()

    def ask(self, question: str, run: Path, **given: Any) -> bytes:
        """Return the answer as JSON. MegascaleError says what of the question or the run is wrong."""
        try:
            return self._ask(question, run, given)
        except MegascaleError:
            raise
        except Exception as error:
            log.exception("%s of %s failed", question, run)
            raise DataError(
                f"the files of {run.name} cannot be read for this view ({type(error).__name__}: {str(error)[:200]}); "
                "the output of the dashboard has the details"
            ) from error

    def _ask(self, question: str, run: Path, given: dict[str, Any]) -> bytes:
        answer = getattr(self, f"_on_{question}")
        if not question.startswith("spans_"):
            return strict_json.dumps(answer(run, **given)).encode()
        tables, version = self._spans(run)
        key = (question, run, *sorted(given.items()))
        kept = self._answers.get(key)
        if kept is None or kept[0] != version:
            kept = (version, strict_json.dumps(answer(tables, run, **given)).encode())
        self._answers[key] = kept
        self._answers.move_to_end(key)
        while len(self._answers) > _KEPT:
            self._answers.popitem(last=False)
        return kept[1]

    def _reader(self, run: Path) -> RunReader:
        if run not in self._readers:
            self._readers[run] = RunReader(run, self._sources.job)
            while len(self._readers) > _READERS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(run)
        return self._readers[run]

    def _spans(self, run: Path) -> tuple[SpanTables, str]:
        """The run's tables as of the last seconds, and a text that changes with them."""
        kept = self._tables.pop(run, None)
        if kept is not None and time.monotonic() - kept[2] < _LOOK:
            self._tables[run] = kept
            return kept[0], kept[1]
        version = _version(run / "spans")
        if kept is None or kept[1] != version:
            if kept is not None:
                kept[0].close()
            kept = (SpanTables(run, threads=_THREADS, memory=self._memory), version, 0.0)
        self._tables[run] = (kept[0], version, time.monotonic())
        while len(self._tables) > _OPEN:
            self._tables.popitem(last=False)[1][0].close()
        return kept[0], version

    def _on_pulse(self, run: Path) -> dict[str, Any]:
        return self._reader(run).pulse()

    def _on_overview(self, run: Path) -> dict[str, Any]:
        return self._reader(run).overview()

    def _on_events(self, run: Path, count: int) -> dict[str, Any]:
        reader = self._reader(run)
        reader.refresh()
        return {"events": reader.event_page(count), "count": reader.event_count}

    def _on_series(
        self, run: Path, keys: list[str], x: str, points: int, low: float | None, high: float | None
    ) -> dict[str, Any]:
        if x not in ("step", "tokens", "time"):
            raise ConfigError(f"x={x[:60]}: curves go along step, tokens or time")
        if len(keys) > _MOST_SERIES or not 2 <= points <= _MOST_POINTS:
            raise ConfigError(f"at most {_MOST_SERIES} keys and 2 to {_MOST_POINTS} points can be asked for at once")
        metrics = self._reader(run).metrics
        metrics.refresh()
        return {"rows": metrics.rows, "series": metrics.make_series(keys, x, points, low, high)}

    def _on_nodes(self, run: Path) -> dict[str, Any]:
        # However many pages are open, a driver is asked once in a while.
        asked, found = self._nodes.get(run, (0.0, {}))
        if not found or time.monotonic() - asked > _NODES:
            found = self._sources.nodes(run)
            self._nodes = {run: (time.monotonic(), found)}
        return found

    def _on_hang(self, run: Path) -> dict[str, Any]:
        return hang_answer.hang(run)

    def _on_plan(self, run: Path, cluster: str) -> dict[str, Any]:
        reader = self._reader(run)
        reader.refresh()
        job, _ = reader.job()
        world = job["world"] if job and job["world"] else 0
        try:
            if not world:
                world = len(rank_values.ranks_of(self._spans(run)[0]).rank)
        except DataError:
            pass
        latest = reader.metrics.latest
        columns, measured = reader.metrics.read_columns(), {}
        for key in ("seconds", "tokens_per_second", "mfu", "memory_gib"):
            if key in columns and (good := columns[key][-200:][columns[key][-200:] > 0]).size:
                measured[key] = float(sorted(good.tolist())[good.size // 2])
        return {"plan": self._sources.plan(run, max(1, world), cluster), "world": world, "measured": measured,
                "step": latest.get("step")}  # fmt: skip

    def _on_spans_heat(
        self, tables: SpanTables, run: Path, figure: str, first: int | None, last: int | None, among: str
    ) -> dict[str, Any]:
        return rank_values.heat_map(tables, figure, first, last, among)

    def _on_spans_stragglers(
        self, tables: SpanTables, run: Path, first: int | None, last: int | None
    ) -> dict[str, Any]:
        return straggler_answer.answer_stragglers(tables, first, last)

    def _on_spans_history(self, tables: SpanTables, run: Path, figure: str, rank: int) -> dict[str, Any]:
        return rank_values.rank_history(tables, figure, rank)

    def _on_spans_rank(
        self, tables: SpanTables, run: Path, rank: int, first: int | None, last: int | None
    ) -> dict[str, Any]:
        return rank_values.rank_figures(tables, rank, first, last)

    def _on_spans_timeline(
        self, tables: SpanTables, run: Path, step: int | None, ranks: str, view: str
    ) -> dict[str, Any]:
        return timeline_answer.timeline(tables, step, ranks, view)


def _version(spans: Path) -> str:
    """A text that changes when the spans' files do: names, and how long the newest of a folder is."""
    told = []
    for host in sorted(spans.glob("host=*")):
        count = size = 0
        try:
            with os.scandir(host) as entries:
                for entry in entries:
                    count += 1
                    size += entry.stat().st_size if entry.name.startswith(("spool-", "ranks")) else 0
            told.append(f"{host.name}:{count}:{size}:{host.stat().st_mtime_ns}")
        except OSError:
            continue
    return ";".join(told)
