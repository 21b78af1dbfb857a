"""Settings that a plugin owns: typed keys of existing sections, next to the part that reads them.

A module of the entry points' group `megascale.plugins` calls `register_setting`. The key then is a setting like the
built-in ones: validated, described by `megascale config`, saved in config.toml and in checkpoints. Processes import the
plugins when a configuration has an unknown key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megascale.config.registry import load_plugins
from megascale.errors import ConfigError


@dataclass(frozen=True)
class PluginSetting:
    """A registered setting.

    Attributes:
        key: section.key.
        owner: the setting and the value that use it, such as optimizer.name=lion.
        default: value if the key is not given.
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


def register_setting(key: str, kind: Any, default: Any, description: str, *, owner: str, **limits: Any) -> None:
    """Add a setting to a section.

    Args:
        key: section.key of an existing section.
        kind: type, such as float, int, bool, str or a Literal.
        default: value if the key is not given.
        description: help text, without the default and the limits.
        owner: the setting and the value that use it, such as optimizer.name=lion. Giving the key without them is an
            error.
        limits: of pydantic's Field, such as ge, gt, le, lt.

    Raises ConfigError if the section does not exist, the key does, the owner is not a setting with a value, or the
    default breaks the type or the limits.
    """
    from megascale.config import Config

    section, _, name = key.partition(".")
    if section not in Config.model_fields:
        raise ConfigError(f"{key} cannot be registered: there is no section {section!r}; name one of the sections")
    section_type: Any = Config.model_fields[section].annotation
    if name in section_type.model_fields or not name.isidentifier():
        raise ConfigError(f"{key} cannot be registered: it is a setting already, or no name; choose another key")
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
        default = TypeAdapter(Annotated[kind, Field(**limits)]).validate_python(default)
    except ValidationError as error:
        raise ConfigError(
            f"{key} cannot be registered: its default {default!r} is wrong ({error.errors()[0]['msg']}); choose a "
            "default of its type and within its limits"
        ) from None
    field = Field(default, description=f"{description}; only with {owner}", **limits)
    section_type.model_fields[name] = FieldInfo.from_annotated_attribute(kind, field)
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
    """Make the validators of a section and of the configuration anew."""
    from megascale.config import Config

    section_type.model_rebuild(force=True)
    Config.model_rebuild(force=True)


def load_new_settings() -> bool:
    """Import the plugins, and return whether they registered settings. Raises ConfigError as `load_plugins`."""
    before = len(PLUGIN_SETTINGS)
    load_plugins()
    return len(PLUGIN_SETTINGS) > before


def add_sections(tree: dict[str, Any]) -> None:
    """Add absent sections that have plugins' settings: the default of a section was made before these existed."""
    for key in PLUGIN_SETTINGS:
        tree.setdefault(key.partition(".")[0], {})


def check_owners(config: Any) -> None:
    """Raise ConfigError for a plugin's setting that is given without the part that reads it."""
    for setting in PLUGIN_SETTINGS.values():
        section, _, name = setting.key.partition(".")
        value = getattr(getattr(config, section), name, setting.default)
        if value != setting.default and not setting.is_used(config):
            raise ConfigError(
                f"{setting.key}={value!r} has no effect without {setting.owner}; set --{setting.owner}, or leave "
                f"{setting.key} out"
            )
