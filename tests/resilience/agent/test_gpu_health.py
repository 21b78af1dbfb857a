"""GPU health through NVML. Without a GPU a module stands in for NVML that answers as libnvidia-ml does; with one, the
real library is asked too."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest

from megascale.resilience import rules
from megascale.resilience.agent.gpu_health import GpuHealth
from megascale.resilience.protocol.agent_messages import FROM_AGENT
from megascale.resilience.protocol.heartbeat import GpuReport
from tests.resilience.rules.views import heartbeat, one, view, worker


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Nvml:
    """Two devices. `lost`: those off the bus; `recovery`: action by device; `events`: (device, Xid) to come."""

    NVMLError = NvmlError
    NVML_SUCCESS = 0
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_TEMPERATURE_GPU = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.recovery: dict[str, int] = {}
        self.events: queue.Queue[tuple[str, int] | int] = queue.Queue()
        self.registered: set[str] = set()
        self.waits = threading.Semaphore(0)  # released each time that the thread comes to wait

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"handle {index}"

    def _ask(self, handle: str, value):
        if handle in self.lost:
            raise NvmlError(self.NVML_ERROR_GPU_IS_LOST)
        return value

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return self._ask(handle, int(handle.split()[1]))

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return f"GPU-{'ab'[int(handle.split()[1])]}"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return self._ask(handle, "H200")

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return self._ask(handle, 50)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self._ask(handle, 500_000)

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, start: int) -> int:
        raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self._ask(handle, 0x4)

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int]):
        assert fields == [230]
        value = SimpleNamespace(uiVal=self.recovery.get(handle, 0))
        return self._ask(handle, [SimpleNamespace(nvmlReturn=0 if self.recovery else 3, value=value)])

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        assert (kinds, events) == (8, "set")
        self.registered.add(handle)

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int):
        self.waits.release()
        try:
            event = self.events.get(timeout=milliseconds / 1000)
        except queue.Empty:
            raise NvmlError(self.NVML_ERROR_TIMEOUT) from None
        if isinstance(event, int):
            raise NvmlError(event)
        return SimpleNamespace(device=event[0], eventType=8, eventData=event[1])

    def happens(self, *events: tuple[str, int] | int) -> None:
        """Events, until the thread has taken them all in and waits again."""
        assert self.waits.acquire(timeout=10)
        for event in events:
            self.events.put(event)
            assert self.waits.acquire(timeout=10)
        self.waits.release()


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("megascale.resilience.agent.gpu_health.RETRY_SECONDS", 0.0)
    return Nvml()


def take_reports(health: GpuHealth) -> tuple[GpuReport, ...]:
    """Return the answers to questions from now on."""
    assert health.wait_for_answer(10)
    health.get_newest_reports()
    assert health.wait_for_answer(10)
    return health.get_newest_reports()


def judged(health: GpuHealth):
    """The rules' verdicts on what an agent sends, as the driver reads it."""
    sent = FROM_AGENT.decode(FROM_AGENT.encode(heartbeat(0, 1, [worker(0)], gpus=take_reports(health))))
    return [v for v in rules.judge(view({0: [sent]})) if v.kind.startswith("device")]


def test_an_xid_event_reaches_the_rule_and_what_follows_it_hides_it_not(nvml):
    health = GpuHealth(nvml)
    try:
        assert not judged(health)
        assert nvml.registered == {"handle 0", "handle 1"}
        nvml.happens(("handle 1", 13))
        assert [g.xid for g in take_reports(health)] == [0, 13]
        nvml.happens(("handle 1", 79), 999, ("handle 1", 45))  # 999: a wait that fails ends nothing
        assert [g.xid for g in take_reports(health)] == [0, 79]
        verdict = one(judged(health), "device_fault")
        assert verdict.action == "evict"
        assert "GPU 1 (H200) of node-0 reported Xid 79" in verdict.evidence[0]
    finally:
        health.close()


def test_a_device_off_the_bus_is_told_though_it_answers_nothing(nvml):
    health = GpuHealth(nvml)
    try:
        nvml.lost.add("handle 0")
        nvml.happens(("handle 0", 95))  # its index cannot be asked any more, its handle is known
        assert take_reports(health)[0].xid in (79, 95)
        assert one(judged(health), "device_fault").action == "evict"
        assert [g.xid for g in take_reports(health)] == [79, 0]
    finally:
        health.close()


def test_a_recovery_action_is_read_where_there_is_one(nvml):
    health = GpuHealth(nvml)
    try:
        assert [g.recovery for g in take_reports(health)] == ["", ""]
        nvml.recovery["handle 0"] = 4
        assert one(judged(health), "device_warning").action == "alert"
        nvml.recovery["handle 1"] = 1
        assert [g.recovery for g in take_reports(health)] == ["drain and reset", "reset"]
        assert "needs a reset" in one(judged(health), "device_fault").evidence[0]
    finally:
        health.close()


@pytest.mark.parametrize(("visible", "local"), [("1", {1}), ("GPU-a", {0}), ("", set()), ("0,1", {0, 1})])
def test_a_neighbours_device_is_not_this_nodes(nvml, monkeypatch, visible, local):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    health = GpuHealth(nvml)
    assert {g.index for g in take_reports(health)} == local
    health.close()


def test_a_driver_that_does_not_answer_holds_no_heartbeat_up_and_is_told(nvml, monkeypatch):
    current = [100.0]
    answers = threading.Event()
    requested = threading.Event()
    real = nvml.nvmlDeviceGetTemperature

    def hangs(handle: str, kind: int) -> int:
        requested.set()
        assert answers.wait(10)
        return real(handle, kind)

    health = GpuHealth(nvml, clock=lambda: current[0])
    try:
        take_reports(health)
        assert health.wait_for_answer(10)
        monkeypatch.setattr(nvml, "nvmlDeviceGetTemperature", hangs)
        health.get_newest_reports()
        assert requested.wait(10)
        current[0] += 4.0
        assert [(g.temperature, g.silent_seconds) for g in health.get_newest_reports()] == [(50, 0.0)] * 2
        current[0] += 26.0
        nvml.happens(("handle 1", 13))
        result = health.get_newest_reports()
        assert [(g.temperature, g.silent_seconds, g.xid) for g in result] == [(50, 30.0, 0), (50, 30.0, 13)]
        beat = heartbeat(0, 1, [worker(0)], gpus=result[:1])
        verdict = one(rules.judge(view({0: [beat]})), "device_warning")
        assert (verdict.action, "has not answered for 30 s" in verdict.evidence[0]) == ("alert", True)
        answers.set()
        assert [g.silent_seconds for g in take_reports(health)] == [0.0, 0.0]
    finally:
        answers.set()
        health.close()


def test_an_agent_starts_while_the_driver_still_frees_the_memory_of_a_killed_rank(nvml, monkeypatch):
    is_free = threading.Event()

    def initialise() -> None:
        assert is_free.wait(30)

    monkeypatch.setattr(nvml, "nvmlInit", initialise)
    health = GpuHealth(nvml)
    try:
        assert health.get_newest_reports() == ()
        is_free.set()
        assert [report.index for report in take_reports(health)] == [0, 1]
    finally:
        is_free.set()
        health.close()


def test_a_library_that_fails_ends_no_heartbeat(nvml):
    health = GpuHealth(nvml)
    try:
        take_reports(health)
        nvml.nvmlDeviceGetName = None
        assert [g.temperature for g in take_reports(health)] == [50, 50]
    finally:
        health.close()


def test_the_real_library_is_asked_where_it_is():
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pytest.skip("no NVIDIA driver here")
    health = GpuHealth()
    try:
        assert len(take_reports(health)) >= 1
        assert all(g.temperature > 0 for g in take_reports(health))
    finally:
        health.close()
