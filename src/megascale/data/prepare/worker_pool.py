"""Pieces over worker processes. Own processes and pipes: they need no guarded main module, and end with the parent."""

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
from pathlib import Path

from megascale.core.preflight import check_processes
from megascale.core.python_command import module_command
from megascale.data.dataset.sources import InputPiece
from megascale.data.prepare.encode import encode
from megascale.data.prepare.worker import EncodeJob
from megascale.data.tokenizer.tokenizer import load_tokenizer
from megascale.errors import DataError, MegascaleError

log = logging.getLogger(__name__)

# Less input than this is encoded here: starting processes would take longer.
WORKER = 30 << 20  # bytes that a process takes at least
SMALL = 32 << 20


def encode_pieces(pieces: Sequence[InputPiece], job: EncodeJob, workers: int, progress: Callable[[int], None]) -> None:
    """Encode all pieces; `progress` is called with input bytes used up, from several threads.

    The first failure ends all workers and is raised; finished pieces stay.
    """
    if sum(piece.size for piece in pieces) < SMALL:
        words = load_tokenizer(job.tokenizer)
        for piece in pieces:
            encode(piece, words, job.split, job.key, Path(job.folder), progress)
        return
    count = min(workers, len(pieces))
    check_processes("--workers", count, WORKER)
    queue, failures = deque(pieces), deque[MegascaleError]()
    processes = [_start(max(1, workers // count)) for _ in range(count)]
    threads = [
        threading.Thread(target=_serve, args=(process, job, queue, failures, progress), daemon=True)
        for process in processes
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
                if failures:
                    raise failures[0]
        if failures:
            raise failures[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for thread in threads:
            thread.join()
        for process in processes:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()


def _start(threads: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RAYON_NUM_THREADS": str(threads),  # of the tokenizers library
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    return subprocess.Popen(
        module_command("megascale.data.prepare.worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _serve(
    process: subprocess.Popen[str],
    job: EncodeJob,
    queue: deque[InputPiece],
    failures: deque[MegascaleError],
    progress: Callable[[int], None],
) -> None:
    """Hand pieces to one worker until none is left."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(job.to_json() + "\n")
        while queue and not failures:
            try:
                piece = queue.popleft()
            except IndexError:
                break
            process.stdin.write(json.dumps(asdict(piece)) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                record = json.loads(line)
                if "used" in record:
                    progress(record["used"])
                elif "error" in record:
                    failures.append(DataError(record["error"]))
                    return
                else:
                    break
            else:
                raise BrokenPipeError
        process.stdin.close()
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
