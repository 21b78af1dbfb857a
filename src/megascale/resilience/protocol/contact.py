"""How agents and commands find a run's driver: RUN/driver/contact.json and the token next to it (mode 600)."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from megascale.errors import DataError


@dataclass(frozen=True)
class Contact:
    """Where the newest driver listens. agents: (host, port) of the channel; api: base URL; epoch: see journal.py."""

    job: str
    epoch: int
    pid: int
    agents: tuple[str, int]
    api: str


def folder(run: Path) -> Path:
    """RUN/driver."""
    return run / "driver"


def write_contact(run: Path, contact: Contact) -> None:
    """Replace the contact in one move."""
    temporary = folder(run) / "contact.tmp"
    temporary.write_text(json.dumps(asdict(contact)))
    os.replace(temporary, folder(run) / "contact.json")


def read_contact(run: Path) -> Contact:
    """DataError if there is none."""
    try:
        record = json.loads((folder(run) / "contact.json").read_text())
        record["agents"] = tuple(record["agents"])
        return Contact(**record)
    except (OSError, ValueError, TypeError, KeyError):
        raise DataError(
            f"{run} has no driver/contact.json: no driver was started there with `megascale launch`"
        ) from None


def make_token(run: Path) -> bytes:
    """The job's token, made at the first start; only this user may read it."""
    path = folder(run) / "token"
    folder(run).mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_token(run)
    with open(handle, "w") as out:
        out.write(secrets.token_hex(32))
    return read_token(run)


def read_token(run: Path) -> bytes:
    """The job's token. DataError if there is none, or if others may read it."""
    path = folder(run) / "token"
    try:
        mode = path.stat().st_mode & 0o077
        token = path.read_text().strip()
    except OSError as error:
        raise DataError(f"the token {path} cannot be read: {error.strerror}") from None
    if mode:
        raise DataError(f"the token {path} can be read by others; run `chmod 600 {path}` or delete it for a new one")
    if len(token) < 32:
        raise DataError(f"the token {path} is too short to be one; delete it and start the driver again")
    return token.encode()
