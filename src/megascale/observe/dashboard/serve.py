"""The server of `megascale dashboard`: it listens, serves the application, and ends on a signal.

Pages send a *reading token* with each request. Orders to a run need another token, which the run's driver checks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import ssl
import sys
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from megascale.core.addresses import is_loopback
from megascale.core.terminal import termination_signals
from megascale.errors import ConfigError
from megascale.observe.dashboard.application import Integrations, build_application
from megascale.observe.dashboard.guard import Guard
from megascale.observe.dashboard.run_reader import RunList
from megascale.services.http_protocol import make_http_protocol
from megascale.services.limited_listener import ConnectionLimits, LimitedListener
from megascale.services.service_location import make_private_base_folder
from megascale.services.shared_token import make_token

PORT = 8265
_HEAD_BYTES = 16 << 10  # largest head of a request
_LIMITS = ConnectionLimits(connections=256, head_seconds=5.0, backlog=256)


@dataclass(frozen=True)
class ServerOptions:
    """Address of the server, and the conditions for reading.

    Attributes:
        host, port: address to listen on; port 0 is any free port.
        token_file: file with the reading token, created if missing; None: a new token per server, on loopback only.
        no_token: every user who can connect may read; on loopback only.
        certificate, key: PEM files; both are required if other machines can connect.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    token_file: Path | None = None
    no_token: bool = False
    certificate: Path | None = None
    key: Path | None = None


def make_tls_context(listening: ServerOptions) -> ssl.SSLContext | None:
    """Return the TLS context; None for plain HTTP, which is permitted on loopback only.

    Raises ConfigError for a missing or wrong option.
    """
    if listening.no_token and listening.token_file is not None:
        raise ConfigError(f"--no-token and --token-file={listening.token_file} exclude each other; give one of them")
    if not is_loopback(listening.host):
        exposed = f"other machines can connect to --host={listening.host}"
        alternative = "or stay on 127.0.0.1 and use ssh -L"
        if listening.no_token:
            raise ConfigError(
                f"{exposed} and would read everything without a token; give --token-file=FILE in place of --no-token, "
                f"{alternative}"
            )
        if listening.token_file is None:
            raise ConfigError(
                f"{exposed}; give --token-file=FILE, which holds the token that pages ask for and is created if "
                f"missing, {alternative}"
            )
        if listening.certificate is None or listening.key is None:
            raise ConfigError(
                f"{exposed}, and tokens require TLS; give --certificate and --key (PEM files), {alternative}"
            )
    if (listening.certificate is None) != (listening.key is None):
        raise ConfigError("--certificate and --key belong together; give both")
    if listening.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(listening.certificate, listening.key, password=lambda: b"")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--certificate={listening.certificate} with --key={listening.key} cannot be used ({error}); give a "
            "certificate and its unencrypted key in PEM form"
        ) from None
    return context


def list_host_names(host: str) -> frozenset[str]:
    """Return the names in Host headers that a server listening on `host` accepts.

    Other names are refused, so that a foreign page cannot reach the server under a name of its own (DNS rebinding).
    """
    names = {host.lower()}
    if is_loopback(host):
        return frozenset(names | {"localhost", "127.0.0.1", "::1"})
    names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    with contextlib.suppress(ValueError, OSError):
        if ipaddress.ip_address(host).is_unspecified:
            names |= {str(entry[4][0]).lower() for entry in socket.getaddrinfo(socket.gethostname(), None)}
    return frozenset(names)


class _Server(uvicorn.Server):
    """uvicorn's server with limits on connections (LimitedListener) and another handling of signals.

    At its end, uvicorn raises a received signal again, which would end the process before its resources are released.
    This class does not raise it.

    Args:
        end_streams: ends the live streams of open pages.

    Attributes:
        interrupted: the server received SIGINT.
    """

    interrupted = False

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        end_streams: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._listener = listener
        self._context = context
        self._end_streams = end_streams
        self._limited_listener: LimitedListener | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._limited_listener = LimitedListener(
            [self._listener], make_http_protocol(self.config, self.server_state), _LIMITS, self._context
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_streams()
        if self._limited_listener is not None:
            await self._limited_listener.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        def end(number: int, _: object) -> None:
            self.interrupted |= number == signal.SIGINT
            self.force_exit |= self.should_exit  # at the second signal, end without waiting for connections
            self.should_exit = True

        previous_handlers = {number: signal.signal(number, end) for number in termination_signals()}
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)


@dataclass(frozen=True)
class ReadingToken:
    """The reading token, which pages send with each request.

    Attributes:
        file: file with the token, readable by this user only.
        link: address of the page with the token, for this user's terminal and browser; empty with --token-file.
    """

    token: bytes
    file: Path
    link: str = ""


@contextlib.contextmanager
def _open_reading_token(listening: ServerOptions, url: str, port: int) -> Iterator[ReadingToken | None]:
    """Yield the reading token, or None with --no-token. At the end, remove a token that was made for this server.

    A browser may later send the token to another user's server on the same port. It is useless then, because each
    server has a new token.
    """
    if listening.no_token:
        yield None
        return
    if listening.token_file is not None:
        yield ReadingToken(make_token(listening.token_file), listening.token_file)
        return
    try:
        file = make_private_base_folder() / f"dashboard-{port}.token"
        file.unlink(missing_ok=True)
        token = make_token(file)
    except OSError as error:
        raise ConfigError(f"the reading token cannot be stored ({error}); give --token-file=FILE") from None
    try:
        # Browsers do not send the part after "#" to the server.
        yield ReadingToken(token, file, f"{url}#token={token.decode()}")
    finally:
        file.unlink(missing_ok=True)
        file.with_suffix(".html").unlink(missing_ok=True)


def _open_in_browser(url: str, access: ReadingToken | None) -> None:
    """Open the page in this machine's browser.

    Other users can read the arguments of processes. The browser is therefore started with a private file that leads to
    the address with the token.
    """
    if access is None or not access.link:
        webbrowser.open(url)
        return
    page = access.file.with_suffix(".html")
    page.unlink(missing_ok=True)
    with open(os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={access.link}">\n')
    webbrowser.open(page.as_uri())


def _announce(folder: Path, url: str, access: ReadingToken | None, report: Callable[[str], None]) -> None:
    """Report the address of the page and who may read it. The token is shown on terminals only, never in a log."""
    address = url
    if access is not None and access.link and sys.stdout.isatty():
        address = access.link
    report(f"dashboard of {folder}: {address}")
    if access is None:
        report(
            "--no-token: every user of this machine can read these runs: their names, settings, events, curves and "
            "nodes"
        )
    else:
        report(f"pages ask for the token in {access.file}")
    report("orders need the text of RUN/driver/token.act; press Ctrl-C to end")


def serve(
    runs: RunList,
    integrations: Integrations,
    listening: ServerOptions,
    report: Callable[[str], None],
    open_browser: bool,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. Raises KeyboardInterrupt after SIGINT, ConfigError if it cannot listen."""
    context = make_tls_context(listening)
    scheme = "https" if context is not None else "http"
    with contextlib.closing(_bind(listening)) as listener:
        host = listening.host
        if listening.host in ("0.0.0.0", "::"):  # all addresses, which browsers cannot open
            host = socket.gethostname()
        elif ":" in listening.host:  # IPv6
            host = f"[{listening.host}]"
        port = listener.getsockname()[1]
        url = f"{scheme}://{host}:{port}/"
        with _open_reading_token(listening, url, port) as access:
            application = build_application(runs, integrations)
            token = access.token if access is not None else None
            app: Any = Guard(application, list_host_names(listening.host), scheme, token)
            config = uvicorn.Config(
                app,
                log_level="error",
                access_log=False,
                h11_max_incomplete_event_size=_HEAD_BYTES,
                lifespan="on",
                http="h11",
                server_header=False,
                timeout_graceful_shutdown=10,
                ws="none",
            )
            server = _Server(config, listener, context, application.state.live.close)
            _announce(runs.folder, url, access, report)
            if open_browser:
                _open_in_browser(url, access)
            server.run()
    if server.interrupted:
        raise KeyboardInterrupt


def _bind(listening: ServerOptions) -> socket.socket:
    """Return a listening socket. Raises ConfigError, which names the options, if the address is unavailable."""
    listener = socket.socket(socket.AF_INET6 if ":" in listening.host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((listening.host, listening.port))
        listener.listen(_LIMITS.backlog)  # connections wait until the application has started
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on --host={listening.host} --port={listening.port} ({error.strerror}); give another port, "
            "or --port=0 for any free port"
        ) from None
    return listener
