"""The description of a job in the folder of an agent: name, epoch, driver's address, limits and secret.

A cluster writes two files, description and secret, before it starts the agent, and again when another driver takes
over. An agent reads no folder of another machine; checkpoints are on storage that all nodes share.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megascale.config import ResilienceConfig
from megascale.core.atomic_files import name_temporary
from megascale.errors import DataError
from megascale.services import shared_token

# Files of an agent's folder.
JOB_FILE = "given.json"
TOKEN_FILE = "token"  # the secret


@dataclass(frozen=True)
class JobDescription:
    """A job from the view of its agents.

    Attributes:
        epoch: epoch of the current driver.
        driver: (host, port) where the driver accepts agents.
        limits: the configuration section [resilience].
        run: the folder on the agent's machine to which its trainers write status, logs and metrics.
        shared: `run` is the driver's run folder; otherwise the agent sends the files of `run` to the driver.
        checkpoints: folder of checkpoints shared by all nodes, for trainers whose settings name none; "": inside `run`.
        alternative_drivers: (host, port) of further addresses that a driver of the job may have, tried in turn.
    """

    name: str
    epoch: int
    driver: tuple[str, int]
    limits: ResilienceConfig
    run: str = ""
    shared: bool = True
    checkpoints: str = ""
    alternative_drivers: tuple[tuple[str, int], ...] = ()

    def with_own_folder(self, run: Path, checkpoints: Path | None) -> JobDescription:
        """Return the description for a node whose trainers write to a `run` folder of their own."""
        return replace(self, run=str(run), shared=False, checkpoints=str(checkpoints or ""))


def write_job(folder: Path, job: JobDescription, token: bytes) -> None:
    """Write a job's description and secret into an agent's folder, each file atomically."""
    _replace_file(folder / TOKEN_FILE, token)
    _replace_file(folder / JOB_FILE, json.dumps(to_record(job)).encode())


def read_job(folder: Path) -> JobDescription:
    """Read the job description in an agent's folder. Raises DataError if it is missing or damaged."""
    try:
        record = json.loads((folder / JOB_FILE).read_text())
        return from_record(record)
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise DataError(
            f"{folder / JOB_FILE} does not describe a job: {error}; the job's cluster writes this file"
        ) from None


def read_job_token(folder: Path) -> bytes:
    """Read the job's secret in an agent's folder. Raises DataError like `shared_token.read_token`."""
    return shared_token.read_token(folder / TOKEN_FILE)


def to_record(job: JobDescription) -> dict[str, Any]:
    """Return the description as a JSON object."""
    # asdict() would leave the limits as the object that pydantic made, which JSON cannot hold.
    record = {field.name: getattr(job, field.name) for field in fields(job)}
    return record | {"limits": job.limits.model_dump(mode="json")}


def from_record(record: dict[str, Any]) -> JobDescription:
    """Return the description of a JSON object; ValueError, TypeError, KeyError or IndexError if it is malformed."""
    addresses = [record["driver"], *record.get("alternative_drivers", ())]
    drivers = [(str(host), int(port)) for host, port in addresses]
    limits = ResilienceConfig.model_validate(record["limits"])
    parsed = {"driver": drivers[0], "alternative_drivers": tuple(drivers[1:]), "limits": limits}
    return JobDescription(**(record | parsed))


def _replace_file(file: Path, data: bytes) -> None:
    """Replace a file atomically by one that only its owner may read."""
    temporary = name_temporary(file)  # a pod's agent and its thread that follows the driver may both write
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as out:
            out.write(data)
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
