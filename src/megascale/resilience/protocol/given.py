"""What an agent is given, and all that it knows of its job: a description, an address, the secret; in its own folder.

A cluster puts both files there before it starts the agent, and again when another driver takes over; the agent reads
no other machine's folder. Checkpoints lie on storage that all nodes share.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megascale.config import ResilienceConfig
from megascale.errors import DataError
from megascale.services import shared_token

FILE, TOKEN = "given.json", "token"


@dataclass(frozen=True)
class JobDescription:
    """A job as its agents know it.

    Attributes:
        name: of the job.
        epoch: of the current driver.
        driver: (host, port) where it takes agents.
        limits: windows and intervals, as the section [resilience] has them.
        run: the folder, on the agent's machine, where its trainers write: status, logs, metrics.
        shared: whether that is the run folder itself; else the agent sends what is written there.
        checkpoints: the folder that all nodes share for checkpoints, for trainers whose settings name none; "": the
            one in `run`.
        elsewhere: (host, port) of other places where a driver of the job may be, tried in turn.
    """

    name: str
    epoch: int
    driver: tuple[str, int]
    limits: ResilienceConfig
    run: str = ""
    shared: bool = True
    checkpoints: str = ""
    elsewhere: tuple[tuple[str, int], ...] = ()

    def on(self, run: Path, checkpoints: Path | None) -> JobDescription:
        """For a node whose trainers write to `run`, where what they write must be sent."""
        return replace(self, run=str(run), shared=False, checkpoints=str(checkpoints or ""))


def write_job(folder: Path, job: JobDescription, token: bytes) -> None:
    """Put a job's description and its secret into an agent's folder, each in one move."""
    _replace(folder / TOKEN, token)
    _replace(folder / FILE, json.dumps(to_record(job)).encode())


def to_record(job: JobDescription) -> dict[str, Any]:
    """As JSON has it."""
    return asdict(replace(job, limits=ResilienceConfig())) | {"limits": job.limits.model_dump(mode="json")}


def from_record(record: dict[str, Any]) -> JobDescription:
    """As `to_record` gave it; ValueError, TypeError, KeyError or IndexError for anything else."""
    places = [(str(host), int(port)) for host, port in (record["driver"], *record.get("elsewhere", ()))]
    limits = ResilienceConfig.model_validate(record["limits"])
    return JobDescription(**record | {"driver": places[0], "elsewhere": tuple(places[1:]), "limits": limits})


def _replace(file: Path, data: bytes) -> None:
    temporary = file.with_name(file.name + ".tmp")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, data)
    finally:
        os.close(handle)
    os.replace(temporary, file)


def read_job(folder: Path) -> JobDescription:
    """What lies in an agent's folder. DataError if nothing of the kind does."""
    try:
        record = json.loads((folder / FILE).read_text())
        return from_record(record)
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise DataError(f"{folder / FILE} does not describe a job: {error}; a cluster writes it") from None


def given_token(folder: Path) -> bytes:
    """The job's secret; DataError as shared_token.read_token."""
    return shared_token.read_token(folder / TOKEN)
