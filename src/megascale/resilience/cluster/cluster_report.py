"""Report about the features of a Slurm or Kubernetes cluster, with the consequence of each missing feature.

The report changes nothing. It uses the rights of the caller in Kubernetes, which should be those of the driver.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from megascale.observe.machine_report import Finding
from megascale.resilience.cluster.kubernetes_api import KubernetesError
from megascale.resilience.cluster.slurm_completion import find_library

_COMMAND_SECONDS = 10.0  # for the answer of a command
_ERROR_CHARACTERS = 200  # of an error of the API server
# Characters that sinfo appends to a node's state, such as * for a node that does not answer or ~ for one powered down.
_STATE_FLAGS = "*~#!%$@^-"
_MIN_KILL_WAIT = 60  # seconds that a job needs to save: the default of resilience.grace_period
_SLURM_COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
# (API group, resource, verb) of the driver's role. "nodes" are outside of namespaces.
_RIGHTS = (
    ("", "pods", "create"),
    ("", "pods", "delete"),
    ("", "pods", "watch"),
    ("", "configmaps", "create"),
    ("", "secrets", "create"),
    ("coordination.k8s.io", "leases", "create"),
    ("", "nodes", "watch"),
)
# (API group, subject, advice if the cluster lacks it)
_EXTENSIONS = (
    ("jobset.x-k8s.io", "JobSet", "`--form jobset` is refused; use `--form driver`"),
    ("kueue.x-k8s.io", "Kueue", "leave kubernetes.queue empty"),
    ("monitoring.coreos.com", "Prometheus operator", "leave kubernetes.pod_monitor off; scrape by annotations"),
)


class Api(Protocol):
    """The methods of KubernetesApi that the report needs."""

    namespace: str

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to a request. Raises KubernetesError."""


def run_command(*command: str) -> str | None:
    """Return the output of a command, None if it fails or does not answer in time."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


# Slurm ----------------------------------------------------------------------------------------------------------------


def examine_slurm(run: Callable[..., str | None] = run_command) -> list[Finding]:
    """Check Slurm's commands, controller, partitions, time-outs and container runtimes.

    run: runs a command and returns its output, None if it fails.
    """
    missing = [name for name in _SLURM_COMMANDS if shutil.which(name) is None]
    if missing:
        return [Finding("Slurm's commands", f"{', '.join(missing)} not found", "missing", "run this on a login node")]
    findings = [Finding("Slurm", (run("sinfo", "--version") or "unknown version").strip(), "good")]
    ping = run("scontrol", "ping") or ""
    if "UP" not in ping:
        findings.append(Finding("slurmctld", "does not answer", "missing", "no job can be submitted"))
        return findings
    findings.append(Finding("slurmctld", ping.strip().splitlines()[0], "good"))
    findings += _check_partitions(run("sinfo", "--noheader", "--format=%P|%T|%D|%G|%l") or "")
    settings = _parse_settings(run("scontrol", "show", "config") or "")
    findings += _check_slurm_settings(settings)
    findings += _check_containers(run("srun", "--help") or "")
    library = find_library()
    if library:
        findings.append(Finding("Slurm's library", library, "good"))
    else:
        advice = "a job whose batch node was lost ends as cancelled instead of with its exit code"
        findings.append(Finding("Slurm's library", "not found", "slow", advice))
    return findings


def _check_partitions(output: str) -> list[Finding]:
    """Return a finding per partition: nodes by state, generic resources and the time limit."""
    states: dict[str, Counter[str]] = {}
    details: dict[str, dict[str, None]] = {}  # per partition the distinct texts, in order
    for line in output.splitlines():
        fields = line.strip().split("|")  # in the order of the format in `examine_slurm`
        if len(fields) == 5 and fields[2].isdecimal():
            partition, state, count, resources, limit = fields
            name = state.rstrip(_STATE_FLAGS)
            if state.endswith("*") and name == "idle":
                name = "without answer"  # No job starts on a node whose slurmd does not answer.
            states.setdefault(partition, Counter())[name] += int(count)
            # sinfo prints a line per kind of node, and some kinds may have no GPUs.
            if resources == "(null)":
                resources = "no GRES"
            details.setdefault(partition, {})[f"{resources}, time limit {limit}"] = None
    findings = []
    for partition, counts in states.items():
        text = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        value = f"{text}; {'; '.join(details[partition])}"
        if counts["idle"]:
            findings.append(Finding(f"partition {partition}", value, "good"))
        else:
            findings.append(Finding(f"partition {partition}", value, "slow", "no node is idle: a job waits"))
    return findings or [Finding("partitions", "none", "missing", "this user may use no partition")]


def _parse_settings(output: str) -> dict[str, str]:
    """Return the settings that `scontrol show config` prints."""
    return {match[1]: match[2].strip() for match in re.finditer(r"^(\w+)\s*= ?(.*)$", output, re.MULTILINE)}


def _parse_seconds(settings: dict[str, str], name: str) -> int:
    """Return a setting such as `30 sec`, 0 if it is missing."""
    match = re.match(r"\d+", settings.get(name, ""))
    return int(match[0]) if match else 0


def _check_slurm_settings(settings: dict[str, str]) -> list[Finding]:
    """Check the time-outs of ending jobs and silent nodes, and how Slurm tracks processes."""
    kill_wait = _parse_seconds(settings, "KillWait")
    findings = []
    if kill_wait >= _MIN_KILL_WAIT:
        findings.append(Finding("KillWait", f"{kill_wait} s", "good"))
    else:
        advice = "a requeued or cancelled job must save in this time; ask for more than a checkpoint takes"
        findings.append(Finding("KillWait", f"{kill_wait} s", "slow", advice))
    timeout = _parse_seconds(settings, "SlurmdTimeout")
    advice = "a node whose slurmd dies is replaced after this time; a node that fails altogether after seconds"
    findings.append(Finding("SlurmdTimeout", f"{timeout} s", "good", advice))
    tracking = settings.get("ProctrackType", "")
    if "cgroup" in tracking:
        findings.append(Finding("ProctrackType", tracking, "good"))
    else:
        advice = "processes that leave their group may survive a job; proctrack/cgroup ends them"
        findings.append(Finding("ProctrackType", tracking or "unknown", "slow", advice))
    return findings


def _check_containers(help_text: str) -> list[Finding]:
    """Return the runtimes for containers. pyxis, a plugin of srun, adds options to srun's help text."""
    runtimes = []
    if "--container-image" in help_text:
        runtimes.append("pyxis")
    if shutil.which("apptainer"):
        runtimes.append("apptainer")
    if runtimes:
        return [Finding("container runtimes", ", ".join(runtimes), "good")]
    return [Finding("container runtimes", "none", "slow", "slurm.container must be empty; install into shared storage")]


# Kubernetes -----------------------------------------------------------------------------------------------------------


def examine_kubernetes(api: Api, gpu_resource: str) -> list[Finding]:
    """Check the server, the namespace, the driver's rights, GPUs and extensions.

    gpu_resource: name of the GPUs, as kubernetes.gpu_resource.
    """
    try:
        version = api.call("GET", "/version")
    except KubernetesError as error:
        return [
            Finding("API server", str(error)[:_ERROR_CHARACTERS], "missing", "check the kubeconfig and the network")
        ]
    findings = [Finding("API server", str(version.get("gitVersion", "unknown version")), "good")]
    findings.append(_check_namespace(api))
    findings.append(_check_rights(api))
    findings.append(_check_gpus(api, gpu_resource))
    findings += _check_extensions(api)
    return findings


def _check_namespace(api: Api) -> Finding:
    """Check that the namespace exists, and what its Pod Security level forbids."""
    subject = f"namespace {api.namespace}"
    try:
        metadata = api.call("GET", f"/api/v1/namespaces/{api.namespace}").get("metadata", {})
    except KubernetesError as error:
        if error.status == 404:
            return Finding(subject, "missing", "missing", f"kubectl create namespace {api.namespace}")
        return Finding(subject, f"cannot be read ({error.reason})", "slow", "its Pod Security level is unknown")
    level = (metadata.get("labels") or {}).get("pod-security.kubernetes.io/enforce", "none")
    advice = ""
    if level in ("restricted", "baseline"):
        advice = "host: mounts and host_network are refused; with restricted also kubernetes.user=0"
    return Finding(subject, f"Pod Security level {level}", "good", advice)


def _check_rights(api: Api) -> Finding:
    """Check the caller's rights for the requests that a driver makes."""
    refused = []
    for group, resource, verb in _RIGHTS:
        attributes = {"group": group, "resource": resource, "verb": verb}
        if resource != "nodes":
            attributes["namespace"] = api.namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        try:
            path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
            is_allowed = bool(api.call("POST", path, review).get("status", {}).get("allowed"))
        except KubernetesError:
            is_allowed = False
        if not is_allowed:
            refused.append(f"{verb} {resource}")
    if refused:
        advice = "apply the ServiceAccount and roles of `megascale launch FILE --dry-run --form driver`"
        return Finding("rights of the driver", f"refused: {', '.join(refused)}", "missing", advice)
    return Finding("rights of the driver", "all granted", "good")


def _check_gpus(api: Api, resource: str) -> Finding:
    """Count the ready machines by their number of GPUs."""
    try:
        nodes = api.call("GET", "/api/v1/nodes").get("items", [])
    except KubernetesError as error:
        return Finding("machines", f"cannot be listed ({error.reason})", "slow", "lost machines are noticed later")
    counts: Counter[str] = Counter()  # number of machines by the text of their number of GPUs
    for node in nodes:
        conditions = node.get("status", {}).get("conditions") or []
        statuses = {condition.get("type"): condition.get("status") for condition in conditions}
        is_ready = statuses.get("Ready") == "True"
        if is_ready and not node.get("spec", {}).get("unschedulable"):
            counts[str(node.get("status", {}).get("allocatable", {}).get(resource, "0"))] += 1
    value = ", ".join(f"{count} with {gpus} GPUs" for gpus, count in sorted(counts.items())) or "none ready"
    if set(counts) - {"0"}:
        return Finding("machines", value, "good")
    return Finding("machines", value, "slow", f"no machine offers {resource}: install the device plugin")


def _check_extensions(api: Api) -> list[Finding]:
    """Return a finding per optional extension of Kubernetes."""
    try:
        groups = {group.get("name") for group in api.call("GET", "/apis").get("groups", [])}
    except KubernetesError as error:
        return [Finding("extensions", f"cannot be listed ({error.reason})", "slow")]
    findings = []
    for group, subject, advice in _EXTENSIONS:
        if group in groups:
            findings.append(Finding(subject, "present", "good"))
        else:
            findings.append(Finding(subject, "absent", "slow", advice))
    return findings
