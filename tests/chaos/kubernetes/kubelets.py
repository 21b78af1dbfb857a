"""Machines for the bench's API server: a small scheduler, and kubelets that run pods as processes or pretend to."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.kubernetes.server import Json, Refused, Store

LOOK = 0.05  # seconds between looks


def machine(name: str, ready: bool = True, labels: dict[str, str] | None = None, **devices: str) -> Json:
    """The object of a machine."""
    amounts = {"cpu": "8", "memory": "64Gi"} | devices
    ready_now = {"type": "Ready", "status": "True" if ready else "Unknown", "message": "as it says"}
    details = {"name": name, "labels": {"kubernetes.io/hostname": name} | (labels or {}), "uid": f"machine-{name}"}
    status = {"conditions": [ready_now], "allocatable": amounts, "capacity": dict(amounts)}
    return {"kind": "Node", "metadata": details, "spec": {}, "status": status}


class Kubelets:
    """Binds pods to machines and has them run.

    Args:
        store: of the API server.
        folder: where pods that run as processes keep theirs; None: they only say that they run.
        environment: of such processes.
        spawn: starts a command with an environment, in a session of its own, and writes its output to a file.

    Attributes:
        cut: machines whose kubelet does not reach the server now: what runs there runs on.
        broken_images: those that cannot be pulled.
    """

    def __init__(
        self,
        store: Store,
        folder: Path | None = None,
        environment: dict[str, str] | None = None,
        spawn: Callable[[list[str], dict[str, str], Path], Any] | None = None,
    ) -> None:
        self._store = store
        self._spawn = spawn or _spawn
        self._folder = folder
        self._environment = environment or {}
        self.cut: set[str] = set()
        self.broken_images: set[str] = set()
        self.processes: dict[str, Any] = {}
        self._deadlines: dict[str, float] = {}
        self._addresses: dict[str, str] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        """Work in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End all processes, and work no longer."""
        self._end.set()
        self._thread.join(10.0)
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _work(self) -> None:
        observed = 0
        while not self._end.is_set():
            with self._store.lock:
                if self._store.version == observed:
                    self._store.lock.wait(LOOK)
                observed = self._store.version
            for pod in self._store.all("pods"):
                try:
                    self._look(pod)
                except Refused:
                    continue  # it is gone meanwhile

    def _look(self, pod: Json) -> None:
        name, where = pod["metadata"]["name"], pod["spec"].get("nodeName")
        if not where:
            self._bind(pod)
        elif where in self.cut:
            return
        elif pod["metadata"].get("deletionTimestamp"):
            self._finish(name, pod)
        elif pod["status"].get("phase") == "Pending":
            self._run(name, where, pod)
        elif pod["status"].get("phase") == "Running" and name in self.processes:
            code = self.processes[name].poll()
            if code is not None:
                self._patch_status(name, _ended(code))
            elif self._folder is not None:
                self._annotate(self._folder / name, pod)

    def _bind(self, pod: Json) -> None:
        spec = pod["spec"]
        terms = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
            "requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": [{"matchFields": []}]}
        )["nodeSelectorTerms"][0]["matchFields"]
        separate = "podAntiAffinity" in (spec.get("affinity") or {})
        used = {p["spec"].get("nodeName") for p in self._store.all("pods") if not _over(p)}
        for thing in self._store.all("nodes"):
            name = thing["metadata"]["name"]
            ready = thing["status"]["conditions"][0]["status"] == "True" and not thing["spec"].get("unschedulable")
            allowed = all((name in t["values"]) == (t["operator"] == "In") for t in terms)
            if ready and allowed and not (separate and name in used):
                self._store.update("pods", pod["metadata"]["name"], partial(_bind_to, name))
                return
        if not pod["status"].get("conditions"):
            why = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "no machine is free",
            }
            self._store.update("pods", pod["metadata"]["name"], lambda p: p["status"].update(conditions=[why]))

    def _run(self, name: str, where: str, pod: Json) -> None:
        container = pod["spec"]["containers"][0]
        if container["image"] in self.broken_images:
            waiting = {"reason": "ErrImagePull", "message": f"{container['image']}: not found"}
            if not pod["status"].get("containerStatuses"):
                self._patch_status(name, {"containerStatuses": [{"state": {"waiting": waiting}}]})
            return
        address = self._addresses.setdefault(name, f"127.0.2.{len(self._addresses) % 250 + 1}")
        if self._folder is not None:
            self.processes[name] = self._start(name, where, address, pod, container)
        states = [{"name": "agent", "state": {"running": {"startedAt": "now"}}}]
        self._patch_status(
            name, {"phase": "Running", "podIP": address, "startTime": "now", "containerStatuses": states}
        )

    def _start(self, name: str, where: str, address: str, pod: Json, container: Json) -> Any:
        assert self._folder is not None
        folder = self._folder / name
        for each in ("about", "state", "secret"):
            (folder / each).mkdir(parents=True, exist_ok=True)  # begun before where the Secret was not there yet
        self._annotate(folder, pod)
        secret = next(v for v in pod["spec"]["volumes"] if v["name"] == "secret")["secret"]["secretName"]
        token = base64.b64decode(self._store.get("secrets", secret)["data"]["token"])
        (folder / "secret" / "token").write_bytes(token)
        fields = {"spec.nodeName": where, "metadata.name": name, "status.podIP": address}
        env: dict[str, str] = {}
        for each in container["env"]:
            source = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = fields[source] if source else each.get("value", "")
            for expected, output in env.items():
                value = value.replace(f"$({expected})", output)
            env[each["name"]] = value
        env |= {"MEGASCALE_ABOUT": str(folder / "about"), "MEGASCALE_FOLDER": str(folder / "state")}
        env["MEGASCALE_SECRET"] = str(folder / "secret" / "token")
        return self._spawn(container["command"], os.environ | self._environment | env, folder / "log")

    def _annotate(self, folder: Path, pod: Json) -> None:
        """Write the current values of the downward API."""
        for key in ("driver", "epoch"):
            file, value = folder / "about" / key, pod["metadata"]["annotations"].get(f"megascale.dev/{key}", "")
            if not file.exists() or file.read_text() != value:
                file.with_suffix(".new").write_text(value)
                file.with_suffix(".new").replace(file)

    def _finish(self, name: str, pod: Json) -> None:
        """End a pod that is deleted: SIGTERM, after the grace SIGKILL, then remove it."""
        process = self.processes.get(name)
        code = process.poll() if process is not None else 0
        if process is not None and code is None:
            grace = pod["metadata"].get("deletionGracePeriodSeconds")
            if name not in self._deadlines:
                self._deadlines[name] = time.monotonic() + float(30 if grace is None else grace)
                os.kill(process.pid, signal.SIGTERM)
            elif time.monotonic() > self._deadlines[name]:
                os.killpg(process.pid, signal.SIGKILL)
            return
        self._patch_status(name, _ended(code or 0))
        self._store.delete("pods", name, 0)

    def _patch_status(self, name: str, status: dict[str, Any]) -> None:
        self._store.update("pods", name, lambda pod: pod["status"].update(status))


def _spawn(command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "ab") as out:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def _bind_to(machine: str, pod: Json) -> None:
    pod["spec"]["nodeName"] = machine


def _ended(code: int) -> Json:
    state = {"terminated": {"exitCode": code if code >= 0 else 128 - code, "reason": "Error" if code else "Completed"}}
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"name": "agent", "state": state}]}


def _over(pod: Json) -> bool:
    return pod["status"].get("phase") in ("Failed", "Succeeded")
