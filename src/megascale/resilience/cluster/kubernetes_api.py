"""Requests to a Kubernetes API server by the official client, as plain JSON: a thousand pods need no thousand models.

Everything here blocks: the driver's loop calls it in threads only. Requests are limited, so that a driver with many
nodes is no burden to the server.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megascale.config import KubernetesConfig
from megascale.errors import ConfigError, describe_install

RATE = 40.0  # requests a second, at most
BURST = 40  # that may come at once
SECONDS = 5.0  # for an answer
_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")

Json = dict[str, Any]


class KubernetesError(Exception):
    """A request that was refused, or could not be made.

    Attributes:
        status: HTTP's, 0 where the server was not reached.
        reason: one word, such as Forbidden or AlreadyExists.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class _Rate:
    """A bucket of permissions to ask."""

    def __init__(self) -> None:
        self._lock, self._left, self._at = threading.Lock(), float(BURST), time.monotonic()

    def wait(self) -> None:
        """Until a request may be made."""
        with self._lock:
            now = time.monotonic()
            self._left = min(BURST, self._left + RATE * (now - self._at)) - 1
            self._at = now
            pause = -self._left / RATE
        if pause > 0:
            time.sleep(pause)


class KubernetesApi:
    """Args:
    settings: where the server is and who asks.

    Attributes:
        namespace: of the job.
        host: the server's name or address.
        asked: requests made so far.
    """

    def __init__(self, settings: KubernetesConfig) -> None:
        client, config = _library()
        configuration = client.Configuration()
        own = "default"
        try:
            if not settings.kubeconfig and not settings.context and (_IN_POD / "token").exists():
                config.load_incluster_config(client_configuration=configuration)
                own = (_IN_POD / "namespace").read_text().strip() or own
            else:
                file, context = settings.kubeconfig or None, settings.context or None
                config.load_kube_config(file, context, client_configuration=configuration)
                own = _context_namespace(config, file, context) or own
        except (config.ConfigException, OSError) as error:
            raise ConfigError(
                f"no way to a Kubernetes API server is known: {error}; set --kubernetes.kubeconfig=FILE, or KUBECONFIG"
            ) from None
        configuration.retries = 0  # a request that fails is made again where that is wanted
        configuration.connection_pool_maxsize = 32
        self.namespace = settings.namespace or own
        self.host = urlsplit(configuration.host).hostname or ""
        self.asked = 0
        self._client, self._errors, self._rate = client.ApiClient(configuration), client.ApiException, _Rate()

    def path(self, kind: str, name: str = "", group: str = "") -> str:
        """Of objects in the job's namespace: kind in the plural, group such as coordination.k8s.io/v1."""
        base = f"/apis/{group}" if group else "/api/v1"
        return f"{base}/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    def call(self, method: str, path: str, body: Json | None = None, seconds: float = SECONDS, **query: Any) -> Json:
        """The answer. Raises KubernetesError."""
        kind = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
        response = self._open(method, path, body, kind, seconds, query)
        try:
            return dict(json.loads(response.data or b"{}"))
        except (ValueError, TypeError) as error:
            raise KubernetesError(0, "NoJson", f"{path}: the server's answer is no JSON: {error}") from None

    def lines(self, path: str, seconds: float, **query: Any) -> Iterator[Json]:
        """Events of a watch, until the server ends it; `seconds` may pass without one. Raises KubernetesError."""
        response = self._open("GET", path, None, "application/json", seconds, query | {"watch": "true"})
        rest = b""
        try:
            for piece in response.stream(65536, decode_content=True):
                *whole, rest = (rest + piece).split(b"\n")
                yield from (json.loads(line) for line in whole if line)
        except Exception as error:  # urllib3's, the socket's, or half a line of JSON
            raise KubernetesError(0, type(error).__name__, f"{path}: the watch broke: {error}") from None
        finally:
            response.close()

    def _open(self, method: str, path: str, body: Any, kind: str, seconds: float, query: Json) -> Any:
        self._rate.wait()
        self.asked += 1
        try:
            return self._client.call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params={"Accept": "application/json", "Content-Type": kind},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=(min(3.0, seconds), seconds),
            )
        except self._errors as error:
            raise _refused(method, path, error) from None
        except Exception as error:  # urllib3's, and those of plugins that give tokens
            raise KubernetesError(0, type(error).__name__, f"{self.host} was not reached: {error}") from None


def _refused(method: str, path: str, error: Any) -> KubernetesError:
    try:
        said = json.loads(error.body)
        reason, message = str(said.get("reason") or error.reason), str(said.get("message") or error.reason)
    except (ValueError, TypeError, AttributeError):
        reason, message = str(error.reason), f"{method} {path}: {error.reason}"
    return KubernetesError(int(error.status or 0), reason, message)


def _library() -> tuple[Any, Any]:
    try:
        from kubernetes import client, config
    except ImportError:
        raise ConfigError(f"cluster kubernetes needs the official client: {describe_install('kubernetes')}") from None
    return client, config


def _context_namespace(config: Any, file: str | None, context: str | None) -> str:
    contexts, active = config.list_kube_config_contexts(file)
    chosen = next((each for each in contexts if each["name"] == context), active)
    return str(chosen.get("context", {}).get("namespace") or "")


def in_pod() -> bool:
    """Whether this process runs in a pod."""
    return "KUBERNETES_SERVICE_HOST" in os.environ
