"""Checks of host and GPU memory: bandwidth, stored bits, and the links between memories."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megascale.resilience.diagnose.check import Result, SelfCheck, make_absent_check, make_failed_check
from megascale.resilience.diagnose.compute import list_devices, measure_seconds

_HOST_BYTES = 128 << 20  # of a test of host memory
_DEVICE_BYTES = 2 << 30  # of a test of GPU memory
_LINK_BYTES = 512 << 20  # of a copy between memories
_PATTERNS = (0x00, 0xFF, 0x55, 0xAA)  # bytes: no bit, all bits, and every other bit set


def _list_memories() -> list[torch.device]:
    """Return the CPU and all GPUs."""
    devices = list_devices()
    if devices[0].type == "cpu":
        return devices
    return [torch.device("cpu")] + devices


def _choose_test_bytes(device: torch.device) -> int:
    """Return the number of bytes for a test of a memory, a multiple of 8."""
    if device.type == "cpu":
        return _HOST_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return min(_DEVICE_BYTES, free // 4) // 8 * 8  # A test needs up to three tensors of this size.


def check_bandwidth() -> Iterator[SelfCheck]:
    """Measure a copy within each memory, in bytes per second that are read and written."""
    for device in _list_memories():
        size = _choose_test_bytes(device)
        source = torch.ones(size // 8, dtype=torch.int64, device=device)
        target = torch.empty_like(source)
        rate = 2 * size / _measure_copy(device, source, target) / 1e9  # each byte is read and written
        details = f"copy of {size >> 20} MiB"
        yield SelfCheck(f"memory bandwidth {device}", "passed", rate, "GB/s", details=details)


def _measure_copy(device: torch.device, source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the seconds of a copy of all bytes."""
    return measure_seconds(device, lambda: target.copy_(source, non_blocking=True))


def check_patterns() -> Iterator[SelfCheck]:
    """Write patterns of bits, and each word's inverted address, into each memory, and compare them."""
    for device in _list_memories():
        name = f"memory pattern {device}"
        word_count = _choose_test_bytes(device) // 8
        problem = _find_wrong_words(device, word_count)
        if problem:
            yield make_failed_check(name, problem)
        else:
            details = f"{word_count * 8 >> 20} MiB, {len(_PATTERNS)} patterns and addresses"
            yield SelfCheck(name, "passed", details=details)


def _find_wrong_words(device: torch.device, word_count: int) -> str:
    """Return a description of words that do not have the written value, "" if all words do."""
    memory = torch.empty(word_count, dtype=torch.int64, device=device)
    for pattern in _PATTERNS:
        memory.view(torch.uint8).fill_(pattern)
        value = int.from_bytes(bytes([pattern] * 8), "little", signed=True)
        wrong_words = int((memory != value).sum())
        if wrong_words:
            return f"{wrong_words} of {word_count} words do not hold the pattern {pattern:#04x}"
    addresses = torch.arange(word_count, dtype=torch.int64, device=device)
    memory.copy_(addresses).bitwise_not_()
    wrong_words = int((memory != ~addresses).sum())
    if wrong_words:
        return f"{wrong_words} of {word_count} words do not hold their address"
    return ""


def check_host_device() -> Iterator[SelfCheck]:
    """Measure copies between pinned host memory and each GPU in both directions, and compare the bits."""
    if not torch.cuda.is_available():
        yield make_absent_check("host-device bandwidth", "no CUDA device")
        return
    for device in list_devices():
        host = _make_random_words(torch.device("cpu")).pin_memory()
        returned = torch.empty_like(host).pin_memory()
        on_device = torch.empty_like(host, device=device)
        seconds_to = _measure_copy(device, host, on_device)
        seconds_from = _measure_copy(device, on_device, returned)
        is_equal = torch.equal(host, returned)
        details = f"{_LINK_BYTES >> 20} MiB pinned"
        if not is_equal:
            details = "the copy that came back has other bits"
        yield _make_link_check(f"host to {device}", seconds_to, is_equal, details)
        yield _make_link_check(f"host from {device}", seconds_from, is_equal, details)


def check_device_pairs() -> Iterator[SelfCheck]:
    """Measure copies between every pair of GPUs of the host (NVLink if there is one), and compare the bits."""
    devices = [device for device in list_devices() if device.type == "cuda"]
    if len(devices) < 2:
        yield make_absent_check("device pairs", f"{len(devices)} CUDA devices on this host")
        return
    for source in devices:
        for target in devices:
            if source != target:
                yield _check_pair(source, target)


def _check_pair(source: torch.device, target: torch.device) -> SelfCheck:
    """Measure a copy from one GPU to another, and compare the bits."""
    a = _make_random_words(source)
    b = torch.empty_like(a, device=target)

    def copy() -> None:
        b.copy_(a, non_blocking=True)
        torch.cuda.synchronize(source)

    seconds = measure_seconds(target, copy)
    is_equal = torch.equal(a.cpu(), b.cpu())
    is_peer = torch.cuda.can_device_access_peer(source.index, target.index)
    details = "peer to peer" if is_peer else "through the host"
    if not is_equal:
        details = "the copy has other bits"
    return _make_link_check(f"device pair {source} {target}", seconds, is_equal, details)


def _make_random_words(device: torch.device) -> torch.Tensor:
    """Return _LINK_BYTES of random bits."""
    return torch.randint(-(2**62), 2**62, (_LINK_BYTES // 8,), device=device)


def _make_link_check(name: str, seconds: float, has_passed: bool, details: str) -> SelfCheck:
    """Return the check of a copy of _LINK_BYTES between two memories."""
    result: Result = "passed" if has_passed else "failed"
    return SelfCheck(name, result, _LINK_BYTES / seconds / 1e9, "GB/s", details=details)
