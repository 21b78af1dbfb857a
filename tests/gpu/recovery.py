"""Kill a rank, or all of a node, of a launched job on real GPUs: the waterfall from the kill to the next new step.

One file to run on a GPU host; it needs megascale with its `driver` extra:

    python -m tests.gpu.recovery --preset gpt-13b --kind rank --kind node --out recovery.json

The job is `megascale launch` on two nodes that share the machine's GPUs, on random tokens, with copies of every step
in the memory of both nodes. It has half of the preset's layers, or fewer if GPUs or memory hold no more. Kinds:

    rank       SIGKILL to the last rank; its state is in its own node's memory
    node       SIGKILL to the last node's agent, its ranks and its checkpoint service. The agent starts again on the
               same machine, and the state comes from the other node's copies
    lost-node  the same, and the machine does not come back: a spare node takes its ranks (--resilience.spares=1, with
               GPUs of its own)

`lost-node` is the test of a lost machine, and `node` that of a machine whose processes were killed. Both free the
memory of the killed processes on the host of the survivors, which a machine that is really lost does not do.

`--job` runs several jobs at the same time on one host, each on GPUs of its own, with a process of this script, a folder
and a file of its own. Its text has the kind of kill, the GPUs and any settings:

    python -m tests.gpu.recovery --job "rank 0,1 --resilience.nodes=1" --job "node 2,3" --kills 1 --out recovery.json

Each job prints its table and a line of JSON per recovery, and writes recovery-rank.json or recovery-node.json. Jobs
share the disk: after a recovery from memory a job writes a checkpoint, for 28 GB per rank during tens of seconds.

`--keep-seconds 10 0` compares: one job per value of resilience.keep_seconds, each with its share of --seconds and a
file of its own (recovery-keep-10.json). `--logs FOLDER` collects the ends of all logs, the driver's events, and where
ranks stood if a recovery did not end.

The script prints an estimate of the seconds until the end of the first recovery. With fewer --seconds it starts no job.
Before the first kill it waits until all memory for snapshots is prepared, and until the processes of a spare wait.

Called again with the same --out, only what is missing is done; after --seconds the job is ended and what came is kept.
What rank 0 did from second to second is kept in the file ("stacks"), what the driver found and did too ("events"), and
what went wrong that no kill of this script explains ("unasked", then with the ends of "logs"), of which there should be
nothing. Each step has a sum of the weights' bits: steps that are done again must come to the same ones (the job has
kernels.deterministic), and so must what was loaded ("weights": how many were compared, and those that differ). Any
setting can follow as --section.key=value; `--preset tiny --train.device=cpu` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.harness.launched import Launched, Steps, phases
from megascale.config import load_command_line
from megascale.core.gpus import visible_gpu_names
from megascale.core.host_memory import checkpoint_bytes
from megascale.core.layout import lay_out
from megascale.core.recovery_record import PHASES, RecoveryRecord, format_numbers
from megascale.core.status import read_status
from megascale.errors import FitError
from megascale.resilience.driver.start_driver import prepare
from tests.chaos.local.fault_cases import CASES
from tests.gpu.command_line import make_parser

# Seconds of one H100 80 GB host with GPT 13B of 14 layers, two ranks and one spare (2026-11-28), for the estimate.
START_SECONDS = 25.0  # from launch to the first step
SPARE_SECONDS = 35.0  # from the first step until a spare's processes wait for their attempt
SNAPSHOT_RATE = 0.5e9  # bytes of a rank's state per second until the first snapshot is at the peer; small pages
STEP_SECONDS = 2.0
LIMIT = 240.0  # seconds for a start or a recovery
ENDING = 20.0  # kept for the job's end
FIRST_KILL = 30.0  # seconds that must remain for the first kill and its recovery; later kills go by those measured
FRAMES = 4  # of a stack, the innermost
STEPS = 2  # between the first snapshot, or a recovery, and the next kill; default of --steps
FIRST_STEP_SECONDS = 10.0  # from the first step's report until ranks have logged its results
MEASURED_STEPS = 8  # before a kill
HOST, GPU = 0.85, 3 * 2**30  # of the host's memory and beyond a GPU's tensors, what a job may not count on
KINDS = {"rank": "kill-rank", "node": "kill-agent", "lost-node": "kill-node"}
COLUMNS = PHASES + ("total",)  # seconds

SETTINGS = """
[model]
vocab_size = 50304
[data]
train = ["{folder}/train"]
[train]
runs = "{folder}/runs"
steps = 1000000
micro_batch = 2
global_batch = 16
[kernels]
deterministic = true
[checkpoint]
interval = 0
at_end = false
background = true
memory_interval = 1
memory_wait = true
replicas = true
[resilience]
nodes = 2
spares = 0
test_spares = false
faults = true
checksum_interval = 1
retries = 100
respawns = 100
[observe]
tensorboard = false
progress = false
"""


def main(arguments: list[str] | None = None) -> int:
    """0: all recovered, or out of time; 1: a kill did not lead to a new step, or something else went wrong."""
    parser = make_parser(__doc__)
    parser.add_argument("--preset", default="gpt-13b", help="preset of the model; default: gpt-13b")
    parser.add_argument("--layers", type=int, help="default: half of the preset's, or as many as fit")
    parser.add_argument("--kind", action="append", choices=KINDS, help="default: rank and node")
    parser.add_argument("--kills", type=int, default=3, help="of each kind")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps before each kill, after a snapshot")
    parser.add_argument("--seconds", type=float, default=540.0, help="end after that, even if results are missing")
    parser.add_argument("--out", type=Path, default=Path("recovery.json"), help="file for the results as JSON")
    parser.add_argument("--keep-seconds", nargs="+", type=float, default=[], help="compare these values")
    parser.add_argument("--logs", type=Path, help="folder for the ends of logs and for where ranks stood")
    parser.add_argument("--job", action="append", type=read_job, help="KIND GPUS SETTINGS of a job; jobs run together")
    inputs, settings = parser.parse_known_args(arguments)
    if inputs.job:
        return run_together(inputs, settings)
    settings = [f"--model.preset={inputs.preset}"] + settings
    if not inputs.keep_seconds:
        return measure(inputs, settings)
    deadline = time.monotonic() + inputs.seconds
    codes = []
    for number, seconds in enumerate(inputs.keep_seconds):
        name = f"keep-{seconds:g}"
        share = argparse.Namespace(**vars(inputs))
        share.out = inputs.out.with_name(f"{inputs.out.stem}-{name}{inputs.out.suffix}")
        share.logs = inputs.logs and inputs.logs / name
        share.seconds = (deadline - time.monotonic()) / (len(inputs.keep_seconds) - number)
        print(f"resilience.keep_seconds={seconds:g}", flush=True)
        try:
            codes.append(measure(share, settings + [f"--resilience.keep_seconds={seconds:g}"]))
        except SystemExit as error:
            print(error, flush=True)
            codes.append(1)
    return max(codes)


class ConcurrentJob(NamedTuple):
    """One of several jobs on this host.

    Attributes:
        kind: kind of kill, a key of KINDS.
        gpus: indices among the GPUs that this process sees; none: the job uses no GPU.
        settings: settings of this job only.
    """

    kind: str
    gpus: tuple[int, ...]
    settings: tuple[str, ...]


def read_job(text: str) -> ConcurrentJob:
    """Return the job that a text describes. Raises ArgumentTypeError if the text is wrong."""
    words = shlex.split(text)
    if len(words) < 2 or words[0] not in KINDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not KIND GPUS SETTINGS with a kind of {', '.join(KINDS)}")
    gpus = () if words[1] == "none" else words[1].split(",")
    if not all(gpu.isdecimal() for gpu in gpus):
        raise argparse.ArgumentTypeError(f"{text!r}: write the indices of GPUs as 0,1 or write none")
    return ConcurrentJob(words[0], tuple(int(gpu) for gpu in gpus), tuple(words[2:]))


def make_job_command(job: ConcurrentJob, inputs: argparse.Namespace, settings: list[str]) -> list[str]:
    """Return the command of this script that measures one of several jobs.

    Args:
        settings: settings of all jobs.
    """
    command = [sys.executable, "-m", "tests.gpu.recovery", "--preset", inputs.preset, "--kind", job.kind]
    command += ["--kills", str(inputs.kills), "--steps", str(inputs.steps), "--seconds", f"{inputs.seconds:g}"]
    command += ["--out", str(inputs.out.with_name(f"{inputs.out.stem}-{job.kind}{inputs.out.suffix}"))]
    if inputs.layers:
        command += ["--layers", str(inputs.layers)]
    if inputs.logs:
        command += ["--logs", str(inputs.logs / job.kind)]
    return command + settings + list(job.settings)


def make_job_environment(job: ConcurrentJob) -> dict[str, str]:
    """Return the environment of a job, which sees its own GPUs only."""
    names = visible_gpu_names(max(job.gpus, default=-1) + 1)
    if job.gpus and max(job.gpus) >= len(names):
        sys.exit(f"--job={job.kind} names GPU {max(job.gpus)}, and CUDA_VISIBLE_DEVICES has {len(names)} GPUs")
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in job.gpus)}


def run_together(inputs: argparse.Namespace, settings: list[str]) -> int:
    """Measure several jobs at the same time, and return the highest exit code of their processes."""
    kinds = [job.kind for job in inputs.job]
    gpus = [gpu for job in inputs.job for gpu in job.gpus]
    if len(set(kinds)) < len(kinds) or len(set(gpus)) < len(gpus):
        sys.exit("each --job needs a kind and GPUs that no other --job has")
    processes, readers = [], []
    try:
        for job in inputs.job:
            process = subprocess.Popen(
                make_job_command(job, inputs, settings),
                env=make_job_environment(job),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            processes.append(process)
            readers.append(threading.Thread(target=_print_lines, args=(job.kind, process.stdout)))
            readers[-1].start()
        return max(process.wait() for process in processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # it ends its job
        for reader in readers:
            reader.join()


def _print_lines(kind: str, lines: IO[str]) -> None:
    """Print the lines of a job as they come, each with the job's kind."""
    for line in lines:
        print(f"{kind:<9} | {line.rstrip()}", flush=True)


def measure(inputs: argparse.Namespace, settings: list[str]) -> int:
    """Measure one job; 0 and 1 as for `main`."""
    deadline = time.monotonic() + inputs.seconds
    record: dict[str, Any] = {"settings": settings, "starts": [], "kills": []}
    if inputs.out.exists():
        record = json.loads(inputs.out.read_text())
        if record["settings"] != settings:
            sys.exit(f"--out={inputs.out} holds kills of {' '.join(record['settings'])}; name another file")
    missing = [
        (kind, number)
        for number in range(inputs.kills)
        for kind in inputs.kind or ["rank", "node"]
        if not any((row["kind"], row["number"]) == (kind, number) and row["total"] for row in record["kills"])
    ]
    if missing and inputs.seconds <= ENDING:
        print(f"{inputs.seconds:.0f} s are too few: {ENDING:.0f} s are kept for the job's end")
    elif missing:
        with tempfile.TemporaryDirectory(prefix="megascale-recovery-", ignore_cleanup_errors=True) as name:
            run(Path(name), inputs, settings, record, missing, deadline)
    if record["kills"]:
        show(record)
    for line in record.get("unasked", ()):
        print(f"not of this script's doing: {line}")
    done = {(row["kind"], row["number"]) for row in record["kills"] if row["total"]}
    remaining = [f"{kind} {number + 1}" for kind, number in missing if (kind, number) not in done]
    if remaining:
        print(f"missing: {', '.join(remaining)}; call again with the same --out")
    failed = record.get("unasked") or any(not row["total"] for row in record["kills"])
    compared, second = record.get("weights", (0, []))
    if record["kills"]:
        print(f"weights: {compared} sums of steps that were done again are the same, {len(second)} are not")
    return 1 if failed or second else 0


def run(
    folder: Path,
    inputs: argparse.Namespace,
    settings: list[str],
    record: dict[str, Any],
    missing: list[tuple[str, int]],
    deadline: float,
) -> None:
    """Start the job and kill one after the other; `record` is written after each."""
    file = make(folder)
    kinds = [kind for kind, _ in missing]
    try:
        layers = inputs.layers or fitting(file, settings)
        config, size = prepare(load_command_line(str(file), settings + [f"--model.layers={layers}"]))
    except FitError as error:
        sys.exit(explain_misfit(error, kinds))
    if "lost-node" in kinds and not config.resilience.spares:
        sys.exit("--kind lost-node needs a spare node: set --resilience.spares=1, or use --kind node")
    estimate = estimate_first_kill(checkpoint_bytes(config) / size.world, missing[0][0], inputs.steps, record["starts"])
    print(f"estimate until the end of the first recovery: {describe_parts(estimate)}", flush=True)
    if inputs.seconds < sum(estimate.values()):
        print(f"--seconds={inputs.seconds:g} is too short; call with --seconds={math.ceil(sum(estimate.values()))}")
        return
    has_spare = config.resilience.spares > 0 and config.resilience.prepare_spares
    record |= {"date": date.today().isoformat(), "machine": machine(), "layers": layers}

    def keep() -> None:
        inputs.out.parent.mkdir(parents=True, exist_ok=True)
        inputs.out.write_text(json.dumps(record, indent=1) + "\n")

    begun, injected = time.time(), []
    job = Launched(file, "recovery", settings + [f"--model.layers={layers}"], pace=0)
    sums = Sums(job.run)
    try:
        with Stacks(job.run) as stacks:
            first = job.first(lambda e: e.kind == "first_step", deadline - ENDING - time.monotonic())
        if first is None and time.monotonic() > deadline - ENDING:
            print("out of time before the first step; call again with more --seconds", flush=True)
            return
        if first is None:
            sys.exit("no first step:\n" + end_of(job))
        record["starts"].append(first.time - begun)
        record["start_stacks"] = stacks.since(begun)
        keep()
        print(f"{layers} layers, launch to first step {first.time - begun:.1f} s", flush=True)
        while not has_snapshot(job) and not job.over() and time.monotonic() < deadline - ENDING:
            time.sleep(0.05)
        copied = next((e["time"] for e in job.trainer_events() if e["event"] == "first_snapshot"), None)
        record.setdefault("snapshots", []).append(copied and copied - begun)
        if copied is None:
            reason = "the job has ended" if job.over() else "out of time"
            print(f"{reason} before the first snapshot in memory; call again with more --seconds", flush=True)
        else:
            print(f"first snapshot in memory {copied - begun:.1f} s after launch", flush=True)
            await_preparation(job, deadline - ENDING - FIRST_KILL, begun, has_spare=has_spare)
        keep()
        for kind, number in missing:
            durations = [row["total"] for row in record["kills"] if row["total"]]
            obstacle = find_time_obstacle(deadline - ENDING - time.monotonic(), durations)
            if obstacle:
                print(f"no kill of {kind} {number + 1}: {obstacle}", flush=True)
                return
            kills = len(injected)
            row = kill(job, kind, deadline - ENDING, injected, steps=inputs.steps)
            if row is None and len(injected) == kills:
                reason = "the job has ended"
                if not job.over():
                    reason = f"out of time before {inputs.steps} more steps and a snapshot"
                print(f"no kill of {kind} {number + 1}: {reason}", flush=True)
                return
            if row is None:
                print(f"{kind} {number + 1}: out of time before the recovery ended", flush=True)
                explain_standstill(job, injected[-1], inputs.logs)
                return
            rows = [item for item in record["kills"] if (item["kind"], item["number"]) != (kind, number)]
            record["kills"] = rows + [{"kind": kind, "number": number, "layers": layers, **row}]
            keep()
            print(f"{kind} {number + 1}: {describe(row)}", flush=True)
            if not row["total"]:
                explain_standstill(job, injected[-1], inputs.logs)
                return
    finally:
        sums.end()
        before, peers = record.get("weights", (0, []))
        record["weights"] = (before + sums.compared, peers + sums.foreign)
        record.setdefault("unasked", []).extend(result := unasked(job, injected))
        record.setdefault("events", []).append(
            [
                f"{e.time - begun:.2f} s {e.kind} of attempt {e.attempt}: {'; '.join(e.evidence)[:200]}"
                for e in job.events()
            ]
        )
        if result:
            record["logs"] = {str(p.relative_to(job.run)): last_lines(p) for p in sorted(job.run.rglob("*.log"))}
        try:
            keep()
        finally:
            finish(job)
            if inputs.logs:
                collect_logs(job, inputs.logs)


def explain_misfit(error: FitError, kinds: Sequence[str]) -> str:
    """Return why no job of these kinds of kill can start, as a line with the alternative."""
    text = " ".join(str(error).split())
    if "lost-node" in kinds:
        text += "; --kind node needs no spare and no GPUs for it (omit --resilience.spares)"
    return text


def estimate_first_kill(state_bytes: float, kind: str, steps: int, starts: list[float]) -> dict[str, float]:
    """Return the seconds of a call that ends after its first kill, by part.

    Args:
        state_bytes: bytes of a rank's snapshot.
        kind: a key of KINDS.
        steps: steps before the kill.
        starts: seconds from launch to the first step in earlier calls.
    """
    preparation = state_bytes / SNAPSHOT_RATE
    if kind == "lost-node":
        preparation = max(preparation, SPARE_SECONDS)
    return {
        "start": max(starts, default=START_SECONDS),
        "memory for snapshots and spare": preparation,
        "steps": steps * STEP_SECONDS,
        "recovery": FIRST_KILL,
        "end": ENDING,
    }


def describe_parts(seconds: dict[str, float]) -> str:
    """Return a sum and its parts as text."""
    parts = ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())
    return f"{sum(seconds.values()):.0f} s ({parts})"


def await_preparation(job: Launched, deadline: float, begun: float, *, has_spare: bool) -> None:
    """Wait until all memory for snapshots is prepared, and with a spare until its processes wait. Print the times.

    A kill before that measures a job that has just started: it loses more steps, or its spare has no process.

    Args:
        begun: time of the launch.
        has_spare: whether a spare prepares processes.
    """
    events = {"all memory for snapshots prepared": job.has_memory}
    if has_spare:
        events["processes of a spare prepared"] = lambda: job.count_waiting_processes() > 0
    while events and not job.over() and time.monotonic() < deadline:
        for name, has_happened in list(events.items()):
            if has_happened():
                del events[name]
                print(f"{name} {time.time() - begun:.1f} s after launch", flush=True)
        time.sleep(0.05)
    for name in events:
        print(f"not before the kill: {name}", flush=True)
    for rank, lines in job.read_memory().items():
        for line in lines:
            print(f"  rank {rank}: memory {line}", flush=True)


def find_time_obstacle(seconds: float, durations: list[float]) -> str:
    """Return why another kill and its recovery do not fit into `seconds`, "" if they do.

    Args:
        durations: seconds of the recoveries that were measured.
    """
    needed = 1.3 * max(durations) if durations else FIRST_KILL
    if seconds >= needed:
        return ""
    return f"{seconds:.0f} s remain before the job's end begins, and {needed:.0f} s are needed"


def describe(row: dict[str, Any]) -> str:
    """Return one recovery as a line: seconds by phase, what stayed, and what stood in the way."""
    if not row["waterfall"]:
        return str(row.get("failed", "no event `recovered`"))
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["waterfall"].items())
    text = f"{phases}; {row['lost']} steps lost; kept {format_numbers(tuple(row['kept'])) or 'none'}"
    text += f", in place {format_numbers(tuple(row['standing'])) or 'none'}"
    text += f"; from {row['loaded_from']}, {row['load_seconds']} s"
    if row.get("steps"):
        text += f"; steps took {', '.join(f'{seconds:.2f}' for seconds in row['steps'])} s before"
    for rank, reason in row["doubts"].items():
        text += f"; DOUBT rank {rank}: {reason}"
    for rank, line in row.get("ready", {}).items():
        text += f"\n  rank {rank}: ready {line}"
    for rank, line in row.get("first_steps", {}).items():
        text += f"\n  rank {rank}: first step complete {line}"
    return text


def explain_standstill(job: Launched, since: float, logs: Path | None) -> None:
    """Print what the driver and each rank have done since a kill after which no step came."""
    from megascale.errors import DataError
    from megascale.observe.hang.evidence import collect_evidence

    lines = [
        f"{e.time - since:.2f} s {e.kind}: {'; '.join(e.evidence)[:200]}" for e in job.events() if e.time >= since - 5
    ]
    for file in sorted((job.run / "status").glob("rank-*.status")):
        status = read_status(file)
        if status is not None:
            lines.append(
                f"{file.stem}: process {status.pid}, {status.phase}, step {status.step} {status.message[:200]}"
            )
    with contextlib.suppress(OSError, DataError):
        for rank, evidence in sorted(collect_evidence(job.run, watch_seconds=0).ranks.items()):
            lines.append(f"rank {rank} is in {' < '.join(evidence.stack[:8])}")
    for file in sorted((job.run / "logs").glob("rank-*.log")):
        lines += [f"{file.name}: {line[:200]}" for line in last_lines(file)[-6:]]
    print("no step:", *lines, sep="\n  ", flush=True)
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "standstill.txt").write_text("\n".join(lines) + "\n")


def collect_logs(job: Launched, folder: Path) -> None:
    """Copy the ends of the job's logs and the driver's events, at most 64 KB each."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(job.run.rglob("*.log")) + [job.output, job.run / "events.jsonl"]:
        with contextlib.suppress(OSError):
            name = file.name if file == job.output else "-".join(file.relative_to(job.run).parts)
            (folder / name).write_bytes(file.read_bytes()[-65536:])
    with contextlib.suppress(OSError):
        lines = [f"{e.time:.2f} {e.kind} of attempt {e.attempt}: {'; '.join(e.evidence)[:300]}" for e in job.events()]
        (folder / "driver-events.txt").write_text("\n".join(lines)[-65536:] + "\n")


def unasked(job: Launched, injected: list[float]) -> list[str]:
    """Return the driver's unexpected verdicts and actions between a kill and the next first step."""
    events = job.events()
    steps = [e.time for e in events if e.kind == "first_step"]
    spans = [(begin, next((end for end in steps if end > begin), float("inf"))) for begin in injected]
    return [
        f"{e.kind} of attempt {e.attempt}: {'; '.join(e.evidence)[:300]}"
        for e in events
        if e.action in ("recover", "diagnose", "stop") and not any(a <= e.time <= b for a, b in spans)
    ]


def kill(job: Launched, kind: str, deadline: float, kills: list[float], *, steps: int) -> dict[str, Any] | None:
    """Kill a rank or node after `steps` more steps and a snapshot. Return the seconds by phase, None out of time.

    The time of the kill is added to `kills`.
    """
    from megascale.resilience.agent.node_folder import end_checkpoint_services
    from megascale.resilience.faults.inject import Options, inject

    before = job.step()
    while job.step() < before + steps or not has_snapshot(job):
        if time.monotonic() > deadline or job.over():
            return None
        time.sleep(0.02)
    events = job.events()
    ranks = sorted(int(path.stem.partition("-")[2]) for path in (job.run / "status").glob("rank-*.calls"))
    node = next(e for e in reversed(events) if e.kind == "attempt_started").nodes[-1]
    step_seconds = list_step_seconds(job)
    complete_step = read_steps(job)[-1]["step"]
    first_steps = job.read_first_steps()
    with Steps(job) as watched_steps, Stacks(job.run) as stacks:
        injected = time.time()
        kills.append(injected)
        if kind == "rank":
            inject(job.run, KINDS[kind], Options(rank=ranks[-1]))
        else:
            inject(job.run, KINDS[kind], Options(node=node))
        if kind == "node":
            end_checkpoint_services(job.run, node)
        after, verdicts = events[-1].id, CASES[KINDS[kind]].verdicts

        def first(kinds: tuple[str, ...]) -> Any:
            limit = min(injected + LIMIT - time.time(), deadline - time.monotonic())
            return job.first(lambda e: e.kind in kinds and e.id > after, limit)

        repeated = first(("first_step",))
        if repeated is None and time.monotonic() > deadline:
            return None
        verdict = first(verdicts)
        recovered = first(("recovered",)) if repeated else None
    row: dict[str, Any] = dict(phases(job, injected, verdict, repeated, watched_steps))
    fresh = [e for e in job.events() if e.id > after]
    row |= {
        "verdict": verdict.kind if verdict else None,
        "target": node if kind != "rank" else f"rank {ranks[-1]}",
    }
    row |= make_waterfall(injected, verdict, recovered)
    row["step_seconds"] = statistics.median(step_seconds) if step_seconds else None
    row["steps"] = step_seconds
    row["actions"] = [e.action for e in fresh if e.kind == "recovery_action"]
    row["ready"] = job.read_starts()
    row["first_steps"] = await_first_steps(job, first_steps, deadline)
    resumed = next((e for e in reversed(job.trainer_events()) if e["event"] == "resumed"), {})
    row |= {key: resumed.get(key) for key in ("loaded_from", "load_seconds", "read_bytes", "sent_bytes")}
    if "lost" in row:
        row["lost"] = count_lost_steps(row["lost"], complete_step, resumed.get("step"))
    row["stacks"] = stacks.since(injected)
    row["events"] = [f"{e.time - injected:.2f} s {e.kind}: {'; '.join(e.evidence)[:200]}" for e in fresh]
    if repeated is None:
        row["failed"] = "no new step: " + end_of(job)
    return row


def await_first_steps(job: Launched, earlier: dict[str, list[str]], deadline: float) -> dict[str, str]:
    """Return the seconds of the first step by rank, once all ranks have logged them, at most FIRST_STEP_SECONDS later.

    Args:
        earlier: lines of earlier starts, as `Launched.read_first_steps` returns them.
    """
    deadline = min(deadline, time.monotonic() + FIRST_STEP_SECONDS)
    while True:
        lines = job.read_first_steps()
        fresh = {rank: logged[-1] for rank, logged in lines.items() if len(logged) > len(earlier.get(rank, []))}
        if len(fresh) >= len(earlier) or time.monotonic() > deadline or job.over():
            return fresh
        time.sleep(0.02)


def list_step_seconds(job: Launched) -> list[float]:
    """Return the seconds of the last steps, in order. Each waits for the snapshot of an earlier one.

    The first steps also wait until memory for snapshots is cleared, mapped and page-locked.
    """
    times = [record["time"] for record in read_steps(job)][-MEASURED_STEPS - 1 :]
    return [end - start for start, end in pairwise(times)]


def read_steps(job: Launched) -> list[dict[str, Any]]:
    """Return the records of the steps whose results rank 0 has read."""
    records = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record]


def count_lost_steps(reported: int, complete_step: int, resumed_step: int | None) -> int:
    """Return the number of repeated steps.

    Args:
        reported: number by the driver, whose newest heartbeat before the kill may be up to a second old.
        complete_step: last step whose results rank 0 had read at the kill.
        resumed_step: step of the loaded state; None if it is unknown.
    """
    if resumed_step is None:
        return reported
    return max(reported, complete_step - resumed_step)


def make_waterfall(injected: float, verdict: Any, recovered: Any) -> dict[str, Any]:
    """Return the driver's record of a recovery, with the kill as its begin instead of what the driver knew of it."""
    record = RecoveryRecord.from_details(recovered.details) if recovered else None
    if record is None:
        return {"waterfall": {}, "kept": [], "standing": [], "doubts": {}}
    seconds = dict(record.seconds)
    if verdict is not None:
        seconds["detect"] = verdict.time - injected
    seconds["total"] = sum(seconds.values())
    return {
        "waterfall": seconds,
        "kept": record.reused_ranks,
        "standing": record.standing_ranks,
        "doubts": record.doubts,
        "lost": record.lost_steps,
    }


def has_snapshot(job: Launched) -> bool:
    """Return whether the running attempt has a snapshot in memory. A new attempt starts without its own."""
    kinds = [e["event"] for e in job.trainer_events() if e["event"] in ("run_started", "resumed", "first_snapshot")]
    return kinds[-1:] == ["first_snapshot"]


class Stacks:
    """Asks rank 0 twice a second where it is; `seen`: when (seconds since 1970) it was somewhere else than before."""

    def __init__(self, run: Path) -> None:
        self._run, self._end = run, threading.Event()
        self.seen: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Stacks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def since(self, begun: float) -> list[str]:
        """Return the events from then on, with seconds since."""
        return [f"{at - begun:.1f} s {frames}" for at, frames in self.seen if at >= begun]

    def _watch(self) -> None:
        from megascale.errors import DataError
        from megascale.observe.hang.evidence import collect_evidence

        while not self._end.wait(0.5):
            with contextlib.suppress(OSError, DataError):
                stack = collect_evidence(self._run, watch_seconds=0, ranks=frozenset({0})).ranks[0].stack
                frames = " < ".join(stack[:FRAMES])
                if frames and (not self.seen or self.seen[-1][1] != frames):
                    self.seen.append((time.time(), frames))


class Sums:
    """Reads the sums of weights from ranks' status files: a step that is done again must come to the same.

    Attributes:
        compared: how many of another attempt were the same.
        others: those that were not.
    """

    def __init__(self, run: Path) -> None:
        self.compared = 0
        self.foreign: list[str] = []
        self._folder, self._ended = run / "status", threading.Event()
        self._known: dict[tuple[int, str], tuple[int, str]] = {}  # (rank, step) -> in which start, sum
        self._newest: dict[int, tuple[int, int, int]] = {}  # rank -> its process, step, and number of starts
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Read no more."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            for file in self._folder.glob("rank-*.status"):
                status = read_status(file)
                if status is not None and status.checksum:
                    self._take(int(file.stem.partition("-")[2]), status.pid, *status.checksum.split(":"))

    def _take(self, rank: int, process: int, step: str, value: str) -> None:
        last_process, last_step, start = self._newest.get(rank, (process, 0, 0))
        if process != last_process or int(step) < last_step:
            start += 1  # a kept process goes back to an earlier step
        self._newest[rank] = (process, int(step), start)
        earlier_start, expected = self._known.setdefault((rank, step), (start, value))
        if earlier_start == start:
            return
        self._known[rank, step] = (start, value)
        self.compared += value == expected
        if value != expected:
            self.foreign.append(f"rank {rank}, step {step}: {value} where it was {expected}")


def make(folder: Path) -> Path:
    """Tokens and a configuration file."""
    import numpy as np

    from megascale.data.dataset.indexed import IndexedWriter

    rng = np.random.default_rng(0)
    with IndexedWriter(folder / "train", np.uint16) as writer:
        for _ in range(200):
            writer.add_document([rng.integers(0, 256, size=20000)])
    file = folder / "job.toml"
    file.write_text(SETTINGS.format(folder=folder))
    return file


def fitting(file: Path, settings: list[str]) -> int:
    """Half of the model's layers, or the most below that GPUs and memory hold; FitError if none do."""
    from megascale.core.capacity import Capacity
    from megascale.core.preflight import HostShare, check_host

    local = Capacity.measure(gpus=True)
    less = replace(
        local,
        memory=None if local.memory is None else int(HOST * local.memory),
        gpu_memory=None if local.gpu_memory is None else local.gpu_memory - GPU,
    )
    why = ""
    full = load_command_line(str(file), settings).model.layers
    for layers in range(max(1, full // 2), 0, -1):
        try:
            config, size = prepare(load_command_line(str(file), settings + [f"--model.layers={layers}"]))
            nodes = config.resilience.nodes + config.resilience.spares
            share = HostShare(size.world, 0, size.world, nodes, uses_gpus=bool(size.devices))
            check_host(lay_out(config, size.world), share, less)
            return layers
        except FitError as error:
            why = str(error)
    raise FitError(f"not one layer fits: {why}")


def summarise_kill(row: dict[str, Any]) -> dict[str, Any]:
    """Return the waterfall of one recovery with what explains it, as it is printed."""
    names = (
        "kind",
        "number",
        "layers",
        "lost",
        "kept",
        "standing",
        "loaded_from",
        "load_seconds",
        "step_seconds",
        "steps",
    )
    summary = {name: row.get(name) for name in (*names, "ready", "first_steps")}
    return {"waterfall": {name: round(seconds, 3) for name, seconds in row["waterfall"].items()}, **summary}


def machine() -> str:
    """GPUs, torch and Python, as a line."""
    import platform

    import torch

    count = torch.cuda.device_count()
    device = f"{count} x {torch.cuda.get_device_name()}" if count else "CPU"
    return f"{device}, torch {torch.__version__}, Python {platform.python_version()}"


def last_lines(file: Path) -> list[str]:
    """The last of a log."""
    return file.read_text(errors="replace").splitlines()[-60:]


def end_of(job: Launched) -> str:
    """The last lines that the job printed."""
    return "\n".join(job.output.read_text(errors="replace").splitlines()[-40:])


def finish(job: Launched) -> None:
    """End the job and all of its processes at once.

    A graceful end would write tens of gigabytes to a disk on which another job is being measured.
    """
    from megascale.resilience.agent.node_folder import end_checkpoint_services

    job.process.kill()
    job.process.wait()
    job.end_agents()
    for folder in (job.run / "nodes").glob("*"):
        end_checkpoint_services(job.run, folder.name)


def show(record: dict[str, Any]) -> None:
    """The table of kills."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=170)
    heads = ("steps lost", "kept", "standing", "state from", "actions")
    table = Table("seconds of", *COLUMNS, *heads, box=box.SIMPLE_HEAD)
    for row in sorted(record["kills"], key=lambda entry: (entry["kind"], entry["number"])):
        seconds = [f"{row['waterfall'][name]:.2f}" if name in row["waterfall"] else "-" for name in COLUMNS]
        ranks = [format_numbers(tuple(row[name])) or "-" for name in ("kept", "standing")]
        actions = ", ".join(row["actions"])
        table.add_row(
            f"{row['kind']} {row['number'] + 1}", *seconds, str(row["lost"]), *ranks, row["loaded_from"], actions
        )
    starts = ", ".join(f"{item:.1f}" for item in record["starts"])
    details = f"{record['date']}, {record['machine']}, {record['layers']} layers"
    console.print(f"{' '.join(record['settings'])}; {details}; launch to first step {starts} s", soft_wrap=True)
    console.print(table)
    for row in record["kills"]:
        print(json.dumps(summarise_kill(row)))
    for row in record["kills"]:
        for rank, reason in row["doubts"].items():
            console.print(f"{row['kind']} {row['number'] + 1}: rank {rank} was replaced: {reason}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
