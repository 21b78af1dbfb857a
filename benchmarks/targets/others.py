"""Commands outside the cases whose figures have targets. `benchmarks targets --list` prints them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from benchmarks.targets.cases import read_shipped_file

FILE = "targets_others.toml"


class OtherMeasurement(BaseModel):
    """A measurement by commands outside the cases, the hardware it needs, and its target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    needs: str
    target: str
    commands: list[str]


def load_other_measurements() -> list[OtherMeasurement]:
    """Return the measurements of the shipped file."""
    return [OtherMeasurement.model_validate(table) for table in tomllib.loads(read_shipped_file(FILE))["other"]]


def format_other_measurements() -> Iterator[str]:
    """Yield the lines of the list."""
    yield "Targets that other commands measure:"
    for measurement in load_other_measurements():
        yield ""
        yield measurement.title
        yield f"  needs: {measurement.needs}"
        yield f"  target: {measurement.target}"
        for command in measurement.commands:
            yield f"  {command}"
