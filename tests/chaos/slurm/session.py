"""A session under Slurm as docs/slurm.md shows it: from an idle cluster to a run that survives a node's loss."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.launched import WAIT, make
from tests.chaos.machines.network import wait
from tests.chaos.slurm.site import SlurmSite

_LAUNCH = "megascale launch job.toml --cluster slurm --nodes 2 --spares 1 --train.name=demo --train.steps={steps}"
_STEPS = 400
_SETTINGS = (("hidden = 32", "hidden = 64"), ("interval = 50", "interval = 100"))


def session(site: SlurmSite, folder: Path, log: Callable[[str], None]) -> bool:
    """Type commands on the login machine, and say them with what they print; whether the run came to its end.

    Args:
        site: idle.
        folder: to work in; new.
    """
    file = make(folder)
    text = file.read_text()
    for old, new in _SETTINGS:
        text = text.replace(old, new)
    file.write_text(text)
    run = folder / "runs" / "demo"

    def typed(line: str) -> None:
        arguments = ["bash", "-c", f"cd {folder} && {_clean(line)}"]
        done = subprocess.run(
            site.machines["head"].inside(arguments), capture_output=True, text=True, env=site.environment
        )
        log(f"$ {line}")
        for each in (done.stdout + done.stderr).splitlines():
            log(each.rstrip().replace(f"{site.folder}/home", "~").replace(f"{folder}/", ""))

    def wait_for_event(subject: str, times: int = 1) -> None:
        events = run / "events.jsonl"
        wait(lambda: events.exists() and events.read_text().count(f'"event": "{subject}"') >= times, subject, 3 * WAIT)

    typed("sinfo")
    typed(f"{_LAUNCH.format(steps=_STEPS)} --dry-run > job.sbatch")
    typed("grep '^#SBATCH' job.sbatch")
    typed("sbatch job.sbatch")
    wait_for_event("first_step")
    typed("squeue --name=demo --format='%i %j %T %N'")
    typed("megascale access runs/demo > demo.access && chmod 600 demo.access")
    typed("megascale nodes demo.access")
    typed("scontrol update nodename=n2 state=down reason='fan is loud'")
    wait_for_event("first_step", 2)
    typed("squeue --name=demo --format='%i %j %T %N'")
    typed("megascale events runs/demo | tail -n 11")
    wait_for_event("job_done")
    wait(lambda: "COMPLETED" in _state(site), "the job's end", 3 * WAIT)
    typed("squeue --name=demo --states=all --format='%i %j %T %N'")
    typed("tail -4 runs/demo.slurm-*.out")
    typed("scontrol update nodename=n2 state=resume")
    good = "COMPLETED" in _state(site)
    shutil.rmtree(run, ignore_errors=True)
    return good


def _state(site: SlurmSite) -> str:
    return site.slurm("squeue", "--noheader", "--states=all", "--name=demo", "--format=%T")


def _clean(line: str) -> str:
    """The line with this installation's command."""
    local = f"{shlex.quote(sys.executable)} -m megascale.cli.main "
    return local + line.removeprefix("megascale ") if line.startswith("megascale ") else line
