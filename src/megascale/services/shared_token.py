"""The secret token that processes of one job share: created once, private to the user, and proved without being sent.

The token is stored in a file of mode 600 (the driver's) or passed on in memory (the checkpoint services'). On TCP each
end sends a nonce and then an HMAC of both nonces, and checks the other end's HMAC. `TokenProof` computes one end's part
and leaves the sending to its caller. On HTTP the token itself is sent, to loopback or within the job's own network.
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
_MIN_CHARACTERS = 32


def generate_token() -> str:
    """Return a new random token of 64 hexadecimal digits."""
    return secrets.token_hex(32)


def make_token(path: Path) -> bytes:
    """Return the token stored at `path`, which only this user may read; create it if there is none.

    Raises DataError as `read_token` does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_token(path)
    with open(handle, "w") as out:
        out.write(generate_token())
    return read_token(path)


def read_token(path: Path) -> bytes:
    """Return the token stored at `path`.

    Raises DataError if the file is missing, belongs to another user, or is readable by other users.
    """
    try:
        with open(path) as file:
            info = os.fstat(file.fileno())
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the token {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    # On a network file system root may be another machine's root; elsewhere root can read every file in any case.
    if os.geteuid() != 0 and info.st_uid not in (0, os.geteuid()):
        raise DataError(f"the token {path} belongs to another user, who knows it; delete it for a new one")
    if info.st_mode & 0o077:
        raise DataError(f"the token {path} can be read by others; run `chmod 600 {path}` or delete it for a new one")
    if len(token) < _MIN_CHARACTERS:
        raise DataError(
            f"the token {path} is too short: it has {len(token)} characters, at least {_MIN_CHARACTERS} are needed; "
            "delete it and start the driver again"
        )
    return token.encode()


def derive_token(token: bytes, purpose: str) -> str:
    """Return another token of 64 hexadecimal digits that holders of `token` can compute; it does not reveal `token`."""
    return hmac.digest(token, f"token of {purpose}".encode(), "sha256").hex()


def secrets_equal(secret: bytes, expected: bytes) -> bool:
    """Return whether two secrets are equal, in constant time."""
    return hmac.compare_digest(secret, expected)


class TokenProof:
    """One end's part in proving that both ends of a connection know a token.

    Send `nonce`, pass the other end's nonce to `answer_nonce` and send the result; `accepts` then checks the other
    end's answer. A proof is useless on another connection, for another purpose, or when reflected to its sender.

    Args:
        token: shared by both ends. Raises ValueError if it is empty, which every process knows.
        purpose: purpose of the connection.
        role: of this end; one end is the server, the other the client.
    """

    def __init__(self, token: bytes, purpose: str, role: Literal["server", "client"]) -> None:
        if not token:
            raise ValueError("an empty token proves nothing")
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._token = token
        self._purpose = purpose.encode()
        self._is_server = role == "server"
        self._nonces = b""  # the server's, then the client's

    def answer_nonce(self, peer_nonce: bytes) -> bytes:
        """Return the PROOF_BYTES that answer the other end's nonce."""
        if self._is_server:
            self._nonces = self.nonce + peer_nonce
        else:
            self._nonces = peer_nonce + self.nonce
        return self._digest(b"server" if self._is_server else b"client")

    def accepts(self, answer: bytes) -> bool:
        """Return whether the other end's answer proves the token; call it after `answer_nonce`."""
        assert self._nonces, "the other side's nonce has not been answered yet"
        return secrets_equal(answer, self._digest(b"client" if self._is_server else b"server"))

    def connection_key(self) -> bytes:
        """Return a key for this connection only, the same at both ends; call it after `answer_nonce`."""
        assert self._nonces, "the other side's nonce has not been answered yet"
        return self._digest(b"key")

    def _digest(self, label: bytes) -> bytes:
        return hmac.digest(self._token, b" ".join((self._purpose, label, self._nonces)), "sha256")
