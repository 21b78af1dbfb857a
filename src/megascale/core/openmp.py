"""How threads of OpenMP, which torch computes with on CPUs, wait for each other."""

from __future__ import annotations

import os


def sleep_at_barriers() -> None:
    """Have threads sleep, not spin, at the end of a parallel region. Call before torch is loaded.

    On a core that another process shares, a thread that spins waits for one that does not run. docs/log.md has the
    measurement (2026-11-26). Results are the same bit for bit. A policy that the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
