"""Commands outside the cases whose figures have targets. `benchmarks targets --list` prints them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from benchmarks.targets.cases import read_shipped_file

FILE = "targets_others.toml"


class CommandTarget(BaseModel):
    """A target that commands outside the cases measure, and the hardware that they need."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    needs: str
    target: str
    commands: list[str]


def load_command_targets() -> list[CommandTarget]:
    """Return the targets of the shipped file."""
    return [CommandTarget.model_validate(table) for table in tomllib.loads(read_shipped_file(FILE))["other"]]


def format_command_targets() -> Iterator[str]:
    """Yield the lines of the list."""
    yield "Targets that other commands measure:"
    for item in load_command_targets():
        yield ""
        yield item.title
        yield f"  needs: {item.needs}"
        yield f"  target: {item.target}"
        for command in item.commands:
            yield f"  {command}"
