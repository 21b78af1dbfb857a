"""A session on Kubernetes as docs/kubernetes.md shows it: from an empty cluster to a run that outlives a pod."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.launched import WAIT, make
from megascale.resilience.driver.state.journal_reader import read_journal_events
from tests.chaos.kubernetes.job import ROLE, give_to_pods, local_settings
from tests.chaos.kubernetes.site import KubernetesSite
from tests.chaos.machines.network import wait

_LAUNCH = "megascale launch job.toml --cluster kubernetes --nodes 2 --spares 1 --train.name=demo --train.steps=300"
_SETTINGS = (("hidden = 32", "hidden = 64"), ("interval = 50", "interval = 100"))
_PODS = "kubectl get pods --output=custom-columns=NAME:.metadata.name,PHASE:.status.phase,NODE:.spec.nodeName"


def session(site: KubernetesSite, folder: Path, log: Callable[[str], None]) -> bool:
    """Type commands on a machine that reaches the cluster, and say them with what they print; whether all went well.

    Args:
        site: empty.
        folder: to work in.
    """
    work = folder / "job"
    work.mkdir()
    file, run = make(work), work / "runs" / "demo"
    text = file.read_text()
    for old, new in _SETTINGS:
        text = text.replace(old, new)
    shared = work / "shared"
    shared.mkdir()
    give_to_pods(shared)
    settings = "".join(f"{key} = {json.dumps(value)}\n" for key, value in local_settings(work).items())
    text = text.replace("[checkpoint]\n", f'[checkpoint]\nlocation = "{shared}"\n')
    file.write_text(f'{text}\n[kubernetes]\nnamespace = "team"\n{settings}')
    environment = site.environment | {"KUBECONFIG": str(site.kubeconfig), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{site.programs}:{os.environ['PATH']}"
    driver = None

    def command(line: str) -> list[str]:
        return site.inside(["bash", "-c", f"cd {work} && {_clean(line)}"])

    def typed(line: str) -> None:
        done = subprocess.run(command(line), capture_output=True, text=True, env=environment)
        log(f"$ {line}")
        for each in (done.stdout + done.stderr).splitlines():
            log(each.rstrip().replace(f"{work}/", ""))

    def wait_for_event(subject: str, times: int = 1) -> None:
        events = run / "events.jsonl"
        wait(lambda: events.exists() and events.read_text().count(f'"event": "{subject}"') >= times, subject, 3 * WAIT)

    def lost() -> str:
        """The pod that holds rank 1."""
        node = next(e for e in reversed(read_journal_events(run, 0)) if e.kind == "attempt_started").nodes[1]
        pods = site.get("pods", "-n", "team", "-l", f"{ROLE}=agent")
        return str(next(pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName") == node))

    typed("kubectl get nodes")
    typed("kubectl create namespace team")
    typed("kubectl config set-context --current --namespace=team")
    launch = _LAUNCH + f" --resilience.listen={site.address}"
    log(f"$ {launch} > demo.out &")
    with open(work / "demo.out", "w") as out:
        driver = subprocess.Popen(command(f"exec {_clean(launch)}"), stdout=out, stderr=out, env=environment)
    try:
        wait_for_event("first_step")
        wait_for_event("node_joined", 3)
        typed(_PODS)
        typed("megascale access runs/demo > demo.access && chmod 600 demo.access")
        typed("megascale nodes demo.access")
        typed(f"kubectl delete pod {lost()} --wait=false")
        wait_for_event("first_step", 2)
        typed("megascale events runs/demo | tail -n 12")
        typed(_PODS)
        code = driver.wait(3 * WAIT)
        typed("tail -n 4 demo.out")
        typed(_PODS)
    finally:
        driver.kill()
        driver.wait()
    return code == 0


def _clean(line: str) -> str:
    """The line with this installation's command."""
    local = f"{shlex.quote(sys.executable)} -m megascale.cli.main "
    return local + line.removeprefix("megascale ") if line.startswith("megascale ") else line
