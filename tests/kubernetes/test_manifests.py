"""Manifests of `launch --dry-run` and the kustomize base: a real API server accepts them in its own dry run.

The server is version 1.20. It has no PodDisruptionBudget of policy/v1, which is policy/v1beta1 with the same fields
there. PodMonitor and JobSet are custom resources: the test defines them with the fields that upstream's types have of
those that MegaScale prints, and the server checks the templates of a JobSet as Jobs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.launched import make
from megascale.errors import TrainingError
from megascale.resilience.cluster.kubernetes_manifests import FORMS

yaml = pytest.importorskip("yaml")
Json = dict[str, Any]
BASE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base"
SETTINGS = (
    "--kubernetes.image=registry.example/megascale:1",
    "--kubernetes.resources=['cpu=90','memory=1500Gi','rdma/hca=8']",
    "--kubernetes.tolerations=['nvidia.com/gpu:NoSchedule']",
    "--kubernetes.node_selector=['pool=gpu']",
    "--kubernetes.switch_label=topology.example/switch",
    "--kubernetes.mounts=['host:/data:/data:ro','claim:shared:/shared']",
    "--kubernetes.shm=64Gi",
    "--kubernetes.queue=team",
    "--kubernetes.priority_class=training",
    "--kubernetes.pod_monitor=true",
    "--kubernetes.disruption_budget=true",
    "--resilience.agent_metrics=0.0.0.0:9400",
    "--resilience.driver_metrics=0.0.0.0:9401",
)
KINDS = {"nodes": {"pod", "configmap", "secret"}, "driver": {"job", "role", "serviceaccount"}, "jobset": {"jobset"}}


def make_object(**properties: Json) -> Json:
    """Return the schema of an object that has no other fields."""
    return {"type": "object", "properties": properties}


def make_list(items: Json) -> Json:
    return {"type": "array", "items": items}


TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
LABELS = {"type": "object", "additionalProperties": TEXT}
ANY_OBJECT = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
POD_MONITOR = make_object(
    jobLabel=TEXT,
    selector=make_object(matchLabels=LABELS),
    podMetricsEndpoints=make_list(
        make_object(
            port=TEXT,
            honorLabels=FLAG,
            relabelings=make_list(make_object(sourceLabels=make_list(TEXT), targetLabel=TEXT)),
        )
    ),
)
JOBSET = make_object(
    network=make_object(enableDNSHostnames=FLAG, subdomain=TEXT, publishNotReadyAddresses=FLAG),
    successPolicy=make_object(operator={"enum": ["All", "Any"], **TEXT}, targetReplicatedJobs=make_list(TEXT)),
    failurePolicy=make_object(maxRestarts=COUNT),
    replicatedJobs=make_list(make_object(name=TEXT, replicas=COUNT, template=ANY_OBJECT)),
)


def define(group: str, version: str, kind: str, spec: Json) -> Json:
    """Return the CustomResourceDefinition of a kind."""
    name = kind.lower()
    schema = {"openAPIV3Schema": make_object(spec=spec)}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{name}s.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": f"{name}s", "singular": name, "listKind": f"{kind}List"},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }


@pytest.fixture(scope="module")
def server(site):
    """A site whose API server has the custom resources."""
    definitions = [
        define("monitoring.coreos.com", "v1", "PodMonitor", POD_MONITOR),
        define("jobset.x-k8s.io", "v1alpha2", "JobSet", JOBSET),
    ]
    site.kubectl("apply", "-f", "-", output=json.dumps({"apiVersion": "v1", "kind": "List", "items": definitions}))
    for definition in definitions:
        name = definition["metadata"]["name"]
        site.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=60s", seconds=90.0)
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "training"}}
    site.kubectl("apply", "-f", "-", output=json.dumps(priority | {"value": 1000}))
    return site


def adapt(thing: Json) -> Iterator[Json]:
    """Yield what the server checks of an object: the object in its own version, and a JobSet's templates as Jobs."""
    if thing["kind"] == "PodDisruptionBudget":
        yield thing | {"apiVersion": "policy/v1beta1"}
        return
    yield thing
    if thing["kind"] == "JobSet":
        for job in thing["spec"]["replicatedJobs"]:
            metadata = {"name": f"{thing['metadata']['name']}-{job['name']}"}
            # Alpha in 1.20, where the server drops it.
            spec = {key: value for key, value in job["template"]["spec"].items() if key != "completionMode"}
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


@pytest.mark.parametrize("settings", [SETTINGS[:1], SETTINGS], ids=["few", "many"])
@pytest.mark.parametrize("form", FORMS)
def test_the_server_takes_what_is_printed(server, tmp_path, form, settings):
    arguments = [
        "launch",
        str(make(tmp_path)),
        "--cluster",
        "kubernetes",
        "--train.name=demo",
        "--dry-run",
        "--form",
        form,
    ]
    command = [sys.executable, "-m", "megascale.cli.main", *arguments, *settings]
    printed = subprocess.run(command, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    objects = [each for thing in yaml.safe_load_all(printed.stdout) for each in adapt(thing)]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    output = server.kubectl("apply", "--dry-run=server", "-f", "-", output=text).splitlines()
    assert len(output) == len(objects)
    kinds = {line.partition("/")[0].split(".")[0] for line in output}
    assert kinds >= KINDS[form]
    assert {"podmonitor", "poddisruptionbudget"} <= kinds or settings is not SETTINGS


def test_the_server_takes_the_kustomize_base(site):
    printed = site.kubectl("kustomize", str(BASE))
    output = site.kubectl("apply", "--dry-run=server", "-f", "-", output=printed)
    assert "job.batch/" in output


@pytest.mark.parametrize(
    ("version", "kind", "spec", "reason"),
    [
        ("v1", "Pod", {"containers": []}, "containers"),
        ("monitoring.coreos.com/v1", "PodMonitor", {"podMetricsEndpoint": []}, "unknown field"),
        ("jobset.x-k8s.io/v1alpha2", "JobSet", {"successPolicy": {"operator": "Most"}}, "Unsupported value"),
    ],
)
def test_the_server_refuses_malformed_objects(server, version, kind, spec, reason):
    """A dry run that accepts everything would show nothing."""
    broken = {"apiVersion": version, "kind": kind, "metadata": {"name": "x"}, "spec": spec}
    with pytest.raises(TrainingError, match=reason):
        server.kubectl("apply", "--dry-run=server", "-f", "-", output=json.dumps(broken))
