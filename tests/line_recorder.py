"""Records the lines of `src` that a process executes, for `scripts/redundant_tests.py`."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = str(ROOT / "src") + os.sep
FOLDER = "MEGASCALE_TEST_LINES"  # forked commands write their lines to this folder
INTERVAL = 1.0  # seconds; a process that is killed loses the lines since the last write

Lines = dict[str, list[int]]


class LineRecorder:
    """Records the lines of `src` that all threads execute, each line once per code object."""

    def __init__(self) -> None:
        # Hashing a code object takes longer than a line, so codes are known by their numbers and kept alive.
        self.remaining: dict[int, set[int] | None] = {}
        self.codes: dict[int, CodeType] = {}

    def __enter__(self) -> LineRecorder:
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def read(self) -> Lines:
        """Return the lines by file, relative to the repository."""
        lines: dict[str, set[int]] = defaultdict(set)
        for number, code in list(self.codes.items()):
            remaining = self.remaining[number]
            if remaining is not None:
                lines[code.co_filename.removeprefix(f"{ROOT}{os.sep}")] |= _list_lines(code) - remaining
        return {file: sorted(numbers) for file, numbers in lines.items()}

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        try:
            remaining = self.remaining[id(code)]
        except KeyError:
            remaining = None
            if code.co_filename.startswith(SOURCES):
                remaining = _list_lines(code)
            self.codes[id(code)] = code
            self.remaining[id(code)] = remaining
        if not remaining:
            frame.f_trace_lines = False
            return None
        remaining.discard(frame.f_lineno)

        def trace_line(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
            remaining.discard(frame.f_lineno)
            return trace_line

        return trace_line


def _list_lines(code: CodeType) -> set[int]:
    return {number for *_, number in code.co_lines() if number is not None}


_recorder: LineRecorder | None = None  # of this process


def record_process() -> None:
    """Write the lines of this process, and of those that it forks, to the requested folder from now on."""
    global _recorder
    if FOLDER not in os.environ:
        return
    if _recorder is None:
        _recorder = LineRecorder()
        _recorder.__enter__()
        os.register_at_fork(after_in_child=_begin_to_write)
        _begin_to_write()
    atexit.register(_write)


def _begin_to_write() -> None:
    threading.Thread(target=_write_often, daemon=True).start()


def _write_often() -> None:
    sys.settrace(None)
    while True:
        time.sleep(INTERVAL)
        _write()


def _write() -> None:
    assert _recorder is not None
    folder = Path(os.environ.get(FOLDER, ""))
    part = folder / f"{os.getpid()}.{threading.get_ident()}"
    with contextlib.suppress(OSError):  # the test has ended
        part.write_text(json.dumps(_recorder.read()))
        part.rename(folder / f"{os.getpid()}.json")


def read_processes(folder: Path) -> Iterator[Lines]:
    """Yield the lines of each process that wrote to the folder."""
    for file in folder.glob("*.json"):
        yield json.loads(file.read_text())
