"""The section [resilience]: training that runs itself."""

from __future__ import annotations

import re
import shlex
from typing import Literal

from pydantic import Field, field_validator, model_validator

from megascale.config.base import MAX_COUNT, Section, expand_home


class ResilienceConfig(Section):
    """Training that runs itself (`megascale launch`): nodes, heartbeats, and how far to go before giving up."""

    checksum_interval: int = Field(
        0,
        ge=0,
        le=MAX_COUNT,
        description="steps between checksums of the weights, compared between data-parallel copies; 0: none",
    )
    faults: bool = Field(False, description="let `megascale faults inject` break this run's trainers from inside")
    cluster: str = Field(
        "local",
        min_length=1,
        description="where nodes come from: local (processes of this machine), ssh (--hosts), slurm, kubernetes, "
        "manual (agents that somebody else starts) or a registered one",
    )
    hosts: str = Field(
        "", description="cluster ssh: file with a machine a line: [user@]host[:port] gpus=8 interface=eth1"
    )
    ssh: str = Field("ssh", min_length=1, description="cluster ssh: the command, such as `ssh -F cluster.config`")
    sbatch: str = Field("", description="cluster slurm: more of sbatch's options, such as `--partition=p --time=1-0`")
    advertise: str = Field(
        "",
        description="address at which other machines reach the driver, where it is not listen (NAT, several networks); "
        "default: with listen on all addresses, the one that leads to each machine",
    )
    nodes: int = Field(
        1, ge=1, le=30_000, description="nodes that hold ranks; on one machine a node is a few processes"
    )
    spares: int = Field(0, ge=0, le=30_000, description="nodes that stand by with everything imported")
    test_spares: bool = Field(True, description="have spares run the self-checks while they wait; one that fails goes")
    placement: str | None = Field(
        None,
        min_length=1,
        description="file of `megascale network placement --names FILE --out`: which node holds which ranks; default: "
        "nodes in the order of their names",
    )
    environment: str | None = Field(
        None,
        min_length=1,
        description="file of NAME=VALUE lines for every trainer's environment, as `megascale network tune --out` "
        "writes it",
    )
    interval: float = Field(1.0, gt=0, description="seconds between an agent's heartbeats")
    window: float = Field(5.0, gt=0, description="seconds without a heartbeat after which a node counts as lost")
    first_step: float = Field(600.0, gt=0, description="seconds that start, loading and the first step may take")
    grace_period: float = Field(60.0, gt=0, description="seconds that trainers get to save when they are asked to stop")
    orphan: float = Field(
        600.0, gt=0, description="seconds an agent lets training go on without a driver before it stops it"
    )
    agent_lease: float | None = Field(
        None,
        ge=0.5,
        description="seconds after which an agent that the driver does not answer ends its ranks, so that they may be "
        "started elsewhere while nobody reaches it; unset: 8 on Kubernetes, elsewhere never",
    )
    lease: float = Field(3.0, gt=0, description="seconds after which another host's silent driver may be replaced")
    budget_seconds: float = Field(3600.0, gt=0, description="time over which the budgets below count")
    retries: int = Field(5, ge=0, le=MAX_COUNT, description="times a node's processes are forked again in place")
    respawns: int = Field(2, ge=0, le=MAX_COUNT, description="times a node's agent and fork server are started again")
    replacements: int = Field(10, ge=0, le=MAX_COUNT, description="nodes that may be replaced by spares or new ones")
    replenish_wait: float = Field(
        600.0, ge=0, description="seconds to wait for new nodes when no spare is left; 0: do not ask for any"
    )
    min_data: int = Field(1, ge=1, le=1_000_000, description="data parallelism may shrink to this when nodes stay away")
    no_progress_limit: int = Field(
        5, ge=1, le=MAX_COUNT, description="starts in a row without one new step after which the job stops for a person"
    )
    slow_action: Literal["alert", "diagnose", "evict"] = Field(
        "alert",
        description="what follows when spans show a machine to be slow for good: alert a person, diagnose (stop and "
        "test it, once), or evict it",
    )
    slow_least: float = Field(
        0.1, ge=0.03, le=10, description="share by which it must be slower for that; below it an alert"
    )
    listen: str = Field("127.0.0.1", description="address where the driver takes agents and the API")
    port: int = Field(0, ge=0, le=65535, description="port for agents; 0: any, written to RUN/driver/contact.json")
    api_port: int = Field(0, ge=0, le=65535, description="port of the HTTP API; 0: any, as above")
    agent_metrics: str = Field(
        "",
        pattern=r"^(|(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5})$",
        description="HOST:PORT on which each agent answers /metrics and /health, to whoever asks; empty: nowhere",
    )
    tls_certificate: str | None = Field(
        None, description="PEM file that the API shows; default: one of the job's own where listen is not loopback"
    )
    tls_key: str | None = Field(None, description="PEM file with its key; readable by this user only")
    log_patterns: list[str] = Field(
        default_factory=lambda: [
            r"CUDA error",
            r"NCCL (error|WARN)",
            r"out of memory",
            r"[Ss]egmentation fault",
            r"No space left on device",
            r"Traceback \(most recent call last\)",
        ],
        description="regular expressions; matching lines of trainers' logs go to the driver",
    )

    _paths = field_validator("hosts", "placement", "environment", "tls_certificate", "tls_key")(expand_home)

    @model_validator(mode="after")
    def _pair(self) -> ResilienceConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("resilience.tls_certificate and resilience.tls_key belong together; give both or neither")
        return self

    @model_validator(mode="after")
    def _quotes(self) -> ResilienceConfig:
        for key, value in (("ssh", self.ssh), ("sbatch", self.sbatch)):
            try:
                shlex.split(value)
            except ValueError as error:
                raise ValueError(
                    f"resilience.{key}={value!r} is not quoted as a shell reads it ({error}); close each quotation"
                ) from None
        return self

    @model_validator(mode="after")
    def _leases(self) -> ResilienceConfig:
        if self.agent_lease is not None and self.agent_lease < 2 * self.interval:
            raise ValueError(
                f"resilience.agent_lease={self.agent_lease:g} is shorter than two heartbeats "
                f"(resilience.interval={self.interval:g}): one that is late would end ranks; raise it to "
                f"{2 * self.interval:g} or more"
            )
        return self

    @model_validator(mode="after")
    def _patterns(self) -> ResilienceConfig:
        for pattern in self.log_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"resilience.log_patterns has {pattern!r}, no regular expression: {error}") from None
        return self
