"""`megascale launch --dry-run` checks the layout of a job for a cluster before the job waits in a queue."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.errors import FitError

ROOT = Path(__file__).parents[2]
CLUSTERS = ("slurm", "kubernetes")


def dry_run(file: Path, cluster: str, *settings: str):
    arguments = ["launch", str(file), "--cluster", cluster, "--dry-run", "--kubernetes.image=image", *settings]
    return CliRunner().invoke(app, arguments)


def read_job(document: str) -> str:
    """Return the configuration that a page shows."""
    (text,) = re.findall(
        r"^```\n(\[train\]\n.*?)^```", (ROOT / "docs" / document).read_text(), re.DOTALL | re.MULTILINE
    )
    return text


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("--train.global_batch=8", "train.global_batch=8 is not a multiple"),
        ("--parallel.data=3", "3 ranks .* do not divide evenly over resilience.nodes=2"),
        ("--parallel.data=32", "16 ranks per node but 8 GPUs"),
    ],
)
def test_a_job_that_does_not_divide_is_refused(tmp_path, monkeypatch, cluster, setting, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(read_job("bring-up.md").replace("/data", str(tmp_path)))
    result = dry_run(tmp_path / "job.toml", cluster, setting)
    assert isinstance(result.exception, FitError)
    assert re.search(reason, str(result.exception))


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("document", ["bring-up.md", "kubernetes.md", "base"])
def test_the_jobs_of_the_documents_divide(tmp_path, monkeypatch, cluster, document):
    """Expect a note about their data, which this machine lacks."""
    monkeypatch.chdir(tmp_path)
    if document == "base":
        text = (ROOT / "deploy" / "kubernetes" / "base" / "job.toml").read_text()
    else:
        text = read_job(document)
    (tmp_path / "job.toml").write_text(text.replace("/data", str(tmp_path)))
    result = dry_run(tmp_path / "job.toml", cluster, f'--kubernetes.mounts=["claim:data:{tmp_path}"]')
    assert result.exit_code == 0, result.exception
    assert "note: the nodes will check the model" in result.stderr
