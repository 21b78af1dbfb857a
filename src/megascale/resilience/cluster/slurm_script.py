"""The batch script of `megascale launch --cluster slurm --dry-run`: an allocation with spares, the driver in it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.errors import ConfigError

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

    Raises ConfigError for an option or a path that a batch script cannot hold.
    """
    limits = config.resilience
    options = [f"--job-name={config.train.name}", f"--nodes={limits.nodes + limits.spares}", "--ntasks-per-node=1"]
    options += ["--exclusive", *([f"--gpus-per-node={gpus}"] if gpus else [])]
    # A node that fails takes no other with it; the batch node's own failure has Slurm start the script again.
    options += ["--no-kill", "--requeue", "--open-mode=append", f"--signal=B:USR1@{BEFORE}"]
    options += [f"--output={_file_pattern(config.run_folder.absolute())}.slurm-%j.out"]
    options += [f"--exclude={','.join(blocked)}"] if blocked else []
    options += shlex.split(limits.sbatch)
    return _HEAD.format(
        options=_option_lines(options),
        folder=shlex.quote(str(Path.cwd())),
        path=f"export PYTHONPATH={shlex.quote(path)}\n" if path else "",
        python=shlex.quote(sys.executable),
        words=" ".join(map(shlex.quote, words)),
    )


def _option_lines(words: Sequence[str]) -> str:
    """Return the lines that give sbatch these words; an option and a value that follows it share a line."""
    lines: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not lines:
            lines.append([])
        lines[-1].append(_quote(word))
    return "\n".join(" ".join(["#SBATCH", *line]) for line in lines)


def _quote(word: str) -> str:
    """Return `word` as sbatch reads it in a line of options.

    There a backslash takes the next character as it is, also between quotes, and `#` begins a comment.
    """
    if re.search(r"[\x00-\x08\x0a-\x1f\x7f]", word):
        raise ConfigError(
            f"{word!r} holds a line break or another control character, which an option of sbatch cannot hold; take "
            "it out of train.name, train.runs or resilience.sbatch, or start from a folder without it"
        )
    return re.sub(r"([\s\\'\"#])", r"\\\1", word) or '""'


def _file_pattern(path: Path) -> str:
    """Return `path` as sbatch reads it in the name of a file, where `%` begins a replacement."""
    if "\\" in str(path):
        raise ConfigError(
            f"the log of a Slurm job cannot lie at {path}: with a backslash in its name Slurm replaces no %j; choose "
            "train.runs without a backslash"
        )
    return str(path).replace("%", "%%")
