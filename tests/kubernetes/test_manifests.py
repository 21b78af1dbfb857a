"""Manifests of `launch --dry-run` and the kustomize base: a real API server accepts them in its own dry run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.launched import make

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
    "--resilience.agent_metrics=0.0.0.0:9400",
)


@pytest.mark.parametrize("settings", [SETTINGS[:1], SETTINGS], ids=["few", "many"])
@pytest.mark.parametrize("form", ["nodes", "driver"])
def test_the_server_takes_what_is_printed(site, tmp_path, form, settings):
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
    output = site.kubectl("apply", "--dry-run=server", "-f", "-", output=printed.stdout)
    kinds = {line.partition("/")[0].split(".")[0] for line in output.splitlines()}
    assert kinds >= ({"pod", "configmap", "secret"} if form == "nodes" else {"job", "role", "serviceaccount"})


def test_the_server_takes_the_kustomize_base(site):
    printed = site.kubectl("kustomize", str(BASE))
    output = site.kubectl("apply", "--dry-run=server", "-f", "-", output=printed)
    assert "job.batch/" in output


def test_the_server_refuses_what_is_no_pod(site):
    """Else its dry run would show nothing."""
    from megascale.errors import TrainingError

    broken = '{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containers": []}}'
    with pytest.raises(TrainingError, match="containers"):
        site.kubectl("apply", "--dry-run=server", "-f", "-", output=broken)
