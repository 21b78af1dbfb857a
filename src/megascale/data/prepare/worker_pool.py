"""Pieces over worker processes with pipes: they need no guarded main module, and end with the parent."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import IO

from megascale.core.preflight import check_processes
from megascale.core.python_process import module_command
from megascale.data.dataset.sources import InputPiece
from megascale.data.prepare.encode_worker import EncodeJob, encode_piece
from megascale.data.tokenizer.tokenizer import load_tokenizer
from megascale.errors import DataError, MegascaleError

log = logging.getLogger(__name__)

WORKER = 30 << 20  # bytes of memory that a worker needs at least
# Less input than this is encoded in this process: starting workers would take longer.
SMALL = 32 << 20


def encode_pieces(pieces: Sequence[InputPiece], job: EncodeJob, workers: int, progress: Callable[[int], None]) -> None:
    """Encode all pieces; `progress` is called with input bytes used, from several threads.

    The first failure ends all workers and is raised; finished pieces stay.
    """
    if sum(piece.size for piece in pieces) < SMALL:
        tokenizer = load_tokenizer(job.tokenizer)
        for piece in pieces:
            encode_piece(piece, tokenizer, job, progress)
        return
    count = min(workers, len(pieces))
    check_processes("--workers", count, WORKER)
    queue = deque(pieces)
    failures: deque[MegascaleError] = deque()
    processes = [_start(max(1, workers // count)) for _ in range(count)]
    threads = [
        threading.Thread(target=_serve, args=(process, job, queue, failures, progress), daemon=True)
        for process in processes
    ]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not failures:
            for thread in threads:
                thread.join(0.2)
        if failures:
            raise failures[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for thread in threads:
            thread.join()
        for process in processes:
            for pipe in _pipes(process):
                with contextlib.suppress(OSError):
                    pipe.close()


def _start(threads: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RAYON_NUM_THREADS": str(threads),  # read by the tokenizers library
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return subprocess.Popen(
        module_command("megascale.data.prepare.encode_worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _serve(
    process: subprocess.Popen[str],
    job: EncodeJob,
    queue: deque[InputPiece],
    failures: deque[MegascaleError],
    progress: Callable[[int], None],
) -> None:
    """Send pieces to one worker until the queue is empty or a worker has failed."""
    requests, answers = _pipes(process)
    try:
        requests.write(job.to_json() + "\n")
        while queue and not failures:
            try:
                piece = queue.popleft()
            except IndexError:
                break
            requests.write(json.dumps(asdict(piece)) + "\n")
            requests.flush()
            _await_piece(answers, progress)
        requests.close()
    except MegascaleError as error:
        failures.append(error)
    except OSError:
        if not failures:
            failures.append(
                MegascaleError(
                    f"a worker of the data build ended unexpectedly (exit code {process.wait()}; -9 often means that "
                    "memory ran out); run the same command again to go on where it stopped, with a smaller --workers "
                    "if memory is short"
                )
            )
    except Exception as error:
        log.exception("an answer of a worker of the data build cannot be read")
        failures.append(
            MegascaleError(
                f"an answer of a worker of the data build cannot be read ({error!r}); run the same command again to "
                "go on where it stopped"
            )
        )


def _await_piece(answers: IO[str], progress: Callable[[int], None]) -> None:
    """Read a worker's answers until a piece is done; DataError if the worker failed."""
    for line in answers:
        record = json.loads(line)
        if "error" in record:
            raise DataError(record["error"])
        if "used" not in record:
            return
        progress(record["used"])
    raise BrokenPipeError
