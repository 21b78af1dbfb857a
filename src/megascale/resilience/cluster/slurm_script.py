"""The batch script of `megascale launch --cluster slurm --dry-run`: an allocation with spares, the driver in it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale.config import Config

_HEAD = """#!/bin/bash
# Written by `megascale launch --cluster slurm --dry-run`: hand it to sbatch.
{options}

cd {folder} || exit 2
{path}launch() {{ exec {python} -P -m megascale launch {words} "$@"; }}

next=0 starts=0
# Slurm says that the time limit is near: save, end, and go on in the next job.
trap 'next=1; kill -TERM $driver' USR1
trap 'starts=9; kill -TERM $driver' TERM INT
while :; do
    launch & driver=$!
    while :; do wait $driver; code=$?; kill -0 $driver 2>/dev/null || break; done
    starts=$((starts + 1))
    # A driver that was killed: agents train on, the next one takes the job over.
    [ $code -gt 128 ] && [ $code -ne 130 ] && [ $next = 0 ] && [ $starts -lt 6 ] || break
done
if [ $next = 1 ] && [ $code -gt 128 ]; then
    (launch --dry-run) | sbatch --dependency=afterany:$SLURM_JOB_ID && code=0
fi
exit $code
"""
BEFORE = 300  # seconds before the time limit; Slurm may be a minute early


def batch_script(config: Config, gpus: int, words: Sequence[str], blocked: Sequence[str], path: str) -> str:
    """The text.

    Args:
        config: as given, with nodes, spares and further options of sbatch.
        gpus: of a node, 0: none are asked for.
        words: of the launch, after `megascale launch` and without --dry-run.
        blocked: nodes that the job has evicted, which no later allocation should have.
        path: PYTHONPATH, "" for none.
    """
    limits = config.resilience
    options = [f"--job-name={config.train.name}", f"--nodes={limits.nodes + limits.spares}", "--ntasks-per-node=1"]
    options += ["--exclusive", *([f"--gpus-per-node={gpus}"] if gpus else [])]
    # A node that fails takes no other with it; the batch node's own failure has Slurm start the script again.
    options += ["--no-kill", "--requeue", "--open-mode=append", f"--signal=B:USR1@{BEFORE}"]
    options += [f"--output={config.run_folder.absolute()}.slurm-%j.out"]
    options += [f"--exclude={','.join(blocked)}"] if blocked else []
    options += shlex.split(limits.sbatch)
    return _HEAD.format(
        options="\n".join(f"#SBATCH {option}" for option in options),
        folder=shlex.quote(str(Path.cwd())),
        path=f"export PYTHONPATH={shlex.quote(path)}\n" if path else "",
        python=shlex.quote(sys.executable),
        words=" ".join(map(shlex.quote, words)),
    )
