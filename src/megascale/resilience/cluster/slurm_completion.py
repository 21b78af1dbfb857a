"""Ends a Slurm job with an exit code, as the end of its batch script does: for a job whose batch node Slurm has taken.

    python -m megascale.resilience.cluster.slurm_completion JOB CODE

Slurm has no command for it. Its library's slurm_complete_job, which salloc and srun use, may be called by the job's
owner. In a process of its own, since foreign code is loaded; exit code 1 where that cannot be done.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys


def library() -> str:
    """The path of the library that Slurm's own commands use, "" if there is none."""
    command = shutil.which("scontrol")
    if command is None:
        return ""
    said = subprocess.run(["ldd", command], capture_output=True, text=True).stdout
    found = re.search(r"=> (/\S*libslurm\S*)", said)
    return found[1] if found else ""


def complete(job: int, code: int) -> str:
    """End the job; why it could not be done, "" if it was."""
    path = library()
    if not path:
        return "no library of Slurm's was found"
    try:
        slurm = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)  # its plugins use its symbols
        slurm.slurm_init(None)
        failed = slurm.slurm_complete_job(ctypes.c_uint32(job), ctypes.c_uint32(code << 8))
    except (OSError, AttributeError) as error:
        return f"{path}: {error}"
    return f"Slurm refused ({failed})" if failed else ""


if __name__ == "__main__":
    if why := complete(int(sys.argv[1]), int(sys.argv[2])):
        sys.exit(f"job {sys.argv[1]} is cancelled, as its exit code {sys.argv[2]} cannot be told: {why}")
