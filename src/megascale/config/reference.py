"""What each setting does, its type, default and range: from the typed models, for `megascale config` and the documents.

Nothing is written twice: a key's text is its field's description, its range the field's bounds.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from megascale.config.base import Section
from megascale.config.registry import Registry
from megascale.config.suggestions import is_alias, question, suggest
from megascale.config.tree import Config
from megascale.errors import ConfigError

_HEAD = """# Configuration

Made by `megascale config --markdown` from the models in `src/megascale/config/`; do not edit.

Settings come from a TOML file, from the command line as `--section.key=value`, or both: the command line wins, then the
file, then `model.preset`, then the default. `-` is a setting that is unset by default. `megascale config KEY` says the
same on a terminal, `megascale config --schema` writes a JSON schema for editors, and `megascale train FILE --dry-run`
prints what a run would use."""
_LARGE = 1_000_000
_KINDS: dict[Any, str] = {bool: "true or false", int: "integer", float: "number", str: "text"}


@dataclass(frozen=True)
class Setting:
    """One key of the configuration.

    Attributes:
        key: section.key.
        about: what it does.
        kind: its type, for people; optional: whether it may stay unset.
        default: as TOML writes it; "" where it is unset or empty.
        range: its bounds, such as "at least 1"; "" where there are none.
        choices: the values that it takes, if they are few; open: whether installed packages may add some.
    """

    key: str
    description: str
    kind: str
    optional: bool
    default: str
    range: str = ""
    choices: tuple[str, ...] = ()
    open: bool = False

    def describe_values(self) -> str:
        """Kind, choices and range in one phrase."""
        if self.choices:
            words = ", ".join(self.choices) + (", or a registered one" if self.open else "")
            return f"list of: {words}" if self.kind.startswith("list") else words
        return f"{self.kind}, {self.range}" if self.range else self.kind


def describe_sections() -> dict[str, str]:
    """Each section with one line about it."""
    return {
        name: (field.annotation.__doc__ or "").strip().splitlines()[0]
        for name, field in Config.model_fields.items()
        if field.annotation is not None
    }


def list_settings(section: str | None = None) -> list[Setting]:
    """All settings, or those of a section, in the order in which the models have them."""
    found = []
    for name, field in Config.model_fields.items():
        model = field.annotation
        if section in (None, name) and isinstance(model, type) and issubclass(model, Section):
            found += [_setting(f"{name}.{key}", inner) for key, inner in model.model_fields.items()]
    return found


def find_settings(words: str) -> list[Setting]:
    """The settings that `words` names: section.key, a section, or a part of keys.

    ConfigError with the nearest names if there is none.
    """
    every = list_settings()
    for exact in (
        [s for s in every if s.key == words],
        [s for s in every if s.key.partition(".")[0] == words],
        [s for s in every if any(part.startswith(words) for part in re.split("[._]", s.key))],
        [s for s in every if words in s.key and not is_alias(words)],
    ):
        if exact:
            return exact
    section, dot, key = words.partition(".")
    near = suggest(key, section) if dot else suggest(words)
    if not near:
        near = difflib.get_close_matches(words, [*describe_sections(), *(s.key for s in every)], n=3)
    hint = question(near) or f"sections: {', '.join(describe_sections())}"
    raise ConfigError(f"there is no setting {words!r}; {hint}")


def list_differences(config: Config) -> list[tuple[str, str, str]]:
    """(key, value, default) of the settings that are not at their defaults, values as TOML writes them."""
    plain, found = Config(), []
    for name in Config.model_fields:
        mine, theirs = getattr(config, name), getattr(plain, name)
        for key, field in type(mine).model_fields.items():
            one, other = getattr(mine, key), getattr(theirs, key)
            if one != other and not field.exclude:
                found.append((f"{name}.{key}", _toml(one), _toml(other)))
    return found


def make_json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of configuration files, for editors; registered names are suggested only."""
    tree = Config.model_json_schema()
    for setting in list_settings():
        section, _, key = setting.key.partition(".")
        reference = tree["properties"][section]["$ref"].rpartition("/")[2]
        about = tree["$defs"][reference]["properties"].get(key)
        if about is not None and setting.open:
            about["examples"] = list(setting.choices)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **tree, "title": "MegaScale configuration"}


def markdown() -> str:
    """The page docs/configuration.md: all sections and keys."""
    parts = [_HEAD]
    for name, about in describe_sections().items():
        parts.append(f"## {name}\n\n{about}\n\n| key | default | values | what it does |\n|---|---|---|---|")
        for setting in list_settings(name):
            cells = (f"`{setting.key}`", f"`{setting.default}`" if setting.default else "-", setting.describe_values())
            row = " | ".join(_cell(text) for text in (*cells, setting.description))
            parts[-1] += f"\n| {row} |"
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("$", "\\$")


def _setting(key: str, field: FieldInfo) -> Setting:
    kind, optional, choices = _kind(field.annotation)
    registry = _registry(field)
    if registry is not None:
        choices = tuple(registry.names())
    default = field.get_default(call_default_factory=True)
    return Setting(
        key=key,
        description=field.description or "",
        kind=kind,
        optional=optional,
        default=_toml(default),
        range=_range(field),
        choices=choices,
        open=registry is not None,
    )


def _kind(annotation: Any) -> tuple[str, bool, tuple[str, ...]]:
    """Type for people, whether it may be unset, and the values of a Literal."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        kinds = [a for a in inside if a is not type(None)]
        kind, _, choices = _kind(kinds[0])
        return kind, len(kinds) < len(inside), choices
    if origin is Annotated:
        return _kind(inside[0])
    if origin is Literal:
        return "one of", False, tuple(str(a) for a in inside)
    if origin is list:
        return f"list of {_kind(inside[0])[0]}", False, ()
    return _KINDS.get(annotation, "text"), False, ()


def _registry(field: FieldInfo) -> Registry[Any] | None:
    """The registry whose names the setting takes, if it takes such."""
    inside: Sequence[Any] = [*field.metadata]
    for argument in get_args(field.annotation):  # a list of names
        inside = [*inside, *getattr(argument, "__metadata__", ())]
    for mark in inside:
        if isinstance(mark, AfterValidator):
            owner = getattr(mark.func, "__self__", None)
            if isinstance(owner, Registry):
                return owner
    return None


def _range(field: FieldInfo) -> str:
    said = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [(name, getattr(mark, name, None)) for mark in field.metadata for name in said]
    # Bounds as large as this are there for slips only.
    told = [(name, bound) for name, bound in bounds if bound is not None and bound < _LARGE]
    return ", ".join(f"{said[name]} {_number(bound)}" for name, bound in told)


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _toml(value: Any) -> str:
    """A value as TOML writes it; "" for one that is unset."""
    if isinstance(value, list):
        return "[" + ", ".join(_toml(one) for one in value) + "]"  # on one line
    return "" if value is None else tomli_w.dumps({"v": value}).removeprefix("v = ").strip()
