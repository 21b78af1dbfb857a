"""The sections [resilience] and [foreign]: fault tolerance of `megascale launch`, and trainers of other packages.

The driver of a job controls an agent per node, and each agent starts the trainers of its node. A *foreign* trainer is a
command of another package.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from megascale.config.base import MAX_COUNT, Section, expand_home

_ADDRESS_PATTERN = r"^(|(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5})$"  # HOST:PORT, or empty


class ResilienceConfig(Section):
    """Fault tolerance (`megascale launch`): nodes, heartbeats, recovery and its limits."""

    checksum_interval: int = Field(
        0,
        ge=0,
        le=MAX_COUNT,
        description="steps between checksums of the weights, compared between data-parallel copies; 0: off",
    )
    replay_interval: Literal["auto"] | Annotated[int, Field(ge=0, le=MAX_COUNT)] = Field(
        "auto",
        description="steps between replays: each data-parallel replica repeats a micro-batch of another replica, and "
        "both results must be equal bit by bit; needs parallel.data of 2 or more and kernels.deterministic; 0: off; "
        "auto: 50 or more, so that replays take at most 1% of the time, where they are possible and "
        "kernels.deterministic is on",
    )
    replay_action: Literal["alert", "stop", "evict"] = Field(
        "evict",
        description="action if a replay's results differ: alert (record the difference and continue); stop (end and "
        "wait for a person; a resume skips checkpoints that no replay has confirmed); evict (end, skip these "
        "checkpoints, and continue without the node)",
    )
    faults: bool = Field(False, description="allow `megascale faults inject` to inject faults into this run's trainers")
    cluster: str = Field(
        "local",
        min_length=1,
        description="source of nodes: local (processes of this machine), ssh (--hosts), slurm, kubernetes, manual "
        "(agents that the user starts) or a registered cluster",
    )
    hosts: str = Field(
        "", description="cluster ssh: file with one machine per line: [user@]host[:port] gpus=8 interface=eth1"
    )
    ssh: str = Field("ssh", min_length=1, description="cluster ssh: the ssh command, such as `ssh -F cluster.config`")
    sbatch: str = Field(
        "", description="cluster slurm: additional options of sbatch, such as `--partition=p --time=1-0`"
    )
    advertise: str = Field(
        "",
        description="address at which other machines reach the driver, if it differs from listen (NAT, several "
        "networks); default: if listen is all addresses, the address on the route to each machine",
    )
    nodes: int = Field(
        1, ge=1, le=30_000, description="nodes that hold ranks; on one machine a node is a group of processes"
    )
    spares: int = Field(0, ge=0, le=30_000, description="standby nodes with all modules imported")
    preload: bool = Field(
        True,
        description="import this package's trainer on each node in advance; false for another trainer's command",
    )
    test_spares: bool = Field(
        True, description="run the self-checks on spares while they wait, and remove a spare that fails"
    )
    prepare_spares: bool = Field(
        True,
        description="start processes on spares that wait for ranks: they prepare their GPUs, run a step of a small "
        "model, which compiles the run's kernels, and page-lock memory for snapshots; needs keep_seconds above 0",
    )
    placement: str | None = Field(
        None,
        min_length=1,
        description="file that assigns ranks to nodes, from `megascale network placement --names FILE --out`; "
        "default: nodes in the order of their names",
    )
    environment: str | None = Field(
        None,
        min_length=1,
        description="file of NAME=VALUE lines for the environment of all trainers, from `megascale network tune --out`",
    )
    interval: float = Field(1.0, gt=0, description="seconds between an agent's heartbeats")
    window: float = Field(5.0, gt=0, description="seconds without a heartbeat after which a node counts as lost")
    first_step: float = Field(
        600.0, gt=0, description="seconds within which start, loading and the first step must finish"
    )
    grace_period: float = Field(60.0, gt=0, description="seconds that trainers have to save after a request to stop")
    keep_seconds: float = Field(
        3.0,
        ge=0,
        description="seconds within which ranks that survive a fault must leave the failed attempt. Ranks that leave "
        "in time keep their processes, weights and optimizer state. 0: every recovery starts new processes",
    )
    standby_processes: bool = Field(
        False,
        description="keep a second process per rank that has imported its modules, prepared its GPU and run a step of "
        "a small model, and that replaces the rank's process after a fault; takes about 1 GB of each GPU",
    )
    orphan: float = Field(
        600.0,
        gt=0,
        description="seconds that an agent lets training continue without a driver before it stops the trainers",
    )
    agent_lease: float | None = Field(
        None,
        ge=0.5,
        description="seconds without an answer from the driver after which an agent ends its ranks, so that they may "
        "start elsewhere although the agent is unreachable; default: 8 on Kubernetes, elsewhere never",
    )
    lease: float = Field(
        3.0, gt=0, description="seconds without a sign of the driver after which one on another host may take over"
    )
    budget_seconds: float = Field(
        3600.0, gt=0, description="seconds over which the limits on retries, respawns and replacements count"
    )
    retries: int = Field(
        5, ge=0, le=MAX_COUNT, description="maximum number of times that a node's processes are forked again in place"
    )
    respawns: int = Field(
        2, ge=0, le=MAX_COUNT, description="maximum number of times that a node's agent and fork server are restarted"
    )
    replacements: int = Field(
        10, ge=0, le=MAX_COUNT, description="maximum number of nodes that are replaced by spares or new nodes"
    )
    replenish_wait: float = Field(
        600.0, ge=0, description="seconds to wait for new nodes when no spare is available; 0: request none"
    )
    min_data: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="smallest data-parallel size to which the job may shrink when nodes are missing",
    )
    continue_replicas: bool = Field(
        False,
        description="go on with fewer data-parallel replicas as soon as nodes are lost, from the copies of the state "
        "in other hosts' memory, and take replacements in at a later step boundary; needs checkpoint.replicas and "
        "checkpoint.memory_interval. Results equal an undisturbed run's up to rounding, not to the bit",
    )
    max_missing_replicas: int = Field(
        1, ge=1, le=1_000_000, description="largest number of replicas that continue_replicas goes on without"
    )
    max_missing_seconds: float = Field(
        3600.0,
        gt=0,
        description="seconds after which continue_replicas stops the job to wait for the missing replicas, as it does "
        "without continue_replicas",
    )
    no_progress_limit: int = Field(
        5,
        ge=1,
        le=MAX_COUNT,
        description="consecutive starts without a new step after which the job stops and waits for a person",
    )
    slow_action: Literal["alert", "diagnose", "evict"] = Field(
        "alert",
        description="action if spans show that a machine is permanently slow: alert; diagnose (stop and test the "
        "machine, once); evict",
    )
    slow_least: float = Field(
        0.1, ge=0.03, le=10, description="smallest slow-down, as a fraction, for diagnose and evict; below it an alert"
    )
    listen: str = Field("127.0.0.1", description="address on which the driver and its API listen")
    port: int = Field(
        0, ge=0, le=65535, description="port for agents; 0: any free port, written to RUN/driver/contact.json"
    )
    api_port: int = Field(
        0, ge=0, le=65535, description="port of the HTTP API; 0: any free port, written to RUN/driver/contact.json"
    )
    agent_metrics: str = Field(
        "",
        pattern=_ADDRESS_PATTERN,
        description="HOST:PORT on which each agent serves /metrics and /health without authentication; empty: off",
    )
    driver_metrics: str = Field(
        "",
        pattern=_ADDRESS_PATTERN,
        description="HOST:PORT on which the driver serves /metrics and /health without authentication; empty: off",
    )
    targets: str = Field(
        "",
        description="folder in which the driver writes NAME.json with the addresses of driver_metrics and "
        "agent_metrics, for Prometheus' file-based discovery; empty: none",
    )
    otlp: str = Field(
        "",
        pattern=r"^(|https?://[^\s/]+(/[^\s]*)?)$",
        description="URL of an OpenTelemetry collector (OTLP over HTTP), such as http://collector:4318, to which the "
        "driver sends its metrics, and a trace of each recovery; needs the extra otel. Empty: none",
    )
    otlp_interval: float = Field(15.0, ge=0.1, description="seconds between two exports to resilience.otlp")
    job_name: str = Field(
        "",
        max_length=100,
        description="label job_name of every metric, which groups runs; default: the run's name",
    )
    tls_certificate: str | None = Field(
        None,
        min_length=1,
        description="PEM file with the API's certificate; default: the job makes one if listen is not loopback",
    )
    tls_key: str | None = Field(
        None, min_length=1, description="PEM file with the key of tls_certificate; readable by this user only"
    )
    log_patterns: list[str] = Field(
        default_factory=lambda: [
            r"CUDA error",
            r"NCCL (error|WARN)",
            r"out of memory",
            r"[Ss]egmentation fault",
            r"No space left on device",
            r"Traceback \(most recent call last\)",
        ],
        description="regular expressions; matching lines of trainers' logs are sent to the driver",
    )

    @field_validator("listen", "advertise")
    @classmethod
    def _remove_brackets(cls, address: str) -> str:
        """Return an IPv6 address without the brackets that it has before a port."""
        if address.startswith("[") and address.endswith("]"):
            return address[1:-1]
        return address

    _expand_paths = field_validator("targets", "hosts", "placement", "environment", "tls_certificate", "tls_key")(
        expand_home
    )

    def make_metric_labels(self, run: str) -> dict[str, str]:
        """Return the labels of every metric of a run with this name."""
        return {"run": run, "job_name": self.job_name or run}

    @model_validator(mode="after")
    def _check_targets(self) -> ResilienceConfig:
        """Refuse `targets` without an address to list."""
        if self.targets and not (self.driver_metrics or self.agent_metrics):
            raise ValueError(
                f"resilience.targets={self.targets} would list no address; set resilience.driver_metrics or "
                "resilience.agent_metrics, such as 0.0.0.0:9400"
            )
        return self

    @model_validator(mode="after")
    def _check_tls_pair(self) -> ResilienceConfig:
        """Refuse a certificate without its key, and a key without its certificate."""
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("resilience.tls_certificate and resilience.tls_key belong together; set both or neither")
        return self

    @model_validator(mode="after")
    def _check_quotes(self) -> ResilienceConfig:
        """Refuse commands and options that a shell could not split into words."""
        for key, value in (("ssh", self.ssh), ("sbatch", self.sbatch)):
            try:
                shlex.split(value)
            except ValueError as error:
                raise ValueError(
                    f"resilience.{key}={value!r} has unbalanced shell quotes ({error}); close each quotation"
                ) from None
        return self

    @model_validator(mode="after")
    def _check_standby(self) -> ResilienceConfig:
        """Refuse standby processes if every recovery starts new processes."""
        if self.standby_processes and self.keep_seconds == 0:
            raise ValueError(
                "resilience.standby_processes=true needs resilience.keep_seconds above 0, since otherwise no recovery "
                "uses them; set --resilience.keep_seconds=3"
            )
        return self

    @model_validator(mode="after")
    def _check_lease(self) -> ResilienceConfig:
        """Refuse an agent's lease that one late heartbeat would exceed."""
        if self.agent_lease is not None and self.agent_lease < 2 * self.interval:
            raise ValueError(
                f"resilience.agent_lease={self.agent_lease:g} is shorter than two heartbeats "
                f"(resilience.interval={self.interval:g}), so a late answer would end ranks; raise it to "
                f"{2 * self.interval:g} or more"
            )
        return self

    @model_validator(mode="after")
    def _check_patterns(self) -> ResilienceConfig:
        """Refuse log patterns that are not regular expressions."""
        for pattern in self.log_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"resilience.log_patterns has {pattern!r}, which is not a regular expression: {error}"
                ) from None
        return self


class ForeignConfig(Section):
    """Another trainer's command under the driver (`megascale launch --per-node K -- COMMAND`)."""

    command: list[str] = Field(
        default_factory=list, description="command of each rank, such as python train.py; empty: this package's trainer"
    )
    per_node: int | None = Field(None, ge=1, le=4096, description="ranks per node; default: one per GPU")
    folder: str = Field("", description="working directory of the command; default: the launching shell's")
    patterns: list[str] = Field(
        default_factory=list,
        description="regular expressions of progress lines, tried before the shipped ones; groups: step, and "
        "optionally loss, grad_norm, tokens_per_second",
    )
    checkpoints: str = Field(
        "",
        description="path of a file or folder that exists once a checkpoint is complete, with {step} for its step, "
        "such as out/checkpoint-{step}/trainer_state.json; relative to foreign.folder; * matches any text in a name",
    )
    pause: float = Field(
        0.0,
        ge=0,
        description="longest pause in seconds that is not a hang, such as a save or an evaluation; 0: 2.5 times the "
        "longest usual step, at least 10",
    )

    _expand_paths = field_validator("folder")(expand_home)

    @model_validator(mode="after")
    def _check_patterns(self) -> ForeignConfig:
        """Refuse patterns of progress lines that are invalid, match every line, or lack a group for the step."""
        for pattern in self.patterns:
            try:
                expression = re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"foreign.patterns has {pattern!r}, which is not a regular expression: {error}"
                ) from None
            groups = expression.groupindex
            if expression.search("") is not None:
                raise ValueError(
                    f"foreign.patterns has {pattern!r}, which matches an empty line and so hides the lines of other "
                    "patterns; write + instead of * after the digits"
                )
            if "step" not in groups:
                raise ValueError(
                    f"foreign.patterns has {pattern!r} without a group for the step; write (?P<step>[0-9]+) where the "
                    "number of the step stands"
                )
            if "epoch_steps" in groups and "epoch" not in groups:
                raise ValueError(
                    f"foreign.patterns has {pattern!r} with a group epoch_steps but none for the epoch; write "
                    "(?P<epoch>[0-9]+) where the number of the epoch stands"
                )
        return self

    @model_validator(mode="after")
    def _check_checkpoints(self) -> ForeignConfig:
        """Refuse a path of checkpoints without exactly one place for the step."""
        if self.checkpoints and self.checkpoints.count("{step}") != 1:
            raise ValueError(
                f"foreign.checkpoints={self.checkpoints!r} must have {{step}} once; write it where the digits of the "
                "step stand"
            )
        return self

    @model_validator(mode="after")
    def _check_command(self) -> ForeignConfig:
        """Refuse a number of ranks per node without a command."""
        if self.per_node is not None and not self.command:
            raise ValueError(
                f"foreign.per_node={self.per_node} without a command; add -- COMMAND to the command line, or set "
                "foreign.command"
            )
        return self
