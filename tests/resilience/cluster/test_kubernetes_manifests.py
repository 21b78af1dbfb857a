"""Manifests for Kubernetes: pods, rights, a kustomize base, a JobSet."""

from __future__ import annotations

import base64
import importlib.util
import shutil
import subprocess
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from megascale.config import from_tree
from megascale.errors import ConfigError, DataError
from megascale.resilience.cluster.kubernetes_manifests import make_manifests, to_yaml
from megascale.resilience.cluster.kubernetes_pods import make_pod, merge_patch, read_patch
from tests.chaos.image_layout import read_image_layout

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[3]


def config(**settings: Any) -> Any:
    tree: dict[str, Any] = {"train": {"name": "job", "runs": "/data/runs"}, "resilience": {"nodes": 3, "spares": 1}}
    tree["kubernetes"] = {"image": "r/m:1"} | settings
    tree["resilience"] |= {"cluster": "kubernetes", "agent_metrics": "0.0.0.0:9100"}
    return from_tree(tree)


def container(thing: dict) -> dict:
    return thing["spec"]["containers"][0]


def test_a_pod_asks_for_what_its_node_needs():
    result = make_pod(
        config(resources=["cpu=90", "rdma/hca=8"], shm="64Gi", tolerations=["gpu=yes:NoSchedule", "b:NoExecute"]),
        "job-1",
        8,
        driver=("10.0.0.1", 29400),
        epoch=7,
        avoid=["bad"],
    )
    limits = container(result)["resources"]["limits"]
    assert limits == {"cpu": "90", "rdma/hca": "8", "nvidia.com/gpu": "8"}
    assert container(result)["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    volumes = {each["name"]: each for each in result["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert result["metadata"]["annotations"]["megascale.dev/driver"] == "10.0.0.1:29400"
    assert result["metadata"]["annotations"]["prometheus.io/port"] == "9100"
    assert result["spec"]["tolerations"] == [
        {"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"},
        {"key": "b", "operator": "Exists", "effect": "NoExecute"},
    ]
    affinity = result["spec"]["affinity"]
    term = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "NotIn", "values": ["bad"]}]
    assert "podAntiAffinity" in affinity
    assert result["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("required", [False, True])
def test_pods_go_under_one_switch_and_a_node_that_is_wanted_again_where_it_was(required):
    settings = config(switch_label="topology.example/switch", switch_required=required)
    near = make_pod(settings, "job-1", 0)["spec"]["affinity"]["podAffinity"]
    if required:
        (term,) = near["requiredDuringSchedulingIgnoredDuringExecution"]
    else:
        (preferred,) = near["preferredDuringSchedulingIgnoredDuringExecution"]
        term = preferred["podAffinityTerm"]
    assert term["topologyKey"] == "topology.example/switch"
    assert term["labelSelector"]["matchLabels"] == {"megascale.dev/job": "job", "megascale.dev/role": "agent"}
    repeated = make_pod(settings, "job-1", 0, machine="k3")["spec"]["affinity"]
    assert "podAffinity" not in repeated
    (chosen,) = repeated["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert chosen["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["k3"]}]


def test_only_the_job_s_own_pods_reach_them_but_for_metrics():
    (policy,) = [each for each in make_manifests(config(), "driver", 8, "/data/r") if each["kind"] == "NetworkPolicy"]
    local = {"matchLabels": {"megascale.dev/job": "job"}}
    assert policy["spec"]["podSelector"] == local
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    inside, metrics = policy["spec"]["ingress"]
    assert inside == {"from": [{"podSelector": local}]}
    assert metrics == {"ports": [{"port": "metrics", "protocol": "TCP"}]}
    assert {"name": "metrics", "containerPort": 9100} in container(make_pod(config(), "job-1", 8))["ports"]


def test_no_secret_stands_in_a_pod(monkeypatch):
    monkeypatch.setenv("MEGASCALE_REDIS_PASSWORD", "hunter2-hunter2")
    from megascale.resilience.cluster.kubernetes_objects import list_inherited_secrets, read_inherited_variables

    text = str(make_pod(config(), "job-1", 8, environment=read_inherited_variables(), secrets=list_inherited_secrets()))
    assert "hunter2" not in text


@pytest.mark.parametrize("inputs", ["gpu yes", "=a:NoSchedule", "a:Never"])
def test_tolerations_that_are_none_are_refused(inputs):
    with pytest.raises(ConfigError, match=r"kubernetes\.tolerations"):
        make_pod(config(tolerations=[inputs]), "job-1", 0)


def test_names_that_kubernetes_does_not_take_are_refused():
    bad = config().model_copy(update={"train": config().train.model_copy(update={"name": "My_Job"})})
    with pytest.raises(ConfigError, match=r"--train\.name=my-job"):
        make_manifests(bad, "nodes", 0, "/runs/x")


def test_a_patch_is_merged_by_names():
    base = {"spec": {"containers": [{"name": "agent", "env": [{"name": "A", "value": "1"}], "image": "x"}], "a": 1}}
    patch = {
        "spec": {"containers": [{"name": "agent", "env": [{"name": "B", "value": "2"}]}, {"name": "c"}], "a": None}
    }
    assert merge_patch(base, patch) == {
        "spec": {
            "containers": [
                {"name": "agent", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], "image": "x"},
                {"name": "c"},
            ]
        }
    }
    mounts = merge_patch([{"name": "a", "mountPath": "/x"}], [{"name": "a", "mountPath": "/y"}])
    assert [each["mountPath"] for each in mounts] == ["/x", "/y"]


def test_a_patch_that_is_no_pod_is_refused(tmp_path: Path):
    file = tmp_path / "patch.yaml"
    file.write_text("containers: []\n")
    with pytest.raises(DataError, match=r"kubernetes\.pod="):
        read_patch(config(pod=str(file)).kubernetes)


def test_the_driver_s_manifests_carry_the_files_that_settings_name(tmp_path: Path):
    (tmp_path / "patch.yaml").write_text("spec: {hostIPC: true}\n")
    result = {
        each["kind"]: each for each in make_manifests(config(pod=str(tmp_path / "patch.yaml")), "driver", 8, "/data/r")
    }
    data = result["ConfigMap"]["data"]
    assert data["pod.yaml"] == "spec: {hostIPC: true}\n"
    assert 'pod = "/etc/megascale/job/pod.yaml"' in data["job.toml"]
    role = result["Role"]["rules"]
    assert not any("secrets" in rule["resources"] and {"get", "list", "watch"} & set(rule["verbs"]) for rule in role)
    assert not any(
        "*" in rule["verbs"] + rule["resources"] for rule in list(role) + list(result["ClusterRole"]["rules"])
    )
    assert result["Job"]["spec"]["template"]["spec"]["serviceAccountName"] == "megascale-driver"


def test_the_environment_of_trainers_is_a_secret(tmp_path: Path):
    file = tmp_path / "network.env"
    file.write_text("NCCL_IB_TIMEOUT=21\nAWS_SECRET_ACCESS_KEY=hunter2\n")
    settings = config()
    settings = settings.model_copy(
        update={"resilience": settings.resilience.model_copy(update={"environment": str(file)})}
    )
    for form in ("driver", "jobset"):
        objects = make_manifests(settings, form, 8, "/data/r")
        shown = [each for each in objects if each["kind"] != "Secret"]
        assert "hunter2" not in str(shown)
        (secret,) = [
            each for each in objects if each["metadata"]["name"] == "megascale-job-settings" and each not in shown
        ]
        assert base64.b64decode(secret["data"]["environment"]).decode() == file.read_text()
    (settings_map,) = [each for each in shown if each["kind"] == "ConfigMap"]
    assert 'environment = "/etc/megascale/job/environment"' in settings_map["data"]["job.toml"]
    file.write_text("NCCL_NET_PLUGIN=evil\n")
    with pytest.raises(DataError, match="NCCL_NET_PLUGIN is not accepted"):
        make_manifests(settings, "driver", 8, "/data/r")


def test_an_agent_of_a_jobset_reads_the_secret_from_its_mounted_file(tmp_path: Path):
    (tmp_path / "token").write_text("5" * 64)
    jobset = make_manifests(config(), "jobset", 8, "/data/r")[-1]
    agent = container(jobset["spec"]["replicatedJobs"][1]["template"]["spec"]["template"])
    assert "token" not in str(agent["env"])
    assert {"name": "secret", "mountPath": "/etc/megascale/secret", "readOnly": True} in agent["volumeMounts"]
    arguments = [word.replace("/etc/megascale/secret", str(tmp_path)) for word in agent["command"]]
    start = arguments.index("python3")
    result = subprocess.run(arguments[:start] + ["cat"], capture_output=True, text=True, check=True)
    assert result.stdout == "5" * 64
    assert arguments[-2:] == ["--secret-file", "-"]


def test_the_base_says_what_the_command_prints():
    loader = SourceFileLoader("kubernetes_base", str(ROOT / "scripts" / "kubernetes-base"))
    spec = importlib.util.spec_from_loader("kubernetes_base", loader)
    assert spec is not None
    built = importlib.util.module_from_spec(spec)
    loader.exec_module(built)
    for name, text in built.files().items():
        assert (built.BASE / name).read_text() == text, f"run scripts/kubernetes-base: {name} is old"


def test_the_base_is_rendered_by_kubectl():
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here (Debian: kubernetes-client)")
    arguments = ["kubectl", "kustomize", str(ROOT / "deploy" / "kubernetes" / "base")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kinds = sorted(each["kind"] for each in yaml.safe_load_all(done.stdout))
    rights = ["ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "ServiceAccount"]
    assert kinds == sorted(rights + ["ConfigMap", "Job", "NetworkPolicy", "PersistentVolumeClaim"])


# The essentials of jobset.x-k8s.io/v1alpha2, by hand from its Go types: the CRD itself is not had here. Of pods'
# templates it says nothing: the API server's own dry run accepts those, as Jobs.
_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_REPLICATED = {
    "type": "object",
    "required": ["name", "template"],
    "additionalProperties": False,
    "properties": {
        "name": _NAME,
        "groupName": _NAME,
        "replicas": {"type": "integer", "minimum": 0},
        "template": {
            "type": "object",
            "required": ["spec"],
            "additionalProperties": False,
            "properties": {
                "metadata": {"type": "object"},
                "spec": {
                    "type": "object",
                    "required": ["template"],
                    "additionalProperties": False,
                    "properties": {
                        "parallelism": {"type": "integer", "minimum": 0},
                        "completions": {"type": "integer", "minimum": 0},
                        "backoffLimit": {"type": "integer", "minimum": 0},
                        "completionMode": {"enum": ["Indexed", "NonIndexed"]},
                        "template": {"type": "object", "required": ["spec"]},
                    },
                },
            },
        },
    },
}
JOBSET = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": _NAME, "labels": {"type": "object", "additionalProperties": {"maxLength": 63}}},
        },
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "replicatedJobs": {"type": "array", "items": _REPLICATED},
                "network": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "enableDNSHostnames": {"type": "boolean"},
                        "publishNotReadyAddresses": {"type": "boolean"},
                        "subdomain": _NAME,
                    },
                },
                "successPolicy": {
                    "type": "object",
                    "required": ["operator"],
                    "additionalProperties": False,
                    "properties": {
                        "operator": {"enum": ["All", "Any"]},
                        "targetReplicatedJobs": {"type": "array", "items": {"type": "string"}},
                    },
                },
                "failurePolicy": {"type": "object", "properties": {"maxRestarts": {"type": "integer", "minimum": 0}}},
            },
        },
    },
}


def test_a_jobset_is_as_its_types_say():
    schema = pytest.importorskip("jsonschema_rs")
    result = make_manifests(config(queue="team"), "jobset", 8, "/data/runs/job")[-1]
    schema.validate(JOBSET, result)
    assert result["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    driver, nodes = result["spec"]["replicatedJobs"]
    assert result["spec"]["successPolicy"]["targetReplicatedJobs"] == [driver["name"]]
    assert nodes["template"]["spec"]["parallelism"] == 4
    agent = container(nodes["template"]["spec"]["template"])
    assert "megascale-job-driver-0-0.megascale-job:29400" in agent["command"]
    text = to_yaml([result])
    assert "&id" not in text
    with pytest.raises(schema.ValidationError):
        schema.validate(JOBSET, result | {"spec": result["spec"] | {"replicatedJob": []}})


def test_pods_run_as_the_user_of_the_image():
    layout = read_image_layout()
    assert config().kubernetes.user == layout.user
    assert layout.home.strip("/") in layout.folders
    assert f":{layout.user}:{layout.user}::{layout.home}:" in layout.files["etc/passwd"].decode()
