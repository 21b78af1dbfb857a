"""Settings of plugins: typed keys that a plugin adds to existing sections.

A plugin (a module in the entry points' group `megascale.plugins`) calls `register_setting`. The key then is validated,
described by `megascale config`, and saved in config.toml and checkpoints, as built-in keys are. Processes import the
plugins when a configuration has an unknown key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megascale.config.base import find_list_fields
from megascale.config.registry import load_plugins
from megascale.errors import ConfigError


@dataclass(frozen=True)
class PluginSetting:
    """A registered setting.

    Attributes:
        key: section.key.
        owner: setting and value that select the part which reads this setting, such as optimizer.name=lion.
    """

    key: str
    owner: str
    default: Any

    def is_used(self, config: Any) -> bool:
        """Return whether the configuration selects the part that reads this setting."""
        owner_key, _, value = self.owner.partition("=")
        section, _, name = owner_key.partition(".")
        selected = getattr(getattr(config, section), name)
        if isinstance(selected, list):
            # A part in a list may have an argument: kafka=broker:9092/topic.
            return value in [str(part).partition("=")[0] for part in selected]
        if isinstance(selected, bool):
            return str(selected).lower() == value
        return str(selected) == value


PLUGIN_SETTINGS: dict[str, PluginSetting] = {}


def register_setting(key: str, value_type: Any, default: Any, description: str, *, owner: str, **limits: Any) -> None:
    """Add a setting to a section.

    Args:
        key: section.key of an existing section.
        value_type: type of the value, such as float, int, bool, str or a Literal.
        description: help text, without the default and the limits.
        owner: setting and value that select the part which reads this setting, such as optimizer.name=lion. A
            configuration that has the key without this value is an error.
        limits: limits of the value as arguments of pydantic's Field, such as ge, gt, le, lt.

    Raises ConfigError if the section does not exist, the key does, the owner is not a setting with a value, or the
    default breaks the type or the limits.
    """
    from megascale.config import Config

    section, _, name = key.partition(".")
    if section not in Config.model_fields:
        raise ConfigError(f"{key} cannot be registered: there is no section {section!r}; name one of the sections")
    section_type: Any = Config.model_fields[section].annotation
    if name in section_type.model_fields or not name.isidentifier():
        raise ConfigError(
            f"{key} cannot be registered: the key exists already, or is not a Python identifier; choose another key"
        )
    owner_key, _, owner_value = owner.partition("=")
    owner_section, _, owner_name = owner_key.partition(".")
    owner_field = Config.model_fields.get(owner_section)
    owner_type: Any = owner_field.annotation if owner_field else None
    if not owner_value or owner_name not in getattr(owner_type, "model_fields", {}):
        raise ConfigError(
            f"{key} cannot be registered: owner={owner!r} is not a setting with a value; give one such as "
            "optimizer.name=lion"
        )
    try:
        default = TypeAdapter(Annotated[value_type, Field(**limits)]).validate_python(default)
    except ValidationError as error:
        raise ConfigError(
            f"{key} cannot be registered: its default {default!r} is wrong ({error.errors()[0]['msg']}); choose a "
            "default of its type and within its limits"
        ) from None
    field = Field(default, description=f"{description}; only with {owner}", **limits)
    section_type.model_fields[name] = FieldInfo.from_annotated_attribute(value_type, field)
    _rebuild(section_type)
    PLUGIN_SETTINGS[key] = PluginSetting(key, owner, default)


def remove_setting(key: str) -> None:
    """Remove a setting that `register_setting` added."""
    from megascale.config import Config

    section, _, name = key.partition(".")
    section_type: Any = Config.model_fields[section].annotation
    del PLUGIN_SETTINGS[key]
    del section_type.model_fields[name]
    _rebuild(section_type)


def _rebuild(section_type: Any) -> None:
    """Rebuild the validators of a section and of the configuration after a change of the section's fields."""
    from megascale.config import Config

    find_list_fields.cache_clear()
    section_type.model_rebuild(force=True)
    Config.model_rebuild(force=True)


def load_new_settings() -> bool:
    """Import the plugins, and return whether they registered settings.

    Raises ConfigError naming a plugin that cannot be imported.
    """
    previous_count = len(PLUGIN_SETTINGS)
    load_plugins()
    return len(PLUGIN_SETTINGS) > previous_count


def add_sections(tree: dict[str, Any]) -> None:
    """Add an empty table to `tree` for each absent section that has plugins' settings.

    pydantic made the default of such a section before the plugins registered their settings, so it lacks them.
    """
    for key in PLUGIN_SETTINGS:
        tree.setdefault(key.partition(".")[0], {})


def check_owners(config: Any) -> None:
    """Raise ConfigError for a plugin's setting that has a value although its owner is not selected."""
    for setting in PLUGIN_SETTINGS.values():
        section, _, name = setting.key.partition(".")
        value = getattr(getattr(config, section), name, setting.default)
        if value != setting.default and not setting.is_used(config):
            raise ConfigError(
                f"{setting.key}={value!r} has no effect without {setting.owner}; set --{setting.owner}, or leave "
                f"{setting.key} out"
            )
