"""Asks a run's driver over its HTTP API, and makes sure first that no token goes to somebody else."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megascale.core import strict_json
from megascale.core.ports import is_loopback
from megascale.errors import ConfigError, TrainingError
from megascale.resilience.driver.api.access import read_access
from megascale.resilience.driver.api.tls import client_context
from megascale.resilience.driver.api.tokens import read_tokens
from megascale.resilience.protocol.contact import read_contact

_LISTENS = "0A"
SECONDS = 10.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The driver sends nobody elsewhere; whoever does is another, and would be told the token."""

    def redirect_request(self, *args: Any, **more: Any) -> None:
        return None


def send_request(
    run: Path, method: str, path: str, body: dict[str, Any] | None = None, seconds: float = SECONDS
) -> Any:
    """What the run's driver answers within `seconds`.

    run: its folder, or on another machine the file that `megascale access` wrote there.

    Raises ConfigError for what it refuses and where a token would be told to others, TrainingError if it does not
    answer.
    """
    context: ssl.SSLContext | None = None
    if run.is_file():
        access = read_access(run)
        url, token, context = access.api, access.token, access.context()
    else:
        contact, tokens = read_contact(run), read_tokens(run)
        url, token = contact.api, (tokens.read if method == "GET" else tokens.act).decode()
        parts = urlsplit(url)
        if parts.scheme == "https":
            context = client_context(run)
        elif not is_loopback(parts.hostname or ""):
            raise ConfigError(f"the driver of {run} is at {url}: no token is sent over a network without TLS")
        else:
            _check_owner(run, url, parts.port or 0)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = strict_json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url + path, data, headers, method=method)
    # Never through a proxy.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirect()]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=seconds) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            why = json.load(error)["detail"]
        except (ValueError, KeyError, TypeError):
            why = f"HTTP {error.code}"
        raise ConfigError(f"the driver of {run} refused: {why}") from None
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"the driver of {run} does not answer at {url} ({error}); start it again with `megascale launch`"
        ) from None


def _check_owner(run: Path, url: str, port: int) -> None:
    """ConfigError if another user listens where the driver did: it has ended, and they have taken its port."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue  # no Linux, or no IPv6
        for fields in map(str.split, lines):
            listens = fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port
            if listens and int(fields[7]) not in (0, os.geteuid()):
                raise ConfigError(
                    f"at {url}, where the driver of {run} was, another user (uid {fields[7]}) listens: no token is "
                    "sent; start the driver again with `megascale launch`"
                )
