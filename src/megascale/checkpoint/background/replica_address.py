"""Where a host's checkpoint service takes other hosts' copies."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence

from megascale.core.ports import is_loopback

log = logging.getLogger(__name__)


def warn_if_reachable(found: Sequence[tuple[str, int]]) -> None:
    """Say where hosts take copies that more than themselves reach, and what keeps strangers out."""
    if reached := sorted({f"{address}:{port}" for address, port in found if not is_loopback(address)}):
        more = f" and {len(reached) - 4} more" if len(reached) > 4 else ""
        log.warning(
            "checkpoint.replica_address: other machines reach the checkpoint services at %s%s; they ask for the "
            "replicas' token, and what they are sent is authenticated, not encrypted: keep them on a network that only "
            "the job's machines reach, or set checkpoint.replicas=false",
            ", ".join(reached[:4]),
            more,
        )


def own_address(setting: str) -> str:
    """An address, or what "auto" stands for."""
    if setting != "auto":
        return setting
    # An agent knows which network its node is reached on; a host's own name often means loopback, or nothing.
    return os.environ.get("MEGASCALE_NODE_ADDRESS") or socket.gethostbyname(socket.gethostname())
