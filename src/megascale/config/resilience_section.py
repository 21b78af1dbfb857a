"""The sections [resilience], [slurm] and [kubernetes]: fault tolerance of `megascale launch` and its cluster."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from megascale.config.base import MAX_COUNT, Section, expand_home

_KeyValue = Annotated[str, StringConstraints(pattern=r"^[^=\s]+=[^\s]*$")]
_EnvironmentVariable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*=")]
_VolumeMount = Annotated[str, StringConstraints(pattern=r"^(host:/[^:]*|claim:[a-z0-9.-]+):/[^:]+(:ro)?$")]
_BindMount = Annotated[str, StringConstraints(pattern=r"^/[^:,\n]*:/[^:,\n]*(:ro)?$")]
# MINUTES, MM:SS, HH:MM:SS, or DAYS-HH with optional minutes and seconds.
_SLURM_TIME_PATTERN = r"^([0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2})?$"
_ADDRESS_PATTERN = r"^(|(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5})$"  # HOST:PORT
_LABEL_PATTERN = r"^(|([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)$"


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
        None, description="PEM file with the API's certificate; default: the job makes one if listen is not loopback"
    )
    tls_key: str | None = Field(
        None, description="PEM file with the key of tls_certificate; readable by this user only"
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

    _expand_paths = field_validator("targets", "hosts", "placement", "environment", "tls_certificate", "tls_key")(
        expand_home
    )

    def make_metric_labels(self, run: str) -> dict[str, str]:
        """Return the labels of every metric of a run with this name."""
        return {"run": run, "job_name": self.job_name or run}

    @model_validator(mode="after")
    def _check_targets(self) -> ResilienceConfig:
        if self.targets and not (self.driver_metrics or self.agent_metrics):
            raise ValueError(
                f"resilience.targets={self.targets} would list no address; set resilience.driver_metrics or "
                "resilience.agent_metrics, such as 0.0.0.0:9400"
            )
        return self

    @model_validator(mode="after")
    def _check_tls_pair(self) -> ResilienceConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("resilience.tls_certificate and resilience.tls_key belong together; set both or neither")
        return self

    @model_validator(mode="after")
    def _check_quotes(self) -> ResilienceConfig:
        for key, value in (("ssh", self.ssh), ("sbatch", self.sbatch)):
            try:
                shlex.split(value)
            except ValueError as error:
                raise ValueError(
                    f"resilience.{key}={value!r} has unbalanced shell quotes ({error}); close each quotation"
                ) from None
        return self

    @model_validator(mode="after")
    def _check_lease(self) -> ResilienceConfig:
        if self.agent_lease is not None and self.agent_lease < 2 * self.interval:
            raise ValueError(
                f"resilience.agent_lease={self.agent_lease:g} is shorter than two heartbeats "
                f"(resilience.interval={self.interval:g}), so a late answer would end ranks; raise it to "
                f"{2 * self.interval:g} or more"
            )
        return self

    @model_validator(mode="after")
    def _check_patterns(self) -> ResilienceConfig:
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
        if self.checkpoints and self.checkpoints.count("{step}") != 1:
            raise ValueError(
                f"foreign.checkpoints={self.checkpoints!r} must have {{step}} once; write it where the digits of the "
                "step stand"
            )
        return self

    @model_validator(mode="after")
    def _check_command(self) -> ForeignConfig:
        if self.per_node is not None and not self.command:
            raise ValueError(
                f"foreign.per_node={self.per_node} without a command; add -- COMMAND to the command line, or set "
                "foreign.command"
            )
        return self


class SlurmConfig(Section):
    """Cluster slurm: options of the batch script, and the container of the nodes (docs/operators.md)."""

    account: str = Field("", description="account that is charged; empty: the user's default")
    partition: str = Field("", description="partition of the nodes; empty: the site's default")
    qos: str = Field("", description="quality of service; empty: the site's default")
    time: str = Field(
        "",
        pattern=_SLURM_TIME_PATTERN,
        description="time limit of one job: MINUTES, HH:MM:SS or DAYS-HH; empty: the partition's default",
    )
    constraint: str = Field("", description="features that nodes must have, such as `h100&ib`")
    reservation: str = Field("", description="reservation of the nodes")
    resubmission: Literal["sbatch", "requeue"] = Field(
        "sbatch",
        description="how training continues after the time limit: sbatch (the job submits the next one) or requeue "
        "(`scontrol requeue` of the same job, where nodes may not submit)",
    )
    attempts: int = Field(
        1,
        ge=1,
        le=10_000,
        description="jobs submitted as an array that run one after another, each up to the time limit, so that no job "
        "has to submit another; the remaining jobs are cancelled when training ends",
    )
    container: Literal["", "pyxis", "apptainer"] = Field(
        "", description="container runtime of agents and trainers; the driver runs outside of it. Empty: none"
    )
    image: str = Field(
        "", description="image of the container: docker://NAME:TAG or a file; pyxis takes registry#NAME:TAG too"
    )
    mounts: list[_BindMount] = Field(
        default_factory=list,
        description="mounts of the container, /HOST:/CONTAINER, with :ro for read-only; the run folder and the home "
        "folder are mounted always",
    )
    python: str = Field("python3", min_length=1, description="interpreter in the container")

    _expand_paths = field_validator("image")(expand_home)

    @model_validator(mode="after")
    def _check_container(self) -> SlurmConfig:
        if self.container and not self.image:
            raise ValueError(f"slurm.container={self.container} needs an image; set slurm.image")
        if self.image and not self.container:
            raise ValueError(f"slurm.image={self.image} has no runtime; set slurm.container to pyxis or apptainer")
        return self

    @model_validator(mode="after")
    def _check_attempts(self) -> SlurmConfig:
        if self.attempts > 1 and self.resubmission == "requeue":
            raise ValueError(
                f"slurm.attempts={self.attempts} continues in the next job of an array, and slurm.resubmission=requeue "
                "in the same job; set only one of them"
            )
        return self


class KubernetesConfig(Section):
    """Cluster kubernetes: the pods of nodes, one per node (docs/kubernetes.md)."""

    image: str = Field("", description="container image of the nodes, with Python and MegaScale; required")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="when a node pulls the image"
    )
    pull_secrets: list[str] = Field(
        default_factory=list, description="Secrets with the passwords of the image registry"
    )
    python: str = Field("python3", min_length=1, description="interpreter in the image")
    user: int = Field(
        1000,
        ge=0,
        le=(1 << 31) - 1,
        description="user and group id of the processes, which own the mounted volumes; 0: root, which a namespace "
        "with the restricted Pod Security Standard refuses",
    )
    pod_monitor: bool = Field(
        False, description="print a PodMonitor with the manifests; the cluster needs the Prometheus operator"
    )
    disruption_budget: bool = Field(
        False,
        description="print a PodDisruptionBudget with the manifests, which keeps resilience.nodes pods; it needs "
        "Kubernetes 1.21",
    )
    namespace: str = Field(
        "",
        pattern=r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$",
        description="namespace of the pods; default: the context's",
    )
    kubeconfig: str = Field(
        "",
        description="kubeconfig file; default: the service account of the driver's pod, else KUBECONFIG, "
        "~/.kube/config",
    )
    context: str = Field("", description="context of the kubeconfig; default: its current context")
    service_account: str = Field(
        "", description="service account of the nodes' pods, which need no rights; default: the namespace's"
    )
    one_a_node: bool = Field(
        True, description="at most one pod of the job per machine; false: as many as fit (tests, CPU)"
    )
    pod: str = Field(
        "",
        description="YAML file with metadata and spec that are merged into each node's pod; lists are merged by name "
        "(containers, env, volumes) or mountPath",
    )
    mounts: list[_VolumeMount] = Field(
        default_factory=list,
        description="volumes of each node: host:/PATH:/MOUNT or claim:NAME:/MOUNT (a volume claim), with :ro for "
        "read-only",
    )
    environment: list[_EnvironmentVariable] = Field(
        default_factory=list, description="NAME=VALUE for the environment of each node's processes"
    )
    resources: list[_KeyValue] = Field(
        default_factory=list,
        description="resources of a pod in addition to its GPUs, as requests and limits: cpu=90, memory=1500Gi, "
        "rdma/hca=8",
    )
    gpu_resource: str = Field(
        "nvidia.com/gpu", pattern=_LABEL_PATTERN, description="name of the GPU resource of the device plugin"
    )
    shm: str = Field(
        "",
        pattern=r"^([0-9]+[KMGT]i?)?$",
        description="size of /dev/shm, such as 64Gi; empty: the pod's memory limit, or the machine's allocatable "
        "memory if the pod has no limit",
    )
    host_network: bool = Field(
        False, description="pods use their machine's network, which RDMA without its own CNI requires"
    )
    node_selector: list[_KeyValue] = Field(default_factory=list, description="labels that machines must have: pool=gpu")
    tolerations: list[str] = Field(
        default_factory=list, description="taints that pods tolerate, in the form of kubectl: nvidia.com/gpu:NoSchedule"
    )
    switch_label: str = Field(
        "",
        pattern=_LABEL_PATTERN,
        description="label of machines that names their switch: pods use few switches, ranks are ordered by switch, "
        "and a spare under the same switch is preferred",
    )
    switch_required: bool = Field(False, description="require that all pods of the job are under one switch")
    priority_class: str = Field("", description="PriorityClass of the pods")
    queue: str = Field("", description="local queue of Kueue that admits the pods; empty: without Kueue")
    lease_seconds: float = Field(
        300.0,
        ge=2,
        description="seconds after which a driver that cannot renew its Lease ends its ranks and another driver may "
        "take over the job; must exceed the longest outage of the API server",
    )

    _expand_paths = field_validator("kubeconfig", "pod")(expand_home)
