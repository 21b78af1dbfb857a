"""Secret token that the processes of one job share.

The driver's token is in a file of mode 600. The token of the checkpoint services stays in memory. On TCP a process
proves that it knows the token without sending it: each end sends a nonce, answers with an HMAC of both nonces, and
checks the HMAC of the other end. `TokenProof` computes the values of one end, and its caller sends them. HTTP requests
contain the token itself, so they go only to loopback or within the job's own network.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path
from typing import Literal

from megascale.errors import DataError

NONCE_BYTES = 32
PROOF_BYTES = 32  # of a SHA-256 HMAC
_MIN_TOKEN_CHARACTERS = 32  # 128 bits in hexadecimal digits


def generate_token() -> str:
    """Return a new random token of 64 hexadecimal digits."""
    return secrets.token_hex(32)


def make_token(path: Path) -> bytes:
    """Return the token in the file `path`. If the file is missing, create it with a new token for this user only.

    Raises:
        DataError: as `read_token`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_token(path)
    with open(descriptor, "w") as out:
        out.write(generate_token())
    return read_token(path)


def read_token(path: Path) -> bytes:
    """Return the token in the file `path`.

    Raises:
        DataError: the file is missing, belongs to another user, is readable by other users, or its token is too short.
    """
    try:
        with open(path) as file:
            info = os.fstat(file.fileno())
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the token {path} cannot be read: {getattr(error, 'strerror', error)}; run the command as the user of the "
            "job, or start the job's driver again, which makes a missing token"
        ) from None
    # A file of root is accepted, because root can read every file in any case. On a network file system this may be the
    # root of another machine.
    if os.geteuid() != 0 and info.st_uid not in (0, os.geteuid()):
        raise DataError(f"the token {path} belongs to another user, who knows it; delete it for a new one")
    if info.st_mode & 0o077:
        raise DataError(f"the token {path} can be read by others; run `chmod 600 {path}` or delete it for a new one")
    if len(token) < _MIN_TOKEN_CHARACTERS:
        raise DataError(
            f"the token {path} is too short: it has {len(token)} characters, at least {_MIN_TOKEN_CHARACTERS} are "
            "needed; delete it and start the driver again"
        )
    return token.encode()


def derive_token(token: bytes, purpose: str) -> str:
    """Return a token of 64 hexadecimal digits for `purpose`.

    Every process that knows `token` can compute it, and it does not reveal `token`.
    """
    return hmac.digest(token, f"token of {purpose}".encode(), "sha256").hex()


def secrets_equal(secret: bytes, expected: bytes) -> bool:
    """Return whether two secrets are equal. The time of the comparison does not depend on their contents."""
    return hmac.compare_digest(secret, expected)


class TokenProof:
    """Proof of one end of a connection that it knows a token, and check of the other end's proof.

    The caller sends `nonce`, passes the other end's nonce to `answer_nonce` and sends the result. It then passes the
    other end's answer to `is_valid_answer`. An answer is invalid on another connection, for another purpose, and if the
    other end only sends it back.

    Args:
        token: token that both ends should know.
        purpose: purpose of the connection, equal at both ends.
        role: role of this end. One end is the server and the other the client.

    Raises:
        ValueError: the token is empty.
    """

    def __init__(self, token: bytes, purpose: str, role: Literal["server", "client"]) -> None:
        if not token:
            raise ValueError("an empty token proves nothing")
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._token = token
        self._purpose = purpose.encode()
        self._is_server = role == "server"
        self._nonces = b""  # nonce of the server, then nonce of the client; empty before `answer_nonce`

    def answer_nonce(self, peer_nonce: bytes) -> bytes:
        """Return the answer to the other end's nonce, PROOF_BYTES long."""
        if self._is_server:
            self._nonces = self.nonce + peer_nonce
        else:
            self._nonces = peer_nonce + self.nonce
        return self._digest(b"server" if self._is_server else b"client")

    def is_valid_answer(self, answer: bytes) -> bool:
        """Return whether the other end's answer proves that it knows the token. Call `answer_nonce` first."""
        self._require_nonces()
        return secrets_equal(answer, self._digest(b"client" if self._is_server else b"server"))

    def connection_key(self) -> bytes:
        """Return a key for this connection, equal at both ends. Call `answer_nonce` first."""
        self._require_nonces()
        return self._digest(b"key")

    def _require_nonces(self) -> None:
        """Raise RuntimeError before `answer_nonce`, since a digest without nonces would prove nothing."""
        if not self._nonces:
            raise RuntimeError("the other end's nonce has not been answered yet; call answer_nonce first")

    def _digest(self, label: bytes) -> bytes:
        return hmac.digest(self._token, b" ".join((self._purpose, label, self._nonces)), "sha256")
