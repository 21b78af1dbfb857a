"""`python -m tests.chaos NAME`, from the root of a clone: campaigns that break real jobs and check what follows.

Each campaign prints a table, writes JSON, and ends with exit code 1 if a result is wrong. They take minutes to hours,
so that `make test` runs a smoke test per kind only.
"""

from __future__ import annotations

from benchmarks.harness.program import make_app, run

# Each module has `register(app)`.
CAMPAIGNS: dict[str, str] = {
    "faults": "tests.chaos.faults.command",
    "hour": "tests.chaos.local.hour",
    "hang": "tests.chaos.local.hang",
    "restarts": "tests.chaos.local.restarts",
    "checkpoint": "tests.chaos.checkpoint.command",
    "loader": "tests.chaos.data.command",
    "soak": "tests.chaos.soak.command",
    "corruption": "tests.chaos.corruption.command",
    "families": "tests.chaos.families.command",
    "model-card": "tests.chaos.families.model_card",
    "fuzz": "tests.chaos.fuzz.command",
    "hostile": "tests.chaos.hostile.command",
    "driver": "tests.chaos.driver.load",
    "continue": "tests.chaos.local.continuing",
    "foreign": "tests.chaos.foreign.command",
    "many-nodes": "tests.chaos.machines.many_nodes",
    "kubernetes-scale": "tests.chaos.kubernetes.scale",
}

app = make_app(
    "python -m tests.chaos",
    CAMPAIGNS,
    "Break real jobs and check what follows. Example: python -m tests.chaos faults --kind kill-rank --runs 1",
)


def main() -> None:
    """Run the command that the command line names."""
    run(app)


if __name__ == "__main__":
    main()
