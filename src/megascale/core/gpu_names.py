"""Names of the GPUs that this process may use, for processes that it starts on some of them."""

from __future__ import annotations

import os


def visible_gpu_names(there: int) -> list[str]:
    """Names as CUDA_VISIBLE_DEVICES has them, in its order: numbers or UUIDs.

    A process that is given one of them in that variable sees that GPU; a number counted from 0 could be another one's.

    Args:
        there: GPUs of the machine, or those that CUDA sees: no more names are given.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(there)]
    names: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        if name in ("", "-1"):  # CUDA reads no further either
            break
        names.append(name)
    return names[:there]
