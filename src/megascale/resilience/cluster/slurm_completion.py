"""Ends a Slurm job with an exit code, like the end of its batch script, after Slurm has removed the batch node.

    python -m megascale.resilience.cluster.slurm_completion JOB CODE

Slurm has no command to set the exit code of a job. The owner of a job may call slurm_complete_job of Slurm's library,
as salloc and srun do. This module runs as a separate process, since it loads foreign code. Its exit code is 1 if the
call is impossible.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys


def find_library() -> str:
    """Return the path of the library that Slurm's commands use, "" if there is none."""
    command = shutil.which("scontrol")
    if command is None:
        return ""
    libraries = subprocess.run(["ldd", command], capture_output=True, text=True).stdout
    match = re.search(r"=> (/\S*libslurm\S*)", libraries)
    return match[1] if match else ""


def complete_job(job_id: int, code: int) -> str:
    """End the job; return "" or the reason of a failure."""
    path = find_library()
    if not path:
        return "Slurm's library was not found"
    try:
        slurm = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)  # Slurm's plugins use symbols of the library.
        slurm.slurm_init(None)
        wait_status = code << 8  # as of wait(2), which Slurm stores
        status = slurm.slurm_complete_job(ctypes.c_uint32(job_id), ctypes.c_uint32(wait_status))
    except (OSError, AttributeError) as error:
        return f"{path}: {error}"
    return f"Slurm refused ({status})" if status else ""


if __name__ == "__main__":
    reason = complete_job(int(sys.argv[1]), int(sys.argv[2]))
    if reason:
        sys.exit(f"job {sys.argv[1]} is cancelled, since its exit code {sys.argv[2]} cannot be set: {reason}")
