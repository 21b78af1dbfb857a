"""Anchors as cases and seconds: the paper's tables, the peers measured on the H200 host, vTrain's rows."""

from __future__ import annotations

import csv
import os
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulate.split import is_development
from megascale import config as configuration
from megascale.config import ModelConfig
from megascale.errors import DataError
from megascale.simulate.calibration import Calibration
from megascale.simulate.case import Case
from megascale.simulate.cluster import load_cluster
from megascale.simulate.measured_runs import Prediction, load_predictions
from megascale.simulate.scenario import Scenario, make_engine_software
from megascale.simulate.software import MEGATRON_DEEPSPEED, Software, find_stack, switch_techniques

FOLDER = Path(__file__).parent
# vTrain does not print its vocabulary; Megatron-DeepSpeed pads GPT-2's to this.
VTRAIN_VOCABULARY = 51200
# From here on the paper's table is held out: extrapolation in scale.
LARGE = 3072
# FLOP/s that the paper's MFU is a share of.
PAPER_PEAK = 312e12
VTRAIN_FILE = "steps/vtrain_multi_node_sample.csv"
TRACE_FILE = "stragglers/trace-ST.parquet"
TRACE_RESULT = "stragglers/result-ST.json"


@dataclass(frozen=True)
class Rows:
    """Measured steps of one kind.

    Attributes:
        names: what each row is.
        cases: all rows as one case of arrays.
        seconds: measured.
        gpus: of each row.
        first: whether a row is of the table's first system (Megatron-LM), where there are two.
        source: who measured.
    """

    names: tuple[str, ...]
    cases: Case
    seconds: np.ndarray
    gpus: np.ndarray
    first: np.ndarray
    source: str

    def subset(self, chosen: np.ndarray) -> Rows:
        """The rows where `chosen` holds."""
        picked = Case(**{k: v[chosen] for k, v in vars(self.cases).items()})
        names = tuple(n for n, c in zip(self.names, chosen, strict=True) if c)
        return Rows(names, picked, self.seconds[chosen], self.gpus[chosen], self.first[chosen], self.source)

    def __len__(self) -> int:
        return len(self.names)


def anchor_file(name: str) -> dict[str, Any]:
    """Return a file of measured steps as nested dictionaries."""
    return tomllib.loads((FOLDER / "anchors" / f"{name}.toml").read_text())


def list_predictions() -> list[str]:
    """Return the names of the predictions in this folder."""
    return sorted(file.stem for file in (FOLDER / "predictions").glob("*.toml"))


def load_round_predictions(name: str) -> tuple[str, list[Prediction]]:
    """Return the provenance and the predictions of one file of this folder."""
    return load_predictions(FOLDER / "predictions" / f"{name}.toml")


def find_data_folder(requested: Path | None = None) -> Path | None:
    """Return the folder of others' data: the option, MEGASCALE_ANCHORS, or ../shared/data; None if none exists."""
    if requested is not None:
        if not requested.is_dir():
            raise DataError(
                f"--data={requested} is not a folder; name the one that holds {VTRAIN_FILE} and {TRACE_FILE}"
            )
        return requested
    named = os.environ.get("MEGASCALE_ANCHORS")
    repository = FOLDER.parents[1]
    for folder in (Path(named) if named else None, Path("../shared/data"), repository.parent / "shared" / "data"):
        if folder is not None and folder.is_dir():
            return folder
    return None


def _rows(names: list[str], cases: list[Case], seconds: list[float], first: list[bool], source: str) -> Rows:
    stacked = Case.stack(cases)
    return Rows(tuple(names), stacked, np.array(seconds), np.asarray(stacked.gpus), np.array(first), source)


def strong_scaling() -> Rows:
    """The paper's 16 rows: Megatron-LM (first) and MegaScale, 175B on 256 to 12,288 GPUs."""
    tree = anchor_file("megascale")
    model, layout = ModelConfig(**tree["model_175b"]), tree["layout_175b"]
    names = []
    cases = []
    seconds = []
    first = []
    for software, batch, gpus, step, _ in tree["strong_scaling"]["rows"]:
        replica = layout["tensor"] * layout["pipeline"]
        cases.append(Case.from_model(model, find_stack(software), data=gpus // replica, batch=batch, **layout))
        names.append(f"{software} {gpus:,} GPUs, batch {batch:,}")
        seconds.append(step)
        first.append(software == "megatron-2023")
    return _rows(names, cases, seconds, first, tree["strong_scaling"]["source"])


def paper_development() -> Rows:
    """The table's rows that may be developed and fitted on: up to 1,024 GPUs."""
    rows = strong_scaling()
    return rows.subset(rows.gpus < LARGE)


def list_rounds() -> list[str]:
    """Names of the prediction files whose runs have shipped measurements."""
    return list(anchor_file("own-runs"))


def cluster_of_round(name: str) -> str:
    """Return the cluster on which the runs of a prediction file were measured."""
    return str(anchor_file("own-runs")[name].get("cluster", "h200-host"))


def load_round(name: str) -> Rows:
    """Measured steps of this project's engine for the predictions of one file, as cases under the stack assumed.

    Without those that ran on other links than the cluster's or in another layout than predicted.
    """
    table, (_, predictions) = anchor_file("own-runs")[name], load_round_predictions(name)
    excluded = {*table.get("moved", ()), *table.get("host_memory", ())}
    cluster = load_cluster(cluster_of_round(name))
    names = []
    cases = []
    seconds = []
    for prediction in predictions:
        if prediction.name in table["seconds"] and prediction.name not in excluded:
            config = prediction.config(table.get("graphs", "off"))
            software = make_engine_software(config, find_stack(prediction.software))
            scenario = Scenario(config, prediction.gpus, cluster, Calibration("none", cluster.name), software)
            names.append(prediction.name)
            cases.append(scenario.make_case())
            seconds.append(float(table["seconds"][prediction.name]))
    return _rows(names, cases, seconds, [True] * len(names), table["measured"])


def load_first_round() -> Rows:
    """The first round of own runs, which constants may be fitted on."""
    return load_round("h200")


def ablation() -> tuple[Rows, np.ndarray]:
    """The paper's ablation: cases (seconds derived from MFU are in `seconds`) and MFU in percent."""
    tree = anchor_file("megascale")
    model = ModelConfig(**tree["model_175b"])
    layout = tree["layout_175b"]
    table = tree["ablation"]
    software: Software = find_stack("megatron-2023")
    names, cases = [], []
    for technique, _ in table["rows"]:
        if technique != "baseline":
            software = switch_techniques(software, [technique], True)
        replica = layout["tensor"] * layout["pipeline"]
        cases.append(Case.from_model(model, software, data=table["gpus"] // replica, batch=table["batch"], **layout))
        names.append(technique if technique == "baseline" else f"+ {technique}")
    printed = np.array([mfu for _, mfu in table["rows"]])
    return _with_mfu(names, cases, printed, table["source"]), printed


def weak_scaling() -> tuple[Rows, np.ndarray]:
    """The paper's 530B bars: cases and MFU in percent."""
    tree = anchor_file("megascale")
    model = ModelConfig(**tree["model_530b"])
    layout = tree["layout_530b"]
    table = tree["weak_scaling"]
    names, cases = [], []
    for software, gpus, _ in table["rows"]:
        replica = layout["tensor"] * layout["pipeline"]
        cases.append(Case.from_model(model, find_stack(software), data=gpus // replica, batch=gpus, **layout))
        names.append(f"{software} {gpus:,} GPUs")
    printed = np.array([mfu for _, _, mfu in table["rows"]])
    return _with_mfu(names, cases, printed, table["source"]), printed


def _with_mfu(names: list[str], cases: list[Case], printed: np.ndarray, source: str) -> Rows:
    seconds = [
        float(case.flops) / (case.gpus * PAPER_PEAK * mfu / 100.0) for case, mfu in zip(cases, printed, strict=True)
    ]
    return _rows(names, cases, seconds, ["megatron" in n for n in names], source)


def h200_peers(host_bound: bool = False) -> Rows:
    """megatron-core's steps measured on the H200 host."""
    tree = anchor_file("h200-peers")
    model, batch = ModelConfig(**tree["model"]), tree["runs"]["batch"]
    software = find_stack("megatron-core-h200")
    names = []
    cases = []
    seconds = []
    for tensor, pipeline, virtual, data, micro, step in tree["runs"]["host_bound" if host_bound else "rows"]:
        cases.append(
            Case.from_model(
                model,
                software,
                tensor=tensor,
                pipeline=pipeline,
                virtual=virtual,
                data=data,
                micro=micro,
                batch=batch,
            )
        )
        names.append(f"GPT 13B TP{tensor} PP{pipeline}(x{virtual}) DP{data}, micro-batch {micro}")
        seconds.append(step)
    return _rows(names, cases, seconds, [True] * len(names), tree["runs"]["source"])


def load_h100_runs() -> Rows:
    """Steps of this project's engine on H100s that were known before the fifth round."""
    table, cluster = anchor_file("h100-runs")["own"], load_cluster("h100-host")
    names = []
    cases = []
    seconds = []
    for name, gpus, settings, step in table["rows"]:
        config = configuration.load(None, [*settings, "train.precision=bfloat16"])
        software = make_engine_software(config, find_stack("megascale-h200"))
        scenario = Scenario(config, gpus, cluster, Calibration("none", cluster.name), software)
        names.append(name)
        cases.append(scenario.make_case())
        seconds.append(step)
    return _rows(names, cases, seconds, [True] * len(names), table["source"])


def later_peers(machine: str, host_bound: bool = False) -> Rows:
    """Megatron-Core's steps on the rented hosts since 2026-11-23; `machine`: "peers" (H100) or "peers-h200"."""
    table = anchor_file("h100-runs")[machine]
    names = []
    cases = []
    seconds = []
    for row in table["host_bound" if host_bound else "rows"]:
        layers, vocabulary, precision, tensor, pipeline, virtual, data, micro, batch, step = row
        model = ModelConfig(layers=layers, hidden=5120, heads=40, vocab_size=vocabulary, sequence_length=2048)
        software = replace(find_stack("megatron-core-h200"), float8=precision == "float8")
        layout = {"tensor": tensor, "pipeline": pipeline, "virtual": virtual, "data": data}
        cases.append(Case.from_model(model, software, micro=micro, batch=batch, **layout))
        names.append(f"{layers} layers, {precision}, TP{tensor} PP{pipeline}(x{virtual}) DP{data}, micro-batch {micro}")
        seconds.append(step)
    return _rows(names, cases, seconds, [True] * len(names), table["source"])


def nemo_h100() -> tuple[Rows, np.ndarray]:
    """NeMo's published steps on H100, and which of them are on the development side of the split."""
    tree = anchor_file("published")
    models = {name: ModelConfig(**settings) for name, settings in tree["models"].items()}
    names = []
    cases = []
    seconds = []
    development = []
    for table_name, table in tree["nemo-h100"].items():
        for *configuration_, value in table["rows"]:
            name, precision, gpus, tensor, pipeline, virtual, micro, batch = configuration_
            model, data = models[name], gpus // (tensor * pipeline)
            software = replace(find_stack("nemo"), float8=precision == "float8")
            layout = {"tensor": tensor, "pipeline": pipeline, "virtual": virtual, "data": data}
            cases.append(Case.from_model(model, software, micro=micro, batch=batch, **layout))
            names.append(f"{name} {precision} {gpus:,} GPUs TP{tensor} PP{pipeline}(x{virtual}), micro-batch {micro}")
            tokens = batch * model.sequence_length
            seconds.append(tokens / (value * gpus) if table["value"] == "tokens" else value)
            key = " ".join([table_name, *map(str, configuration_)])
            development.append(is_development("nemo-h100", key))
    source = "NVIDIA's public tables of NeMo and Megatron-Bridge on H100"
    return _rows(names, cases, seconds, [True] * len(names), source), np.array(development)


@dataclass(frozen=True)
class ShardedRows:
    """Published steps of full sharding on one machine: its cluster, the rows, and which may be developed on."""

    cluster: str
    rows: Rows
    development: np.ndarray


def full_sharding_rows() -> list[ShardedRows]:
    """Published steps of fully sharded data parallelism, one entry per table."""
    tree = anchor_file("published")
    tables = []
    for table_name, table in tree["fsdp"].items():
        base = find_stack(table["software"])
        names = []
        cases = []
        seconds = []
        development = []
        for *configuration_, step in table["rows"]:
            name, precision, gpus, length, micro, batch, recompute = configuration_
            model = ModelConfig(**{**tree["models"][name], "sequence_length": length})
            software = replace(base, float8=precision == "float8", recompute=recompute)
            layout = {"tensor": 1, "pipeline": 1, "virtual": 1, "data": gpus}
            cases.append(Case.from_model(model, software, micro=micro, batch=batch, **layout))
            names.append(f"{name} {precision} {gpus} GPUs, {length:,} tokens, recompute {recompute}")
            seconds.append(step)
            development.append(is_development("fsdp", " ".join([table_name, *map(str, configuration_)])))
        rows = _rows(names, cases, seconds, [True] * len(names), table["source"])
        tables.append(ShardedRows(table["cluster"], rows, np.array(development)))
    return tables


def nemo_development() -> Rows:
    """The rows of `nemo_h100` that may be developed and fitted on."""
    rows, development = nemo_h100()
    return rows.subset(development)


def korthikanti() -> Rows:
    """Megatron-LM's steps of Korthikanti et al. 2022: full recomputation, and sequence parallelism with recomputed
    core attention."""
    tree = anchor_file("published")["korthikanti-2022"]
    names = []
    cases = []
    seconds = []
    for name, layers, hidden, heads, gpus, pipeline, virtual, micro, batch, full, selective in tree["rows"]:
        model = ModelConfig(layers=layers, hidden=hidden, heads=heads, vocab_size=51200, sequence_length=2048)
        layout = {"tensor": 8, "pipeline": pipeline, "virtual": virtual, "data": gpus // 8 // pipeline, "micro": micro}
        older = replace(find_stack("megatron-2023"), attention="unfused", sequence_parallel=False, recompute="full")
        newer = replace(find_stack("megatron-2023"), attention="unfused", recompute="core-attention")
        for how, software, step in (("full", older, full), ("core attention", newer, selective)):
            cases.append(Case.from_model(model, software, batch=batch, **layout))
            names.append(f"{name}, {gpus} GPUs, {how} recomputed")
            seconds.append(step)
    return _rows(names, cases, seconds, [True] * len(names), tree["source"])


def vtrain_development(rows: Rows) -> np.ndarray:
    """Return which rows of vTrain are development rows, by the hash of their configuration."""
    c = rows.cases
    figures = (c.layers, c.hidden, c.heads, c.sequence, c.tensor, c.pipeline, c.data, c.micro, c.batch)
    keys = [" ".join(str(int(f[i])) for f in figures) for i in range(len(rows))]
    return np.array([is_development("vtrain-multi", key) for key in keys])


def vtrain(folder: Path) -> Rows:
    """vTrain's measured rows, in the file's order. DataError if the file is damaged."""
    path = folder / VTRAIN_FILE
    names = []
    cases = []
    seconds = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            table = list(csv.reader(file))[1:]
        for row in table:
            batch, micro, hidden, heads, layers, sequence, tensor, data, pipeline = (int(float(x)) for x in row[2:11])
            model = ModelConfig(
                layers=layers, hidden=hidden, heads=heads, vocab_size=VTRAIN_VOCABULARY, sequence_length=sequence
            )
            cases.append(
                Case.from_model(
                    model,
                    MEGATRON_DEEPSPEED,
                    tensor=tensor,
                    pipeline=pipeline,
                    virtual=1,
                    data=data,
                    micro=micro,
                    batch=batch,
                )
            )
            names.append(f"{row[0]}B TP{tensor} DP{data} PP{pipeline}, micro-batch {micro}")
            seconds.append(float(row[11]) / 1e3)
    except (OSError, ValueError, IndexError) as error:
        raise DataError(f"{path} cannot be read as vTrain's table: {error}; take a fresh copy") from None
    return _rows(names, cases, seconds, [True] * len(names), "vTrain (KAIST, MICRO 2024), multi-node sample")
