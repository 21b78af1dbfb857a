"""Requests to a Kubernetes API server by the official client, and watches that resume after an interruption.

Objects are plain JSON, since typed models of a thousand pods would cost time and memory. Requests block, so the
driver's loop makes them only in threads. The rate of requests is limited, so that a driver with many nodes does not
overload the server.
"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from megascale.config import KubernetesConfig
from megascale.core.failure import FailureLog
from megascale.errors import ConfigError, describe_install

log = logging.getLogger("megascale.driver")
REQUEST_RATE = 40.0  # requests per second
REQUEST_BURST = 40  # requests that may be made at once after a pause
ANSWER_TIMEOUT = 5.0  # seconds for the answer to a request that is not a list
LIST_TIMEOUT = 30.0  # seconds for one page of a list
PAGE_OBJECTS = 500  # objects per page of a list
WATCH_SILENCE = 75.0  # seconds without data after which a watch is opened again; servers send a bookmark per minute
WATCH_SECONDS = 240  # seconds after which the server ends a watch
_CONNECT_TIMEOUT = 3.0  # seconds to open a connection
# Seconds until a failed watch is opened again. They are doubled with each failure up to the longest pause, which is
# longer while the server refuses the watch.
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 3.0
_LONGEST_REFUSED_PAUSE = 60.0
# Folder with a pod's token and namespace.
_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")

Json = dict[str, Any]
# A kind of change, and its objects; "all" means a complete list.
Change = tuple[Literal["all", "changed", "deleted"], list[Json]]


class KubernetesError(Exception):
    """A request that was refused or could not be made.

    Attributes:
        status: HTTP status, 0 if the server was not reached.
        reason: one word, such as Forbidden or AlreadyExists.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class _RateLimit:
    """A token bucket: each request takes a token, and REQUEST_RATE tokens per second come back, up to REQUEST_BURST."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens = float(REQUEST_BURST)  # below 0 if requests already wait for tokens
        self._time = time.monotonic()  # when `_tokens` was last computed

    def wait(self) -> None:
        """Wait until a request may be made."""
        with self._lock:
            current_time = time.monotonic()
            self._tokens = min(REQUEST_BURST, self._tokens + REQUEST_RATE * (current_time - self._time)) - 1
            self._time = current_time
            pause = -self._tokens / REQUEST_RATE
        if pause > 0:
            time.sleep(pause)


class KubernetesApi:
    """A connection to the API server that the settings name.

    Attributes:
        host: name or address of the server.
        request_count: number of requests so far.
    """

    def __init__(self, settings: KubernetesConfig) -> None:
        try:
            from kubernetes import client, config
        except ImportError:
            raise ConfigError(
                f"cluster kubernetes needs the official client: {describe_install('kubernetes')}"
            ) from None
        configuration = client.Configuration()
        try:
            if not settings.kubeconfig and not settings.context and (_IN_POD / "token").exists():
                config.load_incluster_config(client_configuration=configuration)
                namespace = (_IN_POD / "namespace").read_text().strip()
            else:
                file = settings.kubeconfig or None
                context = settings.context or None
                config.load_kube_config(file, context, client_configuration=configuration)
                namespace = _find_namespace(config, file, context)
        except (config.ConfigException, OSError) as error:
            raise ConfigError(
                f"no usable configuration names a Kubernetes API server: {error}; set --kubernetes.kubeconfig=FILE, or "
                "KUBECONFIG"
            ) from None
        configuration.retries = 0  # The callers repeat requests.
        configuration.connection_pool_maxsize = 32
        self.namespace = settings.namespace or namespace or "default"
        self.host = urlsplit(configuration.host).hostname or ""
        self.request_count = 0
        self._client = client.ApiClient(configuration)
        self._api_exception = client.ApiException
        self._rate_limit = _RateLimit()

    def path(self, kind: str, name: str = "", group: str = "") -> str:
        """Return the path of objects in the job's namespace.

        Args:
            kind: plural such as "pods".
            name: name of one object, "" for all.
            group: API group such as coordination.k8s.io/v1, "" for the core group.
        """
        base = f"/apis/{group}" if group else "/api/v1"
        path = f"{base}/namespaces/{self.namespace}/{kind}"
        return f"{path}/{name}" if name else path

    def call(
        self, method: str, path: str, body: Json | None = None, timeout: float = ANSWER_TIMEOUT, **query: Any
    ) -> Json:
        """Return the answer to a request. Raises KubernetesError."""
        response = self._open(method, path, body, timeout, query)
        try:
            return dict(json.loads(response.data or b"{}"))
        except (ValueError, TypeError) as error:
            raise KubernetesError(0, "NoJson", f"{path}: the server's answer is not JSON: {error}") from None

    def watch_events(self, path: str, timeout: float, **query: Any) -> Iterator[Json]:
        """Yield the events of a watch until the server ends it, or no data comes for `timeout` seconds.

        Raises KubernetesError.
        """
        response = self._open("GET", path, None, timeout, query | {"watch": "true"})
        partial_line = b""
        try:
            for data in response.stream(65536, decode_content=True):
                lines = (partial_line + data).split(b"\n")
                partial_line = lines.pop()
                for line in lines:
                    if line:
                        yield json.loads(line)
        except Exception as error:  # urllib3 or the socket failed, or a line of JSON is cut.
            raise KubernetesError(0, type(error).__name__, f"{path}: the watch broke: {error}") from None
        finally:
            response.close()

    def _open(self, method: str, path: str, body: Json | None, timeout: float, query: Json) -> Any:
        """Make a request and return urllib3's response, whose body is still to be read. Raises KubernetesError."""
        self._rate_limit.wait()
        self.request_count += 1
        if method == "PATCH":
            content_type = "application/strategic-merge-patch+json"
        else:
            content_type = "application/json"
        try:
            return self._client.call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params={"Accept": "application/json", "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,  # The body is read as a stream.
                _return_http_data_only=True,
                _request_timeout=(min(_CONNECT_TIMEOUT, timeout), timeout),
            )
        except self._api_exception as error:
            raise _parse_refusal(method, path, error) from None
        except Exception as error:  # urllib3 failed, or a plugin that provides tokens.
            raise KubernetesError(0, type(error).__name__, f"{self.host} was not reached: {error}") from None


def _parse_refusal(method: str, path: str, error: Any) -> KubernetesError:
    """Return the error for a refusal of the server, with the reason and message of its body."""
    try:
        body = json.loads(error.body)
        reason = str(body.get("reason") or error.reason)
        message = str(body.get("message") or error.reason)
    except (ValueError, TypeError, AttributeError):
        reason = str(error.reason)
        message = f"{method} {path}: {error.reason}"
    return KubernetesError(int(error.status or 0), reason, message)


def _find_namespace(config: Any, file: str | None, context: str | None) -> str:
    """Return the namespace of a context of a kubeconfig (None: the active context), "" if it names none."""
    contexts, chosen = config.list_kube_config_contexts(file)
    for candidate in contexts:
        if candidate["name"] == context:
            chosen = candidate
            break
    return str(chosen.get("context", {}).get("namespace") or "")


def is_in_pod() -> bool:
    """Return True if this process runs in a pod."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


class Watch:
    """Follows a kind of objects in a thread: first a list of all objects, then their changes.

    The official client's Watch does not store the resource versions of bookmarks for plain JSON, and does not list.

    Args:
        on_change: called in the thread with each change.
        query: label selectors and other parameters of the requests.

    Attributes:
        version: newest resource version, "" if all objects must be listed.
        list_count: number of times that all objects were listed.
    """

    def __init__(self, api: KubernetesApi, path: str, on_change: Callable[[Change], None], **query: str) -> None:
        self._api = api
        self._path = path
        self._on_change = on_change
        self._query: dict[str, Any] = dict(query)
        self._stopped = threading.Event()
        self._retry = threading.Event()  # set to end the pause before a failed watch is opened again
        self._is_refused = False  # the server does not permit the watch
        self.version = ""
        self.list_count = 0

    def start(self) -> None:
        """Follow from now on."""
        name = f"watch {self._path.rpartition('/')[2]}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def stop(self) -> None:
        """Stop; the thread ends at the server's next event or with the process."""
        self._stopped.set()
        self._retry.set()

    def retry_now(self) -> None:
        """Open a failed watch again without a pause, since the server answers."""
        self._retry.set()

    def list_objects(self) -> list[Json]:
        """Return all objects. Raises KubernetesError."""
        objects: list[Json] = []
        query = self._query | {"limit": PAGE_OBJECTS}
        while True:
            page = self._api.call("GET", self._path, timeout=LIST_TIMEOUT, **query)
            objects += page.get("items") or []
            metadata = page.get("metadata") or {}
            self.version = str(metadata.get("resourceVersion") or "")
            if not metadata.get("continue"):
                self.list_count += 1
                return objects
            query["continue"] = metadata["continue"]

    def _run(self) -> None:
        """List the objects if no version is known, then follow their changes; repeat until `stop`."""
        pause = _FIRST_PAUSE
        failures = FailureLog(log, f"following {self._path}")
        while not self._stopped.is_set():
            try:
                if not self.version:
                    self._on_change(("all", self.list_objects()))
                self._is_refused = False
                for event in self._open_watch():
                    pause = _FIRST_PAUSE
                    if self._stopped.is_set():
                        return
                    self._handle(event)
                continue  # The server has ended the watch as agreed.
            except KubernetesError as error:
                self._is_refused = error.status in (401, 403)
                if error.status in (400, 410):  # The resource version is too old, or that of another server.
                    self.version = ""
            except Exception as error:  # An object has an unexpected form.
                failures.note(error, "all objects are listed again")
                self.version = ""
            self._retry.clear()
            # A random pause of 0.5 to 1.5 times the length keeps several watches from returning at once.
            self._retry.wait(pause * (0.5 + random.random()))
            longest_pause = _LONGEST_REFUSED_PAUSE if self._is_refused else _LONGEST_PAUSE
            pause = min(longest_pause, 2 * pause)

    def _open_watch(self) -> Iterator[Json]:
        return self._api.watch_events(
            self._path,
            WATCH_SILENCE,
            resourceVersion=self.version,
            allowWatchBookmarks="true",
            timeoutSeconds=WATCH_SECONDS,
            **self._query,
        )

    def _handle(self, event: Json) -> None:
        """Report the change of an event and keep its version. A bookmark has a version only."""
        kind = str(event.get("type"))
        obj = event.get("object") or {}
        if kind == "ERROR":
            raise KubernetesError(int(obj.get("code") or 0), str(obj.get("reason")), str(obj.get("message")))
        self.version = str((obj.get("metadata") or {}).get("resourceVersion") or self.version)
        if kind in ("ADDED", "MODIFIED"):
            self._on_change(("changed", [obj]))
        elif kind == "DELETED":
            self._on_change(("deleted", [obj]))
