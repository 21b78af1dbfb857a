"""What `megascale launch --cluster kubernetes` makes of the cluster it runs on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from megascale.config.base import Section, expand_home

_Pair = Annotated[str, StringConstraints(pattern=r"^[^=\s]+=[^\s]*$")]
_Assignment = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*=")]
_Mount = Annotated[str, StringConstraints(pattern=r"^(host:/[^:]*|claim:[a-z0-9.-]+):/[^:]+(:ro)?$")]
_Label = r"^(|([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)$"


class KubernetesConfig(Section):
    """Cluster kubernetes: the pods of nodes, one for each, and how they are had (docs/kubernetes.md)."""

    image: str = Field("", description="container image of the nodes, with Python and MegaScale; needed")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="when a node pulls the image"
    )
    pull_secrets: list[str] = Field(default_factory=list, description="Secrets with the registry's passwords")
    python: str = Field("python3", min_length=1, description="interpreter in the image")
    namespace: str = Field(
        "",
        pattern=r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$",
        description="where pods are made; default: the context's",
    )
    kubeconfig: str = Field(
        "", description="file with the way to the API; default: the driver's own pod's, else KUBECONFIG, ~/.kube/config"
    )
    context: str = Field("", description="which of the kubeconfig's contexts; default: its current one")
    service_account: str = Field("", description="of the nodes' pods, which need no rights; default: the namespace's")
    one_a_node: bool = Field(
        True, description="one pod of a job on a machine; false: as many as find room (tests, CPU)"
    )
    pod: str = Field(
        "",
        description="YAML file with a pod's metadata and spec that are merged into those of each node's pod, lists by "
        "name (containers, env, volumes) or mountPath",
    )
    mounts: list[_Mount] = Field(
        default_factory=list,
        description="volumes of each node: host:/PATH:/WHERE or claim:NAME:/WHERE (a claim of a volume), :ro behind",
    )
    environment: list[_Assignment] = Field(default_factory=list, description="NAME=VALUE for each node's processes")
    resources: list[_Pair] = Field(
        default_factory=list,
        description="what a pod asks for besides its GPUs, requests and limits alike: cpu=90, memory=1500Gi, "
        "rdma/hca=8",
    )
    gpu_resource: str = Field(
        "nvidia.com/gpu", pattern=_Label, description="name under which the device plugin gives GPUs"
    )
    shm: str = Field(
        "",
        pattern=r"^([0-9]+[KMGT]i?)?$",
        description="size of /dev/shm, such as 64Gi; empty: half of the pod's memory",
    )
    host_network: bool = Field(
        False, description="pods use their machine's network, as RDMA without a CNI of its own needs"
    )
    node_selector: list[_Pair] = Field(default_factory=list, description="labels that machines must have: pool=gpu")
    tolerations: list[str] = Field(
        default_factory=list, description="taints that pods bear, as kubectl writes them: nvidia.com/gpu:NoSchedule"
    )
    switch_label: str = Field(
        "",
        pattern=_Label,
        description="label of machines that names their switch: pods go under few of them, ranks are ordered by it, a "
        "spare under the same one is taken first",
    )
    switch_required: bool = Field(False, description="all pods of the job under one switch, or none")
    priority_class: str = Field("", description="PriorityClass of the pods")
    queue: str = Field("", description="Kueue's local queue that admits the pods; empty: without Kueue")
    lease_seconds: float = Field(
        300.0,
        ge=2,
        description="seconds after which a driver that cannot renew its Lease ends its ranks, and another may take the "
        "job; longer than the API server is ever away",
    )

    _paths = field_validator("kubeconfig", "pod")(expand_home)
