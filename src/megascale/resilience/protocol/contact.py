"""How agents and commands find a run's driver: RUN/driver/contact.json and the token next to it (mode 600)."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from megascale.core.untrusted_files import read_small_text
from megascale.errors import DataError
from megascale.services import shared_token

# In a driver's environment: the newest epoch whose driver has lost the job by the word of whoever gives machines.
ENDED_EPOCH = "MEGASCALE_ENDED_EPOCH"


@dataclass(frozen=True)
class Contact:
    """Where the newest driver listens. agents: (host, port); api: base URL; epoch: (state/journal.py)."""

    job: str
    epoch: int
    pid: int
    agents: tuple[str, int]
    api: str


def driver_folder(run: Path) -> Path:
    """RUN/driver."""
    return run / "driver"


def write_contact(run: Path, contact: Contact) -> None:
    """Replace the contact in one move."""
    temporary = driver_folder(run) / "contact.tmp"
    temporary.write_text(json.dumps(asdict(contact)))
    os.replace(temporary, driver_folder(run) / "contact.json")


def read_contact(run: Path) -> Contact:
    """DataError if there is none."""
    try:
        record = json.loads(read_small_text(driver_folder(run) / "contact.json"))
        record["agents"] = tuple(record["agents"])
        return Contact(**record)
    except (OSError, ValueError, TypeError, KeyError):
        raise DataError(
            f"{run} has no driver/contact.json: no driver was started there with `megascale launch`"
        ) from None


def make_token(run: Path) -> bytes:
    """The job's token, made at the first start; DataError as shared_token.read_token."""
    return shared_token.make_token(driver_folder(run) / "token")


def read_token(run: Path) -> bytes:
    """The job's token; DataError as shared_token.read_token."""
    return shared_token.read_token(driver_folder(run) / "token")
