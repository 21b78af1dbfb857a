"""Follows objects of a Kubernetes API server in a thread: a list, then what changes, resumed where it broke off."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any, Literal

from megascale.core.failure import FailureLog
from megascale.resilience.cluster.kubernetes_api import Json, KubernetesApi, KubernetesError

log = logging.getLogger("megascale.driver")
SILENCE = 75.0  # seconds without a word after which a watch is opened again; servers send bookmarks each minute
PERIOD = 240  # seconds after which the server is to end a watch
PAGE = 500  # objects of a list that come at once
_FIRST, _MOST = 0.2, 3.0  # seconds until it is tried again

# ("all", objects): all that there are; ("changed", objects), ("gone", objects): since.
Change = tuple[Literal["all", "changed", "gone"], list[Json]]


class Watch:
    """Args:
    api: the server.
    path: of the objects.
    changed: called in the thread with each change.
    query: selectors.

    Attributes:
        version: of what was seen last.
        lists: how often everything was listed.
        refused: why the server does not allow it, "" if it does.
        broken: what is wrong now, "" while it follows.
    """

    def __init__(self, api: KubernetesApi, path: str, changed: Callable[[Change], None], **query: str) -> None:
        self._api, self._path, self._changed = api, path, changed
        self._query: dict[str, Any] = dict(query)
        self._end = threading.Event()
        self._kick = threading.Event()
        self.version, self.lists, self.refused, self.broken = "", 0, "", ""

    def start(self) -> None:
        """Follow from now on."""
        threading.Thread(target=self._work, name=f"watch {self._path.rpartition('/')[2]}", daemon=True).start()

    def stop(self) -> None:
        """Follow no longer; the thread ends when the server says something, or at the end of the process."""
        self._end.set()
        self._kick.set()

    def kick(self) -> None:
        """The server answers again: do not wait with trying."""
        self._kick.set()

    def list(self) -> list[Json]:
        """All that there are now. Raises KubernetesError."""
        found: list[Json] = []
        more: dict[str, Any] = {}
        while True:
            query: dict[str, Any] = {"limit": PAGE, **self._query, **more}
            page = self._api.call("GET", self._path, seconds=30.0, **query)
            found += page.get("items") or []
            about = page.get("metadata") or {}
            self.version = str(about.get("resourceVersion") or "")
            if not about.get("continue"):
                self.lists += 1
                return found
            more = {"continue": about["continue"]}

    def _work(self) -> None:
        pause = _FIRST
        failures = FailureLog(log, f"following {self._path}")
        while not self._end.is_set():
            try:
                if not self.version:
                    self._changed(("all", self.list()))
                self.broken = self.refused = ""
                for event in self._api.lines(
                    self._path,
                    SILENCE,
                    resourceVersion=self.version,
                    allowWatchBookmarks="true",
                    timeoutSeconds=PERIOD,
                    **self._query,
                ):
                    pause = _FIRST
                    if self._end.is_set():
                        return
                    self._take(event)
            except KubernetesError as error:
                if error.status in (400, 410):  # too old, or another server's: begin anew
                    self.version = ""
                elif error.status in (401, 403):
                    self.refused = str(error)
                self.broken = str(error)
                pause = self._wait(pause)
            except Exception as error:  # of an object that is not as it should be
                failures.note(error, "everything is listed again")
                self.version, self.broken = "", f"what the server says of {self._path} cannot be read: {error!r}"
                pause = self._wait(pause)

    def _wait(self, pause: float) -> float:
        """Wait before the next try; return for how long after it."""
        self._kick.clear()
        self._kick.wait(pause * (0.5 + random.random()))
        return min(_MOST if not self.refused else 60.0, 2 * pause)

    def _take(self, event: Json) -> None:
        kind, thing = str(event.get("type")), event.get("object") or {}
        if kind == "ERROR":
            raise KubernetesError(int(thing.get("code") or 0), str(thing.get("reason")), str(thing.get("message")))
        self.version = str((thing.get("metadata") or {}).get("resourceVersion") or self.version)
        if kind in ("ADDED", "MODIFIED"):
            self._changed(("changed", [thing]))
        elif kind == "DELETED":
            self._changed(("gone", [thing]))
