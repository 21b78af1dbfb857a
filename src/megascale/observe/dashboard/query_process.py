"""Processes that answer questions, so that a query never blocks the server's event loop.

There are three processes: for files (curves, events, nodes), for spans, and for analyses, which may take seconds.
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

_ANSWER_SECONDS = 60.0
_CLEANUP_SECONDS = 5.0
_NICE = 5  # a driver or a trainer on the same machine has priority
_ANALYSES = frozenset({"spans_stragglers", "plan", "hang"})
_MEMORY, _ANALYSIS_MEMORY = "320MB", "512MB"
_questions: Questions | None = None  # set in an answering process


def _initialise_process(sources: Sources, memory: str, nice: int) -> None:
    global _questions
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the server ends this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(nice)
    _questions = Questions(sources, memory)


def _end_with_parent() -> None:
    """End this process when the server dies."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _answer(question: str, run: Path, options: dict[str, Any]) -> bytes:
    assert _questions is not None
    return _questions.answer(question, run, **options)


class QueryProcess:
    """A process that answers one question after another. It is replaced if it dies or takes too long.

    Args:
        memory: memory limit of a query over spans.
        nice: priority of the process, as for os.nice.
    """

    def __init__(self, sources: Sources, memory: str = _MEMORY, nice: int = _NICE) -> None:
        self._arguments = (sources, memory, nice)
        self._pool = self._start()

    def _start(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1, mp_context=context, initializer=_initialise_process, initargs=self._arguments)
        # The process inherits the mask. A Ctrl-C during its imports would print a traceback.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            pool.submit(os.getpid)  # starts the process, so that the first question does not wait for its imports
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pool

    async def ask(self, question: str, run: Path, **options: Any) -> bytes:
        """Return the answer as JSON.

        Raises the MegascaleError of `Questions.answer`, or TrainingError if the process dies or takes too long.
        """
        pool = self._pool
        try:
            future = asyncio.get_running_loop().run_in_executor(pool, _answer, question, run, options)
            return await asyncio.wait_for(future, _ANSWER_SECONDS)
        except BrokenProcessPool:
            self._replace(pool)
            raise TrainingError("the answering process died, perhaps for lack of memory; ask again") from None
        except TimeoutError:
            self._replace(pool)
            raise TrainingError(f"no answer within {_ANSWER_SECONDS:g} s; ask for fewer steps or ranks") from None

    def _replace(self, pool: ProcessPoolExecutor) -> None:
        if pool is self._pool:  # a concurrent question may have replaced it already
            self._pool = self._start()
            _kill(pool)

    @property
    def pids(self) -> list[int]:
        """Process ids of the running processes."""
        return list(self._pool._processes or {})

    def close(self) -> None:
        cleanup_thread = _kill(self._pool)
        if cleanup_thread is not None:
            # Wait, since an exiting interpreter would close the pipes that the thread closes and report an error.
            cleanup_thread.join(_CLEANUP_SECONDS)


def _kill(pool: ProcessPoolExecutor) -> threading.Thread | None:
    """Kill a pool's process; return the thread that cleans up afterwards, if there is one."""
    processes = list((pool._processes or {}).values())
    cleanup_thread: Any = pool._executor_manager_thread
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    return cleanup_thread


class QueryProcesses:
    """The three answering processes. Each question goes to one of them."""

    def __init__(self, sources: Sources) -> None:
        self._files = QueryProcess(sources)
        self._spans = QueryProcess(sources)
        self._analyses = QueryProcess(sources, _ANALYSIS_MEMORY, 2 * _NICE)

    async def ask(self, question: str, run: Path, **options: Any) -> bytes:
        """Return the answer as JSON; see `QueryProcess.ask`."""
        if question in _ANALYSES:
            process = self._analyses
        elif question.startswith("spans_"):
            process = self._spans
        else:
            process = self._files
        return await process.ask(question, run, **options)

    def close(self) -> None:
        for process in (self._files, self._spans, self._analyses):
            process.close()
