"""A launched job goes where its placement file says, with the environment that its file gives."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from megascale.core.grid import Grid
from megascale.core.launch_files import PlacementFile


def placed(path: Path, *nodes: str) -> str:
    """A setting that names a placement of a job of two ranks on nodes of one."""
    grid = Grid(data=len(nodes), ranks_per_host=1)
    PlacementFile("by hand", grid, tuple(range(len(nodes))), nodes).write(path)
    return f"--resilience.placement={path}"


def test_ranks_go_where_the_file_says_with_the_environment_of_tune(launch, megascale, tiny, tmp_path):
    """The files are those that `megascale network` writes."""
    file = tmp_path / "placement.json"
    environment = tmp_path / "network.env"
    names = tmp_path / "names.txt"
    names.write_text("n0\nn1\nn2\n")
    fabric = [f"--set={each}" for each in ("hosts=3", "nics=1", "hosts_per_set=3", "leaf_split=1")]
    laid = ["--placement=random", "--seed=2", f"--names={names}", f"--out={file}", "--parallel.gpus_per_host=1"]
    drawn = megascale("network", "placement", tiny, "--gpus=2", *fabric, *laid)
    assert drawn.returncode == 0, drawn.stderr
    assert json.loads(file.read_text())["nodes"] == ["n2", "n0"]  # of this seed
    tuned = megascale("network", "tune", "--flaps", "3", "--adaptive", "off", "--out", environment)
    assert tuned.returncode == 0, tuned.stderr
    arguments = [f"--resilience.placement={file}", f"--resilience.environment={environment}", "--train.steps=100000"]
    job = launch("placed", "--nodes=2", "--spares=1", "--checkpoint.interval=0", *arguments)
    first = job.until("attempt_started")
    assert first.nodes == ("n2", "n0")
    assert first.evidence[1] == f"the placement follows resilience.placement={file}"
    job.until("first_step")
    # A trainer is a child of its node's fork server, that one of its agent.
    assert [parent(parent(job.pid(rank))) for rank in (0, 1)] == [job.agent("n2"), job.agent("n0")]
    for variable in (line for line in environment.read_text().splitlines() if not line.startswith("#")):
        assert variable in (job.run / "logs" / "rank-0.log").read_text()

    # Another driver goes on with the copies; a node that fails is replaced in its place.
    job.process.kill()
    job.process.wait()
    for removed in (file, environment):
        removed.unlink()
    job.start()
    job.until("driver_took_over")
    job.kill_agent("n2", down=True)
    repeated = job.until("attempt_started", attempt=2)
    assert repeated.nodes == ("n1", "n0")
    assert "but n1 replaces n2" in repeated.evidence[1]
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 130, job.story()


def parent(pid: int) -> int:
    """Return the parent of a living process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("nodes", "names", "code", "report"),
    [
        (2, ("n0", "host7"), 4, "host7, which the cluster does not have; it has n0, n1"),
        (3, ("n1", "n0"), 4, "data 2"),
        (2, None, 2, "--names FILE"),
    ],
)
def test_a_placement_of_other_nodes_starts_nothing(megascale, tiny, tmp_path, nodes, names, code, report):
    pytest.importorskip("fastapi")
    setting = placed(tmp_path / "p.json", *(names or ("n0", "n1")))
    if names is None:
        tree = json.loads((tmp_path / "p.json").read_text())
        (tmp_path / "p.json").write_text(json.dumps(tree | {"nodes": None}))
    result = megascale(
        "launch",
        tiny,
        f"--nodes={nodes}",
        f"--parallel.data={nodes}",
        "--train.global_batch=12",
        "--train.name=no",
        setting,
    )
    assert result.returncode == code, result.stdout + result.stderr
    assert report in result.stderr
    assert not list((tmp_path / "runs").glob("no/nodes/*"))
