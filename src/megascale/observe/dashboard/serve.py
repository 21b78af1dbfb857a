"""Serves the dashboard until it is interrupted."""

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

from megascale.core.ports import is_loopback
from megascale.core.terminal import termination_signals
from megascale.errors import ConfigError
from megascale.observe.dashboard.application import Outside, build
from megascale.observe.dashboard.guard import Guard
from megascale.observe.dashboard.run_list import RunList
from megascale.services.door import ConnectionLimits, LimitedListener
from megascale.services.http_protocol import make_http_protocol
from megascale.services.private_folder import private_base
from megascale.services.shared_token import make_token

PORT = 8265
_HEAD_BYTES = 16 << 10
_LIMITS = ConnectionLimits(connections=256, head_seconds=5.0, backlog=256)


@dataclass(frozen=True)
class Listening:
    """Where it listens, and how.

    Attributes:
        host, port: port 0 is any that is free.
        token_file: holds the token for reading, made if missing; None: a new token for this server, on loopback only.
        no_token: whether whoever reaches it may read; on loopback only.
        certificate, key: files in PEM form; both needed where others than this machine reach it.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    token_file: Path | None = None
    no_token: bool = False
    certificate: Path | None = None
    key: Path | None = None


def make_tls_context(at: Listening) -> ssl.SSLContext | None:
    """TLS to listen with, None for plain HTTP on loopback. ConfigError names the option that is missing or wrong."""
    if at.no_token and at.token_file is not None:
        raise ConfigError(f"--no-token and --token-file={at.token_file} exclude each other; give one of them")
    if not is_loopback(at.host):
        if at.no_token:
            raise ConfigError(
                f"--host={at.host} is reached by other machines: without a token they would read everything; give "
                "--token-file=FILE in place of --no-token, or stay on 127.0.0.1 and use ssh -L"
            )
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


def list_host_names(host: str) -> frozenset[str]:
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
        self._door: LimitedListener | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._door = LimitedListener(
            [self._listener], make_http_protocol(self.config, self.server_state), _LIMITS, self._context
        )

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

        before = {number: signal.signal(number, end) for number in termination_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(frozen=True)
class ReadingToken:
    """The token for reading, which pages show with each request.

    Attributes:
        token: its bytes.
        file: where it is kept, readable by this user only.
        link: the page's address with the token in it, for this user's terminal and browser; "" where the token was
            given by --token-file.
    """

    token: bytes
    file: Path
    link: str = ""


@contextlib.contextmanager
def _reading_token(at: Listening, url: str, port: int) -> Iterator[ReadingToken | None]:
    """Yield the token for reading, None without one. A token made for this server alone is removed at the end.

    A server that another user starts on the same port later is sent a token that is of no use any more.
    """
    if at.no_token:
        yield None
        return
    if at.token_file is not None:
        yield ReadingToken(make_token(at.token_file), at.token_file)
        return
    try:
        file = private_base() / f"dashboard-{port}.token"
        file.unlink(missing_ok=True)
        token = make_token(file)
    except OSError as error:
        raise ConfigError(f"the token for reading cannot be kept ({error}); give --token-file=FILE") from None
    try:
        # Browsers send no server what stands behind "#".
        yield ReadingToken(token, file, f"{url}#token={token.decode()}")
    finally:
        file.unlink(missing_ok=True)
        _redirection(file).unlink(missing_ok=True)


def _redirection(file: Path) -> Path:
    """Return where the page lies that leads a browser to the address with the token."""
    return file.with_suffix(".html")


def _open_in_browser(url: str, access: ReadingToken | None) -> None:
    """Open the page in this machine's browser, by a private file where the address holds the token: other users may
    read the words that a browser is started with."""
    if access is None or not access.link:
        webbrowser.open(url)
        return
    page = _redirection(access.file)
    page.unlink(missing_ok=True)
    with open(os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={access.link}">\n')
    webbrowser.open(page.as_uri())


def _announce(place: Path, url: str, access: ReadingToken | None, say: Callable[[str], None]) -> None:
    """Say where the page is and who may read it. The token itself is shown on a terminal only, not in a log."""
    shown = access.link if access is not None and access.link and sys.stdout.isatty() else url
    say(f"dashboard of {place}: {shown}")
    if access is None:
        say(
            "--no-token: every user of this machine can read these runs: their names, settings, events, curves and "
            "nodes"
        )
    else:
        say(f"pages ask for the token in {access.file}")
    say("acting asks for the text of RUN/driver/token.act; Ctrl-C ends")


def serve(runs: RunList, outside: Outside, at: Listening, say: Callable[[str], None], open_browser: bool) -> None:
    """Listen and answer until Ctrl-C (KeyboardInterrupt), SIGTERM or SIGHUP. ConfigError if it cannot listen there."""
    context = make_tls_context(at)
    scheme = "https" if context is not None else "http"
    with contextlib.closing(_bind(at)) as listener:
        everywhere = at.host in ("0.0.0.0", "::")  # no address that anybody could open
        host = f"[{at.host}]" if ":" in at.host else at.host
        port = listener.getsockname()[1]
        url = f"{scheme}://{socket.gethostname() if everywhere else host}:{port}/"
        with _reading_token(at, url, port) as access:
            application = build(runs, outside)
            app: Any = Guard(
                application, list_host_names(at.host), scheme, access.token if access is not None else None
            )
            config = uvicorn.Config(
                app, log_level="error", access_log=False, h11_max_incomplete_event_size=_HEAD_BYTES, lifespan="on",
                http="h11", server_header=False, timeout_graceful_shutdown=10, ws="none",
            )  # fmt: skip
            server = _Server(config, listener, context, application.state.live.close)
            _announce(runs.place, url, access, say)
            if open_browser:
                _open_in_browser(url, access)
            server.run()
    if server.interrupted:
        raise KeyboardInterrupt


def _bind(at: Listening) -> socket.socket:
    """Return a socket that listens; ConfigError names the options if it cannot."""
    listener = socket.socket(socket.AF_INET6 if ":" in at.host else socket.AF_INET, socket.SOCK_STREAM)
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
    return listener
