"""HTTP protocol of uvicorn for the connections of a LimitedListener."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from megascale.services.limited_listener import Connection


class _Protocol(H11Protocol):
    """Protocol of uvicorn that calls the methods of a `Connection` at its start, its end and after each response."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state["connection"].attach(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.app_state["connection"].detach()

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self.app_state["connection"].restart_deadline()
        super().on_response_complete()


def make_http_protocol(config: Config, state: ServerState) -> Callable[[Connection], asyncio.Protocol]:
    """Return the `make_protocol` of a LimitedListener.

    The HTTP application finds the `Connection` of a request in `scope["state"]["connection"]`.
    """

    def make_protocol(connection: Connection) -> asyncio.Protocol:
        return _Protocol(config=config, server_state=state, app_state={"connection": connection})

    return make_protocol
