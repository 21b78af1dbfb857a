"""Token, address and partner with which hosts exchange replicas.

Hosts prove to each other that they know the token, and never send it. The agents of a launched job pass the token to
all hosts in the environment (MEGASCALE_REPLICA_TOKEN). Otherwise the token is in a file of mode 600 in the checkpoints
folder, which all hosts see.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megascale.checkpoint.background.replica import pair_hosts
from megascale.checkpoint.object_collectives import Peers
from megascale.core.addresses import is_loopback
from megascale.core.secrets import REPLICA_VARIABLE
from megascale.errors import DataError
from megascale.services.shared_token import make_token, read_token

log = logging.getLogger(__name__)
TOKEN_FILE = "replica.token"
_MIN_TOKEN_CHARACTERS = 32
_MAX_SHOWN = 4  # addresses that a message names


class HostService(NamedTuple):
    """Checkpoint service of a host: its name, address and port for replicas, and the host's fault domain."""

    name: str
    address: str
    port: int
    domain: str


def agree_on_token(peers: Peers, location: str, identity: str) -> tuple[str, str | None]:
    """Find the token and check that all processes have the same one. Collective.

    Args:
        location: path or URL of the checkpoints folder.
        identity: identity of the checkpoints folder, the same on all processes.

    Returns:
        The token as hexadecimal digits and None, or an empty text and an error message, which is the same on all
        processes.
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
        fingerprint = hmac.digest(token, f"replicas of {identity}".encode(), "sha256").hex()
    else:
        fingerprint = ""
    answers = peers.all_gather((problem, fingerprint), tuple[str, str])
    problems = [f"rank {rank}: {rank_problem}" for rank, (rank_problem, _) in enumerate(answers) if rank_problem]
    _, first_fingerprint = answers[0]
    differing_ranks = [
        rank for rank, (_, rank_fingerprint) in enumerate(answers) if rank_fingerprint != first_fingerprint
    ]
    failure = ""
    if problems:
        failure = problems[0]
    elif differing_ranks:
        failure = f"ranks {differing_ranks[:8]} have another token than rank 0"
    if failure:
        return "", (
            f"hosts that keep copies of each other's snapshots (checkpoint.replicas) need one token: {failure}. Give "
            f"all ranks the same {REPLICA_VARIABLE} of at least {_MIN_TOKEN_CHARACTERS} characters "
            "(openssl rand -hex 32), put checkpoint.location on a path that all hosts see, or set "
            "checkpoint.replicas=false"
        )
    return token.hex(), None


def _find_token(location: str, make: bool) -> tuple[bytes, str]:
    """Return this process's token and an empty text, or an empty token and an error message.

    Args:
        make: whether to create the file of the token if it is missing.
    """
    token = os.environ.get(REPLICA_VARIABLE, "")
    if 0 < len(token) < _MIN_TOKEN_CHARACTERS:
        return b"", f"{REPLICA_VARIABLE} has only {len(token)} characters"
    if token:
        return token.encode(), ""
    if "://" in location:
        return b"", f"{location} is not a local folder, where a secret file could be, and {REPLICA_VARIABLE} is not set"
    path = Path(location) / TOKEN_FILE
    try:
        return (make_token(path) if make else read_token(path)), ""
    except (DataError, OSError) as error:
        return b"", str(error)


def resolve_address(setting: str) -> str:
    """Return the address that checkpoint.replica_address gives. "auto" means the address of this node."""
    if setting != "auto":
        return setting
    # An agent knows the network address of its node. A host's own name often resolves to loopback, or not at all.
    return os.environ.get("MEGASCALE_NODE_ADDRESS") or socket.gethostbyname(socket.gethostname())


def warn_if_reachable(addresses: Sequence[tuple[str, int]]) -> None:
    """Warn if other machines can reach some of the services' addresses and ports, and name their protection."""
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


def find_peer_address(hosts: Sequence[HostService], service_name: str) -> tuple[str, int] | None:
    """Return address and port of the service that keeps a host's replicas, or None if there is no other host.

    Args:
        hosts: service of each process's host.
        service_name: name of the host's own service.
    """
    hosts_by_name = {host.name: host for host in hosts}
    names = list(hosts_by_name)
    if len(names) == 1:
        return None
    # A host without a fault domain is a domain by itself.
    domains = [host.domain or host.name for host in hosts_by_name.values()]
    partners = pair_hosts(domains)
    partner_name = names[partners[names.index(service_name)]]
    partner = hosts_by_name[partner_name]
    return partner.address, partner.port
