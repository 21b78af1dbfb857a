"""The common clock of a job's hosts: the clock of host 0, which the other hosts read over UDP.

Clocks of hosts may be wrong by minutes and may drift. A host reads the common clock between two readings of its own
clock. The two readings bound the offset between the clocks from both sides (clock_bounds.py). Host 0 stores its address
and a token in the run's folder (`spans/clock.json`, readable by this user only), and answers only requests with a proof
of the token.
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

CONTACT_FILE = "clock.json"
UNKNOWN = -1  # error of a clock that was never compared with the common clock
_NONCE_BYTES = 16
_PROOF_BYTES = 16
_TIME = struct.Struct("<q")
_ROUNDS = 4  # readings per comparison; the fastest gives the best bounds
_TIMEOUT_SECONDS = 0.5


def _make_proof(token: bytes, purpose: bytes, data: bytes) -> bytes:
    return hmac.digest(token, purpose + data, "sha256")[:_PROOF_BYTES]


def find_own_address() -> str:
    """Return the address at which other hosts reach this host: MASTER_ADDR if it is this host's, or its host name's."""
    for name in (os.environ.get("MASTER_ADDR", ""), socket.gethostname()):
        if not name:
            continue
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(name)
            # Binding fails for the address of another host.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.bind((address, 0))
            return address
    return "127.0.0.1"


class ClockServer:
    """Host 0's thread that answers requests for the common time. Raises OSError if it cannot listen.

    Args:
        folder: `runs/NAME/spans`, where the server stores address and token.
        read_clock: returns the common time in nanoseconds.
        address: address to listen on; None: `find_own_address`.
    """

    def __init__(self, folder: Path, read_clock: Callable[[], int], address: str | None = None) -> None:
        self._read_clock = read_clock
        self._token = generate_token().encode()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if address is None:
            address = find_own_address()
        self._socket.bind((address, 0))
        self._file = folder / CONTACT_FILE
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
                expected_proof = _make_proof(self._token, b"ask", nonce)
                if len(request) == _NONCE_BYTES + _PROOF_BYTES and secrets_equal(proof, expected_proof):
                    body = nonce + _TIME.pack(self._read_clock())
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
    """The offset of the common clock from this host's monotonic clock.

    Args:
        folder: folder in which host 0 stores address and token.
        clock_ns: offset of this host's clock, which is used until host 0 has answered.
        monotonic: returns the host's monotonic time in nanoseconds.
    """

    def __init__(self, folder: Path, clock_ns: int, monotonic: Callable[[], int] = time.monotonic_ns) -> None:
        self._file = folder / CONTACT_FILE
        self._host_offset = clock_ns  # `bounds` holds the correction to this offset
        self._monotonic = monotonic
        self.bounds = ClockBounds()

    def compare(self) -> bool:
        """Read the common clock several times; return False if host 0 does not answer within half a second."""
        try:
            contact = strict_json.loads(read_small_text(self._file))
            token = str(contact["token"]).encode()
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.settimeout(_TIMEOUT_SECONDS)
                sock.connect((str(contact["address"]), int(contact["port"])))
                answers = [self._compare_once(sock, token) for _ in range(_ROUNDS)]
                return any(answers)
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return False

    def _compare_once(self, sock: socket.socket, token: bytes) -> bool:
        """Read the common clock once, and return whether the answer is valid."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        before = self._monotonic()
        sock.send(nonce + _make_proof(token, b"ask", nonce))
        answer = sock.recv(64)
        after = self._monotonic()
        body = answer[: _NONCE_BYTES + _TIME.size]
        proof = answer[_NONCE_BYTES + _TIME.size :]
        if body[:_NONCE_BYTES] != nonce or not secrets_equal(proof, _make_proof(token, b"say", body)):
            return False
        (common_ns,) = _TIME.unpack_from(body, _NONCE_BYTES)
        common_ns -= self._host_offset  # a float64 cannot hold nanoseconds since 1970 exactly
        self.bounds.add_lower_bound(after, common_ns - after)
        self.bounds.add_upper_bound(before, common_ns - before)
        return True

    def read_offset(self) -> tuple[int, int, int]:
        """Return monotonic time, offset and largest error in nanoseconds; the error is UNKNOWN before a comparison."""
        time_ns = self._monotonic()
        estimate = self.bounds.estimate(time_ns)
        if estimate is None:
            return time_ns, self._host_offset, UNKNOWN
        offset, error = estimate
        return time_ns, self._host_offset + round(offset), round(error) + 1
