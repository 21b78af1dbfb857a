"""What a Kubernetes cluster's refusals mean: quota, admission, images, no room; in the driver's own words."""

from __future__ import annotations

import re

from megascale.core.events import Event
from megascale.resilience.cluster.kubernetes_api import KubernetesError
from megascale.resilience.cluster.kubernetes_table import BROKEN, PULLS, Machine, Pod
from megascale.resilience.rules.view import Verdict

_QUOTA = re.compile(r"exceeded quota|forbidden: maximum|quota", re.IGNORECASE)


def of_refusal(error: KubernetesError, what: str) -> Verdict:
    """Of a request for a pod that the server refused, or that did not reach it."""
    if not error.status or error.status >= 500:
        # A webhook that cannot be reached fails requests as 500.
        kind = Event.ADMISSION_DENIED if "webhook" in str(error) else Event.CLUSTER_UNREACHABLE
        return Verdict(kind, action="alert", evidence=(f"{what}: {error}",))
    if error.status == 403 and _QUOTA.search(str(error)):
        said = f"{what} was refused, the namespace's quota is reached: {error}; raise the quota or free some of it"
        return Verdict(Event.QUOTA_REACHED, action="alert", evidence=(said,), person=True)
    if error.status in (401, 403) and "admission" not in str(error) and "denied the request" not in str(error):
        said = f"{what} was refused, the driver lacks the right: {error}; give it the Role of deploy/kubernetes"
        return Verdict(Event.ADMISSION_DENIED, action="alert", evidence=(said,), person=True)
    said = f"{what} was refused by the server's admission: {error}"
    return Verdict(Event.ADMISSION_DENIED, action="alert", evidence=(said,), person=True)


def of_waiting(pod: Pod, seconds: float) -> Verdict | None:
    """Of a pod that cannot start; None while nothing is wrong.

    seconds: since it was asked for.
    """
    reason, message = pod.waiting
    if reason in PULLS:
        said = (
            f"{pod.name} on {pod.machine}: the image cannot be pulled ({reason}): {message}; check kubernetes.image, "
        )
        said += "kubernetes.pull_secrets and the registry"
        return Verdict(Event.IMAGE_PULL_FAILED, (pod.node,), action="alert", evidence=(said,), person=True)
    if reason in BROKEN:
        said = f"{pod.name} on {pod.machine}: its container cannot be made ({reason}): {message}"
        return Verdict(Event.POD_FAILED, (pod.node,), action="alert", evidence=(said,), person=True)
    if reason and seconds > 2.0:
        said = f"no machine takes {pod.name} ({reason}): {message}"
        return Verdict(Event.UNSCHEDULABLE, action="alert", evidence=(said,))
    return None


def of_end(pod: Pod) -> Verdict | None:
    """Of a pod that was refused or removed by its machine; None for an ordinary end."""
    if pod.why.startswith(("Evicted", "OutOf", "Unexpected", "Admission", "NodeAffinity", "Preempting", "Topology")):
        said = f"{pod.name} on {pod.machine} was ended by the cluster: {pod.why}"
        return Verdict(Event.POD_FAILED, (pod.node,) if pod.node else (), action="none", evidence=(said,))
    if pod.why.startswith("OOMKilled"):
        said = (
            f"{pod.name} on {pod.machine} was ended for want of memory: {pod.why}; raise memory in kubernetes.resources"
        )
        return Verdict(Event.OUT_OF_MEMORY, (pod.node,) if pod.node else (), action="none", evidence=(said,))
    return None


def of_devices(machine: Machine, nodes: tuple[str, ...], resource: str, needed: int) -> Verdict | None:
    """Of a machine whose device plugin counts fewer healthy devices than a pod holds; None while all are."""
    left = machine.devices.get(resource)
    if left is None or not nodes or left >= needed:
        return None
    of = machine.capacity.get(resource, needed)
    said = f"the device plugin of {machine.name} calls {max(0, of - left)} of {of} {resource} unhealthy"
    return Verdict(Event.DEVICE_FAULT, nodes, action="evict", evidence=(said,))
