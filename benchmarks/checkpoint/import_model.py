"""`python -m benchmarks import-model`: time and memory of importing a synthetic Hugging Face folder of real size."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from benchmarks.checkpoint.command import describe_machine
from benchmarks.harness.temporary import require_folder
from megascale.core import strict_json
from megascale.errors import TrainingError

_BLOCK_ELEMENTS = 32 << 20  # of random weights, repeated through the files
_SAMPLE_SECONDS = 0.25
_IMPORTS_ALONE = "import time, megascale.train.convert_model; print(flush=True); time.sleep(600)"
# Settings of a start that trains one step on few tokens.
_ONE_STEP = (
    "--model.sequence_length=64",
    "--train.steps=1",
    "--train.micro_batch=1",
    "--train.device=cpu",
    "--observe.tensorboard=false",
    "--observe.spans=0",
    "--checkpoint.at_end=false",
    "--checkpoint.interval=0",
)


@dataclass(frozen=True)
class Measurement:
    """Seconds of a command, and the peak of the proportional memory of its processes together, in bytes."""

    seconds: float
    peak: int


def register(app: typer.Typer) -> None:
    """Add `python -m benchmarks import-model`."""
    app.command("import-model")(import_model)


def import_model(
    preset: str = typer.Option("llama-8b", help="shape of the imported model"),
    layers: int | None = typer.Option(None, min=1, help="layers of the imported model; default: the preset's"),
    train_layers: int = typer.Option(1, min=0, help="layers of the model that a training starts from; 0: no training"),
    train_vocab: int = typer.Option(16_000, min=1000, help="vocabulary of the model that a training starts from"),
    ranks: int = typer.Option(2, min=1, help="data-parallel ranks of that training, with ZeRO-1"),
    shard_gb: float = typer.Option(5.0, min=0.01, help="size of a safetensors file, in 10^9 bytes"),
    folder: Path = typer.Option(Path(), help="where to write: twice the model's size"),
    out: Path = typer.Option(Path("bench-import-model.json"), help="JSON file for the metrics"),
) -> None:
    """Import a folder of random bf16 weights, start a training from a small one, and print time and peak memory.

    Memory is the sum of the proportional set sizes (PSS) of all processes, sampled four times per second.
    Example: python -m benchmarks import-model --layers 4
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    require_folder(folder)
    with tempfile.TemporaryDirectory(prefix="bench-import-", dir=folder) as name:
        root = Path(name)
        base = _measure_imports(root)
        size = write_folder(root / "model", preset, layers, None, shard_gb)
        run = root / "runs" / "imported"
        imported = measure([*_MEGASCALE, "convert", "import", str(root / "model"), "--out", str(run)], root)
        stored = sum(file.stat().st_size for file in (run / "checkpoints").rglob("*") if file.is_file())
        figures: dict[str, Any] = {"base_bytes": base, "model_bytes": size, "stored_bytes": stored}
        figures["import"] = {"seconds": imported.seconds, "peak_bytes": imported.peak}
        rows = [("convert import", size, imported)]
        if train_layers:
            small = write_folder(root / "small", preset, train_layers, train_vocab, shard_gb)
            started = measure(_start_command(root, ranks), root)
            figures["start"] = {"seconds": started.seconds, "peak_bytes": started.peak, "model_bytes": small}
            rows.append((f"train --model.from, 1 step, {ranks} ranks", small, started))
    table = Table(title=f"{preset}, Python and torch alone: {base / 2**30:.2f} GiB", box=box.SIMPLE_HEAD)
    for column in ("command", "weights, GB", "seconds", "peak of the host, GiB", "above Python and torch, GiB"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for label, weights, measurement in rows:
        above = measurement.peak - base
        table.add_row(
            label,
            f"{weights / 1e9:.2f}",
            f"{measurement.seconds:.1f}",
            f"{measurement.peak / 2**30:.2f}",
            f"{above / 2**30:.2f}",
        )
    console.print(table)
    out.write_text(strict_json.dumps({**describe_machine(), "preset": preset, **figures}, indent=2) + "\n")
    console.print(f"metrics: {out}")


_MEGASCALE = (sys.executable, "-m", "megascale")


def _start_command(root: Path, ranks: int) -> list[str]:
    """Make a data set for the small model and return the command of a training that starts from it."""
    text = root / "texts"
    text.mkdir()
    (text / "a.txt").write_text(" ".join(str(number) for number in range(20_000)))
    tokenizer = str(root / "small" / "tokenizer.json")
    build = ["data", "build", "--input", str(text), "--tokenizer", tokenizer, "--out", str(root / "data")]
    subprocess.run([*_MEGASCALE, *build], check=True, cwd=root, capture_output=True)
    return [
        *_MEGASCALE,
        "train",
        f"--model.from={root / 'small'}",
        f"--data.train={root / 'data' / 'train'}",
        "--train.name=continued",
        f"--parallel.data={ranks}",
        f"--parallel.zero={1 if ranks > 1 else 0}",
        f"--train.global_batch={ranks}",
        *_ONE_STEP,
    ]


def write_folder(folder: Path, preset: str, layers: int | None, vocab: int | None, shard_gb: float) -> int:
    """Write a Hugging Face folder of a preset's shape with random bf16 weights; return the bytes of its weights."""
    import torch

    from megascale.config import from_tree
    from megascale.core.inventory import logical_shapes
    from megascale.data.tokenizer.tokenizer import train_tokenizer
    from megascale.model.huggingface.export import write_folder as export_folder
    from megascale.model.huggingface.families import choose_family

    keys: dict[str, Any] = {"preset": preset}
    if layers is not None:
        keys["layers"] = layers
    if vocab is not None:
        keys["vocab_size"] = vocab
    model = from_tree({"model": keys}).model
    shapes = logical_shapes(model)
    block = torch.randn(_BLOCK_ELEMENTS, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def fetch(names: Any) -> dict[str, torch.Tensor]:
        tensors = {}
        for name in names:
            tensor = torch.empty(shapes[name], dtype=torch.bfloat16)
            for part in tensor.view(-1).split(_BLOCK_ELEMENTS):
                part.copy_(block[: len(part)])
            tensors[name] = tensor
        return tensors

    family = choose_family(model)
    folder.mkdir()
    limit = int(shard_gb * 1e9)
    export_folder(folder, family, model, fetch, dtype=torch.bfloat16, file_bytes=limit)
    train_tokenizer(["".join(map(chr, range(32, 127)))], 300).save(folder / "tokenizer.json")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def measure(command: list[str], folder: Path) -> Measurement:
    """Run a command to its end. Raises TrainingError with its output if it fails."""
    log = folder / "output.txt"
    began = time.monotonic()
    with open(log, "w") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        peak = _PeakMemory(process.pid)
        peak.start()
        code = process.wait()
        seconds = time.monotonic() - began
        peak.finish()
    if code:
        raise TrainingError(f"{' '.join(command[2:])} ended with exit code {code}: {log.read_text()[-3000:]}")
    return Measurement(seconds, peak.value)


class _PeakMemory(threading.Thread):
    """Samples the proportional memory of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.value = 0
        self._ended = threading.Event()

    def run(self) -> None:
        from benchmarks.harness.usage import children, memory

        while not self._ended.wait(_SAMPLE_SECONDS):
            total = 0
            pending = [self.pid]
            while pending:
                pid = pending.pop()
                try:
                    total += memory(pid)
                    pending += children(pid)
                except OSError:
                    continue  # the process has ended
            self.value = max(self.value, total)

    def finish(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self.join()


def _measure_imports(folder: Path) -> int:
    """Return the proportional memory of a process that has imported torch and the conversion, and does nothing."""
    from benchmarks.harness.usage import memory

    with subprocess.Popen([sys.executable, "-c", _IMPORTS_ALONE], stdout=subprocess.PIPE, cwd=folder) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            return memory(process.pid)
        finally:
            process.kill()
