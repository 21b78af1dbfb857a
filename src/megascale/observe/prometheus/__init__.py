"""Metrics in the text formats that Prometheus scrapes, and the packaged alert rules and dashboards.

The scraper's Accept header selects the format: Prometheus' text format 0.0.4, or OpenMetrics 1.0.0, which has units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# Units of metrics, which are the ends of their names. Longer units come first, since "seconds" may end another unit.
_UNITS = ("bytes_per_second", "tokens_per_second", "seconds", "celsius", "watts", "ratio", "steps")
_MAX_LABEL_LENGTH = 200


@dataclass
class Family:
    """A metric with its samples.

    Attributes:
        name: the name of a counter ends in _total.
        kind: Prometheus' type of the metric.
        samples: labels and value of each sample.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: list[tuple[Mapping[str, str], float]] = field(default_factory=list)

    def add(self, value: float | None, **labels: str) -> Family:
        """Add a sample unless its value is None. Return the family, so that calls can be chained."""
        if value is not None:
            self.samples.append((labels, float(value)))
        return self

    @property
    def unit(self) -> str:
        """The unit at the end of the name, "" without one."""
        name = self.name.removesuffix("_total")
        for unit in _UNITS:
            if name.endswith(f"_{unit}"):
                return unit
        return ""


def format_families(
    families: Iterable[Family], labels: Mapping[str, str] | None = None, *, openmetrics: bool = False
) -> str:
    """Return the text of the families that have samples.

    Args:
        labels: labels that are added to every sample.
        openmetrics: use OpenMetrics 1.0.0 instead of Prometheus' text format 0.0.4.
    """
    lines = []
    for family in families:
        if not family.samples:
            continue
        name = family.name
        if openmetrics:
            name = name.removesuffix("_total")  # OpenMetrics describes a counter without the suffix.
        lines.append(f"# HELP {name} {_escape(family.help, quoted=openmetrics)}")
        lines.append(f"# TYPE {name} {family.kind}")
        if openmetrics and family.unit:
            lines.append(f"# UNIT {name} {family.unit}")
        for sample_labels, value in family.samples:
            lines.append(_format_sample(family.name, {**(labels or {}), **sample_labels}, value))
    if openmetrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def format_response(families: Iterable[Family], labels: Mapping[str, str], accept: str) -> tuple[str, str]:
    """Return the text and its content type in the format that the Accept header prefers.

    OpenMetrics is used if the header names it, since only scrapers that prefer it do.
    """
    openmetrics = "application/openmetrics-text" in accept
    content_type = OPENMETRICS_TYPE if openmetrics else TEXT_TYPE
    return format_families(families, labels, openmetrics=openmetrics), content_type


def _format_sample(name: str, labels: Mapping[str, str], value: float) -> str:
    label_text = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
    if label_text:
        return f"{name}{{{label_text}}} {_format_number(value)}"
    return f"{name} {_format_number(value)}"


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


def get_rules_file() -> Path:
    """Return the path of the packaged recording rules and alerts."""
    return Path(__file__).parent / "rules.yml"
