"""How a host's InfiniBand and RoCE ports are set, beside what is advised; looked at when a run starts.

A link that flaps is away for several seconds. NCCL gives up after its time-out times its retries, so both must outlast
that (MegaScale section 6.3); a time-out of t is 4.096 us x 2^t (InfiniBand's local ACK timeout). RoCE needs ECN on the
priority that its traffic has. What the kernel does not show is said, and not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FLAP_SECONDS = 10.0  # that a link may be away
_ACK_SECONDS = 4.096e-6
_RETRIES = 7  # NCCL's own
_ACTIVE = 4


@dataclass(frozen=True)
class Setting:
    """One finding. device: port, or "" for the whole host; good: None where it cannot be read."""

    device: str
    name: str
    value: str
    advised: str
    good: bool | None


def check_network(environment: Mapping[str, str], system: Path = Path("/sys")) -> list[Setting]:
    """All that can be said of this host; nothing where it has no such ports."""
    ports = sorted((system / "class" / "infiniband").glob("*/ports/*"))
    if not ports:
        return []
    found = [_time_out(environment)]
    for port in ports:
        device = f"{port.parent.parent.name}/{port.name}"
        state = _text(port / "state")
        number = state.partition(":")[0]
        good = None if not number.isdigit() else int(number) == _ACTIVE
        found.append(Setting(device, "link", state or "unknown", "4: ACTIVE", good))
        if _text(port / "link_layer") == "Ethernet":
            found += _roce(device, port.parent.parent, environment, system)
    return found


def _time_out(environment: Mapping[str, str]) -> Setting:
    """How long NCCL waits for a link."""
    timeout, retries = environment.get("NCCL_IB_TIMEOUT", ""), environment.get("NCCL_IB_RETRY_CNT", str(_RETRIES))
    advised = "NCCL_IB_TIMEOUT=22"
    if not (timeout.isdigit() and retries.isdigit()):
        said = f"NCCL_IB_TIMEOUT={timeout}" if timeout else "NCCL_IB_TIMEOUT is not set: 18 or 20 by NCCL's version"
        return Setting("", "time-out", said, advised, False)
    seconds = _ACK_SECONDS * 2 ** min(int(timeout), 31) * (min(int(retries), 7) + 1)
    said = f"NCCL_IB_TIMEOUT={timeout}, NCCL_IB_RETRY_CNT={retries}: {seconds:.1f} s"
    return Setting("", "time-out", said, f"{FLAP_SECONDS:g} s or more", seconds >= FLAP_SECONDS)


def _roce(device: str, adapter: Path, environment: Mapping[str, str], system: Path) -> list[Setting]:
    traffic_class = environment.get("NCCL_IB_TC", "")
    if not traffic_class.isdigit():
        priority = 0
        advised = "the class that switches keep lossless"
        found = [Setting(device, "traffic class", "NCCL_IB_TC is not set", advised, False)]
    else:
        priority = min(int(traffic_class), 255) >> 5  # DSCP is the class without its two ECN bits, 8 to a priority
        found = [Setting(device, "traffic class", f"{traffic_class}: priority {priority}", "", True)]
    for nic in sorted((adapter / "device" / "net").glob("*")):
        for role, name in (("roce_np", "ECN marks are told"), ("roce_rp", "ECN marks are obeyed")):
            value = _text(system / "class" / "net" / nic.name / "ecn" / role / "enable" / str(priority))
            good = None if value not in ("0", "1") else value == "1"
            found.append(Setting(device, name, value or "the kernel does not show it", "1", good))
    for name, tool in (("PFC", "mlnx_qos"), ("adaptive retransmission", "mlxreg")):
        found.append(Setting(device, name, "the kernel does not show it", f"see {tool}", None))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()[:100]
    except OSError:
        return ""
