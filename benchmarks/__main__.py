"""`python -m benchmarks NAME`, from the root of a clone: each benchmark prints a table and writes JSON."""

from __future__ import annotations

from benchmarks.harness.program import make_app, run

# Each module has `register(app)`.
BENCHMARKS: dict[str, str] = {
    "train": "megascale.bench.train",
    "kernels": "megascale.bench.kernels",
    "ablation": "benchmarks.training.ablation",
    "alternate": "benchmarks.training.alternate",
    "convergence": "benchmarks.training.convergence",
    "exchange": "benchmarks.kernels.exchange",
    "exposed": "benchmarks.training.exposed",
    "float8-sums": "benchmarks.kernels.float8_sums",
    "gradients": "benchmarks.training.gradient_error",
    "kernel-peers": "benchmarks.kernels.peers",
    "layouts": "benchmarks.training.layouts",
    "open-run": "benchmarks.training.open_run",
    "overlap": "benchmarks.training.overlap",
    "peers": "benchmarks.training.peer_comparison",
    "shapes": "benchmarks.training.shapes",
    "schedules": "benchmarks.training.schedules",
    "tensor-precision": "benchmarks.training.tensor_precision",
    "simulator": "benchmarks.simulate.command",
    "calibration": "benchmarks.simulate.command",
    "targets": "benchmarks.targets.command",
    "checkpoint": "benchmarks.checkpoint.command",
    "import-model": "benchmarks.checkpoint.import_model",
    "loader": "benchmarks.data.loader",
    "tokenize": "benchmarks.data.tokenize",
    "init": "benchmarks.rendezvous.init",
    "observe": "benchmarks.observe.command",
    "dashboard": "benchmarks.observe.dashboard",
    "fleet": "benchmarks.observe.fleet",
    "call-timing": "benchmarks.observe.call_timing",
}

app = make_app(
    "python -m benchmarks",
    BENCHMARKS,
    "Measure MegaScale: each benchmark prints a table and writes JSON. Example: python -m benchmarks schedules",
)


def main() -> None:
    """Run the command that the command line names."""
    run(app)


if __name__ == "__main__":
    main()
