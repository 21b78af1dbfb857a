"""Health of a node's GPUs from NVML: counters once per heartbeat, and Xid errors when they occur.

Threads make all calls, because a busy NVIDIA driver, or one with a broken GPU, answers after seconds or never. While it
frees the memory of a killed rank, a new agent could otherwise not greet its driver.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from megascale.core.failure import FailureLog
from megascale.core.gpus import FATAL_XIDS, NVML_RECOVERY_ACTIONS, OFF_BUS_XID, visible_gpu_names
from megascale.resilience.protocol.heartbeat import GpuReport

log = logging.getLogger("megascale.agent")
EVENT_WAIT_MS = 1000  # duration of one wait for an event; `close` waits at most twice as long for each thread
RETRY_SECONDS = 1.0  # pause after a failed wait
SILENCE_SECONDS = 5.0  # a longer time without an answer is reported
# NVML's bits for clocks that are reduced by heat or by a power brake: hardware slow-down, software thermal slow-down,
# hardware thermal slow-down, hardware power brake. Reduction by the power limit is normal and has another bit.
_THROTTLE_REASONS = 0x8 | 0x20 | 0x40 | 0x80


class GpuHealth:
    """Health of all GPUs of the node, read in threads. Without NVML (`pip install -e '.[driver]'`) reports are empty.

    Args:
        nvml: module to use instead of pynvml.
        clock: monotonic clock in seconds.
    """

    def __init__(self, nvml: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._handles: dict[int, Any] = {}  # NVML's handles by index of the GPU
        self._xids: XidWatch | None = None
        self._clock = clock
        self._newest_reports: tuple[GpuReport, ...] = ()
        self._request_time = 0.0  # when the request without an answer was made
        self._is_requested = False  # a request has no answer yet
        self._is_stopped = False
        self._condition = threading.Condition()  # guards the four attributes above
        self._thread = threading.Thread(target=self._run, name="megascale-gpus", daemon=True)
        self._thread.start()

    def get_newest_reports(self) -> tuple[GpuReport, ...]:
        """Return the newest report of each GPU, and request the next ones. Never blocks. Unknown values are 0.

        The result is empty until the thread has opened NVML.
        """
        with self._condition:
            current_time = self._clock()
            wait_seconds = 0.0
            if self._is_requested:
                wait_seconds = current_time - self._request_time
            else:
                self._is_requested = True
                self._request_time = current_time
                self._condition.notify_all()
            reports = self._newest_reports
        silent_seconds = wait_seconds if wait_seconds > SILENCE_SECONDS else 0.0
        if silent_seconds and not reports:
            reports = tuple(GpuReport(index, "unknown") for index in self._handles)
        if self._xids is None:
            return ()
        return tuple(
            msgspec.structs.replace(report, xid=self._xids.get_worst_xid(report.index), silent_seconds=silent_seconds)
            for report in reports
        )

    def wait_for_answer(self, timeout: float) -> bool:
        """Wait for the answer to the last request, and return whether it came within `timeout` seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._is_requested, timeout)

    def close(self) -> None:
        """End the threads, without waiting for an NVIDIA driver that does not answer."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()
        self._thread.join(2 * EVENT_WAIT_MS / 1000)
        if self._xids is not None:
            self._xids.close()

    def _open(self) -> None:
        """Open NVML, find the GPUs, and observe their Xid errors. Raises an error if NVML is unavailable."""
        start_time = time.monotonic()
        self._nvml = self._nvml or importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._handles = _find_visible_gpus(self._nvml)
        self._xids = XidWatch(self._nvml, self._handles)
        log.info("NVML was opened in %.2f s", time.monotonic() - start_time)

    def _run(self) -> None:
        """Open NVML, and answer requests until `close`. Runs in the thread."""
        try:
            self._open()
        except Exception as error:
            log.info("GPU health is unavailable: %s", error)
        has_failed = False  # a failure was logged
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_requested or self._is_stopped)
                if self._is_stopped:
                    return
            reports = self._newest_reports
            try:
                reports = tuple(self._read_gpu(index, handle) for index, handle in self._handles.items())
            except Exception as error:  # any error, such as an incompatible library, because heartbeats must continue
                if not has_failed:
                    log.warning("GPUs cannot be queried: %s", error)
                has_failed = True
            with self._condition:
                self._newest_reports = reports
                self._is_requested = False
                self._condition.notify_all()

    def _read_gpu(self, index: int, handle: Any) -> GpuReport:
        """Return the report of a GPU. A call that fails gives 0."""
        nvml = self._nvml
        query = _GpuQuery(nvml, handle)
        name = query.call(nvml.nvmlDeviceGetName)
        temperature = float(query.call(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU))
        power_watts = query.call(nvml.nvmlDeviceGetPowerUsage) / 1e3  # NVML counts milliwatts
        # Volatile counters begin at 0 with the NVIDIA driver, so old errors do not count.
        ecc_type = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        ecc_errors = int(query.call(nvml.nvmlDeviceGetTotalEccErrors, *ecc_type))
        is_throttled = bool(query.call(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) & _THROTTLE_REASONS)
        recovery = query.read_recovery_action()
        assert self._xids is not None
        if query.is_lost:
            self._xids.record(index, OFF_BUS_XID)  # a GPU that fell off the bus may send no event
        return GpuReport(
            index,
            _decode(name) or "unknown",
            temperature=temperature,
            power_watts=power_watts,
            ecc_errors=ecc_errors,
            xid=self._xids.get_worst_xid(index),
            throttled=is_throttled,
            recovery=recovery,
        )


class _GpuQuery:
    """NVML calls for one GPU. `is_lost` is whether a call has reported that the GPU fell off the bus."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.is_lost = False

    def call(self, function: Any, *arguments: Any) -> Any:
        """Return the result of an NVML function, or 0 if it fails."""
        try:
            return function(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) == self._nvml.NVML_ERROR_GPU_IS_LOST:
                self.is_lost = True
            return 0

    def read_recovery_action(self) -> str:
        """Return the action that the NVIDIA driver recommends, or an empty text. Drivers before 565 recommend none."""
        field = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        if field is None:
            return ""
        values = self.call(self._nvml.nvmlDeviceGetFieldValues, [field])
        if not values or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return ""
        number = int(values[0].value.uiVal)
        if number:
            return NVML_RECOVERY_ACTIONS.get(number, f"recovery action {number}")
        return ""


class XidWatch:
    """Thread that observes critical Xid errors of GPUs.

    Args:
        handles: NVML handles by index of the GPU.
    """

    def __init__(self, nvml: Any, handles: dict[int, Any]) -> None:
        self._nvml = nvml
        self._handles = handles
        self._worst_xids: dict[int, int] = {}
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._event_set = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            log.warning("Xid errors cannot be observed: %s", error)
            return
        watched = [index for index, handle in handles.items() if self._register(index, handle)]
        if watched:
            self._thread = threading.Thread(target=self._run, name="megascale-xid", daemon=True)
            self._thread.start()

    def get_worst_xid(self, index: int) -> int:
        """Return the last fatal Xid of a GPU, or else its last Xid, or else 0."""
        with self._lock:
            return self._worst_xids.get(index, 0)

    def record(self, index: int, xid: int) -> None:
        """Record an Xid. A fatal one stays recorded, although the processes of the GPU then end with further Xids."""
        with self._lock:
            if xid in FATAL_XIDS or self._worst_xids.get(index) not in FATAL_XIDS:
                self._worst_xids[index] = xid

    def close(self) -> None:
        """End the thread."""
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join(2 * EVENT_WAIT_MS / 1000)

    def _register(self, index: int, handle: Any) -> bool:
        """Request the Xid events of a GPU; return False if NVML refuses."""
        nvml = self._nvml
        try:
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._event_set)
        except nvml.NVMLError as error:
            log.warning("Xid errors of GPU %d cannot be observed: %s", index, error)
            return False
        return True

    def _run(self) -> None:
        """Record Xid events until `close`. Runs in the thread."""
        nvml = self._nvml
        has_failed = False  # a failed wait was logged
        failures = FailureLog(log, "reading an Xid error")
        while not self._is_stopped.is_set():
            try:
                event = nvml.nvmlEventSetWait_v2(self._event_set, EVENT_WAIT_MS)
            except nvml.NVMLError as error:
                if getattr(error, "value", None) != nvml.NVML_ERROR_TIMEOUT:
                    if not has_failed:
                        log.warning("waiting for Xid errors failed, trying again: %s", error)
                    has_failed = True
                    self._is_stopped.wait(RETRY_SECONDS)
                continue
            try:
                self._record_event(event)
            except Exception as error:
                # The thread survives any error, such as an incompatible library, to record later Xids.
                failures.note(error, "the event is left out")

    def _record_event(self, event: Any) -> None:
        index = self._find_index(event.device)
        if event.eventType & self._nvml.nvmlEventTypeXidCriticalError and index is not None:
            log.warning("GPU %d reported Xid %d", index, event.eventData)
            self.record(index, int(event.eventData))

    def _find_index(self, device: Any) -> int | None:
        """Return the index of an event's GPU, or None if the GPU is not one of this node."""
        try:
            index = int(self._nvml.nvmlDeviceGetIndex(device))
            return index if index in self._handles else None
        except self._nvml.NVMLError:  # the GPU fell off the bus, but its handle is unchanged
            for index, handle in self._handles.items():
                if _get_pointer(handle) == _get_pointer(device):
                    return index
            return None


def _get_pointer(handle: Any) -> Any:
    """Return the address in an NVML handle, by which two handles of one GPU are equal."""
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value
    except (TypeError, ctypes.ArgumentError):  # the handle is not a ctypes pointer
        return handle


def _decode(text: Any) -> str:
    """Return a text of NVML, whose older releases return bytes."""
    return text.decode() if isinstance(text, bytes) else str(text or "")


def _find_visible_gpus(nvml: Any) -> dict[int, Any]:
    """Return the NVML handles by index of the GPUs that CUDA_VISIBLE_DEVICES selects."""
    count = nvml.nvmlDeviceGetCount()
    names = visible_gpu_names(count)
    uuids = tuple(name for name in names if name.startswith("GPU-"))
    handles = {}
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if str(index) in names or (uuids and _decode(nvml.nvmlDeviceGetUUID(handle)).startswith(uuids)):
                handles[index] = handle
        except nvml.NVMLError as error:
            log.warning("GPU %d cannot be queried: %s", index, error)
    return handles
