"""`megascale monitoring`: write the files that a site's Prometheus and Grafana load."""

from __future__ import annotations

import json
from pathlib import Path

import typer

# `files` is the pattern of the files in the folder of `resilience.targets`.
_SCRAPE_CONFIG = """\
# Add these sections to the site's prometheus.yml, next to rules.yml.
rule_files: [rules.yml]
scrape_configs:
- job_name: megascale
  # The series carry run and job_name themselves. Without this line Prometheus renames those labels.
  honor_labels: true
  file_sd_configs:
  - files: [{files}]
    refresh_interval: 15s
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(monitoring)


def monitoring(
    out: Path = typer.Argument(..., metavar="FOLDER", help="Folder for the files, made if missing."),
    targets: Path = typer.Option(
        Path("targets"), "--targets", help="The folder of `resilience.targets`, as Prometheus sees it."
    ),
) -> None:
    """Write the files that Prometheus and Grafana load to watch all runs of a site.

    prometheus.yml has the scrape configuration, rules.yml the recording rules and alerts. run.json and fleet.json are
    Grafana dashboards of one run and of all runs. Runs are discovered by the files that drivers write into
    `resilience.targets`.

    Example:

      megascale monitoring monitoring --targets /data/targets
    """
    from megascale.core.atomic_files import write_atomically
    from megascale.errors import ConfigError
    from megascale.observe.prometheus import get_rules_file
    from megascale.observe.prometheus.dashboards import make_fleet_dashboard, make_run_dashboard

    pattern = json.dumps(f"{targets.absolute()}/*.json")
    contents = {
        "prometheus.yml": _SCRAPE_CONFIG.format(files=pattern),
        "rules.yml": get_rules_file().read_text(),
        "run.json": json.dumps(make_run_dashboard(), indent=1) + "\n",
        "fleet.json": json.dumps(make_fleet_dashboard(), indent=1) + "\n",
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            write_atomically(out / name, text)
            typer.echo(f"wrote {out / name}")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}; name a folder of your own") from None
