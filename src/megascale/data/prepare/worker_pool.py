"""Worker processes that encode the pieces of a build.

The workers are commands with pipes instead of `multiprocessing` processes. So they work without a guard in the main
module, and end when their parent ends.
"""

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
from megascale.data.dataset.source_files import InputPiece
from megascale.data.prepare.encode_worker import EncodeJob, encode_piece
from megascale.data.tokenizer.tokenizer import load_tokenizer
from megascale.errors import DataError, MegascaleError

log = logging.getLogger(__name__)

WORKER_BYTES = 30 << 20  # memory that a worker needs at least
# Input of fewer bytes is encoded in this process, since starting workers would take longer.
MIN_POOL_BYTES = 32 << 20


def encode_pieces(pieces: Sequence[InputPiece], job: EncodeJob, workers: int, progress: Callable[[int], None]) -> None:
    """Encode all pieces. The first failure ends all workers and is raised; finished pieces stay.

    Args:
        workers: largest number of processes.
        progress: function that receives the bytes of input read since its last call, from several threads.
    """
    if sum(piece.size for piece in pieces) < MIN_POOL_BYTES:
        tokenizer = load_tokenizer(job.tokenizer)
        for piece in pieces:
            encode_piece(piece, tokenizer, job, progress)
        return
    count = min(workers, len(pieces))
    check_processes("--workers", count, WORKER_BYTES)
    queue = deque(pieces)
    failures: deque[MegascaleError] = deque()
    processes = [_start_worker(max(1, workers // count)) for _ in range(count)]
    threads = [
        threading.Thread(target=_serve_worker, args=(process, job, queue, failures, progress), daemon=True)
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
            for pipe in _get_pipes(process):
                with contextlib.suppress(OSError):
                    pipe.close()


def _start_worker(tokenizer_threads: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RAYON_NUM_THREADS": str(tokenizer_threads),  # read by the tokenizers library
        "TOKENIZERS_PARALLELISM": "true" if tokenizer_threads > 1 else "false",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return subprocess.Popen(
        module_command("megascale.data.prepare.encode_worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _get_pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _serve_worker(
    process: subprocess.Popen[str],
    job: EncodeJob,
    queue: deque[InputPiece],
    failures: deque[MegascaleError],
    progress: Callable[[int], None],
) -> None:
    """Send pieces to one worker until the queue is empty or a worker has failed."""
    requests, answers = _get_pipes(process)
    try:
        requests.write(job.to_json() + "\n")
        while queue and not failures:
            try:
                piece = queue.popleft()
            except IndexError:  # another thread has taken the last piece
                break
            requests.write(json.dumps(asdict(piece)) + "\n")
            requests.flush()
            _await_finished_piece(answers, progress)
        requests.close()
    except MegascaleError as error:
        failures.append(error)
    except OSError:
        if not failures:
            failures.append(
                MegascaleError(
                    f"a worker of the data build ended unexpectedly (exit code {process.wait()}; -9 often means that "
                    "memory ran out); run the same command again to continue with the missing pieces, with fewer "
                    "--workers if memory is short"
                )
            )
    except Exception as error:
        log.exception("an answer of a worker of the data build cannot be read")
        failures.append(
            MegascaleError(
                f"an answer of a worker of the data build cannot be read ({error!r}); run the same command again to "
                "continue with the missing pieces"
            )
        )


def _await_finished_piece(answers: IO[str], progress: Callable[[int], None]) -> None:
    """Read a worker's answers until a piece is finished.

    Raises DataError if the worker reports an error, and BrokenPipeError if the worker has ended.
    """
    for line in answers:
        record = json.loads(line)
        if "error" in record:
            raise DataError(record["error"])
        if "used" not in record:
            return
        progress(record["used"])
    raise BrokenPipeError  # the end of the answers, which `_serve_worker` handles as it does a failed write
