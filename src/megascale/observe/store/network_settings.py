"""Check of the settings of a host's InfiniBand and RoCE ports when a run starts.

A link that flaps is down for several seconds. NCCL gives up after its time-out multiplied by its retries. This product
must exceed the time for which a flapping link is down (MegaScale section 6.3). The value t of NCCL_IB_TIMEOUT means
4.096 us x 2^t (InfiniBand's local ACK timeout). RoCE needs ECN on the priority of its traffic. Settings that the kernel
does not show are reported as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FLAP_SECONDS = 10.0  # longest time that a flapping link is down
_ACK_SECONDS = 4.096e-6
_DEFAULT_RETRIES = 7  # NCCL's default
_ACTIVE_STATE = 4  # number of a port's state "ACTIVE"
_HIDDEN = "the kernel does not show it"


@dataclass(frozen=True)
class Setting:
    """A setting and its verdict.

    Attributes:
        device: port, or an empty string for the host.
        value, advised: present and recommended value as text.
        good: whether the value is good; None if it cannot be read.
    """

    device: str
    name: str
    value: str
    advised: str
    good: bool | None


def check_network(environment: Mapping[str, str], system: Path = Path("/sys")) -> list[Setting]:
    """Return the settings of this host; empty without InfiniBand and RoCE ports.

    Args:
        environment: environment variables of the ranks.
        system: the kernel's folder of devices.
    """
    ports = sorted((system / "class" / "infiniband").glob("*/ports/*"))
    if not ports:
        return []
    settings = [_check_timeout(environment)]
    for port in ports:
        adapter = port.parent.parent
        device = f"{adapter.name}/{port.name}"
        state = read_text(port / "state")
        number = state.partition(":")[0]
        if number.isdigit():
            is_active = int(number) == _ACTIVE_STATE
        else:
            is_active = None
        settings.append(Setting(device, "link", state or "unknown", "4: ACTIVE", good=is_active))
        if read_text(port / "link_layer") == "Ethernet":
            settings += _check_roce(device, adapter, environment, system)
    return settings


def _check_timeout(environment: Mapping[str, str]) -> Setting:
    """Check whether NCCL waits for a link for at least FLAP_SECONDS."""
    timeout = environment.get("NCCL_IB_TIMEOUT", "")
    retries = environment.get("NCCL_IB_RETRY_CNT", str(_DEFAULT_RETRIES))
    if not timeout.isdigit() or not retries.isdigit():
        value = f"NCCL_IB_TIMEOUT={timeout}"
        if not timeout:
            value = "NCCL_IB_TIMEOUT is not set: 18 or 20, depending on NCCL's version"
        return Setting("", "time-out", value, "NCCL_IB_TIMEOUT=22", good=False)
    seconds = _ACK_SECONDS * 2 ** min(int(timeout), 31) * (min(int(retries), 7) + 1)
    value = f"NCCL_IB_TIMEOUT={timeout}, NCCL_IB_RETRY_CNT={retries}: {seconds:.1f} s"
    return Setting("", "time-out", value, f"{FLAP_SECONDS:g} s or more", good=seconds >= FLAP_SECONDS)


def _check_roce(device: str, adapter: Path, environment: Mapping[str, str], system: Path) -> list[Setting]:
    traffic_class = environment.get("NCCL_IB_TC", "")
    priority = 0
    if traffic_class.isdigit():
        # The DSCP is the traffic class without its two ECN bits, with 8 values per priority.
        priority = min(int(traffic_class), 255) >> 5
        settings = [Setting(device, "traffic class", f"{traffic_class}: priority {priority}", "", good=True)]
    else:
        advised = "the class that the switches keep lossless"
        settings = [Setting(device, "traffic class", "NCCL_IB_TC is not set", advised, good=False)]
    for nic in sorted((adapter / "device" / "net").glob("*")):
        for role, name in (("roce_np", "ECN notification"), ("roce_rp", "ECN reaction")):
            value = read_text(system / "class" / "net" / nic.name / "ecn" / role / "enable" / str(priority))
            good = {"0": False, "1": True}.get(value)
            settings.append(Setting(device, name, value or _HIDDEN, "1", good))
    for name, tool in (("PFC", "mlnx_qos"), ("adaptive retransmission", "mlxreg")):
        settings.append(Setting(device, name, _HIDDEN, f"see {tool}", good=None))
    return settings


def read_text(path: Path) -> str:
    """Return the first characters of a file of /sys, "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()[:100]
    except OSError:
        return ""
