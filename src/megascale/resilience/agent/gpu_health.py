"""NVML's view of a node's devices: counters once a heartbeat, Xid errors as they come. Threads ask and wait for them: a
driver that is busy, or whose device is broken, answers after seconds or never."""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from megascale.core.background import FailureLog
from megascale.core.gpu_names import visible_gpu_names
from megascale.core.xid import FATAL_XIDS, OFF_BUS_XID, RECOVERY
from megascale.resilience.protocol.heartbeat import GpuReport

log = logging.getLogger("megascale.agent")
WAIT_MS = 1000  # of the thread for one event; an agent that ends waits for it no longer
PAUSE = 1.0  # seconds after a wait that failed
ANSWER = 5.0  # seconds that an answer may take before it is told that none comes
# Slowed down by heat or power brake, in hardware or software; not by the power limit, which is normal.
_HOT = 0x8 | 0x20 | 0x40 | 0x80


class GpuHealth:
    """Nothing where there is no NVML (`pip install -e '.[driver]'`).

    Args:
        nvml: the module pynvml, or one that does as it does; default: the real one.
        clock: seconds.
    """

    def __init__(self, nvml: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml: Any = None
        self._handles: dict[int, Any] = {}
        self._xids: XidWatch | None = None
        self._clock = clock
        self._newest: tuple[GpuReport, ...] = ()
        self._asked = 0.0  # when what is not answered yet was asked
        self._wanted = False
        self._stopped = False
        self._turn = threading.Condition()
        try:
            nvml = nvml or importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._handles = _visible(nvml)
        except Exception as error:
            log.info("no NVML: %s", error)
            return
        self._nvml = nvml
        self._xids = XidWatch(nvml, self._handles)
        self._thread = threading.Thread(target=self._run, name="megascale-gpus", daemon=True)
        self._thread.start()

    def take(self) -> tuple[GpuReport, ...]:
        """The newest record of each device, as of the call before, and asks for the next; never waits. A value that a
        device does not report is 0."""
        if self._xids is None:
            return ()
        with self._turn:
            now = self._clock()
            waited = now - self._asked if self._wanted else 0.0
            if not self._wanted:
                self._wanted, self._asked = True, now
                self._turn.notify_all()
            silent = waited if waited > ANSWER else 0.0
            reports = self._newest
        if silent and not reports:
            reports = tuple(GpuReport(index, "unknown") for index in self._handles)
        replace = msgspec.structs.replace
        return tuple(replace(r, xid=self._xids.worst(r.index), unanswered=silent) for r in reports)

    def answered(self, seconds: float) -> bool:
        """Whether what was asked last is answered, after so many seconds at most."""
        with self._turn:
            return self._turn.wait_for(lambda: not self._wanted, seconds)

    def close(self) -> None:
        """End the threads; a driver that does not answer is not waited for."""
        if self._xids is None:
            return
        with self._turn:
            self._stopped = True
            self._turn.notify_all()
        self._thread.join(2 * WAIT_MS / 1000)
        self._xids.close()

    def _run(self) -> None:
        failed = False
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._wanted or self._stopped)
                if self._stopped:
                    return
            reports = self._newest
            try:
                reports = tuple(self._one(index, handle) for index, handle in self._handles.items())
            except Exception as error:  # of a library's version, say; heartbeats must go on
                if not failed:
                    log.warning("GPUs cannot be asked: %s", error)
                failed = True
            with self._turn:
                self._newest, self._wanted = reports, False
                self._turn.notify_all()

    def _one(self, index: int, handle: Any) -> GpuReport:
        n = self._nvml
        lost = False

        def ask(question: Any, *arguments: Any) -> Any:
            nonlocal lost
            try:
                return question(handle, *arguments)
            except n.NVMLError as error:
                lost = lost or getattr(error, "value", None) == n.NVML_ERROR_GPU_IS_LOST
                return 0

        name = ask(n.nvmlDeviceGetName)
        temperature = float(ask(n.nvmlDeviceGetTemperature, n.NVML_TEMPERATURE_GPU))
        power = ask(n.nvmlDeviceGetPowerUsage) / 1e3
        ecc = int(ask(n.nvmlDeviceGetTotalEccErrors, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC))
        slowed = bool(ask(n.nvmlDeviceGetCurrentClocksThrottleReasons) & _HOT)
        recovery = self._recovery(ask)
        assert self._xids is not None
        if lost:
            self._xids.note(index, OFF_BUS_XID)  # a device that is off the bus may send no event any more
        text = name.decode() if isinstance(name, bytes) else str(name or "unknown")
        return GpuReport(index, text, temperature, power, ecc, self._xids.worst(index), slowed, recovery)

    def _recovery(self, ask: Any) -> str:
        """What the driver says that the device needs, "" for nothing or where it does not say (before release 565)."""
        field = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        values: Any = ask(self._nvml.nvmlDeviceGetFieldValues, [field]) if field is not None else 0
        if not values or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return ""
        number = int(values[0].value.uiVal)
        return RECOVERY.get(number, f"recovery action {number}") if number else ""


class XidWatch:
    """Waits for critical Xid errors of some devices, index -> handle, in a thread of its own."""

    def __init__(self, nvml: Any, handles: dict[int, Any]) -> None:
        self._nvml, self._handles = nvml, handles
        self._worst: dict[int, int] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._set = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            log.warning("Xid errors are not seen: %s", error)
            return
        watched = [index for index, handle in handles.items() if self._register(index, handle)]
        if watched:
            self._thread = threading.Thread(target=self._listen, name="megascale-xid", daemon=True)
            self._thread.start()

    def worst(self, index: int) -> int:
        """The last Xid of a device, one that it does not outlive before others; 0: none."""
        with self._lock:
            return self._worst.get(index, 0)

    def note(self, index: int, xid: int) -> None:
        """A device had an error. What follows upon a fatal one (its processes end with Xids of their own) hides it
        not."""
        with self._lock:
            if xid in FATAL_XIDS or self._worst.get(index) not in FATAL_XIDS:
                self._worst[index] = xid

    def close(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(2 * WAIT_MS / 1000)

    def _register(self, index: int, handle: Any) -> bool:
        n = self._nvml
        try:
            n.nvmlDeviceRegisterEvents(handle, n.nvmlEventTypeXidCriticalError, self._set)
        except n.NVMLError as error:
            log.warning("Xid errors of GPU %d are not seen: %s", index, error)
            return False
        return True

    def _listen(self) -> None:
        n, failed = self._nvml, False
        failures = FailureLog(log, "reading an Xid error")
        while not self._stopped.is_set():
            try:
                event = n.nvmlEventSetWait_v2(self._set, WAIT_MS)
            except n.NVMLError as error:
                if getattr(error, "value", None) != n.NVML_ERROR_TIMEOUT:
                    if not failed:
                        log.warning("waiting for Xid errors failed, trying again: %s", error)
                    failed = True
                    self._stopped.wait(PAUSE)
                continue
            try:
                self._take(event)
            except Exception as error:  # of a library's version, say; later errors must still be seen
                failures.note(error, "the event is left out")

    def _take(self, event: Any) -> None:
        index = self._index(event.device)
        if event.eventType & self._nvml.nvmlEventTypeXidCriticalError and index is not None:
            log.warning("GPU %d reported Xid %d", index, event.eventData)
            self.note(index, int(event.eventData))

    def _index(self, device: Any) -> int | None:
        """Which of our devices an event is about."""
        try:
            found = int(self._nvml.nvmlDeviceGetIndex(device))
            return found if found in self._handles else None
        except self._nvml.NVMLError:  # off the bus: its handle is the same still
            return next((index for index, mine in self._handles.items() if _pointer(mine) == _pointer(device)), None)


def _pointer(handle: Any) -> Any:
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value
    except (TypeError, ctypes.ArgumentError):
        return handle


def _visible(nvml: Any) -> dict[int, Any]:
    """Index -> handle of the devices that are this node's: nodes on one machine share its devices out by
    CUDA_VISIBLE_DEVICES, and a neighbour's fault is not theirs."""
    there, found = nvml.nvmlDeviceGetCount(), {}
    names = visible_gpu_names(there)
    for index in range(there):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if str(index) not in names:
                uuid = nvml.nvmlDeviceGetUUID(handle)
                uuid = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
                if not any(name.startswith("GPU-") and uuid.startswith(name) for name in names):
                    continue
        except nvml.NVMLError as error:
            log.warning("GPU %d cannot be asked: %s", index, error)
            continue
        found[index] = handle
    return found
