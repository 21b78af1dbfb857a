"""Which settings an order over the HTTP API may change: those whose values are numbers, yes or no, or listed words.

Text that is free leads to files, servers and programs. Whoever may write the run folder leaves any setting there, and
the order says only that it is to be taken: a token alone cannot bring one in.
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from megascale.config import Config
from megascale.core import strict_json
from megascale.core.untrusted_files import read_bounded
from megascale.errors import ConfigError
from megascale.resilience.driver.recovery.hot_update import FIXED
from megascale.resilience.protocol.contact import folder

_LEFT = "restart.json"
_LEFT_BYTES = 1 << 20
_ACCEPT = {"checkpoint.accept_changes"}  # names of settings, which `hot_update` asks for


def settable() -> frozenset[str]:
    """Names (section.key) of the settings that an order may change."""
    found = set()
    for section, about in Config.model_fields.items():
        for key, field in getattr(about.annotation, "model_fields", {}).items():
            name = f"{section}.{key}"
            fixed = any(name == each or name.startswith(f"{each}.") for each in FIXED)
            if not fixed and _is_plain(field.annotation):
                found.add(name)
    return frozenset(found) | _ACCEPT


def store_settings(run: Path, settings: Sequence[str]) -> None:
    """Put settings, each section.key=value, into the run folder for the next restart."""
    file = folder(run) / _LEFT
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(strict_json.dumps(list(settings)))


def take_stored_settings(run: Path) -> list[str]:
    """The settings that were left there, once; ConfigError if there are none."""
    file = folder(run) / _LEFT
    try:
        found = strict_json.loads(read_bounded(file, _LEFT_BYTES))
        file.unlink()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} holds no settings for a restart ({error})") from None
    if not isinstance(found, list) or not all(isinstance(setting, str) for setting in found):
        raise ConfigError(f"{file} holds no list of settings")
    return found


def check_settings(settings: Sequence[str]) -> None:
    """ConfigError, naming it, for the first of some section.key=value that is a known setting and not settable."""
    allowed = settable()
    for setting in settings:
        name, _, value = setting.partition("=")
        section, _, key = name.replace("-", "_").partition(".")
        known = Config.model_fields.get(section)
        fields = getattr(known.annotation, "model_fields", {}) if known is not None else {}
        if key in fields and f"{section}.{key}" not in allowed:
            raise ConfigError(
                f"{name}={value[:100]} cannot be changed by an order: only numbers, yes or no, and listed words can, "
                f"outside {', '.join(FIXED)}; use `megascale restart` as the run's user, or launch the job again"
            )


def _is_plain(annotation: Any) -> bool:
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return True
    if origin is Annotated:
        return _is_plain(inside[0])
    if origin in (Union, types.UnionType, list, tuple):
        return all(each is Ellipsis or _is_plain(each) for each in inside)
    return annotation in (int, float, bool, type(None))
