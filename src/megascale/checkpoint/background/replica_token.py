"""The token of a run's replicas, which hosts prove to each other: never sent, so each host has it from elsewhere.

From the environment where the one who starts the ranks gives it to all hosts (MEGASCALE_REPLICA_TOKEN), as agents of a
launched job do; else from a file of mode 600 in the folder of the checkpoints, which all hosts see.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from megascale.checkpoint.object_collectives import Peers
from megascale.core.secrets import REPLICA_VARIABLE
from megascale.errors import DataError
from megascale.services.shared_token import make_token, read_token

TOKEN_FILE = "replica.token"
_LEAST = 32  # characters


def agree(peers: Peers, place: str, identity: str) -> tuple[str, str | None]:
    """(the token as hexadecimal digits, what is wrong, the same on all). Collective.

    Args:
        place: where checkpoints go, a path or a URL.
        identity: of the run's checkpoints, the same on all.
    """
    token, problem = b"", ""
    if peers.rank == 0:
        token, problem = _own(place, make=True)
    problem = peers.broadcast(problem, str)
    if not problem and peers.rank != 0:
        token, problem = _own(place, make=False)
    # What a token of 256 random bits makes of a name tells nothing of the token.
    mark = hmac.digest(token, f"replicas of {identity}".encode(), "sha256").hex() if token else ""
    told = peers.all_gather((problem, mark), tuple[str, str])
    wrong = next((f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text), None)
    if wrong is None and len({mark for _, mark in told}) > 1:
        others = [rank for rank, (_, mark) in enumerate(told) if mark != told[0][1]]
        wrong = f"ranks {others[:8]} have another token than rank 0"
    if wrong is not None:
        return "", (
            f"hosts that keep copies of each other's snapshots (checkpoint.replicas) need one token: {wrong}. Give "
            f"all ranks the same {REPLICA_VARIABLE} of at least {_LEAST} characters (openssl rand -hex 32), put "
            "checkpoint.location on a path that all hosts see, or set checkpoint.replicas=false"
        )
    return token.hex(), None


def _own(place: str, make: bool) -> tuple[bytes, str]:
    """This process's token, or what keeps it from one."""
    given = os.environ.get(REPLICA_VARIABLE, "")
    if given:
        problem = "" if len(given) >= _LEAST else f"{REPLICA_VARIABLE} has {len(given)} characters"
        return given.encode(), problem
    if "://" in place:
        return b"", f"{place} is no folder that keeps a secret, and {REPLICA_VARIABLE} is not set"
    path = Path(place) / TOKEN_FILE
    try:
        return (make_token(path) if make else read_token(path)), ""
    except (DataError, OSError) as error:
        return b"", str(error)
