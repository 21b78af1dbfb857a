"""The pod of a node: all that its agent knows stands in its spec, the job's Secret and the downward API."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megascale.config import Config, KubernetesConfig
from megascale.config.text_files import read_text
from megascale.core.python_command import module_command
from megascale.errors import ConfigError, DataError
from megascale.resilience.cluster.kubernetes_api import Json
from megascale.resilience.cluster.kubernetes_table import SLOT

JOB, ROLE = "megascale.dev/job", "megascale.dev/role"
DRIVER, EPOCH = "megascale.dev/driver", "megascale.dev/epoch"  # annotations: where the driver is, and which
CONTAINER = "agent"
MODULE = "megascale.resilience.agent.pod"
SECRET_FOLDER, ABOUT_FOLDER, STATE_FOLDER = "/etc/megascale/secret", "/etc/megascale/pod", "/var/lib/megascale"
ENDING = 15  # seconds that a pod gets beyond resilience.grace_period
_HOSTNAME = "kubernetes.io/hostname"
_TAINT = re.compile(r"(?P<key>[^=:\s]+)(=(?P<value>[^:\s]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")


def object_name(job: str) -> str:
    """Of the job's ConfigMap, Secret and Lease. ConfigError for a job that Kubernetes cannot name."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,45}[a-z0-9])?", job):
        raise ConfigError(
            f"train.name={job} cannot name objects of Kubernetes: at most 47 small letters, digits, hyphens, such as "
            f"--train.name={re.sub('[^a-z0-9]+', '-', job.lower()).strip('-')[:47] or 'job'}"
        )
    return f"megascale-{job}"


def labels(job: str, role: str) -> dict[str, str]:
    """Of all that belongs to a job."""
    common = {"app.kubernetes.io/name": "megascale", "app.kubernetes.io/managed-by": "megascale"}
    return common | {"app.kubernetes.io/instance": job, JOB: job, ROLE: role}


def read_patch(settings: KubernetesConfig) -> Json:
    """The file `kubernetes.pod`, {} for none. DataError if it is no YAML with metadata and spec."""
    if not settings.pod:
        return {}
    import yaml

    try:
        found = yaml.safe_load(read_text(Path(settings.pod)))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"kubernetes.pod={settings.pod} cannot be read: {error}") from None
    if not isinstance(found, dict) or not set(found) <= {"metadata", "spec", "apiVersion", "kind"}:
        raise DataError(f"kubernetes.pod={settings.pod} is no part of a pod: it must have metadata or spec, or both")
    return {key: value for key, value in found.items() if key in ("metadata", "spec")}


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
    """The manifest.

    Args:
        name: of the pod.
        gpus: that it takes.
        slot: tells pods on one machine apart, "" where there is one.
        machine: where it must run, "" anywhere.
        avoid: machines that it must not get.
        driver: where agents find the driver; None: not known yet.
        owner: reference to what it goes with.
        environment: of its processes; secrets: names of variables that stand in the job's Secret.
        patch: as `read_patch` gives it.
    """
    settings, limits, job = config.kubernetes, config.resilience, config.train.name
    marks = labels(job, "agent") | ({SLOT: slot} if slot else {})
    marks |= {"kueue.x-k8s.io/queue-name": settings.queue} if settings.queue else {}
    notes = {DRIVER: "", EPOCH: str(epoch)}
    if driver is not None:
        notes[DRIVER] = f"[{driver[0]}]:{driver[1]}" if ":" in driver[0] else f"{driver[0]}:{driver[1]}"
    notes |= _prometheus(limits.agent_metrics)
    metadata: Json = {"name": name, "labels": marks, "annotations": notes}
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    spec: Json = {
        "restartPolicy": "Never",  # the driver decides, with what it knows
        "terminationGracePeriodSeconds": round(limits.grace_period) + ENDING,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [_container(config, gpus, slot, environment or {}, secrets)],
        "volumes": _volumes(config),
        "affinity": _affinity(settings, job, machine, avoid),
        "tolerations": [_toleration(text) for text in settings.tolerations],
    }
    if settings.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if settings.node_selector:
        spec["nodeSelector"] = dict(each.split("=", 1) for each in settings.node_selector)
    for key, value in (
        ("serviceAccountName", settings.service_account),
        ("priorityClassName", settings.priority_class),
        ("imagePullSecrets", [{"name": each} for each in settings.pull_secrets]),
    ):
        spec |= {key: value} if value else {}
    found = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    return merge(found, patch or {})


def _container(config: Config, gpus: int, slot: str, environment: Mapping[str, str], secrets: Iterable[str]) -> Json:
    settings = config.kubernetes
    env: list[Json] = [
        _field("MEGASCALE_MACHINE", "spec.nodeName"),
        {"name": "MEGASCALE_NODE", "value": f"$(MEGASCALE_MACHINE).{slot}" if slot else "$(MEGASCALE_MACHINE)"},
        _field("MEGASCALE_POD", "metadata.name"),
        _field("MEGASCALE_POD_ADDRESS", "status.podIP"),
        {"name": "MEGASCALE_JOB", "value": config.train.name},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        *({"name": name, "value": value} for name, value in environment.items()),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": object_name(config.train.name), "key": name}}}
            for name in secrets
        ),
        *(dict(zip(("name", "value"), each.split("=", 1), strict=True)) for each in settings.environment),
    ]
    amounts = dict(each.split("=", 1) for each in settings.resources)
    if gpus:
        amounts[settings.gpu_resource] = str(gpus)
    container: Json = {
        "name": CONTAINER,
        "image": settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": module_command(MODULE, python=settings.python),
        "env": env,
        "volumeMounts": [
            {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
            {"name": "about", "mountPath": ABOUT_FOLDER, "readOnly": True},
            {"name": "state", "mountPath": STATE_FOLDER},
            {"name": "shm", "mountPath": "/dev/shm"},
            *(_mount(i, text)[1] for i, text in enumerate(settings.mounts)),
        ],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    if amounts:
        container["resources"] = {"requests": amounts, "limits": dict(amounts)}
    if any(name.startswith("rdma/") for name in amounts):
        # Memory that network devices read and write stays where it is.
        container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"add": ["IPC_LOCK"]}}
    if port := _metrics_port(config.resilience.agent_metrics):
        container["ports"] = [{"name": "metrics", "containerPort": port}]
    return container


def _volumes(config: Config) -> list[Json]:
    settings = config.kubernetes
    memory: Json = {"medium": "Memory"} | ({"sizeLimit": settings.shm} if settings.shm else {})
    fields = [
        {"path": path, "fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}}
        for path, key in (("driver", DRIVER), ("epoch", EPOCH))
    ]
    secret = {"secretName": object_name(config.train.name), "items": [{"key": "token", "path": "token"}]}
    return [
        {"name": "secret", "secret": secret | {"defaultMode": 0o440}},
        {"name": "about", "downwardAPI": {"items": fields}},
        {"name": "state", "emptyDir": {}},
        {"name": "shm", "emptyDir": memory},
        *(_mount(i, text)[0] for i, text in enumerate(settings.mounts)),
    ]


def _mount(number: int, text: str) -> tuple[Json, Json]:
    """(volume, mount) of an entry of kubernetes.mounts."""
    readonly = text.endswith(":ro")
    kind, source, where = text.removesuffix(":ro").split(":")
    name = f"mount-{number}"
    volume: Json = {"hostPath": {"path": source}}
    if kind == "claim":
        volume = {"persistentVolumeClaim": {"claimName": source}}
    return {"name": name} | volume, {"name": name, "mountPath": where} | ({"readOnly": True} if readonly else {})


def _affinity(settings: KubernetesConfig, job: str, machine: str, avoid: Iterable[str]) -> Json:
    """Not two on a machine, not on those to avoid, close together."""
    same = {"matchLabels": {JOB: job, ROLE: "agent"}}
    found: Json = {}
    fields = [{"key": "metadata.name", "operator": "In", "values": [machine]}] if machine else []
    if not machine and (names := sorted(avoid)):
        # A field takes one value.
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in names]
    if fields:
        terms = {"nodeSelectorTerms": [{"matchFields": fields}]}
        found["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    if settings.one_a_node:
        apart = {"labelSelector": same, "topologyKey": _HOSTNAME}
        found["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    if settings.switch_label and not machine:
        together: Json = {"labelSelector": same, "topologyKey": settings.switch_label}
        if settings.switch_required:
            found["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [together]}
        else:
            near = [{"weight": 100, "podAffinityTerm": together}]
            found["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": near}
    return found


def _toleration(text: str) -> Json:
    found = _TAINT.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"kubernetes.tolerations has {text!r}; write KEY=VALUE:EFFECT or KEY:EFFECT, as nvidia.com/gpu:NoSchedule"
        )
    bears: Json = {"key": found["key"], "operator": "Exists" if found["value"] is None else "Equal"}
    bears |= {"value": found["value"]} if found["value"] is not None else {}
    return bears | ({"effect": found["effect"]} if found["effect"] else {})


def _field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _metrics_port(place: str) -> int:
    return int(place.rpartition(":")[2]) if place else 0


def _prometheus(place: str) -> dict[str, str]:
    port = _metrics_port(place)
    if not port:
        return {}
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": "/metrics"}


def merge(base: Any, patch: Any) -> Any:
    """`patch` over `base` as kubectl's strategic merge does it: objects key by key (null removes one), lists whose
    entries have names or mount paths entry by entry, other lists as a whole."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = merge(base[key], value) if key in base else value
        return merged
    if isinstance(base, list) and isinstance(patch, list):
        key = next(
            (k for k in ("mountPath", "name") if patch and all(isinstance(e, dict) and k in e for e in patch)), ""
        )
        if key and all(isinstance(each, dict) and key in each for each in base):
            new = {each[key]: each for each in patch}
            kept = [merge(each, new.pop(each[key])) if each[key] in new else each for each in base]
            return [*kept, *new.values()]
    return patch
