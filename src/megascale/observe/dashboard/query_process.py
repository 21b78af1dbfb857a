"""The processes that answer questions, and who asks them from the server's loop: no query holds up a page or a stream.

Three of them: a quick one for files (curves, events, nodes), one for spans, whose queries may take a part of a second,
and one for analyses, which may take some.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from megascale.errors import TrainingError
from megascale.observe.dashboard.questions import Questions, Sources

_SECONDS = 60.0  # that an answer may take
_TIDYING = 5.0  # that the end of a process may take
_NICE = 5  # a driver or a trainer on the same machine comes first
_ANALYSES = frozenset({"spans_stragglers", "plan", "hang"})
_MEMORY, _ANALYSIS_MEMORY = "320MB", "512MB"
_questions: Questions | None = None  # of a process that answers


def _begin(sources: Sources, memory: str, nice: int) -> None:
    global _questions
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(nice)
    _questions = Questions(sources, memory)


def _end_with_parent() -> None:
    """A server that was killed leaves nobody behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _answer(question: str, run: Path, given: dict[str, Any]) -> bytes:
    assert _questions is not None
    return _questions.answer(question, run, **given)


class QueryProcess:
    """One process that answers one question after another; a new one is started when it has died or taken too long."""

    def __init__(self, sources: Sources, memory: str = _MEMORY, nice: int = _NICE) -> None:
        self._given = (sources, memory, nice)
        self._pool = self._make()

    def _make(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=self._given)
        pool.submit(os.getpid)  # started now: no first question waits for its imports
        return pool

    async def ask(self, question: str, run: Path, **given: Any) -> bytes:
        """The answer as JSON. MegascaleError as the question raises it, TrainingError where nothing answered."""
        pool = self._pool
        try:
            future = asyncio.get_running_loop().run_in_executor(pool, _answer, question, run, given)
            return await asyncio.wait_for(future, _SECONDS)
        except BrokenProcessPool:
            self._replace(pool)
            raise TrainingError("the process that answers has died, perhaps for want of memory; ask again") from None
        except TimeoutError:
            self._replace(pool)
            raise TrainingError(f"no answer within {_SECONDS:g} s; ask for fewer steps or ranks") from None

    def _replace(self, pool: ProcessPoolExecutor) -> None:
        if pool is self._pool:  # who asked at the same time may have seen to it
            self._pool = self._make()
            self._end(pool)

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes at work."""
        return list(self._pool._processes or {})

    @staticmethod
    def _end(pool: ProcessPoolExecutor) -> Any:
        """Kill it; the thread that then tidies up after it, None if there is none."""
        processes, tidies = list((pool._processes or {}).values()), pool._executor_manager_thread
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        return tidies

    def close(self) -> None:
        """End it."""
        tidies = self._end(self._pool)
        if tidies is not None:
            tidies.join(_TIDYING)  # an interpreter that ends meanwhile closes the same pipes and says so


class QueryProcesses:
    """All of them; sends each question where it belongs."""

    def __init__(self, sources: Sources) -> None:
        self._files, self._spans = QueryProcess(sources), QueryProcess(sources)
        self._analyses = QueryProcess(sources, _ANALYSIS_MEMORY, 2 * _NICE)

    async def ask(self, question: str, run: Path, **given: Any) -> bytes:
        """As `QueryProcess.ask`."""
        if question in _ANALYSES:
            return await self._analyses.ask(question, run, **given)
        return await (self._spans if question.startswith("spans_") else self._files).ask(question, run, **given)

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes at work."""
        return [*self._files.pids, *self._spans.pids, *self._analyses.pids]

    def close(self) -> None:
        """End them."""
        self._files.close()
        self._spans.close()
        self._analyses.close()
