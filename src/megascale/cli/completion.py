"""Shell completion of what typer does not know: settings, their values, presets, clusters and calibrations."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence

# Commands that take --section.key=value, with their groups.
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
COMPLETE_VARIABLE = "_MEGASCALE_COMPLETE"


def answer(environment: Mapping[str, str], list_options: Callable[[Sequence[str]], list[str]]) -> str | None:
    """Return what to print for a request of a shell, or None if typer answers it.

    Args:
        environment: the variables that the completion scripts of typer set.
        list_options: returns the options of the command that words name, such as --gpus.
    """
    shell = environment.get(COMPLETE_VARIABLE, "").removeprefix("complete_")
    if shell == "bash":
        words, word = _read_bash_words(environment)
    elif shell in ("zsh", "fish"):
        words, word = _read_line(environment.get("_TYPER_COMPLETE_ARGS", ""))
    else:
        return None
    matches = list_matches(words, word, list_options)
    if matches is None:
        return None
    if shell == "zsh":
        return _format_for_zsh(matches)
    return "\n".join(matches)


def asks_whether_any(environment: Mapping[str, str]) -> bool:
    """Return whether fish asks by an exit code whether there are completions; without any, it completes files."""
    return environment.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args"


def list_matches(
    words: Sequence[str], word: str, list_options: Callable[[Sequence[str]], list[str]]
) -> list[str] | None:
    """Return the completions of `word` after `words`, or None if typer knows them.

    An empty list lets the shell complete names of files. `words` begins with the command. An equals sign may be a word
    of its own, as in bash, or a part of `word`, as in zsh.
    """
    if not words:
        return None
    prefix = ""
    if word == "=":  # bash: the cursor is right behind it
        words, word = list(words) + ["="], ""
    if word.startswith("--") and "=" in word:
        option, _, word = word.partition("=")
        prefix = f"{option}="
    elif words[-1] == "=" and len(words) > 1:
        option = words[-2]
    else:
        option = words[-1]
    if option.startswith("--"):
        values = _list_values(words, option)
        if values is not None:
            return [prefix + value for value in values if value.startswith(word)]
    if words[0] == "config" and not word.startswith("-"):
        return _match(_list_sections() + _list_keys(), word)
    if word.startswith("--") and _takes_settings(words):
        keys = _match([f"--{key}" for key in _list_keys()], word)
        if keys:
            return keys + _match(list_options(words), word)
    return None


def _takes_settings(words: Sequence[str]) -> bool:
    return tuple(words[:1]) in SETTINGS_COMMANDS or tuple(words[:2]) in SETTINGS_COMMANDS


def _match(candidates: Iterable[str], word: str) -> list[str]:
    return [candidate for candidate in candidates if candidate.startswith(word)]


def _list_sections() -> list[str]:
    from megascale.config.reference import describe_sections

    return list(describe_sections())


def _list_keys() -> list[str]:
    from megascale.config.reference import list_settings

    return [setting.key for setting in list_settings()]


def _list_values(words: Sequence[str], option: str) -> list[str] | None:
    """Return the values of an option or a setting, an empty list for a path or free text, None if it is unknown."""
    if words[0] in ("simulate", "network"):
        names = _list_simulation_names(option)
        if names is not None:
            return names
    if words[0] == "plan" and option == "--device":
        from megascale.simulate.planner.layout_cost import DEVICES

        return list(DEVICES)
    if option == "--model.preset":
        from megascale.config import list_presets

        return list_presets()
    if "." not in option:
        return None
    from megascale.config.reference import list_settings

    for setting in list_settings():
        if f"--{setting.key}" == option:
            if setting.type_name == "true or false":
                return ["true", "false"]
            return list(setting.choices)
    return None


def _list_simulation_names(option: str) -> list[str] | None:
    """Return the shipped clusters, calibrations or software stacks."""
    if option == "--cluster":
        from megascale.simulate.cluster import shipped

        return shipped()
    if option == "--calibration":
        from megascale.simulate.calibration import shipped_calibrations

        return list(shipped_calibrations())
    if option in ("--software", "--against"):
        from megascale.simulate.software import STACKS

        return list(STACKS)
    return None


def _read_bash_words(environment: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the words before the cursor without the program, and the word at the cursor."""
    text = environment.get("COMP_WORDS", "")
    words = text.split("\n") if "\n" in text else text.split()
    position = int(environment.get("COMP_CWORD", "0"))
    word = words[position] if position < len(words) else ""
    return words[1:position], word


def _read_line(line: str) -> tuple[list[str], str]:
    """Return the words before the cursor without the program, and the word at the cursor, of zsh and fish."""
    try:
        words = shlex.split(line)[1:]
    except ValueError:  # an open quote
        words = line.split()[1:]
    if words and not line.endswith(" "):
        return words[:-1], words[-1]
    return words, ""


def _format_for_zsh(matches: Sequence[str]) -> str:
    if not matches:
        return "_files"
    quoted = "\n".join('"' + match.replace(":", r"\\:") + '"' for match in matches)
    return f"_arguments '*: :(({quoted}))'"
