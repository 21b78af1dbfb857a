"""The Grafana dashboards of one run and of a fleet of runs, as the JSON that Grafana imports."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 3
_WIDTH = 24 // _COLUMNS
_HEIGHT = 8
_RUN = '{run="$run"}'
# Panels as title, Grafana's unit, and queries. A query is an expression and a legend.
_RUN_PANELS: tuple[tuple[str, str, list[tuple[str, str]]], ...] = (
    ("Step", "none", [(f"megascale_step{_RUN}", "furthest"), (f"megascale_planned_steps{_RUN}", "planned")]),
    ("Loss", "none", [(f"megascale_loss{_RUN}", "loss")]),
    ("Gradient norm", "none", [(f"megascale_grad_norm{_RUN}", "gradient norm")]),
    (
        "Step time",
        "s",
        [(f"megascale_step_seconds{_RUN}", "median of 50"), (f"megascale:step_seconds:median1h{_RUN}", "1 h")],
    ),
    ("Tokens per second", "none", [(f"megascale_tokens_per_second{_RUN}", "tokens/s")]),
    ("MFU", "percentunit", [(f"megascale_mfu_ratio{_RUN}", "MFU")]),
    ("Effective time", "percentunit", [(f"megascale_effective_time_ratio{_RUN}", "effective time")]),
    ("Lost time", "s", [(f"megascale_lost_time_seconds{_RUN}", "{{cause}}")]),
    ("Time since the last commit", "s", [(f"megascale_commit_age_seconds{_RUN}", "commit age")]),
    (
        "Restarts and incidents",
        "none",
        [
            (f"megascale_attempts_total{_RUN}", "attempts"),
            (f"megascale_restarts_total{_RUN}", "restart: {{cause}}"),
            (f"megascale_incidents_total{_RUN}", "incident: {{kind}}"),
            (f"megascale_checksum_mismatches_total{_RUN}", "checksum mismatches"),
        ],
    ),
    ("Compute time over the ranks of a stage", "s", [(f"megascale_compute_seconds{_RUN}", "{{stage}} {{over}}")]),
    ("Slowest rank over the median of its stage", "none", [(f"megascale:slowness:ratio{_RUN}", "stage {{stage}}")]),
    (
        "Nodes",
        "none",
        [
            (f"megascale_nodes{_RUN}", "{{state}}"),
            (f"megascale_nodes_missing{_RUN}", "missing"),
            (f"megascale_nodes_cordoned{_RUN}", "cordoned"),
        ],
    ),
    ("Oldest heartbeat", "s", [(f"megascale_heartbeat_age_seconds{_RUN}", "age")]),
    ("Network", "Bps", [(f"megascale_network_bytes_per_second{_RUN}", "{{direction}}")]),
    ("GPU power", "watt", [(f"megascale_gpu_power_watts{_RUN}", "all GPUs")]),
    ("Hottest GPU", "celsius", [(f"megascale_gpu_temperature_celsius{_RUN}", "hottest")]),
    (
        "GPUs with faults",
        "none",
        [(f"megascale_gpus_throttled{_RUN}", "throttled"), (f"megascale_gpus_with_errors{_RUN}", "errors")],
    ),
)
_RUNS = '{job_name=~"$job_name"}'
_FLEET_PANELS: tuple[tuple[str, str, list[tuple[str, str]]], ...] = (
    ("Runs by phase", "none", [(f"sum by (phase) (megascale_job_phase{_RUNS})", "{{phase}}")]),
    ("Steps per second", "none", [(f"megascale:steps:rate5m{_RUNS}", "{{run}}")]),
    ("MFU", "percentunit", [(f"megascale_mfu_ratio{_RUNS}", "{{run}}")]),
    ("Tokens per second", "none", [(f"megascale_tokens_per_second{_RUNS}", "{{run}}")]),
    ("Effective time", "percentunit", [(f"megascale_effective_time_ratio{_RUNS}", "{{run}}")]),
    ("Time since the last commit", "s", [(f"megascale_commit_age_seconds{_RUNS}", "{{run}}")]),
    ("Restarts in an hour", "none", [(f"increase(megascale_attempts_total{_RUNS}[1h])", "{{run}}")]),
    ("Missing nodes", "none", [(f"megascale_nodes_missing{_RUNS}", "{{run}}")]),
    ("Alerts", "none", [('ALERTS{alertname=~"Megascale.*",alertstate="firing"}', "{{run}} {{alertname}}")]),
)
# Columns of the fleet's table as title, Grafana's unit, and an expression with one series per run.
_FLEET_TABLE = (
    ("Step", "none", f"megascale_step{_RUNS}"),
    ("Planned", "none", f"megascale_planned_steps{_RUNS}"),
    ("Ranks", "none", f"megascale_ranks{_RUNS}"),
    ("Loss", "none", f"megascale_loss{_RUNS}"),
    ("MFU", "percentunit", f"megascale_mfu_ratio{_RUNS}"),
    ("Effective", "percentunit", f"megascale_effective_time_ratio{_RUNS}"),
    ("Commit age", "s", f"megascale_commit_age_seconds{_RUNS}"),
)


def make_run_dashboard() -> Json:
    """Return the dashboard of one run, which a variable selects."""
    phase = _make_panel(1, "stat", "Phase", "none", [(f"megascale_job_phase{_RUN} == 1", "{{phase}}")])
    panels = [phase] + _make_time_series(_RUN_PANELS, first=2)
    _arrange(panels, top=0)
    variable = _make_variable("run", "Run", "label_values(megascale_step, run)", multiple=False)
    return _make_dashboard("MegaScale run", "megascale-run", variable, panels)


def make_fleet_dashboard() -> Json:
    """Return the dashboard of all runs: a table with a row per run, whose name opens the run's dashboard."""
    panels = _make_time_series(_FLEET_PANELS, first=2)
    _arrange(panels, top=_HEIGHT)
    variable = _make_variable("job_name", "Job", "label_values(megascale_step, job_name)", multiple=True)
    return _make_dashboard("MegaScale fleet", "megascale-fleet", variable, [_make_fleet_table()] + panels)


def _make_fleet_table() -> Json:
    queries = [(f"sum by (run) ({expression})", title) for title, _, expression in _FLEET_TABLE]
    table = _make_panel(1, "table", "Runs", "none", queries)
    table["gridPos"] = {"x": 0, "y": 0, "w": 24, "h": _HEIGHT}
    for target in table["targets"]:
        target |= {"format": "table", "instant": True}
    names = {f"Value #{chr(ord('A') + i)}": title for i, (title, _, _) in enumerate(_FLEET_TABLE)}
    table["transformations"] = [
        {"id": "joinByField", "options": {"byField": "run", "mode": "outer"}},
        {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names | {"run": "Run"}}},
    ]
    link = {"title": "Open the run", "url": "/d/megascale-run?var-run=${__value.text}"}
    overrides = [_make_override("Run", "links", [link])]
    overrides += [_make_override(title, "unit", unit) for title, unit, _ in _FLEET_TABLE if unit != "none"]
    table["fieldConfig"]["overrides"] = overrides
    return table


def _make_override(column: str, name: str, value: Any) -> Json:
    return {"matcher": {"id": "byName", "options": column}, "properties": [{"id": name, "value": value}]}


def _make_time_series(panels: tuple[tuple[str, str, list[tuple[str, str]]], ...], *, first: int) -> list[Json]:
    """Return time series panels numbered from `first`."""
    return [
        _make_panel(number, "timeseries", title, unit, queries)
        for number, (title, unit, queries) in enumerate(panels, first)
    ]


def _make_panel(number: int, kind: str, title: str, unit: str, queries: list[tuple[str, str]]) -> Json:
    targets = [
        {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend}
        for i, (expression, legend) in enumerate(queries)
    ]
    return {
        "id": number,
        "type": kind,
        "title": title,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {},
        "targets": targets,
    }


def _arrange(panels: list[Json], *, top: int) -> None:
    """Place the panels in rows of equal panels below `top`."""
    for i, panel in enumerate(panels):
        row, column = divmod(i, _COLUMNS)
        panel["gridPos"] = {"x": _WIDTH * column, "y": top + _HEIGHT * row, "w": _WIDTH, "h": _HEIGHT}


def _make_variable(name: str, label: str, query: str, *, multiple: bool) -> Json:
    return {
        "name": name,
        "type": "query",
        "label": label,
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": multiple,
        "includeAll": multiple,
        "allValue": ".*",
    }


def _make_dashboard(title: str, uid: str, variable: Json, panels: list[Json]) -> Json:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "title": title,
        "uid": uid,
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "utc",
        "tags": ["megascale"],
        "templating": {"list": [source, variable]},
        "annotations": {"list": []},
        "panels": panels,
    }
