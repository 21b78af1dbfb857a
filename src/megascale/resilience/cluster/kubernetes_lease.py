"""One driver a job: a Lease of coordination.k8s.io that the leading driver renews, and others wait for.

Who holds it says where it runs, so that a successor which can see that it is dead (the same pod started again, a
process of the same machine that is gone) need not wait. Times are the successor's own: clocks of machines may differ.
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
from megascale.resilience.process_birth import born

GROUP = "coordination.k8s.io/v1"
LOOK = 1.0  # seconds between looks at a Lease that another driver holds


def own_identity() -> str:
    """This driver as the Lease names it."""
    pod = os.environ.get("MEGASCALE_POD_UID")
    if pod:
        return f"pod={os.environ.get('MEGASCALE_POD', socket.gethostname())} uid={pod}"
    return f"host={socket.gethostname()} boot={_boot()} pid={os.getpid()} born={born(os.getpid())}"


def is_dead(identity: str) -> bool:
    """Whether a holder has ended for certain: an earlier life of this pod, or a process of this machine."""
    theirs, mine = _words(identity), _words(own_identity())
    if "uid" in theirs:
        return theirs["uid"] == mine.get("uid")  # one container lives in a pod, and it is this one
    if "pid" not in theirs or theirs.get("host") != mine.get("host") or theirs.get("boot") != mine.get("boot"):
        return False
    if not theirs["pid"].isdigit():
        return False
    return str(born(int(theirs["pid"]))) != theirs.get("born")


class DriverLease:
    """Args:
    api: the server.
    name: of the Lease.
    seconds: for which it is given.
    labels: of the object.
    clock: seconds, monotonic.

    Attributes:
        renewed: when it was last renewed, on the monotonic clock, as of before the request.
        lost: who has it instead, "" while it is this driver's.
    """

    def __init__(
        self,
        api: KubernetesApi,
        name: str,
        seconds: float,
        labels: dict[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._api, self._name, self._seconds, self._labels = api, name, seconds, labels
        self._identity = own_identity()
        self._object: Json = {}
        self.renewed, self.lost = 0.0, ""

    def take(self, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep) -> None:
        """Take it, waiting for one that is silent. Raises ConfigError where another driver renews it,
        TrainingError where the server is not reached for as long as it is given."""
        begun, seen, since, said = self._clock(), "", self._clock(), False
        while True:
            try:
                found = self._get()
                holder, version = _holder(found), str((found or {}).get("spec", {}).get("renewTime"))
                if not holder or holder == self._identity or is_dead(holder) or self._has_ended(holder):
                    if self._write(found):
                        return
                    continue
                if f"{holder} {version}" != seen:
                    if seen and said:
                        raise ConfigError(
                            f"another driver has the job: {holder} holds Lease {self._name} in namespace "
                            f"{self._api.namespace} and renews it; end that one first"
                        )
                    seen, since = f"{holder} {version}", self._clock()
                seconds = float(found["spec"].get("leaseDurationSeconds") or self._seconds) if found else 0.0
                if self._clock() - since > seconds:
                    if self._write(found):
                        return
                    continue
                if not said:
                    said = True
                    say(f"Lease {self._name} is held by {holder}: waiting up to {seconds:g} s for it to run out")
            except KubernetesError as error:
                if error.status in (401, 403) or self._clock() - begun > self._seconds:
                    raise TrainingError(f"Lease {self._name} cannot be had: {error}") from None
            sleep(LOOK)

    def renew(self) -> None:
        """Show that this driver lives; `lost` says so if another is. Raises KubernetesError."""
        at = self._clock()
        try:
            if self._put(self._object):
                self.renewed = at
                return
        except KubernetesError as error:
            if error.status != 404:
                raise
        found = self._get()
        holder = _holder(found)
        if holder and holder != self._identity:
            self.lost = holder
        elif self._write(found):
            self.renewed = at

    def release(self) -> None:
        """Give it up at once, if it is this driver's: a successor need not wait."""
        if self._object and not self.lost:
            self._put(self._object, holder="")

    def _has_ended(self, holder: str) -> bool:
        """Whether the holder is a pod of which the kubelet has said that its containers ended."""
        theirs = _words(holder)
        if not theirs.get("uid") or not theirs.get("pod"):
            return False
        try:
            found = self._api.call("GET", self._api.path("pods", theirs["pod"]))
        except KubernetesError:
            return False  # that it is not there any more proves nothing: it may have been removed by force
        states = [each.get("state") or {} for each in (found.get("status") or {}).get("containerStatuses") or ()]
        same = found["metadata"].get("uid") == theirs["uid"]
        return same and bool(states) and all("terminated" in state for state in states)

    def _get(self) -> Json | None:
        try:
            return self._api.call("GET", self._api.path("leases", self._name, GROUP))
        except KubernetesError as error:
            if error.status == 404:
                return None
            raise

    def _write(self, found: Json | None) -> bool:
        """Take it; False if somebody was quicker."""
        at = self._clock()
        if found is not None:
            done = self._put(found)
        else:
            about = {"name": self._name, "labels": self._labels}
            body = {"apiVersion": GROUP, "kind": "Lease", "metadata": about, "spec": self._spec(self._identity)}
            done = self._do("POST", self._api.path("leases", "", GROUP), body)
        if done:
            self.renewed = at
        return done

    def _put(self, found: Json, holder: str | None = None) -> bool:
        holder = self._identity if holder is None else holder
        body = found | {"spec": self._spec(holder, found)}
        return self._do("PUT", self._api.path("leases", self._name, GROUP), body)

    def _do(self, method: str, path: str, body: Json) -> bool:
        try:
            self._object = self._api.call(method, path, body)
            return True
        except KubernetesError as error:
            if error.status == 409:
                return False
            raise

    def _spec(self, holder: str, before: Json | None = None) -> Json:
        old: dict[str, Any] = (before or {}).get("spec") or {}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        anew = old.get("holderIdentity") != holder
        times = int(old.get("leaseTransitions") or 0) + (anew and bool(old))
        spec = {"leaseDurationSeconds": max(1, round(self._seconds)), "renewTime": now, "leaseTransitions": times}
        spec["acquireTime"] = now if anew else old.get("acquireTime") or now
        return spec | {"holderIdentity": holder}


def _holder(found: Json | None) -> str:
    return str(((found or {}).get("spec") or {}).get("holderIdentity") or "")


def _words(identity: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in identity.split() if "=" in word)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:13]
    except OSError:
        return ""
