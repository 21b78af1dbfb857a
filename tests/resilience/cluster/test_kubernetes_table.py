"""Ended pods of a job, and the state of machines from their objects."""

from __future__ import annotations

import copy

from megascale.resilience.cluster import kubernetes_view as verdicts
from megascale.resilience.cluster.kubernetes_api import KubernetesError
from megascale.resilience.cluster.kubernetes_table import OUT_OF_SERVICE, Table
from tests.chaos.kubernetes.kubelets import machine


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


RUNNING = {"running": {"startedAt": "now"}}
ENDED = {"terminated": {"exitCode": 143, "reason": "Error"}}


def pod(state: dict | None = None, where: str = "k1", phase: str = "Running", **status: object) -> dict:
    states = [{"name": "agent", "state": state}] if state else []
    output = {"phase": phase, "podIP": "10.0.0.1", "startTime": "now", "containerStatuses": states} | status
    spec = {"nodeName": where} if where else {}
    return {"metadata": {"name": "job-1", "uid": "u1"}, "spec": spec, "status": output}


def table() -> tuple[Table, Clock]:
    clock = Clock()
    built = Table("nvidia.com/gpu", clock)
    built.set_machines([machine("k1", **{"nvidia.com/gpu": "8"})])
    return built, clock


def test_a_pod_whose_kubelet_has_ended_it_is_gone():
    built, _ = table()
    built.update_pod(pod(RUNNING))
    assert not built.has_stopped("k1", 30)
    built.remove_pod(pod(ENDED))
    assert built.has_stopped("k1", 30)


def test_so_is_one_whose_kubelet_found_its_container_gone_before_it_had_told_of_its_end():
    """As kubelets say it (ContainerStatusUnknown): waiting, with a last state. A container that is started again may
    be between two runs."""
    removed = pod({"waiting": {"reason": "ContainerCreating"}})
    removed["status"]["containerStatuses"][0]["lastState"] = ENDED
    built, _ = table()
    built.update_pod(pod(RUNNING))
    built.remove_pod(removed)
    assert not built.has_stopped("k1", 30)
    built, _ = table()
    built.update_pod(pod(RUNNING))
    removed["spec"]["restartPolicy"] = "Never"
    built.remove_pod(removed)
    assert built.has_stopped("k1", 30)


def test_a_pod_that_was_removed_by_force_is_not():
    built, clock = table()
    built.update_pod(pod(RUNNING))
    built.remove_pod(pod(RUNNING))
    assert not built.pods
    assert not built.has_stopped("k1", 30)
    clock.seconds += 44  # its machine is there: its kubelet ends what the server does not have
    assert not built.has_stopped("k1", 30)
    clock.seconds += 2
    assert built.has_stopped("k1", 30)


def test_the_word_of_its_agent_is_enough():
    built, _ = table()
    built.update_pod(pod(RUNNING))
    built.record_agent_end("k1")  # of an agent before it, perhaps: this one is not ending
    built.remove_pod(pod(RUNNING))
    assert not built.has_stopped("k1", 30)
    built.record_agent_end("k1")  # it came after the object was removed by force
    assert built.has_stopped("k1", 30)
    ending = pod(RUNNING)
    ending["metadata"]["deletionTimestamp"] = "now"
    built.update_pod(ending)
    built.record_agent_end("k1")
    built.remove_pod(ending)
    assert built.has_stopped("k1", 30)


def test_a_machine_that_nobody_hears_proves_nothing_until_somebody_says_that_it_is_off():
    built, clock = table()
    built.update_pod(pod(RUNNING))
    built.update_machine(machine("k1", ready=False))
    built.remove_pod(pod(RUNNING))
    clock.seconds += 10_000
    assert not built.has_stopped("k1", 30)
    off = machine("k1", ready=False)
    off["spec"]["taints"] = [{"key": OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"}]
    built.update_machine(off)
    assert built.has_stopped("k1", 30)


def test_a_kubelet_that_comes_back_gets_its_time():
    built, clock = table()
    built.update_machine(machine("k1", ready=False))
    built.update_pod(pod(RUNNING))
    built.remove_pod(pod(RUNNING))
    clock.seconds += 1000
    built.update_machine(machine("k1"))
    clock.seconds += 40
    assert not built.has_stopped("k1", 30)
    clock.seconds += 6
    assert built.has_stopped("k1", 30)


def test_a_pod_that_was_marked_from_afar_may_run_on():
    built, _ = table()
    built.update_pod(pod(RUNNING, phase="Failed", reason="NodeLost"))
    assert not built.has_stopped("k1", 30)
    built.update_pod(pod(None, phase="Failed", reason="OutOfcpu"))
    assert built.has_stopped("k1", 30)


def test_a_list_tells_of_what_went_while_nobody_watched():
    built, _ = table()
    built.update_pod(pod(RUNNING))
    built.set_pods([])
    assert not built.pods
    assert not built.has_stopped("k1", 30)


def test_verdicts_say_what_is_wrong():
    built, _ = table()
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    result = verdicts.judge_obstacle(built.update_pod(pod(waiting, phase="Pending")), 0.0)
    assert result is not None
    assert (result.kind, result.nodes, result.needs_person) == ("image_pull_failed", ("k1",), True)
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    unplaced = built.update_pod(pod(None, "", "Pending", conditions=[condition]))
    assert verdicts.judge_obstacle(unplaced, 0.5) is None  # the scheduler may not have had its turn
    result = verdicts.judge_obstacle(unplaced, 5.0)
    assert result is not None
    assert result.kind == "unschedulable"
    assert "0/3 nodes" in result.evidence[0]


def test_refusals_are_told_apart():
    def kind(status: int, output: str) -> str:
        return verdicts.judge_refusal(KubernetesError(status, "x", output), "pod job-1").kind

    assert kind(403, 'pods "job-1" is forbidden: exceeded quota: team, requested: pods=1') == "quota_reached"
    assert kind(400, 'admission webhook "policy" denied the request: no') == "admission_denied"
    assert kind(403, 'admission webhook "policy" denied the request: no') == "admission_denied"
    assert kind(500, "failed calling webhook: no route to host") == "admission_denied"
    assert kind(403, 'User "x" cannot create resource "pods"') == "admission_denied"
    assert kind(0, "was not reached") == "cluster_unreachable"


def test_devices_that_the_plugin_calls_unhealthy_evict_the_node():
    built, _ = table()
    sick = machine("k1", **{"nvidia.com/gpu": "8"})
    sick["status"]["capacity"] = copy.deepcopy(sick["status"]["capacity"])
    sick["status"]["allocatable"]["nvidia.com/gpu"] = "7"
    assert verdicts.judge_devices(built.machines["k1"], ("k1",), "nvidia.com/gpu", 8) is None
    built.update_machine(sick)
    result = verdicts.judge_devices(built.machines["k1"], ("k1",), "nvidia.com/gpu", 8)
    assert result is not None
    assert (result.kind, result.action, result.nodes) == ("device_fault", "evict", ("k1",))
    assert "1 of 8" in result.evidence[0]


def test_a_pod_that_should_have_ended_is_stuck():
    built, clock = table()
    deleted = pod(RUNNING)
    deleted["metadata"] |= {"deletionTimestamp": "now", "deletionGracePeriodSeconds": 30}
    built.update_pod(deleted)
    clock.seconds += 35.0
    assert not built.list_stuck_pods(5.0)
    clock.seconds += 0.1
    assert [each.name for each in built.list_stuck_pods(5.0)] == ["job-1"]
    built.update_pod(deleted | {"status": pod(ENDED)["status"]})
    assert not built.list_stuck_pods(5.0)
