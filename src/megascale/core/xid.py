"""What NVIDIA's driver says of a device that needs more than a new process."""

from __future__ import annotations

# NVIDIA's catalogue of Xid errors: memory errors that containment did not mend, NVLink, off the bus, firmware.
FATAL_XIDS = frozenset({48, 64, 74, 79, 92, 94, 95, 119, 120})
OFF_BUS_XID = 79  # the device has fallen off the bus

# NVML's recovery actions by number; nothing is needed: 0.
RECOVERY = {
    1: "reset",
    2: "node reboot",
    3: "drain P2P",
    4: "drain and reset",
    5: "recover IMEX domain",
    6: "bus reset",
    7: "system reboot",
}
# Those without which no new process can use the device.
UNUSABLE_ACTIONS = frozenset({"reset", "node reboot", "bus reset", "system reboot"})
