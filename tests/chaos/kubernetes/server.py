"""A small Kubernetes API server for benches and tests: objects in memory, lists, watches, leases, and no more.

It knows what the driver uses of the API, with versions, conflicts, bookmarks, expired watches (410) and deletion with
grace, so that a thousand pods can be simulated and outages timed on two cores. It does not replace a real one:
`python -m tests.chaos faults --site kubernetes` has that.
"""

from __future__ import annotations

import copy
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Json = dict[str, Any]
MAX_CHANGES = 20_000  # changes that a watch may begin with
BOOKMARK = 15.0  # seconds between bookmarks


class Refused(Exception):
    """Answer of a failed request: status, reason, message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Store:
    """Objects by (kind, name) of one namespace, and their changes.

    Attributes:
        admit: called with each new object before it is stored; may raise Refused.
        changed: notified with each change.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.objects: dict[tuple[str, str], Json] = {}
        self.version = 1
        self.changes: deque[tuple[int, str, str, Json]] = deque(maxlen=MAX_CHANGES)  # version, kind, event, object
        self.oldest = 0  # changes up to this version are forgotten
        self.admit: Callable[[str, Json], None] = lambda kind, thing: None

    def put(self, kind: str, thing: Json, event: str = "MODIFIED") -> Json:
        """Store an object as its next version."""
        with self.lock:
            self.version += 1
            thing["metadata"]["resourceVersion"] = str(self.version)
            stored = copy.deepcopy(thing)
            key = (kind, thing["metadata"]["name"])
            if event == "DELETED":
                self.objects.pop(key, None)
            else:
                self.objects[key] = stored
            if len(self.changes) == MAX_CHANGES:
                self.oldest = self.changes[0][0]
            self.changes.append((self.version, kind, event, stored))
            self.lock.notify_all()
            return copy.deepcopy(stored)

    def create(self, kind: str, thing: Json) -> Json:
        """A new object."""
        with self.lock:
            details = thing["metadata"]
            if (kind, details["name"]) in self.objects:
                raise Refused(409, "AlreadyExists", f'{kind} "{details["name"]}" already exists')
            self.admit(kind, thing)
            details.setdefault("uid", str(uuid.uuid4()))
            details["creationTimestamp"] = _format_now()
            if kind == "pods":
                thing["status"] = {"phase": "Pending"}
            return self.put(kind, thing, "ADDED")

    def get(self, kind: str, name: str) -> Json:
        """A copy of one."""
        with self.lock:
            if (kind, name) not in self.objects:
                raise Refused(404, "NotFound", f'{kind} "{name}" not found')
            return copy.deepcopy(self.objects[kind, name])

    def all(self, kind: str) -> list[Json]:
        """Copies of all of a kind."""
        with self.lock:
            return [copy.deepcopy(thing) for (each, _), thing in sorted(self.objects.items()) if each == kind]

    def update(self, kind: str, name: str, change: Callable[[Json], None]) -> Json:
        """Change one in place."""
        with self.lock:
            thing = self.get(kind, name)
            change(thing)
            return self.put(kind, thing)

    def delete(self, kind: str, name: str, grace: int | None) -> Json:
        """A pod that has a machine is marked, and its kubelet removes it; what has no grace goes at once."""
        with self.lock:
            thing = self.get(kind, name)
            bound = kind == "pods" and (thing.get("spec") or {}).get("nodeName")
            if bound and grace != 0:
                thing["metadata"].setdefault("deletionTimestamp", _format_now())
                thing["metadata"]["deletionGracePeriodSeconds"] = grace
                return self.put(kind, thing)
            return self.put(kind, thing, "DELETED")

    def forget(self) -> None:
        """Watches that were behind expire, as when etcd is compacted."""
        with self.lock:
            self.changes.clear()
            self.oldest = self.version


class Server:
    """The store behind HTTP on loopback.

    Attributes:
        requests: (monotonic time, method, path) of each, watches included.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.requests = store, list[tuple[float, str, str]]()
        self._open: set[Any] = set()
        self._http: ThreadingHTTPServer | None = None
        self.port = 0
        self.up()

    @property
    def url(self) -> str:
        """Return the server's URL."""
        return f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        """Answer from now on, at the same port as before."""
        handler = type("Handler", (_Handler,), {"server_of": self})
        self._http = _Http(("127.0.0.1", self.port), handler)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def down(self) -> None:
        """Answer no request: connections break, new ones are refused."""
        assert self._http is not None
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self._open):
            connection.close_now()
        with self.store.lock:
            self.store.lock.notify_all()

    def kubeconfig(self) -> str:
        """The text of one that leads here."""
        cluster = {"name": "bench", "cluster": {"server": self.url}}
        context = {"name": "bench", "context": {"cluster": "bench", "user": "bench", "namespace": "default"}}
        user = {"name": "bench", "user": {}}
        head = {"apiVersion": "v1", "kind": "Config", "current-context": "bench"}
        return json.dumps(head | {"clusters": [cluster], "contexts": [context], "users": [user]})


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: Server

    def setup(self) -> None:
        super().setup()
        self.server_of._open.add(self)
        self.closed = False

    def finish(self) -> None:
        self.server_of._open.discard(self)
        super().finish()

    def close_now(self) -> None:
        """Break the connection."""
        self.closed = True
        try:
            self.connection.shutdown(2)
        except OSError:
            return

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: there are thousands."""

    def _serve(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        self.server_of.requests.append((time.monotonic(), self.command, url.path))
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        try:
            if self.closed:
                return
            if query.get("watch") == "true":
                return self._watch(*_target(url.path), query)
            self._answer(200, self._do(*_target(url.path), body, query))
        except Refused as error:
            details = {"kind": "Status", "code": error.status, "reason": error.reason, "message": str(error)}
            self._answer(error.status, details)
        except OSError:
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _answer(self, status: int, body: Json) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _do(self, kind: str, name: str, body: Any, query: dict[str, str]) -> Json:
        store = self.server_of.store
        if self.command == "POST":
            return store.create(kind, body)
        if self.command == "GET" and name:
            return store.get(kind, name)
        if self.command == "GET":
            return self._list(kind, query)
        if self.command == "DELETE":
            return store.delete(kind, name, (body or {}).get("gracePeriodSeconds"))
        if self.command == "PATCH":
            return store.update(kind, name, lambda thing: _merge(thing, body))
        with store.lock:
            expected = body["metadata"].get("resourceVersion")
            if expected and expected != store.get(kind, name)["metadata"]["resourceVersion"]:
                raise Refused(409, "Conflict", f"{kind} {name} was changed meanwhile")
            return store.put(kind, body)

    def _list(self, kind: str, query: dict[str, str]) -> Json:
        store = self.server_of.store
        with store.lock:
            version = store.version
            result = [thing for thing in store.all(kind) if _selected(thing, query)]
        start, limit = int(query.get("continue") or 0), int(query.get("limit") or len(result) or 1)
        more = str(start + limit) if start + limit < len(result) else ""
        return {"metadata": {"resourceVersion": str(version), "continue": more}, "items": result[start : start + limit]}

    def _watch(self, kind: str, name: str, query: dict[str, str]) -> None:
        store = self.server_of.store
        observed, end = (
            int(query.get("resourceVersion") or 0),
            time.monotonic() + float(query.get("timeoutSeconds") or 300),
        )
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        marked = time.monotonic()
        while not self.closed and time.monotonic() < end:
            with store.lock:
                if observed < store.oldest:
                    removed = {
                        "kind": "Status",
                        "code": 410,
                        "reason": "Expired",
                        "message": "too old resource version",
                    }
                    self._event("ERROR", removed)
                    break
                new = (
                    [change for change in reversed(store.changes) if change[0] > observed][::-1]
                    if (store.version > observed)
                    else []
                )
                if not new:
                    store.lock.wait(1.0)
            for version, each, event, thing in new:
                observed = version
                if each == kind and _selected(thing, query):
                    self._event(event, thing)
            if not new and time.monotonic() - marked > BOOKMARK:
                marked = time.monotonic()
                self._event("BOOKMARK", {"metadata": {"resourceVersion": str(observed)}})
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, kind: str, thing: Json) -> None:
        data = json.dumps({"type": kind, "object": thing}).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


def _target(path: str) -> tuple[str, str]:
    """(kind, name) of a path."""
    parts = [part for part in path.split("/") if part]
    if "namespaces" in parts:
        parts = parts[parts.index("namespaces") + 2 :]
    else:
        parts = parts[2:]
    return parts[0], parts[1] if len(parts) > 1 else ""


def _selected(thing: Json, query: dict[str, str]) -> bool:
    marks = thing["metadata"].get("labels") or {}
    expected = [each.split("=", 1) for each in query.get("labelSelector", "").split(",") if each]
    return all(marks.get(key) == value for key, value in expected)


def _merge(thing: Json, patch: Json) -> None:
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(thing.get(key), dict):
            _merge(thing[key], value)
        elif value is None:
            thing.pop(key, None)
        else:
            thing[key] = value


def _format_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
