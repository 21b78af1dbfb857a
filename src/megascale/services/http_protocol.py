"""HTTP by uvicorn on the connections of a Door."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from megascale.services.door import Connection


class _Protocol(H11Protocol):
    """uvicorn's protocol, which tells its Connection what becomes of it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state["connection"].made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.app_state["connection"].lost()

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self.app_state["connection"].answered()
        super().on_response_complete()


def make_http_protocol(config: Config, state: ServerState) -> Callable[[Connection], asyncio.Protocol]:
    """Return what makes the protocol of a connection; the application finds it in `scope["state"]["connection"]`."""

    def make(connection: Connection) -> asyncio.Protocol:
        return _Protocol(config=config, server_state=state, app_state={"connection": connection})

    return make
