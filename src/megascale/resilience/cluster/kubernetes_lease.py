"""One driver per job: the leading driver renews a Lease of coordination.k8s.io, and other drivers wait for it.

The holder's identity says where the holder runs. A successor that can verify the holder's end need not wait: the same
pod was started again, or the holder was a process of this machine. Successors measure durations by their own clock,
since clocks of machines differ. The official client's leader election lacks Lease objects, a release and this check.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megascale.errors import ConfigError, TrainingError
from megascale.resilience.cluster.kubernetes_api import Json, KubernetesApi, KubernetesError
from megascale.resilience.process_birth import read_birth_time

GROUP = "coordination.k8s.io/v1"  # API group and version of Lease objects
_BOOT_ID_CHARACTERS = 13  # enough to distinguish two boots of one machine
CHECK_INTERVAL = 1.0  # seconds between reads of a Lease that another driver holds


def make_own_identity() -> str:
    """Return the identity of this driver in the Lease."""
    uid = os.environ.get("MEGASCALE_POD_UID")
    if uid:
        return f"pod={os.environ.get('MEGASCALE_POD', socket.gethostname())} uid={uid}"
    return f"host={socket.gethostname()} boot={_read_boot_id()} pid={os.getpid()} born={read_birth_time(os.getpid())}"


def has_certainly_ended(identity: str) -> bool:
    """Return True if a holder must have ended: it was in this pod before, or was a process of this machine."""
    holder = _parse_identity(identity)
    own_fields = _parse_identity(make_own_identity())
    if "uid" in holder:
        return holder["uid"] == own_fields.get("uid")  # The pod has one container, which now runs this process.
    if holder.get("host") != own_fields.get("host") or holder.get("boot") != own_fields.get("boot"):
        return False
    pid = holder.get("pid", "")
    return pid.isdigit() and str(read_birth_time(int(pid))) != holder.get("born")


class DriverLease:
    """The Lease of a job.

    Args:
        seconds: duration of the Lease.
        clock: monotonic clock in seconds.

    Attributes:
        renewed_at: when the last renewal was requested, on `clock`.
        new_holder: identity of the driver that holds the Lease instead, "" while this driver holds it.
    """

    def __init__(
        self,
        api: KubernetesApi,
        name: str,
        seconds: float,
        labels: dict[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._name = name
        self._seconds = seconds
        self._labels = labels
        self._clock = clock
        self._identity = make_own_identity()
        self._lease: Json = {}  # the object as the server returned it after this driver's last write
        self.renewed_at = 0.0
        self.new_holder = ""

    def acquire(self, report: Callable[[str], None], sleep: Callable[[float], None] = time.sleep) -> None:
        """Acquire the Lease. Wait until the Lease of a silent holder expires.

        Raises:
            ConfigError: another driver renews the Lease.
            TrainingError: the server refused, or was not reached for the duration of the Lease.
        """
        start_time = self._clock()
        seen_version = ""  # holder and time of the last renewal that was read
        seen_at = start_time
        has_reported = False  # True once the holder's Lease was seen and its expiry is awaited
        while True:
            try:
                lease = self._read()
                holder = _get_holder(lease)
                if lease is None or self._is_free(holder):
                    if self._take_over(lease):
                        return
                    continue
                version = f"{holder} {lease['spec'].get('renewTime')}"
                if version != seen_version:
                    if has_reported:  # The holder has renewed the Lease, so it is alive.
                        raise ConfigError(
                            f"another driver has the job: {holder} holds Lease {self._name} in namespace "
                            f"{self._api.namespace} and renews it; end that driver first"
                        )
                    seen_version = version
                    seen_at = self._clock()
                seconds = float(lease["spec"].get("leaseDurationSeconds") or self._seconds)
                if self._clock() - seen_at > seconds:
                    if self._take_over(lease):
                        return
                    continue
                if not has_reported:
                    has_reported = True
                    report(f"Lease {self._name} is held by {holder}: waiting up to {seconds:g} s until it expires")
            except KubernetesError as error:
                # 401, 403: the driver lacks the right to read or write the Lease.
                if error.status in (401, 403) or self._clock() - start_time > self._seconds:
                    raise TrainingError(f"Lease {self._name} cannot be acquired: {error}") from None
            sleep(CHECK_INTERVAL)

    def renew(self) -> None:
        """Renew the Lease, or set `new_holder` if another driver holds it. Raises KubernetesError."""
        current_time = self._clock()
        try:
            if self._set_holder(self._lease, self._identity):
                self.renewed_at = current_time
                return
        except KubernetesError as error:
            if error.status != 404:
                raise
        lease = self._read()
        holder = _get_holder(lease)
        if holder and holder != self._identity:
            self.new_holder = holder
        else:
            self._take_over(lease)

    def release(self) -> None:
        """Release the Lease at once if this driver holds it, so that a successor need not wait."""
        if self._lease and not self.new_holder:
            self._set_holder(self._lease, "")

    def _is_free(self, holder: str) -> bool:
        """Return True if the Lease has no holder, or if its holder is this driver or has ended."""
        return not holder or holder == self._identity or has_certainly_ended(holder) or self._has_pod_ended(holder)

    def _has_pod_ended(self, holder: str) -> bool:
        """Return True if the holder is a pod whose containers have ended according to its kubelet."""
        identity = _parse_identity(holder)
        if not identity.get("uid") or not identity.get("pod"):
            return False
        try:
            pod = self._api.call("GET", self._api.path("pods", identity["pod"]))
        except KubernetesError:
            return False  # A missing pod proves nothing, since it may have been deleted by force.
        containers = (pod.get("status") or {}).get("containerStatuses") or ()
        states = [container.get("state") or {} for container in containers]
        is_same = pod["metadata"].get("uid") == identity["uid"]
        return is_same and bool(states) and all("terminated" in state for state in states)

    def _read(self) -> Json | None:
        """Return the Lease, None if it does not exist. Raises KubernetesError."""
        try:
            return self._api.call("GET", self._api.path("leases", self._name, GROUP))
        except KubernetesError as error:
            if error.status == 404:
                return None
            raise

    def _take_over(self, lease: Json | None) -> bool:
        """Take over the Lease as it was read, or create it; return False if another driver has changed it meanwhile."""
        current_time = self._clock()
        if lease is not None:
            succeeded = self._set_holder(lease, self._identity)
        else:
            metadata = {"name": self._name, "labels": self._labels}
            spec = self._make_spec(self._identity, {})
            body = {"apiVersion": GROUP, "kind": "Lease", "metadata": metadata, "spec": spec}
            succeeded = self._send("POST", self._api.path("leases", "", GROUP), body)
        if succeeded:
            self.renewed_at = current_time
        return succeeded

    def _set_holder(self, lease: Json, holder: str) -> bool:
        """Write a Lease that was read, with this holder; return False if it has changed since it was read."""
        body = lease | {"spec": self._make_spec(holder, lease.get("spec") or {})}
        return self._send("PUT", self._api.path("leases", self._name, GROUP), body)

    def _send(self, method: str, path: str, body: Json) -> bool:
        """Send the object; return False if it has changed since it was read."""
        try:
            self._lease = self._api.call(method, path, body)
            return True
        except KubernetesError as error:
            if error.status == 409:  # The object has another version than `body`, or exists already.
                return False
            raise

    def _make_spec(self, holder: str, previous: dict[str, Any]) -> Json:
        """Return the contents of a Lease that is renewed now. `previous` are its contents as they were read."""
        current_time = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        transitions = int(previous.get("leaseTransitions") or 0)
        acquired = previous.get("acquireTime") or current_time
        if previous.get("holderIdentity") != holder:
            acquired = current_time
            if previous:
                transitions += 1
        return {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(self._seconds)),
            "leaseTransitions": transitions,
            "acquireTime": acquired,
            "renewTime": current_time,
        }


def _get_holder(lease: Json | None) -> str:
    """Return the identity of a Lease's holder, "" without a Lease or a holder."""
    spec = (lease or {}).get("spec") or {}
    return str(spec.get("holderIdentity") or "")


def _parse_identity(identity: str) -> dict[str, str]:
    """Return the fields of `make_own_identity` by name."""
    return dict(word.split("=", 1) for word in identity.split() if "=" in word)


def _read_boot_id() -> str:
    """Return the beginning of a random id that the kernel makes at each boot, "" if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:_BOOT_ID_CHARACTERS]
    except OSError:
        return ""
