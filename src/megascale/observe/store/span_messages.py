"""What a rank and its host's span service say to each other, and where they meet. No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from megascale.services.conversation import Done, ErrorReply
from megascale.services.framing import FORM
from megascale.services.host_service import Launch, ServiceLocation
from megascale.services.messages import Count, Facts, Message, Schema
from megascale.services.private_folder import private_base

NAME = "spans"
_LIMIT = 1 << 16


class Follow(Message, frozen=True):
    """A rank comes, with its ring beside: take over what it writes until it hangs up. facts: who it is."""

    rank: Count
    attempt: Count
    facts: Facts


TO_SPANS = Schema(Follow, limit=_LIMIT)
FROM_SPANS = Schema(Done, ErrorReply, limit=_LIMIT)


def span_folder(run: Path, host: int) -> Path:
    """Where a host's spans lie."""
    return run / "spans" / f"host={host}"


def service_place(out: Path) -> ServiceLocation:
    """Where the span service that writes to `out` lives on this host."""
    identity = f"{out.absolute()}\0{os.environ.get('MEGASCALE_NODE', '')}\0{FORM}"
    return ServiceLocation(private_base() / f"spans-{hashlib.sha256(identity.encode()).hexdigest()[:16]}", NAME)


def launch(
    out: Path, job: str, host: int, hosts: int, limit_mib: int, log: Path | None, sinks: Sequence[str]
) -> Launch:
    """How it is started, on one of the job's `hosts`."""
    words = [str(service_place(out).folder), "--out", str(out.absolute()), "--job", job, "--host", str(host)]
    words += ["--hosts", str(hosts), *(f"--sink={sink}" for sink in sinks)]
    return Launch("megascale.observe.store.span_service", [*words, "--limit-mib", str(limit_mib)], log)
