"""Random pauses where processes and threads meet, to make rare orders of events common.

    PYTHONPATH=tests/pauses python -m pytest -n 3 --dist loadgroup tests/checkpoint

Every Python process of such a run pauses now and then: about changes of files and signals, about messages on
sockets, and where a thread begins or ends; and its threads take turns fifty times as often. Nothing else changes, so
what fails only so is a race that a busy machine has too. Most pauses take milliseconds, a few a third of a second.
"""

from __future__ import annotations

import functools
import os
import random
import socket
import sys
import threading
from collections.abc import Callable
from time import sleep
from typing import Any

_FILES = ("replace", "rename", "unlink", "mkdir", "rmdir", "link", "symlink", "open", "fsync", "listdir", "kill")
_SOCKETS = ("connect", "send", "sendall")
_TURN = 1e-4  # seconds; Python's own: 5e-3
_rng = random.Random(os.urandom(8))


def _pause(share: float) -> None:
    """Pause up to 10 ms with the probability `share`. A fifth of the pauses are longer, a few much longer."""
    drawn = _rng.random() / share
    if drawn < 1.0:
        sleep(_rng.random() * (0.01 if drawn < 0.8 else 0.06 if drawn < 0.99 else 0.4))


def _with_pauses(function: Callable[..., Any], share: float) -> Callable[..., Any]:
    @functools.wraps(function)
    def paused(*args: Any, **keys: Any) -> Any:
        _pause(share)
        result = function(*args, **keys)
        _pause(share)
        return result

    return paused


def _begin() -> None:
    sys.setswitchinterval(_TURN)
    for name in _FILES:
        plain = getattr(os, name)
        paused = _with_pauses(plain, 0.04 if name in ("open", "listdir") else 0.18)
        for able in (os.supports_dir_fd, os.supports_fd):
            able |= {paused} if plain in able else set()
        setattr(os, name, paused)
    for name in _SOCKETS:
        setattr(socket.socket, name, _with_pauses(getattr(socket.socket, name), 0.01))
    threading.Thread.run = _with_pauses(threading.Thread.run, 0.18)  # type: ignore[method-assign]


_begin()
