"""The batch script of `megascale launch --cluster slurm --dry-run`: an allocation with spares, and the driver."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.errors import ConfigError
from megascale.resilience.cluster.slurm_container import make_container_arguments

if TYPE_CHECKING:
    from megascale.config import Config

# A trap interrupts `wait`, so the inner loop waits until the driver has ended. `starts=9` exceeds the limit of 6.
_SCRIPT = """#!/bin/bash
# Written by `megascale launch --cluster slurm --dry-run`: hand it to sbatch.
{options}

# The folder of the command, against which relative paths of the settings resolve
cd {folder} || exit 2
# The driver, which starts the agents of the nodes by srun
{path}launch() {{ exec {python} -P -m megascale launch {overrides} "$@"; }}

# next: the time limit is near; starts: of the driver
next=0 starts=0
# Slurm signals that the time limit is near: save, end, and continue in the next job.
trap 'next=1; kill -TERM $driver' USR1
# scancel and Ctrl-C: save and end, and start no further driver.
trap 'starts=9; kill -TERM $driver' TERM INT
while :; do
    launch & driver=$!
    while :; do wait $driver; code=$?; kill -0 $driver 2>/dev/null || break; done
    starts=$((starts + 1))
    # After a kill of the driver its agents continue, and the next driver takes the job over.
    [ $code -gt 128 ] && [ $code -ne 130 ] && [ $next = 0 ] && [ $starts -lt 6 ] || break
done
{continuation}exit $code
"""
# The lines after the end of the driver, by the way in which training continues after the time limit.
_SUBMISSION = """# The next job starts once this one has ended.
if [ $next = 1 ] && [ $code -gt 128 ]; then
    (launch --dry-run) | sbatch --dependency=afterany:$SLURM_JOB_ID && code=0
fi
"""
_REQUEUE = """# Slurm ends this job and starts it again, possibly on other nodes (slurm.resubmission).
if [ $next = 1 ] && [ $code -gt 128 ]; then
    scontrol requeue $SLURM_JOB_ID && code=0
fi
"""
_NEXT_ATTEMPT = """# After the time limit the next job of the array continues (slurm.attempts); else training has ended.
if [ $next = 1 ] && [ $code -gt 128 ]; then
    code=0
else
    scancel --state=PENDING $SLURM_ARRAY_JOB_ID
fi
"""
# Seconds before the time limit at which the job saves. Slurm may send the signal up to a minute early.
SIGNAL_SECONDS = 300
_EARLY_SECONDS = 60
_DEFAULT_SIGNAL_SECONDS = 60  # of Slurm, if --signal has no time
_BATCH_SIGNAL = re.compile(r"B:(?:SIG)?(?:USR1|10)(?:@(\d+))?", re.IGNORECASE)
# Options of sbatch that the job sets itself, and the setting instead of each.
_OWN_OPTIONS = {
    "--array": "slurm.attempts, whose jobs run one after another; jobs at the same time cannot share a run",
    "--nodes": "resilience.nodes and resilience.spares",
    "--ntasks": "parallel.gpus_per_host for the ranks of a node, which one agent starts",
    "--ntasks-per-node": "parallel.gpus_per_host for the ranks of a node, which one agent starts",
}
_LONG_NAMES = {"-a": "--array", "-n": "--ntasks", "-N": "--nodes", "-t": "--time"}


def make_batch_script(config: Config, gpus: int, overrides: Sequence[str], blocked: Sequence[str], path: str) -> str:
    """Return the text of the batch script.

    Args:
        config: the configuration with nodes, spares and further options of sbatch.
        gpus: GPUs per node to request, 0 for none.
        overrides: command line after `megascale launch`, without --dry-run.
        blocked: names of evicted nodes, which are excluded from the allocation.
        path: PYTHONPATH, "" for none.

    Raises:
        ConfigError: a batch script cannot hold an option or a path, or an option of resilience.sbatch contradicts it.
    """
    # Raises ConfigError for a run folder that cannot be mounted.
    make_container_arguments(config.slurm, "0", config.run_folder.absolute())
    _check_options(config)
    lines = [
        f"# {reason}\n{_format_options([option])}" for option, reason in _choose_options(config, gpus, blocked).items()
    ]
    if config.resilience.sbatch:
        lines.append(f"# resilience.sbatch\n{_format_options(shlex.split(config.resilience.sbatch))}")
    export_path = ""
    if path:
        export_path = f"export PYTHONPATH={shlex.quote(path)}\n"
    return _SCRIPT.format(
        options="\n".join(lines),
        folder=shlex.quote(str(Path.cwd())),
        path=export_path,
        python=shlex.quote(sys.executable),
        overrides=shlex.join(overrides),
        continuation=_choose_continuation(config),
    )


def _check_options(config: Config) -> None:
    """Raise ConfigError if an option of resilience.sbatch contradicts the script, or if no time to train remains."""
    options = _parse_options(config.resilience.sbatch)
    for name, setting in _OWN_OPTIONS.items():
        if name in options:
            raise ConfigError(
                f"resilience.sbatch has {name}, which the batch script sets; remove it, and use {setting}"
            )
    signal_seconds = SIGNAL_SECONDS
    if "--signal" in options:
        value = options["--signal"]
        match = _BATCH_SIGNAL.fullmatch(value)
        if match is None:
            raise ConfigError(
                f"resilience.sbatch has --signal={value}, and the batch script saves on USR1, which only B: sends to "
                f"it; write --signal=B:USR1@{SIGNAL_SECONDS}"
            )
        signal_seconds = int(match[1] or _DEFAULT_SIGNAL_SECONDS)
    if "--time" in options:
        setting = "resilience.sbatch=--time"
    else:
        setting = "slurm.time"
    limit = options.get("--time", config.slurm.time)
    seconds = _parse_time_limit(limit)
    if seconds and seconds <= signal_seconds + _EARLY_SECONDS:
        remedy = f"set {setting}={(signal_seconds + _EARLY_SECONDS) // 60 + 1} (minutes) or more"
        latest_signal = seconds - _EARLY_SECONDS - 1
        if latest_signal > 0:
            remedy += f", or save later with --resilience.sbatch=--signal=B:USR1@{latest_signal} or less"
        raise ConfigError(
            f"the time limit {setting}={limit} is {seconds} s, and the job saves {signal_seconds} s before it, or "
            f"up to {_EARLY_SECONDS} s earlier, so that each job would end before it trains; {remedy}"
        )


def _parse_options(text: str) -> dict[str, str]:
    """Return sbatch's options by long name. Raises ConfigError for a first word that is not an option."""
    options: dict[str, str] = {}
    name = ""
    for word in shlex.split(text):
        if word.startswith("--"):
            name, _, value = word.partition("=")
        elif word.startswith("-"):
            name, value = _LONG_NAMES.get(word[:2], word[:2]), word[2:]
        elif not name:
            raise ConfigError(
                f"resilience.sbatch={text!r} begins with {word!r}, which is not an option; write --{word.lstrip('-')}"
            )
        else:
            value = word
        options[name] = value
    return options


def _parse_time_limit(text: str) -> int | None:
    """Return the seconds of a time limit in Slurm's form; None without a limit or in another form."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in [*parts, days or "0"]):
        return None
    numbers = [int(part) for part in parts]
    if dash or len(numbers) == 3:  # hours first
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours = 0
        minutes, seconds = [*numbers, 0][:2]
    return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds


def _choose_continuation(config: Config) -> str:
    """Return the lines after the end of the driver."""
    if config.slurm.attempts > 1:
        return _NEXT_ATTEMPT
    if config.slurm.resubmission == "requeue":
        return _REQUEUE
    return _SUBMISSION


def _choose_options(config: Config, gpus: int, blocked: Sequence[str]) -> dict[str, str]:
    """Return the options of sbatch, each with its reason."""
    limits = config.resilience
    log_pattern = f"{_make_file_pattern(config.run_folder.absolute())}.slurm-%j.out"
    options = {
        f"--job-name={config.train.name}": "The name of the run",
        f"--nodes={limits.nodes + limits.spares}": "Nodes that hold ranks (resilience.nodes), and spares",
        "--ntasks-per-node=1": "One agent per node starts all ranks of the node",
        "--exclusive": "No other job runs on these nodes",
        "--mem=0": "All memory of each node; some sites otherwise give a job a small default",
    }
    settings = config.slurm
    # These options are left to Slurm's defaults unless they are configured.
    for key, value, reason in (
        ("account", settings.account, "The account that is charged (slurm.account)"),
        ("partition", settings.partition, "The partition of the nodes (slurm.partition)"),
        ("qos", settings.qos, "The quality of service (slurm.qos)"),
        ("time", settings.time, "The time limit of one job (slurm.time)"),
        ("constraint", settings.constraint, "Features of the nodes (slurm.constraint)"),
        ("reservation", settings.reservation, "The reservation of the nodes (slurm.reservation)"),
    ):
        if value:
            options[f"--{key}={value}"] = reason
    if settings.attempts > 1:
        options[f"--array=1-{settings.attempts}%1"] = "Jobs that run one after another (slurm.attempts)"
    if gpus:
        options[f"--gpus-per-node={gpus}"] = "GPUs per node"
    options |= {
        "--no-kill": "The failure of a node ends no other node",
        "--requeue": "After a failure of the batch node Slurm starts this script again",
        "--open-mode=append": "A requeued job appends to the log",
        f"--signal=B:USR1@{SIGNAL_SECONDS}": "Seconds before the time limit at which the job saves",
        f"--output={log_pattern}": "The log, with the number of the job",
    }
    if blocked:
        options[f"--exclude={','.join(blocked)}"] = "Nodes that the driver has evicted"
    return options


def _format_options(options: Sequence[str]) -> str:
    """Return the options as #SBATCH lines. An option and its value share a line."""
    lines: list[list[str]] = []
    for word in options:
        if word.startswith("-") or not lines:
            lines.append([])
        lines[-1].append(_quote(word))
    return "\n".join("#SBATCH " + " ".join(line) for line in lines)


def _quote(word: str) -> str:
    """Return `word` quoted for a line of sbatch options.

    In such a line a backslash quotes the next character, also between quotes, and `#` begins a comment.
    """
    if re.search(r"[\x00-\x08\x0a-\x1f\x7f]", word):
        raise ConfigError(
            f"{word!r} holds a line break or another control character, which an option of sbatch cannot hold; remove "
            "it from train.name, train.runs, [slurm] or resilience.sbatch, or start from a folder without it"
        )
    return re.sub(r"([\s\\'\"#])", r"\\\1", word) or '""'


def _make_file_pattern(path: Path) -> str:
    """Return `path` quoted for sbatch's file names, in which `%` begins a replacement."""
    if "\\" in str(path):
        raise ConfigError(
            f"the log of a Slurm job cannot be {path}: Slurm replaces no %j in a name with a backslash; choose "
            "train.runs without a backslash"
        )
    return str(path).replace("%", "%%")
