"""`python -m tests.chaos model-card`: verification cards of Hugging Face families, one page per family."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.temporary import temporary_folder
from megascale.errors import ConfigError, TrainingError

STEPS = 20
_LENGTH = 24  # tokens in a sample
_VOCAB = 64
_LOSS_LIMIT = 1e-10  # relative difference of a layout's losses from those of one process, in float64
_TIMEOUT = 240.0  # seconds of a training
_INDEX_HEAD = """# Verification cards

A card states what was checked of a [family](../model-families.md) with small random models of `transformers`: import,
logits, gradients, export, and {steps} steps of training in several layouts. `python -m tests.chaos model-card` writes
the cards and this page. Errors are relative to the maximum logit, with eager attention on both sides.

"""
# Sizes that two tensor-parallel ranks divide, in addition to the configuration of the test suite.
_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 24, "n_head": 4, "n_inner": 36, "n_positions": _LENGTH},
    "gptj": {"n_embd": 40, "n_head": 4, "n_inner": 36},
    "mixtral": {"intermediate_size": 20, "num_local_experts": 4},
    "gpt_oss": {"intermediate_size": 20, "num_local_experts": 4},
    "qwen3_moe": {"intermediate_size": 36, "moe_intermediate_size": 12, "num_hidden_layers": 4},
    "mistral": {"num_key_value_heads": 2, "intermediate_size": 36},
}
_COMMON_SIZES: dict[str, Any] = {"intermediate_size": 36}
_SETTINGS = (
    f"--model.sequence_length={_LENGTH}",
    f"--train.steps={STEPS}",
    "--train.global_batch=8",
    "--train.micro_batch=2",
    "--train.precision=float64",
    "--lr.peak=3e-3",
    "--lr.warmup_steps=2",
)
_QUIET = (
    "--train.device=cpu",
    "--train.threads=1",
    "--observe.tensorboard=false",
    "--observe.spans=0",
    "--checkpoint.at_end=false",
    "--checkpoint.interval=0",
)
_LAYOUTS: dict[str, tuple[str, ...]] = {
    "2 data, ZeRO-2": ("--parallel.data=2", "--parallel.zero=2"),
    "2 tensor x 2 pipeline": ("--parallel.tensor=2", "--parallel.pipeline=2", "--parallel.data=1"),
}


@dataclass(frozen=True)
class Card:
    """Results for one family.

    Attributes:
        family: model_type of transformers.
        draws: drawn configurations whose logits were compared.
        float32, float64: maximum errors of their logits.
        gradients: maximum error of a gradient, in float64.
        losses: losses of the first and the last step.
        layouts: layouts that gave the losses of one process, and the maximum relative difference.
        model: keys of the trained model that differ from the defaults, as TOML.
    """

    family: str
    draws: int
    float32: float
    float64: float
    gradients: float
    losses: tuple[float, float]
    layouts: dict[str, float]
    model: str

    def to_page(self, versions: str, machine: str, date: str) -> str:
        """Return the page."""
        first, last = self.losses
        layouts = "; ".join(f"{name} ({error:.0e})" for name, error in self.layouts.items())
        rows = {
            "date": date,
            "versions": versions,
            "machine": machine,
            "logits, float32": f"{self.float32:.1e}",
            "logits, float64": f"{self.float64:.1e}",
            "drawn configurations": str(self.draws),
            "gradients, float64": f"{self.gradients:.1e}",
            "export": "bits of the import",
            "loss of step 1": f"{first:.4f}",
            f"loss of step {STEPS}": f"{last:.4f}",
            "layouts with the losses of one process": layouts,
        }
        table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
        command = " ".join(["megascale train", f"--model.from=models/{self.family}", "--data.train=data/train"])
        return (
            f"# {self.family}\n\n"
            f"Written by `python -m tests.chaos model-card {self.family}`; do not edit. [All cards](index.md).\n\n"
            f"| check | result |\n|---|---|\n{table}\n\n"
            f"The command of one process is `{command} {' '.join(_SETTINGS)}`. The folder has random weights of this "
            f"configuration, with the defaults of all other keys:\n\n```toml\n{self.model.strip()}\n```\n"
        )


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos model-card`."""
    app.command("model-card")(model_card)


def model_card(
    families: list[str] = typer.Argument(None, help="families; default: all", show_default=False),
    draws: int = typer.Option(5, min=1, help="drawn configurations per family"),
    out: Path = typer.Option(Path("docs/models"), help="folder for the pages"),
) -> None:
    """Check Hugging Face families and write a page for each, and an index of all pages in the folder.

    Exit 1 if a check fails; that family's page is not written. Takes about a minute per family.
    Example: python -m tests.chaos model-card llama qwen3 --draws 2
    """
    from rich.console import Console

    from megascale.model.huggingface.families import FAMILIES
    from tests.forked import share_server

    chosen = families or list(FAMILIES)
    unknown = [name for name in chosen if name not in FAMILIES]
    if unknown:
        raise ConfigError(f"{unknown[0]} is not a family; choose among {', '.join(FAMILIES)}")
    share_server()  # for the trainings
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    date = datetime.now(UTC).date().isoformat()
    machine = f"{platform.processor() or platform.machine()}, CPU"
    faults = []
    for family in chosen:
        with temporary_folder() as folder:
            try:
                card = check_family(family, draws, Path(folder))
            except TrainingError as error:
                faults.append(str(error))
                console.print(f"{family}: {error}", markup=False)
                continue
        (out / f"{family}.md").write_text(card.to_page(describe_versions(), machine, date))
        console.print(f"{family}: logits {card.float64:.1e}, losses {card.losses[0]:.4f} to {card.losses[1]:.4f}")
    (out / "index.md").write_text(make_index(out, [name for name in FAMILIES if (out / f"{name}.md").exists()]))
    if faults:
        raise TrainingError(f"{len(faults)} families failed: {'; '.join(faults)}")


def describe_versions() -> str:
    """Return the versions that a card states."""
    import torch
    import transformers

    import megascale

    return (
        f"MegaScale {megascale.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )


def make_index(folder: Path, families: Sequence[str]) -> str:
    """Return the page that lists the cards in a folder."""
    lines = [
        "| family | logits, float32 | logits, float64 | gradients | loss of step 1 | of step 20 | date |",
        "|---|---|---|---|---|---|---|",
    ]
    keys = ("logits, float32", "logits, float64", "gradients, float64", "loss of step 1", f"loss of step {STEPS}")
    for family in families:
        rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (folder / f"{family}.md").read_text(), re.M))
        figures = " | ".join(rows[key] for key in (*keys, "date"))
        lines.append(f"| [`{family}`]({family}.md) | {figures} |")
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *families, "```"])
    return _INDEX_HEAD.format(steps=STEPS) + "\n".join(lines) + f"\n\n{toctree}\n"


def check_family(family: str, draws: int, folder: Path) -> Card:
    """Check a family. Raises TrainingError naming the check that failed."""
    import torch

    from megascale.config import load
    from megascale.config.reference import list_differences
    from tests.chaos.families.measures import (
        GRADIENT_LIMIT,
        LogitErrors,
        draw_family,
        measure_gradients,
        measure_logits,
    )

    torch.set_num_threads(1)
    worst = LogitErrors()
    for number in range(draws):
        errors = measure_logits(family, draw_family(family, number), folder / f"draw-{number}")
        worst = worst.max_with(errors)
        fault = errors.find_fault()
        if fault:
            raise TrainingError(f"{family}, draw {number}: {fault}")
    gradients = measure_gradients(family, folder / "gradients")
    if not gradients <= GRADIENT_LIMIT:
        raise TrainingError(f"{family}: the error of the gradients is {gradients:.1e}, above {GRADIENT_LIMIT:.0e}")
    _write_model(family, folder / "model")
    _check_round_trip(family, folder)
    losses, layouts = _train_layouts(family, folder)
    differences = list_differences(load(folder / "runs" / "one" / "config.toml"))
    return Card(
        family=family,
        draws=draws,
        float32=worst.float32,
        float64=worst.float64,
        gradients=gradients,
        losses=(losses[0], losses[-1]),
        layouts=layouts,
        model="\n".join(f"{key} = {value}" for key, value, _ in differences if key.startswith("model.")),
    )


def _write_model(family: str, folder: Path) -> None:
    """Write a random model whose first loss is that of a uniform distribution, about ln 64."""
    import torch

    from tests.model.huggingface import CONFIGS, NO_TOKENS, loop_over_experts, transformers

    settings = NO_TOKENS | CONFIGS[family] | _SIZES.get(family, _COMMON_SIZES) | {"vocab_size": _VOCAB}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **settings)
    transformers.AutoModelForCausalLM.from_config(config, **loop_over_experts(family)).save_pretrained(folder)


def _check_round_trip(family: str, folder: Path) -> None:
    """Raise TrainingError unless an export has the tensors of the import, bit for bit."""
    import torch
    from safetensors.torch import load_file

    from megascale.model.huggingface.export import write_folder
    from megascale.model.huggingface.import_model import read_folder

    imported = read_folder(folder / "model")
    write_folder(
        folder / "exported",
        imported.family,
        imported.model,
        lambda names: {name: imported.tensors[name] for name in names},
        dtype=torch.float32,
        file_bytes=1 << 30,
    )
    exported = read_folder(folder / "exported")
    stored = load_file(folder / "model" / "model.safetensors")
    repeated = load_file(folder / "exported" / "model.safetensors")
    are_equal = [repeated[name].equal(tensor) for name, tensor in stored.items() if name in repeated]
    are_logical_equal = [exported.tensors[name].equal(tensor) for name, tensor in imported.tensors.items()]
    if exported.model != imported.model or not all(are_equal) or not all(are_logical_equal):
        raise TrainingError(f"{family}: an export has other tensors or another configuration than the import")


def _train_layouts(family: str, folder: Path) -> tuple[list[float], dict[str, float]]:
    """Return the losses of one process, and the maximum difference of each other layout's losses.

    Raises TrainingError for a layout with other losses.
    """
    _write_tokens(folder)
    expected = _train(folder, "one", ())
    layouts = {}
    for number, (name, arguments) in enumerate(_LAYOUTS.items()):
        losses = _train(folder, f"layout-{number}", arguments)
        error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        if not error <= _LOSS_LIMIT:
            raise TrainingError(f"{family}: losses of {name} differ from those of one process by {error:.1e}")
        layouts[name] = error
    return expected, layouts


def _write_tokens(folder: Path) -> None:
    """Write a data set in which each token likely follows its predecessor."""
    import numpy as np

    from megascale.data.dataset.indexed import IndexedWriter

    generator = np.random.default_rng(0)
    (folder / "data").mkdir()
    with IndexedWriter(folder / "data" / "train", np.uint16) as writer:
        for _ in range(80):
            steps = generator.choice([1, 2, 5], p=[0.8, 0.1, 0.1], size=101)
            writer.add_document([np.cumsum(steps) % _VOCAB])


def _train(folder: Path, name: str, arguments: Sequence[str]) -> list[float]:
    """Train in a folder, and return the losses of all steps. Raises TrainingError with the output of a failure."""
    from tests.forked import Forked

    command = ["train", "--model.from=model", "--data.train=data/train", f"--train.name={name}"]
    process = Forked([*command, *_SETTINGS, *_QUIET, *arguments], cwd=folder)
    try:
        output, _ = process.communicate(timeout=_TIMEOUT)
        code = process.wait()
    finally:
        process.kill()
    if code:
        raise TrainingError(f"the training {name} ended with exit code {code}: {output[-2000:]}")
    records = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]
