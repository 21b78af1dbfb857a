"""Series of scenarios: techniques switched on one by one, and sweeps over settings and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from megascale.config import from_tree
from megascale.errors import ConfigError, FitError
from megascale.simulate.cluster import set_value
from megascale.simulate.scenario import Scenario, dump_settings
from megascale.simulate.software import switch_techniques
from megascale.simulate.step import Level, StepEstimate, estimate_step

AblationChart = list[tuple[str, StepEstimate, float]]


def add_techniques_in_turn(baseline: Scenario, full: Scenario, names: Sequence[str], level: Level) -> AblationChart:
    """Return (technique, result, saved share of the previous step time), with each technique added to the earlier ones.

    Block, window and attention kernel are those of `full`, and techniques that `full` does not use are left out.
    """
    rows: AblationChart = [("baseline", estimate_step(baseline, level, check_memory=False), 0.0)]
    software = baseline.software
    for name in names:
        changed = switch_techniques(software, [name], True)
        if name == "window":
            changed = replace(changed, window=full.software.window)
        if name == "parallel-block":
            changed = replace(changed, parallel_block=full.software.parallel_block)
        if name == "operators":
            changed = replace(changed, attention=full.software.attention)
        if changed == software:
            continue
        software = changed
        result = estimate_step(replace(baseline, software=software, label=name), level, check_memory=False)
        rows.append((f"+ {name}", result, 1.0 - result.seconds / rows[-1][1].seconds))
    return rows


def ablate_in_turn(full: Scenario, names: Sequence[str], level: Level) -> AblationChart:
    """Return (technique, result without it, fraction by which that is slower), first with all techniques."""
    full_estimate = estimate_step(full, level, check_memory=False)
    rows: AblationChart = [("all on", full_estimate, 0.0)]
    for name in names:
        software = switch_techniques(full.software, [name], False)
        if software.attention not in full.cluster.kernels.attention:
            software = replace(software, attention=full.software.attention)
        if software == full.software:
            continue
        result = estimate_step(replace(full, software=software, label=f"without {name}"), level, check_memory=False)
        rows.append((f"without {name}", result, result.seconds / full_estimate.seconds - 1.0))
    return rows


def parse_vary(text: str) -> tuple[str, list[Any]]:
    """Parse "gpus=256:768" (doubling, then the end) or "gpus=256,512,768" to ("gpus", [256, 512, 768]).

    Raises:
        ConfigError: the text has another form.
    """
    key, equals, values = text.partition("=")
    if not (equals and key and values):
        raise ConfigError(f"--vary {text!r} is not KEY=VALUES, such as gpus=256:12288 or train.micro_batch=1,2,4")
    if ":" in values:
        try:
            low, high = (float(x) for x in values.split(":"))
        except ValueError:
            raise ConfigError(f"--vary {text!r}: a range is LOW:HIGH, such as 256:12288") from None
        if not math.isfinite(low + high):
            raise ConfigError(f"--vary {text!r}: the ends of a range are finite numbers, such as 256:12288")
        if low <= 0 or high < low:
            raise ConfigError(f"--vary {text!r}: a range rises from a positive number, doubling each time")
        points = [low]
        while points[-1] * 2 <= high * (1 + 1e-9):
            points.append(points[-1] * 2)
        if points[-1] < high * (1 - 1e-9):
            points.append(high)
        return key, [_number(f"{p:.12g}") for p in points]
    return key, [_number(v) for v in values.split(",")]


def _number(text: str) -> Any:
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return text


def vary_scenario(scenario: Scenario, key: str, value: Any) -> Scenario:
    """Return the scenario with another number of GPUs, setting or figure of the cluster.

    Args:
        key: gpus, section.key or cluster.section.key. Raises ConfigError for an unknown key or a wrong value.
    """
    if key == "gpus":
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"--vary gpus={value}: a number of GPUs is a whole number from 1 on")
        return replace(scenario, gpus=value)
    parts = key.split(".")
    if parts[0] == "cluster":
        if len(parts) != 3:
            raise ConfigError(f"--vary {key}: no such figure; write cluster.PART.KEY, such as cluster.between.gbs")
        return replace(scenario, cluster=set_value(scenario.cluster, parts[1], parts[2], value))
    if len(parts) != 2:
        raise ConfigError(f"--vary {key}: write gpus, section.key or cluster.part.key")
    tree = dump_settings(scenario.config)
    if parts[0] not in tree:
        raise ConfigError(f"--vary {key}: there is no section {parts[0]!r}")
    tree[parts[0]][parts[1]] = value
    return scenario.with_config(from_tree(tree))


def sweep_rows(
    axes: Sequence[tuple[str, list[Any]]],
    scenarios: Sequence[Scenario],
    level: Level,
    check_memory: bool = True,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return (one row per point and scenario, reasons why points were left out).

    Args:
        axes: (key, values) of each varied key; points are all combinations of values.
    """
    rows, skipped = [], []
    for values in product(*(points for _, points in axes)):
        point = list(zip((key for key, _ in axes), values, strict=True))
        for scenario in scenarios:
            try:
                changed = scenario
                for key, value in point:
                    changed = vary_scenario(changed, key, value)
                # On the event level one random fleet, the same for every point.
                result = estimate_step(changed, level, fleet=0, check_memory=check_memory)
            except FitError as error:
                skipped.append(f"{', '.join(f'{k}={v}' for k, v in point)}: {str(error).splitlines()[0]}")
                continue
            rows.append({**dict(point), **result.as_dict()})
    return rows, list(dict.fromkeys(skipped))
