"""The text format that Prometheus scrapes (version 0.0.4), and the packaged rules, alerts and dashboard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_LABEL_LENGTH = 200


@dataclass
class Family:
    """Samples of one name. kind: Prometheus' type; a counter's name ends in _total."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: list[tuple[Mapping[str, str], float]] = field(default_factory=list)

    def add(self, value: float | None, **labels: str) -> Family:
        """Add a sample unless its value is None."""
        if value is not None:
            self.samples.append((labels, float(value)))
        return self


def format_families(families: Iterable[Family]) -> str:
    """Return the text of the families that have samples."""
    lines = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escape(family.help, quoted=False)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for labels, value in family.samples:
            label_text = ",".join(f'{name}="{_escape(text)}"' for name, text in labels.items())
            if label_text:
                name = f"{family.name}{{{label_text}}}"
            else:
                name = family.name
            lines.append(f"{name} {_format_number(value)}")
    return "\n".join(lines) + "\n"


def _escape(text: str, quoted: bool = True) -> str:
    text = text[:_MAX_LABEL_LENGTH].encode(errors="replace").decode()
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text


def _format_number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if value != int(value) or abs(value) >= 1e15:
        return repr(value)
    return str(int(value))


def packaged_file(name: str) -> Path:
    """Return the path of a packaged file: rules.yml or dashboard.json."""
    return Path(__file__).parent / name
