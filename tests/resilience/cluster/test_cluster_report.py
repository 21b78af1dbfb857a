"""The findings of `megascale doctor --cluster` about Slurm, by its commands, and about Kubernetes, by its API."""

from __future__ import annotations

import pytest

from megascale.resilience.cluster import cluster_report
from megascale.resilience.cluster.cluster_report import examine_kubernetes, examine_slurm
from megascale.resilience.cluster.kubernetes_api import KubernetesError

# As Slurm 22.05 prints it.
CONFIG = """Configuration data as of 2026-11-27T00:00:00
KillWait                = {kill_wait} sec
ProctrackType           = {tracking}
SlurmdTimeout           = 300 sec
"""


def make_slurm(*, up=True, idle=4, kill_wait=30, tracking="proctrack/linuxproc", pyxis=False):
    """Return a function that answers like Slurm's commands."""

    def run(*command):
        if command[:2] == ("sinfo", "--version"):
            return "slurm-wlm 22.05.8\n"
        if command[:2] == ("scontrol", "ping"):
            return f"Slurmctld(primary) at head is {'UP' if up else 'DOWN'}\n"
        if command[0] == "sinfo":
            return f"gpu*|idle|{idle}|gpu:8|1-00:00:00\ngpu*|down*|1|gpu:8|1-00:00:00\n"
        if command[:3] == ("scontrol", "show", "config"):
            return CONFIG.format(kill_wait=kill_wait, tracking=tracking)
        return "  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]\n" if pyxis else "  --nodes=N\n"

    return run


@pytest.fixture
def commands(monkeypatch):
    """All commands of Slurm are installed, and no container runtime."""
    monkeypatch.setattr(cluster_report.shutil, "which", lambda name: None if name == "apptainer" else f"/bin/{name}")
    monkeypatch.setattr(cluster_report, "find_library", lambda: "/lib/libslurm.so")


def verdicts(findings):
    return {finding.subject: finding.verdict for finding in findings}


def test_slurm_without_defaults_for_training_is_named_with_the_consequence(commands):
    findings = examine_slurm(make_slurm())
    assert verdicts(findings) == {
        "Slurm": "good",
        "slurmctld": "good",
        "partition gpu*": "good",
        "KillWait": "slow",
        "SlurmdTimeout": "good",
        "ProctrackType": "slow",
        "container runtimes": "slow",
        "Slurm's library": "good",
    }
    (partition,) = [finding for finding in findings if finding.subject == "partition gpu*"]
    assert partition.value == "1 down, 4 idle; gpu:8, time limit 1-00:00:00"
    assert all(finding.advice for finding in findings if finding.verdict != "good")


def test_idle_nodes_that_do_not_answer_and_kinds_of_nodes_are_told_apart(commands):
    slurm = make_slurm()

    def run(*command):
        if command[0] == "sinfo" and command[1] != "--version":
            return "gpu*|idle*|4|gpu:8|infinite\ngpu*|allocated|2|(null)|infinite\n"
        return slurm(*command)

    (partition,) = [finding for finding in examine_slurm(run) if finding.subject == "partition gpu*"]
    assert partition.value == "2 allocated, 4 without answer; gpu:8, time limit infinite; no GRES, time limit infinite"
    assert partition.verdict == "slow"


def test_slurm_as_it_should_be_has_no_remark(commands):
    findings = examine_slurm(make_slurm(kill_wait=120, tracking="proctrack/cgroup", pyxis=True))
    assert set(verdicts(findings).values()) == {"good"}


def test_slurm_that_is_down_or_full_is_said(commands):
    assert verdicts(examine_slurm(make_slurm(up=False)))["slurmctld"] == "missing"
    assert verdicts(examine_slurm(make_slurm(idle=0)))["partition gpu*"] == "slow"


def test_machine_without_slurm_is_told_to_use_a_login_node(monkeypatch):
    monkeypatch.setattr(cluster_report.shutil, "which", lambda name: None)
    (finding,) = examine_slurm(make_slurm())
    assert finding.verdict == "missing"
    assert "login node" in finding.advice


class Server:
    """Answers like an API server. refused: rights that it denies, "VERB RESOURCE"; gpus: of its only machine."""

    namespace = "training"

    def __init__(self, refused=(), gpus="8", groups=("jobset.x-k8s.io",), labels=None):
        self.refused = refused
        self.gpus = gpus
        self.groups = groups
        self.labels = labels

    def call(self, method, path, body=None):
        if path == "/version":
            return {"gitVersion": "v1.34.1"}
        if path.endswith("selfsubjectaccessreviews"):
            attributes = body["spec"]["resourceAttributes"]
            assert ("namespace" in attributes) == (attributes["resource"] != "nodes")
            return {"status": {"allowed": f"{attributes['verb']} {attributes['resource']}" not in self.refused}}
        if path == "/api/v1/namespaces/training":
            if self.labels is None:
                raise KubernetesError(404, "NotFound", "no such namespace")
            return {"metadata": {"labels": self.labels}}
        if path == "/api/v1/nodes":
            ready = [{"type": "Ready", "status": "True"}]
            return {"items": [{"status": {"conditions": ready, "allocatable": {"nvidia.com/gpu": self.gpus}}}]}
        assert path == "/apis"
        return {"groups": [{"name": name} for name in self.groups]}


def test_kubernetes_rights_namespace_gpus_and_extensions():
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    findings = examine_kubernetes(Server(labels=restricted), "nvidia.com/gpu")
    assert verdicts(findings) == {
        "API server": "good",
        "namespace training": "good",
        "rights of the driver": "good",
        "machines": "good",
        "JobSet": "good",
        "Kueue": "slow",
        "Prometheus operator": "slow",
    }
    assert "restricted" in findings[1].value
    assert findings[3].value == "1 with 8 GPUs"


def test_kubernetes_without_namespace_right_or_gpu_names_the_remedy():
    findings = examine_kubernetes(Server(refused=("watch nodes",), gpus="0"), "nvidia.com/gpu")
    result = {finding.subject: finding for finding in findings}
    assert result["namespace training"].advice == "kubectl create namespace training"
    assert result["rights of the driver"].value == "refused: watch nodes"
    assert result["machines"].verdict == "slow"


def test_kubernetes_that_does_not_answer_is_one_finding():
    class Away:
        namespace = "training"

        def call(self, method, path, body=None):
            raise KubernetesError(0, "Unreachable", "connection refused")

    (finding,) = examine_kubernetes(Away(), "nvidia.com/gpu")
    assert finding.verdict == "missing"
