"""The common clock of a job's hosts: the clock of host 0, which the other hosts read over UDP with a token.

A host's clock may be wrong by minutes and may drift. A host reads the common time between two readings of its own
clock. This bounds the offset from both sides (clock_bounds.py) by the duration of the exchange. Host 0 stores its
address and a token in the run's folder (`spans/clock.json`, readable by this user only). It does not answer requests
without the token.
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
from megascale.core.atomic_files import name_temporary
from megascale.core.failure import FailureLog
from megascale.core.untrusted_files import read_small_text
from megascale.observe.clock_bounds import ClockBounds
from megascale.services.shared_token import generate_token, secrets_equal

log = logging.getLogger("megascale.observe.spans")

FILE = "clock.json"
UNKNOWN = -1  # error of a clock that was never compared
_NONCE_BYTES = 16
_PROOF_BYTES = 16
_TIME = struct.Struct("<q")
_ROUNDS = 4  # exchanges per comparison; the fastest gives the best bounds
_TIMEOUT = 0.5


def _make_proof(token: bytes, purpose: bytes, data: bytes) -> bytes:
    return hmac.digest(token, purpose + data, "sha256")[:_PROOF_BYTES]


def find_own_address() -> str:
    """Return the address at which other hosts reach this one: that of its rendezvous, or the host's own address."""
    for name in (os.environ.get("MASTER_ADDR", ""), socket.gethostname()):
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(name) if name else ""
            if address:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    probe.bind((address, 0))
                return address
    return "127.0.0.1"


class ClockServer:
    """Host 0's thread that answers requests for the common time.

    Args:
        folder: `runs/NAME/spans`, where it stores its address.
        clock: returns the common time in nanoseconds.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(self, folder: Path, clock: Callable[[], int], address: str | None = None) -> None:
        self._clock = clock
        self._token = generate_token().encode()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if address is None:
            address = find_own_address()
        else:
            address = address
        self._socket.bind((address, 0))
        self._file = folder / FILE
        contact = {"address": address, "port": self._socket.getsockname()[1], "token": self._token.decode()}
        temporary = name_temporary(self._file)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(strict_json.dumps(contact))
        os.replace(temporary, self._file)
        threading.Thread(target=self._answer, name="megascale-clock", daemon=True).start()

    def _answer(self) -> None:
        failures = FailureLog(log, "the clock server")
        while True:
            try:
                request, sender = self._socket.recvfrom(64)
                nonce, proof = request[:_NONCE_BYTES], request[_NONCE_BYTES:]
                if len(request) == _NONCE_BYTES + _PROOF_BYTES and secrets_equal(
                    proof, _make_proof(self._token, b"ask", nonce)
                ):
                    body = nonce + _TIME.pack(self._clock())
                    self._socket.sendto(body + _make_proof(self._token, b"say", body), sender)
            except OSError:
                if self._socket.fileno() < 0:
                    return
            except Exception as error:
                failures.note(error, "the next request is answered again")

    def close(self) -> None:
        """Stop answering."""
        self._file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()


class HostClock:
    """The offset of the common clock from this host's monotonic one.

    Args:
        folder: where host 0 stores its address.
        clock_ns: offset of the host's own clock, which is used until host 0 has answered.
        monotonic: returns the host's monotonic time in nanoseconds.
    """

    def __init__(self, folder: Path, clock_ns: int, monotonic: Callable[[], int] = time.monotonic_ns) -> None:
        self._file = folder / FILE
        self._base = clock_ns
        self._monotonic = monotonic
        self.bounds = ClockBounds()

    def exchange(self) -> bool:
        """Read host 0's clock; return False if it does not answer within half a second."""
        try:
            contact = strict_json.loads(read_small_text(self._file))
            token = str(contact["token"]).encode()
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.settimeout(_TIMEOUT)
                sock.connect((str(contact["address"]), int(contact["port"])))
                answers = [self._exchange_once(sock, token) for _ in range(_ROUNDS)]
                return any(answers)
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return False

    def _exchange_once(self, sock: socket.socket, token: bytes) -> bool:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        before = self._monotonic()
        sock.send(nonce + _make_proof(token, b"ask", nonce))
        answer = sock.recv(64)
        after = self._monotonic()
        body = answer[: _NONCE_BYTES + _TIME.size]
        proof = answer[_NONCE_BYTES + _TIME.size :]
        if body[:_NONCE_BYTES] != nonce or not secrets_equal(proof, _make_proof(token, b"say", body)):
            return False
        (common,) = _TIME.unpack_from(body, _NONCE_BYTES)
        common -= self._base  # a float64 cannot hold nanoseconds since 1970
        self.bounds.add_lower_bound(after, common - after)
        self.bounds.add_upper_bound(before, common - before)
        return True

    def read_offset(self) -> tuple[int, int, int]:
        """Return monotonic time, offset and largest error in nanoseconds; the error is UNKNOWN before an answer."""
        time_ns = self._monotonic()
        estimate = self.bounds.estimate(time_ns)
        if estimate is None:
            return time_ns, self._base, UNKNOWN
        offset, error = estimate
        return time_ns, self._base + round(offset), round(error) + 1
