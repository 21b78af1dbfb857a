"""What is said of addresses that other machines reach: who listens there, what protects it, and how to close it."""

from __future__ import annotations

from megascale.config import ResilienceConfig
from megascale.core.addresses import is_loopback

_CLOSE = "if all nodes are on this machine, set resilience.listen=127.0.0.1"


def open_addresses(limits: ResilienceConfig, agents: tuple[str, int], api: str) -> tuple[str, ...]:
    """A sentence for each of the API, the agents' port and the agents' /metrics that is not on loopback.

    Args:
        limits: the settings in force.
        agents: (host, port) where agents are taken.
        api: base URL of the API.
    """
    told = () if is_loopback(limits.listen) else _driver(limits, agents[1], api)
    host = limits.agent_metrics.rpartition(":")[0].strip("[]")
    if host and not is_loopback(host):
        told += (
            f"resilience.agent_metrics={limits.agent_metrics}: whoever reaches a node there reads its figures, without "
            "a token and not encrypted, and can order nothing: keep it on a network that only the job's machines and "
            "their Prometheus reach, or listen on 127.0.0.1",
        )
    return told


def _driver(limits: ResilienceConfig, port: int, api: str) -> tuple[str, ...]:
    own = "a certificate of the job's own (RUN/driver/api.crt)"
    shown = own if limits.tls_certificate is None else f"resilience.tls_certificate={limits.tls_certificate}"
    return (
        f"resilience.listen={limits.listen}: other machines reach the API at {api}; it is kept by TLS with {shown} and "
        f"by the tokens in RUN/driver/token.read and token.act; {_CLOSE}",
        f"resilience.listen={limits.listen}: other machines reach the agents' port {port}; agents prove "
        "RUN/driver/token, and what they and the driver say to each other goes over TLS; the ranks' own connections "
        f"are not encrypted: keep those on a network that only the job's machines reach; {_CLOSE}",
    )
