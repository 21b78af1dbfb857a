"""Messages between a rank and its host's span service, and the paths that both use. This file does not import torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from megascale.services.conversation import Done, ErrorReply
from megascale.services.framing import PROTOCOL_VERSION
from megascale.services.host_service import Launch
from megascale.services.messages import Count, Labels, Message, Schema
from megascale.services.service_location import ServiceLocation, make_private_base_folder

NAME = "spans"
RANKS_FILE = "ranks.jsonl"  # in a host's folder: location of each rank
STATE_FILE = "state.json"  # in a host's folder: progress of the service
REQUEST_FILE = "asked.json"  # in `runs/NAME/spans`: steps of which all spans are requested
_MESSAGE_BYTES = 1 << 16


class Follow(Message, frozen=True):
    """A rank's request to take the frames of the attached ring until the rank disconnects.

    Attributes:
        facts: further fields for the rank's line in RANKS_FILE, such as its coordinates and device.
    """

    rank: Count
    attempt: Count
    facts: Labels


TO_SPANS = Schema(Follow, limit=_MESSAGE_BYTES)
FROM_SPANS = Schema(Done, ErrorReply, limit=_MESSAGE_BYTES)


def get_span_folder(run: Path, host: int) -> Path:
    """Return the folder of a host's spans."""
    return run / "spans" / f"host={host}"


def locate_service(out: Path) -> ServiceLocation:
    """Return the location (socket and lock) on this host of the span service that writes to `out`."""
    identity = f"{out.absolute()}\0{os.environ.get('MEGASCALE_NODE', '')}\0{PROTOCOL_VERSION}"
    return ServiceLocation(
        make_private_base_folder() / f"spans-{hashlib.sha256(identity.encode()).hexdigest()[:16]}", NAME
    )


def make_launch_command(
    out: Path, job: str, host: int, hosts: int, limit_mib: int, log: Path | None, sinks: Sequence[str]
) -> Launch:
    """Return the command that starts the span service of one of the job's `hosts`."""
    arguments = [str(locate_service(out).folder), "--out", str(out.absolute()), "--job", job, "--host", str(host)]
    arguments += ["--hosts", str(hosts), "--limit-mib", str(limit_mib)]
    arguments += [f"--sink={sink}" for sink in sinks]
    return Launch("megascale.observe.store.span_service", arguments, log)
