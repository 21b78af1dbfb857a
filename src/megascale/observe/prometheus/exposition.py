"""The text format that Prometheus scrapes (version 0.0.4): families of samples, whatever their labels hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LONGEST = 200  # characters of a label's value


@dataclass
class Family:
    """Samples of one name. `kind` as Prometheus has it; a counter's name ends in _total."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: list[tuple[Mapping[str, str], float]] = field(default_factory=list)

    def add(self, value: float | None, **labels: str) -> Family:
        """One more sample, unless there is no value."""
        if value is not None:
            self.samples.append((labels, float(value)))
        return self


def format_families(families: Iterable[Family]) -> str:
    """The text; families without samples are left out."""
    lines = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escaped(family.help, False)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for labels, value in family.samples:
            inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            lines.append(f"{family.name}{{{inside}}} {_number(value)}" if inside else f"{family.name} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str, quoted: bool = True) -> str:
    text = text[:_LONGEST].encode(errors="replace").decode()
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value) if value != int(value) or abs(value) >= 1e15 else str(int(value))


def packaged_file(name: str) -> Path:
    """The path of a file that is shipped: rules.yml, dashboard.json."""
    return Path(__file__).parent / name
