"""One connection to a Redis server: the RESP2 protocol over a socket, with TLS and AUTH. Nothing else.

Why not redis-py: importing it costs 0.1 s of CPU in every process, more than all of our traffic at start, and a
store needs one command at a time, pipelines, and time-outs of its own.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from megascale.errors import ConfigError

_CONNECT = 10.0
# The socket blocks in slices of this many seconds, after which Python looks at the clock. A time-out set anew for
# each read would cost two more system calls a command.
_SLICE = 5.0
_READ = 65536
# Answers after which the same server, or its successor, may do better in a moment.
_PASSING = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY", "ERR max number of clients")


class Broken(Exception):
    """The connection cannot be used; a new one may."""

    def __init__(self, text: str, cause: Exception | None = None) -> None:
        super().__init__(text)
        self.cause = cause


class RedisRefused(Exception):
    """The server answered with an error; its text begins with a code such as WRONGPASS or OOM."""


@dataclass(frozen=True)
class Address:
    """Where the server is and how to prove who one is; printing it shows no secret.

    Attributes:
        ca: file of the authority that signed the server's certificate; default: the system's.
        certificate, key: this client's, where the server asks for them.
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
    def parse(cls, url: str, password: str | None = None, **tls: str | None) -> Address:
        """From `redis[s]://[user[:password]@]host[:port][/database]`; ConfigError if it is not one."""
        wrong = "rendezvous.url is not of the form redis://HOST:PORT or rediss://HOST:PORT (with TLS)"
        try:
            parts = urlsplit(url)
            port = parts.port or 6379
            database = int(parts.path.strip("/") or 0)
        except ValueError:
            raise ConfigError(wrong) from None  # its text may hold the password
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise ConfigError(wrong)
        secret = unquote(parts.password) if parts.password else password
        user = unquote(parts.username) if parts.username else None
        return cls(parts.hostname, port, database, user, secret, parts.scheme == "rediss", **tls)

    def __str__(self) -> str:
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}"

    def tls_context(self) -> ssl.SSLContext | None:
        """What checks the server's certificate and shows ours; ConfigError if a file cannot be read."""
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


def dial(host: str, port: int, limit: float) -> socket.socket:
    """A connected socket that gives up waiting every _SLICE seconds and notices a peer that vanished."""
    plain = socket.create_connection((host, port), timeout=limit)
    plain.settimeout(None)
    for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        plain.setsockopt(socket.SOL_SOCKET, side, struct.pack("ll", int(_SLICE), 0))
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    return plain


def pack(words: Iterable[Any]) -> bytes:
    """One command as bytes of the protocol."""
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"".join([b"*%d\r\n" % len(parts), *(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)])


class Connection:
    """An open, authenticated connection. Not for two threads at a time.

    Raises from every call:
        Broken: the peer is gone or silent for `timeout` seconds.
        Refused: the server says no.
        ConfigError: the password or a certificate is not accepted.
    """

    dial = staticmethod(dial)  # the bench puts in sockets that thousands of ranks can share a thread with

    def __init__(self, address: Address, context: ssl.SSLContext | None, timeout: float) -> None:
        self._buffer = b""
        self._at = 0
        limit = max(0.1, min(_CONNECT, timeout))
        try:
            plain = self.dial(address.host, address.port, limit)
        except OSError as error:
            raise Broken(_reason(error)) from None
        self._socket: socket.socket = plain
        try:
            if context is not None:
                plain.settimeout(limit)
                self._socket = context.wrap_socket(plain, server_hostname=address.host)
                self._socket.settimeout(None)
            self._introduce(address, limit)
        except TimeoutError:
            self.close()
            raise Broken("no answer to the TLS greeting; does the server speak TLS?") from None
        except OSError as error:
            self.close()
            raise _tls_error(address, error) if isinstance(error, ssl.SSLError) else Broken(_reason(error)) from None
        except Broken as error:
            self.close()
            raise _tls_error(address, error.cause) if isinstance(error.cause, ssl.SSLError) else error from None
        except BaseException:
            self.close()
            raise

    def _introduce(self, address: Address, limit: float) -> None:
        greeting: list[Sequence[Any]] = []
        if address.password is not None:
            user = [address.username] if address.username else []
            greeting.append(["AUTH", *user, address.password])
        if address.database:
            greeting.append(["SELECT", address.database])
        if not greeting and address.tls:
            greeting.append(["PING"])  # a refused client certificate shows in the first answer only
        if not greeting:
            return
        self.send(*greeting)
        try:
            for _ in greeting:
                self.read(limit)
        except RedisRefused as error:
            raise access_error(address, str(error)) or error from None

    def fileno(self) -> int:
        """The socket's number."""
        return self._socket.fileno()

    def send(self, *commands: Sequence[Any]) -> None:
        """Send commands; their answers come in the same order."""
        try:
            self._socket.sendall(b"".join([pack(words) for words in commands]))
        except OSError as error:
            raise Broken(_reason(error), error) from None

    def read(self, timeout: float) -> Any:
        """The next answer: bytes, an int, None or a list of them."""
        deadline = time.monotonic() + timeout
        answer = self._parse(deadline)
        if isinstance(answer, RedisRefused):
            if str(answer).startswith(_PASSING):
                raise Broken(str(answer))
            raise answer
        return answer

    def close(self) -> None:
        """End the connection; a read in another thread ends with Broken."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _parse(self, deadline: float) -> Any:
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            size = int(rest)
            return None if size < 0 else self._exactly(size, deadline)
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"-":
            return RedisRefused(rest.decode(errors="replace"))
        if kind == b"*":
            count = int(rest)
            return None if count < 0 else [self._parse(deadline) for _ in range(count)]
        raise Broken("the server does not speak the Redis protocol")

    def _line(self, deadline: float) -> bytes:
        while True:
            end = self._buffer.find(b"\r\n", self._at)
            if end >= 0:
                line, self._at = self._buffer[self._at : end], end + 2
                return line
            self._receive(deadline)

    def _exactly(self, size: int, deadline: float) -> bytes:
        while len(self._buffer) - self._at < size + 2:
            self._receive(deadline)
        value = self._buffer[self._at : self._at + size]
        self._at += size + 2
        return value

    def _receive(self, deadline: float) -> None:
        while True:
            try:
                more = self._socket.recv(_READ)
                break
            except (BlockingIOError, ssl.SSLWantReadError):
                if time.monotonic() >= deadline:
                    raise Broken("no answer in time") from None
            except OSError as error:
                raise Broken(_reason(error), error) from None
        if not more:
            raise Broken("the server closed the connection")
        self._buffer = self._buffer[self._at :] + more
        self._at = 0


def access_error(address: Address, text: str) -> ConfigError | None:
    """The error for a server that does not let this user in, or None if `text` says something else."""
    if text.startswith(("WRONGPASS", "NOAUTH", "ERR AUTH", "ERR invalid password", "ERR Client sent AUTH")):
        return ConfigError(
            f"the Redis server at {address} refuses the user or password ({text.split()[0]}); give the right one in "
            "rendezvous.url=redis://USER:PASSWORD@HOST:PORT or in MEGASCALE_REDIS_PASSWORD"
        )
    if text.startswith("NOPERM"):
        return ConfigError(f"the Redis server at {address} does not permit this user what a store needs: {text}")
    if text.startswith("DENIED"):
        return ConfigError(f"the Redis server at {address} is in protected mode and takes local clients only: {text}")
    return None


def _tls_error(address: Address, error: ssl.SSLError) -> Exception:
    text = _reason(error)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return Broken(text)
    if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return ConfigError(f"the server at {address} does not speak TLS; use redis:// in rendezvous.url")
    return ConfigError(
        f"no TLS with the Redis server at {address}: {text}; set rendezvous.tls_ca to the file of the authority that "
        "signed its certificate, and tls_certificate and tls_key if it asks for one of yours"
    )


def _reason(error: OSError) -> str:
    return str(error.strerror or error)
