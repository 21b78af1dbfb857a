"""The ConfigMap and the Secret of a job in Kubernetes, and the names, labels and secrets that its objects share.

The ConfigMap has the block list and owns all objects of the job: Kubernetes deletes them with it.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping

from megascale.core.secrets import PASSWORD_VARIABLE, REPLICA_VARIABLE
from megascale.errors import ConfigError
from megascale.resilience.cluster.kubernetes_api import Json, KubernetesApi, KubernetesError
from megascale.resilience.cluster.remote import INHERITED_PREFIXES

JOB_LABEL = "megascale.dev/job"
ROLE_LABEL = "megascale.dev/role"
BLOCKED_KEY = "blocked.json"  # key of the ConfigMap with {machine: reason}
SECRET_VARIABLES = (PASSWORD_VARIABLE, REPLICA_VARIABLE)


def make_object_name(job: str) -> str:
    """Return the name of a job's ConfigMap, Secret and Lease. Raises ConfigError for a name unfit for Kubernetes."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,45}[a-z0-9])?", job):
        raise ConfigError(
            f"train.name={job} cannot name objects of Kubernetes: at most 47 small letters, digits, hyphens, such as "
            f"--train.name={re.sub('[^a-z0-9]+', '-', job.lower()).strip('-')[:47] or 'job'}"
        )
    return f"megascale-{job}"


def make_labels(job: str, role: str) -> dict[str, str]:
    """Return the labels of a job's objects. The role is "agent" for the pods of nodes, and "job" for other objects."""
    return {
        "app.kubernetes.io/name": "megascale",
        "app.kubernetes.io/managed-by": "megascale",
        "app.kubernetes.io/instance": job,
        JOB_LABEL: job,
        ROLE_LABEL: role,
    }


def list_inherited_secrets() -> list[str]:
    """Return the names of the secrets in this process's environment that nodes receive through the Secret."""
    return [name for name in SECRET_VARIABLES if os.environ.get(name)]


def read_inherited_variables() -> dict[str, str]:
    """Return the environment variables of this process that nodes receive, by name. Images set all other variables."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(INHERITED_PREFIXES)}


class JobObjects:
    """The ConfigMap and the Secret of a job on the server.

    Attributes:
        owner: reference to the ConfigMap; all objects of the job are deleted with it.
        blocked: reasons by the names of machines that the job must not get.
    """

    def __init__(self, api: KubernetesApi, job: str) -> None:
        self._api = api
        self._job = job
        self._name = make_object_name(job)
        self.owner: Json | None = None
        self.blocked: dict[str, str] = {}

    def prepare(self, controller: Json | None) -> None:
        """Find or create the ConfigMap and read the block list. Raises KubernetesError.

        controller: reference to the object that will own a created ConfigMap, so that both are deleted together.
        """
        try:
            config_map = self._api.call("GET", self._api.path("configmaps", self._name))
        except KubernetesError as error:
            if error.status != 404:  # 404: the ConfigMap does not exist
                raise
            config_map = self._api.call("POST", self._api.path("configmaps"), make_config_map(self._job, controller))
        metadata = config_map["metadata"]
        self.owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": metadata["name"], "uid": metadata["uid"]}
        self.blocked.update(_parse_blocked(config_map))

    def write_secret(self, token: bytes) -> None:
        """Create or replace the Secret with the job's token. Raises KubernetesError."""
        body = make_secret(self._job, token, self.owner)
        try:
            self._api.call("POST", self._api.path("secrets"), body)
        except KubernetesError as error:
            if error.status != 409:  # 409: the Secret exists already
                raise
            self._api.call("PUT", self._api.path("secrets", self._name), body)

    def write_blocked(self, blocked: Mapping[str, str]) -> None:
        """Write the block list into the ConfigMap, which outlives the driver. Raises KubernetesError."""
        text = json.dumps(dict(sorted(blocked.items())), indent=1)
        self._api.call("PATCH", self._api.path("configmaps", self._name), {"data": {BLOCKED_KEY: text}})


def make_config_map(job: str, controller: Json | None = None) -> Json:
    """Return the ConfigMap with an empty block list."""
    metadata = _make_metadata(job, controller)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {BLOCKED_KEY: "{}"}}


def make_secret(job: str, token: bytes, owner: Json | None = None) -> Json:
    """Return the Secret with the job's token and the secrets in this process's environment."""
    values = {"token": token} | {name: os.environ[name].encode() for name in list_inherited_secrets()}
    data = {name: base64.b64encode(value).decode() for name, value in values.items()}
    metadata = _make_metadata(job, owner)
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}


def _make_metadata(job: str, owner: Json | None) -> Json:
    """Return name, labels and owner of an object of the job that is not a pod."""
    metadata: Json = {"name": make_object_name(job), "labels": make_labels(job, "job")}
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    return metadata


def _parse_blocked(config_map: Json) -> dict[str, str]:
    """Return the block list of a ConfigMap, {} if a user has made it malformed."""
    try:
        blocked = json.loads((config_map.get("data") or {}).get(BLOCKED_KEY) or "{}")
        return {str(name): str(reason) for name, reason in blocked.items()}
    except (ValueError, AttributeError):
        return {}


def find_controller(api: KubernetesApi, pod: str) -> Json | None:
    """Return a reference to the Job, StatefulSet or JobSet that controls the driver's pod, None if there is none."""
    try:
        pod_object = api.call("GET", api.path("pods", pod))
    except KubernetesError:
        return None
    for owner in pod_object["metadata"].get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") in ("Job", "StatefulSet", "JobSet"):
            return {key: owner[key] for key in ("apiVersion", "kind", "name", "uid")}
    return None
