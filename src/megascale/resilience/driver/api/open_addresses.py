"""What is said of addresses that other machines reach: who listens there, what protects it, and how to close it."""

from __future__ import annotations

from megascale.config import ResilienceConfig
from megascale.core.ports import is_loopback

_CLOSE = "if all nodes are on this machine, set resilience.listen=127.0.0.1"


def open_addresses(limits: ResilienceConfig, agents: tuple[str, int], api: str) -> tuple[str, ...]:
    """A sentence for the API and one for the agents' port, none where both are on loopback.

    Args:
        limits: the settings in force.
        agents: (host, port) where agents are taken.
        api: base URL of the API.
    """
    if is_loopback(limits.listen):
        return ()
    own = "a certificate of the job's own (RUN/driver/api.crt)"
    shown = own if limits.tls_certificate is None else f"resilience.tls_certificate={limits.tls_certificate}"
    return (
        f"resilience.listen={limits.listen}: other machines reach the API at {api}; it is kept by TLS with {shown} and "
        f"by the tokens in RUN/driver/token.read and token.act. {_CLOSE}",
        f"resilience.listen={limits.listen}: other machines reach the agents' port {agents[1]}; agents prove "
        "RUN/driver/token and every message is authenticated, but none is encrypted: keep the port on a network that "
        f"only the job's machines reach, or, {_CLOSE}",
    )
