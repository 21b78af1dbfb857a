"""A thousand nodes as a driver sees them on Kubernetes: its table of pods and machines, and what it asks of the server.

The cluster's side of the driver is the real one, on one core; the API server is the small one of
kubernetes_server.py in a process of its own, where pods are objects that change and nothing runs.
What agents cost the driver is measured by `python -m tests.chaos driver`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import platform
import random
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import typer

from megascale.core import strict_json
from megascale.errors import TrainingError
from tests.chaos.kubernetes.kubelets import machine
from tests.chaos.kubernetes.server import Json, Refused, Server, Store

CHURN = 20.0  # changes of pods and machines a second
_MAX_LAG_SECONDS = 5.0  # target: age of the driver's table
_MAX_REQUESTS_PER_SECOND = 50.0  # target: requests in the steady state
MOST = 120.0  # seconds for anything to come; only a broken server takes them


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos kubernetes-scale`."""
    app.command("kubernetes-scale")(kubernetes)


def kubernetes(
    nodes: int = typer.Option(1000, min=2, help="Nodes, a pod each."),
    seconds: float = typer.Option(60.0, min=5, help="How long the steady state is watched."),
    outage: float = typer.Option(5.0, min=0.5, help="Seconds for which the API server answers no request."),
    out: Path = typer.Option(Path("bench-kubernetes.json"), help="JSON file for the figures."),
) -> None:
    """Follow many pods on one core: requests a second, how old the driver's table is, watches that expire, an outage.

    Targets: the table current within 5 s, at most 50 requests per second in steady state, watches resumed after expiry.
    Exit 1 if a target is missed. CPU. Example: python -m tests.chaos kubernetes-scale --nodes 1000 --seconds 60
    """
    from rich.console import Console
    from rich.table import Table

    context = multiprocessing.get_context("spawn")
    local, remote = context.Pipe()
    served = context.Process(target=_serve, args=(remote, nodes), daemon=True)
    served.start()
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with tempfile.TemporaryDirectory(prefix="megascale-bench-") as folder:
            figures = asyncio.run(_drive(local, Path(folder), nodes, seconds, outage))
    finally:
        os.sched_setaffinity(0, allowed)
        local.close()
        served.join(10.0)
    figures |= {"nodes": nodes, "seconds": seconds, "cores": os.cpu_count(), "python": platform.python_version()}
    figures |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "load": os.getloadavg()[0]}
    table = Table("what", "figure", title=f"{nodes} pods, one driver on one core")
    for key, value in figures.items():
        table.add_row(key, f"{value:.3f}" if isinstance(value, float) else str(value))
    Console().print(table)
    out.write_text(strict_json.dumps(figures, indent=1))
    typer.echo(f"figures: {out}")
    missed = list_missed_targets(figures)
    if missed:
        raise TrainingError(f"targets were missed: {'; '.join(missed)}; see {out}")


def list_missed_targets(figures: Mapping[str, Any]) -> list[str]:
    """Return a phrase per target that the figures miss. A figure that is absent counts as missed."""
    limits = {
        "requests a second": _MAX_REQUESTS_PER_SECOND,
        "change seen after s, most": _MAX_LAG_SECONDS,
        "current after expiry s": _MAX_LAG_SECONDS,
    }
    missed = []
    for name, limit in limits.items():
        value = figures.get(name)
        if value is None or not value <= limit:
            missed.append(f"{name}: {value}, at most {limit:g}")
    return missed


# the server's process -------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, nodes: int) -> None:
    """Serve until the pipe is closed; words that come through it are obeyed."""
    store = Store()
    for i in range(nodes):
        store.create("nodes", machine(f"m{i}"))
    free = [f"m{i}" for i in range(nodes)]

    def admit(kind: str, thing: Json) -> None:
        if kind == "pods":
            if not free:
                raise Refused(403, "Forbidden", "exceeded quota: no machine is left")
            thing["spec"]["nodeName"] = free.pop(0)

    store.admit = admit
    server = Server(store)
    pipe.send(server.kubeconfig())
    churning, observed = False, 0
    while True:
        try:
            if pipe.poll(1 / CHURN):
                word = pipe.recv()
                churning = {"churn": True, "calm": False}.get(word, churning)
                if word == "change":
                    pipe.send(_change(store, random.choice(_pods(store))))
                elif word == "down":
                    server.down()
                elif word == "up":
                    server.up()
                elif word == "forget":
                    server.down()
                    _change(store, random.choice(_pods(store)))  # of which the watch has not heard
                    store.forget()
                    server.up()
                elif word == "asked":
                    pipe.send(len(server.requests))
        except (EOFError, OSError):
            return
        version = store.version
        if version != observed:
            observed = version  # of before: a pod may come while others are started
            _start_pods(store)
        if churning:
            _change(store, random.choice(_pods(store)))


def _pods(store: Store) -> list[str]:
    with store.lock:
        return [name for kind, name in store.objects if kind == "pods"]


def _start_pods(store: Store) -> None:
    with store.lock:
        due = [n for (k, n), t in store.objects.items() if k == "pods" and t["status"].get("phase") == "Pending"]
    states = [{"name": "agent", "state": {"running": {"startedAt": "now"}}}]
    for name in due:
        store.update("pods", name, lambda pod: pod["status"].update(phase="Running", containerStatuses=states))


def _change(store: Store, name: str) -> str:
    """Have a pod say when it was changed, on the clock that all processes share; what it says."""
    current = f"{time.monotonic():.6f}"
    store.update("pods", name, lambda pod: pod["status"].update(podIP=current))
    return current


# the driver's ---------------------------------------------------------------------------------------------------------


async def _drive(pipe: Connection, folder: Path, nodes: int, seconds: float, outage: float) -> dict[str, Any]:
    from megascale.config import from_tree
    from megascale.resilience.cluster.base import ClusterRequest
    from megascale.resilience.cluster.kubernetes import KubernetesCluster
    from megascale.resilience.protocol.job_description import JobDescription

    (folder / "kubeconfig").write_text(pipe.recv())
    tree: dict[str, Any] = {"train": {"name": "bench", "device": "cpu", "runs": str(folder)}}
    tree["kubernetes"] = {"kubeconfig": str(folder / "kubeconfig"), "image": "none"}
    config = from_tree(tree | {"resilience": {"cluster": "kubernetes", "nodes": nodes}})
    cluster = await asyncio.to_thread(KubernetesCluster, ClusterRequest(folder / "bench", config))
    lags: list[float] = []
    take = cluster.view.apply

    def measured(change: Any, *, of_pods: bool) -> None:
        take(change, of_pods=of_pods)
        if of_pods and change[0] == "changed":
            lags.extend(time.monotonic() - float(t["status"]["podIP"]) for t in change[1] if t["status"].get("podIP"))

    cluster.view.apply = measured  # type: ignore[method-assign]
    began = time.monotonic()
    cluster.announce(JobDescription("bench", 1, ("127.0.0.1", 1), config.resilience), b"0" * 64)
    inputs = await asyncio.gather(*(cluster.request() for _ in range(nodes)))
    if None in inputs:
        raise TrainingError(f"{inputs.count(None)} of {nodes} pods were refused or did not start")
    result: dict[str, Any] = {"all pods run after s": time.monotonic() - began}
    await asyncio.sleep(3.0)

    pipe.send("churn")
    lags.clear()
    requested = cluster.api.request_count
    cpu = time.process_time()
    start = time.monotonic()
    looks = []
    while time.monotonic() - start < seconds:
        at = time.perf_counter()
        assert len(cluster.nodes()) == nodes
        looks.append(time.perf_counter() - at)
        await asyncio.sleep(0.25)
    lasted = time.monotonic() - start
    lags.sort()
    result |= {
        "requests a second": (cluster.api.request_count - requested) / lasted,
        "changes seen": len(lags),
        "change seen after s, median": lags[len(lags) // 2] if lags else None,
        "change seen after s, most": lags[-1] if lags else None,
        "driver CPU share": (time.process_time() - cpu) / lasted,
        "asking for all nodes s, most": max(looks),
    }
    pipe.send("calm")
    await asyncio.sleep(1.0)

    lists = cluster.view.pod_watch.list_count
    pipe.send("forget")
    result["current after expiry s"] = await _until_current(cluster, pipe)
    result["lists after expiry"] = cluster.view.pod_watch.list_count - lists
    pipe.send("down")
    await asyncio.sleep(outage)
    pipe.send("change")  # while nobody is told
    change = await asyncio.to_thread(pipe.recv)
    up = time.monotonic()
    pipe.send("up")
    result[f"current after {outage:g} s without the server s"] = await _until_seen(cluster, change) - up
    result["withdrawn"] = cluster.withdrawal_reason or "no"
    await cluster.close()
    return result


async def _until_current(cluster: Any, pipe: Connection) -> float:
    """Seconds until a change that is made now is seen."""
    pipe.send("change")
    change = await asyncio.to_thread(pipe.recv)
    return await _until_seen(cluster, change) - float(change)


async def _until_seen(cluster: Any, change: str) -> float:
    """Return when a change was seen, on the monotonic clock. Raise TrainingError if it never is."""
    deadline = time.monotonic() + MOST
    while time.monotonic() < deadline:
        if any(pod.address == change for pod in cluster.view.table.pods.values()):
            return time.monotonic()
        await asyncio.sleep(0.02)
    raise TrainingError(f"a change was not seen within {MOST:g} s: the watch did not resume")
