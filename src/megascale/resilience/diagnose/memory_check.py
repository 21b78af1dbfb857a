"""Memory of host and devices: how fast it copies, and whether it holds what is written; links between the two."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megascale.resilience.diagnose.check import SelfCheck, absent_hardware
from megascale.resilience.diagnose.compute import devices, seconds_of

_HOST_BYTES = 128 << 20
_DEVICE_BYTES = 2 << 30
_LINK_BYTES = 512 << 20
_PATTERNS = (0x00, 0xFF, 0x55, 0xAA)


def _all() -> list[torch.device]:
    found = devices()
    return found if found[0].type == "cpu" else [torch.device("cpu"), *found]


def _bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return _HOST_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return min(_DEVICE_BYTES, free // 4) // 8 * 8


def bandwidth() -> Iterator[SelfCheck]:
    """Bytes read and written a second by a copy within a memory."""
    for device in _all():
        size = _bytes(device)
        source = torch.ones(size // 8, dtype=torch.int64, device=device)
        target = torch.empty_like(source)
        seconds = seconds_of(device, lambda: target.copy_(source))  # noqa: B023
        yield SelfCheck(
            f"memory bandwidth {device}",
            "passed",
            2 * size / seconds / 1e9,
            "GB/s",
            details=f"copy of {size >> 20} MiB",
        )


def patterns() -> Iterator[SelfCheck]:
    """Patterns of bits, and each word's own address, written and read back."""
    for device in _all():
        name, words = f"memory pattern {device}", _bytes(device) // 8
        memory = torch.empty(words, dtype=torch.int64, device=device)
        addresses = torch.arange(words, dtype=torch.int64, device=device)
        wrong = ""
        for pattern in _PATTERNS:
            memory.view(torch.uint8).fill_(pattern)
            value = int.from_bytes(bytes([pattern] * 8), "little", signed=True)
            bad = int((memory != value).sum())
            if bad:
                wrong = f"{bad} of {words} words do not hold the pattern {pattern:#04x}"
                break
        memory.copy_(addresses).bitwise_not_()
        bad = int((memory != ~addresses).sum())
        if bad and not wrong:
            wrong = f"{bad} of {words} words do not hold their address"
        text = f"{words * 8 >> 20} MiB, {len(_PATTERNS)} patterns and addresses"
        yield SelfCheck(name, "failed" if wrong else "passed", details=wrong or text)


def host_device() -> Iterator[SelfCheck]:
    """Copies between pinned host memory and each device, both ways, bits compared."""
    if not torch.cuda.is_available():
        yield absent_hardware("host-device bandwidth", "no CUDA device")
        return
    for device in devices():
        host = torch.randint(-(2**62), 2**62, (_LINK_BYTES // 8,)).pin_memory()
        back = torch.empty_like(host).pin_memory()
        there = torch.empty_like(host, device=device)
        down = seconds_of(device, lambda: there.copy_(host, non_blocking=True))  # noqa: B023
        up = seconds_of(device, lambda: back.copy_(there, non_blocking=True))  # noqa: B023
        same = torch.equal(host, back)
        for name, seconds in (("host to", down), ("host from", up)):
            text = f"{_LINK_BYTES >> 20} MiB pinned" if same else "what came back has other bits"
            result = "passed" if same else "failed"
            yield SelfCheck(f"{name} {device}", result, _LINK_BYTES / seconds / 1e9, "GB/s", details=text)  # type: ignore[arg-type]


def device_pairs() -> Iterator[SelfCheck]:
    """Copies between every pair of devices of the host (NVLink where there is one), bits compared."""
    found = devices()
    if found[0].type != "cuda" or len(found) < 2:
        yield absent_hardware(
            "device pairs", f"{len(found) if found[0].type == 'cuda' else 0} CUDA devices on this host"
        )
        return
    for source in found:
        for target in found:
            if source != target:
                yield _pair(source, target)


def _pair(source: torch.device, target: torch.device) -> SelfCheck:
    a = torch.randint(-(2**62), 2**62, (_LINK_BYTES // 8,), device=source)
    b = torch.empty_like(a, device=target)

    def copy() -> None:
        b.copy_(a, non_blocking=True)
        torch.cuda.synchronize(source)

    seconds = seconds_of(target, copy)
    same = torch.equal(a.cpu(), b.cpu())
    peer = torch.cuda.can_device_access_peer(source.index, target.index)
    text = ("peer to peer" if peer else "through the host") if same else "what arrived has other bits"
    result = "passed" if same else "failed"
    return SelfCheck(f"device pair {source} {target}", result, _LINK_BYTES / seconds / 1e9, "GB/s", details=text)  # type: ignore[arg-type]
