"""The record of an open run over several calls, and what it prints."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.training.open_run_plan import OpenRunPlan
from megascale.core import strict_json

# Values of a step that a repeated step must give bit for bit.
COMPARED = ("loss", "grad_norm")


@dataclass
class Kill:
    """One kill of all processes of the run.

    Attributes:
        step: the last step that was recorded.
        resumed_from: step of the checkpoint that the next start loaded; None until then.
        before: loss and gradient norm of the steps since the last checkpoint, by step, from before the kill.
        repeated: steps that were trained again and compared.
        different: the first repeated steps whose loss or norm differs.
    """

    step: int
    before: dict[str, list[float]]
    resumed_from: int | None = None
    repeated: int = 0
    different: list[int] = field(default_factory=list)


@dataclass
class OpenRunRecord:
    """State of the run between calls, kept in `open-run.json`."""

    size: str
    data: str = ""
    data_bytes: int = 0
    data_seconds: float = 0.0
    devices: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    predicted: dict[str, Any] | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path, size: str) -> OpenRunRecord:
        """Return the record of earlier calls, or a new one."""
        if not file.exists():
            return cls(size)
        tree = strict_json.loads(file.read_text())
        kills = [Kill(**kill) for kill in tree.pop("kills")]
        return cls(**tree, kills=kills)

    def write(self, file: Path) -> None:
        """Write the record; a call that is cut short leaves the one before or this one."""
        unfinished = file.with_suffix(".new")
        unfinished.write_text(strict_json.dumps(asdict(self), indent=1) + "\n")
        unfinished.replace(file)


def read_records(run: Path) -> list[dict[str, Any]]:
    """Return the metric records of a run, without a last line that a kill cut."""
    records = []
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    for line in file.read_text().splitlines():
        try:
            records.append(strict_json.loads(line))
        except ValueError:
            continue
    return records


def step_values(records: list[dict[str, Any]], above: int) -> dict[str, list[float]]:
    """Return the compared values of the steps above `above`, by step."""
    return {
        str(record["step"]): [record[key] for key in COMPARED if key in record]
        for record in records
        if "loss" in record and record["step"] > above
    }


def compare_repeated_steps(kill: Kill, records: list[dict[str, Any]]) -> None:
    """Count the steps from before the kill that were trained again, and those with other bits."""
    repeated_values = step_values(records, 0)
    repeated = [step for step in kill.before if step in repeated_values]
    kill.repeated = len(repeated)
    kill.different = [int(step) for step in repeated if repeated_values[step] != kill.before[step]][:10]


def describe_comparison(kill: Kill) -> str:
    """Return what the comparison of a kill's repeated steps gave."""
    if kill.repeated == 0:
        return "no step was repeated, so none was compared"
    verdict = f"differ at steps {kill.different}" if kill.different else "have equal bits"
    return f"{kill.repeated} repeated steps {verdict}"


def list_failures(record: OpenRunRecord, plan: OpenRunPlan) -> list[str]:
    """Return the claims of the open run that a finished run does not show, one sentence each."""
    failures = []
    planned = len(plan.kill_steps())
    if len(record.kills) < planned:
        failures.append(f"the run was killed {len(record.kills)} times, and {planned} kills are planned")
    for kill in record.kills:
        if kill.repeated == 0 or kill.different:
            failures.append(f"after the kill at step {kill.step}: {describe_comparison(kill)}")
    state, uninterrupted = record.result["state"], record.result.get("uninterrupted", record.result["state"])
    if uninterrupted != state:
        failures.append(f"the final state is {state}, and that of the uninterrupted run is {uninterrupted}")
    return failures


def fingerprint_state(checkpoints: Path) -> str:
    """Return a hash of the tensors of the newest checkpoint: names, shapes and contents."""
    from megascale.checkpoint.complete_checkpoint import open_checkpoint

    digest = hashlib.blake2b(digest_size=8)
    for tensor in open_checkpoint(checkpoints).list_tensors_with_chunks():
        digest.update(repr(tensor).encode())
    return digest.hexdigest()


def summarise(record: OpenRunRecord, run: Path) -> dict[str, Any]:
    """Return the results of a finished run."""
    records = read_records(run)
    steps = [r for r in records if "loss" in r]
    final = [r for r in records if "valid_whole_loss" in r][-1]
    seconds = sum(r["seconds"] for r in steps)
    return {
        "steps": steps[-1]["step"],
        "tokens": steps[-1]["tokens"],
        "loss": final["valid_whole_loss"],
        "bits_per_byte": final.get("valid_bits_per_byte"),
        "seconds": seconds,
        "tokens_per_second": steps[-1]["tokens"] / seconds,
        "wall_seconds": sum(call["seconds"] for call in record.calls),
        "held_out": [[r["step"], r["valid_loss"]] for r in records if "valid_loss" in r],
        "state": fingerprint_state(run / "checkpoints"),
    }


def show_plan(plan: OpenRunPlan, console: Console) -> None:
    """Print what will be trained and what is predicted."""
    console.print(
        f"open run, size {plan.name}: {plan.steps:,} steps of {plan.batch} x {plan.sequence_length} tokens on "
        f"{plan.gpus} data-parallel rank{'s' * (plan.gpus > 1)}; all processes are killed after the steps "
        f"{' and '.join(map(str, plan.kill_steps()))}"
    )
    prediction = plan.prediction
    if prediction is None:
        console.print("no prediction applies to this size and these settings")
        return
    console.print(
        f"predicted on {prediction.stated}: {_format(prediction.bits_per_byte, '.2f')} bits per byte of held-out text, "
        f"{_format(prediction.seconds, '.0f')} s in training steps ({prediction.reason})"
    )


def _format(bounds: tuple[float, float, float], digits: str) -> str:
    expected, lowest, highest = (format(value, digits) for value in bounds)
    return f"{expected} ({lowest} to {highest})"


def show_result(record: OpenRunRecord, plan: OpenRunPlan, console: Console) -> None:
    """Print the results next to the predictions, and the comparison of repeated steps."""
    result = record.result
    table = Table("", "predicted", "measured")
    prediction = plan.prediction
    for label, key, digits in (
        ("held-out loss, nats per token", "loss", ".3f"),
        ("held-out bits per byte", "bits_per_byte", ".3f"),
        ("seconds in training steps", "seconds", ".0f"),
    ):
        expected = "-" if prediction is None else _format(getattr(prediction, key), digits)
        measured = result[key]
        table.add_row(label, expected, "-" if measured is None else format(measured, digits))
    table.add_row("tokens/s", "-", f"{result['tokens_per_second']:,.0f}")
    table.add_row("seconds of all calls", "-", f"{result['wall_seconds']:.0f}")
    console.print(table)
    console.print(f"devices: {', '.join(record.devices)}; text: {record.data_bytes:,} bytes, fingerprint {record.data}")
    for kill in record.kills:
        console.print(
            f"killed after step {kill.step}, resumed from step {kill.resumed_from}: {describe_comparison(kill)}"
        )
    console.print(f"state (weights and optimizer) at the end: {result['state']}")
    if "uninterrupted" in result:
        equal = result["uninterrupted"] == result["state"]
        console.print(f"state of an uninterrupted run: {result['uninterrupted']}, {'equal' if equal else 'NOT equal'}")
