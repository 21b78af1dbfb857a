"""Which settings an order over the HTTP API may change: those whose values are numbers, yes or no, or listed words.

Text that is free leads to files, servers and programs; whoever may write the run folder changes it there.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union

from megascale.config import Config
from megascale.errors import ConfigError
from megascale.resilience.driver.hot_update import FIXED

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
                f"outside {', '.join(FIXED)}; interrupt the job and launch it again with the new value"
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
