"""The address of a run's driver: RUN/driver/contact.json, and the job's token next to it (mode 600)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megascale.core.atomic_files import write_atomically
from megascale.core.untrusted_files import read_small_text
from megascale.errors import DataError
from megascale.services import shared_token

# Environment variable of a driver: the newest epoch whose driver lost the job by a decision of the cluster.
ENDED_EPOCH = "MEGASCALE_ENDED_EPOCH"


@dataclass(frozen=True)
class Contact:
    """The addresses of the newest driver.

    Attributes:
        epoch: epoch of the driver (state/journal.py).
        pid: process id of the driver.
        agents: (host, port) where the driver accepts agents.
        api: base URL of the HTTP API.
    """

    job: str
    epoch: int
    pid: int
    agents: tuple[str, int]
    api: str


def driver_folder(run: Path) -> Path:
    """Return RUN/driver."""
    return run / "driver"


def write_contact(run: Path, contact: Contact) -> None:
    """Replace the contact file atomically."""
    write_atomically(driver_folder(run) / "contact.json", json.dumps(asdict(contact)))


def read_contact(run: Path) -> Contact:
    """Read the contact file. Raises DataError if it is missing or damaged."""
    file = driver_folder(run) / "contact.json"
    try:
        record = json.loads(read_small_text(file))
        record["agents"] = tuple(record["agents"])
        return Contact(**record)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{run} has no driver/contact.json: no driver was started there with `megascale launch`"
        ) from None
    except PermissionError:
        raise DataError(
            f"{file} cannot be read: it belongs to the user of the job; run the command as that user, or request an "
            "access file (`megascale access`)"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{file} is damaged ({error}), so the driver's address is unknown; end the driver and start it again with "
            "`megascale launch`, which writes the file"
        ) from None


def make_token(run: Path) -> bytes:
    """Return the job's token, created by the first start. Raises DataError like `shared_token.read_token`."""
    return shared_token.make_token(driver_folder(run) / "token")


def read_token(run: Path) -> bytes:
    """Return the job's token. Raises DataError like `shared_token.read_token`."""
    return shared_token.read_token(driver_folder(run) / "token")
