"""The sections [slurm] and [kubernetes]: the clusters on which `megascale launch` starts agents and trainers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from megascale.config.base import Section, expand_home

# Types of list items: KEY=VALUE, NAME=VALUE, VOLUME:/MOUNT[:ro] and /HOST:/CONTAINER[:ro].
_KeyValue = Annotated[str, StringConstraints(pattern=r"^[^=\s]+=[^\s]*$")]
_EnvironmentVariable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*=")]
_VolumeMount = Annotated[str, StringConstraints(pattern=r"^(host:/[^:]*|claim:[a-z0-9.-]+):/[^:]+(:ro)?$")]
_BindMount = Annotated[str, StringConstraints(pattern=r"^/[^:,\n]*:/[^:,\n]*(:ro)?$")]
# MINUTES, MM:SS, HH:MM:SS, or DAYS-HH with optional minutes and seconds.
_SLURM_TIME_PATTERN = r"^([0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2})?$"
# Name of a Kubernetes label or resource, with an optional prefix: [PREFIX/]NAME, or empty.
_LABEL_PATTERN = r"^(|([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)$"


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
        """Refuse a container runtime without an image, and an image without a runtime."""
        if self.container and not self.image:
            raise ValueError(f"slurm.container={self.container} needs an image; set slurm.image")
        if self.image and not self.container:
            raise ValueError(f"slurm.image={self.image} has no runtime; set slurm.container to pyxis or apptainer")
        return self

    @model_validator(mode="after")
    def _check_attempts(self) -> SlurmConfig:
        """Refuse an array of jobs together with requeueing of one job."""
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
