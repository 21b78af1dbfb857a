"""The container of agents and trainers in a Slurm job: pyxis (enroot) or apptainer. The driver runs outside of it."""

from __future__ import annotations

import shutil
from pathlib import Path

from megascale.config import SlurmConfig
from megascale.errors import ConfigError


def make_container_arguments(settings: SlurmConfig, job_id: str, run: Path) -> list[str]:
    """Return the arguments of srun before a program that make it run in the configured container.

    The list is empty without a container. The run folder has the same path in the container, since agents and trainers
    get the path from the driver. Raises ConfigError if the run folder cannot be mounted.
    """
    if not settings.container:
        return []
    mounts = list(settings.mounts)
    if not any(run.is_relative_to(mount.split(":")[1]) for mount in mounts):
        if set(str(run)) & set(",:"):
            raise ConfigError(
                f"slurm.container={settings.container} cannot mount the run folder {run}, whose name has a comma or a "
                "colon; choose another train.name or train.runs"
            )
        mounts.append(f"{run}:{run}")
    if settings.container == "pyxis":
        # A container with a name is unpacked once per node. The home folder has the agent's folder.
        return [
            f"--container-image={settings.image}",
            f"--container-name=megascale-{job_id}",
            f"--container-mounts={','.join(mounts)}",
            "--container-mount-home",
        ]
    arguments = ["apptainer", "exec"]
    if shutil.which("nvidia-smi"):
        arguments.append("--nv")
    for mount in mounts:
        arguments += ["--bind", mount]
    return arguments + [settings.image]
