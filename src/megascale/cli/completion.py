"""Shell completion of settings, their values, presets, clusters and calibrations, which typer does not know."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence

# Commands that take --section.key=value, each with its group.
SETTINGS_COMMANDS: frozenset[tuple[str, ...]] = frozenset(
    {
        ("train",),
        ("launch",),
        ("restart",),
        ("plan",),
        ("simulate", "step"),
        ("simulate", "ablate"),
        ("simulate", "sweep"),
        ("simulate", "search"),
        ("simulate", "effective"),
        ("network", "flows"),
        ("network", "placement"),
    }
)
COMPLETE_VARIABLE = "_MEGASCALE_COMPLETE"  # set by typer's completion scripts


def complete_request(environment: Mapping[str, str], list_options: Callable[[Sequence[str]], list[str]]) -> str | None:
    """Return the lines to print for a completion request of a shell, or None if typer handles the request.

    Args:
        environment: the variables that typer's completion scripts set.
        list_options: returns the options of a command, such as --gpus, from the arguments of a command line.
    """
    shell = environment.get(COMPLETE_VARIABLE, "").removeprefix("complete_")
    if shell == "bash":
        arguments, incomplete = _parse_bash_variables(environment)
    elif shell in ("zsh", "fish"):
        arguments, incomplete = _parse_command_line(environment.get("_TYPER_COMPLETE_ARGS", ""))
    else:
        return None
    matches = list_matches(arguments, incomplete, list_options)
    if matches is None:
        return None
    if shell == "zsh":
        return _format_for_zsh(matches)
    return "\n".join(matches)


def is_fish_availability_query(environment: Mapping[str, str]) -> bool:
    """Return whether fish asks only if there are completions. The exit code is the answer.

    If there are none, fish completes names of files itself.
    """
    return environment.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args"


def list_matches(
    arguments: Sequence[str], incomplete: str, list_options: Callable[[Sequence[str]], list[str]]
) -> list[str] | None:
    """Return the completions of the argument at the cursor, or None if typer knows them.

    An empty list lets the shell complete names of files.

    Args:
        arguments: complete arguments before the cursor, from the command on. In bash an equals sign is an argument.
        incomplete: beginning of the argument at the cursor. In zsh it contains the equals sign.
        list_options: see `complete_request`.
    """
    if not arguments:
        return None
    prefix = ""
    if incomplete == "=":  # in bash, if the cursor is right after the equals sign
        arguments = list(arguments) + ["="]
        incomplete = ""
    if incomplete.startswith("--") and "=" in incomplete:
        option, _, incomplete = incomplete.partition("=")
        prefix = f"{option}="
    elif arguments[-1] == "=" and len(arguments) > 1:
        option = arguments[-2]
    else:
        option = arguments[-1]
    if option.startswith("--"):
        values = _list_values(arguments, option)
        if values is not None:
            return [prefix + value for value in values if value.startswith(incomplete)]
    if arguments[0] == "config" and not incomplete.startswith("-"):
        return _filter_by_prefix(_list_sections() + _list_keys(), incomplete)
    if incomplete.startswith("--") and _accepts_settings(arguments):
        keys = _filter_by_prefix([f"--{key}" for key in _list_keys()], incomplete)
        if keys:
            return keys + _filter_by_prefix(list_options(arguments), incomplete)
    return None


def _accepts_settings(arguments: Sequence[str]) -> bool:
    """Return whether the arguments begin with a command of SETTINGS_COMMANDS."""
    return tuple(arguments[:1]) in SETTINGS_COMMANDS or tuple(arguments[:2]) in SETTINGS_COMMANDS


def _filter_by_prefix(candidates: Iterable[str], prefix: str) -> list[str]:
    return [candidate for candidate in candidates if candidate.startswith(prefix)]


def _list_sections() -> list[str]:
    from megascale.config.reference import describe_sections

    return list(describe_sections())


def _list_keys() -> list[str]:
    from megascale.config.reference import list_settings

    return [setting.key for setting in list_settings()]


def _list_values(arguments: Sequence[str], option: str) -> list[str] | None:
    """Return the values of an option or a setting.

    The list is empty for a setting with a path or free text. None is returned for an option that typer completes.
    """
    if arguments[0] in ("simulate", "network"):
        names = _list_simulation_names(option)
        if names is not None:
            return names
    if arguments[0] == "plan" and option == "--device":
        from megascale.simulate.planner.layout_cost import DEVICES

        return list(DEVICES)
    if option == "--model.preset":
        from megascale.config import list_presets

        return list_presets()
    if "." not in option:  # not a setting
        return None
    from megascale.config.reference import list_settings

    for setting in list_settings():
        if f"--{setting.key}" == option:
            if setting.type_name == "true or false":
                return ["true", "false"]
            return list(setting.choices)
    return None


def _list_simulation_names(option: str) -> list[str] | None:
    """Return the names that an option of `simulate` accepts, or None for other options."""
    if option == "--cluster":
        from megascale.simulate.cluster import list_shipped_clusters

        return list_shipped_clusters()
    if option == "--calibration":
        from megascale.simulate.calibration import shipped_calibrations

        return list(shipped_calibrations())
    if option in ("--software", "--against"):
        from megascale.simulate.software import STACKS

        return list(STACKS)
    return None


def _parse_bash_variables(environment: Mapping[str, str]) -> tuple[list[str], str]:
    """Return (arguments, incomplete) as `list_matches` takes them, from the variables of bash."""
    text = environment.get("COMP_WORDS", "")
    words = text.split("\n") if "\n" in text else text.split()
    position = int(environment.get("COMP_CWORD", "0"))
    incomplete = words[position] if position < len(words) else ""
    return words[1:position], incomplete


def _parse_command_line(line: str) -> tuple[list[str], str]:
    """Return (arguments, incomplete) as `list_matches` takes them, from the command line of zsh or fish."""
    try:
        arguments = shlex.split(line)[1:]
    except ValueError:  # A quotation mark is still open.
        arguments = line.split()[1:]
    if arguments and not line.endswith(" "):
        return arguments[:-1], arguments[-1]
    return arguments, ""


def _format_for_zsh(matches: Sequence[str]) -> str:
    """Return the call that typer's script for zsh evaluates."""
    if not matches:
        return "_files"
    quoted = "\n".join('"' + match.replace(":", r"\\:") + '"' for match in matches)
    return f"_arguments '*: :(({quoted}))'"
