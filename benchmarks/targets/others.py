"""Commands outside the cases whose figures have targets, as `benchmarks targets --list` prints them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from benchmarks.targets.cases import shipped

FILE = "targets_others.toml"


class OtherCommands(BaseModel):
    """Commands that measure one thing, what they need and what must come of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    needs: str
    goal: str
    lines: list[str]


def load_others() -> list[OtherCommands]:
    """The shipped ones."""
    return [OtherCommands.model_validate(item) for item in tomllib.loads(shipped(FILE))["other"]]


def list_other_commands() -> Iterator[str]:
    """Yield the lines of the list."""
    yield "In addition to these cases:"
    for item in load_others():
        yield f"{item.title}: {item.needs}; {item.goal}"
        yield from (f"  {line}" for line in item.lines)
