"""Measure how often slow machines are detected and healthy ones are named by mistake.

The jobs are replayed: thousands of small ones, and one of real size.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.observe.replayed_job import Faults, machine_noise, replayed
from benchmarks.observe.replayed_runs import keep
from benchmarks.observe.synthetic_spans import Job
from megascale.core import strict_json
from megascale.data.dataset.indexed import IndexedWriter
from megascale.errors import ConfigError
from megascale.observe.analysis.rank_times import RankTimes, choose_window, read_rank_times
from megascale.observe.analysis.slow_ranks import judge_ranks
from megascale.observe.analysis.stragglers import Stragglers, find_stragglers
from megascale.observe.store.tables import SpanTables
from megascale.resilience.faults.inject import Options, inject

STEPS = 50
SLOW, SLOW_LINK = 1.05, 4.0
LOOKS = {2: 2000, 4: 2000, 8: 1000, 16: 1000, 64: 400, 1024: 40}
KINDS = ("clean", "gpu and link", "two")
_SLOWER = (0.0, 0.05, 0.10)


def look(folder: Path) -> Stragglers:
    """Return the slow machines that the analysis names in a run's last STEPS steps."""
    with SpanTables(folder, threads=2) as tables:
        return find_stragglers(read(tables), tables)


def read(tables: SpanTables) -> RankTimes:
    """The parts of a replayed run's steps."""
    return read_rank_times(tables, 1, 1, STEPS)


def measure(folder: Path, runs: int, data: int, seed: int, minutes: float = math.inf) -> dict[str, Any]:
    """Replayed runs: `runs` healthy ones, as many with a slow GPU and a slow link, and a quarter of it with two slow
    GPUs.

    Each case is kept in `folder` when it is done: a call with the same folder and settings goes on behind it.

    Args:
        minutes: after so many no other case is begun; the record's "left" says how many are to do.
    """
    job, deadline = Job(data=data), time.monotonic() + 60 * minutes
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"cases-{runs}-{data}-{seed}.jsonl"
    if file.exists():
        done = [strict_json.loads(line) for line in file.read_text().splitlines()]
    else:
        done = []
    cases = _cases(job.world, runs, seed)
    for kind, number, name in cases[len(done) :]:
        if time.monotonic() > deadline:
            break
        faults = Faults()
        if kind == "gpu and link":
            faults = Faults({name[0]: SLOW}, {name[1]: SLOW_LINK})
        elif kind == "two":
            faults = Faults(dict.fromkeys(name, SLOW))
        began = time.perf_counter()
        run = keep(folder / "replayed", job, replayed(job, STEPS, seed + 1000 * number + len(kind), faults))
        retained = time.perf_counter()
        item = _summarise(look(run)) | {"kind": kind, "injected": name if kind != "clean" else []}
        done.append(item | {"replay_seconds": retained - began, "look_seconds": time.perf_counter() - retained})
        with open(file, "a") as out:
            out.write(strict_json.dumps(done[-1]) + "\n")
    record: dict[str, Any] = {"world": job.world, "steps": STEPS, "seed": seed, "slow": SLOW, "slow_link": SLOW_LINK}
    record |= {kind: [item for item in done if item["kind"] == kind] for kind in KINDS}
    return record | {"left": len(cases) - len(done)}


def _cases(world: int, runs: int, seed: int) -> list[tuple[str, int, list[int]]]:
    """(kind, number, ranks for faults) of all cases, in their order."""
    random = np.random.default_rng(seed)
    counts = dict(zip(KINDS, (runs, runs, max(1, runs // 4)), strict=True))
    return [
        (kind, number, random.choice(world, 2, replace=False).tolist())
        for kind, count in counts.items()
        for number in range(count)
    ]


def _summarise(result: Stragglers) -> dict[str, Any]:
    return {
        "gpus": [
            item.slow_rank.rank for item in result.ranks if item.slow_rank.state != "passing" and item.cause == "GPU"
        ],
        "others": [
            item.slow_rank.rank for item in result.ranks if item.slow_rank.state != "passing" and item.cause != "GPU"
        ],
        "passing": sum(item.slow_rank.state == "passing" for item in result.ranks),
        "links": [list(item.ranks) for item in result.links],
        "slower": [item.slow_rank.excess for item in result.ranks if item.slow_rank.state == "persistent"],
        "confidence": [item.slow_rank.confidence for item in result.ranks if item.slow_rank.state == "persistent"],
        "spread": result.judgement.spread,
        "limit": result.judgement.limit,
    }


def scores(record: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the number of detected cases, and of all cases."""
    clean = record["clean"]
    pair = record["gpu and link"]
    two = record["two"]
    return {
        "clean runs without a false alarm": (
            sum(not (o["gpus"] or o["others"] or o["links"]) for o in clean),
            len(clean),
        ),
        f"one GPU {SLOW - 1:.0%} slow found": (sum(o["injected"][0] in o["gpus"] for o in pair), len(pair)),
        "slow link told from slow GPU": (
            sum(o["gpus"] == o["injected"][:1] and o["links"] == [o["injected"][1:]] and not o["others"] for o in pair),
            len(pair),
        ),
        "two slow GPUs found, none else": (sum(sorted(o["gpus"]) == sorted(o["injected"]) for o in two), len(two)),
    }


def missed(record: dict[str, Any]) -> list[str]:
    """Return the cases that were not detected in every run."""
    return [f"stragglers: {name}: {good} of {of}" for name, (good, of) in scores(record).items() if good < of]


def lines(record: dict[str, Any]) -> list[str]:
    """The figures in words."""
    result = [f"stragglers: {record['world']:,} ranks, {record['steps']} steps, seed {record['seed']}"]
    result += [f"  {name}: {good} of {of}" for name, (good, of) in scores(record).items()]
    every = [item for kind in KINDS for item in record[kind]]
    median = {key: float(np.median([run[key] for run in every])) for key in ("spread", "limit", "look_seconds")}
    result.append(
        f"  healthy ranks seen to differ by {median['spread']:.2%}, limit {median['limit']:.1%}; a look takes "
        f"{median['look_seconds']:.1f} s"
    )
    if record["left"]:
        result.append(f"  {record['left']} cases are left: the same call with the same --folder goes on")
    return result


# small jobs -----------------------------------------------------------------------------------------------------------


def error_rates(seed: int, looks: dict[int, int] | None = None) -> list[dict[str, Any]]:
    """False alarms a look, and how often a rank 5% or 10% slower is found, by the number of comparable ranks.

    The ranks' noise is that of the replayed jobs, without their passing slow spells; "differ by 4%": two ranks that
    differ by -4% to 4% for good, the slower of which is not a fault.
    """
    random = np.random.default_rng(seed)
    steps, result = np.arange(1, STEPS + 1), []
    for world, count in (looks or LOOKS).items():
        for differ in (0.0, 0.04) if world == 2 else (0.0,):
            rates = []
            for slower in _SLOWER:
                hits = 0
                for _ in range(count):
                    busy = machine_noise(world, STEPS, random, spells=0).T.astype(np.float64)
                    if differ:
                        busy /= np.median(busy, 1, keepdims=True)
                        busy[0] *= 1 + random.uniform(-differ, differ)
                    busy[0] *= 1 + slower
                    named = {
                        item.rank
                        for item in judge_ranks(busy, np.zeros(world, np.int64), steps).slow
                        if item.state != "passing"
                    }
                    hits += bool(named) if not slower else 0 in named
                rates.append(hits / count)
            result.append(
                {"ranks": world, "differ": differ, "looks": count, **dict(zip(map(str, _SLOWER), rates, strict=True))}
            )
    return result


def rate_lines(rates: list[dict[str, Any]]) -> list[str]:
    """The figures in words."""
    return ["  ranks  false alarms  5% found  10% found  looks"] + [
        f"  {item['ranks']:5d}  {item['0.0']:12.2%}  {item['0.05']:8.1%}  {item['0.1']:9.1%}  {item['looks']:5d}"
        + (f"  (differ by {item['differ']:.0%} for good)" if item["differ"] else "")
        for item in rates
    ]


# a real job -----------------------------------------------------------------------------------------------------------

# Computes long enough for a tenth of them to be milliseconds.
_JOB = """
[model]
layers = {layers}
hidden = {hidden}
heads = {heads}
sequence_length = {length}
vocab_size = 64
vocab_multiple = 8
[data]
train = ["{folder}/tokens"]
[train]
name = "run"
runs = "{folder}"
steps = 1000000
micro_batch = {batch}
global_batch = {whole}
device = "{device}"
[checkpoint]
interval = 0
at_end = false
[parallel]
{parallel}
[resilience]
faults = true
[observe]
tensorboard = false
progress = false
"""
_MODELS = {
    "cpu": {"layers": 4, "hidden": 128, "heads": 4, "length": 128, "batch": 4},
    # A host that launches for longer than the GPU computes would hide what the GPU computes more.
    "cuda": {"layers": 12, "hidden": 2048, "heads": 16, "length": 2048, "batch": 8},
}
_MICRO_BATCHES = {"cpu": 4, "cuda": 2}  # of a replica of one stage
_AXES = ("tensor", "pipeline", "virtual_stages", "data")


def axes(layout: str) -> dict[str, int]:
    """Such as "tensor=2,data=2" as numbers; ConfigError naming what is wrong."""
    result = {}
    for part in layout.split(","):
        key, _, value = part.partition("=")
        if key not in _AXES or not value.isdigit() or int(value) < 1:
            raise ConfigError(
                f"--layout={layout}: {part!r} is not one of {', '.join(_AXES)} with a number, as in data=2"
            )
        result[key] = int(value)
    if ranks(result) < 2:
        raise ConfigError(f"--layout={layout} has one rank; a slow one is told from others, as in data=2")
    return result


def ranks(axes: dict[str, int]) -> int:
    """Ranks of a layout."""
    return math.prod(number for axis, number in axes.items() if axis != "virtual_stages")


def local(
    folder: Path, device: str, seconds: float = 60.0, slower: float = 0.10, axes: dict[str, int] | None = None
) -> dict[str, Any]:
    """A job of two ranks, or laid out by `axes`, that is healthy for `seconds`, and one whose rank 1 computes `slower`
    as long again each step."""
    axes = axes or {"data": 2}
    clean = _train(folder / "clean", device, seconds, 0.0, axes)
    typical = float(np.nanmedian(clean.times.running))
    slow = _train(folder / "slow", device, seconds, slower * typical, axes)
    by = {}
    for name, match in (("clean", clean), ("slow", slow)):
        by[name] = _summarise(match) | {
            "steps": len(match.times.steps),
            "states": [
                (item.slow_rank.rank, item.slow_rank.state, item.cause, item.slow_rank.excess) for item in match.ranks
            ],
            "all": match.judgement.excess.tolist(),
            "limit": match.judgement.limit,
            "step_seconds": float(np.nanmedian(match.times.seconds)),
        }
    details = {"device": device, "layout": axes, "ranks": ranks(axes), "seconds": seconds, "slower": slower}
    return {**details, "load": os.getloadavg()[0], **by}


def _train(folder: Path, device: str, seconds: float, added: float, axes: dict[str, int]) -> Stragglers:
    """Train those ranks for so long; rank 1 computes `added` seconds per step longer. Return the analysis."""
    folder.mkdir(parents=True)
    _write_tokens(folder / "tokens")
    file = folder / "job.toml"
    model = _MODELS[device]
    count = _MICRO_BATCHES[device] * axes.get("pipeline", 1) * axes.get("data", 1)
    parallel = "\n".join(f"{axis} = {number}" for axis, number in axes.items())
    file.write_text(_JOB.format(folder=folder, device=device, parallel=parallel, whole=count * model["batch"], **model))
    run = folder / "run"
    with open(folder / "log.txt", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megascale", "train", str(file)], stdout=log, stderr=log,
            env={"OMP_NUM_THREADS": "1", **os.environ}, start_new_session=True,
        )  # fmt: skip
        try:
            _wait_until(lambda: (run / "metrics.jsonl").exists(), process, folder)
            if added:
                inject(run, "slow-compute", Options(rank=1, seconds=added))
            time.sleep(seconds)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)
    with SpanTables(run) as tables:
        attempt, first, last = choose_window(tables)
        result = find_stragglers(read_rank_times(tables, attempt, first, last), tables)
    return result


def _write_tokens(path: Path) -> None:
    """A small token file."""
    random = np.random.default_rng(0)
    with IndexedWriter(path, np.uint16) as writer:
        for _ in range(400):
            writer.add_document([random.integers(0, 64, 2000)])


def _wait_until(condition: Any, process: Any, folder: Path) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise OSError(f"the run of {folder} did not begin: {(folder / 'log.txt').read_text()[-2000:]}")
        time.sleep(0.2)


def local_lines(record: dict[str, Any]) -> list[str]:
    """The figures in words."""
    result = []
    where = f"{record['device']}, {record['ranks']} ranks"
    for name in ("clean", "slow"):
        single = record[name]
        output = (
            ", ".join(f"rank {r} {by:+.1%} {state} ({cause})" for r, state, cause, by in single["states"]) or "none"
        )
        result.append(
            f"  {where}, {name}: {single['steps']} steps of {1e3 * single['step_seconds']:.0f} ms in "
            f"{record['seconds']:.0f} s, limit {single['limit']:.1%}, rank 1 {single['all'][1]:+.1%}; named: {output}"
        )
    return result


def local_missed(record: dict[str, Any]) -> list[str]:
    """Return whether the analysis names the slow rank and no other."""
    report = []
    if record["clean"]["gpus"] or record["clean"]["others"]:
        report.append(f"stragglers: a healthy rank of {record['ranks']} on {record['device']} was named")
    if record["slow"]["gpus"] + record["slow"]["others"] != [1]:
        report.append(f"stragglers: a rank {record['slower']:.0%} slow on {record['device']} was not found")
    return report
