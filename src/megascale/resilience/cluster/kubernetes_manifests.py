"""What `megascale launch --cluster kubernetes --dry-run` prints: objects for `kubectl apply`, in one of three forms.

nodes: what a driver that runs here would make: ConfigMap, Secret, and a pod such as each node's.
driver: the driver as a Job in the cluster, with its rights, its settings and the network policy; it makes the nodes.
jobset: driver and nodes as one JobSet, which a queue such as Kueue admits as a whole; its nodes are agents that join.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megascale.config import Config
from megascale.core.environment_file import read_environment
from megascale.core.python_command import module_command
from megascale.errors import DataError
from megascale.resilience.cluster.kubernetes_api import Json
from megascale.resilience.cluster.kubernetes_objects import config_map, own_secrets, secret, taken_over
from megascale.resilience.cluster.kubernetes_pod import (
    JOB,
    SECRET_FOLDER,
    labels,
    make_pod,
    merge,
    object_name,
    read_patch,
)

Form = Literal["nodes", "driver", "jobset"]
FORMS: tuple[Form, ...] = ("nodes", "driver", "jobset")
SETTINGS_FOLDER = "/etc/megascale/job"  # where the driver's pod finds job.toml
RBAC = "rbac.authorization.k8s.io/v1"
AGENTS_PORT = 29400  # of a JobSet's driver
TRIES = 6  # times that a driver's container is started again


def manifests(config: Config, form: Form, gpus: int, run: str) -> list[Json]:
    """The objects, in the order in which they are made.

    Args:
        config: as given, with everything resolved.
        gpus: of a node.
        run: absolute path of the run folder, as the driver's pod has it.
    """
    job = config.train.name
    if form == "nodes":
        node = make_pod(
            config,
            f"{job}-0",
            gpus,
            environment=taken_over(),
            secrets=own_secrets(),
            patch=read_patch(config.kubernetes),
        )
        return [config_map(job), secret(job, b"made-by-the-driver"), _in_namespace(config, node)]
    kept = [*settings_objects(config), network_policy(job)]
    if form == "driver":
        found = [*rights(job, config.kubernetes.namespace), *kept, driver_job(config, run)]
    else:
        found = [secret(job, b"put-64-hexadecimal-digits-here"), *kept, jobset(config, gpus, run)]
    return [_in_namespace(config, each) for each in found]


def to_yaml(objects: Sequence[Json]) -> str:
    """As kubectl reads it."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    return str(yaml.dump_all(objects, Dumper=Plain, sort_keys=False, width=120))


def _in_namespace(config: Config, thing: Json) -> Json:
    name = config.kubernetes.namespace
    if not name or thing["kind"].startswith("Cluster"):
        return thing
    return thing | {"metadata": thing["metadata"] | {"namespace": name}}


# rights ---------------------------------------------------------------------------------------------------------------


def rights(job: str = "", namespace: str = "") -> list[Json]:
    """What a driver may do: pods and its own objects in its namespace, and see machines. Secrets it never reads.

    job: whose objects they are restricted to; "": any.
    """
    account = "megascale-driver"
    only: Json = {"resourceNames": [object_name(job)]} if job else {}
    role = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete", "get", "list", "patch", "watch"]},
        {"apiGroups": [""], "resources": ["configmaps", "secrets"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "patch"]} | only,
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["update"]} | only,
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "update"]} | only,
    ]
    nodes = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}]
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace or "default"}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _about(account)},
        {"apiVersion": RBAC, "kind": "Role", "metadata": _about(account), "rules": role},
        {"apiVersion": RBAC, "kind": "RoleBinding", "metadata": _about(account)} | _binds("Role", account, subject),
        {"apiVersion": RBAC, "kind": "ClusterRole", "metadata": _about("megascale-sees-nodes"), "rules": nodes},
        {"apiVersion": RBAC, "kind": "ClusterRoleBinding", "metadata": _about("megascale-sees-nodes")}
        | _binds("ClusterRole", "megascale-sees-nodes", subject),
    ]


def _about(name: str) -> Json:
    return {"name": name, "labels": {"app.kubernetes.io/name": "megascale"}}


def _binds(kind: str, name: str, subject: Json) -> Json:
    to = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
    return {"roleRef": to, "subjects": [subject]}


def network_policy(job: str = "") -> Json:
    """Nobody but the job's own pods reaches them; metrics (a port named so) may be read from anywhere.

    job: "" for all jobs of the namespace together.
    """
    mine = {"matchLabels": {JOB: job} if job else {"app.kubernetes.io/name": "megascale"}}
    ingress = [{"from": [{"podSelector": mine}]}, {"ports": [{"port": "metrics", "protocol": "TCP"}]}]
    spec = {"podSelector": mine, "policyTypes": ["Ingress"], "ingress": ingress}
    about = _about(object_name(job) if job else "megascale")
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": about, "spec": spec}


# the driver as a pod --------------------------------------------------------------------------------------------------


def settings_objects(config: Config) -> list[Json]:
    """Return what the driver's pod finds in SETTINGS_FOLDER: a ConfigMap with the settings and the files that they
    name, and a Secret with the environment, which may hold keys.

    Raises DataError if a file cannot be read or is wrong.
    """
    limits, settings = config.resilience, config.kubernetes.model_copy(update={"kubeconfig": "", "context": ""})
    data = {}
    files = {"pod.yaml": settings.pod, "placement.json": limits.placement, "environment": limits.environment}
    for name, path in files.items():
        if path:
            try:
                data[name] = Path(path).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path}, which the settings name, cannot be read: {error}") from None
    if limits.environment:
        read_environment(Path(limits.environment), "resilience.environment")
    there = {name: f"{SETTINGS_FOLDER}/{name}" for name in data}
    settings = settings.model_copy(update={"pod": there.get("pod.yaml", "")})
    changes = {"placement": there.get("placement.json"), "environment": there.get("environment")}
    inside = {"kubernetes": settings, "resilience": limits.model_copy(update=changes)}
    environment = data.pop("environment", None)
    data["job.toml"] = config.model_copy(update=inside).to_toml()
    about = {"name": f"{object_name(config.train.name)}-settings", "labels": labels(config.train.name, "job")}
    objects: list[Json] = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data}]
    if environment is not None:
        secret_data = {"environment": base64.b64encode(environment.encode()).decode()}
        objects.append({"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": about, "data": secret_data})
    return objects


def _driver_pod(config: Config, run: str, words: Sequence[str]) -> Json:
    """Template of the driver's pod: it sees what nodes see (mounts, patch), and has no devices."""
    settings, job = config.kubernetes, config.train.name
    node = merge(make_pod(config, job, 0), read_patch(settings))
    container = node["spec"]["containers"][0]
    own = ("secret", "about", "state", "shm")
    fields = (("MEGASCALE_POD", "metadata.name"), ("MEGASCALE_POD_UID", "metadata.uid"))
    env = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (*fields, ("MEGASCALE_POD_ADDRESS", "status.podIP"))
    ]
    kept = [each for each in container["env"] if not each["name"].startswith("MEGASCALE_")]
    mounts = [each for each in container["volumeMounts"] if each["name"] not in own]
    volumes = [each for each in node["spec"]["volumes"] if each["name"] not in own]
    name = f"{object_name(job)}-settings"
    # The Secret exists where resilience.environment names a file.
    sources = [{"configMap": {"name": name}}, {"secret": {"name": name, "optional": True}}]
    driver: Json = {
        "name": "driver",
        "image": settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": module_command("megascale", "launch", f"{SETTINGS_FOLDER}/job.toml", *words, python=settings.python),
        "env": [*env, *kept],
        "volumeMounts": [{"name": "settings", "mountPath": SETTINGS_FOLDER, "readOnly": True}, *mounts],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    kept_of_node = ("nodeSelector", "tolerations", "imagePullSecrets", "hostNetwork", "dnsPolicy", "securityContext")
    spec: Json = {
        "restartPolicy": "OnFailure",
        "serviceAccountName": "megascale-driver",
        "terminationGracePeriodSeconds": 30,
        "containers": [driver],
        "volumes": [{"name": "settings", "projected": {"sources": sources}}, *volumes],
    }
    spec |= {key: node["spec"][key] for key in kept_of_node if node["spec"].get(key)}
    return {"metadata": {"labels": labels(job, "driver")}, "spec": spec}


def driver_job(config: Config, run: str) -> Json:
    """A Job that keeps one driver running until the job has ended. The run folder must lie on a mounted volume."""
    job = config.train.name
    spec = {"backoffLimit": TRIES, "template": _driver_pod(config, run, [])}
    about = {"name": f"{object_name(job)}-driver", "labels": labels(job, "driver")}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": spec}


# JobSet ---------------------------------------------------------------------------------------------------------------


def jobset(config: Config, gpus: int, run: str) -> Json:
    """Driver and nodes as one JobSet (jobset.x-k8s.io/v1alpha2), admitted as a whole by Kueue where a queue is named.

    Its nodes are not made by the driver: they join it (`--cluster manual`), spares among them, and the JobSet's
    controller makes anew what is lost.
    """
    job, limits, settings = config.train.name, config.resilience, config.kubernetes
    name = object_name(job)
    words = ["--cluster=manual", "--resilience.listen=0.0.0.0", f"--resilience.port={AGENTS_PORT}"]
    driver = _driver_pod(config, run, words)
    driver["spec"].pop("serviceAccountName")
    driver["spec"]["volumes"].append({"name": "token", "secret": {"secretName": name, "defaultMode": 0o400}})
    driver["spec"]["containers"][0]["volumeMounts"].append({"name": "token", "mountPath": "/etc/megascale/secret"})
    command = driver["spec"]["containers"][0]["command"]
    folder = shlex.quote(f"{run}/driver")
    begin = f"umask 77; mkdir -p {folder} && cp /etc/megascale/secret/token {folder}/token && exec "
    driver["spec"]["containers"][0]["command"] = ["sh", "-c", begin + shlex.join(command)]
    node = make_pod(config, job, gpus, environment=taken_over(), patch=read_patch(settings))
    agent, place = node["spec"]["containers"][0], f"{name}-driver-0-0.{name}:{AGENTS_PORT}"
    agent["command"] = module_command("megascale", "agent", place, "--job", job, python=settings.python)
    agent["command"] += ["--node", "$(MEGASCALE_NODE)", "--folder", "/var/lib/megascale", "--secret-file", "-"]
    # On stdin: a variable would stand in /proc/PID/environ for as long as the agent runs.
    agent["command"] = ["sh", "-c", f'exec "$@" < {SECRET_FOLDER}/token', "agent", *agent["command"]]
    node["spec"]["restartPolicy"] = "OnFailure"
    marks = labels(job, "job") | ({"kueue.x-k8s.io/queue-name": settings.queue} if settings.queue else {})
    for thing in (node, driver):
        thing["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name", None)  # Kueue takes the JobSet as a whole
    notes = {key: value for key, value in node["metadata"]["annotations"].items() if key.startswith("prometheus")}
    template = {"metadata": {"labels": node["metadata"]["labels"], "annotations": notes}, "spec": node["spec"]}
    count = limits.nodes + limits.spares
    jobs = [_replicated("driver", driver, 1, 1), _replicated("nodes", template, count, 1000)]
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["driver"]},
        "failurePolicy": {"maxRestarts": TRIES},
        "replicatedJobs": jobs,
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": marks},
        "spec": spec,
    }


def _replicated(name: str, template: Json, pods: int, tries: int) -> Json:
    spec = {"parallelism": pods, "completions": pods, "backoffLimit": max(tries, TRIES), "template": template}
    return {"name": name, "replicas": 1, "template": {"spec": spec | {"completionMode": "Indexed"}}}
