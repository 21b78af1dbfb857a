"""Names of GPUs that a process may use, and the codes of faults that NVIDIA's driver reports."""

from __future__ import annotations

import os

# Xid errors (NVIDIA's catalogue) after which a GPU is unusable: memory, NVLink, GPU off the bus, firmware.
FATAL_XIDS = frozenset({48, 64, 74, 79, 92, 94, 95, 119, 120})
OFF_BUS_XID = 79

# NVML's recovery actions by number; 0 means that none is needed.
NVML_RECOVERY_ACTIONS = {
    1: "reset",
    2: "node reboot",
    3: "drain P2P",
    4: "drain and reset",
    5: "recover IMEX domain",
    6: "bus reset",
    7: "system reboot",
}
# A GPU that needs one of these recovery actions cannot be used by new processes.
UNUSABLE_ACTIONS = frozenset({"reset", "node reboot", "bus reset", "system reboot"})


def visible_gpu_names(gpu_count: int) -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES lists them: indices or UUIDs.

    A child process that has one of these names in CUDA_VISIBLE_DEVICES sees exactly that GPU.

    Args:
        gpu_count: number of GPUs of the machine, or of those that CUDA sees. At most this many names are returned.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(gpu_count)]
    names: list[str] = []
    for entry in visible.split(","):
        name = entry.strip()
        if name in ("", "-1"):  # CUDA ignores all names after such an entry
            break
        names.append(name)
    return names[:gpu_count]
