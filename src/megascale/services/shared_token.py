"""The token that processes of one job share: made once, read where nobody else may read it, proved without being sent.

It is kept in a file of mode 600 (the driver's) or handed on in memory (the checkpoint services'). Over TCP each side
of a connection sends a nonce, then an HMAC of both nonces, and checks the other's: `TokenProof` holds one side's part
and leaves the sending to its caller. Over HTTP the token itself is sent, to the loopback or the job's own network.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path
from typing import Literal

from megascale.errors import DataError

NONCE_BYTES = 32
PROOF_BYTES = 32
_LEAST = 32  # characters of a token


def new_token() -> str:
    """A fresh one: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def make_token(path: Path) -> bytes:
    """The token kept at `path`, made if there is none; only this user may read it. DataError as `read_token`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_token(path)
    with open(handle, "w") as out:
        out.write(new_token())
    return read_token(path)


def read_token(path: Path) -> bytes:
    """The token kept at `path`. DataError if there is none, if it is another user's, or if others may read it."""
    try:
        with open(path) as file:
            about, token = os.fstat(file.fileno()), file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the token {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    # Root may be somebody else on a network file system, and is let in anywhere else.
    if os.geteuid() != 0 and about.st_uid not in (0, os.geteuid()):
        raise DataError(f"the token {path} belongs to another user, who knows it; delete it for a new one")
    if about.st_mode & 0o077:
        raise DataError(f"the token {path} can be read by others; run `chmod 600 {path}` or delete it for a new one")
    if len(token) < _LEAST:
        raise DataError(f"the token {path} is too short to be one; delete it and start the driver again")
    return token.encode()


def derive(token: bytes, purpose: str) -> str:
    """Another token for those who know this one, 64 hexadecimal digits; it tells nothing of `token`."""
    return hmac.digest(token, f"token of {purpose}".encode(), "sha256").hex()


def secrets_equal(given: bytes, expected: bytes) -> bool:
    """Whether two secrets are equal, in a time that does not tell how much of them is."""
    return hmac.compare_digest(given, expected)


class TokenProof:
    """One side's part in showing that both ends of a connection know a token.

    Send `nonce`, give the other side's to `answer` and send what that returns; then `accepts` says whether the other
    side's answer is right. Nothing of a proof is of use on another connection, for another purpose or to the side that
    it came from.

    Args:
        token: shared by both sides; ValueError if it is empty, which everybody knows.
        purpose: what the connection is for.
        role: of this side; one is the server, the other the client.
    """

    def __init__(self, token: bytes, purpose: str, role: Literal["server", "client"]) -> None:
        if not token:
            raise ValueError("an empty token proves nothing")
        self._token, self._purpose, self._server = token, purpose.encode(), role == "server"
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._both = b""

    def answer_nonce(self, theirs: bytes) -> bytes:
        """PROOF_BYTES that show the token, for the other side's nonce."""
        self._both = self.nonce + theirs if self._server else theirs + self.nonce
        return self._digest(b"server" if self._server else b"client")

    def accepts(self, answer: bytes) -> bool:
        """Whether the other side's answer shows that it knows the token; after `answer`."""
        assert self._both, "no nonce of the other side yet"
        return secrets_equal(answer, self._digest(b"client" if self._server else b"server"))

    def connection_key(self) -> bytes:
        """A key for this connection only, the same on both sides; after `answer`."""
        assert self._both, "no nonce of the other side yet"
        return self._digest(b"key")

    def _digest(self, what: bytes) -> bytes:
        return hmac.digest(self._token, b" ".join((self._purpose, what, self._both)), "sha256")
