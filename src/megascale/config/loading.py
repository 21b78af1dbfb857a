"""Presets, TOML files and `--section.key=value` overrides, through one validator."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megascale.config.base import _check_text
from megascale.config.optimizers import OPTIMIZERS
from megascale.config.parts import CALLBACKS, LINEAR_PRECISIONS, LOSSES, SINKS, SPAN_SINKS
from megascale.config.registry import Registry
from megascale.config.suggestions import format_question, suggest_for_section, suggest_keys
from megascale.config.text_files import read_toml
from megascale.config.tree import Config
from megascale.errors import ConfigError

# Settings that name parts which training needs and a model does not.
TRAINING_PARTS: dict[str, Registry[Any]] = {
    registry.key: registry for registry in (OPTIMIZERS, LINEAR_PRECISIONS, LOSSES, CALLBACKS, SINKS, SPAN_SINKS)
}


def list_presets() -> list[str]:
    """Names of the shipped model shapes."""
    folder = resources.files("megascale.model") / "presets"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def read_preset(name: str) -> dict[str, Any]:
    """The `model` keys of a shipped shape; ConfigError naming the nearest if there is no such preset."""
    if name not in list_presets():
        raise ConfigError(f"model.preset={name!r} is not a shipped model; {_nearest(name, list_presets())}")
    text = (resources.files("megascale.model") / "presets" / f"{name}.toml").read_text()
    return tomllib.loads(text)["model"]


def load(path: str | Path | None = None, overrides: Iterable[str] = (), *, keep_unknown_parts: bool = False) -> Config:
    """Read a TOML file, lay `section.key=value` overrides on it, resolve the preset and validate.

    keep_unknown_parts: do not judge the names of callbacks, sinks, the loss and the optimizer. A trained model can be
    read without the code that registers them.

    Raises ConfigError (wrong key, type or value) with the key, the value and what would be right.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        file = Path(os.path.expanduser(path))
        if not os.path.exists(file):
            near = sorted(str(p) for p in (*Path().glob("*.toml"), *Path().glob("examples/*.toml")))
            hint = f"; there is {', '.join(near[:4])}" if near else ""
            raise ConfigError(f"configuration file {str(file)!r} does not exist{hint}")
        if file.is_dir():
            raise ConfigError(f"configuration file {str(file)!r} is a folder; name a .toml file in it")
        tree = read_toml(file, "configuration file")
    for text in overrides:
        section, key, value = _parse_override(text)
        table = tree.setdefault(section, {})
        if isinstance(table, dict):
            table[key] = value
    return _validate_known_parts(tree) if keep_unknown_parts else from_tree(tree)


def load_command_line(file: str | Path | None, extra: list[str]) -> Config:
    """As `load`, of a command line's words: overrides are `--a.b=c` or `--a.b c`, anything else is a ConfigError.

    Where the command line has no FILE before the overrides, the first of those stands in its place; FILE may follow.
    """
    if file is not None and str(file).startswith("--"):
        extra, file = [str(file), *extra], None
    overrides: list[str] = []
    words = iter(extra)
    for word in words:
        if file is None and not word.startswith("-"):
            file = word
            continue
        if not word.startswith("--") or "." not in word.split("=")[0]:
            hint = format_question([f"--{key}=" for key in suggest_keys(word.lstrip("-").partition("=")[0])])
            text = f"unknown argument {word!r}; settings are given as --section.key=value"
            raise ConfigError(f"{text}; {hint}" if hint else text)
        if "=" not in word:
            value = next(words, None)
            if value is None:
                raise ConfigError(f"{word} has no value; write {word}=VALUE")
            word = f"{word}={value}"
        overrides.append(word)
    return load(file, overrides)


def from_tree(tree: Mapping[str, Any]) -> Config:
    """Validate nested dictionaries (as TOML gives them) into a Config; ConfigError on anything wrong."""
    tree = dict(tree)
    for name, table in tree.items():
        for key, value in table.items() if isinstance(table, dict) else ():
            _check_text(f"{name}.{key}", value)
    model = tree.get("model")
    if isinstance(model, dict) and isinstance(model.get("preset"), str):
        tree["model"] = {**read_preset(model["preset"]), **model}
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e, tree) for e in error.errors())) from None


def _validate_known_parts(tree: Mapping[str, Any]) -> Config:
    """Return `from_tree` of a tree, in which parts of training that are not known here keep their names."""
    tree = dict(tree)
    unknown: dict[str, Any] = {}
    for name, registry in TRAINING_PARTS.items():
        section, _, key = name.partition(".")
        table = tree.get(section)
        if not isinstance(table, dict) or key not in table:
            continue
        value = table[key]
        names = value if isinstance(value, list) else [value]
        are_names = all(isinstance(each, str) for each in names)
        if are_names and not all(each.partition("=")[0] in registry for each in names):
            unknown[name] = table.pop(key)
    config = from_tree(tree)
    for name, value in unknown.items():
        section, _, key = name.partition(".")
        changed = getattr(config, section).model_copy(update={key: value})
        config = config.model_copy(update={section: changed})
    return config


def _parse_override(text: str) -> tuple[str, str, Any]:
    name, equals, raw = text.removeprefix("--").partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"override {text!r} is not of the form --section.key=value, such as --train.steps=100")
    section, key = section.replace("-", "_"), key.replace("-", "_")
    try:
        parsed = tomllib.loads(f"v = {raw}")
        value = parsed["v"] if len(parsed) == 1 else raw  # text of several lines may look like several keys
    except tomllib.TOMLDecodeError:
        field = Config.model_fields.get(section)
        sub = getattr(field.annotation, "model_fields", {}).get(key) if field else None
        # A list may be written a,b,c: shells make quoting brackets tedious.
        value = raw.split(",") if sub is not None and "list" in str(sub.annotation) else raw
    else:
        field = Config.model_fields.get(section)
        sub = getattr(field.annotation, "model_fields", {}).get(key) if field else None
        if sub is not None and sub.annotation in (str, str | None) and not isinstance(value, str):
            value = raw  # a run may be called 1 or true
    return section, key, value


def _explain(error: Any, tree: Mapping[str, Any]) -> str:
    """One paragraph for one pydantic error."""
    path = [str(p) for p in error["loc"]]
    name = ".".join(path)
    if error["type"] == "extra_forbidden":
        if len(path) == 1:
            hint = (
                format_question(suggest_for_section(name, error["input"])) or f"known: {', '.join(Config.model_fields)}"
            )
            return f"there is no section [{name}]; {hint}"
        keys = list(getattr(Config.model_fields[path[0]].annotation, "model_fields", {}))
        hint = format_question(suggest_keys(path[1], path[0])) or f"known keys: {', '.join(keys)}"
        return f"there is no key {name} (value {error['input']!r}); {hint}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if len(path) == 1 and path[0] in Config.model_fields:
        return f"[{name}] must be a section with keys, not {error['input']!r}"
    field = getattr(Config.model_fields[path[0]].annotation, "model_fields", {}).get(path[1]) if len(path) > 1 else None
    about = f" ({field.description})" if field is not None and field.description else ""
    return f"{name}={error['input']!r} is wrong: {error['msg'][0].lower()}{error['msg'][1:]}{about}"


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
