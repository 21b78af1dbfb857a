"""The objects of a job in Kubernetes: the pods of nodes, the Secret, and the ConfigMap that owns all objects.

The ConfigMap also has the block list. An agent reads all facts about its job from its pod's spec, the Secret and the
downward API.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megascale.config import Config, KubernetesConfig
from megascale.config.text_files import read_text
from megascale.core.addresses import is_loopback
from megascale.core.python_process import module_command
from megascale.core.secrets import PASSWORD_VARIABLE, REPLICA_VARIABLE
from megascale.errors import ConfigError, DataError
from megascale.resilience.cluster.base import format_address
from megascale.resilience.cluster.kubernetes_api import Json, KubernetesApi, KubernetesError
from megascale.resilience.cluster.kubernetes_table import SLOT_LABEL
from megascale.resilience.cluster.remote import INHERITED_PREFIXES

JOB_LABEL = "megascale.dev/job"
ROLE_LABEL = "megascale.dev/role"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
DRIVER_ANNOTATION = "megascale.dev/driver"  # address of the driver
EPOCH_ANNOTATION = "megascale.dev/epoch"  # epoch of the driver
CONTAINER_NAME = "agent"
AGENT_MODULE = "megascale.resilience.agent.pod"
SECRET_FOLDER = "/etc/megascale/secret"
ANNOTATIONS_FOLDER = "/etc/megascale/pod"
STATE_FOLDER = "/var/lib/megascale"
TEMPORARY_FOLDER = "/tmp"  # also the home folder, where compilers write their caches
EXTRA_GRACE = 15  # seconds that a pod has to end beyond resilience.grace_period
BLOCKED_KEY = "blocked.json"  # key of the ConfigMap with {machine: reason}
SECRET_VARIABLES = (PASSWORD_VARIABLE, REPLICA_VARIABLE)
_HOSTNAME = "kubernetes.io/hostname"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_TAINT = re.compile(r"(?P<key>[^=:\s]+)(=(?P<value>[^:\s]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")


def make_object_name(job: str) -> str:
    """Return the name of a job's ConfigMap, Secret and Lease. Raises ConfigError for a name unfit for Kubernetes."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,45}[a-z0-9])?", job):
        raise ConfigError(
            f"train.name={job} cannot name objects of Kubernetes: at most 47 small letters, digits, hyphens, such as "
            f"--train.name={re.sub('[^a-z0-9]+', '-', job.lower()).strip('-')[:47] or 'job'}"
        )
    return f"megascale-{job}"


def make_labels(job: str, role: str) -> dict[str, str]:
    """Return the labels of a job's objects."""
    return {
        "app.kubernetes.io/name": "megascale",
        "app.kubernetes.io/managed-by": "megascale",
        "app.kubernetes.io/instance": job,
        JOB_LABEL: job,
        ROLE_LABEL: role,
    }


def list_inherited_secrets() -> list[str]:
    """Return the names of the secrets in this process's environment that nodes receive through the Secret."""
    return [name for name in SECRET_VARIABLES if os.environ.get(name)]


def read_inherited_variables() -> dict[str, str]:
    """Return the environment variables of this process that nodes receive, by name. Images set all other variables."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(INHERITED_PREFIXES)}


# The ConfigMap and the Secret -----------------------------------------------------------------------------------------


class JobObjects:
    """The ConfigMap and the Secret of a job on the server.

    Attributes:
        owner: reference to the ConfigMap; all objects of the job are deleted with it.
        blocked: reasons by the names of machines that the job must not get.
    """

    def __init__(self, api: KubernetesApi, job: str) -> None:
        self._api = api
        self._job = job
        self._name = make_object_name(job)
        self.owner: Json | None = None
        self.blocked: dict[str, str] = {}

    def prepare(self, controller: Json | None) -> None:
        """Find or create the ConfigMap and read the block list. Raises KubernetesError.

        controller: reference to the object that owns the ConfigMap.
        """
        try:
            config_map = self._api.call("GET", self._api.path("configmaps", self._name))
        except KubernetesError as error:
            if error.status != 404:
                raise
            config_map = self._api.call("POST", self._api.path("configmaps"), make_config_map(self._job, controller))
        metadata = config_map["metadata"]
        self.owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": metadata["name"], "uid": metadata["uid"]}
        self.blocked.update(_parse_blocked(config_map))

    def write_secret(self, token: bytes) -> None:
        """Create or replace the Secret with the job's token. Raises KubernetesError."""
        body = make_secret(self._job, token, self.owner)
        try:
            self._api.call("POST", self._api.path("secrets"), body)
        except KubernetesError as error:
            if error.status != 409:
                raise
            self._api.call("PUT", self._api.path("secrets", self._name), body)

    def write_blocked(self, blocked: Mapping[str, str]) -> None:
        """Write the block list into the ConfigMap, which outlives the driver. Raises KubernetesError."""
        text = json.dumps(dict(sorted(blocked.items())), indent=1)
        self._api.call("PATCH", self._api.path("configmaps", self._name), {"data": {BLOCKED_KEY: text}})


def make_config_map(job: str, controller: Json | None = None) -> Json:
    """Return the ConfigMap with an empty block list."""
    metadata = _make_metadata(job, controller)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {BLOCKED_KEY: "{}"}}


def make_secret(job: str, token: bytes, owner: Json | None = None) -> Json:
    """Return the Secret with the job's token and the secrets in this process's environment."""
    values = {"token": token} | {name: os.environ[name].encode() for name in list_inherited_secrets()}
    data = {name: base64.b64encode(value).decode() for name, value in values.items()}
    metadata = _make_metadata(job, owner)
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}


def _make_metadata(job: str, owner: Json | None) -> Json:
    metadata: Json = {"name": make_object_name(job), "labels": make_labels(job, "job")}
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    return metadata


def _parse_blocked(config_map: Json) -> dict[str, str]:
    """Return the block list of a ConfigMap, {} if a user has made it malformed."""
    try:
        blocked = json.loads((config_map.get("data") or {}).get(BLOCKED_KEY) or "{}")
        return {str(name): str(reason) for name, reason in blocked.items()}
    except (ValueError, AttributeError):
        return {}


def find_controller(api: KubernetesApi, pod: str) -> Json | None:
    """Return a reference to the Job, StatefulSet or JobSet that controls the driver's pod, None if there is none."""
    try:
        pod_object = api.call("GET", api.path("pods", pod))
    except KubernetesError:
        return None
    for owner in pod_object["metadata"].get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") in ("Job", "StatefulSet", "JobSet"):
            return {key: owner[key] for key in ("apiVersion", "kind", "name", "uid")}
    return None


# The pod of a node ----------------------------------------------------------------------------------------------------


def read_patch(settings: KubernetesConfig) -> Json:
    """Return the patch in the file `kubernetes.pod`, {} without one. Raises DataError for a malformed file."""
    if not settings.pod:
        return {}
    import yaml

    try:
        patch = yaml.safe_load(read_text(Path(settings.pod)))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"kubernetes.pod={settings.pod} cannot be read: {error}") from None
    if not isinstance(patch, dict) or not set(patch) <= {"metadata", "spec", "apiVersion", "kind"}:
        raise DataError(
            f"kubernetes.pod={settings.pod} is not a patch of a pod: it must have metadata or spec, or both"
        )
    return {key: value for key, value in patch.items() if key in ("metadata", "spec")}


def make_pod(
    config: Config,
    name: str,
    gpus: int,
    *,
    slot: str = "",
    machine: str = "",
    avoid: Iterable[str] = (),
    driver: tuple[str, int] | None = None,
    epoch: int = 0,
    owner: Json | None = None,
    environment: Mapping[str, str] | None = None,
    secrets: Iterable[str] = (),
    patch: Json | None = None,
) -> Json:
    """Return the pod of a node.

    Args:
        name: name of the pod.
        gpus: number of GPUs.
        slot: text that distinguishes pods on one machine, "" with one pod per machine.
        machine: machine on which the pod must run, "" for any.
        avoid: machines on which the pod must not run.
        driver: (host, port) of the driver, None if unknown.
        epoch: epoch of the driver.
        owner: reference to the object with which the pod is deleted.
        environment: variables of the pod's processes.
        secrets: names of variables in the job's Secret.
        patch: as returned by `read_patch`.
    """
    settings = config.kubernetes
    pod_labels = make_labels(config.train.name, "agent")
    if slot:
        pod_labels[SLOT_LABEL] = slot
    if settings.queue:
        pod_labels[QUEUE_LABEL] = settings.queue
    annotations = {DRIVER_ANNOTATION: "", EPOCH_ANNOTATION: str(epoch)}
    if driver is not None:
        annotations[DRIVER_ANNOTATION] = format_address(*driver)
    annotations |= _make_prometheus_annotations(config.resilience.agent_metrics)
    metadata: Json = {"name": name, "labels": pod_labels, "annotations": annotations}
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    spec: Json = {
        "restartPolicy": "Never",  # The driver decides about restarts.
        "terminationGracePeriodSeconds": round(config.resilience.grace_period) + EXTRA_GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [_make_container(config, gpus, slot, environment or {}, secrets)],
        "volumes": _make_volumes(config),
        "securityContext": make_pod_security(settings.user),
        "affinity": _make_affinity(settings, config.train.name, machine, avoid),
        "tolerations": [_parse_toleration(text) for text in settings.tolerations],
    }
    if settings.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if settings.node_selector:
        spec["nodeSelector"] = dict(label.split("=", 1) for label in settings.node_selector)
    if settings.service_account:
        spec["serviceAccountName"] = settings.service_account
    if settings.priority_class:
        spec["priorityClassName"] = settings.priority_class
    if settings.pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in settings.pull_secrets]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    return merge_patch(pod, patch or {})


def _make_container(
    config: Config, gpus: int, slot: str, environment: Mapping[str, str], secrets: Iterable[str]
) -> Json:
    settings = config.kubernetes
    node = "$(MEGASCALE_MACHINE)"
    if slot:
        node += f".{slot}"
    env: list[Json] = [
        make_field_variable("MEGASCALE_MACHINE", "spec.nodeName"),
        {"name": "MEGASCALE_NODE", "value": node},
        make_field_variable("MEGASCALE_POD", "metadata.name"),
        make_field_variable("MEGASCALE_POD_ADDRESS", "status.podIP"),
        {"name": "MEGASCALE_JOB", "value": config.train.name},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "HOME", "value": TEMPORARY_FOLDER},  # The image's file system is read-only.
        {"name": "USER", "value": "megascale"},  # PyTorch requires a user name, and the image may lack one.
    ]
    env += [{"name": name, "value": value} for name, value in environment.items()]
    for name in secrets:
        reference = {"name": make_object_name(config.train.name), "key": name}
        env.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    for text in settings.environment:
        name, value = text.split("=", 1)
        env.append({"name": name, "value": value})
    resources = dict(text.split("=", 1) for text in settings.resources)
    _check_shared_memory(settings.shm, resources.get("memory", ""))
    if gpus:
        resources[settings.gpu_resource] = str(gpus)
    mounts: list[Json] = [
        {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
        {"name": "about", "mountPath": ANNOTATIONS_FOLDER, "readOnly": True},
        {"name": "state", "mountPath": STATE_FOLDER},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    configured_mounts = [_make_mount(i, text) for i, text in enumerate(settings.mounts)]
    if all(mount["mountPath"] != TEMPORARY_FOLDER for mount in configured_mounts):
        mounts.append({"name": "tmp", "mountPath": TEMPORARY_FOLDER})
    mounts += configured_mounts
    security = make_container_security()
    if any(name.startswith("rdma/") for name in resources):
        security["capabilities"]["add"] = ["IPC_LOCK"]  # RDMA must lock the memory that network devices access.
    container: Json = {
        "name": CONTAINER_NAME,
        "image": settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": module_command(AGENT_MODULE, python=settings.python),
        "env": env,
        "volumeMounts": mounts,
        "securityContext": security,
    }
    container["resources"] = _make_resources(resources, settings.shm)
    return container | make_probes(config.resilience.agent_metrics)


def make_pod_security(user: int) -> Json:
    """Return the security context of a pod whose processes run as this user and group."""
    context: Json = {"seccompProfile": {"type": "RuntimeDefault"}}
    if user:
        context |= {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
        # By default each mount would change the owner of every checkpoint.
        context["fsGroupChangePolicy"] = "OnRootMismatch"
    return context


def make_container_security() -> Json:
    """Return the security context of a container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def make_probes(address: str) -> Json:
    """Return the port and probes of a container with metrics at HOST:PORT, {} if the kubelet cannot reach it.

    The liveness probe only tests whether the process answers: an agent without a driver is not ready, but its trainers
    continue.
    """
    host, _, port = address.rpartition(":")
    if not address or is_loopback(host.strip("[]")):
        return {}
    return {
        "ports": [{"name": "metrics", "containerPort": int(port)}],
        "startupProbe": _make_probe("/live", period=5, failures=60),
        "livenessProbe": _make_probe("/live", period=10, failures=18),
        "readinessProbe": _make_probe("/health", period=5, failures=3),
    }


def _make_probe(path: str, *, period: int, failures: int) -> Json:
    """Return a probe that fails after `failures` unanswered requests, one per `period` seconds."""
    request = {"path": path, "port": "metrics"}
    return {"httpGet": request, "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures}


def _make_resources(resources: Mapping[str, str], shm: str) -> Json:
    """Return requests and limits. Without configured memory the pod requests its shared memory and 1 GiB."""
    memory = f"{(_parse_bytes(shm) >> 20) + 1024}Mi"
    requests = {"cpu": "100m", "memory": memory} | dict(resources)
    if resources:
        return {"requests": requests, "limits": dict(resources)}
    return {"requests": requests}


def _check_shared_memory(shm: str, memory: str) -> None:
    """Raise ConfigError if /dev/shm leaves no memory, since Kubernetes counts it as memory of the pod."""
    if shm and memory and _parse_bytes(shm) >= _parse_bytes(memory):
        raise ConfigError(
            f"kubernetes.shm={shm} leaves nothing of memory={memory} in kubernetes.resources, since shared memory "
            "counts as memory of the pod; raise memory or lower kubernetes.shm"
        )


def _parse_bytes(quantity: str) -> int:
    """Return the bytes of a quantity such as 64Gi, 0 for an empty text. Raises ConfigError for a malformed one."""
    match = re.fullmatch(r"(\d*)([KkMGT]?)(i?)", quantity)
    if match is None or (quantity and not match[1]):
        raise ConfigError(f"kubernetes.resources has memory={quantity}; write whole numbers, such as memory=1500Gi")
    base = 1024 if match[3] else 1000
    exponents = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
    return int(match[1] or 0) * base ** exponents[match[2].upper()]


def _make_volumes(config: Config) -> list[Json]:
    settings = config.kubernetes
    memory: Json = {"medium": "Memory"}
    if settings.shm:
        memory["sizeLimit"] = settings.shm
    annotations = [
        {"path": path, "fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}}
        for path, key in (("driver", DRIVER_ANNOTATION), ("epoch", EPOCH_ANNOTATION))
    ]
    secret = {
        "secretName": make_object_name(config.train.name),
        "items": [{"key": "token", "path": "token"}],
        "defaultMode": 0o440,
    }
    volumes: list[Json] = [
        {"name": "secret", "secret": secret},
        {"name": "about", "downwardAPI": {"items": annotations}},
        {"name": "state", "emptyDir": {}},
        {"name": "shm", "emptyDir": memory},
        {"name": "tmp", "emptyDir": {}},
    ]
    return volumes + [_make_mounted_volume(i, text) for i, text in enumerate(settings.mounts)]


def _make_mounted_volume(number: int, text: str) -> Json:
    """Return the volume of an entry of kubernetes.mounts, which is KIND:SOURCE:PATH[:ro]."""
    kind, source, _ = text.removesuffix(":ro").split(":")
    if kind == "claim":
        return {"name": f"mount-{number}", "persistentVolumeClaim": {"claimName": source}}
    return {"name": f"mount-{number}", "hostPath": {"path": source}}


def _make_mount(number: int, text: str) -> Json:
    """Return the mount of an entry of kubernetes.mounts."""
    mount: Json = {"name": f"mount-{number}", "mountPath": text.removesuffix(":ro").split(":")[2]}
    if text.endswith(":ro"):
        mount["readOnly"] = True
    return mount


def _make_affinity(settings: KubernetesConfig, job: str, machine: str, avoid: Iterable[str]) -> Json:
    """Return the rules for the pod's machine: no machine of `avoid`, one pod of the job per machine, and one switch."""
    same_job = {"matchLabels": {JOB_LABEL: job, ROLE_LABEL: "agent"}}
    affinity: Json = {}
    fields = [_match_name("NotIn", name) for name in sorted(avoid)]  # Kubernetes allows one value per match.
    if machine:
        fields = [_match_name("In", machine)]
    if fields:
        affinity["nodeAffinity"] = {_REQUIRED: {"nodeSelectorTerms": [{"matchFields": fields}]}}
    if settings.one_a_node:
        affinity["podAntiAffinity"] = {_REQUIRED: [{"labelSelector": same_job, "topologyKey": _HOSTNAME}]}
    if settings.switch_label and not machine:
        near_term: Json = {"labelSelector": same_job, "topologyKey": settings.switch_label}
        if settings.switch_required:
            affinity["podAffinity"] = {_REQUIRED: [near_term]}
        else:
            affinity["podAffinity"] = {_PREFERRED: [{"weight": 100, "podAffinityTerm": near_term}]}
    return affinity


def _match_name(operator: str, name: str) -> Json:
    return {"key": "metadata.name", "operator": operator, "values": [name]}


def _parse_toleration(text: str) -> Json:
    match = _TAINT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"kubernetes.tolerations has {text!r}; write KEY=VALUE:EFFECT or KEY:EFFECT, as nvidia.com/gpu:NoSchedule"
        )
    toleration: Json = {"key": match["key"], "operator": "Exists"}
    if match["value"] is not None:
        toleration |= {"operator": "Equal", "value": match["value"]}
    if match["effect"]:
        toleration["effect"] = match["effect"]
    return toleration


def make_field_variable(name: str, path: str) -> Json:
    """Return an environment variable with the value of a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _parse_port(address: str) -> int:
    return int(address.rpartition(":")[2]) if address else 0


def _make_prometheus_annotations(address: str) -> dict[str, str]:
    port = _parse_port(address)
    if not port:
        return {}
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": "/metrics"}


def merge_patch(base: Any, patch: Any) -> Any:
    """Merge `patch` into `base` like kubectl's strategic merge.

    Objects are merged by key, and null removes a key. Lists whose entries have mount paths or names are merged by them.
    Other values are replaced.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            elif key in base:
                merged[key] = merge_patch(base[key], value)
            else:
                merged[key] = value
        return merged
    if isinstance(base, list) and isinstance(patch, list) and patch:
        for key in ("mountPath", "name"):
            if all(isinstance(entry, dict) and key in entry for entry in patch):
                return _merge_lists(base, patch, key)
    return patch


def _merge_lists(base: list[Any], patch: list[Any], key: str) -> list[Any]:
    if not all(isinstance(entry, dict) and key in entry for entry in base):
        return patch
    changes = {entry[key]: entry for entry in patch}
    merged = [merge_patch(entry, changes.pop(entry[key], {})) for entry in base]
    return merged + list(changes.values())
