"""One connection to a Redis server: commands and answers over a socket, with TLS and AUTH."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import hiredis

from megascale.errors import ConfigError

_CONNECT_SECONDS = 10.0
# Longest time that one system call blocks. Reads with a later deadline repeat the call. Setting a time-out for each
# read would cost two additional system calls per command.
_BLOCK_SECONDS = 5.0
_READ_BYTES = 65536
# Errors that pass: the same server, or the one that replaces it, may accept the command shortly afterwards.
_TRANSIENT_ERRORS = (
    "LOADING",
    "READONLY",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "BUSY",
    "ERR max number of clients",
)
_INCOMPLETE = object()  # hiredis returns this object while an answer is incomplete


class BrokenConnection(Exception):
    """The connection is unusable, but a new one may work. `cause` is the error of the socket, if there was one."""

    def __init__(self, text: str, cause: Exception | None = None) -> None:
        super().__init__(text)
        self.cause = cause


class RedisRefused(Exception):
    """The server answered with an error. The text begins with Redis's error code, such as WRONGPASS or OOM."""


@dataclass(frozen=True)
class Address:
    """Address of a Redis server and the credentials for it. `str` and `repr` omit the password.

    Attributes:
        ca: file of the authority that signed the server's certificate; default: the system's authorities.
        certificate, key: this client's files, for servers that require them.
    """

    host: str
    port: int
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    @classmethod
    def parse(cls, url: str, password: str | None = None, **tls_files: str | None) -> Address:
        """Parse `redis[s]://[user[:password]@]host[:port][/database]`.

        Args:
            password: used if the URL has none.
            tls_files: values for `ca`, `certificate` and `key`.

        Raises:
            ConfigError: the URL has another form.
        """
        wrong_form = "rendezvous.url is not of the form redis://HOST:PORT or rediss://HOST:PORT (with TLS)"
        try:
            split_url = urlsplit(url)
            port = split_url.port or 6379
            database = int(split_url.path.strip("/") or 0)
        except ValueError:
            raise ConfigError(wrong_form) from None  # the text of the original error may contain the password
        if split_url.scheme not in ("redis", "rediss") or not split_url.hostname:
            raise ConfigError(wrong_form)
        return cls(
            split_url.hostname,
            port,
            database=database,
            username=unquote(split_url.username) if split_url.username else None,
            password=unquote(split_url.password) if split_url.password else password,
            tls=split_url.scheme == "rediss",
            **tls_files,
        )

    def __str__(self) -> str:
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}"

    def make_tls_context(self) -> ssl.SSLContext | None:
        """Return the context that checks the server's certificate, or None without TLS.

        Raises:
            ConfigError: a certificate or key file is unreadable.
        """
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"cannot use rendezvous.tls_ca={self.ca}, tls_certificate={self.certificate}, tls_key={self.key}: "
                f"{error}; give PEM files that this user can read"
            ) from None
        return context


def dial(host: str, port: int, timeout: float) -> socket.socket:
    """Return a connected socket whose reads block for at most _BLOCK_SECONDS.

    Keep-alive messages detect a peer that has vanished: the first after 15 seconds, then up to three, 5 seconds apart.
    """
    connected = socket.create_connection((host, port), timeout=timeout)
    # Without Python's time-out, the kernel's time-outs below apply: seconds and microseconds.
    connected.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(_BLOCK_SECONDS), 0))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connected


class Connection:
    """Open, authenticated connection that one thread at a time may use.

    Raises from every call:
        BrokenConnection: the peer has closed, or has not answered for `timeout` seconds.
        RedisRefused: the server answered with an error.
        ConfigError: the password or a certificate is refused.

    Args:
        context: TLS context of `address`, or None without TLS.
        timeout: seconds for connecting, and for each answer while connecting; at most _CONNECT_SECONDS.
    """

    dial = staticmethod(dial)  # the benchmark replaces this function, so that thousands of ranks share one thread

    def __init__(self, address: Address, context: ssl.SSLContext | None, timeout: float) -> None:
        self._reader = hiredis.Reader(replyError=RedisRefused, notEnoughData=_INCOMPLETE)
        timeout = max(0.1, min(_CONNECT_SECONDS, timeout))
        try:
            connected = self.dial(address.host, address.port, timeout)
        except OSError as error:
            raise BrokenConnection(_describe_error(error)) from None
        self._socket: socket.socket = connected
        try:
            if context is not None:
                connected.settimeout(timeout)
                self._socket = context.wrap_socket(connected, server_hostname=address.host)
                self._socket.settimeout(None)
            self._authenticate(address, timeout)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise BrokenConnection("no answer to the TLS greeting; does the server speak TLS?") from None
            # A server may refuse the client's certificate in an answer, where `read` makes a BrokenConnection of it.
            cause = error.cause if isinstance(error, BrokenConnection) else error
            if isinstance(cause, ssl.SSLError):
                raise _make_tls_error(address, cause) from None
            if isinstance(error, OSError):
                raise BrokenConnection(_describe_error(error)) from None
            raise

    def _authenticate(self, address: Address, timeout: float) -> None:
        """Send user, password and database. Raises ConfigError if the server refuses them."""
        commands: list[Sequence[Any]] = []
        if address.password is not None:
            user = [address.username] if address.username else []
            commands.append(["AUTH"] + user + [address.password])
        if address.database:
            commands.append(["SELECT", address.database])
        if not commands and address.tls:
            commands.append(["PING"])  # the server refuses a client certificate only in its first answer
        if not commands:
            return
        self.send(*commands)
        try:
            for _ in commands:
                self.read(timeout)
        except RedisRefused as error:
            raise make_access_error(address, str(error)) or error from None

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def send(self, *commands: Sequence[Any]) -> None:
        """Send commands; their answers come in the same order."""
        message = b"".join([_pack(command) for command in commands])
        try:
            self._socket.sendall(message)
        except OSError as error:
            raise BrokenConnection(_describe_error(error), error) from None

    def read(self, timeout: float) -> Any:
        """Return the next answer: bytes, an int, None or a list of these."""
        deadline = time.monotonic() + timeout
        try:
            answer = self._reader.gets()
            while answer is _INCOMPLETE:
                self._receive(deadline)
                answer = self._reader.gets()
        except hiredis.ProtocolError:
            raise BrokenConnection("the server does not speak the Redis protocol") from None
        if isinstance(answer, RedisRefused):
            if str(answer).startswith(_TRANSIENT_ERRORS):
                raise BrokenConnection(str(answer))
            raise answer
        return answer

    def close(self) -> None:
        """Close the connection; a read in another thread raises BrokenConnection."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self, deadline: float) -> None:
        """Feed the next bytes of the socket to the reader."""
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
                break
            except (BlockingIOError, ssl.SSLWantReadError):
                if time.monotonic() >= deadline:
                    raise BrokenConnection("the server did not answer in time") from None
            except OSError as error:
                raise BrokenConnection(_describe_error(error), cause=error) from None
        if not data:
            raise BrokenConnection("the server closed the connection")
        self._reader.feed(data)


def _pack(command: Sequence[Any]) -> bytes:
    """Encode a command in the Redis protocol."""
    arguments: Any = tuple([value if isinstance(value, bytes) else str(value) for value in command])
    return hiredis.pack_command(arguments)


def make_access_error(address: Address, text: str) -> ConfigError | None:
    """Return the error for a server that refuses this user, or None if `text` is another error."""
    if text.startswith(("WRONGPASS", "NOAUTH", "ERR AUTH", "ERR invalid password", "ERR Client sent AUTH")):
        return ConfigError(
            f"the Redis server at {address} refuses the user or password ({text.split()[0]}); give the right one in "
            "rendezvous.url=redis://USER:PASSWORD@HOST:PORT or in MEGASCALE_REDIS_PASSWORD"
        )
    if text.startswith("NOPERM"):
        return ConfigError(f"the Redis server at {address} does not permit this user the store's commands: {text}")
    if text.startswith("DENIED"):
        return ConfigError(f"the Redis server at {address} is in protected mode and takes local clients only: {text}")
    return None


def _make_tls_error(address: Address, error: ssl.SSLError) -> Exception:
    """Return the error to raise: BrokenConnection if a new connection may work, otherwise ConfigError."""
    text = _describe_error(error)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return BrokenConnection(text)
    if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return ConfigError(f"the server at {address} does not speak TLS; use redis:// in rendezvous.url")
    return ConfigError(
        f"no TLS with the Redis server at {address}: {text}; set rendezvous.tls_ca to the file of the authority that "
        "signed its certificate, and tls_certificate and tls_key if the server requires a client certificate"
    )


def _describe_error(error: OSError) -> str:
    return str(error.strerror or error)
