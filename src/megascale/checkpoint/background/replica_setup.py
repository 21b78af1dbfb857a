"""The token and the address of a host's replicas.

Hosts prove the token to each other and never send it, so each host gets it by another way. If the launcher gives it to
all hosts, as agents of a launched job do, it comes from the environment (MEGASCALE_REPLICA_TOKEN). Otherwise it is in
a file of mode 600 in the folder of the checkpoints, which all hosts see.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from megascale.checkpoint.object_collectives import Peers
from megascale.core.addresses import is_loopback
from megascale.core.secrets import REPLICA_VARIABLE
from megascale.errors import DataError
from megascale.services.shared_token import make_token, read_token

log = logging.getLogger(__name__)
TOKEN_FILE = "replica.token"
_MIN_CHARACTERS = 32
_MAX_SHOWN = 4


def agree_on_token(peers: Peers, location: str, identity: str) -> tuple[str, str | None]:
    """Return (token as hexadecimal digits, problem), the problem the same on all processes; collective.

    Args:
        location: path or URL of the checkpoints.
        identity: of the run's checkpoints, the same on all processes.
    """
    token = b""
    problem = ""
    if peers.rank == 0:
        token, problem = _find_token(location, make=True)
    problem = peers.broadcast(problem, str)
    if not problem and peers.rank != 0:
        token, problem = _find_token(location, make=False)
    # An HMAC with a token of 256 random bits reveals nothing of the token.
    if token:
        mark = hmac.digest(token, f"replicas of {identity}".encode(), "sha256").hex()
    else:
        mark = ""
    answers = peers.all_gather((problem, mark), tuple[str, str])
    failure = next((f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text), None)
    differing = [rank for rank, (_, rank_mark) in enumerate(answers) if rank_mark != answers[0][1]]
    if failure is None and differing:
        failure = f"ranks {differing[:8]} have another token than rank 0"
    if failure is not None:
        return "", (
            f"hosts that keep copies of each other's snapshots (checkpoint.replicas) need one token: {failure}. Give "
            f"all ranks the same {REPLICA_VARIABLE} of at least {_MIN_CHARACTERS} characters (openssl rand -hex 32), "
            "put checkpoint.location on a path that all hosts see, or set checkpoint.replicas=false"
        )
    return token.hex(), None


def _find_token(location: str, make: bool) -> tuple[bytes, str]:
    """Return this process's token and the problem that prevents it ("" if there is none)."""
    token = os.environ.get(REPLICA_VARIABLE, "")
    if 0 < len(token) < _MIN_CHARACTERS:
        return b"", f"{REPLICA_VARIABLE} has only {len(token)} characters"
    if token:
        return token.encode(), ""
    if "://" in location:
        return b"", f"{location} is not a folder that keeps a secret, and {REPLICA_VARIABLE} is not set"
    path = Path(location) / TOKEN_FILE
    try:
        return (make_token(path) if make else read_token(path)), ""
    except (DataError, OSError) as error:
        return b"", str(error)


def resolve_address(setting: str) -> str:
    """Return the address of checkpoint.replica_address; "auto" means this node's."""
    if setting != "auto":
        return setting
    # An agent knows the network of its node; a host's own name often resolves to loopback, or not at all.
    return os.environ.get("MEGASCALE_NODE_ADDRESS") or socket.gethostbyname(socket.gethostname())


def warn_if_reachable(addresses: Sequence[tuple[str, int]]) -> None:
    """Log the (address, port) of services that other machines can reach, and the protection that they have."""
    reachable = sorted({f"{address}:{port}" for address, port in addresses if not is_loopback(address)})
    if reachable:
        hidden = len(reachable) - _MAX_SHOWN
        log.warning(
            "checkpoint.replica_address: other machines reach the checkpoint services at %s%s; they require the "
            "replicas' token, and replicas are authenticated, not encrypted: keep them on a network that only the "
            "job's machines reach, or set checkpoint.replicas=false",
            ", ".join(reachable[:_MAX_SHOWN]),
            f" and {hidden} more" if hidden > 0 else "",
        )
