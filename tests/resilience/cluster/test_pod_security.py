"""The rendered pods against Kubernetes' Pod Security Standards, policy "restricted", version 1.34.

The API server that can be built here is version 1.20, which has no admission for these standards. The table below
states their controls: https://kubernetes.io/docs/concepts/security/pod-security-standards/.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megascale.config import from_tree
from megascale.errors import ConfigError
from megascale.resilience.cluster.kubernetes_manifests import FORMS, make_manifests, to_yaml

yaml = pytest.importorskip("yaml")
Json = dict[str, Any]
Check = Callable[[Json], bool]


def config(**settings: Any) -> Any:
    metrics = {"agent_metrics": "0.0.0.0:9400", "driver_metrics": "0.0.0.0:9401"}
    return from_tree(
        {
            "train": {"name": "job", "runs": "/data/runs"},
            "resilience": {"nodes": 3, "spares": 1, "cluster": "kubernetes"} | metrics,
            "kubernetes": {"image": "r/m:1", "mounts": ["claim:data:/data"], "shm": "64Gi"} | settings,
        }
    )


def find_pods(thing: Any) -> Iterator[Json]:
    """Yield every pod spec inside an object."""
    if isinstance(thing, dict):
        if "containers" in thing:
            yield thing
        for value in thing.values():
            yield from find_pods(value)
    elif isinstance(thing, list):
        for value in thing:
            yield from find_pods(value)


def container(pod: Json) -> Json:
    return pod["containers"][0]


def security(thing: Json) -> Json:
    return thing.get("securityContext", {})


def contexts(pod: Json) -> list[Json]:
    """Return the security contexts of the pod and its containers."""
    return [security(pod)] + [security(each) for each in pod["containers"]]


def probes(pod: Json) -> list[Json]:
    return [value["httpGet"] for value in container(pod).values() if isinstance(value, dict) and "httpGet" in value]


VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
SECCOMP = {"RuntimeDefault", "Localhost"}
SELINUX = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def effective(pod: Json, key: str) -> list[Any]:
    """Return a container's value of a key, or else the pod's."""
    return [security(each).get(key, security(pod).get(key)) for each in pod["containers"]]


def break_security(**values: Any) -> Callable[[Json], None]:
    return lambda pod: container(pod)["securityContext"].update(values)


# (control, its rule, a change that violates it)
CONTROLS: list[tuple[str, Check, Callable[[Json], None]]] = [
    ("HostProcess", lambda pod: not any(each.get("windowsOptions", {}).get("hostProcess") for each in contexts(pod)),
        break_security(windowsOptions={"hostProcess": True})),
    ("Host Namespaces", lambda pod: not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")),
        lambda pod: pod.update(hostNetwork=True)),
    ("Privileged Containers", lambda pod: not any(each.get("privileged") for each in contexts(pod)),
        break_security(privileged=True)),
    ("HostPath Volumes", lambda pod: not any("hostPath" in volume for volume in pod["volumes"]),
        lambda pod: pod["volumes"].append({"name": "h", "hostPath": {"path": "/"}})),
    ("Host Ports", lambda pod: not any(port.get("hostPort") for port in container(pod).get("ports", [])),
        lambda pod: container(pod)["ports"].append({"containerPort": 1, "hostPort": 1})),
    ("Host Probes / Lifecycle Hooks", lambda pod: not any(probe.get("host") for probe in probes(pod)),
        lambda pod: container(pod)["livenessProbe"]["httpGet"].update(host="10.0.0.1")),
    ("AppArmor", lambda pod: all(
        each.get("appArmorProfile", {}).get("type", "RuntimeDefault") in SECCOMP for each in contexts(pod)),
        break_security(appArmorProfile={"type": "Unconfined"})),
    ("SELinux", lambda pod: all(each.get("seLinuxOptions", {}).get("type", "") in SELINUX for each in contexts(pod)),
        break_security(seLinuxOptions={"type": "spc_t"})),
    ("/proc Mount Type", lambda pod: all(each.get("procMount", "Default") == "Default" for each in contexts(pod)),
        break_security(procMount="Unmasked")),
    ("Sysctls", lambda pod: not security(pod).get("sysctls"),
        lambda pod: pod["securityContext"].update(sysctls=[{"name": "kernel.shm_rmid_forced", "value": "1"}])),
    ("Volume Types", lambda pod: all(set(volume) & VOLUMES for volume in pod["volumes"]),
        lambda pod: pod["volumes"].append({"name": "n", "nfs": {"path": "/"}})),
    ("Privilege Escalation", lambda pod: all(
        security(each).get("allowPrivilegeEscalation") is False for each in pod["containers"]),
        break_security(allowPrivilegeEscalation=True)),
    ("Running as Non-root", lambda pod: all(value is True for value in effective(pod, "runAsNonRoot")),
        lambda pod: pod["securityContext"].pop("runAsNonRoot")),
    ("Running as Non-root user", lambda pod: all(each.get("runAsUser") != 0 for each in contexts(pod)),
        lambda pod: pod["securityContext"].update(runAsUser=0)),
    ("Seccomp", lambda pod: all((value or {}).get("type") in SECCOMP for value in effective(pod, "seccompProfile")),
        lambda pod: pod["securityContext"].pop("seccompProfile")),
    ("Capabilities: drop ALL", lambda pod: all(
        "ALL" in security(each).get("capabilities", {}).get("drop", []) for each in pod["containers"]),
        break_security(capabilities={})),
    ("Capabilities: add", lambda pod: all(
        set(security(each).get("capabilities", {}).get("add", [])) <= {"NET_BIND_SERVICE"}
        for each in pod["containers"]),
        break_security(capabilities={"drop": ["ALL"], "add": ["IPC_LOCK"]})),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("control", "is_met", "violate"), CONTROLS, ids=[control for control, _, _ in CONTROLS])
def test_pods_meet_the_restricted_standard(form, control, is_met, violate):
    pods = list(find_pods(make_manifests(config(), form, 8, "/data/runs/job")))
    assert len(pods) == {"nodes": 1, "driver": 1, "jobset": 2}[form]
    for pod in pods:
        assert is_met(pod)
        violating = copy.deepcopy(pod)
        violate(violating)
        assert not is_met(violating)


@pytest.mark.parametrize(
    ("settings", "violated"),
    [
        ({"user": 0}, {"Running as Non-root"}),
        ({"host_network": True}, {"Host Namespaces"}),
        ({"mounts": ["host:/data:/data"]}, {"HostPath Volumes", "Volume Types"}),
        ({"resources": ["rdma/hca=8"]}, {"Capabilities: add"}),
    ],
)
def test_the_settings_that_a_restricted_namespace_refuses_are_the_documented_ones(settings, violated):
    (pod,) = find_pods(make_manifests(config(**settings), "nodes", 8, "/data/runs/job"))
    assert {control for control, is_met, _ in CONTROLS if not is_met(pod)} == violated


@pytest.mark.parametrize("form", FORMS)
def test_pods_request_cpu_and_memory_and_write_only_to_volumes(form):
    for pod in find_pods(make_manifests(config(), form, 8, "/data/runs/job")):
        assert {"cpu", "memory"} <= set(container(pod)["resources"]["requests"])
        assert security(container(pod))["readOnlyRootFilesystem"] is True
        mounts = {mount["mountPath"] for mount in container(pod)["volumeMounts"] if not mount.get("readOnly")}
        assert "/tmp" in mounts
        assert {"name": "HOME", "value": "/tmp"} in container(pod)["env"]
        names = {probe["path"] for probe in probes(pod)}
        assert names == {"/live", "/health"}
        assert container(pod)["livenessProbe"]["httpGet"]["path"] == "/live"


@pytest.mark.parametrize("form", FORMS)
def test_driver_and_nodes_have_the_priority_class(form):
    """A driver of lower priority would be preempted before its nodes."""
    pods = list(find_pods(make_manifests(config(priority_class="training"), form, 8, "/data/runs/job")))
    assert pods
    assert {pod["priorityClassName"] for pod in pods} == {"training"}


def test_kueue_admits_a_jobset_as_a_whole_and_other_pods_one_by_one():
    queue = "kueue.x-k8s.io/queue-name"
    (jobset,) = [
        thing
        for thing in make_manifests(config(queue="team"), "jobset", 8, "/data/runs/job")
        if thing["kind"] == "JobSet"
    ]
    assert jobset["metadata"]["labels"][queue] == "team"
    for job in jobset["spec"]["replicatedJobs"]:
        assert queue not in job["template"]["spec"]["template"]["metadata"]["labels"]
    (node,) = [thing for thing in make_manifests(config(queue="team"), "nodes", 8, "/r") if thing["kind"] == "Pod"]
    assert node["metadata"]["labels"][queue] == "team"


def test_shared_memory_counts_as_memory():
    (pod,) = find_pods(make_manifests(config(), "nodes", 8, "/data/runs/job"))
    assert container(pod)["resources"]["requests"]["memory"] == f"{65 * 1024}Mi"
    with pytest.raises(ConfigError, match=r"kubernetes\.shm=64Gi leaves nothing of memory=64Gi"):
        make_manifests(config(resources=["memory=64Gi"]), "nodes", 8, "/data/runs/job")
    with pytest.raises(ConfigError, match="write whole numbers"):
        make_manifests(config(resources=["memory=1.5Gi"]), "nodes", 8, "/data/runs/job")


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (["cpus=90"], "has cpus=90, whose name Kubernetes does not accept; write cpu, memory"),
        (["rdma/=1"], "whose name Kubernetes does not accept"),
        (["cpu=many"], "has cpu=many, which is not a quantity; write a number"),
        (["memory=64GiB"], "has memory=64GiB, which is not a quantity"),
        (["cpu="], "has cpu=, which is not a quantity"),
        (["cpu=+-8"], "has cpu=-8, which is not a quantity"),
        (["cpu=0"], "has cpu=0, which gives the pod nothing"),
        (["rdma/hca=500m"], "a pod gets whole devices only; write a whole number, such as rdma/hca=1"),
        (["cpu=8", "cpu=16"], r"has cpu twice \(8 and 16\); remove one"),
        (["nvidia.com/gpu=4"], "has nvidia.com/gpu=4, and parallel.gpus_per_host=8 requests 8 GPUs per node; remove"),
    ],
)
def test_resources_that_pods_cannot_request_are_refused(resources, message):
    with pytest.raises(ConfigError, match=message):
        make_manifests(config(resources=resources), "nodes", 8, "/data/runs/job")


def test_resources_in_the_forms_of_kubernetes_are_requested():
    resources = ["cpu=1500m", "memory=200Gi", "ephemeral-storage=1e9", "hugepages-2Mi=4Gi", "nvidia.com/gpu=8"]
    (pod,) = find_pods(make_manifests(config(resources=resources), "nodes", 8, "/data/runs/job"))
    assert container(pod)["resources"]["limits"] == dict(text.split("=") for text in resources)
    # Kubernetes accepts a sign, with which a text differs from the number of GPUs.
    (pod,) = find_pods(make_manifests(config(resources=["cpu=+2", "nvidia.com/gpu=+8"]), "nodes", 8, "/data/runs/job"))
    assert container(pod)["resources"]["limits"] == {"cpu": "2", "nvidia.com/gpu": "8"}
    # On CPUs a pod may request GPUs for another purpose.
    make_manifests(config(resources=["nvidia.com/gpu=4"]), "nodes", 0, "/data/runs/job")


@pytest.mark.parametrize("form", FORMS)
def test_every_object_of_a_namespace_names_it(form):
    objects = make_manifests(
        config(namespace="ml", pod_monitor=True, disruption_budget=True), form, 8, "/data/runs/job"
    )
    spaced = [each for each in objects if not each["kind"].startswith("Cluster")]
    assert {each["metadata"].get("namespace") for each in spaced} == {"ml"}
    (budget,) = [each for each in objects if each["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["minAvailable"] == 3
    (monitor,) = [each for each in objects if each["kind"] == "PodMonitor"]
    assert monitor["spec"]["podMetricsEndpoints"][0]["honorLabels"] is True
    ports = {port["name"] for pod in find_pods(objects) for port in container(pod)["ports"]}
    assert ports == {monitor["spec"]["podMetricsEndpoints"][0]["port"]}


def test_the_config_map_has_the_keys_that_the_user_has_set():
    text = to_yaml(make_manifests(config(), "driver", 8, "/data/runs/job"))
    assert "job.toml: |\n" in text
    (config_map,) = [each for each in yaml.safe_load_all(text) if each["kind"] == "ConfigMap"]
    lines = config_map["data"]["job.toml"].splitlines()
    assert 'shm = "64Gi"' in lines
    assert len(lines) < 25
    assert not any(line.startswith("window") for line in lines)


def test_a_pod_monitor_without_an_address_is_refused():
    settings = config(pod_monitor=True)
    limits = settings.resilience.model_copy(update={"agent_metrics": "", "driver_metrics": ""})
    with pytest.raises(ConfigError, match=r"set resilience\.driver_metrics"):
        make_manifests(settings.model_copy(update={"resilience": limits}), "driver", 8, "/data/runs/job")
