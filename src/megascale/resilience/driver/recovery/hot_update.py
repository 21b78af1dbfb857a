"""Hot update: change settings of a running job. The trainers save and start again with the new settings.

The previous settings stay in RUN/driver/job.before.toml until the new ones have produced a step.

An order over the HTTP API may change only settings whose values are numbers, yes or no, or listed words: free text may
name files, servers and programs. A user who may write into the run folder may store any setting there, and an order
then applies the stored settings.
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from megascale.config import CHANGEABLE_KEYS, Config, ResilienceConfig, load
from megascale.core import strict_json
from megascale.core.untrusted_files import read_bounded, read_small_text
from megascale.errors import ConfigError
from megascale.resilience.protocol.contact import driver_folder

# Sections and settings that driver and agents read only at their start, or that determine the saved state.
FIXED_SETTINGS = ("model", "parallel", "resilience", "train.name", "train.runs", "train.device")
_STORED_FILE = "restart.json"  # settings that `megascale restart` stores in RUN/driver for the next order to restart
_STORED_LIMIT = 1 << 20  # bytes of this file that are read
_IDENTITY_CHARACTERS = 200  # limit of a message for a name
_VALUE_CHARACTERS = 100  # of a value that an error shows


def settings_file(run: Path) -> Path:
    """Return the file from which trainers read their settings: RUN/driver/job.toml."""
    return driver_folder(run) / "job.toml"


def _previous_settings_file(run: Path) -> Path:
    """Return the file with the settings before the last update."""
    return driver_folder(run) / "job.before.toml"


class RunningSettings:
    """The settings with which a job runs, shared by all parts of a driver.

    Attributes:
        config: the configuration in force.
    """

    def __init__(self, run: Path, config: Config) -> None:
        self._run = run
        self.config = config

    @property
    def limits(self) -> ResilienceConfig:
        """Windows and budgets, which no update changes."""
        return self.config.resilience

    @property
    def identity(self) -> str:
        """The run's random name, "" until rank 0 has created it."""
        try:
            return read_small_text(self._run / "identity").strip()[:_IDENTITY_CHARACTERS]
        except (OSError, ValueError):
            return ""

    def change(self, settings: Sequence[str]) -> tuple[str, ...]:
        """Put changed settings into force and describe the changes. Raise ConfigError as `apply_settings` does."""
        self.config, changes = apply_settings(self._run, self.config, settings)
        return changes

    def undo(self) -> None:
        """Put the previous settings into force again."""
        self.config = undo_settings(self._run)


def apply_settings(run: Path, config: Config, settings: Sequence[str]) -> tuple[Config, tuple[str, ...]]:
    """Write changed settings; return the new configuration and a description of each change.

    Raises:
        ConfigError: a key or value is wrong or in FIXED_SETTINGS, or nothing changes. Nothing was written then.
    """
    file = settings_file(run)
    new_config = load(file, [f"--{setting}" for setting in settings])
    if new_config.rendezvous.password is not None:
        raise ConfigError(
            "rendezvous.url contains a password, which a running job cannot take over: interrupt it and launch it "
            "again with the new one"
        )
    before = _flatten(config.model_dump(mode="json"))
    after = _flatten(new_config.model_dump(mode="json"))
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    if not changed:
        raise ConfigError(f"{', '.join(settings)}: the job has these settings already")
    for key in changed:
        if _is_fixed(key):
            raise ConfigError(
                f"{key}={after.get(key)} cannot be changed in a running job ({', '.join(FIXED_SETTINGS)} are fixed): "
                "interrupt it and launch it again with the new value"
            )
    # CHANGEABLE_KEYS affect the order of the samples, so a user must accept their changes by name.
    unaccepted = [key for key in changed if key in CHANGEABLE_KEYS and key not in new_config.checkpoint.accept_changes]
    if unaccepted:
        accepted = ",".join(new_config.checkpoint.accept_changes + unaccepted)
        raise ConfigError(
            f"{', '.join(f'{key}={after.get(key)}' for key in unaccepted)} would train samples twice, never or "
            f"differently than before; accept it with checkpoint.accept_changes={accepted} in the same update"
        )
    _write_config(_previous_settings_file(run), config)
    _write_config(file, new_config)
    return new_config, tuple(f"{key}: {before.get(key)} -> {after.get(key)}" for key in changed)


def undo_settings(run: Path) -> Config:
    """Put the previous settings into force again."""
    os.replace(_previous_settings_file(run), settings_file(run))
    return load(settings_file(run))


def describe_changes_since_launch(run: Path, config: Config) -> str:
    """Describe how the settings of a new launch differ from those with which the last launch ended; "" if equal.

    A hot update lasts until the job ends: the next launch takes its own settings and reports which of them differ.
    """
    try:
        last = load(settings_file(run))
    except ConfigError:  # There is no file, or another version wrote other settings.
        return ""
    before = _flatten(last.model_dump(mode="json"))
    after = _flatten(config.model_dump(mode="json"))
    keys = [key for key in before if before[key] != after.get(key) and not key.startswith("resilience.")]
    if not keys:
        return ""
    changes = ", ".join(f"{key} {before[key]} -> {after.get(key)}" for key in keys)
    return f"settings differ from the last launch's final ones: {changes}; pass the previous values to keep them"


def _is_fixed(name: str) -> bool:
    """Return True if FIXED_SETTINGS has a setting (section.key) or its section."""
    return any(name == fixed or name.startswith(f"{fixed}.") for fixed in FIXED_SETTINGS)


def _write_config(file: Path, config: Config) -> None:
    """Replace a file of settings atomically."""
    temporary = file.with_suffix(".tmp")
    config.write(temporary)
    os.replace(temporary, file)


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested sections as {"section.key": value}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


# orders over the API --------------------------------------------------------------------------------------------------


def list_orderable_settings() -> frozenset[str]:
    """Return the names (section.key) of the settings that an order may change."""
    names = {"checkpoint.accept_changes"}  # a list of names of settings, which `apply_settings` requires
    for section, section_field in Config.model_fields.items():
        for key, field in getattr(section_field.annotation, "model_fields", {}).items():
            name = f"{section}.{key}"
            if not _is_fixed(name) and _is_plain(field.annotation):
                names.add(name)
    return frozenset(names)


def check_settings(settings: Sequence[str]) -> None:
    """Raise ConfigError for the first setting (section.key=value) that an order may not change."""
    allowed = list_orderable_settings()
    for setting in settings:
        name, _, value = setting.partition("=")
        section, _, key = name.replace("-", "_").partition(".")
        section_field = Config.model_fields.get(section)
        if section_field is not None:
            keys = getattr(section_field.annotation, "model_fields", {})
        else:
            keys = {}
        if key in keys and f"{section}.{key}" not in allowed:
            raise ConfigError(
                f"{name}={value[:_VALUE_CHARACTERS]} cannot be changed by an order: only numbers, yes or no, and "
                f"listed words can, outside {', '.join(FIXED_SETTINGS)}; use `megascale restart` as the run's user, or "
                "launch the job again"
            )


def _is_plain(annotation: Any) -> bool:
    """Return True for the type of a number, a flag or a listed word, and for lists of these types."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is Literal:
        return True
    if origin is Annotated:
        return _is_plain(arguments[0])
    if origin in (Union, types.UnionType, list, tuple):
        return all(argument is Ellipsis or _is_plain(argument) for argument in arguments)
    return annotation in (int, float, bool, type(None))


def store_settings(run: Path, settings: Sequence[str]) -> None:
    """Store settings, each section.key=value, in the run folder for the next restart."""
    file = driver_folder(run) / _STORED_FILE
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(strict_json.dumps(list(settings)))


def take_stored_settings(run: Path) -> list[str]:
    """Return and remove the stored settings. Raise ConfigError if there are none."""
    file = driver_folder(run) / _STORED_FILE
    try:
        settings = strict_json.loads(read_bounded(file, _STORED_LIMIT))
        file.unlink()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} has no settings for a restart ({error})") from None
    if not isinstance(settings, list) or not all(isinstance(setting, str) for setting in settings):
        raise ConfigError(f"{file} is not a list of settings")
    return settings
