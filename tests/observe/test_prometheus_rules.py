"""The packaged alerts in promtool: each has a case that stays quiet and one that fires. And the dashboards' form."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import yaml

from megascale.observe.prometheus import get_rules_file
from megascale.observe.prometheus.dashboards import make_fleet_dashboard, make_run_dashboard

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is missing (Debian: prometheus)")

TARGET = {"job": "megascale", "instance": "head:1"}
RUN = TARGET | {"run": "gpt", "job_name": "team"}
OTHER_RUN = RUN | {"run": "old"}

Case = tuple[str, list[dict[str, str]], str, list[dict[str, object]]]


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


def of_run(name: str, values: str, **labels: str) -> dict[str, str]:
    return series(f"megascale_{name}", values, **RUN, **labels)


def firing(severity: str, summary: str, labels: dict[str, str] = RUN, **more: str) -> list[dict[str, object]]:
    return [{"exp_labels": labels | more | {"severity": severity}, "exp_annotations": {"summary": summary}}]


def compute(slowest: str, median: str, **stage: str) -> list[dict[str, str]]:
    return [
        of_run("compute_seconds", slowest, **stage, over="slowest"),
        of_run("compute_seconds", median, **stage, over="median"),
    ]


def lifetime(last_phase: str, labels: dict[str, str] = RUN, start: str = "100x9 stale") -> list[dict[str, str]]:
    """Return the series of a driver that is read for 10 minutes, in the last of them in a phase, and then is gone."""
    return [
        series("megascale_driver_start_time_seconds", start, **labels),
        series("megascale_job_phase", "1x8 0 0 stale", **labels, phase="running"),
        series("megascale_job_phase", "0x8 1 1 stale", **labels, phase=last_phase),
    ]


UP = series("up", "1x10 0x30", **TARGET)
RUNNING = of_run("job_phase", "1x80", phase="running")
DOWN = "Run gpt: the driver at head:1 does not answer; start it again with `megascale launch`."
NEVER_READ = "Run : the driver at head:1 does not answer; start it again with `megascale launch`."
SLOW = "Run gpt: a rank computes 1.2 times as long as the median; see `megascale spans`."
SLOW_IN_STAGE = "Run gpt: a rank of pipeline stage 1 computes 1.2 times as long as the median; see `megascale spans`."
COMMIT = [of_run("commit_interval_steps", "100x80"), of_run("step_seconds", "2x80")]
GPUS = "Run gpt: 2 GPUs report errors or are throttled; see `megascale nodes`."
NEXT_RUN = [
    series("megascale_driver_start_time_seconds", "_x19 200x9 stale", **RUN),
    series("megascale_job_phase", "_x19 1x9 stale", **RUN, phase="running"),
]

# Alert -> (case, series, time of the check, the alerts that fire then).
ALERTS: dict[str, list[Case]] = {
    "MegascaleDriverDown": [
        ("the job is done", [UP] + lifetime("done"), "30m", []),
        ("the job was interrupted", [UP] + lifetime("interrupted"), "30m", []),
        ("the job has failed", [UP] + lifetime("failed"), "30m", []),
        ("an agent is down", [series("up", "0x40", **TARGET, role="agent")], "30m", []),
        ("the driver was killed", [UP] + lifetime("stopping"), "30m", firing("critical", DOWN)),
        ("a discovered driver was killed",
            [series("up", "1x10 0x30", **RUN, role="driver")] + lifetime("stopping"), "30m",
            firing("critical", DOWN)),
        ("the driver was never read", [UP], "30m", firing("critical", NEVER_READ, TARGET)),
        ("an earlier run at the address has ended",
            [series("up", "1x30 0x30", **TARGET)] + lifetime("done", OTHER_RUN) + NEXT_RUN, "50m",
            firing("critical", DOWN)),
    ],
    "MegascaleFailed": [
        ("done", lifetime("done"), "30m", []),
        ("failed and gone", lifetime("failed"), "30m",
            firing("critical", "Run gpt has failed; `megascale events` gives the reason.", phase="failed")),
    ],
    "MegascaleStandsStill": [
        ("steps", [RUNNING, of_run("step_age_seconds", "5x40"), of_run("step_seconds", "9x40")], "30m", []),
        ("it starts", [of_run("job_phase", "1x40", phase="starting"), of_run("step_age_seconds", "0+60x40")],
            "30m", []),
        ("a step of 20 minutes", [RUNNING, of_run("step_age_seconds", "0+60x40"), of_run("step_seconds", "1200x40")],
            "30m", []),
        ("three steps of 8 minutes", [RUNNING, of_run("step_age_seconds", "0+60x40"), of_run("step_seconds", "480x40")],
            "30m", firing("critical", "Run gpt completes no step; see `megascale hang`.", phase="running")),
        ("no step", [RUNNING, of_run("step_age_seconds", "0+60x40")], "30m",
            firing("critical", "Run gpt completes no step; see `megascale hang`.", phase="running")),
    ],
    "MegascaleRestartsOften": [
        ("two restarts", [of_run("attempts_total", "1x10 2x10 3x40")], "50m", []),
        ("a crash loop", [of_run("attempts_total", "1+1x50")], "50m",
            firing("warning", "Run gpt has restarted more than 3 times in an hour; see `megascale events`.")),
    ],
    "MegascaleSlowRank": [
        ("4 minutes", compute("1.04x20 1.2x10", "1x30"), "25m", []),
        ("stages differ", compute("2x30", "2x30", stage="0") + compute("1x30", "1x30", stage="1"), "25m", []),
        ("19 minutes", compute("1.04x5 1.2x25", "1x30"), "25m", firing("warning", SLOW)),
        ("the fast stage", compute("2x30", "2x30", stage="0") + compute("1.2x30", "1x30", stage="1"), "25m",
            firing("warning", SLOW_IN_STAGE, stage="1")),
    ],
    "MegascaleStepsGrowLonger": [
        ("a short pause", [of_run("step_seconds", "2x50 3x5 2x30")], "60m", []),
        ("longer", [of_run("step_seconds", "2x50 3x20")], "70m",
            firing("warning", "Run gpt: steps take 5% longer than the median of the last hour.")),
    ],
    "MegascaleCommitOverdue": [
        ("in time", [RUNNING] + COMMIT + [of_run("commit_age_seconds", "0+60x19")], "19m", []),
        ("only at the end",
            [RUNNING, of_run("commit_interval_steps", "0x80"), COMMIT[1], of_run("commit_age_seconds", "0+60x80")],
            "60m", []),
        ("paused", [of_run("job_phase", "0x80", phase="running")] + COMMIT + [of_run("commit_age_seconds", "0+60x80")],
            "60m", []),
        ("overdue", [RUNNING] + COMMIT + [of_run("commit_age_seconds", "0+60x80")], "60m",
            firing("critical", "Run gpt has committed no checkpoint for 1h 0m 0s, more than three intervals; see "
                "`megascale events`.")),
    ],
    "MegascaleNodesMissing": [
        ("replaced", [of_run("nodes_missing", "0x10 2x3 0x20"), of_run("nodes", "2x40", state="lost")], "15m", []),
        ("missing", [of_run("nodes_missing", "0x10 2x20")], "25m",
            firing("warning", "Run gpt lacks 2 of its nodes; see `megascale nodes`.")),
    ],
    "MegascaleLossNotFinite": [
        ("a number", [of_run("loss", "2.5x10")], "5m", []),
        ("infinite", [of_run("loss", "2.5 Inf Inf Inf Inf Inf")], "5m",
            firing("critical", "Run gpt: the loss is NaN or infinite.")),
        ("NaN", [of_run("loss", "2.5 NaN NaN NaN NaN NaN")], "5m",
            firing("critical", "Run gpt: the loss is NaN or infinite.")),
    ],
    "MegascaleReplicasDiffer": [
        ("equal", [of_run("checksum_mismatches_total", "1x90")], "30m", []),
        ("different", [of_run("checksum_mismatches_total", "0x20 1x30")], "30m",
            firing("critical",
                "Run gpt: the weights of data-parallel replicas differ; see `megascale events`.")),
    ],
    "MegascaleGpuErrors": [
        ("a moment", [of_run("gpus_throttled", "0x5 2x3 0x20"), of_run("gpus_with_errors", "0x30")], "8m", []),
        ("throttled", [of_run("gpus_throttled", "2x20"), of_run("gpus_with_errors", "0x20")], "15m",
            firing("warning", GPUS)),
    ],
}  # fmt: skip


def test_every_alert_has_a_quiet_and_a_firing_case():
    rules = [rule for group in yaml.safe_load(get_rules_file().read_text())["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in rules if "alert" in rule} == set(ALERTS)
    for name, cases in ALERTS.items():
        assert {bool(expected) for _, _, _, expected in cases} == {False, True}, name


@needs_promtool
def test_promtool_accepts_the_rules_and_they_alert_when_they_should(tmp_path):
    rules = str(get_rules_file())
    result = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    tests = [
        {
            "name": f"{alert}: {name}",
            "interval": "1m",
            "input_series": inputs,
            "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": expected}],
        }
        for alert, cases in ALERTS.items()
        for name, inputs, at, expected in cases
    ]
    case = {"rule_files": [rules], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "case.yml").write_text(json.dumps(case))
    result = subprocess.run(["promtool", "test", "rules", tmp_path / "case.yml"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("dashboard", [make_run_dashboard(), make_fleet_dashboard()], ids=["run", "fleet"])
def test_panels_of_a_dashboard_neither_overlap_nor_share_an_id(dashboard):
    cells = set()
    for panel in dashboard["panels"]:
        position = panel["gridPos"]
        for x in range(position["x"], position["x"] + position["w"]):
            for y in range(position["y"], position["y"] + position["h"]):
                assert 0 <= x < 24
                assert (x, y) not in cells, panel["title"]
                cells.add((x, y))
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(numbers) == len(set(numbers))


@needs_promtool
def test_the_command_writes_files_that_promtool_accepts(tmp_path, megascale):
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "gpt.json").write_text('[{"targets": ["head:1"], "labels": {"run": "gpt"}}]')
    result = megascale("monitoring", tmp_path / "out", "--targets", tmp_path / "targets")
    assert result.returncode == 0, result.stderr
    configuration = tmp_path / "out" / "prometheus.yml"
    check = subprocess.run(["promtool", "check", "config", configuration], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr
    assert "WARNING" not in check.stdout + check.stderr
    assert json.loads((tmp_path / "out" / "fleet.json").read_text())["uid"] == "megascale-fleet"
