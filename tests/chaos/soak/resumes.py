"""`tests.chaos soak --parts resumes`: a tiny run is stopped and started again with one setting changed at random.

Either the start is refused and nothing of the run has changed, or it goes on, says what changed, and its ledger shows
each window trained once.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megascale.config import Config, load
from megascale.config.parts import MODEL_PARTS
from megascale.errors import MegascaleError
from tests.chaos.soak.command import Report, SoakCase

_STOPPED, _STEPS = 5, 9
_BASE = """
[model]
layers = 2
hidden = 16
heads = 2
sequence_length = 16
vocab_size = 64
vocab_multiple = 8
positions = "rotary"

[data]
train = ["{data}/one", "{data}/two"]
valid = "{data}/valid"

[train]
runs = "{runs}"
name = "soak"
steps = {steps}
micro_batch = 2
global_batch = 4
device = "cpu"
threads = 1

[checkpoint]
interval = 2
linger = 1.0

[observe]
tensorboard = false
"""
# Reaches for the network; is never saved.
_LEFT_OUT = ("observe.wandb", "rendezvous.password")
# Number of ranks: these start processes.
_OF_SEVERAL = ("parallel.tensor", "parallel.pipeline", "parallel.data", "data.loader")


def state_of(run: Path) -> dict[str, str]:
    """Return the state that a refused start must not change: every file of a run folder but its events,
    status and logs, and its spans, which the service of the training before may still write; hashed."""
    report = ("events.jsonl", "status", "logs", "flight", "driver", "journal", "spans")
    return {
        str(file.relative_to(run)): hashlib.blake2b(file.read_bytes()).hexdigest()
        for file in sorted(run.rglob("*"))
        if file.is_file() and not file.relative_to(run).parts[0].startswith(report)
    }


def run(cases: range, seed: int, folder: Path, report: Report) -> None:
    """Make the run once, then the cases on copies of it."""
    rng = random.Random(seed)
    _write_data(folder / "data", seed)
    file = folder / "soak.toml"
    file.write_text(_BASE.format(data=folder / "data", runs=folder / "base", steps=_STEPS))
    _train(load(file, [f"--train.stop_after={_STOPPED}"]))
    keys = [key for key in _keys() if key not in _LEFT_OUT]
    chosen: list[str] = []
    for number in cases:
        if not chosen:  # all settings before one comes again
            chosen = rng.sample(keys, len(keys))
        runs = folder / f"case-{number}"
        shutil.copytree(folder / "base", runs)
        report(_case(file, runs, chosen.pop(), folder, rng))


def _write_data(folder: Path, seed: int) -> None:
    from megascale.data.dataset.indexed import IndexedWriter

    folder.mkdir()
    draw = np.random.default_rng(seed)
    for name, documents in (("one", 30), ("two", 20), ("three", 20), ("valid", 4)):
        with IndexedWriter(folder / name, np.uint16) as writer:
            for _ in range(documents):
                writer.add_document([draw.integers(0, 64, size=101)])


def _keys() -> Iterator[str]:
    for name, field in Config.model_fields.items():
        for key in typing.cast(Any, field.annotation).model_fields:
            yield f"{name}.{key}"


def _case(file: Path, runs: Path, key: str, folder: Path, rng: random.Random) -> SoakCase:
    before = load(file)
    value = _another(key, before, folder, rng)
    name = f"{key}={value}"
    options = [f"--train.runs={runs}", f"--{name}"]
    base = runs / before.train.name
    hashed = state_of(base)
    try:
        config = load(file, options)
    except MegascaleError as error:
        return SoakCase(name, True, f"no such configuration: {_short(error)}")
    try:
        output = _train_processes(file, options) if key in _OF_SEVERAL else _train(config)
    except _Refused as refused:
        changed = sorted(k for k, v in {**hashed, **state_of(base)}.items() if hashed.get(k) != v)
        if changed:
            return SoakCase(name, False, f"refused ({_short(refused)}), but changed {', '.join(changed)}")
        return SoakCase(name, True, f"refused: {_short(refused)}")
    except Exception as error:
        return SoakCase(name, False, f"{type(error).__name__}: {_short(error)}")
    faults = _faults(config, key, base, hashed, output, started=config.run_folder != base)
    return SoakCase(name, not faults, "; ".join(faults) or "went on, each window once")


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def _faults(config: Config, key: str, base: Path, hashed: dict[str, str], output: str, started: bool) -> list[str]:
    """Return the errors of a start that was accepted."""
    from megascale.data.dataset.ledger import check_ledger
    from megascale.data.dataset.samples import SampleSource
    from megascale.train.run_folder import RunFolder, read_records

    run = RunFolder(config.run_folder)
    lines = read_records(run.samples)
    faults = check_ledger(
        lines,
        SampleSource(
            config.data, config.model.sequence_length, vocab_size=config.model.vocab_size, seed=config.train.seed
        ),
    ).faults
    steps = max(config.train.steps, 0 if started or key == "checkpoint.resume" else _STOPPED)
    if len(lines) != steps:
        faults.append(f"{steps} steps wanted, the ledger has {len(lines)}")
    metrics = [r["step"] for r in read_records(run.metrics) if "loss" in r]
    if metrics != list(range(1, len(lines) + 1)):
        faults.append("metrics have other steps than the ledger")
    if started:
        faults += ["another run's folder was changed"] * (state_of(base) != hashed)
        return faults
    last = [r for r in read_records(run.events) if r["event"] in ("resumed", "run_started")][-1]
    if last["event"] == "resumed" and key not in ("checkpoint.accept_changes", "train.runs"):
        saved = f"{key} " in output.partition("settings changed")[2]
        faults += [] if saved and key in last.get("changed", {}) else [f"nothing was said of {key}"]
    elif last["event"] == "run_started" and key != "checkpoint.resume":
        faults.append("began at step 0 again")
    return faults


class _Refused(Exception):
    """A start that was refused: with what words."""


def _train(config: Config) -> str:
    """Train in this process; what was printed. _Refused where it says that the start cannot be."""
    from megascale.api import train

    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(config)
    except MegascaleError as error:
        if error.exit_code == 1:
            raise
        raise _Refused(str(error)) from None
    return output.getvalue()


def _train_processes(file: Path, options: list[str]) -> str:
    """Train as `_train` by the command line, which starts a process for each rank of the layout."""
    command = [sys.executable, "-m", "megascale.cli.main", "train", str(file)] + options
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    if result.returncode in (2, 3, 4):
        raise _Refused(result.stderr)
    if result.returncode:
        raise RuntimeError(f"exit code {result.returncode}: {result.stderr[-2000:]}")
    return result.stdout


def _another(key: str, config: Config, folder: Path, rng: random.Random) -> str:
    """A value other than the one in force, as it is written on the command line; valid where one is found soon."""
    data = folder / "data"
    several: dict[str, list[Any]] = {
        "data.train": [f"{data}/two,{data}/one", f"{data}/one", f"{data}/one,{data}/three", _moved(data, rng)],
        "data.valid": [f"{data}/three"],
        "data.weights": ["1,2", "30,20"],
        "data.tokenizer": [f"{data}/none.json"],
        "data.text_key": ["body"],
        "checkpoint.location": [str(folder / "elsewhere")],
        "checkpoint.accept_changes": ["train.seed", "run,optimizer.name"],
        "train.name": ["other"],
        "train.runs": [str(folder / f"runs-{rng.randrange(1 << 30)}")],
        "train.sample_prompt": ["x"],
        "train.stop_after": [10],
        "model.preset": ["gpt2-124m"],
        "model.layer_pattern": ["SL"],
        "model.kv_heads": [1, 2],
        "model.head_dim": [8, 16],
        "model.ffn_hidden": [32, 64],
        "parallel.layer_split": ["2"],
        "rendezvous.url": ["redis://127.0.0.1:1"],
        "resilience.listen": ["127.0.0.2"],
        "resilience.log_patterns": ["x"],
        "optimizer.trust_max": [5.0],
        "parallel.tensor": [2],
        "parallel.pipeline": [2],
        "parallel.data": [2],
    }
    section, _, name = key.partition(".")
    old = getattr(getattr(config, section), name)
    annotation = type(getattr(config, section)).model_fields[name].annotation
    named = [name for name in MODEL_PARTS[key].names() if name != old] if key in MODEL_PARTS else []
    candidates = several.get(key) or named or _candidates(annotation, old, rng)
    rng.shuffle(candidates)
    for value in candidates:
        with contextlib.suppress(MegascaleError):
            load(folder / "soak.toml", [f"--{key}={value}"])
            return str(value)
    return str(candidates[0])


def _moved(data: Path, rng: random.Random) -> str:
    """The same files elsewhere."""
    location = data.with_name(f"moved-{rng.randrange(1 << 30)}")
    shutil.copytree(data, location)
    return f"{location}/one,{location}/two"


def _candidates(annotation: Any, old: Any, rng: random.Random) -> list[Any]:
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)] or [annotation]
    if typing.get_origin(annotation) is Literal:
        return [json.dumps(v) if isinstance(v, int) else v for v in kinds if v != old]
    if bool in kinds:
        return ["false" if old else "true"]
    if int in kinds:
        base = old or 0
        return [v for v in (base + 1, base * 2, max(base // 2, 1), rng.randrange(1, 4)) if v != old]
    if float in kinds:
        base = old or 0.25
        return [v for v in (base * 1.5, base / 2, base + 0.125) if v != old]
    return [f"value-{rng.randrange(100)}"]
