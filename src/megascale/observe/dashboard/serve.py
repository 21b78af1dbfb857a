"""Serves the dashboard until it is interrupted."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import ssl
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from megascale.core.ports import is_loopback
from megascale.core.terminal import end_signals
from megascale.errors import ConfigError
from megascale.observe.dashboard.application import Outside, build
from megascale.observe.dashboard.guard import Guard
from megascale.observe.dashboard.run_list import RunList
from megascale.services.door import Door, DoorLimits
from megascale.services.http_protocol import http_protocol
from megascale.services.shared_token import make_token

PORT = 8265
_HEAD_BYTES = 16 << 10
_LIMITS = DoorLimits(connections=256, head_seconds=5.0, backlog=256)


@dataclass(frozen=True)
class Listening:
    """Where it listens, and how.

    Attributes:
        host, port: port 0 is any that is free.
        token_file: holds the token for reading, made if missing; None only on loopback.
        certificate, key: files in PEM form; both needed where others than this machine reach it.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    token_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def check(at: Listening) -> ssl.SSLContext | None:
    """TLS to listen with, None for plain HTTP on loopback. ConfigError names the option that is missing or wrong."""
    if not is_loopback(at.host):
        if at.token_file is None:
            raise ConfigError(
                f"--host={at.host} is reached by other machines: give --token-file=FILE, which holds the token that "
                "pages ask for (made if it is not there); or stay on 127.0.0.1 and use ssh -L"
            )
        if at.certificate is None or at.key is None:
            raise ConfigError(
                f"--host={at.host} is reached by other machines: tokens travel over TLS only; give --certificate and "
                "--key (PEM files); or stay on 127.0.0.1 and use ssh -L"
            )
    if (at.certificate is None) != (at.key is None):
        raise ConfigError("--certificate and --key belong together; give both")
    if at.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(at.certificate, at.key, password=lambda: b"")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--certificate={at.certificate} with --key={at.key} cannot be used ({error}); give a certificate and its "
            "key, unencrypted, in PEM form"
        ) from None
    return context


def names(host: str) -> frozenset[str]:
    """By which Host headers a server that listens on `host` may be asked."""
    found = {host.lower()}
    if is_loopback(host):
        found |= {"localhost", "127.0.0.1", "::1"}
    else:
        found |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        try:
            if ipaddress.ip_address(host).is_unspecified:
                found |= {str(about[4][0]).lower() for about in socket.getaddrinfo(socket.gethostname(), None)}
        except (ValueError, OSError):
            pass
    return frozenset(found)


class _Server(uvicorn.Server):
    """uvicorn, whose connections come in by a Door.

    It raises no signal again when it has ended by one: what it has is put away first.
    """

    interrupted = False

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        ending: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._listener, self._context, self._ending = listener, context, ending
        self._door: Door | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._door = Door([self._listener], http_protocol(self.config, self.server_state), _LIMITS, self._context)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()  # streams never end by themselves
        if self._door is not None:
            await self._door.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        def end(number: int, _: object) -> None:
            self.interrupted |= number == signal.SIGINT
            self.force_exit |= self.should_exit  # the second time
            self.should_exit = True

        before = {number: signal.signal(number, end) for number in end_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(runs: RunList, outside: Outside, at: Listening, say: Callable[[str], None], open_browser: bool) -> None:
    """Listen and answer until Ctrl-C (KeyboardInterrupt), SIGTERM or SIGHUP. ConfigError if it cannot listen there."""
    context = check(at)
    token = make_token(at.token_file) if at.token_file is not None else None
    scheme = "https" if context is not None else "http"
    application = build(runs, outside)
    app: Any = Guard(application, names(at.host), scheme, token)
    family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((at.host, at.port))
        listener.listen(_LIMITS.backlog)  # whoever comes before the application has begun waits
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on --host={at.host} --port={at.port} ({error.strerror}); give another port, or --port=0 "
            "for any that is free"
        ) from None
    everywhere = at.host in ("0.0.0.0", "::")  # no address that anybody could open
    shown = socket.gethostname() if everywhere else f"[{at.host}]" if family == socket.AF_INET6 else at.host
    url = f"{scheme}://{shown}:{listener.getsockname()[1]}/"
    config = uvicorn.Config(
        app, log_level="error", access_log=False, h11_max_incomplete_event_size=_HEAD_BYTES, lifespan="on",
        http="h11", server_header=False, timeout_graceful_shutdown=10, ws="none",
    )  # fmt: skip
    server = _Server(config, listener, context, application.state.live.close)
    say(f"dashboard of {runs.place}: {url}")
    if token is not None:
        say(f"pages ask for the token in {at.token_file}")
    say("acting asks for the text of RUN/driver/token.act; Ctrl-C ends")
    if open_browser:
        webbrowser.open(url)
    try:
        server.run()
    finally:
        listener.close()
    if server.interrupted:
        raise KeyboardInterrupt
