"""Hot update: change settings of a job that runs. The trainers save, the new settings are written, they start again.

The settings before are kept in RUN/driver/job.before.toml until the new ones have brought a step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascale.config import ACCEPTABLE, Config, ResilienceConfig, load
from megascale.core.untrusted_files import read_small_text
from megascale.errors import ConfigError
from megascale.resilience.protocol.contact import driver_folder

# What the driver and its agents hold, or what the saved state is made of.
FIXED = ("model", "parallel", "resilience", "train.name", "train.runs", "train.device")


def settings_file(run: Path) -> Path:
    """Where trainers read their settings: RUN/driver/job.toml."""
    return driver_folder(run) / "job.toml"


class RunningSettings:
    """The settings that a job runs with; one object for all parts of a driver.

    Attributes:
        config: in force now.
    """

    def __init__(self, run: Path, config: Config) -> None:
        self._run, self.config = run, config

    @property
    def limits(self) -> ResilienceConfig:
        """Windows and budgets, which no update changes."""
        return self.config.resilience

    @property
    def identity(self) -> str:
        """The run's random name, as the trainers of rank 0 made it; "" before."""
        try:
            return read_small_text(self._run / "identity").strip()[:200]
        except (OSError, ValueError):
            return ""

    def change(self, settings: Sequence[str]) -> tuple[str, ...]:
        """Put changed settings in force; what changed, in words. ConfigError as `apply`."""
        self.config, changed = apply(self._run, self.config, settings)
        return changed

    def undo(self) -> None:
        """Put the settings before back in force."""
        self.config = undo(self._run)


def apply(run: Path, config: Config, settings: Sequence[str]) -> tuple[Config, tuple[str, ...]]:
    """Write changed settings; returns them and what changed, in words.

    Raises ConfigError, with nothing written, for a wrong key or value, one of FIXED, or no change at all.
    """
    file = settings_file(run)
    new = load(file, [f"--{setting}" for setting in settings])
    if new.rendezvous.password is not None:
        raise ConfigError(
            "rendezvous.url holds a password, which a job that runs cannot take over: interrupt it and launch it again "
            "with the new one"
        )
    before, after = _flat(config.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    if not changed:
        raise ConfigError(f"{', '.join(settings)}: the job has these settings already")
    for key in changed:
        if any(key == fixed or key.startswith(fixed + ".") for fixed in FIXED):
            raise ConfigError(
                f"{key}={after.get(key)} cannot be changed in a job that runs ({', '.join(FIXED)} are fixed): "
                "interrupt it and launch it again with the new value"
            )
    asked = [key for key in changed if key in ACCEPTABLE and key not in new.checkpoint.accept_changes]
    if asked:
        accepted = ",".join([*new.checkpoint.accept_changes, *asked])
        raise ConfigError(
            f"{', '.join(f'{key}={after.get(key)}' for key in asked)} would have samples trained twice, never or "
            f"otherwise than before; accept it with checkpoint.accept_changes={accepted} in the same update"
        )
    os.replace(_written(config, file.with_name("job.before.tmp")), _before(run))
    os.replace(_written(new, file.with_name("job.tmp")), file)
    return new, tuple(f"{key}: {before.get(key)} -> {after.get(key)}" for key in changed)


def undo(run: Path) -> Config:
    """Put the settings before back in force."""
    os.replace(_before(run), settings_file(run))
    return load(settings_file(run))


def changed_since_last_launch(run: Path, config: Config) -> str:
    """What a new launch trains with otherwise than the last one ended with, in a sentence; "" if nothing.

    A hot update lives as long as its job: the next launch takes its own settings, and says which of them differ.
    """
    try:
        last = load(settings_file(run))
    except ConfigError:  # none, or a version's that had other settings
        return ""
    before, after = _flat(last.model_dump(mode="json")), _flat(config.model_dump(mode="json"))
    keys = [key for key in before if before[key] != after.get(key) and not key.startswith("resilience.")]
    if not keys:
        return ""
    told = ", ".join(f"{key} {before[key]} -> {after.get(key)}" for key in keys)
    return f"settings differ from those that the last launch ended with: {told}; give the old ones again to keep them"


def _before(run: Path) -> Path:
    return settings_file(run).with_name("job.before.toml")


def _written(config: Config, file: Path) -> Path:
    config.write(file)
    return file


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as {"section.key": value}."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
