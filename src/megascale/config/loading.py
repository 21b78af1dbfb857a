"""Loading of presets, TOML files and `--section.key=value` overrides through one validator.

A *tree* is a configuration as nested dictionaries, as TOML gives it: {section: {key: value}}. A *table* is a dictionary
in it. A *part* is code that a setting names, such as an optimizer, and that a registry holds. A plugin may add keys to
a section; PLUGIN_SETTINGS lists them.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megascale.config.base import UNSET, Section, check_encoding
from megascale.config.experts_section import ExpertsConfig
from megascale.config.lora_section import LoraConfig
from megascale.config.model_section import LayerKind
from megascale.config.parts import CALLBACKS, LINEAR_PRECISIONS, LOSSES, LR_SCHEDULES, OPTIMIZERS, SINKS, SPAN_SINKS
from megascale.config.plugin_settings import PLUGIN_SETTINGS, add_sections, check_owners, load_new_settings
from megascale.config.registry import Registry
from megascale.config.rotary_scaling import RotaryScaling
from megascale.config.suggestions import find_field, format_question, list_keys, suggest_for_section, suggest_keys
from megascale.config.text_files import read_toml
from megascale.config.tree import Config
from megascale.errors import ConfigError, DataError

# Registries by setting, for settings that name code which training needs and inference does not.
TRAINING_PARTS: dict[str, Registry[Any]] = {
    registry.key: registry
    for registry in (OPTIMIZERS, LR_SCHEDULES, LINEAR_PRECISIONS, LOSSES, CALLBACKS, SINKS, SPAN_SINKS)
}


def list_presets() -> list[str]:
    """Return the names of the shipped model shapes."""
    folder = resources.files("megascale.model") / "presets"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def read_preset(name: str) -> dict[str, Any]:
    """Return the keys of [model] in a preset. Raises ConfigError if there is no such preset."""
    names = list_presets()
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1)
        if nearest:
            hint = f"did you mean {nearest[0]!r}?"
        else:
            hint = f"choose among {', '.join(names)}"
        raise ConfigError(f"model.preset={name!r} is not a shipped model; {hint}")
    text = (resources.files("megascale.model") / "presets" / f"{name}.toml").read_text()
    return tomllib.loads(text)["model"]


def load(path: str | Path | None = None, overrides: Iterable[str] = (), *, keep_unknown_parts: bool = False) -> Config:
    """Return the validated configuration of a TOML file and `section.key=value` overrides; a preset is resolved.

    Args:
        keep_unknown_parts: accept unknown names of callbacks, sinks, the loss and the optimizer, so that a trained
            model can be read without the code that registers them.

    Raises ConfigError for a wrong key, type or value, with the key, the value and the remedy.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        file = Path(os.path.expanduser(path))
        _check_file(file)
        tree = read_toml(file, "configuration file")
    for override in overrides:
        section, key, value = _parse_override(override)
        _set_nested_value(tree, [section, *key.split(".")], value)
    if keep_unknown_parts:
        return _validate_known_parts(tree)
    return from_tree(tree)


def load_written(file: Path) -> Config:
    """Return the configuration that a run has written into its folder; names of unknown parts are kept.

    Raises DataError if the file is damaged.
    """
    try:
        return load(file, keep_unknown_parts=True)
    except ConfigError as error:
        raise DataError(
            f"the settings that the run has written cannot be used: {error}. Copy {str(file)!r} from a backup, or "
            "remove it and start the run again with the same command, which writes it anew"
        ) from None


def _check_file(file: Path) -> None:
    """Raise ConfigError if a configuration file does not exist or is a folder."""
    if not os.path.exists(file):
        available = sorted(map(str, [*Path().glob("*.toml"), *Path().glob("examples/*.toml")]))
        hint = ""
        if available:
            hint = f"; available here: {', '.join(available[:4])}"
        elif file.parts[0] == "examples":
            hint = "; `megascale examples examples` copies the shipped ones"
        raise ConfigError(f"configuration file {str(file)!r} does not exist{hint}")
    if file.is_dir():
        raise ConfigError(f"configuration file {str(file)!r} is a folder; name a .toml file in it")


def _set_nested_value(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set `tree[path[0]][path[1]]...`, and make absent tables.

    If a key on the path holds another value than a table, nothing is changed, so that validation refuses that value.
    """
    table: Any = tree
    for key in path[:-1]:
        if isinstance(table, dict):
            table = table.setdefault(key, {})
    if isinstance(table, dict):
        table[path[-1]] = value


def load_command_line(file: str | Path | None, extra: list[str]) -> Config:
    """Return the configuration of a command line: an optional FILE, and overrides as `--a.b=c` or `--a.b c`.

    If overrides precede FILE, the argument parser passes the first override as `file`. Raises ConfigError for other
    arguments.
    """
    if file is not None and str(file).startswith("--"):
        extra = [str(file)] + extra
        file = None
    overrides: list[str] = []
    arguments = iter(extra)
    for argument in arguments:
        if file is None and not argument.startswith("-"):
            file = argument
            continue
        option, equals, _ = argument.partition("=")
        if not option.startswith("--") or "." not in option:
            question = format_question([f"--{key}=" for key in suggest_keys(option.lstrip("-"))])
            text = f"unknown argument {argument!r}; settings are given as --section.key=value"
            raise ConfigError(f"{text}; {question}" if question else text)
        if not equals:
            value = next(arguments, None)
            if value is None:
                raise ConfigError(f"{argument} has no value; write {argument}=VALUE")
            argument = f"{argument}={value}"
        overrides.append(argument)
    return load(file, overrides)


def from_tree(tree: Mapping[str, Any]) -> Config:
    """Validate nested dictionaries, in the form of TOML, into a Config. Raises ConfigError for anything wrong."""
    tree = dict(tree)
    for name, table in tree.items():
        if isinstance(table, dict):
            for key, value in table.items():
                check_encoding(f"{name}.{key}", value)
    _move_imported_folder(tree)
    model = tree.get("model")
    if isinstance(model, dict) and isinstance(model.get("preset"), str) and model["preset"] != UNSET:
        tree["model"] = _merge_tables(read_preset(model["preset"]), model, Config.model_fields["model"])
    tree = _drop_unset(tree, Config)
    add_sections(tree)
    plugin_setting_count = len(PLUGIN_SETTINGS)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        faults = _join_alternatives(error.errors())
        # A plugin that is not imported yet may own an unknown key. Import plugins, and validate again if they add keys.
        has_unknown_key = any(fault["type"] == "extra_forbidden" for fault in faults)
        if has_unknown_key and load_new_settings():
            return from_tree(tree)
        raise ConfigError("\n".join(_explain(fault) for fault in faults)) from None
    # The validation of a part's name may have imported plugins. `config` lacks the defaults of their settings.
    if len(PLUGIN_SETTINGS) > plugin_setting_count:
        return from_tree(tree)
    check_owners(config)
    return config


def replace_sections(config: Config, tables: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return a validated configuration with other sections. Raises the ConfigError of `from_tree`.

    Only these sections and the checks that concern several sections are validated, since the others are immutable.

    Args:
        tables: values of each replaced section.
    """
    sections: dict[str, Any] = {name: getattr(config, name) for name in type(config).model_fields}
    try:
        for name, table in tables.items():
            sections[name] = type(sections[name]).model_validate(table)
        replaced = Config.model_validate(sections)
    except ValidationError:
        return from_tree({**config.model_dump(exclude_none=True), **tables})  # explains the fault
    check_owners(replaced)
    return replaced


def _merge_tables(preset: Mapping[str, Any], table: Mapping[str, Any], field: FieldInfo | None) -> dict[str, Any]:
    """Return a preset's table with the keys of `table` in place of its own.

    Tables with fixed keys are merged too, so that one key of model.experts leaves the preset's other keys. A table with
    free keys, such as model.layer_kinds, replaces the preset's.
    """
    section_type = _find_table_type(field)
    merged = dict(preset)
    for key, value in table.items():
        inner_field = section_type.model_fields.get(key) if section_type is not None else None
        present = preset.get(key)
        if isinstance(value, dict) and isinstance(present, dict) and _find_table_type(inner_field) is not None:
            merged[key] = _merge_tables(present, value, inner_field)
        else:
            merged[key] = value
    return merged


def _drop_unset(tree: Mapping[str, Any], section_type: type[BaseModel] | None) -> dict[str, Any]:
    """Return nested tables without the keys whose value is "unset", so that their defaults apply.

    Keys that `section_type` does not have stay, so that validation refuses them. In a table without a fixed type
    (None), all keys with the value "unset" are left out.
    """
    set_values: dict[str, Any] = {}
    for key, value in tree.items():
        field = section_type.model_fields.get(key) if section_type is not None else None
        if isinstance(value, dict):
            set_values[key] = _drop_unset(value, _find_table_type(field))
        elif value != UNSET or (section_type is not None and field is None):
            set_values[key] = value
    return set_values


def _find_table_type(field: FieldInfo | None) -> type[BaseModel] | None:
    """Return the type of a field's table, or None if the field has no fixed keys."""
    if field is None or get_origin(field.annotation) is dict:
        return None
    for annotation in (field.annotation, *get_args(field.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
    return None


def _move_imported_folder(tree: dict[str, Any]) -> None:
    """Move model.from, which is a short name of checkpoint.imported, to [checkpoint].

    Raises ConfigError if the folder is not a text, or if another setting names a model too.
    """
    model = tree.get("model")
    if not isinstance(model, dict) or "from" not in model:
        return
    folder = model["from"]
    if folder == UNSET:
        tree["model"] = {key: value for key, value in model.items() if key != "from"}
        return
    if not isinstance(folder, str) or not folder:
        raise ConfigError(f"model.from={folder!r} is wrong: it must name the folder of a Hugging Face model")
    if model.get("preset") not in (None, UNSET):
        raise ConfigError(
            f"model.from={folder} and model.preset={model['preset']} both describe the model; set only one of them"
        )
    checkpoint = tree.get("checkpoint", {})
    if not isinstance(checkpoint, dict):
        return  # validation refuses it
    if checkpoint.get("imported", folder) not in (folder, UNSET):
        raise ConfigError(
            f"model.from={folder} and checkpoint.imported={checkpoint['imported']} name two models; set only one of "
            "them"
        )
    if checkpoint.get("start_from") not in (None, UNSET):
        raise ConfigError(
            f"model.from={folder} and checkpoint.start_from={checkpoint['start_from']} name two models; set only one "
            "of them"
        )
    tree["model"] = {key: value for key, value in model.items() if key != "from"}
    tree["checkpoint"] = {**checkpoint, "imported": folder}


def _validate_known_parts(tree: Mapping[str, Any]) -> Config:
    """Validate like `from_tree`, but accept names in the settings of TRAINING_PARTS that are not registered."""
    tree = dict(tree)
    unregistered: dict[str, Any] = {}  # removed values by setting
    for setting, registry in TRAINING_PARTS.items():
        section, _, key = setting.partition(".")
        table = tree.get(section)
        if not isinstance(table, dict) or key not in table:
            continue
        value = table[key]
        names = value if isinstance(value, list) else [value]
        if not all(isinstance(name, str) for name in names):
            continue  # validation refuses the type
        # A span sink may have an argument: kafka=broker:9092.
        if not all(name.partition("=")[0] in registry for name in names):
            unregistered[setting] = table.pop(key)
    _drop_plugin_settings(tree)
    config = from_tree(tree)
    # Put the removed values back; a copy is not validated.
    for setting, value in unregistered.items():
        section, _, key = setting.partition(".")
        section_with_value = getattr(config, section).model_copy(update={key: value})
        config = config.model_copy(update={section: section_with_value})
    return config


def _drop_plugin_settings(tree: dict[str, Any]) -> None:
    """Drop unknown keys of the sections in TRAINING_PARTS: a plugin that is not installed here may own them."""
    for section in {setting.partition(".")[0] for setting in TRAINING_PARTS}:
        table = tree.get(section)
        if not isinstance(table, dict) or all(find_field(section, key) for key in table):
            continue
        load_new_settings()
        tree[section] = {key: value for key, value in table.items() if find_field(section, key)}


def _parse_override(override: str) -> tuple[str, str, Any]:
    """Return section, key and value of `--section.key=value`.

    The value is read as TOML. If it is not valid TOML, or if the key takes text, it is the text itself.
    """
    name, equals, text = override.removeprefix("--").partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"override {override!r} is not of the form --section.key=value, such as --train.steps=100")
    section = section.replace("-", "_")
    key = key.replace("-", "_")
    field = find_field(section, key)
    if field is None and section in Config.model_fields and load_new_settings():
        field = find_field(section, key)
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        if text == UNSET:
            return section, key, text
        # A list may be written a,b,c, because brackets and quotes are tedious in a shell.
        takes_list = field is not None and "list" in str(field.annotation)
        if text and takes_list:
            return section, key, text.split(",")
        return section, key, text
    if len(parsed) > 1:  # text of several lines that looks like several TOML keys
        return section, key, text
    value = parsed["v"]
    if field is not None and field.annotation in (str, str | None) and not isinstance(value, str):
        return section, key, text  # such as a run with the name 1 or true
    return section, key, value


def _join_alternatives(faults: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return pydantic's errors with one per setting that accepts auto next to another type.

    Pydantic reports one error per alternative, whose location ends with a name of the alternative.
    """
    joined: list[Mapping[str, Any]] = []
    auto_fault: Mapping[str, Any] | None = None  # the error of the alternative auto, which comes first
    for fault in faults:
        location = fault["loc"]
        if location[2:] == ("literal['auto']",):
            auto_fault = fault
        elif auto_fault is not None and location[:2] == auto_fault["loc"][:2]:
            requirement = fault["msg"].removeprefix("Input should be ")
            message = f"{auto_fault['msg']} or {requirement}"
            joined.append({**fault, "loc": location[:2], "msg": message})
        else:
            joined.append(fault)
    return joined


def _explain(fault: Mapping[str, Any]) -> str:
    """Return the message for one of pydantic's errors, `fault`."""
    path = [str(key) for key in fault["loc"]]
    name = ".".join(path)
    if fault["type"] == "extra_forbidden":
        return _explain_unknown(path, fault["input"])
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    if len(path) == 1 and path[0] in Config.model_fields:
        return f"[{name}] must be a section with keys, not {fault['input']!r}"
    if len(path) > 1:
        field = find_field(path[0], path[1])
    else:
        field = None
    message = fault["msg"][0].lower() + fault["msg"][1:]
    if fault["input"] == "" and field is not None:
        # Items of a list have no default of their own.
        setting = name.rpartition(".")[0] if path[-1].isdecimal() else name
        message += f"; write {setting}={UNSET} for the default"
    return f"{name}={fault['input']!r} is wrong: {message}{_format_description(field)}"


def _explain_unknown(path: Sequence[str], value: Any) -> str:
    """Return the error for an unknown section or key, with suggestions or the known names."""
    if len(path) == 1:
        hint = format_question(suggest_for_section(path[0], value))
        return f"there is no section [{path[0]}]; {hint or 'known: ' + ', '.join(Config.model_fields)}"
    section, key = path[:2]
    if len(path) > 2:
        tables: dict[str, type[Section]] = {
            "rotary_scaling": RotaryScaling,
            "lora": LoraConfig,
            "experts": ExpertsConfig,
        }
        table = tables.get(path[-2], LayerKind)  # any other table within a section describes a kind of layer
        keys = ", ".join(table.model_fields)
        return f"there is no key {'.'.join(path)} (value {value!r}); keys of [{'.'.join(path[:-1])}]: {keys}"
    hint = format_question(suggest_keys(key, section))
    listing = f"keys of [{section}]: {', '.join(list_keys(section))}"
    return f"there is no key {'.'.join(path)} (value {value!r}); {hint or listing}"


def _format_description(field: FieldInfo | None) -> str:
    if field is not None and field.description:
        return f" ({field.description})"
    return ""
