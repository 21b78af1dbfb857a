"""The common clock of a job's hosts: that of host 0, which the others ask now and then, over UDP with a token.

A host's clock may be minutes off and drift; what is asked for is read between two readings of the own clock, which
bounds the offset from both sides (clock_bounds.py) by the time that the exchange took. Host 0 leaves its address and a
token in the run's folder (`spans/clock.json`, for this user only). Whoever does not know the token gets no answer.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megascale.core import strict_json
from megascale.core.background import FailureLog
from megascale.core.untrusted_files import read_small_text
from megascale.observe.clock_bounds import ClockBounds
from megascale.services.shared_token import new_token, secrets_equal

log = logging.getLogger("megascale.observe.spans")

FILE = "clock.json"
UNKNOWN = -1  # the error of a clock that was never compared
_NONCE, _SUM = 16, 16
_TIME = struct.Struct("<q")
_ROUNDS = 4  # exchanges each time: the quickest counts
_TIMEOUT = 0.5


def _sum(token: bytes, purpose: bytes, data: bytes) -> bytes:
    return hmac.digest(token, purpose + data, "sha256")[:_SUM]


def own_address() -> str:
    """The address at which the job's other hosts reach this one: that of its rendezvous, else the host's own."""
    given = os.environ.get("MASTER_ADDR", "")
    for name in (given, socket.gethostname()):
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(name) if name else ""
            if address:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    probe.bind((address, 0))
                return address
    return "127.0.0.1"


class ClockServer:
    """Tells the common time to those who know the token, in a thread; host 0 has one.

    Args:
        folder: `runs/NAME/spans`, where it leaves its address.
        clock: the common time in nanoseconds.

    Raises OSError if it cannot listen.
    """

    def __init__(self, folder: Path, clock: Callable[[], int], address: str | None = None) -> None:
        self._clock, self._token = clock, new_token().encode()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        address = own_address() if address is None else address
        self._socket.bind((address, 0))
        self._file = folder / FILE
        told = {"address": address, "port": self._socket.getsockname()[1], "token": self._token.decode()}
        temporary = self._file.with_suffix(f".{os.getpid()}.tmp")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(strict_json.dumps(told))
        os.replace(temporary, self._file)
        threading.Thread(target=self._answer, name="megascale-clock", daemon=True).start()

    def _answer(self) -> None:
        failures = FailureLog(log, "telling other hosts the time")
        while True:
            try:
                data, asker = self._socket.recvfrom(64)
                if len(data) == _NONCE + _SUM and secrets_equal(
                    data[_NONCE:], _sum(self._token, b"ask", data[:_NONCE])
                ):
                    body = data[:_NONCE] + _TIME.pack(self._clock())
                    self._socket.sendto(body + _sum(self._token, b"say", body), asker)
            except OSError:
                if self._socket.fileno() < 0:
                    return
            except Exception as error:
                failures.note(error, "the next question is answered again")

    def close(self) -> None:
        """Answer no more."""
        self._file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()


class HostClock:
    """How far the common clock is ahead of this host's monotonic one.

    Args:
        folder: where host 0 leaves its address.
        clock_ns: how far the host's own clock is ahead of it: what is told before host 0 was reached.
        monotonic: the host's monotonic clock, in nanoseconds.
    """

    def __init__(self, folder: Path, clock_ns: int, monotonic: Callable[[], int] = time.monotonic_ns) -> None:
        self._file, self._base, self._monotonic = folder / FILE, clock_ns, monotonic
        self.bounds = ClockBounds()

    def exchange(self) -> bool:
        """Ask host 0; False if it does not answer. Waits for half a second at most."""
        try:
            told = strict_json.loads(read_small_text(self._file))
            address, token = (str(told["address"]), int(told["port"])), str(told["token"]).encode()
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.settimeout(_TIMEOUT)
                sock.connect(address)
                return sum([self._once(sock, token) for _ in range(_ROUNDS)]) > 0  # all of them
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return False

    def _once(self, sock: socket.socket, token: bytes) -> bool:
        nonce = secrets.token_bytes(_NONCE)
        before = self._monotonic()
        sock.send(nonce + _sum(token, b"ask", nonce))
        data = sock.recv(64)
        after = self._monotonic()
        body, proof = data[: _NONCE + _TIME.size], data[_NONCE + _TIME.size :]
        if body[:_NONCE] != nonce or not secrets_equal(proof, _sum(token, b"say", body)):
            return False
        (common,) = _TIME.unpack_from(body, _NONCE)
        common -= self._base  # small numbers: a float64 does not hold nanoseconds since 1970
        self.bounds.at_least(after, common - after)
        self.bounds.at_most(before, common - before)
        return True

    def read_offset(self) -> tuple[int, int, int]:
        """(monotonic time, offset, by how much it may be wrong, UNKNOWN before host 0 has answered), in nanoseconds."""
        at = self._monotonic()
        known = self.bounds.estimate(at)
        if known is None:
            return at, self._base, UNKNOWN
        return at, self._base + round(known[0]), round(known[1]) + 1
