"""The objects that `megascale launch --cluster kubernetes --dry-run` prints for `kubectl apply`, in one of three forms.

nodes: the objects that a driver on this machine would create: ConfigMap, Secret, and the pod of one node.
driver: the driver as a Job in the cluster, with its rights, settings and network policy. This driver creates the nodes.
jobset: driver and nodes as one JobSet, which a queue such as Kueue admits as a whole. The nodes join the driver.
"""

from __future__ import annotations

import base64
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w

from megascale.config import Config
from megascale.core.launch_files import read_environment
from megascale.core.python_process import module_command
from megascale.errors import ConfigError, DataError
from megascale.resilience.cluster.kubernetes_api import Json
from megascale.resilience.cluster.kubernetes_objects import (
    JOB_LABEL,
    ROLE_LABEL,
    list_inherited_secrets,
    make_config_map,
    make_labels,
    make_object_name,
    make_secret,
    read_inherited_variables,
)
from megascale.resilience.cluster.kubernetes_pods import (
    QUEUE_LABEL,
    SECRET_FOLDER,
    STATE_FOLDER,
    make_container_security,
    make_field_variable,
    make_pod,
    make_probes,
    merge_patch,
    read_patch,
)

Form = Literal["nodes", "driver", "jobset"]
FORMS: tuple[Form, ...] = ("nodes", "driver", "jobset")
SETTINGS_FOLDER = "/etc/megascale/job"  # where the driver's pod finds job.toml
TOKEN_FOLDER = "/etc/megascale/secret"  # where a JobSet's driver finds the token
RBAC = "rbac.authorization.k8s.io/v1"
AGENTS_PORT = 29400  # port at which the driver of a JobSet accepts agents
DRIVER_RESTARTS = 6  # number of restarts of the driver's pod after which the job counts as failed
# Restarts of all nodes of a JobSet. This is in effect no limit, since the driver decides when a job has failed.
_NODE_RESTARTS = 1000
# Fields of a node's pod spec that are copied into the driver's pod.
_SHARED_SPEC = (
    "nodeSelector",
    "tolerations",
    "imagePullSecrets",
    "hostNetwork",
    "dnsPolicy",
    "securityContext",
    "priorityClassName",
)


def make_manifests(config: Config, form: Form, gpus: int, run: str) -> list[Json]:
    """Return the objects in the order of their creation.

    Args:
        config: the resolved configuration.
        form: one of FORMS.
        gpus: number of GPUs per node.
        run: absolute path of the run folder in the driver's pod.
    """
    job = config.train.name
    monitoring: list[Json] = []
    if config.kubernetes.pod_monitor:
        monitoring.append(_make_pod_monitor(config))
    if config.kubernetes.disruption_budget:
        monitoring.append(_make_disruption_budget(config))
    if form == "nodes":
        node = make_pod(
            config,
            f"{job}-0",
            gpus,
            environment=read_inherited_variables(),
            secrets=list_inherited_secrets(),
            patch=read_patch(config.kubernetes),
        )
        token = b"made-by-the-driver"  # a placeholder, which the driver replaces
        objects = [make_config_map(job), make_secret(job, token), node] + monitoring
        return [_add_namespace(config, kubernetes_object) for kubernetes_object in objects]
    if form == "driver":
        objects = make_rights(job, config.kubernetes.namespace)
        workload = make_driver_job(config)
    else:
        objects = [make_secret(job, b"put-64-hexadecimal-digits-here")]  # a placeholder, which the user replaces
        workload = make_jobset(config, gpus, run)
    objects += make_settings_objects(config)
    objects += [make_network_policy(job), *monitoring, workload]
    return [_add_namespace(config, kubernetes_object) for kubernetes_object in objects]


def to_yaml(objects: Sequence[Json]) -> str:
    """Return the objects as YAML documents for kubectl: without aliases, and texts of several lines as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    def represent_text(dumper: Dumper, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent_text)
    return str(yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=120))


def _add_namespace(config: Config, kubernetes_object: Json) -> Json:
    name = config.kubernetes.namespace
    if not name or kubernetes_object["kind"].startswith("Cluster"):  # ClusterRole and its binding have no namespace.
        return kubernetes_object
    return kubernetes_object | {"metadata": kubernetes_object["metadata"] | {"namespace": name}}


# rights ---------------------------------------------------------------------------------------------------------------


def make_rights(job: str = "", namespace: str = "") -> list[Json]:
    """Return the driver's rights: to manage pods and the objects of its job in its namespace, and to list machines.

    The driver never reads Secrets.

    Args:
        job: the job whose objects the driver may change, "" for all jobs.
        namespace: namespace of the driver, "" for "default".
    """
    account = "megascale-driver"
    node_role = "megascale-sees-nodes"
    # A rule about creation cannot name objects, since the request for a creation has no name yet.
    only_job_objects: Json = {"resourceNames": [make_object_name(job)]} if job else {}
    role_rules = [
        _make_rule("", ["pods"], ["create", "delete", "get", "list", "patch", "watch"]),
        _make_rule("", ["configmaps", "secrets"], ["create"]),
        _make_rule("", ["configmaps"], ["get", "patch"]) | only_job_objects,
        _make_rule("", ["secrets"], ["update"]) | only_job_objects,
        _make_rule("coordination.k8s.io", ["leases"], ["create"]),
        _make_rule("coordination.k8s.io", ["leases"], ["get", "update"]) | only_job_objects,
    ]
    node_rules = [_make_rule("", ["nodes"], ["list", "watch"])]
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace or "default"}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _make_metadata(account)},
        {"apiVersion": RBAC, "kind": "Role", "metadata": _make_metadata(account), "rules": role_rules},
        _make_binding("RoleBinding", "Role", account, subject),
        {"apiVersion": RBAC, "kind": "ClusterRole", "metadata": _make_metadata(node_role), "rules": node_rules},
        _make_binding("ClusterRoleBinding", "ClusterRole", node_role, subject),
    ]


def _make_metadata(name: str) -> Json:
    return {"name": name, "labels": {"app.kubernetes.io/name": "megascale"}}


def _make_rule(group: str, resources: list[str], verbs: list[str]) -> Json:
    return {"apiGroups": [group], "resources": resources, "verbs": verbs}


def _make_binding(kind: str, role_kind: str, name: str, subject: Json) -> Json:
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": role_kind, "name": name}
    return {"apiVersion": RBAC, "kind": kind, "metadata": _make_metadata(name), "roleRef": role, "subjects": [subject]}


def make_network_policy(job: str = "") -> Json:
    """Return a policy by which only the job's pods reach each other; any client reaches the port "metrics".

    job: the job, "" for all jobs of the namespace together.
    """
    metadata = _make_metadata("megascale")
    own_labels = {"app.kubernetes.io/name": "megascale"}
    if job:
        metadata = _make_metadata(make_object_name(job))
        own_labels = {JOB_LABEL: job}
    own_pods = {"matchLabels": own_labels}
    ingress = [{"from": [{"podSelector": own_pods}]}, {"ports": [{"port": "metrics", "protocol": "TCP"}]}]
    spec = {"podSelector": own_pods, "policyTypes": ["Ingress"], "ingress": ingress}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}


def _make_pod_monitor(config: Config) -> Json:
    """Return the PodMonitor by which the Prometheus operator discovers driver and agents. Raises ConfigError."""
    limits = config.resilience
    if not (limits.driver_metrics or limits.agent_metrics):
        raise ConfigError(
            "kubernetes.pod_monitor=true has nothing to scrape; set resilience.driver_metrics=0.0.0.0:9401 and "
            "resilience.agent_metrics=0.0.0.0:9400"
        )
    job = config.train.name
    role = {"sourceLabels": ["__meta_kubernetes_pod_label_megascale_dev_role"], "targetLabel": "role"}
    endpoint = {"port": "metrics", "honorLabels": True, "relabelings": [role]}
    spec = {
        "jobLabel": "app.kubernetes.io/name",  # The alerts expect job="megascale".
        "selector": {"matchLabels": {JOB_LABEL: job}},
        "podMetricsEndpoints": [endpoint],
    }
    metadata = {"name": make_object_name(job), "labels": make_labels(job, "job")}
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": metadata, "spec": spec}


def _make_disruption_budget(config: Config) -> Json:
    """Return a budget by which drains may evict as many pods at the same time as the job has spares."""
    job = config.train.name
    # Pods without a controller allow only minAvailable with a number.
    pods = {"matchLabels": {JOB_LABEL: job, ROLE_LABEL: "agent"}}
    spec = {"minAvailable": config.resilience.nodes, "selector": pods}
    metadata = {"name": make_object_name(job), "labels": make_labels(job, "job")}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec}


# the driver as a pod --------------------------------------------------------------------------------------------------


def make_settings_objects(config: Config) -> list[Json]:
    """Return the objects whose contents appear in SETTINGS_FOLDER of the driver's pod.

    A ConfigMap has the settings and the files that the settings name. A Secret has the environment, which may contain
    keys. Raises DataError if a file cannot be read or is malformed.
    """
    limits = config.resilience
    # In the cluster the driver uses its pod's rights instead of a kubeconfig.
    settings = config.kubernetes.model_copy(update={"kubeconfig": "", "context": ""})
    named_files = {"pod.yaml": settings.pod, "placement.json": limits.placement, "environment": limits.environment}
    data = {}  # contents by name
    for name, path in named_files.items():
        if path:
            try:
                data[name] = Path(path).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path}, which the settings name, cannot be read: {error}") from None
    if limits.environment:
        read_environment(Path(limits.environment), "resilience.environment")  # raises DataError if it is malformed
    # The settings name the files by their paths in the driver's pod.
    paths = {name: f"{SETTINGS_FOLDER}/{name}" for name in data}
    settings = settings.model_copy(update={"pod": paths.get("pod.yaml", "")})
    limits = limits.model_copy(
        update={"placement": paths.get("placement.json"), "environment": paths.get("environment")}
    )
    environment = data.pop("environment", None)
    data["job.toml"] = _format_changes(config.model_copy(update={"kubernetes": settings, "resilience": limits}))
    metadata = {
        "name": f"{make_object_name(config.train.name)}-settings",
        "labels": make_labels(config.train.name, "job"),
    }
    objects: list[Json] = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}]
    if environment is not None:
        secret_data = {"environment": base64.b64encode(environment.encode()).decode()}
        objects.append(
            {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": secret_data}
        )
    return objects


def _format_changes(config: Config) -> str:
    """Return the settings that differ from their defaults as TOML, which keeps the ConfigMap short."""
    defaults = tomllib.loads(Config().to_toml())
    tree = tomllib.loads(config.to_toml())
    changes = {}
    for section, settings in tree.items():
        changed = {key: value for key, value in settings.items() if defaults[section].get(key) != value}
        if changed:
            changes[section] = changed
    return tomli_w.dumps(changes)


def _make_driver_pod(config: Config, overrides: Sequence[str]) -> Json:
    """Return the template of the driver's pod, with the mounts and the patch of a node's pod but without devices."""
    settings = config.kubernetes
    job = config.train.name
    node = merge_patch(make_pod(config, job, 0), read_patch(settings))
    container = node["spec"]["containers"][0]
    node_volumes = ("secret", "about", "state", "shm")  # only an agent uses them
    mounts = [mount for mount in container["volumeMounts"] if mount["name"] not in node_volumes]
    volumes = [volume for volume in node["spec"]["volumes"] if volume["name"] not in node_volumes]
    env = [
        make_field_variable("MEGASCALE_POD", "metadata.name"),
        make_field_variable("MEGASCALE_POD_UID", "metadata.uid"),
        make_field_variable("MEGASCALE_POD_ADDRESS", "status.podIP"),
    ]
    env += [variable for variable in container["env"] if not variable["name"].startswith("MEGASCALE_")]
    name = f"{make_object_name(job)}-settings"
    # The Secret exists only if resilience.environment names a file.
    sources = [{"configMap": {"name": name}}, {"secret": {"name": name, "optional": True}}]
    command = module_command("megascale", "launch", f"{SETTINGS_FOLDER}/job.toml", python=settings.python)
    command += overrides
    settings_mount = {"name": "settings", "mountPath": SETTINGS_FOLDER, "readOnly": True}
    settings_volume = {"name": "settings", "projected": {"sources": sources}}
    driver: Json = {
        "name": "driver",
        "image": settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": command,
        "env": env,
        "volumeMounts": [settings_mount] + mounts,
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": make_container_security(),
    }
    driver |= make_probes(config.resilience.driver_metrics)
    spec: Json = {
        "restartPolicy": "OnFailure",
        "serviceAccountName": "megascale-driver",
        "terminationGracePeriodSeconds": 30,
        "containers": [driver],
        "volumes": [settings_volume] + volumes,
    }
    spec |= {key: node["spec"][key] for key in _SHARED_SPEC if node["spec"].get(key)}
    return {"metadata": {"labels": make_labels(job, "driver")}, "spec": spec}


def make_driver_job(config: Config) -> Json:
    """Return a Job that keeps one driver running until the training job ends.

    The run folder must be on a mounted volume.
    """
    job = config.train.name
    spec = {"backoffLimit": DRIVER_RESTARTS, "template": _make_driver_pod(config, [])}
    metadata = {"name": f"{make_object_name(job)}-driver", "labels": make_labels(job, "driver")}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


# JobSet ---------------------------------------------------------------------------------------------------------------


def make_jobset(config: Config, gpus: int, run: str) -> Json:
    """Return driver and nodes as one JobSet (jobset.x-k8s.io/v1alpha2), which Kueue admits as a whole.

    The driver does not create the nodes. All nodes, spares included, join the driver (`--cluster manual`), and the
    JobSet's controller replaces lost nodes.
    """
    job = config.train.name
    limits = config.resilience
    name = make_object_name(job)
    queue_label = {QUEUE_LABEL: config.kubernetes.queue} if config.kubernetes.queue else {}
    driver = _make_jobset_driver(config, run)
    node = _make_jobset_node(config, gpus)
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["driver"]},
        "failurePolicy": {"maxRestarts": DRIVER_RESTARTS},
        "replicatedJobs": [
            _make_replicated_job("driver", driver, pods=1, restarts=DRIVER_RESTARTS),
            _make_replicated_job("nodes", node, pods=limits.nodes + limits.spares, restarts=_NODE_RESTARTS),
        ],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": make_labels(job, "job") | queue_label},
        "spec": spec,
    }


def _make_jobset_driver(config: Config, run: str) -> Json:
    """Return the template of a driver that nodes join. The pod first copies the token into the run folder."""
    overrides = ["--cluster=manual", "--resilience.listen=0.0.0.0", f"--resilience.port={AGENTS_PORT}"]
    driver = _make_driver_pod(config, overrides)
    spec = driver["spec"]
    spec.pop("serviceAccountName")
    secret = {"secretName": make_object_name(config.train.name), "defaultMode": 0o400}
    spec["volumes"].append({"name": "token", "secret": secret})
    container = spec["containers"][0]
    container["volumeMounts"].append({"name": "token", "mountPath": TOKEN_FOLDER})
    folder = shlex.quote(f"{run}/driver")
    copy_token = f"umask 77; mkdir -p {folder} && cp {TOKEN_FOLDER}/token {folder}/token && exec "
    container["command"] = ["sh", "-c", copy_token + shlex.join(container["command"])]
    return driver


def _make_jobset_node(config: Config, gpus: int) -> Json:
    """Return the template of a node that joins the driver."""
    settings = config.kubernetes
    job = config.train.name
    name = make_object_name(job)
    node = make_pod(config, job, gpus, environment=read_inherited_variables(), patch=read_patch(settings))
    # The JobSet's subdomain names pods JOBSET-REPLICATEDJOB-JOB-POD.SUBDOMAIN; both indices of the driver are 0.
    address = f"{name}-driver-0-0.{name}:{AGENTS_PORT}"
    command = module_command("megascale", "agent", address, "--job", job, python=settings.python)
    command += ["--node", "$(MEGASCALE_NODE)", "--folder", STATE_FOLDER, "--secret-file", "-"]
    # The token comes on stdin, since a variable would stay in /proc/PID/environ for the agent's life.
    script = f'exec "$@" < {SECRET_FOLDER}/token'
    node["spec"]["containers"][0]["command"] = ["sh", "-c", script, "agent"] + command
    node["spec"]["restartPolicy"] = "OnFailure"
    metadata = node["metadata"]
    metadata["labels"].pop(QUEUE_LABEL, None)  # Kueue admits the JobSet as a whole.
    annotations = {key: value for key, value in metadata["annotations"].items() if key.startswith("prometheus")}
    return {"metadata": {"labels": metadata["labels"], "annotations": annotations}, "spec": node["spec"]}


def _make_replicated_job(name: str, template: Json, *, pods: int, restarts: int) -> Json:
    """Return a Job of a JobSet whose pods are equal except for their index."""
    spec = {
        "parallelism": pods,
        "completions": pods,
        "backoffLimit": restarts,
        "template": template,
        "completionMode": "Indexed",
    }
    return {"name": name, "replicas": 1, "template": {"spec": spec}}
