"""The objects that a job has besides its pods: the ConfigMap, owner of all and block list, and the Secret."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping

from megascale.core.secrets import PASSWORD_VARIABLE, REPLICA_VARIABLE
from megascale.resilience.cluster.kubernetes_api import Json, KubernetesApi, KubernetesError
from megascale.resilience.cluster.kubernetes_pod import labels, object_name

BLOCKED = "blocked.json"  # key of the ConfigMap: {machine: why}
# What nodes take over of the driver's environment; the rest is their image's own.
_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "UCX_")
SECRETS = (PASSWORD_VARIABLE, REPLICA_VARIABLE)


class JobObjects:
    """Args:
    api: the server.
    job: name of the run.

    Attributes:
        owner: reference by which all of a job is removed with its ConfigMap.
        blocked: machines that the job must not get, and why.
    """

    def __init__(self, api: KubernetesApi, job: str) -> None:
        self._api, self._job, self._name = api, job, object_name(job)
        self.owner: Json | None = None
        self.blocked: dict[str, str] = {}

    def prepare(self, above: Json | None) -> None:
        """Find or make the ConfigMap, and read the block list. above: what the ConfigMap goes with. Raises
        KubernetesError."""
        try:
            found = self._api.call("GET", self._api.path("configmaps", self._name))
        except KubernetesError as error:
            if error.status != 404:
                raise
            found = self._api.call("POST", self._api.path("configmaps"), config_map(self._job, above))
        about = found["metadata"]
        self.owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": about["name"], "uid": about["uid"]}
        self.blocked.update(read_blocked(found))

    def write_secret(self, token: bytes) -> None:
        """What agents prove to the driver. Raises KubernetesError."""
        body = secret(self._job, token, self.owner)
        try:
            self._api.call("POST", self._api.path("secrets"), body)
        except KubernetesError as error:
            if error.status != 409:
                raise
            self._api.call("PUT", self._api.path("secrets", self._name), body)

    def write_blocked(self, blocked: Mapping[str, str]) -> None:
        """Keep the block list where it survives the driver. Raises KubernetesError."""
        text = json.dumps(dict(sorted(blocked.items())), indent=1)
        self._api.call("PATCH", self._api.path("configmaps", self._name), {"data": {BLOCKED: text}})


def config_map(job: str, above: Json | None = None) -> Json:
    """The manifest, with an empty block list."""
    about: Json = {"name": object_name(job), "labels": labels(job, "job")}
    about |= {"ownerReferences": [above]} if above else {}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {BLOCKED: "{}"}}


def secret(job: str, token: bytes, owner: Json | None = None) -> Json:
    """The manifest: the job's secret, and those that the driver has in its environment."""
    values = {"token": token} | {name: os.environ[name].encode() for name in inherited_secrets()}
    about: Json = {"name": object_name(job), "labels": labels(job, "job")}
    about |= {"ownerReferences": [owner]} if owner else {}
    data = {name: base64.b64encode(value).decode() for name, value in values.items()}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": about, "data": data}


def inherited_secrets() -> list[str]:
    """Names of those in this process's environment."""
    return [name for name in SECRETS if os.environ.get(name)]


def inherited_environment() -> dict[str, str]:
    """What nodes get of this process's environment."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def read_blocked(found: Json) -> dict[str, str]:
    """The block list of a ConfigMap; what people have written there wrongly counts as nothing."""
    try:
        listed = json.loads((found.get("data") or {}).get(BLOCKED) or "{}")
        return {str(name): str(why) for name, why in listed.items()}
    except (ValueError, AttributeError):
        return {}


def controller_of(api: KubernetesApi, pod: str) -> Json | None:
    """What keeps the driver's own pod (a Job, a Deployment's ReplicaSet), None if that cannot be seen."""
    try:
        found = api.call("GET", api.path("pods", pod))
    except KubernetesError:
        return None
    for each in found["metadata"].get("ownerReferences") or ():
        if each.get("controller") and each.get("kind") in ("Job", "StatefulSet", "JobSet"):
            return {key: each[key] for key in ("apiVersion", "kind", "name", "uid")}
    return None
