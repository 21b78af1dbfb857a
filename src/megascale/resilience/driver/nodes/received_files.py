"""Writes into the run folder what agents on other machines send of their trainers' files, in a thread of its own.

The run folder then tells the whole story, as where trainers write there themselves. The queue is bounded: what finds no
place is not confirmed, and its agent sends it again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path

from megascale.resilience.protocol.agent_messages import FileData

log = logging.getLogger("megascale.driver")
_QUEUE = 1024  # pieces
_TAIL = 1 << 20  # bytes of a file in which lines that come again are looked for
_NAMES = re.compile(r"logs/rank-\d{1,9}\.log|metrics\.jsonl|events\.jsonl|samples/ledger\.jsonl|identity|kernels\.json")
_BY_STEP = ("metrics.jsonl", "samples/ledger.jsonl")

Confirm = Callable[[str, int], None]


class ReceivedFiles:
    """Args:
    run: the run folder.
    settings: gives the configuration in force, as TOML, which a run folder keeps.
    """

    def __init__(self, run: Path, settings: Callable[[], str]) -> None:
        self._run, self._settings = run, settings
        self._queue: queue.Queue[tuple[FileData, Confirm] | None] = queue.Queue(_QUEUE)
        self._thread: threading.Thread | None = None

    def take(self, piece: FileData, confirm: Confirm) -> bool:
        """Have a piece written; `confirm(name, end)` is called in the thread once it is. False: it is not wanted, or
        there is no place for it now."""
        if not _NAMES.fullmatch(piece.name):
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="received files", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((piece, confirm))
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Write what has come, and end."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(10.0)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            piece, confirm = item
            try:
                self._write(piece)
            except OSError as error:
                log.warning("%s of the run folder was not written: %s", piece.name, error)
                continue
            confirm(piece.name, piece.start + len(piece.data))

    def _write(self, piece: FileData) -> None:
        file = self._run / piece.name
        file.parent.mkdir(parents=True, exist_ok=True)
        data = piece.data
        if piece.whole:
            _replace(file, data)
            if piece.name == "identity":  # a start was accepted
                _replace(self._run / "config.toml", self._settings().encode())
            return
        if piece.first and piece.name in _BY_STEP and not piece.start:
            _rewind(file, data)
        elif piece.first and piece.name.endswith(".jsonl"):
            data = _new_lines(file, data)
        if piece.left_out:
            data = f"[{piece.left_out} bytes left out]\n".encode() + data
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, data)
        finally:
            os.close(handle)


def _replace(file: Path, data: bytes) -> None:
    temporary = file.with_name(file.name + ".received")
    temporary.write_bytes(data)
    os.replace(temporary, file)


def _rewind(file: Path, data: bytes) -> None:
    """Drop the lines of steps that come again: trainers went on from an earlier step, on this machine or another."""
    first = _step(data.partition(b"\n")[0])
    if first is None or not file.exists():
        return
    lines = file.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if (step := _step(line)) is not None and step < first]
    if len(kept) < len(lines):
        _replace(file, b"".join(kept))


def _step(line: bytes) -> int | None:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return int(json.loads(line)["step"])
    return None


def _new_lines(file: Path, data: bytes) -> bytes:
    """The lines that are not at the end of the file yet: a driver before may have written and not confirmed them."""
    try:
        with open(file, "rb") as there:
            there.seek(max(0, there.seek(0, os.SEEK_END) - _TAIL))
            known = set(there.read().splitlines(keepends=True))
    except OSError:
        return data
    return b"".join(line for line in data.splitlines(keepends=True) if line not in known)
