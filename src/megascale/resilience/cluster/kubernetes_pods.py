"""The pod of a node in Kubernetes: one container, whose process is the node's agent.

The agent learns all about its job from the pod's environment, from the files of the job's Secret, and from files that
the kubelet writes with the pod's annotations (downward API).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megascale.config import Config, KubernetesConfig
from megascale.config.text_files import read_text
from megascale.core.addresses import is_loopback
from megascale.core.python_process import module_command
from megascale.errors import ConfigError, DataError
from megascale.resilience.cluster.base import format_address
from megascale.resilience.cluster.kubernetes_api import Json
from megascale.resilience.cluster.kubernetes_objects import JOB_LABEL, ROLE_LABEL, make_labels, make_object_name
from megascale.resilience.cluster.kubernetes_table import SLOT_LABEL

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
_HOSTNAME = "kubernetes.io/hostname"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
# Name of a resource that Kubernetes defines for containers, or PREFIX/NAME of a device plugin.
_RESOURCE_NAME = re.compile(
    r"cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMGT]i|[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
)
_QUANTITY = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?")
_TAINT = re.compile(r"(?P<key>[^=:\s]+)(=(?P<value>[^:\s]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")


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
        gpus: number of GPUs.
        slot: text that distinguishes pods on one machine, "" with one pod per machine.
        machine: machine on which the pod must run, "" for any.
        avoid: machines on which the pod must not run, if `machine` is empty.
        driver: (host, port) of the driver, None if unknown.
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
    container = _make_container(config, gpus, slot=slot, environment=environment or {}, secrets=secrets)
    spec: Json = {
        "restartPolicy": "Never",  # The driver decides about restarts.
        "terminationGracePeriodSeconds": round(config.resilience.grace_period) + EXTRA_GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": _make_volumes(config),
        "securityContext": make_pod_security(settings.user),
        "affinity": _make_affinity(settings, config.train.name, machine=machine, avoid=avoid),
        "tolerations": [_parse_toleration(text) for text in settings.tolerations],
    } | _make_optional_spec(settings)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    return merge_patch(pod, patch or {})


def _make_optional_spec(settings: KubernetesConfig) -> Json:
    """Return the fields of a pod's spec that only a configured setting adds."""
    spec: Json = {}
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
    return spec


def _make_container(
    config: Config, gpus: int, *, slot: str, environment: Mapping[str, str], secrets: Iterable[str]
) -> Json:
    """Return the agent's container (see `make_pod` for the arguments)."""
    settings = config.kubernetes
    resources = read_resources(settings, gpus)
    security = make_container_security()
    if any(name.startswith("rdma/") for name in resources):
        security["capabilities"]["add"] = ["IPC_LOCK"]  # RDMA must lock the memory that network devices access.
    container: Json = {
        "name": CONTAINER_NAME,
        "image": settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": module_command(AGENT_MODULE, python=settings.python),
        "env": _make_variables(config, slot=slot, environment=environment, secrets=secrets),
        "volumeMounts": _make_mounts(settings),
        "securityContext": security,
        "resources": _make_resources(resources, settings.shm),
    }
    return container | make_probes(config.resilience.agent_metrics)


def _make_variables(config: Config, *, slot: str, environment: Mapping[str, str], secrets: Iterable[str]) -> list[Json]:
    """Return the container's environment variables. The kubelet replaces $(NAME) by the value of an earlier one."""
    node = "$(MEGASCALE_MACHINE)"
    if slot:
        node += f".{slot}"
    variables: list[Json] = [
        make_field_variable("MEGASCALE_MACHINE", "spec.nodeName"),
        {"name": "MEGASCALE_NODE", "value": node},
        make_field_variable("MEGASCALE_POD", "metadata.name"),
        make_field_variable("MEGASCALE_POD_ADDRESS", "status.podIP"),
        {"name": "MEGASCALE_JOB", "value": config.train.name},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "HOME", "value": TEMPORARY_FOLDER},  # The image's file system is read-only.
        {"name": "USER", "value": "megascale"},  # PyTorch requires a user name, and the image may lack one.
    ]
    variables += [{"name": name, "value": value} for name, value in environment.items()]
    for name in secrets:
        reference = {"name": make_object_name(config.train.name), "key": name}
        variables.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    for text in config.kubernetes.environment:
        name, value = text.split("=", 1)
        variables.append({"name": name, "value": value})
    return variables


def _make_mounts(settings: KubernetesConfig) -> list[Json]:
    """Return where the container mounts each volume of `_make_volumes`."""
    mounts: list[Json] = [
        {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
        {"name": "about", "mountPath": ANNOTATIONS_FOLDER, "readOnly": True},
        {"name": "state", "mountPath": STATE_FOLDER},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    configured_mounts = [_make_mount(i, text) for i, text in enumerate(settings.mounts)]
    if all(mount["mountPath"] != TEMPORARY_FOLDER for mount in configured_mounts):  # A user may mount another /tmp.
        mounts.append({"name": "tmp", "mountPath": TEMPORARY_FOLDER})
    return mounts + configured_mounts


def make_pod_security(user: int) -> Json:
    """Return the security context of a pod whose processes run as this user and group."""
    context: Json = {"seccompProfile": {"type": "RuntimeDefault"}}
    if user:
        context |= {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
        # By default each mount would change the owner of every checkpoint.
        context["fsGroupChangePolicy"] = "OnRootMismatch"
    return context


def make_container_security() -> Json:
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
    memory = f"{(_parse_bytes(shm) >> 20) + 1024}Mi"  # bytes to MiB, plus 1 GiB
    requests = {"cpu": "100m", "memory": memory} | dict(resources)
    if resources:
        return {"requests": requests, "limits": dict(resources)}
    return {"requests": requests}


def read_resources(settings: KubernetesConfig, gpus: int) -> dict[str, str]:
    """Return the resources of a pod by name, GPUs included.

    Args:
        gpus: GPUs per pod by the layout, 0 for none.

    Raises:
        ConfigError: Kubernetes would refuse a name or quantity, or kubernetes.resources contradicts another setting.
    """
    resources: dict[str, str] = {}
    for text in settings.resources:
        name, quantity = text.split("=", 1)
        quantity = quantity.removeprefix("+")  # Kubernetes accepts a sign
        if name in resources:
            raise ConfigError(f"kubernetes.resources has {name} twice ({resources[name]} and {quantity}); remove one")
        _check_resource(name, quantity)
        resources[name] = quantity
    _check_shared_memory(settings.shm, resources.get("memory", ""))
    requested = resources.get(settings.gpu_resource, "")
    if gpus and requested not in ("", str(gpus)):
        raise ConfigError(
            f"kubernetes.resources has {settings.gpu_resource}={requested}, and parallel.gpus_per_host={gpus} requests "
            f"{gpus} GPUs per node; remove {settings.gpu_resource} from kubernetes.resources, or set "
            "parallel.gpus_per_host to the same number"
        )
    if gpus:
        resources[settings.gpu_resource] = str(gpus)
    return resources


def _check_resource(name: str, quantity: str) -> None:
    """Raise ConfigError for a resource that the API server would refuse."""
    setting = f"kubernetes.resources has {name}={quantity}"
    if _RESOURCE_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{setting}, whose name Kubernetes does not accept; write cpu, memory, ephemeral-storage, hugepages-2Mi or "
            "PREFIX/NAME of a device plugin, such as rdma/hca"
        )
    if _QUANTITY.fullmatch(quantity) is None:
        raise ConfigError(
            f"{setting}, which is not a quantity; write a number with or without a unit, such as 90 or 64Gi"
        )
    if "/" in name and not quantity.isdigit():
        raise ConfigError(f"{setting}, and a pod gets whole devices only; write a whole number, such as {name}=1")
    if not any(digit in "123456789" for digit in quantity):
        raise ConfigError(f"{setting}, which gives the pod nothing; raise it or remove it")


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
    """Return the pod's volumes. "about" has a file per annotation by which the agent finds its driver."""
    settings = config.kubernetes
    memory: Json = {"medium": "Memory"}
    if settings.shm:
        memory["sizeLimit"] = settings.shm
    annotation_files = [
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
        {"name": "about", "downwardAPI": {"items": annotation_files}},
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


def _make_affinity(settings: KubernetesConfig, job: str, *, machine: str, avoid: Iterable[str]) -> Json:
    """Return the rules for the pod's machine.

    The pod runs on `machine`, or if that is empty on no machine of `avoid`. If configured, a machine has one pod of the
    job, and the pods share a switch.
    """
    same_job = {"matchLabels": {JOB_LABEL: job, ROLE_LABEL: "agent"}}
    affinity: Json = {}
    name_matches = [_match_name("NotIn", name) for name in sorted(avoid)]  # Kubernetes allows one value per match.
    if machine:
        name_matches = [_match_name("In", machine)]
    if name_matches:
        affinity["nodeAffinity"] = {_REQUIRED: {"nodeSelectorTerms": [{"matchFields": name_matches}]}}
    if settings.one_a_node:
        affinity["podAntiAffinity"] = {_REQUIRED: [{"labelSelector": same_job, "topologyKey": _HOSTNAME}]}
    if settings.switch_label and not machine:
        same_switch: Json = {"labelSelector": same_job, "topologyKey": settings.switch_label}
        if settings.switch_required:
            affinity["podAffinity"] = {_REQUIRED: [same_switch]}
        else:
            affinity["podAffinity"] = {_PREFERRED: [{"weight": 100, "podAffinityTerm": same_switch}]}
    return affinity


def _match_name(operator: str, name: str) -> Json:
    """Return a match of a machine by its name."""
    return {"key": "metadata.name", "operator": operator, "values": [name]}


def _parse_toleration(text: str) -> Json:
    """Return the toleration of an entry of kubernetes.tolerations. Without a value, it tolerates every value."""
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


def _make_prometheus_annotations(address: str) -> dict[str, str]:
    """Return the annotations by which a Prometheus in the cluster finds the metrics at HOST:PORT, {} without them."""
    port = int(address.rpartition(":")[2]) if address else 0
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
    """Merge entries with equal values of `key`, and append the other entries of `patch`."""
    if not all(isinstance(entry, dict) and key in entry for entry in base):
        return patch
    changes = {entry[key]: entry for entry in patch}
    merged = [merge_patch(entry, changes.pop(entry[key], {})) for entry in base]
    return merged + list(changes.values())
